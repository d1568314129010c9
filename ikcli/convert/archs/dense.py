"""Models of 2024 and later that are not like Llama in all: Phi-3, OLMo, Granite, EXAONE 4, SmolLM3, Seed, Ernie."""

from __future__ import annotations

import math

import numpy as np

from ikcli.convert.archs.llama import PAIRS, finish, llama_keys
from ikcli.convert.build import Architecture, Build, Table, fused_experts, split
from ikcli.convert.common import (
    HEAD_NORMS,
    LLAMA,
    SILU,
    activation,
    expert_names,
    experts,
    head_dim,
    no_window,
    put_llama3,
    rms_eps,
    rope,
    shared_expert_names,
    sizes,
    tied,
    windows,
)
from ikcli.convert.rope import read_rope
from ikcli.errors import UnsupportedError

PHI3: Table = LLAMA | {
    "layers.*.self_attn.qkv_proj": "blk.*.attn_qkv",
    "layers.*.mlp.gate_up_proj": "blk.*.ffn_up",
}
_AFTER: Table = LLAMA | HEAD_NORMS | {
    "layers.*.post_attention_layernorm": "blk.*.post_attention_norm",
    "layers.*.post_feedforward_layernorm": "blk.*.post_ffw_norm",
}  # fmt: skip
SEED: Table = LLAMA | {"layers.*.post_attention_layernorm": "blk.*.post_attention_norm"}
GRANITE: Table = LLAMA | PAIRS
GRANITE_MOE: Table = GRANITE | {
    "layers.*.block_sparse_moe.router.layer": "blk.*.ffn_gate_inp",
    "layers.*.block_sparse_moe.input_linear": fused_experts("blk.*.ffn_gate_exps", "blk.*.ffn_up_exps"),
    "layers.*.block_sparse_moe.output_linear": fused_experts("blk.*.ffn_down_exps"),
    "layers.*.shared_mlp.input_linear": split("blk.*.ffn_gate_shexp", "blk.*.ffn_up_shexp"),
    "layers.*.shared_mlp.output_linear": "blk.*.ffn_down_shexp",
}
ERNIE_MOE: Table = LLAMA | expert_names() | shared_expert_names() | {
    "layers.*.mlp.moe_statics.e_score_correction_bias": lambda m, t: m.plain(
        t, f"blk.{t.block}.exp_probs_b.bias", (t.shape[-1],)
    ),
}  # fmt: skip


def _biases(m: Build) -> None:
    m.config.ignore("attention_bias", "mlp_bias", "use_bias", "attention_out_bias", "vocab_size")


def _phi3(m: Build) -> None:
    c = m.config
    activation(m, *SILU)
    sizes(m)
    rms_eps(m)
    found = read_rope(c)
    m.key("rope.freq_base", found.theta)
    width = c.integer("hidden_size") // c.integer("num_attention_heads")
    m.key("rope.dimension_count", int(found.partial * width))
    whole = c.integer("max_position_embeddings", least=2)
    original = c.integer("original_max_position_embeddings", default=whole, least=2)
    m.key("rope.scaling.original_context_length", original)
    m.key("attention.sliding_window", c.integer("sliding_window", default=0))
    if found.type not in ("default", "longrope"):
        raise UnsupportedError(
            f"{c.path}: rope_type {found.type} is not known for phi3, which has default and longrope"
        )
    if found.type == "longrope":
        scale = whole / original
        factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        m.key("rope.scaling.attn_factor", found.number("attention_factor", factor))
    _biases(m)


def _finish_phi3(m: Build) -> None:
    """Two lists of factors: for contexts up to the original one, and beyond."""
    tied(m)
    found = read_rope(m.config)
    if found.type != "longrope":
        return
    n = m.metadata["phi3.rope.dimension_count"] // 2
    for name in ("long", "short"):
        factors = found.values.get(f"{name}_factor")
        if not isinstance(factors, list) or len(factors) != n:
            raise m.config.fail("rope_scaling", f"should have {n} numbers as {name}_factor")
        m.constant(f"rope_factors_{name}.weight", np.array(factors, np.float32))


def _olmo2(m: Build) -> None:
    c = m.config
    activation(m, *SILU)
    sizes(m)
    rms_eps(m)
    rope(m)
    head_dim(m)
    if c.model_type == "olmo3":
        own = read_rope(c, "sliding_attention")
        if own.type not in ("default", read_rope(c).type) or own.theta != read_rope(c).theta:
            raise c.refuse("rope_parameters", "the same base in all layers")
        m.key("attention.sliding_window", c.integer("sliding_window", least=1))
        windows(m, 4)
    c.expect("clip_qkv", None)
    _biases(m)


def _olmo(m: Build) -> None:
    """Norms without weights, whose epsilon transformers has no key for."""
    c = m.config
    activation(m, *SILU)
    sizes(m)
    m.key("attention.layer_norm_epsilon", 1e-5)
    rope(m)
    if c.get("clip_qkv") is not None:
        m.key("attention.clamp_kqv", c.number("clip_qkv"))
    _biases(m)


