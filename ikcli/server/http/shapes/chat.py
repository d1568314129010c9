"""/v1/chat/completions: OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ikcli.chat.parser import ChatDelta
from ikcli.server.http import sse
from ikcli.server.http.errors import ApiError
from ikcli.server.http.generation_body import GenerationBody
from ikcli.server.http.jsontext import quote
from ikcli.server.http.shapes.common import (
    FINGERPRINT,
    Naming,
    Probabilities,
    progress_json,
    timings_json,
    usage_json,
)
from ikcli.server.http.shapes.completion import finish_reason
from ikcli.server.http.shapes.message import Incoming, ParserMaker
from ikcli.server.slots.messages import Delta, Final, PromptProgress, RequestTimings, TokenInfo

_MARK = "\x00content\x00"


class ChatShape:
    """Shape of chat completions; `make_parser` is called once per answer."""

    def __init__(
        self, names: Naming, fields: GenerationBody, probabilities: Probabilities | None, make_parser: ParserMaker
    ) -> None:
        self._names = names
        self._fields = fields
        self._probabilities = probabilities
        self._make_parser = make_parser
        self._incoming: dict[int, Incoming] = {}
        self._timings: dict[int, RequestTimings] = {}
        self._tokens: dict[int, list[TokenInfo]] = {}
        self._plain = probabilities is None and not fields.timings_per_token
        self._around: dict[int, tuple[bytes, bytes]] = {}  # what surrounds the content in an answer's chunks

    def begin(self) -> bytes:
        return b""

    def end(self) -> bytes:
        if not self._fields.stream_options.include_usage:
            return sse.DONE
        out = self._chunk([]) | {"usage": usage_json(self._timings.values())}
        return sse.data(out | self._last_timings()) + sse.DONE

    def _last_timings(self) -> dict[str, Any]:
        last = list(self._timings.values())[-1:]
        return {"timings": timings_json(last[0])} if last else {}

    def progress(self, index: int, event: PromptProgress) -> bytes:
        head = self._start(index)
        return head + sse.data(self._chunk([_choice(index, {})]) | {"prompt_progress": progress_json(event)})

    def _start(self, index: int) -> bytes:
        """Return the first event of an answer, which names the role."""
        if index in self._incoming:
            return b""
        self._incoming[index] = Incoming(self._make_parser())
        return sse.data(self._chunk([_choice(index, {"role": "assistant", "content": None})]))

    def delta(self, index: int, event: Delta) -> bytes:
        head = self._start(index)
        return head + self._deltas(index, self._incoming[index].delta(event), event)

    def _deltas(self, index: int, deltas: Sequence[ChatDelta], event: Delta) -> bytes:
        if self._probabilities is not None:
            self._tokens.setdefault(index, []).extend(event.tokens)
        out = []
        for i, delta in enumerate(deltas):
            if self._plain and delta.content and delta.index < 0 and not delta.reasoning:
                out.append(self._content(index, delta.content))
                continue
            choice = _choice(index, delta.to_openai())
            last = i == len(deltas) - 1
            if last and self._probabilities is not None:
                choice["logprobs"] = {"content": self._probabilities.tokens(self._tokens.pop(index))}
            chunk = self._chunk([choice])
            if last and self._fields.timings_per_token:
                chunk["timings"] = timings_json(event.timings)
            out.append(sse.data(chunk))
        return b"".join(out)

    def _content(self, index: int, text: str) -> bytes:
        """Return a chunk of content; consecutive chunks differ only in the text."""
        if index not in self._around:
            whole = sse.data(self._chunk([_choice(index, {"content": _MARK})]))
            before, after = whole.split(quote(_MARK).encode())
            self._around[index] = before, after
        before, after = self._around[index]
        return before + quote(text).encode("utf-8", "replace") + after

    def final(self, index: int, event: Final) -> bytes:
        head = self._start(index)
        incoming = self._incoming[index]
        head += self._deltas(index, incoming.final(event), event.tail)
        self._timings[index] = event.timings
        choice = _choice(index, {}, reason(event, incoming))
        if self._tokens.get(index) and self._probabilities is not None:
            choice["logprobs"] = {"content": self._probabilities.tokens(self._tokens.pop(index))}
        out = self._chunk([choice])
        if not self._fields.stream_options.include_usage:
            out["timings"] = timings_json(event.timings)
        return head + sse.data(out)

    def failure(self, error: ApiError) -> bytes:
        return sse.data(error.body())

    def whole(self, finals: Sequence[Final]) -> Any:
        choices = []
        for index, event in enumerate(finals):
            incoming = Incoming(self._make_parser())
            message = incoming.whole(event).to_openai()
            choice = {"finish_reason": reason(event, incoming), "index": index, "message": message}
            if self._probabilities is not None:
                choice["logprobs"] = {"content": self._probabilities.tokens(event.tokens)}
            choices.append(choice)
        out = self._chunk(choices) | {"object": "chat.completion", "usage": _usage(finals)}
        if len(finals) == 1:
            out["timings"] = timings_json(finals[0].timings)
        return out

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "choices": choices,
            "created": self._names.created,
            "id": self._names.id,
            "model": self._names.model,
            "system_fingerprint": FINGERPRINT,
            "object": "chat.completion.chunk",
        }


def _usage(finals: Sequence[Final]) -> dict[str, Any]:
    return usage_json(event.timings for event in finals)


def _choice(index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"finish_reason": reason, "index": index, "delta": delta}


def reason(event: Final, incoming: Incoming) -> str:
    """Return `finish_reason`; tool calls count only if the generation ended by itself."""
    found = finish_reason(event)
    return "tool_calls" if found == "stop" and incoming.calls_tools else found
