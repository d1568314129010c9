"""dots3 note: latent attention of two sizes, an indexer in layers without a window, experts.

config.json has one of two forms: the released one, with keys `swa_*`, and that of transformers, which lists how layers
differ in `per_layer_config`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.archs.deepseek import mla_keys, split_heads
from ikcli.convert.config import Config
from ikcli.convert.pieces import Floats
from ikcli.convert.rope import read_rope

_SIZES = ("num_attention_heads", "q_lora_rank", "kv_lora_rank", "head_dim", "qk_nope_head_dim", "v_head_dim")
_SWA = dict(zip(_SIZES, (64, 1024, 1024, 256, 192, 128), strict=True))
"""Sizes of layers with a window, of released checkpoints that do not say."""
_INDEXED, _WINDOW = ("indexed_attention", "full_attention"), "sliding_attention"


def _windows(m: b.Build) -> list[bool]:
    """Return which layers have a window; those after the last one, for further tokens, have one."""
    c, n_layer = m.config, m.n_layer
    kinds = c.items("layer_types")
    if kinds is None:
        every = c.flag("use_sliding_window", default=True)
        kinds = [_WINDOW if every and il >= 2 and il % 4 != 1 else _INDEXED[0] for il in range(n_layer)]
    if len(kinds) < n_layer or set(kinds) - {*_INDEXED, _WINDOW}:
        raise c.refuse("layer_types", f"{_INDEXED[0]}, {_INDEXED[1]} or {_WINDOW} for every layer")
    return [kind == _WINDOW for kind in kinds[:n_layer]] + [True] * m.n_further


def _sizes(c: Config, window: bool) -> dict[str, int]:
    """Return heads, ranks and widths of the layers with a window, or of those without."""
    whole = {name: c.integer(name, least=1) for name in _SIZES if name != "head_dim"}
    if not window:
        return whole
    listed = c.get("per_layer_config")
    if listed is None:
        return {name: c.integer(f"swa_{name}", default=usual, least=1) for name, usual in _SWA.items()}
    own: Any = list(listed.values()) if isinstance(listed, dict) else []
    known = {*_SIZES, "num_key_value_heads", "qk_rope_head_dim"}
    if any(not isinstance(x, dict) or x != own[0] or set(x) - known for x in own):
        raise c.refuse("per_layer_config", "the same sizes in all layers with a window")
    sizes = whole | (own[0] if own else {})
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes.values()):
        raise c.fail("per_layer_config", "should hold whole numbers above 0")
    return sizes


def _kv_b(m: b.Build, found: b.Found) -> None:
    own = _sizes(m.config, _windows(m)[found.block])
    split_heads(m, found, own["num_attention_heads"], own["qk_nope_head_dim"], own["v_head_dim"])


def _latent_norm(name: str) -> b.Rule:
    """Return a rule for a norm of latents, which gets the factor that torch applies behind it."""

    def rule(m: b.Build, found: b.Found) -> None:
        rescaled = m.config.flag("apply_mla_qkv_lora_rescale", default=True)
        factor = np.float32(math.sqrt(k.embd(m) / found.shape[0]) if rescaled else 1.0)

        def value(x: Floats) -> Floats:
            return x * factor

        m.plain(found, b.place(name, found), value=value)

    return rule


DOTS3: b.Table = {
    "layers.*.self_attn.kv_b_proj": _kv_b,
    "layers.*.self_attn.q_a_layernorm": _latent_norm("blk.*.attn_q_a_norm"),
    "layers.*.self_attn.kv_a_layernorm": _latent_norm("blk.*.attn_kv_a_norm"),
    "layers.*.self_attn.k_rope_only_layernorm": "blk.*.attn_k_norm",
    "layers.*.self_attn.g_proj": "blk.*.attn_gate",
}


def _rotation(m: b.Build, kind: str, key: str, usual: float) -> float:
    """Return the base of the rotation of layers of a kind."""
    c = m.config
    found = read_rope(c, kind)
    if found.type != "default":
        raise c.refuse("rope_parameters" if "rope_parameters" in c else "rope_scaling", "a plain rotation")
    return found.theta if "rope_parameters" in c and "rope_theta" in found.values else c.number(key, default=usual)


def _dots3(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m, further=True)
    k.rms_eps(m)
    windows = _windows(m)
    full, own = _sizes(c, False), _sizes(c, True)
    rotated = c.integer("qk_rope_head_dim", least=2)
    mla_keys(m)
    m.key("attention.head_count", [(own if w else full)["num_attention_heads"] for w in windows])
    m.key("vocab_size", c.integer("vocab_size", least=1))
    m.key("rope.freq_base", _rotation(m, "indexed_attention", "rope_theta", 8e7))
    if any(windows):
        if own.get("qk_rope_head_dim", c.integer("swa_qk_rope_head_dim", default=rotated)) != rotated:
            raise c.refuse("swa_qk_rope_head_dim", "qk_rope_head_dim")
        if own["q_lora_rank"] != full["q_lora_rank"]:
            raise c.refuse("swa_q_lora_rank", "q_lora_rank")
        m.key("rope.freq_base_swa", _rotation(m, _WINDOW, "swa_rope_theta", 5e4))
        m.key("attention.kv_lora_rank_swa", own["kv_lora_rank"])
        m.key("attention.key_length_swa", own["kv_lora_rank"] + rotated)
        m.key("attention.value_length_swa", own["kv_lora_rank"])
        m.key("attention.key_length_mla_swa", own["qk_nope_head_dim"] + rotated)
        m.key("attention.value_length_mla_swa", own["v_head_dim"])
    m.key("attention.sliding_window", c.integer("sliding_window", "sliding_window_size", default=512, least=1))
    m.key("attention.sliding_window_pattern", windows[: m.n_layer])
    k.indexer(m)
    m.key("attention.indexer.types", [not w for w in windows[: m.n_layer]])
    _experts(m)
    for key, known in (
        ("use_dsa", True), ("indexer_rope_interleave", True), ("k_rope_only_layernorm", True),
        ("attention_gate_type", "headwise"), ("swa_attention_gate_type", "headwise"), ("normalization", "RMSNorm"),
        ("final_norm", "RMSNorm"), ("multi_latent_attention", True), ("softmax_type", "vanilla"),
        ("attention_bias", False), ("mlp_bias", False), ("rope_interleave", True),
    ):  # fmt: skip
        c.expect(key, known)
    c.ignore("swa_num_key_value_heads", "max_window_layers", "use_sliding_window", "swa_head_dim", "qk_head_dim")
    for il in (il for il, window in enumerate(windows) if not window):
        if not m.has(rf"layers\.{il}\.self_attn\.indexer\.wq_b\."):
            raise c.refuse("layer_types", "an indexer in every layer without a window")


def _experts(m: b.Build) -> None:
    c = m.config
    freq = c.get("moe_layer_freq")
    if isinstance(freq, list):
        if c.items("mlp_layer_types") is None:
            c.values["mlp_layer_types"] = ["sparse" if x else "dense" for x in freq[: m.n_layer]]
    else:
        c.expect("moe_layer_freq", 1)
    m.key("leading_dense_block_count", k.dense_lead(m, usual=1))
    k.experts(m, "n_routed_experts")
    m.key("expert_shared_count", c.integer("n_shared_experts", least=1))
    c.ignore("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size")  # tensors tell
    m.key("expert_weights_scale", c.number("routed_scaling_factor", default=1.0))
    m.key("expert_weights_norm", c.flag("norm_topk_prob", default=True))
    m.key("expert_gating_func", 2)
    groups = c.integer("n_group", default=1)
    if groups > 1:
        m.key("expert_group_count", groups)
        m.key("expert_group_used_count", c.integer("topk_group", default=1))
    c.ignore("topk_group")
    c.expect("scoring_func", "sigmoid")
    c.expect("topk_method", "noaux_tc")


ARCHITECTURES = (
    b.Architecture(
        "dots3note",
        ("Dots3NoteForCausalLM", "Dots3NoteForConditionalGeneration", "Dots3NoteTextForCausalLM"),
        _dots3, DOTS3, k.tied, r"vision_encoder|vision_tower|audio_encoder|audio_adapter|audio_tower",
        frozenset({"num_mtp_layers", "mtp_loss_coef", "mtp_head_sharing"}), names="glm-dsa",
    ),
)  # fmt: skip
