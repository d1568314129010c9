"""Texts to vectors: whole texts side by side in one micro-batch, long ones piece by piece.

All of it happens in the room of one sequence, so a server embeds with a slot that nobody uses, and a micro-batch holds
as many texts as `-ub` has room for, however few sequences there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.engine.pooling import FloatRows, Pool, Pooling, RankHead, normalized
from ikcli.engine.session import Session
from ikcli.errors import UsageError

Tokens = npt.NDArray[np.int32]


@dataclass(slots=True)
class _Text:
    key: Any
    tokens: Tokens
    pool: Pool
    n_done: int = 0

    @property
    def n_left(self) -> int:
        return len(self.tokens) - self.n_done


class Embedder:
    """See the module. `seq`: the sequence whose room is used; nothing is left of what it held."""

    def __init__(self, session: Session, pooling: Pooling, seq: int = 0, head: RankHead | None = None) -> None:
        """`head`: that of the model, where it is known already."""
        self.session, self.pooling, self.seq = session, pooling, seq
        self.head = (head or RankHead.of(session.model)) if pooling is Pooling.RANK else None
        self._waiting: deque[_Text] = deque()

    def __len__(self) -> int:
        """Texts that are not done."""
        return len(self._waiting)

    def add(self, key: Any, tokens: Sequence[int] | Tokens) -> None:
        """A text to be embedded; UsageError if it is empty or too long."""
        ids, most = np.ascontiguousarray(tokens, np.int32), self.session.n_ctx_seq
        if not len(ids):
            raise UsageError("a text without tokens has no embedding")
        if len(ids) > most:
            raise UsageError(f"the text ({len(ids)} tokens) exceeds the context of {most} tokens; raise -c")
        self._waiting.append(_Text(key, ids, Pool(self.pooling, len(ids))))

    def drop(self, key: Any) -> None:
        """Forget the texts of a key."""
        self._waiting = deque(t for t in self._waiting if t.key != key)

    def step(self) -> list[tuple[Any, FloatRows]]:
        """Compute one micro-batch; key and rows of every text that is done now, in the order in which they came."""
        if not self._waiting:
            return []
        texts = self._choose()
        n_done = texts[0].n_done
        self.session.truncate(self.seq, n_done)
        pieces = [t.tokens[t.n_done : t.n_done + self.session.n_ubatch] for t in texts]
        wanted = [t.pool.wanted(len(p)) for t, p in zip(texts, pieces, strict=True)]
        starts = np.cumsum([0, *map(len, pieces)])
        out_ids = np.array([start + i for start, w in zip(starts, wanted, strict=False) for i in w], np.int64)
        rows = self.session.embed(self.seq, pieces, out_ids, n_done)
        at, finished = 0, []
        for text, piece, w in zip(texts, pieces, wanted, strict=True):
            text.pool.add(len(piece), rows[at : at + len(w)])
            text.n_done += len(piece)
            at += len(w)
            if text.pool.done:
                found = text.pool.result()
                finished.append((text.key, self.head(found) if self.head is not None else found))
        for _ in finished:
            self._waiting.popleft()
        if finished and not (self._waiting and self._waiting[0].n_done):
            self.session.truncate(self.seq, 0)
        return finished

    def _choose(self) -> list[_Text]:
        """The next piece of the first text, and as many whole texts behind it as there is room for."""
        first, session = self._waiting[0], self.session
        chosen, room = [first], session.n_ubatch - first.n_left
        if not session.side_by_side or (first.n_done and session.sequences.has_windows):
            return chosen
        room = min(room, session.n_ctx_seq - len(first.tokens))
        for text in islice(self._waiting, 1, None):
            room -= len(text.tokens)
            if room < 0:
                break
            chosen.append(text)
        return chosen


def embed(session: Session, texts: Sequence[Sequence[int]], pooling: Pooling, normalize: int = 2) -> list[FloatRows]:
    """Rows of every text: one vector, without pooling one per token, scores of labels where the model ranks."""
    embedder = Embedder(session, pooling)
    for i, tokens in enumerate(texts):
        embedder.add(i, tokens)
    found: dict[int, FloatRows] = {}
    while len(embedder):
        found |= embedder.step()
    return [found[i] if pooling is Pooling.RANK else normalized(found[i], normalize) for i in range(len(texts))]
