"""Latent attention: DeepSeek V2 to V3.2, Kimi-K2, GLM-4.7-Flash, GLM-5, Mistral 4, MiniCPM 3, PLM; and DeepSeek 1."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.archs.llama import factors
from ikcli.convert.pieces import Matrix, Piece, TensorRows, turn
from ikcli.convert.rope import RopeSettings, read_rope
from ikcli.errors import FormatError

_SEES = r"vision_tower|mm_projector|multi_modal_projector|vision_encoder|patch_merger"


def split_kv_b(m: b.Build, found: b.Found) -> None:
    """Split the rows of each head into keys and values; transpose keys, so that they multiply queries."""
    c = m.config
    split_heads(
        m, found, *(c.integer(key, least=1) for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
    )


def split_heads(m: b.Build, found: b.Found, n_head: int, nope: int, v: int) -> None:
    """Split the rows of heads of these sizes."""
    rows, rank = found.matrix()
    if rows != n_head * (nope + v):
        raise FormatError(f"{m.config.path.parent}: tensor {found.name} has {rows} rows, not {n_head} * ({nope} + {v})")
    keys: list[Piece] = []
    values: list[Piece] = []
    for head in range(n_head):
        first = head * (nope + v)
        keys.append(Matrix(found.name, rank, nope, first, first + nope, turn))
        values.append(TensorRows(found.name, v, rank, first + nope))
    m.add(f"blk.{found.block}.attn_k_b.weight", keys, (nope, rank, n_head))
    m.add(f"blk.{found.block}.attn_v_b.weight", values, (rank, v, n_head))


MLA: b.Table = {"layers.*.self_attn.kv_b_proj": split_kv_b}
MISTRAL4: b.Table = MLA | {
    "layers.*.mlp.experts.gate_up_proj": b.fused_experts("blk.*.ffn_gate_up_exps.weight"),
}


def mla_keys(m: b.Build) -> None:
    """Write ranks and head sizes, of the latent (MQA) form and of the original heads (`_mla`)."""
    c = m.config
    rank, rotated = c.integer("kv_lora_rank", least=1), c.integer("qk_rope_head_dim", least=2)
    if c.get("q_lora_rank") is not None:
        m.key("attention.q_lora_rank", c.integer("q_lora_rank", least=1))
    m.key("attention.kv_lora_rank", rank)
    m.key("attention.head_count_kv", 1)
    m.key("attention.key_length", rank + rotated)
    m.key("attention.value_length", rank)
    m.key("attention.key_length_mla", c.integer("qk_nope_head_dim", least=1) + rotated)
    m.key("attention.value_length_mla", c.integer("v_head_dim", least=1))
    m.key("rope.dimension_count", rotated)
    c.ignore("qk_head_dim", "head_dim", "num_key_value_heads", "vocab_size", "attention_bias")


def scaled_rope(m: b.Build) -> RopeSettings:
    """Write the rotation; with YaRN also the factor on K*Q, which follows from `mscale_all_dim`."""
    found = k.rope(m)
    if found.type == "yarn":
        scale, whole = found.number("mscale", 1.0), found.number("mscale_all_dim", 0.0)
        if whole and scale != whole:
            raise m.config.fail(
                "rope_parameters", f"has mscale {scale} and mscale_all_dim {whole}; known are equal ones"
            )
        if whole:
            m.key("rope.scaling.yarn_log_multiplier", 0.1 * whole)
    return found


def routing(m: b.Build, *, gating: int, first: str = "first_k_dense_replace") -> None:
    """Write the keys of experts: counts, groups, weights and gating function."""
    c = m.config
    m.key("leading_dense_block_count", k.dense_lead(m, first, int(m.config.model_type == "glm4_moe_lite")))
    k.experts(m, "n_routed_experts", "num_experts")
    m.key("expert_shared_count", c.integer("n_shared_experts", "num_shared_experts", default=0))
    m.key("expert_weights_scale", c.number("routed_scaling_factor", default=1.0))
    m.key("expert_weights_norm", c.flag("norm_topk_prob"))
    m.key("expert_gating_func", gating)
    n_group, used = c.integer("n_group", default=1), c.integer("topk_group", default=1)
    if n_group > 1:
        m.key("expert_group_count", n_group)
        m.key("expert_group_used_count", used)
    c.expect("moe_layer_freq", 1)
    c.expect("scoring_func", "sigmoid" if gating == 2 else "softmax")


def _deepseek2(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m, further=True)
    scaled_rope(m)
    k.rms_eps(m)
    mla_keys(m)
    has_bias = m.has(r"e_score_correction_bias$")
    sigmoid = has_bias or c.given("scoring_func") == "sigmoid"
    routing(m, gating=2 if sigmoid else 1)
    c.expect("topk_method", "noaux_tc" if sigmoid else "greedy", "noaux_tc" if sigmoid else "group_limited_greedy")
    m.key("vocab_size", c.integer("vocab_size"))
    c.expect("rope_interleave", True)


def _youtu(m: b.Build) -> None:
    """Write the keys of Youtu: latent attention, dense layers."""
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m)
    scaled_rope(m)
    k.rms_eps(m)
    mla_keys(m)
    m.key("leading_dense_block_count", m.n_layer)
    m.key("vocab_size", c.integer("vocab_size"))
    c.expect("rope_interleave", True)
    c.expect("mlp_bias", False)
    c.ignore("embedding_initializer_range")


def index_owners(m: b.Build) -> list[bool] | None:
    """Return which layers have an indexer of their own; None: all, and the checkpoint does not say."""
    c, n_layer = m.config, m.config.integer("num_hidden_layers", least=1)
    types, pattern, freq = c.items("indexer_types"), c.get("index_topk_pattern"), c.get("index_topk_freq")
    offset = c.integer("index_skip_topk_offset", default=2)
    if types is None and pattern is not None:
        types = [{"F": "full", "S": "shared"}.get(x, x) for x in pattern]
    elif types is None and freq is not None:
        step = c.integer("index_topk_freq", least=1)
        types = ["shared" if max(il - offset + 1, 0) % step else "full" for il in range(n_layer)]
    if types is None:
        return None
    if len(types) < n_layer or not set(types) <= {"full", "shared"}:
        raise c.fail("indexer_types", f"should name one of full and shared for each of {n_layer} layers")
    return [kind == "full" for kind in types[:n_layer]]


def _indexer(m: b.Build) -> None:
    _deepseek2(m)
    c = m.config
    k.indexer(m)
    c.ignore("layer_types")
    c.expect("indexer_rope_interleave", m.arch == "glm-dsa")
    m.key("attention.indexer.types", index_owners(m))


def _mistral4(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m)
    found = scaled_rope(m)
    k.rms_eps(m)
    mla_keys(m)
    routing(m, gating=1)
    c.expect("rope_interleave", True)
    m.key("vocab_size", c.integer("vocab_size"))
    m.key("attention.temperature_scale", found.number("llama_4_scaling_beta", 0.0))
    c.ignore("sliding_window")
    k.no_window(m)


def _head_keys(m: b.Build) -> None:
    """Write ranks and sizes of the original heads, as files of `minicpm3` and `plm` have them."""
    c = m.config
    k.sizes(m)
    k.rms_eps(m)
    rotated = c.integer("qk_rope_head_dim", least=2)
    m.key("attention.kv_lora_rank", c.integer("kv_lora_rank", least=1))
    m.key("attention.key_length", c.integer("qk_nope_head_dim", least=1) + rotated)
    width = k.embd(m) // c.integer("num_attention_heads", least=1)
    m.key("attention.value_length", c.integer("v_head_dim", default=width, least=1))
    m.key("rope.dimension_count", rotated)
    m.key("vocab_size", c.integer("vocab_size", least=1))
    if c.integer("num_key_value_heads", default=c.integer("num_attention_heads")) != c.integer("num_attention_heads"):
        raise c.refuse("num_key_value_heads", "as many as num_attention_heads")
    c.expect("attention_bias", False)
    c.expect("mlp_bias", False)
    c.ignore("head_dim", "qk_head_dim")


def _minicpm3(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    _head_keys(m)
    found = read_rope(c)
    m.key("rope.freq_base", found.theta)
    k.long_rope(m, found)
    if c.get("q_lora_rank") is not None:
        m.key("attention.q_lora_rank", c.integer("q_lora_rank", least=1))
    factors(m)


def _finish_minicpm3(m: b.Build) -> None:
    k.tied_by_default(m)
    k.put_long_rope(m)


def _plm(m: b.Build) -> None:
    c = m.config
    k.activation(m, "relu2")
    _head_keys(m)
    k.rope(m)
    c.expect("q_lora_rank")
    c.expect("attn_qkv_bias", False)
    k.no_window(m)


def _deepseek(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m)
    k.rope(m)
    k.rms_eps(m)
    m.key("vocab_size", c.integer("vocab_size"))
    width = c.integer("hidden_size") // c.integer("num_attention_heads")
    m.key("rope.dimension_count", c.integer("head_dim", default=width))
    m.key("leading_dense_block_count", c.integer("first_k_dense_replace", default=0))
    k.experts(m, "n_routed_experts")
    m.key("expert_shared_count", c.integer("n_shared_experts", default=0))
    m.key("expert_weights_scale", 1.0)
    if c.flag("norm_topk_prob"):
        m.key("expert_weights_norm", True)
    c.expect("moe_layer_freq", 1)
    c.expect("scoring_func", "softmax")
    c.expect("attention_bias", False)


def _finish(m: b.Build) -> None:
    read_rope(m.config)
    k.tied(m)


_HARMLESS = frozenset({"num_mtp_layers", "mtp_loss_coef", "quantization"})


ARCHITECTURES = (
    b.Architecture("deepseek", ("DeepseekForCausalLM",), _deepseek, b.PAIRS, k.tied),
    b.Architecture(
        "deepseek2",
        ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "KimiK2ForCausalLM", "KimiK25ForConditionalGeneration",
         "Glm4MoeLiteForCausalLM"),
        _deepseek2, MLA, _finish, _SEES, _HARMLESS,
    ),
    b.Architecture("minicpm3", ("MiniCPM3ForCausalLM",), _minicpm3, finish=_finish_minicpm3),
    b.Architecture("plm", ("PLMForCausalLM",), _plm, finish=k.tied_by_default),
    b.Architecture("deepseek2", ("YoutuForCausalLM",), _youtu, MLA, k.tied_by_default, "", _HARMLESS),
    b.Architecture("deepseek32", ("DeepseekV32ForCausalLM",), _indexer, MLA, _finish, "", _HARMLESS, names="glm-dsa"),
    b.Architecture("glm-dsa", ("GlmMoeDsaForCausalLM",), _indexer, MLA, _finish, "", _HARMLESS),
    b.Architecture(
        "mistral4", ("Mistral4ForCausalLM",), _mistral4, MISTRAL4, _finish, _SEES, _HARMLESS, names="deepseek2"
    ),
)  # fmt: skip
