"""Schedule one step: first a token (or a draft) of every generating slot, then pieces of waiting prompts.

A piece of a prompt is a separate micro-batch, and its bounds depend on that prompt alone. Neither the text of a
generation nor the cache of a prompt therefore depends on other slots. Between two generated tokens of a slot at most
one ubatch of prompt tokens is computed, shared between prompts in turn: the one that was served longest ago comes
first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

PROMPT_LOGPROBS_STEP = 64  # tokens at once when every prompt token's logits are wanted


class PromptWork(Protocol):
    """A slot whose prompt is not finished."""

    @property
    def n_whole(self) -> int: ...

    @property
    def n_at_once(self) -> int: ...

    @property
    def wants_prompt_logits(self) -> bool: ...

    @property
    def t_served(self) -> int: ...


T = TypeVar("T", bound=PromptWork)


@dataclass(frozen=True, slots=True)
class Piece(Generic[T]):
    """The next n tokens of a slot's prompt."""

    slot: T
    n_tokens: int


def prompt_pieces(waiting: Iterable[T], n_ubatch: int) -> list[Piece[T]]:
    """Return the pieces to compute in this step, at most n_ubatch tokens in total; the caller updates `t_served`.

    An image is one piece, whatever its size.
    """
    pieces: list[Piece[T]] = []
    budget = n_ubatch
    for slot in sorted(waiting, key=lambda s: s.t_served):
        n = min(slot.n_whole, PROMPT_LOGPROBS_STEP if slot.wants_prompt_logits else n_ubatch, n_ubatch)
        n = slot.n_at_once or n
        if n > budget and pieces:
            break
        pieces.append(Piece(slot, n))
        budget -= n
    return pieces
