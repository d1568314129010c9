"""The messages between the HTTP side and the engine: a request goes in, events come out until a final one.

Messages that are made for every token are NamedTuples, which take a fraction of the time of a frozen dataclass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ikcli.sampling.params import SamplerParams
from ikcli.server.slots.patterns import Pattern
from ikcli.server.slots.pictures import PlacedPicture

StopType = Literal["none", "eos", "limit", "word"]


class Constraint(Protocol):
    """State of a grammar during one generation (see ikcli.grammar)."""

    def mask(self) -> npt.NDArray[np.uint32] | None:
        """Return a packed mask (ceil(n_vocab / 32),): bit i is set if token i may follow; None: every token may."""

    def accept(self, token: int) -> None:
        """Advance by a token that `mask` allowed."""

    @property
    def finished(self) -> bool:
        """Return whether only the end of generation may follow."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """Draft lengths of one request; None keeps the server's setting."""

    n_max: int | None = None
    n_min: int | None = None
    p_min: float | None = None


@dataclass(frozen=True, slots=True)
class Bans:
    """Texts that may not appear: the generation rolls back to where one begins and chooses another token there.

    `n_tokens` of the banned text (-1: all of it) get the bias there. `buffer`: tokens held back for patterns; 0: as
    many as the longest pattern has characters. `max_rewinds` in a row: -1 for 20 or twice the number of bans, 0 for no
    limit. `counts`: removed tokens count as generated.
    """

    strings: tuple[str, ...] = ()
    patterns: tuple[Pattern, ...] = ()
    n_tokens: int = 1
    bias: float = -math.inf
    buffer: int = 0
    max_rewinds: int = -1
    counts: bool = True

    def __bool__(self) -> bool:
        return bool(self.strings or self.patterns)

    @property
    def n_held(self) -> int:
        """Return the number of tokens that are held back."""
        if not self.patterns:
            return 0
        return (self.buffer or max(len(p.text) for p in self.patterns) + 1) - 1

    @property
    def most_rewinds(self) -> float:
        """Return how often in a row the generation may roll back."""
        if self.max_rewinds < 0:
            return max(20, 2 * (len(self.strings) + len(self.patterns)))
        return self.max_rewinds or math.inf


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation from token ids; the HTTP side has checked every field against the model.

    `n_predict`: -1 for no limit, -2 until the slot is full, 0 evaluates the prompt only. `within_context`: the slot is
    never shifted, whatever `n_predict` is. `stop` texts end the generation and are not part of the text.
    `t_max_predict_ms` counts from the first token and applies at line ends. `n_indent`: least indentation of a line.
    `prompt_logprobs` asks for the log-probability of every prompt token (echo). `keep_special` renders control tokens.
    `lora`: scales of the adapters; None: those of the server.
    """

    prompt: tuple[int, ...]
    sampling: SamplerParams
    n_predict: int = -1
    within_context: bool = False
    stop: tuple[str, ...] = ()
    constraint: Callable[[], Constraint] | None = None
    cache_prompt: bool = True
    id_slot: int = -1
    n_keep: int = 0
    n_discard: int = 0
    n_indent: int = 0
    t_max_predict_ms: int = 0
    keep_special: bool = False
    prompt_logprobs: bool = False
    bans: Bans = Bans()
    lora: tuple[float, ...] | None = None
    speculation: Speculation = Speculation()
    report_progress: bool = False
    pictures: tuple[PlacedPicture, ...] = ()  # images of the prompt, in order
    turns: tuple[int, ...] = ()  # tokens of the prompt before turns that later requests may change
    deltas: bool = True  # False: no Delta events, for requests that are answered at once


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Texts as token ids, each to be turned into a vector or a score; `lora` as in `GenerationRequest`."""

    texts: tuple[tuple[int, ...], ...]
    lora: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token with its log-probability (natural logarithm)."""

    id: int
    logprob: float


class TokenInfo(NamedTuple):
    """A generated token; `top` are the `n_probs` most likely ones, best first. Without `n_probs`, logprob is NaN."""

    id: int
    logprob: float
    top: tuple[Candidate, ...] = ()


class RequestTimings(NamedTuple):
    """Milliseconds and counts of one request.

    `cache_n` prompt tokens came from the cache: `cache_ram_n` from RAM, `cache_disk_n` from disk, the rest from slots.
    """

    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0
    draft_n: int = 0
    draft_n_accepted: int = 0
    n_past: int = 0
    n_ctx: int = 0
    cache_ram_n: int = 0
    cache_disk_n: int = 0


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """Sent while a long prompt is computed, if the request asked for it."""

    total: int
    cache: int
    processed: int
    time_ms: float


class Delta(NamedTuple):
    """Text that is certain to be output (no half characters, no possible start of a stop text), and its tokens."""

    text: str
    tokens: tuple[TokenInfo, ...]
    timings: RequestTimings
    id_slot: int


@dataclass(frozen=True, slots=True)
class Final:
    """The end of a generation. `text` and `tokens` are the whole output, `tail` the part that no Delta carried."""

    text: str
    tokens: tuple[TokenInfo, ...]
    tail: Delta
    stop_type: StopType
    stopping_word: str
    truncated: bool
    has_new_line: bool
    id_slot: int
    timings: RequestTimings
    prompt_logprobs: tuple[TokenInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class Embedded:
    """Rows of every text: one, or one per token without pooling; scores of the labels for a model that ranks."""

    rows: tuple[npt.NDArray[np.float32], ...]
    timings: RequestTimings


@dataclass(frozen=True, slots=True)
class Failure:
    """The request failed: an OpenAI-style error `type`, the HTTP status and a sentence."""

    status: int
    type: str
    message: str
    details: dict[str, int] = field(default_factory=dict)


Event = PromptProgress | Delta | Final | Embedded | Failure
