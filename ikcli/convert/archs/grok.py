"""Grok 1."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k

GROK: b.Table = {
    # names of later checkpoints, which gguf lacks
    "norm.scale": b.to("output_norm.weight"),
    "layers.*.pre_attn_norm.scale": b.to("blk.*.attn_norm.weight"),
    "layers.*.post_attn_norm.scale": b.to("blk.*.attn_output_norm.weight"),
    "layers.*.pre_moe_norm.scale": b.to("blk.*.ffn_norm.weight"),
    "layers.*.post_moe_norm.scale": b.to("blk.*.layer_output_norm.weight"),
    "layers.*.attn.q_proj": "blk.*.attn_q",
    "layers.*.attn.k_proj": "blk.*.attn_k",
    "layers.*.attn.v_proj": "blk.*.attn_v",
    "layers.*.attn.o_proj": "blk.*.attn_output",
    "layers.*.moe_block.gate": "blk.*.ffn_gate_inp",
    "layers.*.moe_block.experts.#.linear": b.expert("blk.*.ffn_gate_exps"),
    "layers.*.moe_block.experts.#.linear_v": b.expert("blk.*.ffn_up_exps"),
    "layers.*.moe_block.experts.#.linear_1": b.expert("blk.*.ffn_down_exps"),
}


def _grok(m: b.Build) -> None:
    """Write the keys. Expert weights stay unnormalised: the following norm cancels their scale up to its epsilon."""
    c = m.config
    k.activation(m, *k.GELU_TANH)
    k.sizes(m)
    k.rms_eps(m)
    k.rope(m)
    k.experts(m, "num_local_experts", "num_experts", width=False)
    m.key("expert_weights_norm", False)
    width = c.integer("hidden_size") // c.integer("num_attention_heads")
    m.key("attn_logit_softcapping", c.number("max_attn_value", "attn_logit_softcapping", default=30.0))
    m.key("attention.output_scale", c.number("attn_output_multiplier", default=width**-0.5))
    m.key("embedding_scale", c.number("embedding_multiplier_scale"))
    m.key("logit_scale", c.number("output_multiplier_scale"))
    c.ignore("vocab_size")


ARCHITECTURES = (
    b.Architecture(
        "grok", ("GrokForCausalLM", "Grok1ModelForCausalLM"), _grok, GROK, k.tied_by_default, strip="transformer."
    ),
)  # fmt: skip
