"""One request while it is served: sampler, constraint, text, limits, timings. Every request gets a new one."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ikcli.sampling.sampler import Sampled, Sampler
from ikcli.sampling.vocab import SamplerVocab
from ikcli.server.prefix.reused import Reused
from ikcli.server.slots.messages import (
    Candidate,
    Constraint,
    Delta,
    Final,
    GenerationRequest,
    PromptProgress,
    RequestTimings,
    StopType,
    TokenInfo,
)
from ikcli.server.slots.output import Output
from ikcli.server.slots.pictures import tokens_of
from ikcli.tokenizer import Tokenizer

FloatRow = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings that all generations of an engine share.

    `n_ctx`: tokens that a slot holds. `n_total`: most tokens of prompt and output where a request sets no limit.
    """

    n_ctx: int
    n_total: int
    context_shift: bool
    tokenizer: Tokenizer
    vocab: SamplerVocab


def as_info(sampled: Sampled) -> TokenInfo:
    """Convert a sampler's result into a message."""
    top = tuple(Candidate(i, p) for i, p in sampled.top) if sampled.top else ()
    return TokenInfo(sampled.id, sampled.logprob, top)


class Generation:
    """State of one request in a slot."""

    def __init__(self, request: GenerationRequest, setting: Setting, id_slot: int) -> None:
        self.request, self.id_slot = request, id_slot
        self._setting, tokenizer = setting, setting.tokenizer
        self._eog = tokenizer.eog_ids
        self.history: list[int] = list(request.prompt)
        self.sampler = Sampler(request.sampling, setting.vocab)
        self.sampler.prime(tokens_of(request.prompt) if request.pictures else request.prompt)
        self.constraint: Constraint | None = request.constraint() if request.constraint else None
        self.output = Output(tokenizer, request.stop, request.bans, keep_special=request.keep_special)
        self.prompt_logprobs: list[TokenInfo] = []
        self.truncated = self._was_truncated = False  # now, and before the newest token
        self.stop_type: StopType = "none"
        self.reused = Reused()
        self.n_prompt_computed = 0
        self.n_drafts = self.n_drafted = self.n_accepted = 0
        self.accepted_by_position: Counter[int] = Counter()
        self.bans_texts = bool(request.bans)
        self._bans: dict[int, set[int]] = {}  # index of a generated token -> tokens that led to a banned text
        self._n_rewinds = 0  # since the output last advanced
        self._furthest = -1  # token at which a banned text began
        self.t_start = self._t_now = time.perf_counter()
        self.t_prompt_done = 0.0

    # --- choosing ---------------------------------------------------------------------------------------------------
    def choose(self, logits: FloatRow) -> TokenInfo:
        """Choose the next token."""
        if not self._bans and self.constraint is None:
            return as_info(self.sampler.sample(logits))
        banned = self._bans.get(len(self.output.tokens), ())
        mask = self.constraint.mask() if self.constraint is not None else None
        return as_info(self.sampler.sample(logits, mask, banned, self.request.bans.bias))

    def push(self, token: TokenInfo) -> bool:
        """Append a chosen token; return False if the generation ends with it (see `stop_type`)."""
        self._t_now = time.perf_counter()
        self._was_truncated = self.truncated
        self.sampler.accept(token.id)
        if self.constraint is not None:
            self.constraint.accept(token.id)
        self.history.append(token.id)
        is_eog = token.id in self._eog
        piece = self.output.add(token, is_text=not is_eog)
        if self.output.check_stop():
            self.stop_type = "word"
        elif is_eog:
            self.stop_type = "eos"
        elif self._at_limit(piece):
            self.stop_type = "limit"
        elif self.constraint is not None and self.constraint.finished and not self._eog:
            self.stop_type = "eos"
        return self.stop_type == "none"

    def _at_limit(self, piece: str) -> bool:
        request, out = self.request, self.output
        if 0 <= request.n_predict <= out.n_total:
            return True
        if request.n_indent > 0 and not out.line_indent(piece, request.n_indent):
            return True
        ms = 1e3 * (self._t_now - self.t_prompt_done)
        if request.t_max_predict_ms > 0 and out.has_new_line and ms > request.t_max_predict_ms:
            return True
        if request.n_predict < 0 and len(self.history) >= self._setting.n_total:
            self.truncated = True
            return True
        return False

    def stop_for_context(self) -> None:
        """End the generation: the slot is full and may not be shifted."""
        self.truncated = True
        self.stop_type = "limit"

    @property
    def may_shift(self) -> bool:
        """Return whether old tokens may be dropped when the slot is full."""
        request = self.request
        fixed = request.within_context or request.n_predict == -2 or request.pictures  # an image stays in its place
        return self._setting.context_shift and not fixed

    @property
    def n_remain(self) -> int:
        """Return the number of tokens that may follow, -1 without a limit."""
        n = self.request.n_predict
        return -1 if n < 0 else max(n - self.output.n_total, 0)

    # --- banned texts -----------------------------------------------------------------------------------------------
    def rewind_banned(self) -> int:
        """Remove a banned text if the output holds one; return the number of removed tokens."""
        n = self.output.find_banned()
        if n is None:
            return 0
        if n > self._furthest:
            self._furthest, self._n_rewinds = n, 0
        if self._n_rewinds >= self.request.bans.most_rewinds:
            self.output.allow_banned()
            return 0
        self._n_rewinds += 1
        n_removed = len(self.output.tokens) - n
        self._bans = {i: b for i, b in self._bans.items() if i <= n}
        n_banned = self.request.bans.n_tokens
        stop = n + n_banned if n_banned >= 0 else len(self.output.tokens)
        self._bans.setdefault(n, set()).update(t.id for t in self.output.tokens[n:stop])
        self.output.rewind(n)
        self.sampler.rollback(n_removed)
        del self.history[-n_removed:]
        self.stop_type, self.truncated = "none", self._was_truncated
        if self.request.constraint:
            self.constraint = self.request.constraint()
            for i in self.history[len(self.request.prompt) :]:
                self.constraint.accept(i)
        return n_removed

    # --- events -----------------------------------------------------------------------------------------------------
    def prompt_done(self) -> float:
        """Note the end of the prompt; return the seconds it took."""
        self.t_prompt_done = self._t_now = time.perf_counter()
        return self.t_prompt_done - self.t_start

    @property
    def predicted_seconds(self) -> float:
        return self._t_now - self.t_prompt_done if self.t_prompt_done else 0.0

    def timings(self, n_past: int) -> RequestTimings:
        """Return counts and times so far."""
        done = self.t_prompt_done
        end, seconds = (done, self._t_now - done) if done else (time.perf_counter(), 0.0)
        return RequestTimings(
            self.reused.n, self.n_prompt_computed, 1e3 * (end - self.t_start), self.output.n_total,
            1e3 * seconds, self.n_drafted, self.n_accepted, n_past, self._setting.n_ctx,
            self.reused.n_ram, self.reused.n_disk,
        )  # fmt: skip

    def progress(self, n_processed: int) -> PromptProgress:
        """Return the progress of the prompt."""
        ms = 1e3 * (time.perf_counter() - self.t_start)
        return PromptProgress(len(self.request.prompt), self.reused.n, n_processed, ms)

    def delta(self, n_past: int) -> Delta | None:
        """Return new text that is certain, if there is any."""
        text, tokens = self.output.take()
        return Delta(text, tokens, self.timings(n_past), self.id_slot) if text else None

    def final(self, n_past: int) -> Final:
        """Return the final event."""
        timings = self.timings(n_past)
        text, tokens = self.output.take(everything=True)
        out = self.output
        return Final(
            out.text, tuple(out.tokens), Delta(text, tokens, timings, self.id_slot), self.stop_type, out.stopping_word,
            self.truncated, out.has_new_line, self.id_slot, timings, tuple(self.prompt_logprobs),
        )  # fmt: skip
