"""Gemma 1 to 4 (text)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ikcli.convert.archs.deltanet import plus_one
from ikcli.convert.build import Architecture, Build, Rule, Table, fused_experts, to
from ikcli.convert.common import (
    GELU_TANH,
    HEAD_NORMS,
    LLAMA,
    activation,
    head_dim,
    rms_eps,
    rope,
    sizes,
    tied,
    windows,
)
from ikcli.convert.rope import read_rope

_EARLY_NORMS: dict[str, str | Rule] = {
    "norm": to("output_norm", value=plus_one),
    "layers.*.input_layernorm": to("blk.*.attn_norm", value=plus_one),
    "layers.*.post_attention_layernorm": to("blk.*.ffn_norm", value=plus_one),
}
GEMMA: Table = LLAMA | _EARLY_NORMS
GEMMA2: Table = GEMMA | {
    "layers.*.post_attention_layernorm": to("blk.*.post_attention_norm", value=plus_one),
    "layers.*.pre_feedforward_layernorm": to("blk.*.ffn_norm", value=plus_one),
    "layers.*.post_feedforward_layernorm": to("blk.*.post_ffw_norm", value=plus_one),
}
GEMMA3: Table = GEMMA2 | {
    "layers.*.self_attn.q_norm": to("blk.*.attn_q_norm", value=plus_one),
    "layers.*.self_attn.k_norm": to("blk.*.attn_k_norm", value=plus_one),
}
GEMMA4: Table = LLAMA | HEAD_NORMS | {
    "layers.*.post_attention_layernorm": "blk.*.post_attention_norm",
    "layers.*.pre_feedforward_layernorm": "blk.*.ffn_norm",
    "layers.*.post_feedforward_layernorm": "blk.*.post_ffw_norm",
    "layers.*.layer_scalar": to("blk.*.layer_output_scale.weight"),
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
    "layers.*.per_layer_input_gate": "blk.*.inp_gate",
    "layers.*.per_layer_projection": "blk.*.proj",
    "layers.*.post_per_layer_input_norm": "blk.*.post_norm",
    "layers.*.router.proj": "blk.*.ffn_gate_inp",
    "layers.*.router.scale": to("blk.*.ffn_gate_inp.scale!"),
    "layers.*.router.per_expert_scale": to("blk.*.ffn_down_exps.scale!"),
    "layers.*.experts.gate_up_proj": fused_experts("blk.*.ffn_gate_up_exps.weight"),
    "layers.*.experts.down_proj": fused_experts("blk.*.ffn_down_exps.weight"),
    "layers.*.pre_feedforward_layernorm_2": "blk.*.pre_ffw_norm_2",
    "layers.*.post_feedforward_layernorm_1": "blk.*.post_ffw_norm_1",
    "layers.*.post_feedforward_layernorm_2": "blk.*.post_ffw_norm_2",
}  # fmt: skip
_SEES = r"vision_tower|multi_modal_projector|audio_tower|embed_vision|embed_audio|vision_embedder|rotary_emb"


def _base(m: Build) -> None:
    activation(m, *GELU_TANH)
    sizes(m)
    rms_eps(m)
    head_dim(m)
    m.config.ignore("attention_bias", "vocab_size", "use_bidirectional_attention")
    m.config.expect("use_bidirectional_attention", False, "vision")


def _gemma(m: Build) -> None:
    _base(m)
    rope(m)


def _scale(m: Build) -> None:
    """Queries are scaled by the size of heads, in the models of 27B by another one that the architecture knows."""
    c = m.config
    n_layer, heads = c.integer("num_hidden_layers"), c.integer("num_attention_heads")
    big = (m.arch, n_layer) in (("gemma2", 46), ("gemma3", 62))
    expected = c.integer("hidden_size") // heads if big else c.integer("head_dim")
    if c.number("query_pre_attn_scalar") != expected:
        raise c.refuse("query_pre_attn_scalar", str(expected))


def _gemma2(m: Build) -> None:
    _base(m)
    c = m.config
    rope(m)
    m.key("attn_logit_softcapping", c.number("attn_logit_softcapping", default=0.0))
    m.key("final_logit_softcapping", c.number("final_logit_softcapping", default=0.0))
    m.key("attention.sliding_window", c.integer("sliding_window", least=1))
    c.expect("sliding_window_size", c.integer("sliding_window"))
    windows(m, 2)
    _scale(m)


def _gemma3(m: Build) -> None:
    _base(m)
    c = m.config
    rope(m)
    m.key("rope.freq_base_swa", _local_base(m))
    if c.get("final_logit_softcapping") is not None:
        m.key("final_logit_softcapping", c.number("final_logit_softcapping"))
    c.expect("attn_logit_softcapping", None)
    m.key("attention.sliding_window", c.integer("sliding_window", least=1))
    windows(m, c.integer("sliding_window_pattern", "_sliding_window_pattern", default=6, least=1), 6)
    _scale(m)


def _local_base(m: Build) -> float:
    local = m.config.given("rope_local_base_freq")
    return (
        m.config.number("rope_local_base_freq") if local is not None else read_rope(m.config, "sliding_attention").theta
    )


def _special(m: Build) -> dict[str, int]:
    """What layers with full attention have of their own: columns of a head, key heads."""
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


def _gemma4(m: Build) -> None:
    c = m.config
    activation(m, *GELU_TANH)
    sizes(m)
    rms_eps(m)
    c.ignore("attention_bias", "vocab_size", "vocab_size_per_layer_input", "attention_k_eq_v", "enable_moe_block")
    c.expect("use_bidirectional_attention", False, "vision")
    special, local = _special(m), c.integer("head_dim", least=1)
    full = special["head_dim"]
    n_layer, n_shared = c.integer("num_hidden_layers"), c.integer("num_kv_shared_layers")
    kinds = c.items("layer_types") or [
        "full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(n_layer)
    ]
    is_window = windows(m, 0, kinds=kinds)
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
    rope, own = read_rope(c), read_rope(c, "sliding_attention")
    if (rope.type, own.type) != ("proportional", "default"):
        raise c.refuse("rope_parameters", "proportional in layers without a window, default in the others")
    m.key("rope.freq_base", rope.theta)
    m.key("rope.freq_base_swa", own.theta)
    m.key("rope.dimension_count", full)
    m.key("rope.dimension_count_swa", int(local * own.partial))


def _finish4(m: Build) -> None:
    """Of heads of layers without a window only a part is rotated: the others turn by next to nothing."""
    tied(m, True)
    full = m.metadata["gemma4.attention.key_length"]
    n = int(full * read_rope(m.config).partial / 2)
    m.constant("rope_freqs.weight", np.array([1.0] * n + [1e30] * (full // 2 - n), np.float32))


ARCHITECTURES = (
    Architecture("gemma", ("GemmaForCausalLM",), _gemma, GEMMA, lambda m: tied(m, True)),
    Architecture("gemma2", ("Gemma2ForCausalLM",), _gemma2, GEMMA2, lambda m: tied(m, True)),
    Architecture(
        "gemma3", ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), _gemma3, GEMMA3, lambda m: tied(m, True),
        _SEES, frozenset({"mm_tokens_per_image"}),
    ),
    Architecture(
        "gemma4", ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"), _gemma4, GEMMA4, _finish4, _SEES
    ),
)  # fmt: skip
