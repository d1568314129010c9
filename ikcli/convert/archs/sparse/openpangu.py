"""openPangu 2.0 (Flash, Pro): latent attention with learned rows, convolutions, an indexer; streams of a residual."""

from __future__ import annotations

from dataclasses import replace

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.archs.deepseek import split_kv_b


def _taps(m: b.Build, found: b.Found) -> None:
    """Add the taps of a convolution as a matrix, (taps, columns)."""
    site = found.name.removesuffix(".weight").rpartition(".")[2]
    m.plain(found, f"blk.{found.block}.attn_{site}.weight", (found.shape[0], found.shape[-1]))


def _split_kv_b(m: b.Build, found: b.Found) -> None:
    """Split rows of heads into keys and values, which ik_llama.cpp expects as matrices for this architecture."""
    split_kv_b(m, found)
    for part in ("k_b", "v_b"):
        name = f"blk.{found.block}.attn_{part}.weight"
        width, rows, heads = m.tensors[name].shape
        m.tensors[name] = replace(m.tensors[name], shape=(width, rows * heads))


OPENPANGU: b.Table = {
    "layers.*.post_attention_layernorm": "blk.*.post_attention_norm",
    "layers.*.pre_mlp_layernorm": "blk.*.ffn_norm",
    "layers.*.post_mlp_layernorm": "blk.*.post_ffw_norm",
    "layers.*.block_post_layernorm": "blk.*.block_post_norm",
    "layers.*.mlp.e_score_correction": "blk.*.exp_probs_b",
    "layers.*.mlp.gate.e_score_correction": "blk.*.exp_probs_b",
    "layers.*.self_attn.kv_b_proj": _split_kv_b,
    **{f"layers.*.self_attn.{site}_conv": _taps for site in ("qa", "compresskv", "o")},
    "layers.*.self_attn.param_sink_compressed_kv": b.to("blk.*.attn_param_sink_kv!"),
    "layers.*.self_attn.param_sink_k_pe": b.to("blk.*.attn_param_sink_k_pe!"),
    "layers.*.self_attn.indexer.wq_b": "blk.*.attn_indexer_q_b",
    "layers.*.self_attn.indexer.wk": "blk.*.attn_indexer_k",
    "layers.*.self_attn.indexer.k_norm": "blk.*.attn_indexer_k_norm",
    "layers.*.self_attn.indexer.weights_proj": "blk.*.attn_indexer_weights_proj",
    **{f"layers.*.{part}_mhc_module.{old}": f"blk.*.{part}_mhc_{new}"
       for part in ("attn", "mlp")
       for old, new in (("phi", "phi.weight"), ("branch_alpha", "alpha!"), ("branch_beta", "beta!"),
                        ("norm_gamma", "gamma!"))},
    "merge_mhc_module.phi": "merge_mhc_phi.weight",
    "merge_mhc_module.branch_alpha_pre": "merge_mhc_alpha!",
    "merge_mhc_module.branch_beta_pre": "merge_mhc_beta!",
    "merge_mhc_module.norm_gamma": "merge_mhc_gamma!",
}  # fmt: skip


def _openpangu(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m, further=True)
    k.rope(m)
    k.rms_eps(m)
    rotated = c.integer("qk_rope_head_dim", least=2)
    m.key("rope.dimension_count", rotated)
    m.key("vocab_size", c.integer("vocab_size", least=1))
    m.key("attention.q_lora_rank", c.integer("q_lora_rank", least=1))
    m.key("attention.kv_lora_rank", c.integer("kv_lora_rank", least=1))
    m.key("attention.key_length", c.integer("qk_nope_head_dim", least=1) + rotated)
    m.key("attention.value_length", c.integer("v_head_dim", least=1))
    m.key("leading_dense_block_count", k.dense_lead(m))
    k.experts(m, "n_routed_experts")
    m.key("expert_shared_count", c.integer("n_shared_experts", least=1))
    m.key("expert_weights_scale", c.number("routed_scaling_factor", default=1.0))
    m.key("expert_weights_norm", c.flag("norm_topk_prob"))
    m.key("expert_gating_func", 2)
    k.indexer(m)
    m.key("mhc_num_stream", c.integer("mhc_num_stream", least=1))
    m.key("mhc_recur_norm", c.integer("mhc_recur_norm", least=1))
    m.key("param_sink_number", c.integer("param_sink_number", least=1))
    _windows(m)
    for key in ("use_mhc", "mhc_use_gamma", "use_mome", "sandwich_norm", "router_enable_expert_bias"):
        c.expect(key, True)
    c.expect("param_sink_with_value", True)
    c.expect("router_sliding_window", 3)
    c.expect("rope_interleave", False)
    c.expect("attention_bias", False)
    c.expect("scoring_func", "sigmoid")
    # Tensors and the other keys say the same.
    c.ignore("dsa_layers", "block_post_layernorm_idx", "layer_types", "head_dim", "qk_head_dim", "use_mla")


def _windows(m: b.Build) -> None:
    """Write the layers with windows and their windows, those of layers for further tokens included."""
    c = m.config
    layers, sizes, size = c.items("swa_layers") or [], c.get("sliding_window_list"), c.get("sliding_window")
    if isinstance(size, list):  # as transformers has it
        sizes, size = sizes or size, None
    if size is not None:
        m.key("attention.sliding_window", c.integer("sliding_window"))
    if sizes is None:
        sizes = [c.integer("sliding_window") for _ in layers]
    if not isinstance(sizes, list) or len(sizes) != len(layers):
        raise c.fail("sliding_window_list", f"should have a window for each of the {len(layers)} layers of swa_layers")
    kept = [(il, n) for il, n in zip(layers, sizes, strict=True) if il < m.n_layer + m.n_further]
    if any(isinstance(x, bool) or not isinstance(x, int) or x < 0 for pair in kept for x in pair):
        raise c.fail("swa_layers", "and sliding_window_list should be numbers of layers and of positions")
    if kept:
        m.key("swa_layers", [il for il, _ in kept])
        m.key("sliding_window_list", [n for _, n in kept])


ARCHITECTURES = (
    b.Architecture("openpangu", ("OpenPanguV2ForCausalLM",), _openpangu, OPENPANGU, k.tied, names="deepseek2"),
)
