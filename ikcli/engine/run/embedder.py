"""Turn texts into vectors: whole texts side by side in one micro-batch, long ones piece by piece.

All of them use the cells of one sequence. A server therefore embeds in any free slot, and a micro-batch holds as many
texts as `-ub` has room for, however few sequences there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.engine.plan.programs import EMBEDS
from ikcli.engine.run.encoders import way_out
from ikcli.engine.run.pooling import FloatRows, Head, Pooling, PoolState, head_of, normalized, rank_pooling
from ikcli.engine.run.session import Session
from ikcli.errors import IkError, UnsupportedError, UsageError
from ikcli.graph.micro_batch import Segment
from ikcli.models import EXPAND_MIN_TOKENS

Tokens = npt.NDArray[np.int32]


def check_embeds(session: Session) -> None:
    """Raise UnsupportedError if a session has no embeddings."""
    if "decode" + EMBEDS not in session.programs:
        wanted = session.outputs.embeddings
        why = f"embeddings of {session.model.hp.arch} models are not supported" if wanted else ""
        raise UnsupportedError(f"{session.model.source}: {why or 'the session was not opened for embeddings'}")


def side_by_side(session: Session) -> bool:
    """Return whether texts can be computed side by side: recurrent layers have one state per sequence."""
    return not session.sequences.kind.has_states


def states(
    session: Session, seq: int, texts: Sequence[Tokens], out_ids: npt.NDArray[np.int64], n_done: int = 0
) -> FloatRows:
    """Return the last normed state of these rows of texts that are computed at once, in the cells of a sequence.

    The first text continues after its `n_done` tokens, which the sequence holds. The others are whole, follow it in the
    cells (and in caches of windows), and are gone afterwards. They have at most `n_ubatch` tokens; the next micro-batch
    overwrites the rows.
    """
    check_embeds(session)
    if len(texts) > 1 and not side_by_side(session):
        raise IkError("texts of a model with recurrent layers are computed one by one")
    if n_done and not session.model.hp.causal:
        raise IkError("an encoder reads a text at once")
    n = sum(map(len, texts))
    session.sequences.check_next(seq, n_done, n)
    window, cell = session.sequences.room(seq, n), seq * session.n_ctx_seq
    segments, start, at, pos = [], 0, 0, n_done
    for text in texts:
        segments.append(Segment(start, len(text), cell + at, pos, seq, window + at))
        start, at, pos = start + len(text), at + pos + len(text), 0
    many = n >= EXPAND_MIN_TOKENS and "prefill" + EMBEDS in session.programs
    tokens = np.concatenate(texts) if len(texts) > 1 else texts[0]
    found = session.run_segments(("prefill" if many else "decode") + EMBEDS, tokens, out_ids, segments)
    session.sequences.n_past[seq] = n_done + len(texts[0])
    return found


@dataclass(slots=True)
class _Text:
    key: Any
    tokens: Tokens
    pool: PoolState
    n_done: int = 0

    @property
    def n_left(self) -> int:
        return len(self.tokens) - self.n_done


class Embedder:
    """Embed texts in the cells of the sequence `seq`, whose previous content is lost; see the module."""

    def __init__(self, session: Session, pooling: Pooling, seq: int = 0, head: Head | None = None) -> None:
        """Create an embedder. `head`: what follows the pooling, if it is known already."""
        self.session, self.pooling, self.seq = session, pooling, seq
        self.head = head or head_of(session.model, pooling)
        self._pooled = rank_pooling(session.model) if pooling is Pooling.RANK else pooling
        self._waiting: deque[_Text] = deque()
        self._alone = 0  # micro-batches of one text, after a failure of one with several texts
        self.failed: Any = None  # key of the text for which `step` raised

    @property
    def n_tokens(self) -> int:
        """Return the number of tokens that are not done."""
        return sum(text.n_left for text in self._waiting)

    def __len__(self) -> int:
        """Return the number of texts that are not done."""
        return len(self._waiting)

    def add(self, key: Any, tokens: Sequence[int] | Tokens) -> None:
        """Add a text; raise UsageError if it is empty or too long."""
        ids, most = np.ascontiguousarray(tokens, np.int32), self.session.longest_text
        if not len(ids):
            raise UsageError("a text without tokens has no embedding")
        if len(ids) > most:
            hp = self.session.model.hp
            what = f"context of {most} tokens" if hp.causal else f"{most} tokens that the model reads at once"
            way = way_out(hp, self.session.n_ctx_seq, self.session.n_ubatch)
            raise UsageError(f"the text ({len(ids)} tokens) exceeds the {what}; {way}")
        self._waiting.append(_Text(key, ids, PoolState(self._pooled, len(ids))))

    def drop(self, unwanted: Callable[[Any], bool]) -> None:
        """Drop texts by their keys."""
        self._waiting = deque(t for t in self._waiting if not unwanted(t.key))

    def step(self) -> list[tuple[Any, FloatRows]]:
        """Compute one micro-batch; return key and rows of every text that is now done, in order of arrival.

        If a micro-batch of several texts fails, each is tried alone, so that only the text at fault fails.
        """
        if not self._waiting:
            return []
        texts = self._choose()
        n_done = texts[0].n_done
        self.session.truncate(self.seq, n_done)
        pieces = [t.tokens[t.n_done : t.n_done + self.session.n_ubatch] for t in texts]
        wanted = [t.pool.wanted(len(p)) for t, p in zip(texts, pieces, strict=True)]
        starts = np.cumsum([0, *map(len, pieces)])
        out_ids = np.array([start + i for start, w in zip(starts, wanted, strict=False) for i in w], np.int64)
        try:
            rows = states(self.session, self.seq, pieces, out_ids, n_done)
        except Exception:
            if len(texts) == 1:
                self.failed = texts[0].key
                raise
            self._alone = len(texts)
            return []
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
        """Choose the next piece of the first text, and as many whole texts after it as fit."""
        first, session = self._waiting[0], self.session
        chosen, room = [first], session.n_ubatch - first.n_left
        self._alone -= 1
        if self._alone >= 0 or not side_by_side(session) or (first.n_done and session.sequences.has_windows):
            return chosen
        room = min(room, session.n_ctx_seq - len(first.tokens))
        for text in islice(self._waiting, 1, None):
            room -= len(text.tokens)
            if room < 0:
                break
            chosen.append(text)
        return chosen


def embed(session: Session, texts: Sequence[Sequence[int]], pooling: Pooling, normalize: int = 2) -> list[FloatRows]:
    """Return the rows of every text: one vector; one per token without pooling; scores of labels if the model ranks."""
    embedder = Embedder(session, pooling)
    for i, tokens in enumerate(texts):
        embedder.add(i, tokens)
    found: dict[int, FloatRows] = {}
    while len(embedder):
        found |= embedder.step()
    return [found[i] if pooling is Pooling.RANK else normalized(found[i], normalize) for i in range(len(texts))]
