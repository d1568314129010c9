"""Compute all rows of the heads along a given text, to measure them (`ik perplexity --mtp`, `ik imatrix`).

Head k (from 0) reads, at position p, the states of the head before it (the first one those of the model) and the
embedding of token p + k + 1, as in training, and predicts token p + k + 2. A row is computed as soon as that token is
known, so that what it predicts can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ikcli.engine.run.mtp import FloatRows, Heads, Piece, Tokens
from ikcli.errors import UnsupportedError

Rows = Callable[[int, int, int, FloatRows, Tokens], None]
"""Takes sequence, head, first position, logits (n, n_vocab), and the tokens (n,) that follow in the text."""


@dataclass(slots=True)
class _Text:
    """A sequence: its tokens so far; by head, the states of rows that it has not computed, and the first of them."""

    n_heads: int
    tokens: Tokens = field(default_factory=lambda: np.zeros(0, np.int32))
    first: list[int] = field(init=False)
    states: list[list[FloatRows]] = field(init=False)

    def __post_init__(self) -> None:
        self.first, self.states = [0] * self.n_heads, [[] for _ in range(self.n_heads)]


class HeadRows:
    """Follow the texts that a session computes, from position 0 on; attached to its heads until `close`."""

    def __init__(self, heads: Heads, on_rows: Rows | None = None) -> None:
        if heads.drafts_blocks:
            raise UnsupportedError("a head that drafts blocks (DFlash) cannot be measured on a text")
        if heads.ids is not None:
            raise UnsupportedError("a head whose logits are of a part of the vocabulary cannot be measured on a text")
        self._heads, self._on_rows = heads, on_rows
        self._texts: dict[int, _Text] = {}
        heads.follower = self

    def take(self, seq: int, pos: int, tokens: Tokens, states: FloatRows) -> None:
        """Take what a micro-batch computed of a sequence; position 0 begins a new text."""
        if pos == 0:
            self._texts[seq] = _Text(self._heads.n_heads)
        text = self._texts[seq]
        text.tokens = np.concatenate([text.tokens, tokens])
        text.states[0].append(states)

    def run(self) -> None:
        """Compute the rows that can be computed; nothing is in flight."""
        for seq, text in self._texts.items():
            for head in range(self._heads.n_heads):
                self._run(seq, text, head)

    def _run(self, seq: int, text: _Text, head: int) -> None:
        states = np.concatenate([np.empty((0, self._heads.n_embd), np.float32), *text.states[head]])
        n_due = min(len(states), len(text.tokens) - head - 2 - text.first[head])
        most = self._heads.session.n_ubatch
        for at in range(0, n_due, most):
            n, pos = min(most, n_due - at), text.first[head] + at
            after = text.tokens[pos + head + 1 : pos + head + 1 + n]
            logits, made = self._heads.rows(head, Piece(seq, pos, after, states[at : at + n]))
            if self._on_rows is not None:
                self._on_rows(seq, head, pos, logits, text.tokens[pos + head + 2 : pos + head + 2 + n])
            if head + 1 < self._heads.n_heads:
                text.states[head + 1].append(made.copy())
        if n_due > 0:
            text.first[head] += n_due
            text.states[head] = [states[n_due:]]

    def close(self) -> None:
        """Leave the heads as they were."""
        self._heads.follower = None
