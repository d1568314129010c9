"""Protocols of the session that measurements use: tokens in, logits out, drop part of the cache.

The engine's session satisfies them; tests use small stand-ins with known logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ikcli.engine.run.batch import Batch

FloatRows = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int32]


class TokenizerLike(Protocol):
    """Converts text to token ids."""

    @property
    def bos_id(self) -> int | None:
        """The id of the begin-of-text token."""

    @property
    def add_bos(self) -> bool:
        """True if texts of this model start with the begin-of-text token."""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the token ids of a text."""


class HasTokenizer(Protocol):
    """Has the tokenizer of a model."""

    @property
    def tokenizer(self) -> TokenizerLike: ...


class SessionLike(Protocol):
    """A loaded model with its cache. Sizes in tokens; `n_ctx` counts all sequences together."""

    @property
    def n_ctx(self) -> int: ...

    @property
    def n_ctx_seq(self) -> int: ...

    @property
    def n_seq_max(self) -> int: ...

    @property
    def n_batch(self) -> int: ...

    @property
    def n_ubatch(self) -> int: ...

    @property
    def n_vocab(self) -> int: ...

    @property
    def tokenizer(self) -> TokenizerLike: ...

    def decode(self, batch: Batch) -> FloatRows:
        """Return logits (n_outputs, n_vocab) of the requested tokens in batch order, valid until the next call."""

    def step_each(self, tokens: Sequence[int], pos: Sequence[int], seqs: Sequence[int]) -> FloatRows:
        """Return the logits of one token of each of these sequences: how a server generates."""

    def clear(self) -> None:
        """Remove all sequences from the cache."""

    def truncate(self, seq: int, n: int) -> int:
        """Remove positions from n on of a sequence as far as possible and return how many positions are left."""

    def checkpoint(self, seq: int) -> None:
        """Save the current state of a sequence, to roll back to it."""

    def settle_weights(self) -> None:
        """Finish what would move weights beside later steps."""

    def close(self) -> None:
        """Release the model."""
