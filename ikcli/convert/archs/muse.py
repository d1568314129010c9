"""Muse Glimmer, and Talkie 1930."""

from __future__ import annotations

from typing import Any

import numpy as np

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.pieces import Matrix, TensorRows, as_float32
from ikcli.convert.source import Array

MUSE: b.Table = b.PAIRS | {
    "layers.*.input_layernorm": b.to("blk.*.attn_norm", value=b.plus_one),
    "layers.*.post_attention_layernorm": b.to("blk.*.post_attention_norm", value=b.plus_one),
    "layers.*.pre_feedforward_layernorm": b.to("blk.*.ffn_norm", value=b.plus_one),
    "layers.*.post_feedforward_layernorm": b.to("blk.*.post_ffw_norm", value=b.plus_one),
    "layers.*.self_attn.gate_proj": "blk.*.attn_gate",
}  # fmt: skip


def _muse(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m)
    k.rms_eps(m)
    m.key("rope.dimension_count", k.head_dim(m))
    found = k.rope(m)
    n = m.n_layer
    kinds: list[Any] = ["sliding_attention" if (n - 1 - i) % 4 else "full_attention" for i in range(n)]
    is_window = k.windows(m, 4, 0, c.items("layer_types") or kinds)
    m.key("attention.sliding_window", c.integer("sliding_window", least=1))
    m.key("attention.sliding_window_pattern", is_window)
    bases = c.items("layer_rope_theta")
    if bases is not None and bases != [found.theta * w for w in is_window]:
        raise c.refuse("layer_rope_theta", "the base of rope_parameters in layers with a window, 0 in the others")
    m.key("logit_scale", c.number("output_multiplier"))
    m.key("final_logit_softcapping", c.number("final_logit_softcapping"))
    c.expect("post_norm_eps", 1e-8)
    c.expect("attention_bias", False)
    c.ignore("vocab_size", "layer_types")


def _finish_muse(m: b.Build) -> None:
    """Add constant weights to the head norms, which have none; those of queries are a factor."""
    k.tied(m)
    width = int(m.metadata["muse-glimmer.rope.dimension_count"])
    for name, factor in (("q", m.config.number("qk_scale_factor")), ("k", 1.0)):
        for il in range(m.n_layer):
            m.constant(f"blk.{il}.attn_{name}_norm.weight", np.full(width, factor, np.float32))


# --- Talkie -----------------------------------------------------------------------------------------------------------
def _talkie(m: b.Build) -> None:
    c = m.config
    k.sizes(m)
    m.key("attention.layer_norm_rms_epsilon", float(np.finfo(np.float32).eps))  # torch's where code gives none
    m.key("rope.dimension_count", k.head_dim(m))
    if k.rope(m).type != "default":
        raise c.refuse("rope_parameters", "default")
    k.activation(m, *k.SILU)
    c.ignore("vocab_size", "rms_norm_eps")


def _other_way(name: str) -> b.Rule:
    """Return a rule that negates the second half of every head, for a rotation that turns the other way round."""

    def rule(m: b.Build, found: b.Found) -> None:
        n, width = found.matrix()
        half = m.config.integer("head_dim", default=k.embd(m) // m.config.integer("num_attention_heads")) // 2
        if half < 1 or n % (2 * half):
            raise m.config.fail("head_dim", f"is {2 * half}, which does not fit {n} rows")
        m.add(b.place(name, found), (Matrix(found.name, n, width, 0, n, lambda rows: _negated(rows, half)),))

    return rule


def _negated(rows: Array, half: int) -> Array:
    """Return rows with every other `half` of them negated; of bfloat16, integers here, the highest bit is the sign."""
    made = rows.copy()
    second = made.reshape(-1, 2, half, rows.shape[1])[:, 1]
    if made.dtype.kind == "u":
        second ^= made.dtype.type(1 << (8 * made.itemsize - 1))
    else:
        np.negative(second, out=second)
    return made


def _gains(m: b.Build, found: b.Found) -> None:
    """Add the gains of query heads, each as a row, as llama.cpp does."""
    (n,) = found.shape
    m.add(b.place("blk.*.attn_q_norm.weight", found), (TensorRows(found.name, 1, n),), (1, n))


def _logit_scale(m: b.Build, found: b.Found) -> None:
    value = as_float32(m.source.read(found.name).reshape(-1), m.source.dtype(found.name))
    m.key("logit_scale", float(value[0]))


def _finish_talkie(m: b.Build) -> None:
    k.tied(m)
    m.metadata.setdefault("talkie.logit_scale", 1.0)


TALKIE: b.Table = {
    "embed": "token_embd",
    "lm_head": b.to("output.weight"),
    "lm_head_gain.w_g": _logit_scale,
    "blocks.*.attn.attn_query": _other_way("blk.*.attn_q"),
    "blocks.*.attn.attn_key": _other_way("blk.*.attn_k"),
    "blocks.*.attn.attn_value": "blk.*.attn_v",
    "blocks.*.attn.attn_resid": "blk.*.attn_output",
    "blocks.*.attn.head_gain.head_g": _gains,
    "blocks.*.attn_gain.a_g": b.to("blk.*.attn_output.scale!"),
    "blocks.*.mlp.mlp_gate": "blk.*.ffn_gate",
    "blocks.*.mlp.mlp_linear": "blk.*.ffn_up",
    "blocks.*.mlp.mlp_resid": "blk.*.ffn_down",
    "blocks.*.mlp_gain.a_g": b.to("blk.*.ffn_down.scale!"),
    "blocks.*.embed_skip.a_g": b.to("blk.*.layer_output_scale.weight"),
}

ARCHITECTURES = (
    b.Architecture(
        "muse-glimmer", ("MuseGlimmerForConditionalGeneration", "MuseGlimmerForCausalLM"), _muse, MUSE, _finish_muse,
        r"vision_", names="gemma3",
    ),
    b.Architecture("talkie", ("TalkieForCausalLM",), _talkie, TALKIE, _finish_talkie, names="llama"),
)  # fmt: skip
