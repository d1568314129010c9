"""Reasoning budget: after a number of thinking tokens the model must write the text that ends its thinking.

The budget is a constraint wrapped around the request's constraint. It forces tokens, so the engine needs no notion of
thinking. `ReasoningControl` ends thinking through it when a client asks for that.
"""

from __future__ import annotations

import codecs
import math

import numpy as np
import numpy.typing as npt

from ikcli.server.slots.messages import Constraint
from ikcli.tokenizer import Tokenizer


class ReasoningControl:
    """Switch that ends the thinking of a running request from another thread."""

    def __init__(self) -> None:
        self.wanted = False

    def end(self) -> None:
        """End the thinking at the next token, or as soon as it begins."""
        self.wanted = True


class ReasoningBudget:
    """Constraint that ends thinking after `budget` tokens; a negative `budget` means no limit.

    `opened`: the prompt ends inside the thinking. `message` is written before `close` when the budget is used up. No
    token is forced in the middle of a character.
    """

    def __init__(
        self,
        inner: Constraint | None,
        tokenizer: Tokenizer,
        *,
        open: str,
        close: str,
        budget: int,
        opened: bool,
        message: str = "",
        control: ReasoningControl | None = None,
    ) -> None:
        self._inner = inner
        self._tokenizer = tokenizer
        self._open, self._close = open, close
        self._left: float = budget if budget >= 0 else math.inf
        self._inside = opened
        self._done = False
        self._text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._control = control
        self._ending = tokenizer.encode(message + close, add_special=False)
        self._forced: list[int] = []

    def mask(self) -> npt.NDArray[np.uint32] | None:
        """Allow only the next token of the ending while it is forced, else return the inner mask."""
        if self._inside and not self._forced and self._is_over():
            self._forced = list(self._ending)
        if not self._forced:
            return self._inner.mask() if self._inner is not None else None
        mask = np.zeros(-(-self._tokenizer.n_vocab // 32), np.uint32)
        token = self._forced[0]
        mask[token // 32] = np.uint32(1 << (token % 32))
        return mask

    def _is_over(self) -> bool:
        """Return whether thinking must end now; an incomplete character is completed first."""
        wanted = self._left <= 0 or (self._control is not None and self._control.wanted)
        return wanted and not self._done and not self._decoder.getstate()[0]

    def accept(self, token: int) -> None:
        """Count a thinking token and detect where thinking begins and ends."""
        if self._inner is not None:
            self._inner.accept(token)
        if self._done:
            return
        if self._forced:
            self._forced.pop(0)
            self._done = not self._forced
            return
        self._text += self._decoder.decode(self._tokenizer.token_bytes(token))
        if self._inside:
            self._count()
        elif self._open in self._text:
            self._inside, self._text = True, ""
        elif len(self._text.strip()) > len(self._open) and not self._open.startswith(self._text.strip()):
            self._done = True  # the answer began without thinking

    def _count(self) -> None:
        if self._close in self._text:
            self._done = True
            return
        self._text = self._text[-2 * len(self._close) :]
        self._left -= 1

    @property
    def finished(self) -> bool:
        """Whether the request's own constraint is finished and no ending is being forced."""
        return self._inner is not None and not self._forced and self._inner.finished
