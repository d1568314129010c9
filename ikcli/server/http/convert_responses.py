"""Requests of OpenAI's Responses API as chat completion requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ikcli.server.http import fields as f
from ikcli.server.http.errors import bad_request

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
_TEXT = ("input_text", "output_text", "text")


def to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of an equal chat completion request; ApiError naming what is wrong."""
    if body.get("input") is None:
        raise bad_request("input is required")
    if body.get("previous_response_id") or body.get("conversation"):
        raise bad_request("previous_response_id is not supported: answers are not stored; send the whole conversation")
    out = {name: value for name, value in body.items() if name not in _OWN}
    messages: list[dict[str, Any]] = []
    if body.get("instructions") is not None:
        messages.append({"role": "system", "content": f.text(body["instructions"], "instructions")})
    value = body["input"]
    messages += [{"role": "user", "content": value}] if isinstance(value, str) else _items(f.array(value, "input"))
    out["messages"] = messages
    if body.get("max_output_tokens") is not None:
        out["max_tokens"] = f.checked(body["max_output_tokens"], "int", "max_output_tokens", -2)
    tools = _tools(body.get("tools"))
    if tools:
        out["tools"] = tools
        out |= _tool_choice(body.get("tool_choice"))
    out |= _format(body.get("text")) | _reasoning(body.get("reasoning"))
    return out


def echoed(body: Mapping[str, Any]) -> dict[str, Any]:
    """What a response repeats of its request."""
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


def _items(items: list[Any]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    thoughts = ""
    for i, value in enumerate(items):
        item = f.table(value, f"input[{i}]")
        kind = item.get("type") or "message"
        if kind == "reasoning":
            thoughts = _reasoning_text(item)
        elif kind == "function_call":
            _add_call(out, item, f"input[{i}]", thoughts)
            thoughts = ""
        elif kind == "function_call_output":
            out.append(_output(item, f"input[{i}]"))
        elif kind == "message":
            message = _message(item, f"input[{i}]")
            if thoughts and message["role"] == "assistant":
                message["reasoning_content"] = thoughts
            thoughts = ""
            out.append(message)
        else:
            raise bad_request(f"input[{i}].type: unsupported item {f.shown(kind)}")
    return out


def _message(item: Mapping[str, Any], path: str) -> dict[str, Any]:
    role = f.text(item.get("role"), f"{path}.role")
    content = item.get("content")
    if isinstance(content, str):
        return {"role": role, "content": content}
    if content is None:
        raise bad_request(f"{path}.content is required")
    return {"role": role, "content": _parts(f.array(content, f"{path}.content"), f"{path}.content")}


def _parts(parts: list[Any], path: str) -> list[dict[str, Any]]:
    out = []
    for i, value in enumerate(parts):
        part = f.table(value, f"{path}[{i}]")
        kind = part.get("type")
        if kind == "refusal":
            out.append({"type": "text", "text": f.text(part.get("refusal"), f"{path}[{i}].refusal")})
        elif kind in _TEXT:
            out.append({"type": "text", "text": f.text(part.get("text"), f"{path}[{i}].text")})
        elif kind in ("input_image", "input_file", "input_audio"):
            raise bad_request(f"{path}[{i}]: {kind} is not supported: the model reads text only")
        else:
            raise bad_request(f"{path}[{i}].type must be input_text or output_text, not {f.shown(kind)}")
    return out


def _reasoning_text(item: Mapping[str, Any]) -> str:
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list):
        return ""
    return "".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))


def _add_call(out: list[dict[str, Any]], item: Mapping[str, Any], path: str, thoughts: str) -> None:
    """Calls in a row belong to one message of the assistant."""
    function = {
        "name": f.text(item.get("name"), f"{path}.name"),
        "arguments": f.text(item.get("arguments"), f"{path}.arguments"),
    }
    call = {"id": f.text(item.get("call_id"), f"{path}.call_id"), "type": "function", "function": function}
    if out and out[-1]["role"] == "assistant" and not thoughts:
        out[-1].setdefault("tool_calls", []).append(call)
        return
    message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
    if thoughts:
        message["reasoning_content"] = thoughts
    out.append(message)


def _output(item: Mapping[str, Any], path: str) -> dict[str, Any]:
    output = item.get("output")
    content: Any = output if isinstance(output, str) else _parts(f.array(output, f"{path}.output"), f"{path}.output")
    return {"role": "tool", "tool_call_id": f.text(item.get("call_id"), f"{path}.call_id"), "content": content}


def _tools(value: Any) -> list[dict[str, Any]]:
    """Functions; tools that only OpenAI's servers have (web search and the like) are left out."""
    out = []
    for i, item in enumerate(f.array(value, "tools") if value is not None else []):
        tool = f.table(item, f"tools[{i}]")
        if tool.get("type") != "function":
            continue
        function = {key: part for key, part in tool.items() if key != "type" and part is not None}
        function["name"] = f.text(tool.get("name"), f"tools[{i}].name")
        out.append({"type": "function", "function": function})
    return out


def _tool_choice(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, dict) and value.get("type") == "function":
        return {"tool_choice": {"type": "function", "function": {"name": value.get("name")}}}
    return {"tool_choice": value}


def _format(value: Any) -> dict[str, Any]:
    """`text.format` as `response_format`."""
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
