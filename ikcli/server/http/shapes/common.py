"""Parts that several APIs share: timings, usage, token probabilities, ids; and the Shape protocol."""

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
"""Value of `system_fingerprint` and `build_info`."""
_LOWEST = -3.4028234663852886e38  # llama-server's value for log(0), which JSON cannot represent
_LETTERS = string.ascii_letters + string.digits


class Shape(Protocol):
    """Converter of a request's generation events into bytes of a stream, or of their ends into one answer."""

    def begin(self) -> bytes:
        """Return the start of a stream."""

    def progress(self, index: int, event: PromptProgress) -> bytes:
        """Return a report on prompt processing."""

    def delta(self, index: int, event: Delta) -> bytes:
        """Return new text of generation `index`."""

    def final(self, index: int, event: Final) -> bytes:
        """Return the end of generation `index`."""

    def failure(self, error: ApiError) -> bytes:
        """Return an error after the stream has begun."""

    def end(self) -> bytes:
        """Return the end of a complete stream."""

    def whole(self, finals: Sequence[Final]) -> Any:
        """Return the answer without streaming."""


@dataclass(frozen=True, slots=True)
class Naming:
    """Names and id in answers. `alias` is the server's name of the model, `model` the one a client sent."""

    alias: str
    model: str
    id: str
    created: int


def naming(alias: str, requested: Any, prefix: str) -> Naming:
    """Return the names for one answer, which repeats the client's model name if given."""
    model = requested if isinstance(requested, str) and requested else alias
    return Naming(alias, model, prefix + random_id(), int(time.time()))


def random_id(n: int = 32) -> str:
    """Return random letters and digits."""
    return "".join(secrets.choice(_LETTERS) for _ in range(n))


def n_prompt(timings: RequestTimings) -> int:
    """Return the number of prompt tokens, reused ones included."""
    return timings.cache_n + timings.prompt_n


def timings_json(t: RequestTimings) -> dict[str, Any]:
    """Return `timings` with the names of both forks; rates over zero tokens are 0."""
    out: dict[str, Any] = {
        "cache_n": t.cache_n,
        "cache_slot_n": t.cache_n - t.cache_ram_n - t.cache_disk_n,
        "cache_ram_n": t.cache_ram_n,
        "cache_disk_n": t.cache_disk_n,
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
    """Return OpenAI's `usage`; the prompt counts once per generation."""
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
    """Return `prompt_progress`."""
    return {"total": event.total, "cache": event.cache, "processed": event.processed, "time_ms": event.time_ms}


def logprob(value: float) -> float:
    """Return a log-probability as a number that JSON can represent."""
    return value if value > -math.inf else _LOWEST


class Probabilities:
    """Writer of token probabilities.

    `post` gives probabilities instead of their logarithms; `top` truncates the lists.
    """

    def __init__(self, tokenizer: Tokenizer, *, post: bool = False, top: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._post = post
        self._top = top

    def text(self, token: int) -> str:
        """Return the token as text; bytes that are not a character alone become U+FFFD."""
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")

    def _value(self, value: float) -> float:
        return math.exp(value) if self._post else logprob(value)

    def _candidate(self, item: Candidate | TokenInfo) -> dict[str, Any]:
        piece = self._tokenizer.token_bytes(item.id)
        name = "prob" if self._post else "logprob"
        value = self._value(item.logprob)
        return {"id": item.id, "token": piece.decode("utf-8", "ignore"), "bytes": list(piece), name: value}

    def token(self, info: TokenInfo) -> dict[str, Any]:
        """Return one entry of `completion_probabilities` or `logprobs.content`."""
        out = self._candidate(info)
        top = info.top if self._top is None else info.top[: self._top]
        out["top_probs" if self._post else "top_logprobs"] = [self._candidate(item) for item in top]
        return out

    def tokens(self, infos: Iterable[TokenInfo]) -> list[dict[str, Any]]:
        """Return `logprobs.content`."""
        return [self.token(info) for info in infos]

    def native(self, infos: Iterable[TokenInfo]) -> list[dict[str, Any]]:
        """Return `completion_probabilities`: as `tokens`, plus `content` and `probs` of older servers."""
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
