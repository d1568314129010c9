"""MiniMax-01 (Text-01, M1), M2 and M3."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.config import Config
from ikcli.errors import UnsupportedError

MINIMAX_M3: b.Table = {
    "norm": b.to("output_norm", value=b.plus_one),
    "layers.*.input_layernorm": b.to("blk.*.attn_norm", value=b.plus_one),
    "layers.*.post_attention_layernorm": b.to("blk.*.ffn_norm", value=b.plus_one),
    "layers.*.self_attn.q_norm": b.to("blk.*.attn_q_norm", value=b.plus_one),
    "layers.*.self_attn.k_norm": b.to("blk.*.attn_k_norm", value=b.plus_one),
    "layers.*.self_attn.indexer.q_proj": "blk.*.indexer.q_proj",
    "layers.*.self_attn.indexer.k_proj": "blk.*.indexer.k_proj",
    "layers.*.self_attn.index_q_proj": "blk.*.indexer.q_proj",
    "layers.*.self_attn.index_k_proj": "blk.*.indexer.k_proj",
    "layers.*.self_attn.index_q_norm": b.to("blk.*.indexer.q_norm", value=b.plus_one),
    "layers.*.self_attn.index_k_norm": b.to("blk.*.indexer.k_norm", value=b.plus_one),
    "layers.*.self_attn.indexer.q_norm": b.to("blk.*.indexer.q_norm", value=b.plus_one),
    "layers.*.self_attn.indexer.k_norm": b.to("blk.*.indexer.k_norm", value=b.plus_one),
    "layers.*.mlp.gate_up_proj": b.split("blk.*.ffn_gate", "blk.*.ffn_up"),
    "layers.*.mlp.shared_experts.gate_up_proj": b.split("blk.*.ffn_gate_shexp", "blk.*.ffn_up_shexp"),
}  # fmt: skip


_INDEXER = r"layers\.\d+\.self_attn\.(indexer\.|index_)q_proj"
_INDEXER_KEYS = {
    "head_count": ("index_n_heads", "sparse_num_index_heads"),
    "key_length": ("index_head_dim", "sparse_index_dim"),
    "top_k": ("index_topk_blocks", "sparse_topk_blocks"),
    "block_size": ("index_block_size", "sparse_block_size"),
    "local_blocks": ("index_local_blocks", "sparse_local_block"),
}
"""By key of the file: the name in transformers, and in `sparse_attention_config` of the released checkpoint."""


def _index_number(c: Config, flat: str, nested: str) -> int:
    """Return a number of the indexer."""
    section = c.inner("sparse_attention_config")
    if nested in section:
        value = section[nested]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise c.fail("sparse_attention_config", f"has {nested} {value!r}; it should be a number of at least 1")
        return value
    return c.integer(flat, least=1)


MINIMAX_01: b.Table = {
    "layers.*.self_attn.qkv_proj": "blk.*.attn_qkv",
    "layers.*.self_attn.output_gate": "blk.*.attn_gate",
    "layers.*.self_attn.out_proj": "blk.*.attn_output",
    "layers.*.self_attn.norm": "blk.*.attn_norm_2",
}
_KINDS = ("linear_attention", "full_attention")
_FACTORS = {
    "full_attn_{}_factor": "layernorm_full_attention_{}",
    "linear_attn_{}_factor": "layernorm_linear_attention_{}",
    "mlp_{}_factor": "layernorm_mlp_{}",
}
"""Factors of residuals ("alpha") and of what is added ("beta"), as transformers and published files call them."""


def _minimax_01(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m)
    found = k.rope(m)
    k.rms_eps(m)
    width = k.head_dim(m)
    m.key("rope.dimension_count", c.integer("rotary_dim", default=int(width * found.partial), least=2))
    k.experts(m, "num_local_experts", width=False)
    m.key("vocab_size", c.integer("vocab_size", least=1))
    _linear_layers(m)
    factors = {which: [c.number(*(name.format(which) for name in names), default=1.0) for names in _FACTORS.items()]
               for which in ("alpha", "beta")}  # fmt: skip
    if len(set(factors["alpha"])) > 1 or set(factors["beta"]) != {1.0}:
        raise UnsupportedError(
            f"{c.path}: factors of residuals are {factors['alpha']} (alpha) and {factors['beta']} (beta); known are an "
            "equal alpha in all parts, and a beta of 1"
        )
    m.key("residual_scale", factors["alpha"][0])
    if not c.flag("postnorm", default=c.model_type == "minimax"):
        raise c.refuse("postnorm", "true")
    c.expect("shared_intermediate_size", 0)
    c.ignore("block_size", "shared_moe_mode")  # tokens at once; of experts that the model lacks
    c.expect("sliding_window")


def _linear_layers(m: b.Build) -> None:
    """Write which layers have linear attention, unless they are all but every eighth."""
    c = m.config
    kinds, numbers = c.items("layer_types"), c.items("attn_type_list")
    if kinds is None and numbers is not None:
        kinds = [_KINDS[n] if n in (0, 1) else n for n in numbers]
    if kinds is None:  # as transformers has it
        kinds = [_KINDS[(il + 1) % 2] for il in range(m.n_layer)]
    if len(kinds) != m.n_layer or set(kinds) - set(_KINDS):
        raise c.refuse("layer_types" if numbers is None else "attn_type_list", "one of two kinds for every layer")
    linear = [kind == _KINDS[0] for kind in kinds]
    if linear != [(il + 1) % 8 != 0 for il in range(m.n_layer)]:
        m.key("attention.recurrent_layers", linear)


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
    if (freq := c.items("moe_layer_freq")) is not None and c.items("mlp_layer_types") is None:
        c.values["mlp_layer_types"] = ["sparse" if x else "dense" for x in freq]
    m.key("leading_dense_block_count", k.dense_lead(m))
    m.key("expert_weights_scale", c.number("routed_scaling_factor", default=1.0))
    m.key("expert_weights_norm", True)
    m.key("expert_gating_func", 2)
    c.expect("swiglu_limit", 7.0)
    c.expect("swiglu_alpha", 1.702)
    c.ignore("vocab_size", "layer_types", "sparse_attention_config")
    if m.has(_INDEXER):
        for key, names in _INDEXER_KEYS.items():
            m.key(f"attention.indexer.{key}", _index_number(c, *names))
    else:
        c.ignore(*(names[0] for names in _INDEXER_KEYS.values()))
        m.notes.append("the checkpoint has no indexer: attention will cover all positions")


_M3_CLASSES = (
    "MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3VLForCausalLM",
    "MiniMaxM3VLForConditionalGeneration",
)  # fmt: skip

ARCHITECTURES = (
    b.Architecture(
        "minimax-01", ("MiniMaxForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"), _minimax_01,
        MINIMAX_01, k.tied, r"self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)$", names="minimax-m2",
    ),
    b.Architecture(
        "minimax-m2", ("MiniMaxM2ForCausalLM",), _minimax_m2, {}, k.tied, r"\.mtp|^mtp",
        frozenset({
            "use_mtp", "num_mtp_modules", "mtp_transformer_layers", "layernorm_full_attention_beta",
            "layernorm_linear_attention_beta", "layernorm_mlp_beta", "mlp_intermediate_size", "shared_moe_mode",
        }),
    ),
    b.Architecture(
        "minimax-m3", _M3_CLASSES, _minimax_m3, MINIMAX_M3,
        k.tied, r"vision|multi_modal_projector|patch_merge_mlp", names="glm4moe",
    ),
)  # fmt: skip