def _factors(m: Build) -> None:
    c = m.config
    m.key("attention.scale", c.number("attention_multiplier", default=1.0))
    m.key("embedding_scale", c.number("embedding_multiplier", default=1.0))
    m.key("residual_scale", c.number("residual_multiplier", default=1.0))
    m.key("logit_scale", c.number("logits_scaling", default=1.0))


def _granite(m: Build) -> None:
    llama_keys(m)
    _factors(m)
    _biases(m)


def _granitemoe(m: Build) -> None:
    _granite(m)
    experts(m, "num_local_experts", width=False)
    if m.config.get("shared_intermediate_size"):
        m.key("expert_shared_feed_forward_length", m.config.integer("shared_intermediate_size"))


def _exaone4(m: Build) -> None:
    c = m.config
    activation(m, *SILU)
    sizes(m)
    rope(m)
    rms_eps(m)
    head_dim(m)
    if c.get("sliding_window") is not None:
        m.key("attention.sliding_window", c.integer("sliding_window"))
        pattern = c.get("sliding_window_pattern")  # LLLG, or how many there are
        period = len(pattern) if isinstance(pattern, str) else c.integer("sliding_window_pattern", default=4, least=1)
        windows(m, period, 4)
    elif c.items("layer_types") and set(c.items("layer_types") or ()) != {"full_attention"}:
        raise c.refuse("layer_types", "full_attention without sliding_window")
    c.ignore("sliding_window_pattern")
    _biases(m)


def _finish_exaone4(m: Build) -> None:
    put_llama3(m, m.config.integer("head_dim", default=_width(m)))
    tied(m)


def _width(m: Build) -> int:
    return m.config.integer("hidden_size") // m.config.integer("num_attention_heads")


def _smollm3(m: Build) -> None:
    c = m.config
    llama_keys(m)
    no_window(m)
    rotated = c.items("no_rope_layers")
    every = c.integer("no_rope_layer_interval", default=4)
    expected = [int((i + 1) % 4 != 0) for i in range(m.n_layer)]
    found = rotated if rotated is not None else [int((i + 1) % every != 0) for i in range(m.n_layer)]
    if found != expected:
        raise c.refuse("no_rope_layers", "every fourth layer without rotation")
    _biases(m)


def _plain(m: Build) -> None:
    """Seed-OSS, ERNIE 4.5: nothing of their own."""
    activation(m, *SILU)
    sizes(m)
    rope(m)
    rms_eps(m)
    head_dim(m)
    _biases(m)


def _erniemoe(m: Build) -> None:
    c = m.config
    _plain(m)
    m.key("expert_count", c.integer("moe_num_experts", least=1))
    m.key("expert_used_count", c.integer("moe_k", least=1))
    m.key("interleave_moe_layer_step", c.integer("moe_layer_interval", default=1, least=1))
    m.key("leading_dense_block_count", c.integer("moe_layer_start_index", default=0))
    m.key("expert_feed_forward_length", c.integer("moe_intermediate_size", least=1))
    n_shared = c.integer("moe_num_shared_experts", default=0)
    if n_shared:
        m.key("expert_shared_count", n_shared)
        m.key("expert_shared_feed_forward_length", n_shared * c.integer("moe_intermediate_size"))
    end = c.given("moe_layer_end_index")
    if end not in (None, -1, m.n_layer - 1):
        raise c.refuse("moe_layer_end_index", f"{m.n_layer - 1}")
    c.ignore("moe_norm_min", "moe_capacity")
    c.expect("moe_use_aux_free", True)
    c.expect("moe_gate", "topk", "top2_fused")


ARCHITECTURES = (
    Architecture("phi3", ("Phi3ForCausalLM",), _phi3, PHI3, _finish_phi3),
    Architecture("olmo2", ("Olmo2ForCausalLM", "Olmo3ForCausalLM"), _olmo2, _AFTER, tied),
    Architecture("olmo", ("OlmoForCausalLM",), _olmo, GRANITE, tied),
    Architecture("granite", ("GraniteForCausalLM",), _granite, GRANITE, finish),
    Architecture(
        "granitemoe", ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), _granitemoe, GRANITE_MOE, finish
    ),
    Architecture("exaone4", ("Exaone4ForCausalLM",), _exaone4, _AFTER, _finish_exaone4),
    Architecture("smollm3", ("SmolLM3ForCausalLM",), _smollm3, GRANITE, finish),
    Architecture("seed_oss", ("SeedOssForCausalLM",), _plain, SEED, tied),
    Architecture("ernie4_5", ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), _plain, LLAMA, tied),
    Architecture(
        "ernie4_5-moe", ("Ernie4_5_MoeForCausalLM",), _erniemoe, ERNIE_MOE, tied, r"mtp_",
        frozenset({"use_rmsnorm", "fuse_rms_norm"}),
    ),
)  # fmt: skip
