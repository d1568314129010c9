"""Nemotron, and Jais 2, which has its layers."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k


def _nemotron(m: b.Build) -> None:
    c = m.config
    k.activation(m, "relu2")
    k.sizes(m)
    m.key("vocab_size", c.integer("vocab_size"))
    k.layer_eps(m)
    width = c.integer("head_dim", default=k.head_width(m))
    if width != k.head_width(m):
        m.key("attention.key_length", width)
        m.key("attention.value_length", width)
    k.partial_rope(m, width)
    c.ignore("attention_bias", "mlp_bias", "kv_channels")


def _jais2(m: b.Build) -> None:
    k.activation(m, "relu2")
    k.sizes(m)
    m.key("vocab_size", m.config.integer("vocab_size"))
    k.layer_eps(m, 1e-5)
    k.rope(m)
    m.key("rope.dimension_count", k.head_dim(m))
    k.biases(m)


NEMOTRON: b.Table = {
    "norm.weight": b.to("output_norm", value=b.plus_one),
    "layers.*.input_layernorm.weight": b.to("blk.*.attn_norm", value=b.plus_one),
    "layers.*.post_attention_layernorm.weight": b.to("blk.*.ffn_norm", value=b.plus_one),
}


ARCHITECTURES = (
    b.Architecture("nemotron", ("NemotronForCausalLM",), _nemotron, NEMOTRON, k.tied),
    b.Architecture("jais2", ("Jais2ForCausalLM",), _jais2, finish=k.tied, names="nemotron"),
)
