"""MiniMax-M2 and M3."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k

MINIMAX_M3: b.Table = {
    "norm": b.to("output_norm", value=b.plus_one),
    "layers.*.input_layernorm": b.to("blk.*.attn_norm", value=b.plus_one),
    "layers.*.post_attention_layernorm": b.to("blk.*.ffn_norm", value=b.plus_one),
    "layers.*.self_attn.q_norm": b.to("blk.*.attn_q_norm", value=b.plus_one),
    "layers.*.self_attn.k_norm": b.to("blk.*.attn_k_norm", value=b.plus_one),
    "layers.*.mlp.gate_up_proj": b.split("blk.*.ffn_gate", "blk.*.ffn_up"),
    "layers.*.mlp.shared_experts.gate_up_proj": b.split("blk.*.ffn_gate_shexp", "blk.*.ffn_up_shexp"),
}  # fmt: skip


def _minimax_m2(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m)
    partial = k.rope(m).partial
    k.rms_eps(m)
    k.experts(m, "num_local_experts", width=False)
    c.expect("scoring_func", "sigmoid")
    m.key("expert_gating_func", 2)
    width = k.head_dim(m)
    m.key("expert_feed_forward_length", c.integer("intermediate_size"))
    m.key("rope.dimension_count", c.integer("rotary_dim", default=int(width * partial), least=2))
    c.expect("use_qk_norm", True)
    c.expect("qk_norm_type", "per_layer")
    c.expect("use_routing_bias", True)
    c.expect("shared_intermediate_size", 0)
    c.ignore("vocab_size", "attn_type_list")
    if any(kind != 1 for kind in c.items("attn_type_list") or ()):
        raise c.refuse("attn_type_list", "1 in all layers")


def _minimax_m3(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU, "swigluoai")
    k.sizes(m, n_ff=False)
    m.key("feed_forward_length", c.integer("dense_intermediate_size", least=1))
    found = k.rope(m)
    k.rms_eps(m)
    n_rot = int(k.head_dim(m) * found.partial)
    if "partial_rotary_factor" in found.values:
        c.expect("rotary_dim", n_rot)
    m.key("rope.dimension_count", n_rot if "partial_rotary_factor" in found.values else c.integer("rotary_dim"))
    k.experts(m, "num_local_experts", width=False)
    m.key("expert_feed_forward_length", c.integer("intermediate_size"))
    shared = c.integer("shared_intermediate_size")
    m.key("expert_shared_count", c.integer("n_shared_experts", default=1))
    m.key("expert_shared_feed_forward_length", shared)
    m.key("leading_dense_block_count", k.dense_lead(m))
    m.key("expert_weights_scale", c.number("routed_scaling_factor", default=1.0))
    m.key("expert_weights_norm", True)
    m.key("expert_gating_func", 2)
    c.expect("swiglu_limit", 7.0)
    c.expect("swiglu_alpha", 1.702)
    c.ignore("vocab_size", "layer_types", "index_block_size", "index_head_dim", "index_local_blocks", "index_n_heads")
    c.ignore("index_topk_blocks")
    if m.has("index"):
        m.notes.append("attention of minimax-m3 covers all positions; the indexer is left out")


ARCHITECTURES = (
    b.Architecture(
        "minimax-m2", ("MiniMaxM2ForCausalLM",), _minimax_m2, {}, k.tied, r"\.mtp|^mtp",
        frozenset({
            "use_mtp", "num_mtp_modules", "mtp_transformer_layers", "layernorm_full_attention_beta",
            "layernorm_linear_attention_beta", "layernorm_mlp_beta", "mlp_intermediate_size", "shared_moe_mode",
        }),
    ),
    b.Architecture(
        "minimax-m3", ("MiniMaxM3VLForCausalLM", "MiniMaxM3VLForConditionalGeneration"), _minimax_m3, MINIMAX_M3,
        k.tied, r"vision|multi_modal_projector|indexer|\.index_", names="glm4moe",
    ),
)  # fmt: skip
