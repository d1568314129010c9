"""Check chat requests in OpenAI's form, naming the path of an error, and normalise them for templates.

Roles are passed on as they are (`developer` becomes `system` when a template is rendered); content is text or a list of
text parts; arguments of tool calls stay JSON text until a template wants them as an object.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ikcli.chat.content import (
    RequestError,
    arguments_text,
    check_unicode,
    describe,
    is_thought,
    note,
    part_text,
    text_field,
    thought_text,
)
from ikcli.chat.images import NO_IMAGES, Images, joined

_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call of the assistant; `arguments` is JSON text. `complete` is False if generation ended within it."""

    name: str
    arguments: str
    id: str = ""
    complete: bool = True

    def to_openai(self) -> dict[str, Any]:
        """Return the entry of `tool_calls`."""
        return {"type": "function", "id": self.id, "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class Message:
    """One message; `parts` are the texts of a content list, markers of images included (`content` joins them)."""

    role: str
    content: str = ""
    parts: tuple[str, ...] | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    name: str = ""
    tool_call_id: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call; `parameters` is a JSON schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def to_openai(self) -> dict[str, Any]:
        """Return the entry of `tools` as templates expect it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def parse_messages(value: Any, path: str = "messages", images: Images = NO_IMAGES) -> tuple[Message, ...]:
    """Parse the messages of a request, collecting their images; raise RequestError naming the path of a mistake."""
    if not isinstance(value, list):
        raise RequestError(path, f"expected a list of messages, got {describe(value)}")
    if not value:
        raise RequestError(path, "expected at least one message")
    messages = tuple(_message(m, f"{path}[{i}]", images) for i, m in enumerate(value))
    return _with_tool_names(messages)


def _with_tool_names(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Give tool results without a name that of their call; some templates need it."""
    names: dict[str, str] = {}
    out = []
    for message in messages:
        names.update({call.id: call.name for call in message.tool_calls if call.id})
        if message.role == "tool" and not message.name and message.tool_call_id in names:
            message = replace(message, name=names[message.tool_call_id])
        out.append(message)
    return tuple(out)


def _message(value: Any, path: str, images: Images) -> Message:
    if not isinstance(value, Mapping):
        raise RequestError(path, f"expected an object, got {describe(value)}")
    role = text_field(value, "role", path, required=True)
    if not _ROLE.fullmatch(role):
        raise RequestError(f"{path}.role", "expected a role such as system, user, assistant or tool")
    calls = _tool_calls(value.get("tool_calls"), f"{path}.tool_calls")
    if not calls and isinstance(value.get("function_call"), Mapping) and role == "assistant":
        calls = (_function(value["function_call"], f"{path}.function_call", ""),)
    content, parts, thoughts = _content(value, path, images, role=role, has_calls=bool(calls))
    reasoning = text_field(value, "reasoning_content", path) or text_field(value, "reasoning", path) or thoughts
    return Message(
        role="tool" if role == "function" else role,
        content=content,
        parts=parts,
        tool_calls=calls,
        reasoning=reasoning,
        name=text_field(value, "name", path),
        tool_call_id=text_field(value, "tool_call_id", path),
    )


def _content(
    value: Mapping[str, Any], path: str, images: Images, *, role: str, has_calls: bool
) -> tuple[str, tuple[str, ...] | None, str]:
    """Return the text, its parts if there are several, and the reasoning among them."""
    content, optional = value.get("content"), role == "assistant"
    if content is None:
        if instead := _instead_of_content(value) if optional else "":
            return check_unicode(instead, path), None, ""
        if "content" in value or (optional and (has_calls or value.get("reasoning_content") is not None)):
            return "", None, ""
        needed = "content or tool_calls is required" if optional else "is required"
        raise RequestError(f"{path}.content", needed)
    if isinstance(content, str):
        return check_unicode(content, f"{path}.content"), None, ""
    if not isinstance(content, list):
        raise RequestError(f"{path}.content", f"expected a string or a list of parts, got {describe(content)}")
    parts, thoughts = [], ""
    for i, part in enumerate(content):
        if role == "assistant" and is_thought(part):
            thoughts += thought_text(part)
            continue
        text = part_text(part, f"{path}.content[{i}]", role, images)
        if text or role != "assistant":
            parts.append(text)
    return joined(parts), tuple(parts), thoughts


def _instead_of_content(value: Mapping[str, Any]) -> str:
    """Return what stands in for missing content of the assistant: a refusal or a transcript."""
    refusal, audio = value.get("refusal"), value.get("audio")
    if isinstance(refusal, str) and refusal:
        return refusal
    if not isinstance(audio, Mapping):
        return ""
    transcript = audio.get("transcript")
    return transcript if isinstance(transcript, str) and transcript else note("audio")


def _tool_calls(value: Any, path: str) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise RequestError(path, f"expected a list, got {describe(value)}")
    return tuple(_tool_call(call, f"{path}[{i}]") for i, call in enumerate(value))


def _tool_call(call: Any, path: str) -> ToolCall:
    """Parse a call of any type; its details stand under the name of the type."""
    if not isinstance(call, Mapping):
        raise RequestError(path, f"expected an object, got {describe(call)}")
    kind, id = text_field(call, "type", path) or "function", text_field(call, "id", path)
    if kind == "function" or isinstance(call.get("function"), Mapping):
        return _function(call.get("function"), f"{path}.function", id)
    body = call.get(kind)
    if not isinstance(body, Mapping):
        raise RequestError(f"{path}.type", f'unsupported tool call type "{kind[:64]}": expected "function"')
    asked = body["arguments"] if "arguments" in body else {key: item for key, item in body.items() if key != "name"}
    name = text_field(body, "name", f"{path}.{kind}") or kind
    return ToolCall(name, check_unicode(arguments_text(asked), f"{path}.{kind}"), id)


def _function(value: Any, path: str, id: str) -> ToolCall:
    if not isinstance(value, Mapping):
        raise RequestError(path, "is required" if value is None else f"expected an object, got {describe(value)}")
    name = text_field(value, "name", path, required=True)
    return ToolCall(name, check_unicode(arguments_text(value.get("arguments")), f"{path}.arguments"), id)


def parse_tools(value: Any, path: str = "tools") -> tuple[Tool, ...]:
    """Parse the functions of a request; raise RequestError naming the path of the first mistake."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise RequestError(path, f"expected a list, got {describe(value)}")
    tools = tuple(_tool(tool, f"{path}[{i}]") for i, tool in enumerate(value))
    names: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.name in names:
            raise RequestError(f"{path}[{i}].function.name", f'the function "{tool.name}" is there twice')
        names.add(tool.name)
    return tools


def _tool(value: Any, path: str) -> Tool:
    if not isinstance(value, Mapping):
        raise RequestError(path, f"expected an object, got {describe(value)}")
    kind = text_field(value, "type", path, required=True)
    if kind != "function":
        raise RequestError(f"{path}.type", f'unsupported tool type "{kind[:64]}": expected "function"')
    function = value.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{path}.function", "is required" if function is None else "expected an object")
    name = text_field(function, "name", f"{path}.function", required=True)
    if not name or len(name) > 256 or any(c in name for c in '"\\\n\r<>[]{}'):
        raise RequestError(f"{path}.function.name", "expected a name of letters, digits, _ and -")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, Mapping):
        raise RequestError(f"{path}.function.parameters", f"expected a JSON schema, got {describe(parameters)}")
    return Tool(name, text_field(function, "description", f"{path}.function"), parameters)
