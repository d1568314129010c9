"""AFMoE (Trinity)."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k


def _afmoe(m: b.Build) -> None:
    c = m.config
    k.base(m)
    k.rope(m)
    m.key("vocab_size", c.integer("vocab_size", least=1))
    c.expect("mup_enabled", True)  # embeddings are scaled by the root of the width
    m.key("attention.sliding_window", c.integer("sliding_window", least=1))
    k.windows(m, c.integer("global_attn_every_n_layers", default=4, least=1), 4)
    m.key("leading_dense_block_count", c.integer("num_dense_layers", default=1))
    k.experts(m, "num_experts")
    shared = c.integer("num_shared_experts", default=0)
    m.key("expert_shared_count", shared)
    m.key("expert_weights_norm", c.flag("route_norm", default=True))
    m.key("expert_weights_scale", c.number("route_scale", default=1.0))
    m.key("expert_gating_func", 2)
    c.expect("score_func", "sigmoid")
    c.expect("n_group", 1, 0)
    c.expect("topk_group", 1, 0)
    c.expect("num_expert_groups", 1, 0)
    c.expect("num_limited_groups", 1, 0)
    c.ignore("global_attn_every_n_layers", "load_balance_coeff", "use_grouped_mm")


AFMOE: b.Table = {
    "layers.*.self_attn.gate_proj": "blk.*.attn_gate",
    "layers.*.post_attention_layernorm": "blk.*.post_attention_norm",
    "layers.*.pre_mlp_layernorm": "blk.*.ffn_norm",
    "layers.*.post_mlp_layernorm": "blk.*.post_ffw_norm",
    "layers.*.mlp.router.gate": "blk.*.ffn_gate_inp",
    "layers.*.mlp.expert_bias": b.to("blk.*.exp_probs_b.bias"),
}

ARCHITECTURES = (b.Architecture("afmoe", ("AfmoeForCausalLM",), _afmoe, AFMOE, k.tied, names="glm4moe"),)
