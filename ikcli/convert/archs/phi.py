"""Phi-1 to Phi-3."""

from __future__ import annotations

import math

import numpy as np

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.rope import read_rope
from ikcli.errors import UnsupportedError


def _phi2(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.GELU_TANH)
    k.sizes(m)
    k.partial_rope(m, k.head_width(m))
    k.layer_eps(m)
    c.expect("qk_layernorm", False)
    c.ignore("vocab_size")


def _phi3(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m)
    k.rms_eps(m)
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
    k.biases(m)


def _finish_phi3(m: b.Build) -> None:
    """Add the LongRoPE factors: for contexts up to the original one, and beyond."""
    k.tied(m)
    found = read_rope(m.config)
    if found.type != "longrope":
        return
    n = m.metadata["phi3.rope.dimension_count"] // 2
    for name in ("long", "short"):
        factors = found.values.get(f"{name}_factor")
        if not isinstance(factors, list) or len(factors) != n:
            raise m.config.fail("rope_scaling", f"should have {n} numbers as {name}_factor")
        m.constant(f"rope_factors_{name}.weight", np.array(factors, np.float32))


ARCHITECTURES = (
    b.Architecture("phi2", ("PhiForCausalLM",), _phi2, finish=k.tied),
    b.Architecture("phi3", ("Phi3ForCausalLM",), _phi3, finish=_finish_phi3),
)
