"""/v1/messages: Anthropic's messages, as successive blocks of thinking, text and tool use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ikcli.chat.parser import ChatDelta
from ikcli.server.http import sse
from ikcli.server.http.errors import ApiError
from ikcli.server.http.shapes.chat import reason
from ikcli.server.http.shapes.common import Naming, n_prompt
from ikcli.server.http.shapes.message import Incoming, ParserMaker
from ikcli.server.slots.messages import Delta, Final, PromptProgress, RequestTimings


class AnthropicShape:
    """Shape of a single answer, since Anthropic's API has no more."""

    def __init__(self, names: Naming, make_parser: ParserMaker) -> None:
        self._names = names
        self._incoming = Incoming(make_parser())
        self._started = False
        self._block = -1
        self._kind = ""

    def begin(self) -> bytes:
        return b""

    def end(self) -> bytes:
        return b""

    def progress(self, index: int, event: PromptProgress) -> bytes:
        start = self._start(RequestTimings(cache_n=event.cache, prompt_n=event.total - event.cache))
        return start + sse.named({"type": "ping"})

    def _start(self, timings: RequestTimings) -> bytes:
        if self._started:
            return b""
        self._started = True
        head = self._head([]) | {"stop_reason": None, "stop_sequence": None, "usage": _usage(timings, 0)}
        return sse.named({"type": "message_start", "message": head})

    def delta(self, index: int, event: Delta) -> bytes:
        return self._start(event.timings) + b"".join(self._blocks(self._incoming.delta(event)))

    def _blocks(self, deltas: Sequence[ChatDelta]) -> list[bytes]:
        out = []
        for delta in deltas:
            if delta.reasoning:
                out += self._enter("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                out.append(self._piece({"type": "thinking_delta", "thinking": delta.reasoning}))
            if delta.content:
                out += self._enter("text", {"type": "text", "text": ""})
                out.append(self._piece({"type": "text_delta", "text": delta.content}))
            if delta.index >= 0:
                use = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
                out += self._enter(f"tool {delta.index}", use)
                if delta.arguments:
                    out.append(self._piece({"type": "input_json_delta", "partial_json": delta.arguments}))
        return out

    def _enter(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        """Close the current block if it is of another kind, and open a new one."""
        if self._kind == kind:
            return []
        closing = self._leave()
        self._kind = kind
        self._block += 1
        return [*closing, sse.named({"type": "content_block_start", "index": self._block, "content_block": block})]

    def _leave(self) -> list[bytes]:
        if not self._kind:
            return []
        out = []
        if self._kind == "thinking":
            out.append(self._piece({"type": "signature_delta", "signature": ""}))
        self._kind = ""
        return [*out, sse.named({"type": "content_block_stop", "index": self._block})]

    def _piece(self, delta: dict[str, Any]) -> bytes:
        return sse.named({"type": "content_block_delta", "index": self._block, "delta": delta})

    def final(self, index: int, event: Final) -> bytes:
        out = [self._start(event.timings), *self._blocks(self._incoming.final(event))]
        if self._block < 0:
            out += self._enter("text", {"type": "text", "text": ""})
        out += self._leave()
        delta = {"stop_reason": _stop_reason(event, self._incoming), "stop_sequence": _stop_sequence(event)}
        usage = _usage(event.timings, event.timings.predicted_n)
        out.append(sse.named({"type": "message_delta", "delta": delta, "usage": usage}))
        out.append(sse.named({"type": "message_stop"}))
        return b"".join(out)

    def failure(self, error: ApiError) -> bytes:
        return sse.named(error.body("anthropic"))

    def whole(self, finals: Sequence[Final]) -> Any:
        event = finals[0]
        message = self._incoming.whole(event)
        blocks: list[dict[str, Any]] = []
        if message.reasoning:
            blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
        if message.content or not (message.reasoning or message.tool_calls):
            blocks.append({"type": "text", "text": message.content})
        for call in message.tool_calls:
            use = {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments(call.arguments)}
            blocks.append(use)
        return self._head(blocks) | {
            "stop_reason": _stop_reason(event, self._incoming),
            "stop_sequence": _stop_sequence(event),
            "usage": _usage(event.timings, event.timings.predicted_n),
        }

    def _head(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._names.id,
            "type": "message",
            "role": "assistant",
            "content": blocks,
            "model": self._names.model,
        }


def arguments(text: str) -> dict[str, Any]:
    """Return arguments as an object, empty if they are incomplete."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _usage(timings: RequestTimings, output: int) -> dict[str, Any]:
    return {
        "cache_read_input_tokens": timings.cache_n,
        "cache_creation_input_tokens": 0,
        "input_tokens": n_prompt(timings) - timings.cache_n,
        "output_tokens": output,
    }


def _stop_reason(event: Final, incoming: Incoming) -> str:
    found = reason(event, incoming)
    if found == "tool_calls":
        return "tool_use"
    if found == "length":
        return "max_tokens"
    return "stop_sequence" if event.stop_type == "word" else "end_turn"


def _stop_sequence(event: Final) -> str | None:
    return event.stopping_word if event.stop_type == "word" else None
