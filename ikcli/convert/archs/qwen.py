"""Qwen, Qwen2 and Qwen3: dense, with experts, and the text part of the vision models."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.rope import read_rope

SEES = r"(^|\.)visual\.|^vision|mtp\."
_VL = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id")
_HARMLESS = frozenset(_VL)


def base_keys(m: b.Build, *, n_ff: bool = True, further: bool = False) -> None:
    """Write the keys that all Qwen models share."""
    k.activation(m, *k.SILU)
    k.sizes(m, n_ff=n_ff, further=further)
    k.rope(m)
    k.rms_eps(m)
    k.head_dim(m)
    m.config.ignore("attention_bias", "qkv_bias", "vocab_size")


def _dense(m: b.Build) -> None:
    base_keys(m)
    k.no_window(m)


def sections(m: b.Build) -> None:
    """Write the numbers of rotated pairs per section (M-RoPE)."""
    found = read_rope(m.config).values.get("mrope_section")
    if not isinstance(found, list) or not 1 <= len(found) <= 4 or not all(isinstance(n, int) for n in found):
        raise m.config.fail("mrope_section", "of the rope parameters should be a list of whole numbers")
    m.key("rope.dimension_sections", (*found, 0, 0, 0)[:4])


def _dense_vl(m: b.Build) -> None:
    _dense(m)
    sections(m)


def every_layer(m: b.Build) -> None:
    """Refuse models in which some layers have no experts."""
    c = m.config
    c.expect("decoder_sparse_step", 1)
    if c.items("mlp_only_layers"):
        raise c.refuse("mlp_only_layers", "[]")


def _qwen2moe(m: b.Build) -> None:
    _dense(m)
    every_layer(m)
    k.experts(m)
    m.key("expert_shared_feed_forward_length", m.config.integer("shared_expert_intermediate_size"))
    if m.config.flag("norm_topk_prob"):
        m.key("expert_weights_norm", True)


def _qwen3moe(m: b.Build) -> None:
    _dense(m)
    every_layer(m)
    k.experts(m)
    if not m.config.flag("norm_topk_prob"):
        m.key("expert_weights_norm", False)


def _qwen3vlmoe(m: b.Build) -> None:
    base_keys(m)
    k.no_window(m)
    every_layer(m)
    k.experts(m)
    sections(m)
    m.config.ignore("norm_topk_prob")
    m.key("n_deepstack_layers", _deepstack(m))


def _qwen3vl(m: b.Build) -> None:
    _dense_vl(m)
    m.key("n_deepstack_layers", _deepstack(m))


def _deepstack(m: b.Build) -> int:
    vision = m.config.raw.get("vision_config")
    return len(vision.get("deepstack_visual_indexes", ())) if isinstance(vision, dict) else 0


def _qwen(m: b.Build) -> None:
    c = m.config
    k.sizes(m)
    k.rope(m)
    m.key("attention.layer_norm_rms_epsilon", c.number("layer_norm_epsilon"))
    m.key("rope.dimension_count", k.embd(m) // c.integer("num_attention_heads"))
    c.ignore("seq_length", "use_dynamic_ntk", "use_logn_attn", "kv_channels", "no_bias", "scale_attn_weights")
    c.ignore("vocab_size", "use_cache_quantization", "use_cache_kernel", "softmax_in_fp32", "rotary_pct")
    c.expect("rotary_pct", 1.0)


ARCHITECTURES = (
    b.Architecture("qwen", ("QWenLMHeadModel",), _qwen, finish=k.tied, strip="transformer."),
    b.Architecture("qwen2", ("Qwen2ForCausalLM",), _dense, finish=k.tied),
    b.Architecture("qwen2", ("DotsOCRForCausalLM",), _dense, {}, k.tied, SEES, _HARMLESS),
    b.Architecture(
        "qwen2vl",
        ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
        _dense_vl, {}, k.tied, SEES, _HARMLESS,
    ),
    b.Architecture("qwen2moe", ("Qwen2MoeForCausalLM",), _qwen2moe, finish=k.tied),
    b.Architecture("qwen3", ("Qwen3ForCausalLM", "Qwen3Model"), _dense, finish=k.tied),
    b.Architecture("qwen3moe", ("Qwen3MoeForCausalLM",), _qwen3moe, finish=k.tied),
    b.Architecture("qwen3vl", ("Qwen3VLForConditionalGeneration",), _qwen3vl, {}, k.tied, SEES, _HARMLESS),
    b.Architecture("qwen3vlmoe", ("Qwen3VLMoeForConditionalGeneration",), _qwen3vlmoe, {}, k.tied, SEES, _HARMLESS),
)  # fmt: skip
