"""Granite 3, dense and with experts."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.archs.llama import finish, llama_keys

GRANITE_MOE: b.Table = b.PAIRS | {
    "layers.*.block_sparse_moe.input_linear": b.fused_experts("blk.*.ffn_gate_exps", "blk.*.ffn_up_exps"),
    "layers.*.shared_mlp.input_linear": b.split("blk.*.ffn_gate_shexp", "blk.*.ffn_up_shexp"),
}


def factors(m: b.Build) -> None:
    """Write the factors on embeddings, branches, K*Q and logits."""
    c = m.config
    m.key("attention.scale", c.number("attention_multiplier", default=1.0))
    m.key("embedding_scale", c.number("embedding_multiplier", default=1.0))
    m.key("residual_scale", c.number("residual_multiplier", default=1.0))
    m.key("logit_scale", c.number("logits_scaling", default=1.0))


def _granite(m: b.Build) -> None:
    llama_keys(m)
    factors(m)
    k.biases(m)


def _granitemoe(m: b.Build) -> None:
    _granite(m)
    k.experts(m, "num_local_experts", width=False)
    if m.config.get("shared_intermediate_size"):
        m.key("expert_shared_feed_forward_length", m.config.integer("shared_intermediate_size"))


ARCHITECTURES = (
    b.Architecture("granite", ("GraniteForCausalLM",), _granite, b.PAIRS, finish),
    b.Architecture(
        "granitemoe", ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), _granitemoe, GRANITE_MOE, finish
    ),
)  # fmt: skip
