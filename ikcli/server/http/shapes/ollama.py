"""/api/chat and /api/generate: Ollama's answers, whole or as JSON lines. Durations are in nanoseconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ikcli.server.http import sse
from ikcli.server.http.errors import ApiError
from ikcli.server.http.shapes.anthropic import arguments
from ikcli.server.http.shapes.common import Probabilities, n_prompt
from ikcli.server.http.shapes.completion import finish_reason
from ikcli.server.http.shapes.message import Incoming, ParserMaker
from ikcli.server.slots.messages import Delta, Final, PromptProgress, RequestTimings, TokenInfo


class OllamaShape:
    """Shape of a single Ollama answer.

    With `prompt` None it is a message of /api/chat, otherwise the text of /api/generate. `prompt` then holds the tokens
    that its `context` begins with; if empty, there is no `context`. Without `make_parser` the text is left as it is.
    """

    def __init__(
        self,
        model: str,
        make_parser: ParserMaker | None = None,
        probabilities: Probabilities | None = None,
        prompt: Sequence[int] | None = None,
    ) -> None:
        self._model = model
        self._incoming = Incoming(make_parser()) if make_parser is not None else None
        self._probabilities = probabilities
        self._prompt = prompt
        self._begun = time.monotonic_ns()

    def begin(self) -> bytes:
        return b""

    def end(self) -> bytes:
        return b""

    def progress(self, index: int, event: PromptProgress) -> bytes:
        return b""

    def delta(self, index: int, event: Delta) -> bytes:
        if self._incoming is None:
            return self._piece(event.text, "", event.tokens)
        return self._pieces(self._incoming.delta(event), event.tokens)

    def _pieces(self, deltas: Sequence[Any], tokens: Sequence[TokenInfo]) -> bytes:
        """Return thinking and content; calls are sent whole, at the end."""
        thoughts = "".join(delta.reasoning for delta in deltas)
        return self._piece("".join(delta.content for delta in deltas), thoughts, tokens)

    def _piece(self, content: str, thinking: str, tokens: Sequence[TokenInfo]) -> bytes:
        if not content and not thinking and (self._probabilities is None or not tokens):
            return b""
        return sse.line(self._head() | self._text(content, thinking) | {"done": False} | self._logprobs(tokens))

    def final(self, index: int, event: Final) -> bytes:
        if self._incoming is None:
            out = self._piece(event.tail.text, "", event.tail.tokens)
        else:
            out = self._pieces(self._incoming.final(event), event.tail.tokens)
            if calls := self._calls():
                out += sse.line(self._head() | self._text("", "", calls) | {"done": False})
        return out + sse.line(self._head() | self._text("", "") | self._done(event))

    def failure(self, error: ApiError) -> bytes:
        return sse.line(error.body("ollama"))

    def whole(self, finals: Sequence[Final]) -> Any:
        event = finals[0]
        if self._incoming is None:
            text = self._text(event.text, "")
        else:
            message = self._incoming.whole(event)
            text = self._text(message.content, message.reasoning, self._calls())
        return self._head() | text | self._done(event) | self._logprobs(event.tokens)

    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": now()}

    def _text(self, content: str, thinking: str, calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        thoughts = {"thinking": thinking} if thinking else {}
        if self._prompt is not None:
            return {"response": content, **thoughts}
        return {
            "message": {"role": "assistant", "content": content, **thoughts, **({"tool_calls": calls} if calls else {})}
        }

    def _calls(self) -> list[dict[str, Any]]:
        found = self._incoming.message.tool_calls if self._incoming is not None else ()
        return [
            {"id": call.id, "function": {"index": i, "name": call.name, "arguments": arguments(call.arguments)}}
            for i, call in enumerate(found)
        ]

    def _logprobs(self, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        if self._probabilities is None or not tokens:
            return {}
        return {"logprobs": self._probabilities.tokens(tokens)}

    def _done(self, event: Final) -> dict[str, Any]:
        context: dict[str, Any] = {}
        if self._prompt:
            context["context"] = [*self._prompt, *(token.id for token in event.tokens)]
        return {"done": True, "done_reason": finish_reason(event), **context} | _durations(event.timings, self._begun)


def loaded(model: str, chat: bool) -> dict[str, Any]:
    """Return the answer to a request without a prompt, which only asks to load the model."""
    text: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
    return {"model": model, "created_at": now()} | text | {"done": True, "done_reason": "load"}


def _durations(t: RequestTimings, begun: int) -> dict[str, Any]:
    return {
        "total_duration": time.monotonic_ns() - begun,
        "load_duration": 0,
        "prompt_eval_count": n_prompt(t),
        "prompt_eval_duration": round(t.prompt_ms * 1e6),
        "eval_count": t.predicted_n,
        "eval_duration": round(t.predicted_ms * 1e6),
    }


def now(seconds: Callable[[], float] = time.time) -> str:
    """Return the time in Ollama's format."""
    t = seconds()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(t)) + f".{int(t % 1 * 1e6):06d}Z"
