"""LFM2, dense and with experts: gated short convolutions, and attention in some layers."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k


def _conv(m: b.Build, found: b.Found) -> None:
    """Store the taps without the dimension of 1."""
    m.plain(found, f"blk.{found.block}.shortconv.conv.weight", (found.shape[0], found.shape[-1]))


LFM2: b.Table = {
    "layers.*.conv.conv": _conv,
    "layers.*.operator_norm": "blk.*.attn_norm",
    "layers.*.self_attn.out_proj": "blk.*.attn_output",
    "embedding_norm": "token_embd_norm",
    "layers.*.feed_forward.expert_bias": b.to("blk.*.exp_probs_b.bias"),
    "layers.*.feed_forward.experts.#.w1": b.expert("blk.*.ffn_gate_exps"),
    "layers.*.feed_forward.experts.#.w2": b.expert("blk.*.ffn_down_exps"),
    "layers.*.feed_forward.experts.#.w3": b.expert("blk.*.ffn_up_exps"),
}


def _keys(m: b.Build) -> None:
    """Write the keys of both kinds but the width of dense parts; layers without attention have no key heads."""
    c = m.config
    kinds = c.items("layer_types")
    if kinds is None and (chosen := c.items("full_attn_idxs")) is not None:
        kinds = ["full_attention" if il in chosen else "conv" for il in range(m.n_layer)]
    if kinds is None or len(kinds) != m.n_layer or set(kinds) - {"full_attention", "conv"}:
        raise c.refuse("layer_types", "full_attention or conv for every layer")
    k.sizes(m, n_ff=False)
    heads = c.integer("num_key_value_heads", least=1)
    m.key("attention.head_count_kv", [heads if kind == "full_attention" else 0 for kind in kinds])
    k.rope(m)
    m.key("attention.layer_norm_rms_epsilon", c.number("norm_eps", "block_norm_eps", default=1e-5))
    m.key("vocab_size", c.integer("vocab_size", least=1))
    m.key("shortconv.l_cache", c.integer("conv_L_cache", default=3, least=2))
    c.expect("conv_bias", False)
    c.ignore("full_attn_idxs", "layer_types", "tie_embedding")


def _lfm2(m: b.Build) -> None:
    c = m.config
    _keys(m)
    n_ff = c.integer("block_ff_dim", "intermediate_size", least=1)
    of, factor = c.integer("block_multiple_of", default=256, least=1), c.number("block_ffn_dim_multiplier", default=1.0)
    if c.flag("block_auto_adjust_ff_dim", default=True):
        n_ff = int(factor * int(2 * n_ff / 3))
        n_ff = of * -(-n_ff // of)
    m.key("feed_forward_length", n_ff)
    c.ignore("intermediate_size")


def _lfm2moe(m: b.Build) -> None:
    c = m.config
    _keys(m)
    k.experts(m, "num_experts")
    m.key("feed_forward_length", c.integer("intermediate_size", least=1))
    m.key("leading_dense_block_count", c.integer("num_dense_layers"))
    m.key("expert_gating_func", 2)
    c.expect("norm_topk_prob", True)
    c.expect("routed_scaling_factor", 1.0)
    c.ignore("use_expert_bias")


_HARMLESS = frozenset(
    {
        "block_dim", "block_mlp_init_scale", "block_out_init_scale", "block_use_swiglu", "block_use_xavier_init",
        "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads",
    }
)  # fmt: skip

ARCHITECTURES = (
    b.Architecture(
        "lfm2", ("Lfm2ForCausalLM", "LFM2ForCausalLM"), _lfm2, LFM2, k.tied_by_default, harmless=_HARMLESS
    ),
    b.Architecture("lfm2moe", ("Lfm2MoeForCausalLM",), _lfm2moe, LFM2, k.tied_by_default, harmless=_HARMLESS),
)  # fmt: skip
