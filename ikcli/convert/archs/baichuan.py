"""Baichuan."""

from __future__ import annotations

import numpy as np

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.pieces import TensorRows


def _qkv_in_pairs(m: b.Build, found: b.Found) -> None:
    """Split W_pack into queries, keys and values; order the first two for a rotation of adjacent columns."""
    n = found.shape[0] // 3
    order = b.rotated_pairs()(m, n)
    for i, name in enumerate(("attn_q", "attn_k", "attn_v")):
        rows = i * n + (np.arange(n) if name == "attn_v" else order)
        m.add(f"blk.{found.block}.{name}.weight", (TensorRows(found.name, n, found.shape[1], order=rows),))


BAICHUAN: b.Table = {"layers.*.self_attn.W_pack": _qkv_in_pairs}


def _baichuan(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m)
    k.rms_eps(m)
    if m.n_layer != 40:  # the 13B model has ALiBi instead
        k.rope(m)
    m.key("rope.dimension_count", k.embd(m) // c.integer("num_attention_heads"))
    c.ignore("model_max_length", "z_loss_weight", "vocab_size")


ARCHITECTURES = (
    b.Architecture("baichuan", ("BaichuanForCausalLM", "BaiChuanForCausalLM"), _baichuan, BAICHUAN, k.tied),
)
