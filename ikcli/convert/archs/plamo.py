"""PLaMo."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.pieces import Order


def _plamo_heads(m: b.Build) -> tuple[int, int]:
    """Return the numbers of query and key heads; query head i uses key head i % n_kv."""
    c = m.config
    n_head, shared = c.integer("num_attention_heads", least=1), c.integer("n_shared_head", default=8, least=1)
    if n_head % shared:
        raise c.fail("n_shared_head", f"is {shared}, which does not divide {n_head} heads")
    return n_head, n_head // shared


def _grouped(rotated: bool) -> Callable[[b.Build, int], Order]:
    """Return an order that groups query heads by key head and, if `rotated`, makes rotated pairs adjacent."""

    def order(m: b.Build, n: int) -> Order:
        n_head, n_kv = _plamo_heads(m)
        if n % (2 * n_head):
            raise m.config.fail("num_attention_heads", f"is {n_head}, which does not fit {n} rows")
        heads = np.arange(n).reshape(n_head // n_kv, n_kv, n // n_head).swapaxes(0, 1).reshape(n_head, -1)
        return b.in_pairs(heads) if rotated else heads.reshape(-1)

    return order


def _plamo_keys_order(m: b.Build, n: int) -> Order:
    n_kv = _plamo_heads(m)[1]
    if n % (2 * n_kv):
        raise m.config.fail("n_shared_head", f"leaves {n_kv} key heads, which do not fit {n} rows")
    return b.in_pairs(np.arange(n).reshape(n_kv, -1))


PLAMO: b.Table = {
    "layers.layers.*.self_attn.q_proj": b.to("blk.*.attn_q", order=_grouped(True)),
    "layers.layers.*.self_attn.k_proj": b.to("blk.*.attn_k", order=_plamo_keys_order),
    "layers.layers.*.self_attn.o_proj": b.to("blk.*.attn_output", columns=_grouped(False)),
}


def _plamo(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    m.key("block_count", m.n_layer)
    m.key("context_length", c.integer("max_position_embeddings", default=4096, least=1))
    m.key("embedding_length", c.integer("hidden_size", least=1))
    m.key("feed_forward_length", c.integer("intermediate_size", least=1))
    n_head, n_kv = _plamo_heads(m)
    m.key("attention.head_count", n_head)
    m.key("attention.head_count_kv", n_kv)
    k.rope(m)
    k.rms_eps(m, 1e-6)
    for key in ("vocab_size", "num_key_value_heads"):  # the latter is the number of query heads here
        c.given(key)


ARCHITECTURES = (b.Architecture("plamo", ("PlamoForCausalLM",), _plamo, PLAMO, k.tied),)
