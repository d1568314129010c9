"""Attention with linear biases (ALiBi): K*Q of head h plus slope_h times the position of the key.

The query's own position would subtract the same number for all keys, so softmax cancels it. The sum is made part of the
product: keys get columns of whole numbers up to 127 that encode the position, and queries get matching columns with the
slope of their head. Both survive rounding to f16, bf16 or blocks of 8 bits unchanged (`Alibi`).
"""

from __future__ import annotations

from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.graph import Graph, HeadSlice, Node
from ikcli.graph.ops_alibi import BLOCK, Alibi
from ikcli.models.config import GraphConfig
from ikcli.models.hparams import HParams

_EXACT = (GGMLType.F32, GGMLType.F16, GGMLType.BF16, GGMLType.Q8_0)


def slopes(n_head: int, max_bias: float) -> tuple[float, ...]:
    """Return the slopes of n heads: powers of 2**(-max_bias / n), n being the largest power of two.

    Further heads get every other power between these.
    """
    n = 1 << n_head.bit_length() - 1
    first = [2.0 ** (-max_bias * (h + 1) / n) for h in range(n)]
    return tuple(first + [2.0 ** (-max_bias * (2 * h + 1) / (2 * n)) for h in range(n_head - n)])


def width(hp: HParams) -> int:
    """Return the columns of a head of queries and keys."""
    return hp.head_dim_k + _more(hp)


def _more(hp: HParams) -> int:
    """Return the columns to add to a head so that the last ones are a whole block."""
    return BLOCK + -hp.head_dim_k % BLOCK


def queries(g: Graph, hp: HParams, cfg: GraphConfig, q: Node, scale: float) -> Node:
    """Return query heads with their slopes, over the scale of K*Q."""
    if cfg.type_k not in _EXACT:
        raise UnsupportedError(
            f"{hp.source}: attention weakened by distance needs keys of f32, f16, bf16 or q8_0, not "
            f"{TYPES[cfg.type_k].name}; use -ctk f16"
        )
    factors = tuple(s / scale for s in slopes(hp.n_head, hp.max_alibi_bias))
    more = g.record(Alibi(_more(hp), factors), "alibi_queries")
    d, n = hp.head_dim_k, _more(hp)
    return g.concat_heads([HeadSlice(q, 0, d, d), HeadSlice(more, 0, n, n)], hp.n_head, "Qcur_alibi")


def keys(g: Graph, hp: HParams, k: Node) -> Node:
    """Return key heads with their position."""
    more = g.record(Alibi(_more(hp)), "alibi_keys")
    d = hp.head_dim_k
    return g.concat_heads([HeadSlice(k, 0, d, d), HeadSlice(more, 0, _more(hp), 0)], hp.n_head_kv, "Kcur_alibi")
