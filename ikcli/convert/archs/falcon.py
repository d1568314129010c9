"""Falcon."""

from __future__ import annotations

import numpy as np

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.pieces import Order

FALCON: b.Table = {
    "h.*.self_attention.query_key_value": lambda m, t: m.plain(
        t, f"blk.{t.block}.attn_qkv{t.suffix}", order=_falcon_order(m, t.shape[0])
    ),
}


def _falcon_kv(m: b.Build) -> int:
    c = m.config
    n_head = c.integer("num_attention_heads", "n_head", least=1)
    if c.flag("new_decoder_architecture"):
        return c.integer("num_kv_heads", "n_head_kv", default=n_head, least=1)
    return 1 if c.flag("multi_query", default=True) else n_head


def _falcon_order(m: b.Build, n: int) -> Order:
    """Return the order that turns (queries, key, value) of each key head into all queries, all keys, all values."""
    n_head, n_kv = m.config.integer("num_attention_heads", "n_head"), _falcon_kv(m)
    if n_head % n_kv or n % (n_head + 2 * n_kv):
        raise m.config.fail(
            "num_attention_heads", f"is {n_head}, which does not fit {n} rows of queries, keys and values"
        )
    rows = np.arange(n).reshape(n_kv, n_head // n_kv + 2, -1)
    return np.concatenate([rows[:, :-2].reshape(-1), rows[:, -2].reshape(-1), rows[:, -1].reshape(-1)])


def _falcon(m: b.Build) -> None:
    c = m.config
    k.old_sizes(m, c.integer("ffn_hidden_size", default=4 * k.embd(m)), _falcon_kv(m))
    k.activation(m, *k.GELU_TANH, keys=("activation",))
    k.layer_eps(m)
    k.rope(m)
    c.expect("parallel_attn", True)
    c.expect("alibi", False)
    c.ignore("bias", "num_ln_in_parallel_attn", "num_kv_heads", "n_head_kv", "multi_query", "max_position_embeddings")


ARCHITECTURES = (
    b.Architecture(
        "falcon", ("FalconForCausalLM", "RWForCausalLM"), _falcon, FALCON, k.tied_by_default, strip="transformer."
    ),
)
