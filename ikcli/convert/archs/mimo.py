"""MiMo-V2. Its layers for further tokens are dense and have a window."""

from __future__ import annotations

from typing import Any

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.rope import read_rope

MIMO2: b.Table = {
    "layers.*.pre_mlp_layernorm": "blk.*.ffn_norm",
    "layers.*.final_layernorm": "blk.*.layer_output_norm",
}
"""Norms of the layers for further tokens."""


def _mimo2(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m, further=True)
    m.key("attention.layer_norm_rms_epsilon", c.number("layernorm_epsilon", "rms_norm_eps"))
    pattern = c.items("hybrid_layer_pattern")
    kinds: Any = None if pattern is None else ["sliding_attention" if p else "full_attention" for p in pattern]
    is_window = k.windows(m, 4, 0, kinds) + [True] * m.n_further
    m.key("attention.sliding_window", c.integer("sliding_window", "sliding_window_size", least=1))
    m.key("attention.sliding_window_pattern", is_window)
    n_kv = c.integer("num_key_value_heads")
    of_windows = c.integer("swa_num_key_value_heads", default=2 * n_kv)
    m.key("attention.head_count_kv", [of_windows if w else n_kv for w in is_window])
    width, v = c.integer("head_dim", least=1), c.integer("v_head_dim", least=1)
    m.key("attention.key_length", width)
    m.key("attention.value_length", v)
    for key, same in (("swa_head_dim", width), ("swa_v_head_dim", v), ("swa_num_attention_heads", None)):
        c.expect(key, c.integer("num_attention_heads") if same is None else same)
    full, own = read_rope(c), read_rope(c, "sliding_attention")
    if (full.type, own.type, full.partial) != ("default", "default", own.partial):
        raise c.refuse("rope_parameters", "default, with the same partial_rotary_factor in all layers")
    local = c.given("swa_rope_theta")
    m.key("rope.freq_base", full.theta)
    m.key("rope.freq_base_swa", own.theta if local is None else c.number("swa_rope_theta"))
    m.key("rope.dimension_count", int(width * full.partial))
    m.key("attention.value_scale", c.number("attention_value_scale", default=1.0))
    k.experts(m, "n_routed_experts")
    m.key("expert_shared_count", c.integer("n_shared_experts", default=0))
    frequencies = c.items("moe_layer_freq")
    if frequencies is not None:
        lead = frequencies.index(1) if 1 in frequencies else len(frequencies)
        if any(f != 1 for f in frequencies[lead:]):
            raise c.refuse("moe_layer_freq", "0 in the first layers, then 1")
        m.key("leading_dense_block_count", lead)
    else:
        m.key("leading_dense_block_count", k.dense_lead(m))
    m.key("expert_gating_func", 2)
    m.key("expert_weights_norm", c.flag("norm_topk_prob"))
    m.key("expert_weights_scale", c.number("routed_scaling_factor", default=1.0))
    c.expect("scoring_func", "sigmoid")
    c.expect("n_group", 1)
    c.expect("attention_bias", False)
    c.expect("add_full_attention_sink_bias", False)
    c.expect("add_swa_attention_sink_bias", True)
    c.ignore("vocab_size", "topk_group", "topk_method", "attention_chunk_size", "hybrid_block_size")


ARCHITECTURES = (
    b.Architecture(
        "mimo2", ("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"), _mimo2, MIMO2, k.tied,
        harmless=frozenset({"attention_projection_layout"}),
    ),
)  # fmt: skip
