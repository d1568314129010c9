"""Qwen2 and Qwen3, dense, with experts, and the text part of the models that see."""

from __future__ import annotations

from ikcli.convert.build import Architecture, Build, Table
from ikcli.convert.common import (
    HEAD_NORMS,
    LLAMA,
    SILU,
    activation,
    expert_names,
    experts,
    head_dim,
    no_window,
    rms_eps,
    rope,
    shared_expert_names,
    sizes,
    tied,
)
from ikcli.convert.rope import read_rope

SHARED: Table = shared_expert_names("mlp.shared_expert") | {
    "layers.*.mlp.shared_expert_gate": "blk.*.ffn_gate_inp_shexp"
}
SEES = r"(^|\.)visual\.|^vision|mtp\."
_VL = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id")


def base_keys(m: Build, *, n_ff: bool = True) -> None:
    """What all of them say."""
    activation(m, *SILU)
    sizes(m, n_ff=n_ff)
    rope(m)
    rms_eps(m)
    head_dim(m)
    m.config.ignore("attention_bias", "qkv_bias", "vocab_size")


def _dense(m: Build) -> None:
    base_keys(m)
    no_window(m)


def sections(m: Build) -> None:
    """A rotation in sections: how many pairs each has."""
    found = read_rope(m.config).values.get("mrope_section")
    if not isinstance(found, list) or not 1 <= len(found) <= 4 or not all(isinstance(n, int) for n in found):
        raise m.config.fail("mrope_section", "of the rope parameters should be a list of whole numbers")
    m.key("rope.dimension_sections", (*found, 0, 0, 0)[:4])


def _dense_vl(m: Build) -> None:
    _dense(m)
    sections(m)


def every_layer(m: Build) -> None:
    """UnsupportedError if some layers have no experts."""
    c = m.config
    c.expect("decoder_sparse_step", 1)
    if c.items("mlp_only_layers"):
        raise c.refuse("mlp_only_layers", "[]")


def _qwen2moe(m: Build) -> None:
    _dense(m)
    every_layer(m)
    experts(m)
    m.key("expert_shared_feed_forward_length", m.config.integer("shared_expert_intermediate_size"))
    if m.config.flag("norm_topk_prob"):
        m.key("expert_weights_norm", True)


def _qwen3moe(m: Build) -> None:
    _dense(m)
    every_layer(m)
    experts(m)
    if not m.config.flag("norm_topk_prob"):
        m.key("expert_weights_norm", False)


def _qwen3vlmoe(m: Build) -> None:
    base_keys(m)
    no_window(m)
    every_layer(m)
    experts(m)
    sections(m)
    m.config.ignore("norm_topk_prob")
    m.key("n_deepstack_layers", _deepstack(m))


def _qwen3vl(m: Build) -> None:
    _dense_vl(m)
    m.key("n_deepstack_layers", _deepstack(m))


def _deepstack(m: Build) -> int:
    vision = m.config.raw.get("vision_config")
    return len(vision.get("deepstack_visual_indexes", ())) if isinstance(vision, dict) else 0


_DENSE: Table = LLAMA | HEAD_NORMS
_MOE: Table = _DENSE | expert_names()
_HARMLESS = frozenset(_VL)

ARCHITECTURES = (
    Architecture("qwen2", ("Qwen2ForCausalLM",), _dense, LLAMA, tied),
    Architecture(
        "qwen2vl",
        ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
        _dense_vl, LLAMA, tied, SEES, _HARMLESS,
    ),
    Architecture("qwen2moe", ("Qwen2MoeForCausalLM",), _qwen2moe, LLAMA | expert_names() | SHARED, tied),
    Architecture("qwen3", ("Qwen3ForCausalLM",), _dense, _DENSE, tied),
    Architecture("qwen3moe", ("Qwen3MoeForCausalLM",), _qwen3moe, _MOE, tied),
    Architecture("qwen3vl", ("Qwen3VLForConditionalGeneration",), _qwen3vl, _DENSE, tied, SEES, _HARMLESS),
    Architecture("qwen3vlmoe", ("Qwen3VLMoeForConditionalGeneration",), _qwen3vlmoe, _MOE, tied, SEES, _HARMLESS),
)  # fmt: skip
