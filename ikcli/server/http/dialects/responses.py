"""Conversion of OpenAI Responses API requests to chat completion requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ikcli.chat.content import arguments_text, as_error, is_thought, readable, thought_text
from ikcli.chat.images import NO_IMAGES, Images
from ikcli.server.http import fields as f
from ikcli.server.http.dialects.responses_tools import ClientTools
from ikcli.server.http.errors import bad_request
from ikcli.server.http.turns import Turns

_OWN = frozenset(
    (
        "input",
        "instructions",
        "previous_response_id",
        "tools",
        "tool_choice",
        "max_output_tokens",
        "reasoning",
        "text",
        "store",
        "include",
        "prompt_cache_key",
        "client_metadata",
        "background",
        "max_tool_calls",
        "metadata",
        "truncation",
        "user",
        "service_tier",
        "prompt",
        "conversation",
        "safety_identifier",
        "top_logprobs",
        "stream_options",
    )
)
_ECHOED = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p", "truncation", "user")
_ABOUT_CALLS = frozenset({"type", "id", "call_id", "status", "name", "namespace", "caller", "environment", "execution",
                          "pending_safety_checks", "created_by"})  # fmt: skip
"""Fields of call items besides the content of the call."""


def to_chat(body: Mapping[str, Any], images: Images = NO_IMAGES) -> dict[str, Any]:
    """Return the body of an equivalent chat completion request, with its images in `images`.

    Raise ApiError naming the faulty field.
    """
    if body.get("input") is None:
        raise bad_request("input is required")
    if body.get("previous_response_id") or body.get("conversation"):
        raise bad_request("previous_response_id is not supported: answers are not stored; send the whole conversation")
    out = {name: value for name, value in body.items() if name not in _OWN}
    turns, tools = Turns(images), ClientTools(body)
    if body.get("instructions") is not None:
        turns.say("system", f.text(body["instructions"], "instructions"))
    value = body["input"]
    if isinstance(value, str):
        turns.say("user", value)
    else:
        conversation = _Conversation(turns, tools)
        for i, item in enumerate(f.array(value, "input")):
            conversation.add(f.table(item, f"input[{i}]"), f"input[{i}]")
        if value and not turns.messages:
            raise bad_request("input[0].type: neither this item nor one behind it says anything to the model")
    out["messages"] = turns.messages
    if body.get("max_output_tokens") is not None:
        out["max_tokens"] = f.integer(body["max_output_tokens"], "max_output_tokens", -2)
    if chat_tools := tools.chat():
        out["tools"] = chat_tools
    out |= tools.choice(body.get("tool_choice"))
    out |= _format(body.get("text")) | _reasoning(body.get("reasoning"))
    return out


def echoed(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request fields that a response repeats."""
    out = {name: body.get(name) for name in _ECHOED}
    choice = body.get("tool_choice")
    return out | {
        "metadata": out["metadata"] or {},
        "truncation": out["truncation"] or "disabled",
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "reasoning": body.get("reasoning") or {"effort": None, "summary": None},
        "store": False,
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": "auto" if choice is None else choice,
        "tools": body.get("tools") or [],
    }


