"""What the measurements need from a session: tokens in, logits out, forget part of the cache.

The engine's session satisfies this; tests use small stand-ins with known logits.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from ikcli.engine.run.batch import Batch

FloatRows = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int32]


class TokenizerLike(Protocol):
    """Text to token ids."""

    @property
    def bos_id(self) -> int | None:
        """Id of the begin-of-text token."""

    @property
    def add_bos(self) -> bool:
        """True if texts of this model start with the begin-of-text token."""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text."""


class HasTokenizer(Protocol):
    """What texts become tokens with."""

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
        """Logits (n_outputs, n_vocab) of the wanted tokens in batch order, valid until the next call."""

    def clear(self) -> None:
        """Forget all sequences."""

    def truncate(self, seq: int, n: int) -> int:
        """Forget positions of a sequence from n on as far as possible; returns how many are left."""

    def checkpoint(self, seq: int) -> None:
        """Remember where a sequence is, to return there."""

    def close(self) -> None:
        """Release the model."""
