"""Operations of embeddings of n-grams: numbers of the tokens up to each one, hashed, and rows of a table by number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ikcli.graph.core import Array, Cache, Node, Op, Place, Rows, RowSpec, Run, Weight

MOST_TOKENS = 1 << 24
"""Tokens that a state can hold: as whole numbers of float32."""


@dataclass(frozen=True, slots=True)
class NGrams:
    """How n-grams become rows of a table.

    An n-gram is the token and those before it; 2-grams come first, then 3-grams and so on, each with an equal part of
    `sizes` and `offsets`. Its hash is the exclusive or of the products of tokens and `multipliers`, the token's own
    first; its row for a size and an offset is hash % size + offset. `end`: a token that stands for those before the
    beginning of a sequence, and for all before the last such token.
    """

    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    end: int

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.offsets) or len(self.sizes) % self.n_before:
            raise ValueError("n-grams of every length have as many rows")

    @property
    def n_before(self) -> int:
        """Return how many tokens before its own the longest n-gram has."""
        return len(self.multipliers) - 1

    def tables(self) -> tuple[bytes, bytes, bytes]:
        """Return multipliers, sizes and offsets as kernels read them: 64-bit integers."""
        parts = (self.multipliers, self.sizes, self.offsets)
        multipliers, sizes, offsets = (np.asarray(part, np.int64).tobytes() for part in parts)
        return multipliers, sizes, offsets

    @property
    def per_length(self) -> int:
        """Return the rows of n-grams of one length."""
        return len(self.sizes) // self.n_before


@dataclass(frozen=True, slots=True)
class NGramIds(Op):
    """The rows of a table for the n-grams of every token: [tokens, rows per token].

    The state holds the last tokens of the sequence, the oldest first.
    """

    name = "ngram_ids"
    stores = True
    is_table = True
    light = True
    dtype = "i32"

    state: Cache
    grams: NGrams

    def __post_init__(self) -> None:
        if self.state.cols != self.grams.n_before:
            raise ValueError("the state does not hold the tokens before one")

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return RowSpec(Rows.TOKENS), len(self.grams.sizes)

    def compute(self, run: Run) -> Array:
        grams, states, before = self.grams, run.cached(self.state), self.grams.n_before
        out = np.empty((len(run.state.tokens), len(grams.sizes)), np.int32)
        for s in run.state.segments:
            past = states[s.seq].astype(np.int64) if s.pos else np.full(before, grams.end)
            known = np.concatenate([past, run.state.tokens[s.start : s.start + s.n_tokens]])
            for i in range(s.n_tokens):
                at = before + i
                mixed, ended = int(known[at]) * grams.multipliers[0], False
                for j in range(1, before + 1):
                    ended = ended or known[at - j] == grams.end
                    mixed ^= (grams.end if ended else int(known[at - j])) * grams.multipliers[j]
                    part = slice((j - 1) * grams.per_length, j * grams.per_length)
                    pairs = zip(grams.sizes[part], grams.offsets[part], strict=True)
                    out[s.start + i, part] = [mixed % size + offset for size, offset in pairs]
            states[s.seq] = known[len(known) - before :]
        return out


@dataclass(frozen=True, slots=True)
class EmbedIds(Op):
    """Rows of a table by their numbers, those of a token side by side: [tokens, ids.cols * row length]."""

    name = "embed_ids"
    place = Place.WEIGHT
    light = True

    w: Weight
    ids: Node

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.ids.rows, self.ids.cols * self.w.ne0

    def compute(self, run: Run) -> Array:
        ids = run.value(self.ids)
        return run.weight(self.w)[ids].reshape(len(ids), -1)
