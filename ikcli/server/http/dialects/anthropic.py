"""Conversion of Anthropic Messages API requests to chat completion requests.

Billing headers that agents put into the system prompt (`x-anthropic-...`) are dropped: they change with every request
and would defeat the prompt cache.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ikcli.chat.content import arguments_text, as_error, is_thought, thought_text
from ikcli.chat.images import NO_IMAGES, Images
from ikcli.server.http import fields as f
from ikcli.server.http.errors import bad_request
from ikcli.server.http.turns import Turns

_SAME = ("temperature", "top_p", "top_k", "stream", "model")
_OWN = frozenset({"system", "messages", "tools", "tool_choice", "stop_sequences", "thinking", "metadata", "max_tokens",
                  "output_config", "output_format"})  # fmt: skip
DEFAULT_MAX_TOKENS = 4096
_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_RANGE = {"type": "array", "items": _NUMBER}
_EDIT = {"command": _TEXT, "path": _TEXT, "file_text": _TEXT, "old_str": _TEXT, "new_str": _TEXT,
         "insert_line": _NUMBER, "insert_text": _TEXT, "view_range": _RANGE}  # fmt: skip
_CLIENT_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "bash": ("Run a command in a shell that stays open", {"command": _TEXT, "restart": {"type": "boolean"}}),
    "text_editor": ("View and edit files; commands: view, create, str_replace, insert", _EDIT),
    "memory": (
        "Files that are kept; commands: view, create, str_replace, insert, delete, rename",
        _EDIT | {"old_path": _TEXT, "new_path": _TEXT},
    ),
    "computer": (
        "Use the screen",
        {"action": _TEXT, "coordinate": _RANGE, "text": _TEXT, "duration": {"type": "number"}},
    ),
}
"""Tools that clients name without a schema, with the one Anthropic's models know; the first field is required."""


def to_chat(body: Mapping[str, Any], images: Images = NO_IMAGES) -> dict[str, Any]:
    """Return the body of an equivalent chat completion request, with its images in `images`.

    Raise ApiError naming the faulty field.
    """
    if body.get("messages") is None:
        raise bad_request("messages is required")
    out = {name: value for name, value in body.items() if name not in _OWN}
    turns = Turns(images)
    if body.get("system") is not None:
        turns.say("system", _system(turns, body["system"]))
    for i, message in enumerate(f.array(body["messages"], "messages")):
        _add(turns, f.table(message, f"messages[{i}]"), f"messages[{i}]")
    out["messages"] = turns.messages
    limit = body.get("max_tokens")
    out["max_tokens"] = DEFAULT_MAX_TOKENS if limit is None else f.integer(limit, "max_tokens", -2)
    if body.get("stop_sequences") is not None:
        out["stop"] = list(f.texts(body["stop_sequences"], "stop_sequences"))
    if body.get("tools") is not None:
        out["tools"] = _tools(body["tools"])
    if body.get("tool_choice") is not None:
        out |= _tool_choice(f.table(body["tool_choice"], "tool_choice"))
    if body.get("thinking") is not None:
        out |= _thinking(f.table(body["thinking"], "thinking"))
    out |= _output(body)
    if body.get("metadata") is not None:
        f.table(body["metadata"], "metadata")
    return out


def _system(turns: Turns, value: Any) -> str:
    if isinstance(value, str):
        return value
    texts = [turns.part_text(block, f"system[{i}]", "system") for i, block in enumerate(f.array(value, "system"))]
    return "".join(text for text in texts if not text.startswith("x-anthropic-"))


def _add(turns: Turns, message: Mapping[str, Any], path: str) -> None:
    role = f.text(message.get("role"), f"{path}.role")
    content = message.get("content")
    if isinstance(content, str):
        turns.say(role, content)
    elif isinstance(content, list):
        _add_blocks(turns, role, content, f"{path}.content")
    elif content is not None or role != "assistant":
        raise bad_request(f"{path}.content must be a string or an array of blocks, not {f.shown(content)}")


def _add_blocks(turns: Turns, role: str, blocks: list[Any], path: str) -> None:
    """Add the blocks of a message; tool results go to their calls, before the text of the same message."""
    texts: list[str] = []
    kinds = set()
    for i, item in enumerate(blocks):
        block, here = f.table(item, f"{path}[{i}]"), f"{path}[{i}]"
        kind = f.text(block.get("type"), f"{here}.type")
        kinds.add(kind)
        if kind == "tool_result":
            turns.answer(f.text(block.get("tool_use_id"), f"{here}.tool_use_id"), _result(turns, block, here))
        elif kind == "tool_use":
            name, id = f.text(block.get("name"), f"{here}.name"), f.text(block.get("id") or "", f"{here}.id")
            turns.call(id, name, arguments_text(block.get("input")))
        elif role == "assistant" and is_thought(block):
            turns.think(thought_text(block))
        elif (text := turns.part_text(block, here, role)) or role != "assistant":
            texts.append(text)
    if texts or not kinds & {"tool_result", "tool_use"}:
        turns.say(role, texts or "")


def _result(turns: Turns, block: Mapping[str, Any], path: str) -> str:
    text = turns.result_text(block.get("content"), f"{path}.content")
    failed = block.get("is_error") is not None and f.boolean(block["is_error"], f"{path}.is_error")
    return as_error(text) if failed else text


def _tools(value: Any) -> list[dict[str, Any]]:
    """Return the tools that the client runs, without those that only Anthropic's servers have (such as web search)."""
    tools = [f.table(item, f"tools[{i}]") for i, item in enumerate(f.array(value, "tools"))]
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools) if not _is_hosted(tool)]


def _is_hosted(tool: Mapping[str, Any]) -> bool:
    """Return whether only Anthropic's servers run a tool.

    Anthropic's own tools have a dated type and no schema, but the client runs some of them.
    """
    kind = tool.get("type")
    if tool.get("input_schema") is not None or not isinstance(kind, str) or kind in ("custom", "function"):
        return False
    return "name" not in tool or re.sub(r"_[0-9]{8}$", "", kind) not in _CLIENT_TOOLS


def _tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    kind = re.sub(r"_[0-9]{8}$", "", tool["type"]) if isinstance(tool.get("type"), str) else ""
    description, properties = _CLIENT_TOOLS.get(kind, ("", {}))
    own = {"type": "object", "properties": properties, "required": list(properties)[:1]} if properties else {}
    schema = tool.get("input_schema")
    function = {
        "name": f.text(tool.get("name"), f"{path}.name"),
        "description": f.text(tool.get("description") or description, f"{path}.description"),
        "parameters": own if schema is None else f.table(schema, f"{path}.input_schema"),
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
    """Return the answer format, under its newer or older name, and the effort."""
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
    tokens = 10000 if budget is None else f.integer(budget, "thinking.budget_tokens", 0)
    return {"enable_thinking": True, "thinking_budget_tokens": tokens}
