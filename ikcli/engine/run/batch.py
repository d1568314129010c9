"""The input of one decode call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.engine.run.media import Media, Placed


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of one or more sequences; positions of a sequence are consecutive and its tokens are adjacent.

    tokens, pos, seq: int32 (n,); logits: bool (n,), True where the token's logits are wanted. `media`: images, whose
    rows replace the embeddings of as many tokens; the ids there are negative (`Media.token`). `pos` counts cells, so an
    image of n tokens takes n of them; the session derives the positions that M-RoPE rotates by.
    """

    tokens: npt.NDArray[np.int32]
    pos: npt.NDArray[np.int32]
    seq: npt.NDArray[np.int32]
    logits: npt.NDArray[np.bool_]
    media: tuple[Placed, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def single(cls, tokens: Any, pos0: int = 0, seq: int = 0, *, logits: str = "last") -> Batch:
        """Make a batch of consecutive tokens of one sequence from position pos0; logits: "last", "all" or "none"."""
        t = np.ascontiguousarray(tokens, dtype=np.int32)
        want = np.full(len(t), logits == "all")
        if logits == "last":
            want[-1:] = True
        pos = np.arange(pos0, pos0 + len(t), dtype=np.int32)
        return cls(t, pos, np.full(len(t), seq, dtype=np.int32), want)

    @classmethod
    def mixed(
        cls, parts: Sequence[Sequence[int] | Media], pos0: int = 0, seq: int = 0, *, logits: str = "last"
    ) -> Batch:
        """Make a batch of one sequence from token ids and images in order."""
        tokens: list[int] = []
        media: list[Placed] = []
        for part in parts:
            if isinstance(part, Media):
                media.append(Placed(len(tokens), part))
                tokens += [part.token] * len(part)
            else:
                tokens += part
        made = cls.single(tokens, pos0, seq, logits=logits)
        return cls(made.tokens, made.pos, made.seq, made.logits, tuple(media))

    def slice(self, start: int, stop: int) -> Batch:
        """Return tokens start..stop-1."""
        s = np.s_[start:stop]
        media = tuple(Placed(p.start - start, p.media) for p in self.media
                      if p.start < stop and p.start + len(p.media) > start)  # fmt: skip
        return Batch(self.tokens[s], self.pos[s], self.seq[s], self.logits[s], media)

    def cuts(self, n_ubatch: int) -> list[tuple[int, int]]:
        """Return the micro-batches of at most n_ubatch tokens as (start, stop).

        An image whose tokens see each other in both directions stays whole where it fits.
        """
        found, start, n = [], 0, len(self)
        while start < n:
            stop = min(start + n_ubatch, n)
            for p in self.media:
                if p.media.both and start < p.start < stop < p.start + len(p.media):
                    stop = p.start
            found.append((start, stop))
            start = stop
        return found