class _Conversation:
    """Reader of the items of a request.

    Whatever its type, an item is one of four things: a message, the assistant's thinking, the call or the result of a
    client tool (it has a `call_id`), or work of OpenAI's servers, which is shown as text.
    """

    def __init__(self, turns: Turns, tools: ClientTools) -> None:
        self._turns = turns
        self._tools = tools

    def add(self, item: Mapping[str, Any], path: str) -> None:
        """Add an item. Raise ApiError naming the faulty field."""
        kind = f.text(item.get("type") or "message", f"{path}.type")
        if kind == "reasoning":
            self._turns.think(thought_text({"content": item.get("content") or item.get("summary")}))
        elif kind == "message" or _has_parts(item):
            self._message(item, path)
        elif kind == "item_reference":
            raise bad_request(
                f"{path}.type: {f.shown(kind)} is not supported: items are not stored; send the item itself"
            )
        elif kind == "function_call_output" or (kind.endswith("_output") and self._is_half(item)):
            self._result(item, kind, path)
        elif kind == "function_call" or isinstance(item.get("call_id"), str):
            self._call(item, kind, path)
        elif not isinstance(item.get("tools"), list):  # such tools are already among the request's tools
            self._note(item, kind)

    def _is_half(self, item: Mapping[str, Any]) -> bool:
        """Return whether a result belongs to a call of the client; some results have the call's id as their `id`."""
        return isinstance(item.get("call_id"), str) or self._turns.has_call(item.get("id"))

    def _message(self, item: Mapping[str, Any], path: str) -> None:
        role = f.text(
            item.get("role") or ("" if item.get("type") in (None, "message") else "assistant"), f"{path}.role"
        )
        content = item.get("content")
        if isinstance(content, str):
            self._turns.say(role, content)
            return
        if content is None:
            if role == "assistant":
                return
            raise bad_request(f"{path}.content is required")
        texts = []
        for i, part in enumerate(f.array(content, f"{path}.content")):
            if role == "assistant" and is_thought(part):
                self._turns.think(thought_text(part))
            elif (text := self._turns.part_text(part, f"{path}.content[{i}]", role)) or role != "assistant":
                texts.append(text)
        self._turns.say(role, texts)

    def _call(self, item: Mapping[str, Any], kind: str, path: str) -> None:
        """Add a call of a client tool: of a function, or of a tool known by the type of its calls."""
        if kind == "function_call":
            name, asked = f.text(item.get("name"), f"{path}.name"), item.get("arguments")
            if asked is None:
                raise bad_request(f"{path}.arguments is required")
        else:
            name = f.text(item.get("name") or kind.removesuffix("_call"), f"{path}.name")
            rest = {key: value for key, value in item.items() if key not in _ABOUT_CALLS and value is not None}
            asked = next(iter(rest.values())) if len(rest) == 1 and "input" not in rest else rest
            asked = rest.get("arguments", asked)
        namespace = f.text(item.get("namespace") or "", f"{path}.namespace")
        id = f.text(item.get("call_id"), f"{path}.call_id")
        self._turns.call(id, self._tools.qualified(name, namespace), arguments_text(asked))

    def _result(self, item: Mapping[str, Any], kind: str, path: str) -> None:
        id = item.get("call_id") if kind == "function_call_output" else item.get("call_id") or item.get("id")
        if "output" in item:
            text = self._turns.result_text(item["output"], f"{path}.output")
        elif kind == "function_call_output":
            raise bad_request(f"{path}.output is required")
        else:
            text = readable({key: value for key, value in item.items() if key != "tools"})
            names = [tool["name"] for tool in item.get("tools") or () if isinstance(tool, dict) and "name" in tool]
            text = "\n".join([text, *map(str, names)]).lstrip("\n")
        self._turns.answer(f.text(id, f"{path}.call_id"), as_error(text) if item.get("status") == "failed" else text)

    def _note(self, item: Mapping[str, Any], kind: str) -> None:
        """Add the readable part of work that a server did by itself, as text of the assistant."""
        text = readable(item)
        if not text and item.get("encrypted_content"):
            text = "encrypted; only its author can decrypt it"
        if text:
            self._turns.say("assistant", f"[{kind}: {text}]")


def _has_parts(item: Mapping[str, Any]) -> bool:
    """Return whether an item has the content of a message, whatever its type."""
    content = item.get("content")
    if not isinstance(content, list):
        return isinstance(content, str)
    return all(isinstance(part, Mapping) and isinstance(part.get("type"), str) for part in content)


def _format(value: Any) -> dict[str, Any]:
    """Return `text.format` as `response_format`."""
    if value is None:
        return {}
    form = f.table(value, "text").get("format")
    if form is None:
        return {}
    kind = f.table(form, "text.format").get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if kind != "json_schema":
        raise bad_request(f"text.format.type must be text, json_object or json_schema, not {f.shown(kind)}")
    if form.get("schema") is None:
        raise bad_request("text.format.schema is required")
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": form["schema"]}}}


def _reasoning(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    effort = f.table(value, "reasoning").get("effort")
    return {} if effort is None else {"reasoning_effort": f.text(effort, "reasoning.effort")}
