"""DeepSeek V4 and V4-Flash, under the names of the released checkpoint and those that transformers saves."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.rope import put_rope, read_rope

_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}

DEEPSEEK4: b.Table = {
    "embed": "token_embd",
    "head": "output",
    **{name: f"output_{part}.weight" for part in ("hc_fn", "hc_base", "hc_scale")
       for name in (f"hc_head.{part}", f"hc_head_{part.removeprefix('hc_')}")},
    **{f"layers.*.hc_{which}_{part}": f"blk.*.hc_{which}_{part}.weight"
       for which in ("attn", "ffn") for part in ("fn", "base", "scale")},
    "layers.*.attn_norm": "blk.*.attn_norm",
    "layers.*.ffn_norm": "blk.*.ffn_norm",
    "layers.*.attn.attn_sink": "blk.*.attn_sinks.weight",
    "layers.*.attn.wq_a": "blk.*.attn_q_a",
    "layers.*.attn.q_norm": "blk.*.attn_q_a_norm",
    "layers.*.attn.wq_b": "blk.*.attn_q_b",
    "layers.*.attn.wkv": "blk.*.attn_kv",
    "layers.*.attn.kv_norm": "blk.*.attn_kv_a_norm",
    "layers.*.attn.norm": "blk.*.attn_kv_a_norm",
    "layers.*.attn.wo_a": "blk.*.attn_output_a",
    "layers.*.attn.wo_b": "blk.*.attn_output_b",
    "layers.*.attn.indexer.wq_b": "blk.*.indexer.attn_q_b",
    "layers.*.attn.indexer.weights_proj": "blk.*.indexer.proj",
    **{f"layers.*.attn.{old}compressor.{part}": f"blk.*.{new}_compressor_{name}"
       for old, new in (("", "attn"), ("indexer.", "indexer"))
       for part, name in (("wkv", "kv"), ("wgate", "gate"), ("norm", "norm"), ("ape", "ape.weight"))},
    "layers.*.ffn.gate": "blk.*.ffn_gate_inp",
    "layers.*.ffn.gate.bias": "blk.*.exp_probs_b.bias",
    "layers.*.ffn.gate.tid2eid": "blk.*.ffn_gate_tid2eid.weight",
    "layers.*.ffn.experts.#.w1": b.expert("blk.*.ffn_gate_exps"),
    "layers.*.ffn.experts.#.w2": b.expert("blk.*.ffn_down_exps"),
    "layers.*.ffn.experts.#.w3": b.expert("blk.*.ffn_up_exps"),
    "layers.*.ffn.shared_experts.w1": "blk.*.ffn_gate_shexp",
    "layers.*.ffn.shared_experts.w2": "blk.*.ffn_down_shexp",
    "layers.*.ffn.shared_experts.w3": "blk.*.ffn_up_shexp",
}  # fmt: skip


def _ratios(m: b.Build) -> list[int]:
    """Return how many positions become one entry in every layer."""
    c = m.config
    given, kinds, rates = c.items("compress_ratios"), c.items("layer_types"), c.inner("compress_rates")
    if kinds is None and given is not None:
        found = given
    elif kinds is not None and set(kinds) <= set(_RATIOS):
        known = _RATIOS | rates
        found = [known[kind] for kind in kinds]
    else:
        raise c.fail("layer_types", f"should name one of {', '.join(_RATIOS)} for each layer")
    if len(found) < m.n_layer or not all(isinstance(x, int) and x >= 0 for x in found):
        raise c.fail("compress_ratios", "should have a number of positions for each layer")
    chosen = rates.get("compressed_sparse_attention", 4)
    if chosen != 4:
        raise c.fail("compress_rates", f"has entries of {chosen} positions, of which an indexer chooses; known is 4")
    return found[: m.n_layer]


def _deepseek4(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m, n_ff=False)
    main, entries = read_rope(c, "main"), read_rope(c, "compress")
    put_rope(m, entries)
    theta = c.number("rope_theta", default=main.theta)
    m.key("rope.freq_base", theta)
    m.key("attention.compress_rope_freq_base", c.number("compress_rope_theta", default=entries.theta))
    if entries.number("attention_factor", 1.0) != 1 or main.type not in ("default", entries.type):
        raise c.refuse("rope_parameters", "attention_factor 1, and a plain rotation in layers without entries")
    k.rms_eps(m)
    d = k.head_dim(m)
    m.key("rope.dimension_count", c.integer("qk_rope_head_dim", default=int(d * entries.partial), least=2))
    c.ignore("partial_rotary_factor", "vocab_size", "attention_bias", "mlp_bias")
    m.key("attention.q_lora_rank", c.integer("q_lora_rank", least=1))
    m.key("attention.output_lora_rank", c.integer("o_lora_rank", least=1))
    m.key("attention.output_group_count", c.integer("o_groups", least=1))
    m.key("attention.compress_ratios", _ratios(m))
    m.key("attention.sliding_window", c.integer("sliding_window", least=1))
    k.indexer(m)
    m.key("hyper_connection.count", c.integer("hc_mult", least=1))
    m.key("hyper_connection.sinkhorn_iterations", c.integer("hc_sinkhorn_iters", least=1))
    m.key("hyper_connection.epsilon", c.number("hc_eps", default=1e-6))
    k.experts(m, "n_routed_experts")
    m.key("expert_shared_count", c.integer("n_shared_experts", default=1))
    m.key("expert_weights_scale", c.number("routed_scaling_factor", default=1.0))
    m.key("expert_weights_norm", True)
    m.key("expert_gating_func", 4)
    c.expect("scoring_func", "sqrtsoftplus")
    c.expect("norm_topk_prob", True)
    c.expect("topk_method", "noaux_tc")
    kinds = c.items("mlp_layer_types")
    n_hash = kinds.count("hash_moe") if kinds is not None else c.integer("num_hash_layers", default=0)
    if kinds is not None and kinds != ["hash_moe"] * n_hash + ["moe"] * (len(kinds) - n_hash):
        raise c.refuse("mlp_layer_types", "hash_moe in the first layers, then moe")
    m.key("hash_layer_count", min(n_hash, m.n_layer))
    m.key("swiglu_clamp_exp", [c.number("swiglu_limit", default=0.0)] * m.n_layer)


# Heads for further tokens (MTP, DSpark) are left out.
_HARMLESS = frozenset(
    {
        "num_nextn_predict_layers",
        "expert_dtype",
        "router_jitter_noise",
        "router_aux_loss_coef",
        "dspark_block_size",
        "dspark_noise_token_id",
        "dspark_target_layer_ids",
        "dspark_markov_rank",
    }
)

ARCHITECTURES = (
    b.Architecture(
        "deepseek4", ("DeepseekV4ForCausalLM", "DeepseekV4FlashForCausalLM", "DeepseekV4ProForCausalLM"), _deepseek4,
        DEEPSEEK4, k.tied, r"^mtp\.", _HARMLESS, names="deepseek2",
    ),
)  # fmt: skip
