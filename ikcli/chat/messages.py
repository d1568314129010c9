"""Chat requests in OpenAI's form: checked, with the path of what is wrong, and normalised for templates.

Roles are passed on as they are (`developer` becomes `system` when a template is rendered); content is text or a list of
text parts; arguments of tool calls stay JSON text until a template wants them as an object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ikcli.errors import IkError

_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MEDIA = {"image_url": "image", "input_image": "image", "image": "image", "input_audio": "audio", "audio": "audio",
          "video_url": "video", "input_video": "video", "file": "file", "input_file": "file"}  # fmt: skip


class RequestError(IkError):
    """A request that cannot be served as it is (HTTP 400); `field` is the path of what is wrong."""

    def __init__(self, field: str, message: str) -> None:
        """Compose `field: message`."""
        self.field = field
        super().__init__(f"{field}: {message}" if field else message)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call of the assistant; `arguments` is JSON text. `complete` is False if generation ended within it."""

    name: str
    arguments: str
    id: str = ""
    complete: bool = True

    def to_openai(self) -> dict[str, Any]:
        """The entry of `tool_calls`."""
        return {"type": "function", "id": self.id, "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class Message:
    """One message; `parts` are the texts of a content list (`content` is then their join by newlines)."""

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
        """The entry of `tools` as templates expect it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def describe(value: Any) -> str:
    """A JSON value's kind, for messages."""
    if value is None:
        return "null"
    for kind, name in ((bool, "a boolean"), (str, "a string"), (Mapping, "an object"), (list, "a list")):
        if isinstance(value, kind):
            return name
    return "a number"


def parse_messages(value: Any, path: str = "messages") -> tuple[Message, ...]:
    """The messages of a request; RequestError naming the path of the first mistake."""
    if not isinstance(value, list):
        raise RequestError(path, f"expected a list of messages, got {describe(value)}")
    if not value:
        raise RequestError(path, "expected at least one message")
    messages = tuple(_message(m, f"{path}[{i}]") for i, m in enumerate(value))
    return _with_tool_names(messages)


def _with_tool_names(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Tool results without a name get that of the call they answer; some templates need it."""
    names: dict[str, str] = {}
    out = []
    for message in messages:
        names.update({call.id: call.name for call in message.tool_calls if call.id})
        if message.role == "tool" and not message.name and message.tool_call_id in names:
            message = replace(message, name=names[message.tool_call_id])
        out.append(message)
    return tuple(out)


def _message(value: Any, path: str) -> Message:
    if not isinstance(value, Mapping):
        raise RequestError(path, f"expected an object, got {describe(value)}")
    role = _text(value, "role", path, required=True)
    if not _ROLE.fullmatch(role):
        raise RequestError(f"{path}.role", "expected a role such as system, user, assistant or tool")
    calls = _tool_calls(value.get("tool_calls"), f"{path}.tool_calls")
    if not calls and isinstance(value.get("function_call"), Mapping) and role == "assistant":
        calls = (_function(value["function_call"], f"{path}.function_call", ""),)
    content, parts = _content(value, path, optional=role == "assistant", has_calls=bool(calls))
    reasoning = _text(value, "reasoning_content", path) or _text(value, "reasoning", path)
    return Message(
        role="tool" if role == "function" else role,
        content=content,
        parts=parts,
        tool_calls=calls,
        reasoning=reasoning,
        name=_text(value, "name", path),
        tool_call_id=_text(value, "tool_call_id", path),
    )


def _text(value: Mapping[str, Any], key: str, path: str, *, required: bool = False) -> str:
    found = value.get(key)
    if found is None and not required:
        return ""
    if not isinstance(found, str):
        problem = "is required" if key not in value else f"expected a string, got {describe(found)}"
        raise RequestError(f"{path}.{key}", problem)
    _check_unicode(found, f"{path}.{key}")
    return found


def _check_unicode(text: str, path: str) -> None:
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise RequestError(path, "the text is not valid Unicode (half of a surrogate pair)")


def _content(
    value: Mapping[str, Any], path: str, *, optional: bool, has_calls: bool
) -> tuple[str, tuple[str, ...] | None]:
    if "content" not in value:
        if optional and (has_calls or value.get("reasoning_content") is not None):
            return "", None
        needed = "content or tool_calls is required" if optional else "is required"
        raise RequestError(f"{path}.content", needed)
    content = value["content"]
    if content is None:
        return "", None
    if isinstance(content, str):
        _check_unicode(content, f"{path}.content")
        return content, None
    if not isinstance(content, list):
        raise RequestError(f"{path}.content", f"expected a string or a list of parts, got {describe(content)}")
    parts = tuple(_part(part, f"{path}.content[{i}]") for i, part in enumerate(content))
    return "\n".join(parts), parts


def _part(part: Any, path: str) -> str:
    if isinstance(part, str):
        _check_unicode(part, path)
        return part
    if not isinstance(part, Mapping):
        raise RequestError(path, f"expected an object, got {describe(part)}")
    kind = _text(part, "type", path, required=True)
    if kind in ("text", "input_text", "output_text"):
        return _text(part, "text", path, required=True)
    if kind == "refusal":
        return _text(part, "refusal", path, required=True)
    if kind in _MEDIA:
        raise RequestError(f"{path}.type", f"{_MEDIA[kind]} input is not supported: this model reads text only")
    raise RequestError(f"{path}.type", f'unsupported content part "{kind[:64]}": expected "text"')


def _tool_calls(value: Any, path: str) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise RequestError(path, f"expected a list, got {describe(value)}")
    calls = []
    for i, call in enumerate(value):
        here = f"{path}[{i}]"
        if not isinstance(call, Mapping):
            raise RequestError(here, f"expected an object, got {describe(call)}")
        kind = _text(call, "type", here) or "function"
        if kind != "function":
            raise RequestError(f"{here}.type", f'unsupported tool call type "{kind[:64]}": expected "function"')
        calls.append(_function(call.get("function"), f"{here}.function", _text(call, "id", here)))
    return tuple(calls)


def _function(value: Any, path: str, id: str) -> ToolCall:
    if not isinstance(value, Mapping):
        raise RequestError(path, "is required" if value is None else f"expected an object, got {describe(value)}")
    name = _text(value, "name", path, required=True)
    arguments = value.get("arguments")
    if arguments is None:
        arguments = "{}"
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    _check_unicode(arguments, f"{path}.arguments")
    return ToolCall(name, arguments, id)


def parse_tools(value: Any, path: str = "tools") -> tuple[Tool, ...]:
    """The functions of a request; RequestError naming the path of the first mistake."""
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
    kind = _text(value, "type", path, required=True)
    if kind != "function":
        raise RequestError(f"{path}.type", f'unsupported tool type "{kind[:64]}": expected "function"')
    function = value.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{path}.function", "is required" if function is None else "expected an object")
    name = _text(function, "name", f"{path}.function", required=True)
    if not name or len(name) > 256 or any(c in name for c in '"\\\n\r<>[]{}'):
        raise RequestError(f"{path}.function.name", "expected a name of letters, digits, _ and -")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, Mapping):
        raise RequestError(f"{path}.function.parameters", f"expected a JSON schema, got {describe(parameters)}")
    return Tool(name, _text(function, "description", f"{path}.function"), parameters)
