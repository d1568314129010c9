"""A budget for reasoning: after so many tokens of thinking the model must write the text that ends it.

Works as a constraint around the request's own: it forces tokens, so the engine needs to know nothing about thinking.
The same ends thinking when a client asks for it (`ReasoningControl`).
"""

from __future__ import annotations

import codecs
import math

import numpy as np
import numpy.typing as npt

from ikcli.server.slots.messages import Constraint
from ikcli.tokenizer import Tokenizer


class ReasoningControl:
    """Ends the thinking of a running request from outside its thread."""

    def __init__(self) -> None:
        self.wanted = False

    def end(self) -> None:
        """Let the thinking end at the next token, now or when it begins."""
        self.wanted = True


class ReasoningBudget:
    """`opened`: the prompt ends within thinking. `message` is written before `close` when the budget is used up.

    `budget` below 0: without limit. Nothing is forced within a character.
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
        """Only the next token of the ending while it is forced."""
        if self._inside and not self._forced and self._is_over():
            self._forced = list(self._ending)
        if not self._forced:
            return self._inner.mask() if self._inner is not None else None
        mask = np.zeros(-(-self._tokenizer.n_vocab // 32), np.uint32)
        token = self._forced[0]
        mask[token // 32] = np.uint32(1 << (token % 32))
        return mask

    def _is_over(self) -> bool:
        """Whether thinking has to end, and can: a character that is not complete comes first."""
        wanted = self._left <= 0 or (self._control is not None and self._control.wanted)
        return wanted and not self._done and not self._decoder.getstate()[0]

    def accept(self, token: int) -> None:
        """Count a token of thinking, and notice where thinking begins and ends."""
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
        """As the request's own constraint."""
        return self._inner is not None and not self._forced and self._inner.finished
