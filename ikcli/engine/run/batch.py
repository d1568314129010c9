"""The input of one decode call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of one or more sequences; positions of a sequence are consecutive and its tokens are adjacent.

    tokens, pos, seq: int32 (n,); logits: bool (n,), True where the token's logits are wanted.
    """

    tokens: npt.NDArray[np.int32]
    pos: npt.NDArray[np.int32]
    seq: npt.NDArray[np.int32]
    logits: npt.NDArray[np.bool_]

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

    def slice(self, start: int, stop: int) -> Batch:
        """Return tokens start..stop-1."""
        s = np.s_[start:stop]
        return Batch(self.tokens[s], self.pos[s], self.seq[s], self.logits[s])
