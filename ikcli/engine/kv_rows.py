"""Cache rows of one sequence as plain arrays: taken out, put back, copied to another sequence.

A `CacheRows` holds, for every cache tensor of the session in a fixed order, the bytes of the first n positions of a
sequence: (n, row bytes) for tensors whose rows are cells, (columns, n * element bytes) for transposed ones. Rows do not
depend on the context size or the number of sequences, so they fit every session with the same model and cache settings.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ikcli.engine.session import Session
from ikcli.errors import IkError
from ikcli.gguf.constants import TYPE_TRAITS, row_n_bytes
from ikcli.graph import Cache

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class CacheRows:
    """Cached rows of positions 0..n_tokens-1, one array per cache tensor (see `layout`)."""

    n_tokens: int
    parts: tuple[Bytes, ...]

    @property
    def n_bytes(self) -> int:
        return sum(p.nbytes for p in self.parts)


def layout(session: Session) -> list[str]:
    """One line per cache tensor: equal lists mean that rows can be exchanged."""
    rotated = f"{int(session.graph_config.k_hadamard)}{int(session.graph_config.v_hadamard)}"
    return [
        f"{c.kind}-{c.il} {c.cols} {TYPE_TRAITS[c.type].name} {'transposed' if c.transposed else 'rows'} {rotated}"
        for c in _caches(session)
    ]


def shapes(session: Session, n_tokens: int) -> list[tuple[int, int]]:
    """Shapes of the parts of `CacheRows` of n tokens."""
    return [
        (c.cols, n_tokens * _element(c)) if c.transposed else (n_tokens, row_n_bytes(c.type, c.cols))
        for c in _caches(session)
    ]


def export_rows(session: Session, seq: int, n_tokens: int) -> CacheRows:
    """A copy of the first n_tokens positions of a sequence."""
    _check(session, seq, n_tokens)
    return CacheRows(n_tokens, tuple(_cells(session, c, seq, 0, n_tokens).copy() for c in _caches(session)))


def import_rows(session: Session, seq: int, rows: CacheRows, n_tokens: int | None = None) -> None:
    """Replace the cache of a sequence by the first n_tokens (default all) of these rows."""
    n = rows.n_tokens if n_tokens is None else n_tokens
    if not 0 <= n <= min(rows.n_tokens, session.n_ctx_seq):
        raise IkError(f"{n} cached tokens do not fit sequence {seq}, whose context is {session.n_ctx_seq}; raise -c")
    if [p.shape for p in rows.parts] != shapes(session, rows.n_tokens):
        raise IkError("cache rows of another model or cache type cannot be used")
    for cache, part in zip(_caches(session), rows.parts, strict=True):
        kept = part[:, : n * _element(cache)] if cache.transposed else part[:n]
        session.write_cells(cache, seq * session.n_ctx_seq, kept)
    session.set_n_past(seq, n)


def copy_rows(session: Session, src: int, dst: int, first: int, n_tokens: int) -> None:
    """Make positions first..n_tokens-1 of `dst` those of `src`; what comes before must be equal already."""
    _check(session, src, n_tokens)
    for cache in _caches(session):
        rows = _cells(session, cache, src, first, n_tokens - first)
        session.write_cells(cache, dst * session.n_ctx_seq + first, rows)
    session.set_n_past(dst, n_tokens)


def _caches(session: Session) -> list[Cache]:
    return sorted(session.cache_bytes(), key=lambda c: (c.il, c.kind))


def _element(cache: Cache) -> int:
    return TYPE_TRAITS[cache.type].type_size


def _cells(session: Session, cache: Cache, seq: int, first: int, n: int) -> Bytes:
    """Positions first..first+n-1 of a sequence, only to be read."""
    return session.read_cells(cache, seq * session.n_ctx_seq + first, n)


def _check(session: Session, seq: int, n_tokens: int) -> None:
    if not 0 <= n_tokens <= session.n_past(seq):
        raise IkError(f"sequence {seq} has {session.n_past(seq)} cached positions, not {n_tokens}")
