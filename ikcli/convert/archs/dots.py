"""dots.llm1."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k


def _dots1(m: b.Build) -> None:
    c = m.config
    k.base(m)
    k.rope(m)
    kinds = c.items("layer_types")
    if kinds and set(kinds) != {"full_attention"}:
        raise c.refuse("layer_types", "full_attention in all layers")
    c.ignore("sliding_window")
    m.key("leading_dense_block_count", c.integer("first_k_dense_replace", default=0))
    k.experts(m, "n_routed_experts")
    m.key("expert_shared_count", c.integer("n_shared_experts", default=0))
    m.key("expert_weights_scale", c.number("routed_scaling_factor", default=1.0))
    m.key("expert_weights_norm", c.flag("norm_topk_prob"))
    m.key("expert_gating_func", 2)
    n_group, used = c.integer("n_group", default=1), c.integer("topk_group", default=1)
    if n_group > 1:
        m.key("expert_group_count", n_group)
        m.key("expert_group_used_count", used)
    c.expect("scoring_func", "noaux_tc", "sigmoid")
    c.expect("moe_layer_freq", 1)
    c.ignore("topk_method", "max_window_layers", "use_sliding_window")


ARCHITECTURES = (b.Architecture("dots1", ("Dots1ForCausalLM",), _dots1, finish=k.tied),)
