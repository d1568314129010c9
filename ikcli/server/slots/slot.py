"""One slot: the tokens that its part of the cache holds, and the request it works on.

A slot in state "prompt" computes its `target` tokens up to their end and then chooses a token. In state "generation" it
computes `last`, the token chosen last. A new prompt, a shifted context and a rewound generation all just set new target
tokens. In state "embedding" its part of the cache is lent to texts that are embedded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from ikcli.engine.run.adapters import NOTHING
from ikcli.server.prefix.keys import common_prefix
from ikcli.server.prefix.reused import Reused
from ikcli.server.slots.generation import Generation
from ikcli.server.slots.messages import Event, GenerationRequest, RequestTimings
from ikcli.server.slots.pictures import PlacedPicture
from ikcli.server.slots.states import SlotState

Tokens = npt.NDArray[np.int32]
IDLE, PROMPT, GENERATION, EMBEDDING = "idle", "prompt", "generation", "embedding"
_ADDED = attrgetter("added")
_LEAST_ROOM = 4  # tokens of a slot that n_keep cannot claim


@dataclass(slots=True, eq=False)
class Task:
    """A generation request in progress."""

    id: int
    request: GenerationRequest
    on_event: Callable[[Event], None]
    cancelled: bool = False
    prompt: Tokens = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = np.array(self.request.prompt, dtype=np.int32)


class Slot:
    """One slot of the engine; see the module."""

    def __init__(self, id: int, n_ctx: int) -> None:
        self.id, self.n_ctx = id, n_ctx
        self.state = IDLE
        self._cached = np.zeros(n_ctx, np.int32)
        self.n_past = 0
        self.added = NOTHING  # the additions with which the cache was computed
        self.task: Task | None = None
        self.generation: Generation | None = None
        self.target: Tokens = self._cached[:0]
        self.last = -1
        self.draft: Sequence[int] = ()
        self.places: Mapping[int, bool] = {}  # where to make checkpoints in the target tokens: see `checkpoints.places`
        self.in_prompt = False  # the target tokens are the request's prompt, not a repetition
        self.t_served = 0  # the step that last computed a piece of the prompt
        self.t_used = -1.0
        self.id_task = -1

    # --- cache ------------------------------------------------------------------------------------------------------
    @property
    def cached(self) -> Tokens:
        """Return the tokens in the cache."""
        return self._cached[: self.n_past]

    def append(self, tokens: Tokens) -> None:
        """Note tokens that were just computed."""
        self._cached[self.n_past : self.n_past + len(tokens)] = tokens
        self.n_past += len(tokens)

    def push(self, token: int) -> None:
        """Note one token that was just computed."""
        self._cached[self.n_past] = token
        self.n_past += 1

    def adopt(self, tokens: Tokens) -> None:
        """Note that the cache now holds these tokens."""
        self._cached[: len(tokens)] = tokens
        self.n_past = len(tokens)

    def text_tokens(self) -> Tokens:
        """Return the cached tokens and the token chosen last."""
        return np.append(self.cached, np.int32(self.last))

    def similarity(self, prompt: Tokens) -> float:
        """Return the share of the prompt that is cached here."""
        return common_prefix(self.cached, prompt) / len(prompt) if self.n_past and len(prompt) else 0.0

    # --- work -------------------------------------------------------------------------------------------------------
    def begin(self, task: Task, generation: Generation, reused: Reused, places: Mapping[int, bool]) -> None:
        """Start a request whose first `reused.n` tokens are in the cache; `places`: see `checkpoints.places`."""
        self.places = places
        self.task, self.generation, self.id_task = task, generation, task.id
        self.n_past, self.target, self.state, self.in_prompt = reused.n, task.prompt, PROMPT, True
        self.draft = ()
        generation.reused = reused
        generation.n_prompt_computed = len(task.prompt) - reused.n

    def repeat_from(self, n_past: int, target: Tokens) -> None:
        """Compute the `target` tokens from position n_past on before the next token is chosen."""
        self.n_past, self.target, self.state, self.in_prompt = n_past, target, PROMPT, False

    def shift(self, add_bos: bool) -> None:
        """Make room: keep n_keep tokens, drop the next n_discard (half of the rest by default), recompute the rest."""
        assert self.generation is not None
        request = self.generation.request
        n_keep = len(request.prompt) if request.n_keep < 0 else request.n_keep + int(add_bos)
        n_keep = max(0, min(n_keep, self.n_ctx - _LEAST_ROOM))
        n_left = self.n_past - n_keep
        n_discard = max(1, min(request.n_discard or n_left // 2, n_left))
        kept = (self.cached[:n_keep], self.cached[n_keep + n_discard :], np.array([self.last], np.int32))
        self.generation.truncated = True
        self.repeat_from(n_keep, np.concatenate(kept))

    def release(self) -> None:
        """Free the slot; the cache stays."""
        self.state, self.task, self.t_used = IDLE, None, time.monotonic()
        self.draft = ()

    @property
    def n_todo(self) -> int:
        """Return the number of target tokens that are not cached yet."""
        return len(self.target) - self.n_past

    @property
    def n_whole(self) -> int:
        """Return the number of target tokens up to their end, the next checkpoint or the next image."""
        end = next((n for n in self.places if n > self.n_past), 0) if self.in_prompt else 0
        if self.pictures:
            end = min([end or len(self.target), *(one.start for one in self.pictures if one.start > self.n_past)])
        return end - self.n_past if end else self.n_todo

    @property
    def picture(self) -> PlacedPicture | None:
        """Return the image that is to be computed next, as a whole."""
        return next((one for one in self.pictures if one.start == self.n_past), None) if self.pictures else None

    @property
    def n_at_once(self) -> int:
        """Return the number of target tokens that must be computed in one piece: those of an image."""
        picture = self.picture
        return picture.stop - picture.start if picture is not None else 0

    @property
    def pictures(self) -> tuple[PlacedPicture, ...]:
        """Return the images of the request; its prompt is the beginning of all target tokens."""
        return self.generation.request.pictures if self.generation is not None else ()

    @property
    def wants_prompt_logits(self) -> bool:
        """Return whether the request asked for the log-probability of every prompt token."""
        return self.in_prompt and self.generation is not None and self.generation.request.prompt_logprobs

    # --- snapshot ---------------------------------------------------------------------------------------------------
    def snapshot(self) -> SlotState:
        """Return the state of the slot; any thread may call this."""
        g, state, n_past = self.generation, self.state, self.n_past
        busy = state != IDLE
        if g is None:
            return SlotState(self.id, -1, False, IDLE, self.n_ctx, n_past, (), None, "", 0, -1, False, False, False,
                             "none", "", -1, RequestTimings(n_ctx=self.n_ctx))  # fmt: skip
        return SlotState(
            self.id, self.id_task, busy, state, self.n_ctx, n_past, g.request.prompt, g.request, g.output.text,
            g.output.n_total, g.n_remain, busy and g.stop_type == "none", g.output.has_new_line, g.truncated,
            g.stop_type, g.output.stopping_word, self.last, g.timings(n_past),
        )  # fmt: skip


def alike(slots: Sequence[Slot]) -> list[Sequence[Slot]]:
    """Group slots that use the same additions; there is mostly one group, which costs no comparison."""
    if len(set(map(id, map(_ADDED, slots)))) == 1:
        return [slots]
    return [[s for s in slots if s.added == added] for added in dict.fromkeys(s.added for s in slots)]
