"""Requests of Anthropic's messages API as chat completion requests.

Billing headers that agents put into the system prompt (`x-anthropic-...`) are left out: they change with every request
and would keep the prompt cache from working.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ikcli.server.http import fields as f
from ikcli.server.http.errors import bad_request

_SAME = ("temperature", "top_p", "top_k", "stream", "model")
_OWN = frozenset({"system", "messages", "tools", "tool_choice", "stop_sequences", "thinking", "metadata", "max_tokens",
                  "output_config", "output_format"})  # fmt: skip
DEFAULT_MAX_TOKENS = 4096


def to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of an equal chat completion request; ApiError naming what is wrong."""
    if body.get("messages") is None:
        raise bad_request("messages is required")
    out = {name: value for name, value in body.items() if name not in _OWN}
    out["messages"] = _system(body.get("system")) + _messages(f.array(body["messages"], "messages"))
    limit = body.get("max_tokens")
    out["max_tokens"] = DEFAULT_MAX_TOKENS if limit is None else f.checked(limit, "int", "max_tokens", -2)
    if body.get("stop_sequences") is not None:
        out["stop"] = list(f.texts(body["stop_sequences"], "stop_sequences"))
    if body.get("tools") is not None:
        out["tools"] = [_tool(item, i) for i, item in enumerate(f.array(body["tools"], "tools"))]
    if body.get("tool_choice") is not None:
        out |= _tool_choice(f.table(body["tool_choice"], "tool_choice"))
    if body.get("thinking") is not None:
        out |= _thinking(f.table(body["thinking"], "thinking"))
    out |= _output(body)
    if body.get("metadata") is not None:
        f.table(body["metadata"], "metadata")
    return out


def _system(value: Any) -> list[dict[str, Any]]:
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "system", "content": value}]
    texts = []
    for i, block in enumerate(f.array(value, "system")):
        entry = f.table(block, f"system[{i}]")
        if entry.get("type") == "text":
            text = f.text(entry.get("text"), f"system[{i}].text")
            if not text.startswith("x-anthropic-"):
                texts.append(text)
    return [{"role": "system", "content": "".join(texts)}]


def _messages(messages: list[Any]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for i, item in enumerate(messages):
        message = f.table(item, f"messages[{i}]")
        role = f.text(message.get("role"), f"messages[{i}].role")
        content = message.get("content")
        if content is None and role == "assistant":
            continue
        if not isinstance(content, list):
            out.append({"role": role, "content": content})
        else:
            out += _blocks(role, content, f"messages[{i}].content")
    return out


def _blocks(role: str, blocks: list[Any], path: str) -> list[dict[str, Any]]:
    """One message for texts, thoughts and calls, then one per tool result."""
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    thoughts = ""
    for i, item in enumerate(blocks):
        block = f.table(item, f"{path}[{i}]")
        kind = f.text(block.get("type"), f"{path}[{i}].type")
        if kind == "text":
            parts.append({"type": "text", "text": f.text(block.get("text"), f"{path}[{i}].text")})
        elif kind == "thinking":
            thoughts += f.text(block.get("thinking") or "", f"{path}[{i}].thinking")
        elif kind == "tool_use":
            calls.append(_call(block, f"{path}[{i}]"))
        elif kind == "tool_result":
            results.append(_result(block, f"{path}[{i}]"))
        elif kind == "image":
            raise bad_request(f"{path}[{i}]: image input is not supported: the model reads text only")
        elif kind != "redacted_thinking":
            raise bad_request(f"{path}[{i}].type: unsupported block type {f.shown(kind)}")
    message: dict[str, Any] = {"role": role, "content": parts or ""}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = thoughts
    return ([message] if parts or calls or thoughts or not results else []) + results


def _call(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    arguments = json.dumps(f.table(block.get("input") or {}, f"{path}.input"), ensure_ascii=False)
    function = {"name": f.text(block.get("name"), f"{path}.name"), "arguments": arguments}
    return {"id": f.text(block.get("id") or "", f"{path}.id"), "type": "function", "function": function}


def _result(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    content = block.get("content")
    if isinstance(content, list):
        texts = [part.get("text", "") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        content = "".join(f.text(text, f"{path}.content") for text in texts)
    text = f.text("" if content is None else content, f"{path}.content")
    return {"role": "tool", "tool_call_id": f.text(block.get("tool_use_id"), f"{path}.tool_use_id"), "content": text}


def _tool(item: Any, i: int) -> dict[str, Any]:
    tool = f.table(item, f"tools[{i}]")
    function = {
        "name": f.text(tool.get("name"), f"tools[{i}].name"),
        "description": f.text(tool.get("description") or "", f"tools[{i}].description"),
        "parameters": f.table(tool.get("input_schema") or {}, f"tools[{i}].input_schema"),
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    out: dict[str, Any] = {}
    if choice.get("disable_parallel_tool_use") is not None:
        disabled = f.boolean(choice["disable_parallel_tool_use"], "tool_choice.disable_parallel_tool_use")
        out["parallel_tool_calls"] = not disabled
    if kind in ("auto", "none"):
        return out | {"tool_choice": kind}
    if kind == "any":
        return out | {"tool_choice": "required"}
    if kind == "tool":
        name = f.text(choice.get("name"), "tool_choice.name")
        return out | {"tool_choice": {"type": "function", "function": {"name": name}}}
    raise bad_request(f"tool_choice.type must be auto, any, tool or none, not {f.shown(kind)}")


def _output(body: Mapping[str, Any]) -> dict[str, Any]:
    """The form of the answer, under the newer or the older name, and the effort."""
    config = f.table({} if body.get("output_config") is None else body["output_config"], "output_config")
    out: dict[str, Any] = {}
    if config.get("effort") is not None:
        out["reasoning_effort"] = f.text(config["effort"], "output_config.effort")
    for name, value in (("output_config.format", config.get("format")), ("output_format", body.get("output_format"))):
        if value is None:
            continue
        form = f.table(value, name)
        if form.get("type") != "json_schema":
            raise bad_request(f"{name}.type must be json_schema, not {f.shown(form.get('type'))}")
        out["json_schema"] = f.table(form.get("schema"), f"{name}.schema")
    return out


def _thinking(thinking: Mapping[str, Any]) -> dict[str, Any]:
    kind = thinking.get("type")
    if kind == "disabled":
        return {"enable_thinking": False}
    if kind == "adaptive":
        return {}
    if kind != "enabled":
        raise bad_request(f"thinking.type must be enabled, adaptive or disabled, not {f.shown(kind)}")
    budget = thinking.get("budget_tokens")
    tokens = 10000 if budget is None else f.checked(budget, "int", "thinking.budget_tokens", 0)
    return {"enable_thinking": True, "thinking_budget_tokens": tokens}
