"""InternLM 2."""

from __future__ import annotations

import numpy as np

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.pieces import TensorRows


def _qkv_by_group(m: b.Build, found: b.Found) -> None:
    """Split (queries, key, value) of each key head; order queries and keys for adjacent pairs."""
    c = m.config
    n_head = c.integer("num_attention_heads", least=1)
    n_kv = c.integer("num_key_value_heads", default=n_head, least=1)
    width = found.shape[0] // (n_head + 2 * n_kv)
    if n_head % n_kv or width % 2 or width * (n_head + 2 * n_kv) != found.shape[0]:
        raise c.fail(
            "num_attention_heads", f"is {n_head}, which does not fit the {found.shape[0]} rows of {found.name}"
        )
    rows = np.arange(found.shape[0]).reshape(n_kv, n_head // n_kv + 2, width)
    parts = {"attn_q": rows[:, :-2].reshape(-1), "attn_k": rows[:, -2].reshape(-1), "attn_v": rows[:, -1].reshape(-1)}
    for name, order in parts.items():
        if name != "attn_v":
            heads = n_head if name == "attn_q" else n_kv
            order = b.in_pairs(order.reshape(heads, width))
        m.add(f"blk.{found.block}.{name}.weight", (TensorRows(found.name, len(order), found.shape[1], order=order),))


INTERNLM2: b.Table = {
    "layers.*.attention.wqkv": _qkv_by_group,
}


def _internlm2(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m)
    k.rope(m)
    k.rms_eps(m)
    c.expect("bias", False)
    c.ignore("vocab_size")


ARCHITECTURES = (b.Architecture("internlm2", ("InternLM2ForCausalLM",), _internlm2, INTERNLM2, k.tied),)
