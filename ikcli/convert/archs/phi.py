"""Phi-1 to Phi-3.5, Phi-3.5-MoE."""

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


def _phimoe(m: b.Build) -> None:
    c = m.config
    _phi3(m)
    k.experts(m, "num_local_experts", width=False)
    c.ignore("lm_head_bias", "input_jitter_noise")
    c.expect("num_experts_per_tok", 2)
    if m.config.number("router_jitter_noise", default=0.01) != 0.01:
        raise c.refuse("router_jitter_noise", "0.01, which choices among experts depend on")


def _finish_phi3(m: b.Build) -> None:
    k.tied(m)
    k.put_long_rope(m)


ARCHITECTURES = (
    b.Architecture("phi2", ("PhiForCausalLM",), _phi2, finish=k.tied),
    b.Architecture("phi3", ("Phi3ForCausalLM",), _phi3, finish=_finish_phi3),
    b.Architecture("phimoe", ("PhiMoEForCausalLM", "PhimoeForCausalLM"), _phimoe, finish=_finish_phi3),
)
