"""Gemma 1 to 4 (text)."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.pieces import TensorRows
from ikcli.convert.rope import read_rope

_EARLY_NORMS: b.Table = {
    "norm": b.to("output_norm", value=b.plus_one),
    "layers.*.input_layernorm": b.to("blk.*.attn_norm", value=b.plus_one),
    "layers.*.post_attention_layernorm": b.to("blk.*.ffn_norm", value=b.plus_one),
}
GEMMA: b.Table = _EARLY_NORMS | {"lm_head": "output"}  # gguf lacks it; dropped if the embeddings are tied
GEMMA2: b.Table = GEMMA | {
    "layers.*.post_attention_layernorm": b.to("blk.*.post_attention_norm", value=b.plus_one),
    "layers.*.pre_feedforward_layernorm": b.to("blk.*.ffn_norm", value=b.plus_one),
    "layers.*.post_feedforward_layernorm": b.to("blk.*.post_ffw_norm", value=b.plus_one),
}
GEMMA3: b.Table = GEMMA2 | {
    "layers.*.self_attn.q_norm": b.to("blk.*.attn_q_norm", value=b.plus_one),
    "layers.*.self_attn.k_norm": b.to("blk.*.attn_k_norm", value=b.plus_one),
}
GEMMA4: b.Table = {
    "layers.*.router.scale": b.to("blk.*.ffn_gate_inp.scale!"),
    "layers.*.router.per_expert_scale": b.to("blk.*.ffn_down_exps.scale!"),
}  # fmt: skip
_SEES = r"vision_tower|multi_modal_projector|audio_tower|embed_vision|embed_audio|vision_embedder|rotary_emb"


def _base(m: b.Build) -> None:
    k.activation(m, *k.GELU_TANH)
    k.sizes(m)
    k.rms_eps(m)
    k.head_dim(m)
    m.config.ignore("attention_bias", "vocab_size", "use_bidirectional_attention")
    m.config.expect("use_bidirectional_attention", False, "vision")


def _gemma(m: b.Build) -> None:
    _base(m)
    k.rope(m)


def _scale(m: b.Build) -> None:
    """Refuse any other scale of queries than the architecture has: by head size, in 27B models by width per head."""
    c = m.config
    n_layer, heads = c.integer("num_hidden_layers"), c.integer("num_attention_heads")
    big = (m.arch, n_layer) in (("gemma2", 46), ("gemma3", 62))
    expected = c.integer("hidden_size") // heads if big else c.integer("head_dim")
    if c.number("query_pre_attn_scalar") != expected:
        raise c.refuse("query_pre_attn_scalar", str(expected))


def _gemma2(m: b.Build) -> None:
    _base(m)
    c = m.config
    k.rope(m)
    m.key("attn_logit_softcapping", c.number("attn_logit_softcapping", default=0.0))
    m.key("final_logit_softcapping", c.number("final_logit_softcapping", default=0.0))
    m.key("attention.sliding_window", c.integer("sliding_window", least=1))
    c.expect("sliding_window_size", c.integer("sliding_window"))
    k.windows(m, 2)
    _scale(m)


def _gemma3(m: b.Build) -> None:
    _base(m)
    c = m.config
    k.rope(m)
    m.key("rope.freq_base_swa", _local_base(m))
    if c.get("final_logit_softcapping") is not None:
        m.key("final_logit_softcapping", c.number("final_logit_softcapping"))
    c.expect("attn_logit_softcapping", None)
    m.key("attention.sliding_window", c.integer("sliding_window", least=1))
    k.windows(m, c.integer("sliding_window_pattern", "_sliding_window_pattern", default=6, least=1), 6)
    _scale(m)


def _embedding(m: b.Build) -> None:
    """Write the keys of EmbeddingGemma, which attends in both directions; half of a window is on either side."""
    c = m.config
    c.expect("use_bidirectional_attention", True)
    k.activation(m, *k.GELU_TANH)
    k.sizes(m)
    k.rms_eps(m)
    k.head_dim(m)
    k.rope(m)
    m.key("rope.freq_base_swa", _local_base(m))
    m.key("attention.causal", False)
    c.ignore("attention_bias", "vocab_size")
    c.expect("attn_logit_softcapping", None)
    c.expect("final_logit_softcapping", None)
    m.key("attention.sliding_window", c.integer("sliding_window", least=1))
    k.windows(m, c.integer("sliding_window_pattern", "_sliding_window_pattern", default=6, least=1), 6)
    if c.number("query_pre_attn_scalar") != c.integer("head_dim"):
        raise c.refuse("query_pre_attn_scalar", str(c.integer("head_dim")))


def _local_base(m: b.Build) -> float:
    local = m.config.given("rope_local_base_freq")
    return (
        m.config.number("rope_local_base_freq") if local is not None else read_rope(m.config, "sliding_attention").theta
    )


# --- Gemma 3n ---------------------------------------------------------------------------------------------------------
def _gemma3n(m: b.Build) -> None:
    c, n_layer = m.config, m.n_layer
    k.activation(m, *k.GELU_TANH)
    k.sizes(m, n_ff=False)
    listed = isinstance(c.get("intermediate_size"), list)
    m.key("feed_forward_length", (c.items if listed else c.integer)("intermediate_size"))
    k.rms_eps(m)
    k.head_dim(m)
    c.ignore("vocab_size", "vocab_size_per_layer_input", "laurel_rank")
    c.expect("attention_bias", False)
    c.expect("altup_active_idx", 0)
    c.expect("altup_correct_scale", True)
    c.ignore("altup_coef_clip", "altup_lr_multiplier", "query_pre_attn_scalar")  # of training, and without effect
    k.rope(m)
    m.key("rope.freq_base_swa", _local_base(m))
    for kind in ("full_attention", "sliding_attention"):
        if read_rope(c, kind).type != "default":
            raise c.refuse("rope_parameters", "default in all layers")
    m.key("final_logit_softcapping", c.number("final_logit_softcapping", default=0.0))
    m.key("attention.sliding_window", c.integer("sliding_window", least=1))
    kinds = c.items("layer_types") or [
        "full_attention" if (i + 1) % 5 == 0 else "sliding_attention" for i in range(n_layer)
    ]
    m.key("attention.sliding_window_pattern", k.windows(m, 0, kinds=kinds))
    m.key("attention.shared_kv_layers", c.integer("num_kv_shared_layers"))
    m.key("embedding_length_per_layer_input", c.integer("hidden_size_per_layer_input", least=1))
    m.key("altup.active_idx", 0)
    m.key("altup.num_inputs", c.integer("altup_num_inputs", least=2))
    m.key("activation_sparsity_scale", _cuts(m))


def _cuts(m: b.Build) -> list[float]:
    """Return where gates are cut off, by layer, for the shares of config.json: standard deviations over their mean."""
    c, n_layer = m.config, m.n_layer
    known = "a number from 0 to below 1, or one for every layer"
    shares: Any = c.get("activation_sparsity_pattern")
    if shares is None:
        shares = [0.95 if n_layer > 10 and i < 10 else 0.0 for i in range(n_layer)]
    elif not isinstance(shares, list):
        shares = [shares] * n_layer
    if len(shares) != n_layer or not all(isinstance(s, int | float) and 0 <= s < 1 for s in shares):
        raise c.refuse("activation_sparsity_pattern", known)
    return [NormalDist().inv_cdf(float(np.float32(s))) if s > 0 else -math.inf for s in shares]


def _stream(name: str) -> b.Rule:
    """Return a rule that collects the matrices of all streams but the first in one tensor."""

    def rule(m: b.Build, found: b.Found) -> None:
        m.experts.setdefault(f"{name}.weight", {})[found.block] = found

    return rule


def _own_embeddings(m: b.Build, found: b.Found) -> None:
    """Add the embeddings of layers; further tokens (of images, sounds) have the row of token 0, as in transformers."""
    n, width = found.matrix()
    more = m.config.integer("vocab_size", default=n) - n
    pieces = [TensorRows(found.name, n, width)]
    if more > 0:
        pieces.append(TensorRows(found.name, more, width, order=np.zeros(more, np.int64)))
    m.add("per_layer_token_embd.weight", pieces)


GEMMA3N: b.Table = {
    "altup_projections.*": _stream("altup_proj"),
    "altup_unembed_projections.*": _stream("altup_unembd_proj"),
    "embed_tokens_per_layer": _own_embeddings,
    "layers.*.altup.correct_output_scale": b.to("blk.*.altup_correct_scale.weight"),
}


# --- Gemma 4 ----------------------------------------------------------------------------------------------------------
def _special(m: b.Build) -> dict[str, int]:
    """Return the settings of layers with full attention that differ: head_dim and num_key_value_heads."""
    c = m.config
    special: Any = c.get("per_layer_config") or {}
    kinds = c.items("layer_types") or []
    full = [str(i) for i, kind in enumerate(kinds) if kind == "full_attention"]
    known = "head_dim and num_key_value_heads, the same for all layers with full attention"
    if not isinstance(special, dict) or (special and sorted(special) != sorted(full)):
        raise c.refuse("per_layer_config", known)
    values = list(special.values())
    if any(v != values[0] for v in values) or any(set(v) - {"head_dim", "num_key_value_heads"} for v in values):
        raise c.refuse("per_layer_config", known)
    found: dict[str, int] = values[0] if values else {}
    own = {"head_dim": c.integer("global_head_dim", default=found.get("head_dim", c.get("head_dim")), least=1)}
    heads = c.get("num_global_key_value_heads", default=found.get("num_key_value_heads"))
    if heads is not None and (c.flag("attention_k_eq_v") or "num_key_value_heads" in found):
        own["num_key_value_heads"] = c.integer("num_global_key_value_heads", default=heads, least=1)
    return own


def _gemma4(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.GELU_TANH)
    k.sizes(m)
    k.rms_eps(m)
    c.ignore("attention_bias", "vocab_size", "vocab_size_per_layer_input", "attention_k_eq_v", "enable_moe_block")
    c.expect("use_bidirectional_attention", False, "vision")
    special, local = _special(m), c.integer("head_dim", least=1)
    full = special["head_dim"]
    n_layer, n_shared = c.integer("num_hidden_layers"), c.integer("num_kv_shared_layers")
    kinds = c.items("layer_types") or [
        "full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(n_layer)
    ]
    is_window = k.windows(m, 0, kinds=kinds)
    if "num_key_value_heads" in special:
        heads = c.integer("num_key_value_heads"), special["num_key_value_heads"]
        m.key("attention.head_count_kv", [heads[0] if w else heads[1] for w in is_window])
    if c.flag("use_double_wide_mlp"):
        n_ff = c.integer("intermediate_size")
        m.key("feed_forward_length", [n_ff * (2 if i >= n_layer - n_shared else 1) for i in range(n_layer)])
    if c.flag("enable_moe_block"):
        m.key("expert_count", c.integer("num_experts", least=1))
        m.key("expert_used_count", c.integer("top_k_experts", least=1))
        m.key("expert_feed_forward_length", c.integer("moe_intermediate_size", "expert_intermediate_size", least=1))
    if c.get("final_logit_softcapping") is not None:
        m.key("final_logit_softcapping", c.number("final_logit_softcapping"))
    else:
        m.key("final_logit_softcapping", 0.0)
    m.key("attention.sliding_window", c.integer("sliding_window", least=1))
    m.key("attention.shared_kv_layers", n_shared)
    m.key("embedding_length_per_layer_input", c.integer("hidden_size_per_layer_input", default=0))
    m.key("attention.sliding_window_pattern", is_window)
    for name, width in (("", full), ("_swa", local)):
        m.key(f"attention.key_length{name}", width)
        m.key(f"attention.value_length{name}", width)
    full_rope, own = read_rope(c), read_rope(c, "sliding_attention")
    if (full_rope.type, own.type) != ("proportional", "default"):
        raise c.refuse("rope_parameters", "proportional in layers without a window, default in the others")
    m.key("rope.freq_base", full_rope.theta)
    m.key("rope.freq_base_swa", own.theta)
    m.key("rope.dimension_count", full)
    m.key("rope.dimension_count_swa", int(local * own.partial))


def _assistant(m: b.Build) -> None:
    """Write the keys of an assistant, whose layers have no keys and values of their own."""
    _gemma4(m)
    width = m.config.raw.get("backbone_hidden_size")
    if not isinstance(width, int) or width < 1:
        raise m.config.fail("backbone_hidden_size", f"is {width}; it must be the width of the model that is assisted")
    m.key("embedding_length_out", width)
    m.key("nextn_predict_layers", m.n_layer)


def _finish4(m: b.Build) -> None:
    """Add factors that leave most of each head unrotated in layers without a window (a factor of 1e30)."""
    k.tied(m, True)
    full = m.metadata[f"{m.arch}.attention.key_length"]
    n = int(full * read_rope(m.config).partial / 2)
    m.constant("rope_freqs.weight", np.array([1.0] * n + [1e30] * (full // 2 - n), np.float32))


ARCHITECTURES = (
    b.Architecture("gemma", ("GemmaForCausalLM",), _gemma, GEMMA, k.tied_by_default),
    b.Architecture(
        "gemma-embedding", ("Gemma3TextModel",), _embedding, GEMMA3, k.tied_by_default,
        harmless=frozenset({"cache_implementation"}),
    ),
    b.Architecture("gemma2", ("Gemma2ForCausalLM",), _gemma2, GEMMA2, k.tied_by_default),
    b.Architecture(
        "gemma3", ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), _gemma3, GEMMA3, k.tied_by_default,
        _SEES, frozenset({"mm_tokens_per_image"}),
    ),
    b.Architecture(
        "gemma3n", ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"), _gemma3n, GEMMA3N, k.tied_by_default,
        _SEES,
    ),
    b.Architecture(
        "gemma4",
        (
            "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForCausalLM",
            "Gemma4UnifiedForConditionalGeneration",
        ),
        _gemma4, GEMMA4, _finish4, _SEES,
    ),
    b.Architecture(
        "gemma4-assistant", ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"), _assistant,
        GEMMA4 | {"pre_projection": "nextn.pre_projection", "post_projection": "nextn.post_projection"}, _finish4,
        r"masked_embedding|token_ordering|centroids", names="gemma4",
    ),
)  # fmt: skip
