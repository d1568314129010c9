"""/v1/completions: OpenAI's text completions, with `echo`, `logprobs`, `n` and `best_of`.

`logprobs` holds both OpenAI's lists and the `content` list that llama-server writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ikcli.server.http import sse
from ikcli.server.http.errors import ApiError
from ikcli.server.http.generation_body import GenerationBody
from ikcli.server.http.shapes.common import (
    FINGERPRINT,
    Naming,
    Probabilities,
    logprob,
    progress_json,
    timings_json,
    usage_json,
)
from ikcli.server.slots.messages import Delta, Final, PromptProgress, RequestTimings, TokenInfo


@dataclass(frozen=True, slots=True)
class Echo:
    """Prompts repeated before the answers: their texts and tokens, one per generation."""

    texts: Sequence[str]
    tokens: Sequence[Sequence[int]]


class CompletionShape:
    """Shape of text completions.

    Of every `best` consecutive generations, only the `fields.n_cmpl` most likely ones are returned.
    """

    def __init__(
        self, names: Naming, fields: GenerationBody, probabilities: Probabilities | None, echo: Echo | None, best: int
    ) -> None:
        self._names = names
        self._fields = fields
        self._probabilities = probabilities
        self._echo = echo
        self._best = best
        self._timings: dict[int, RequestTimings] = {}
        self._started: set[int] = set()
        self._length: dict[int, int] = {}

    def begin(self) -> bytes:
        return b""

    def end(self) -> bytes:
        if not self._fields.stream_options.include_usage:
            return sse.DONE
        out = self._chunk([]) | {"usage": usage_json(self._timings.values())}
        return sse.data(out) + sse.DONE

    def progress(self, index: int, event: PromptProgress) -> bytes:
        choice = {"text": "", "index": index, "logprobs": None, "finish_reason": None}
        return sse.data(self._chunk([choice]) | {"prompt_progress": progress_json(event)})

    def delta(self, index: int, event: Delta) -> bytes:
        front = self._front(index)
        start = self._length.get(index, 0)
        self._length[index] = start + len(event.text)
        choice = {
            "text": event.text,
            "index": index,
            "logprobs": self._logprobs(event.tokens, start),
            "finish_reason": None,
        }
        out = self._chunk([choice])
        if self._fields.timings_per_token:
            out["timings"] = timings_json(event.timings)
        return front + sse.data(out)

    def _front(self, index: int) -> bytes:
        if self._echo is None or index in self._started:
            return b""
        self._started.add(index)
        text = self._echo.texts[index]
        self._length[index] = len(text)
        choice = {"text": text, "index": index, "logprobs": None, "finish_reason": None}
        return sse.data(self._chunk([choice]))

    def final(self, index: int, event: Final) -> bytes:
        front = self._front(index)
        if event.tail.text or event.tail.tokens:
            front += self.delta(index, event.tail)
        self._timings[index] = event.timings
        choice = {"text": "", "index": index, "logprobs": None, "finish_reason": finish_reason(event)}
        out = self._chunk([choice])
        return front + sse.data(out | {"usage": usage_json([event.timings]), "timings": timings_json(event.timings)})

    def failure(self, error: ApiError) -> bytes:
        return sse.data(error.body())

    def whole(self, finals: Sequence[Final]) -> Any:
        chosen = self._choose(finals)
        choices = [self._choice(i, number, finals[i]) for number, i in enumerate(chosen)]
        out = self._chunk(choices) | {"usage": usage_json(event.timings for event in finals)}
        if len(finals) == 1:
            out["timings"] = timings_json(finals[0].timings)
        return out

    def _choose(self, finals: Sequence[Final]) -> list[int]:
        keep = self._fields.n_cmpl
        if self._best <= keep:
            return list(range(len(finals)))
        chosen = []
        for start in range(0, len(finals), self._best):
            group = sorted(range(start, start + self._best), key=lambda i: -_mean_logprob(finals[i]))
            chosen += group[:keep]
        return chosen

    def _choice(self, i: int, number: int, event: Final) -> dict[str, Any]:
        text = event.text
        logprobs = self._logprobs(event.tokens, 0)
        if self._echo is not None:
            text = self._echo.texts[i] + text
            logprobs = self._echoed_logprobs(i, event)
        return {"text": text, "index": number, "logprobs": logprobs, "finish_reason": finish_reason(event)}

    def _echoed_logprobs(self, i: int, event: Final) -> dict[str, Any] | None:
        assert self._echo is not None
        if self._probabilities is None:
            return None
        first = self._echo.tokens[i][: len(self._echo.tokens[i]) - len(event.prompt_logprobs)]
        out = self._logprobs((*event.prompt_logprobs, *event.tokens), 0)
        assert out is not None
        pieces = [self._probabilities.text(token) for token in first]
        shift = sum(len(piece) for piece in pieces)
        starts = [sum(len(piece) for piece in pieces[:k]) for k in range(len(pieces))]
        return {
            "content": out["content"],
            "tokens": pieces + out["tokens"],
            "token_logprobs": [None] * len(pieces) + out["token_logprobs"],
            "top_logprobs": [None] * len(pieces) + out["top_logprobs"],
            "text_offset": starts + [offset + shift for offset in out["text_offset"]],
        }

    def _logprobs(self, tokens: Sequence[TokenInfo], start: int) -> dict[str, Any] | None:
        if self._probabilities is None:
            return None
        content = self._probabilities.tokens(tokens)
        pieces = [self._probabilities.text(token.id) for token in tokens]
        offsets = []
        for piece in pieces:
            offsets.append(start)
            start += len(piece)
        tops = []
        for token, entry in zip(tokens, content, strict=True):
            n_top = len(entry.get("top_logprobs", entry.get("top_probs", ())))
            tops.append({self._probabilities.text(c.id): logprob(c.logprob) for c in token.top[:n_top]})
        return {
            "content": content,
            "tokens": pieces,
            "token_logprobs": [logprob(token.logprob) for token in tokens],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "choices": choices,
            "created": self._names.created,
            "model": self._names.model,
            "system_fingerprint": FINGERPRINT,
            "object": "text_completion",
            "id": self._names.id,
        }


def finish_reason(event: Final) -> str:
    """Return OpenAI's reason for an end without tools."""
    return "stop" if event.stop_type in ("eos", "word") else "length"


def _mean_logprob(event: Final) -> float:
    return sum(token.logprob for token in event.tokens) / max(len(event.tokens), 1)
