"""Mellum and Maple: experts in every layer, windows in three of four. GroveMoE: experts with further ones in groups."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.rope import put_yarn, read_rope
from ikcli.errors import UnsupportedError


def _mellum(m: b.Build) -> None:
    c = m.config
    k.base(m)
    full, own = read_rope(c), read_rope(c, "sliding_attention")
    m.key("rope.freq_base", full.theta)
    if full.type == "yarn":
        put_yarn(m, full)
    elif full.type != "default":
        raise UnsupportedError(f"{c.path}: rope_type {full.type} is not known for {m.arch}")
    k.experts(m, "num_local_experts", "num_experts")
    c.expect("norm_topk_prob", True)
    is_window = k.windows(m, 4)
    if any(is_window):
        m.key("attention.sliding_window", c.integer("sliding_window", least=1))
        m.key("attention.sliding_window_pattern", is_window)
        m.key("rope.freq_base_swa", own.theta)
    elif "mellum.attention.sliding_window_pattern" in m.metadata:
        del m.metadata["mellum.attention.sliding_window_pattern"]
        c.ignore("sliding_window")
    if set(c.items("mlp_layer_types") or ["sparse"]) != {"sparse"}:
        raise c.refuse("mlp_layer_types", "sparse in all layers")
    c.expect("decoder_sparse_step", 1)
    c.ignore("use_sliding_window", "max_window_layers", "mlp_only_layers")


def _maple(m: b.Build) -> None:
    c = m.config
    k.base(m)
    k.experts(m, "num_experts")
    m.key("vocab_size", c.integer("vocab_size", least=1))
    found = read_rope(c)
    if found.type != "default":
        raise UnsupportedError(f"{c.path}: rope_type {found.type} is not known for {m.arch}")
    width = c.integer("head_dim", default=k.embd(m) // c.integer("num_attention_heads", least=1))
    m.key("rope.freq_base", found.theta)
    m.key("rope.dimension_count", int(width * found.partial))
    m.key("attention.sliding_window", c.integer("sliding_window", least=1))
    m.key("attention.sliding_window_pattern", k.windows(m, 4, 0))
    m.key("swiglu_clamp_exp", [_MAPLE_LIMIT] * m.n_layer)
    for key in ("norm_topk_prob", "nope_on_global_attention", "use_qk_norm"):
        c.expect(key, True)
    for key in ("use_bias", "moe_router_enable_expert_bias"):
        c.expect(key, False)
    c.expect("num_shared_experts", 0)
    c.expect("n_group", 1)
    c.ignore("topk_group", "moe_shared_expert_intermediate_size")
    c.expect("first_k_dense_replace", 0)


_MAPLE_LIMIT = 7.0  # of gate and up; the checkpoint's code has it, its config.json does not
_HARMLESS = frozenset({"bdlm_block_size", "bdlm_sampling_eps", "mask_token_id", "preaffine", "qat_ternary", "quantize",
                       "training_objective"})  # fmt: skip


def _grove(m: b.Build) -> None:
    c = m.config
    k.base(m)
    k.rope(m)
    k.experts(m, "num_experts", "num_local_experts")
    m.key("expert_chunk_feed_forward_length", _GROVE_WIDTH)
    m.key("experts_per_group", _GROVE_SIZE)
    m.key("expert_group_scale", 0.05)
    k.no_window(m)
    c.expect("norm_topk_prob", True)
    c.expect("decoder_sparse_step", 1)
    if c.items("mlp_only_layers"):
        raise c.refuse("mlp_only_layers", "none")


_GROVE_WIDTH, _GROVE_SIZE = 128, 2  # of the checkpoint's code
GROVE: b.Table = {
    "layers.*.mlp.expert_bias": b.drop,
    "layers.*.mlp.chunk_experts.#.gate_proj": b.expert("blk.*.ffn_gate_chexps"),
    "layers.*.mlp.chunk_experts.#.up_proj": b.expert("blk.*.ffn_up_chexps"),
    "layers.*.mlp.chunk_experts.#.down_proj": b.expert("blk.*.ffn_down_chexps"),
}

ARCHITECTURES = (
    b.Architecture("mellum", ("MellumForCausalLM",), _mellum, finish=k.tied, names="qwen3moe"),
    b.Architecture("maple", ("MapleForCausalLM",), _maple, finish=k.tied, names="qwen3moe", harmless=_HARMLESS),
    b.Architecture("grovemoe", ("GroveMoeForCausalLM",), _grove, GROVE, k.tied),
)
