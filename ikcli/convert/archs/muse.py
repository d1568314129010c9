"""Muse Glimmer."""

from __future__ import annotations

from typing import Any

import numpy as np

from ikcli.convert import build as b
from ikcli.convert import keys as k

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


ARCHITECTURES = (
    b.Architecture(
        "muse-glimmer", ("MuseGlimmerForConditionalGeneration", "MuseGlimmerForCausalLM"), _muse, MUSE, _finish_muse,
        r"vision_", names="gemma3",
    ),
)  # fmt: skip
