"""Parts that several APIs share: timings, usage, token probabilities, ids; and what a Shape is."""

from __future__ import annotations

import math
import secrets
import string
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ikcli import __version__
from ikcli.server.http.errors import ApiError
from ikcli.server.slots.messages import Candidate, Delta, Final, PromptProgress, RequestTimings, TokenInfo
from ikcli.tokenizer import Tokenizer

FINGERPRINT = f"b{__version__}-ik"
"""`system_fingerprint` and `build_info`."""
_LOWEST = -3.4028234663852886e38  # what llama-server writes for log(0), which JSON cannot hold
_LETTERS = string.ascii_letters + string.digits


class Shape(Protocol):
    """Turns the events of the generations of one request into bytes of a stream, or their ends into one answer."""

    def begin(self) -> bytes:
        """What a stream starts with."""

    def progress(self, index: int, event: PromptProgress) -> bytes:
        """A report on the prompt."""

    def delta(self, index: int, event: Delta) -> bytes:
        """New text of generation `index`."""

    def final(self, index: int, event: Final) -> bytes:
        """The end of generation `index`."""

    def failure(self, error: ApiError) -> bytes:
        """An error after the stream has begun."""

    def end(self) -> bytes:
        """What a complete stream ends with."""

    def whole(self, finals: Sequence[Final]) -> Any:
        """The answer without streaming."""


@dataclass(frozen=True, slots=True)
class Naming:
    """What answers are signed with. `alias` is the server's name of the model, `model` the one a client sent."""

    alias: str
    model: str
    id: str
    created: int


def naming(alias: str, requested: Any, prefix: str) -> Naming:
    """Names for one answer; the client's model name is repeated if it gave one."""
    model = requested if isinstance(requested, str) and requested else alias
    return Naming(alias, model, prefix + random_id(), int(time.time()))


def random_id(n: int = 32) -> str:
    """Random letters and digits."""
    return "".join(secrets.choice(_LETTERS) for _ in range(n))


def n_prompt(timings: RequestTimings) -> int:
    """Tokens of the prompt, reused ones included."""
    return timings.cache_n + timings.prompt_n


def timings_json(t: RequestTimings) -> dict[str, Any]:
    """`timings` with the names of both forks; rates of nothing are 0."""
    out: dict[str, Any] = {
        "cache_n": t.cache_n,
        "prompt_n": t.prompt_n,
        "prompt_ms": t.prompt_ms,
        "prompt_per_token_ms": t.prompt_ms / t.prompt_n if t.prompt_n else 0.0,
        "prompt_per_second": 1e3 * t.prompt_n / t.prompt_ms if t.prompt_ms > 0 else 0.0,
        "predicted_n": t.predicted_n,
        "predicted_ms": t.predicted_ms,
        "predicted_per_token_ms": t.predicted_ms / t.predicted_n if t.predicted_n else 0.0,
        "predicted_per_second": 1e3 * t.predicted_n / t.predicted_ms if t.predicted_ms > 0 else 0.0,
        "n_ctx": t.n_ctx,
        "n_past": t.n_past,
    }
    if t.draft_n:
        out |= {"draft_n": t.draft_n, "draft_n_accepted": t.draft_n_accepted}
    return out


def usage_json(timings: Iterable[RequestTimings]) -> dict[str, Any]:
    """OpenAI's `usage`; the prompt counts once per generation."""
    prompt = cached = completion = 0
    for t in timings:
        prompt += n_prompt(t)
        cached += t.cache_n
        completion += t.predicted_n
    return {
        "completion_tokens": completion,
        "prompt_tokens": prompt,
        "total_tokens": completion + prompt,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def progress_json(event: PromptProgress) -> dict[str, Any]:
    """`prompt_progress`."""
    return {"total": event.total, "cache": event.cache, "processed": event.processed, "time_ms": event.time_ms}


def logprob(value: float) -> float:
    """A log-probability as JSON can hold it."""
    return value if value > -math.inf else _LOWEST


class Probabilities:
    """Token probabilities as JSON; `post` gives probabilities instead of their logarithms, `top` cuts the lists."""

    def __init__(self, tokenizer: Tokenizer, *, post: bool = False, top: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._post = post
        self._top = top

    def text(self, token: int) -> str:
        """The token as text; bytes that are no character alone as U+FFFD."""
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")

    def _value(self, value: float) -> float:
        return math.exp(value) if self._post else logprob(value)

    def _candidate(self, item: Candidate | TokenInfo) -> dict[str, Any]:
        piece = self._tokenizer.token_bytes(item.id)
        name = "prob" if self._post else "logprob"
        value = self._value(item.logprob)
        return {"id": item.id, "token": piece.decode("utf-8", "ignore"), "bytes": list(piece), name: value}

    def token(self, info: TokenInfo) -> dict[str, Any]:
        """One entry of `completion_probabilities` or `logprobs.content`."""
        out = self._candidate(info)
        top = info.top if self._top is None else info.top[: self._top]
        out["top_probs" if self._post else "top_logprobs"] = [self._candidate(item) for item in top]
        return out

    def tokens(self, infos: Iterable[TokenInfo]) -> list[dict[str, Any]]:
        """`logprobs.content`."""
        return [self.token(info) for info in infos]

    def native(self, infos: Iterable[TokenInfo]) -> list[dict[str, Any]]:
        """`completion_probabilities`: as `tokens`, with `content` and `probs` of older servers besides."""
        out = []
        for info in infos:
            entry = self.token(info)
            probs = [{"tok_str": self._shown(c.id), "prob": math.exp(c.logprob)} for c in info.top]
            out.append(entry | {"content": self._shown(info.id), "probs": probs})
        return out

    def _shown(self, token: int) -> str:
        piece = self._tokenizer.token_bytes(token)
        if len(piece) == 1 and piece[0] & 0x80:
            return f"byte: \\x{piece[0]:02x}"
        return piece.decode("utf-8", "replace")
