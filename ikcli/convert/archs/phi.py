"""Phi-1 to Phi-3."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.rope import read_rope


def _phi2(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.GELU_TANH)
    k.sizes(m)
    k.partial_rope(m, k.head_width(m))
    k.layer_eps(m)
    c.expect("qk_layernorm", False)
    c.ignore("vocab_size")


def _phi3(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m)
    k.rms_eps(m)
    found = read_rope(c)
    m.key("rope.freq_base", found.theta)
    width = c.integer("hidden_size") // c.integer("num_attention_heads")
    m.key("rope.dimension_count", int(found.partial * width))
    m.key("attention.sliding_window", c.integer("sliding_window", default=0))
    k.long_rope(m, found)
    k.biases(m)


def _finish_phi3(m: b.Build) -> None:
    k.tied(m)
    k.put_long_rope(m)


ARCHITECTURES = (
    b.Architecture("phi2", ("PhiForCausalLM",), _phi2, finish=k.tied),
    b.Architecture("phi3", ("Phi3ForCausalLM",), _phi3, finish=_finish_phi3),
)
