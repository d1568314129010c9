"""/v1/responses: OpenAI's Responses. Items of reasoning, message and function calls, with their events.

Every event has a `sequence_number`, and events of an item have its `output_index`. A generation that ends at the token
limit gives status "incomplete".
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ikcli.chat.parser import ChatDelta
from ikcli.server.http import sse
from ikcli.server.http.dialects.responses_tools import ClientTool, ClientTools
from ikcli.server.http.errors import ApiError
from ikcli.server.http.generation_body import GenerationBody
from ikcli.server.http.shapes.chat import reason
from ikcli.server.http.shapes.common import Naming, n_prompt, progress_json, random_id, timings_json
from ikcli.server.http.shapes.message import Incoming, ParserMaker
from ikcli.server.slots.messages import Delta, Final, PromptProgress


class ResponsesShape:
    """Shape of a response; `echoed` are the request fields it repeats (instructions, tools, temperature, ...)."""

    def __init__(
        self,
        names: Naming,
        fields: GenerationBody,
        echoed: Mapping[str, Any],
        tools: ClientTools,
        make_parser: ParserMaker,
    ) -> None:
        self._names = names
        self._fields = fields
        self._echoed = dict(echoed)
        self._incoming = Incoming(make_parser())
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._tools = tools
        self._open = ""
        self._tool: ClientTool | None = None  # of the open call, whose arguments so far are `_arguments`
        self._arguments = ""
        self._extra: dict[str, Any] = {}

    def begin(self) -> bytes:
        out = self._event("response.created", response=self._response("in_progress"))
        return out + self._event("response.in_progress", response=self._response("in_progress"))

    def end(self) -> bytes:
        return b""

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **fields, **self._extra}
        self._number += 1
        return sse.named(event)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        index = len(self._items) - 1
        return self._event(kind, item_id=self._items[index]["id"], output_index=index, **fields)

    def progress(self, index: int, event: PromptProgress) -> bytes:
        response = self._response("in_progress")
        return self._event("response.in_progress", response=response, prompt_progress=progress_json(event))

    def delta(self, index: int, event: Delta) -> bytes:
        self._extra = {"timings": timings_json(event.timings)} if self._fields.timings_per_token else {}
        out = self._deltas(self._incoming.delta(event))
        self._extra = {}
        return out

    def _deltas(self, deltas: Sequence[ChatDelta]) -> bytes:
        out = []
        for delta in deltas:
            if delta.reasoning:
                out.append(self._enter_reasoning())
                self._items[-1]["content"][0]["text"] += delta.reasoning
                out.append(self._item_event("response.reasoning_text.delta", content_index=0, delta=delta.reasoning))
            if delta.content:
                out.append(self._enter_message())
                self._items[-1]["content"][0]["text"] += delta.content
                fields = {"content_index": 0, "delta": delta.content, "logprobs": []}
                out.append(self._item_event("response.output_text.delta", **fields))
            if delta.index >= 0:
                out.append(self._call(delta))
        return b"".join(out)

    def _enter_reasoning(self) -> bytes:
        if self._open == "reasoning":
            return b""
        item: dict[str, Any] = {"id": "rs_" + random_id(), "summary": [], "type": "reasoning", "content": [],
                "encrypted_content": "", "status": "in_progress"}  # fmt: skip
        out = self._enter("reasoning", item)
        item["content"] = [{"text": "", "type": "reasoning_text"}]
        return out

    def _enter_message(self) -> bytes:
        if self._open == "message":
            return b""
        item: dict[str, Any] = {"content": [], "id": "msg_" + random_id(), "role": "assistant", "status": "in_progress",
                "type": "message"}  # fmt: skip
        out = self._enter("message", item)
        part = {"type": "output_text", "annotations": [], "logprobs": [], "text": ""}
        out += self._item_event("response.content_part.added", content_index=0, part=part)
        item["content"] = [part]
        return out

    def _call(self, tool: ChatDelta) -> bytes:
        kind = f"call {tool.index}"
        out = b""
        if self._open != kind:
            called = self._tools.called(tool.name)
            out = self._enter(kind, called.item(tool.id))
            self._tool, self._arguments = called, ""
        self._arguments += tool.arguments
        if tool.arguments and "arguments" in self._items[-1]:  # other kinds are known once the JSON is complete
            out += self._item_event("response.function_call_arguments.delta", delta=tool.arguments)
        return out

    def _enter(self, kind: str, item: dict[str, Any]) -> bytes:
        closing = self._leave("completed")
        self._open = kind
        self._items.append(item)
        return closing + self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _leave(self, status: str) -> bytes:
        """Close the open item."""
        if not self._open:
            return b""
        item = self._items[-1]
        item["status"] = status
        if self._tool is not None:
            self._tool.fill(item, self._arguments)
            self._tool = None
        out = b""
        if item["type"] == "message":
            part = item["content"][0]
            out += self._item_event("response.output_text.done", content_index=0, text=part["text"], logprobs=[])
            out += self._item_event("response.content_part.done", content_index=0, part=part)
        elif item["type"] == "reasoning":
            text = item["content"][0]["text"]
            out += self._item_event("response.reasoning_text.done", content_index=0, text=text)
        elif item["type"] == "custom_tool_call":
            out += self._item_event("response.custom_tool_call_input.delta", delta=item["input"])
            out += self._item_event("response.custom_tool_call_input.done", input=item["input"])
        elif item["type"] == "function_call":
            done = {name: item[name] for name in ("arguments", "name", "namespace") if name in item}
            out += self._item_event("response.function_call_arguments.done", **done)
        self._open = ""
        return out + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def final(self, index: int, event: Final) -> bytes:
        out = self._deltas(self._incoming.final(event))
        status = _status(event, self._incoming)
        if not self._items:
            out += self._enter_message()
        out += self._leave(status)
        self._extra = {"timings": timings_json(event.timings)}
        out += self._event(f"response.{status}", response=self._response(status, event))
        self._extra = {}
        return out

    def failure(self, error: ApiError) -> bytes:
        problem = {"code": error.type, "message": error.message}
        failed = self._response("failed") | {"error": problem}
        event = {"type": "error", "code": error.type, "message": error.message, "param": None,
                 "sequence_number": self._number, **error.body()}  # fmt: skip
        self._number += 1
        return sse.named(event) + self._event("response.failed", response=failed)

    def whole(self, finals: Sequence[Final]) -> Any:
        event = finals[0]
        message = self._incoming.whole(event)
        calls = [ChatDelta("", "", i, c.id, c.name, c.arguments) for i, c in enumerate(message.tool_calls)]
        self._deltas([ChatDelta(reasoning=message.reasoning), ChatDelta(content=message.content), *calls])
        if not self._items:
            self._enter_message()
        status = _status(event, self._incoming)
        self._leave(status)
        return self._response(status, event) | {"timings": timings_json(event.timings)}

    def _response(self, status: str, event: Final | None = None) -> dict[str, Any]:
        text = "".join(item["content"][0]["text"] for item in self._items if item["type"] == "message")
        out: dict[str, Any] = {
            "id": self._names.id,
            "object": "response",
            "created_at": self._names.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._names.model,
            "output": list(self._items) if event is not None else [],
            "output_text": text if event is not None else "",
            "usage": _usage(event) if event is not None else None,
        }
        return out | self._echoed


def _status(event: Final, incoming: Incoming) -> str:
    return "incomplete" if reason(event, incoming) == "length" else "completed"


def _usage(event: Final) -> dict[str, Any]:
    t = event.timings
    return {
        "input_tokens": n_prompt(t),
        "input_tokens_details": {"cached_tokens": t.cache_n},
        "output_tokens": t.predicted_n,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": n_prompt(t) + t.predicted_n,
    }
