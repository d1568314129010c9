"""Tools of a Responses request: which become functions of the model, and how their calls are written for the client.

The client runs every tool with a name and a schema or with free-text input ("custom"), whatever its type is called, and
a few tools that have only a type. A tool with nested `tools` is a namespace. Items of the conversation can bring
further tools (found by a tool search). Tools that only OpenAI's servers run are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ikcli.chat.content import json_value
from ikcli.server.http import fields as f
from ikcli.server.http.errors import bad_request
from ikcli.server.http.shapes.common import random_id

_TEXT, _TEXTS, _NUMBER = {"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "integer"}


@dataclass(frozen=True, slots=True)
class KnownTool:
    """A tool that a request names by its type alone; calls carry their content under `key`, initially `empty`."""

    key: str
    description: str
    properties: Mapping[str, Any]
    required: tuple[str, ...]
    empty: Mapping[str, Any] = field(default_factory=dict)


KNOWN = {
    "local_shell": KnownTool(
        "action", "Run a command on the user's machine",
        {"command": _TEXTS, "working_directory": _TEXT, "timeout_ms": _NUMBER}, ("command",),
        {"type": "exec", "command": [], "env": {}},
    ),
    "shell": KnownTool(
        "action", "Run commands in a shell on the user's machine",
        {"commands": _TEXTS, "timeout_ms": _NUMBER, "max_output_length": _NUMBER}, ("commands",),
        {"commands": []},
    ),
    "apply_patch": KnownTool(
        "operation", "Create, update or delete a file; a diff has lines that begin with a space, + or -",
        {"type": {"enum": ["create_file", "update_file", "delete_file"]}, "path": _TEXT, "diff": _TEXT},
        ("type", "path"),
    ),
}  # fmt: skip
"""Known tools by type, which is also the name of the function."""


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A client tool; `function` is its form for the model. `kind` is function, custom, or a key of `KNOWN`."""

    name: str
    namespace: str
    kind: str
    function: Mapping[str, Any]

    @property
    def qualified(self) -> str:
        """Name of the function."""
        return str(self.function["name"])

    def item(self, call_id: str) -> dict[str, Any]:
        """Return the item of a call that begins."""
        status = {"call_id": call_id, "status": "in_progress"}
        names = {"name": self.name} | ({"namespace": self.namespace} if self.namespace else {})
        if self.kind == "function":
            return {"type": "function_call", "id": "fc_" + random_id(), **names, "arguments": "", **status}
        if self.kind == "custom":
            return {"type": "custom_tool_call", "id": "ctc_" + random_id(), **names, "input": "", **status}
        return {
            "type": f"{self.kind}_call",
            "id": "tc_" + random_id(),
            KNOWN[self.kind].key: dict(KNOWN[self.kind].empty),
            **status,
        }

    def fill(self, item: dict[str, Any], arguments: str) -> None:
        """Write the arguments of a call into its item."""
        if self.kind == "function":
            item["arguments"] = arguments
        elif self.kind == "custom":
            item["input"] = custom_input(arguments)
        else:
            known, value = KNOWN[self.kind], json_value(arguments)
            item[known.key] = {**known.empty, **(value if isinstance(value, dict) else {})}


class ClientTools:
    """Tools of one request."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        """Read the tools of a request. Raise ApiError naming the faulty field."""
        self._tools: dict[tuple[str, str], ClientTool] = {}
        self._names: dict[str, ClientTool] = {}
        self._left_out: list[str] = []
        if body.get("tools") is not None:
            self._add(f.array(body["tools"], "tools"), "tools")
        items = body.get("input")
        for i, item in enumerate(items if isinstance(items, list) else ()):
            if isinstance(item, Mapping) and isinstance(item.get("tools"), list):
                found = [tool for tool in item["tools"] if isinstance(tool, Mapping) and "type" in tool]
                self._add(found, f"input[{i}].tools")

    def _add(self, tools: list[Any], path: str, namespace: str = "", about: str = "") -> None:
        for i, value in enumerate(tools):
            tool, here = f.table(value, f"{path}[{i}]"), f"{path}[{i}]"
            kind = tool.get("type") if isinstance(tool.get("type"), str) else None
            if isinstance(tool.get("tools"), list):
                name = f.text(tool.get("name"), f"{here}.name")
                about = f.text(tool.get("description") or "", f"{here}.description")
                self._add(tool["tools"], f"{here}.tools", _joined(namespace, name), about)
            elif kind in KNOWN or kind in ("function", "custom") or ("name" in tool and "parameters" in tool):
                self._enter(tool, here, namespace, about)
                about = ""  # description of a namespace, given with its first function
            else:
                self._left_out.append(str(kind)[:64])

    def _enter(self, tool: Mapping[str, Any], path: str, namespace: str, about: str) -> None:
        kind = tool["type"] if tool.get("type") in (*KNOWN, "custom") else "function"
        name = kind if kind in KNOWN else f.text(tool.get("name"), f"{path}.name")
        if (namespace, name) in self._tools:
            if not path.startswith("tools"):
                return  # repeated in the conversation
            raise bad_request(f'{path}.name: the function "{name}" is there twice')
        qualified = _joined(namespace, name)
        while qualified in self._names:
            qualified += "_"
        function = _function(kind, tool, path)
        if about:
            said = f.text(function.get("description") or "", f"{path}.description")
            function["description"] = f"{about}\n{said}".rstrip()
        found = ClientTool(name, namespace, kind, function | {"name": qualified})
        self._tools[namespace, name] = self._names[qualified] = found

    def chat(self) -> list[dict[str, Any]]:
        """Return the tools of a chat completion request."""
        return [{"type": "function", "function": dict(tool.function)} for tool in self._tools.values()]

    def qualified(self, name: str, namespace: str) -> str:
        """Return the name of a function in the conversation, which may no longer be one of the tools."""
        found = self._tools.get((namespace, name))
        if found is not None:
            return found.qualified
        return _joined(namespace, name)

    def called(self, qualified: str) -> ClientTool:
        """Return the tool that the model calls."""
        return self._names.get(qualified) or ClientTool(qualified, "", "function", {"name": qualified})

    def choice(self, value: Any) -> dict[str, Any]:
        """Return `tool_choice` of a chat completion request. Raise ApiError if the required tool does not exist."""
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            if value == "required" and not self._tools:
                raise bad_request(f'tool_choice: "required" needs a tool of the client{self._without()}')
            return {"tool_choice": value}
        if value.get("type") == "allowed_tools":
            names = [tool.qualified for i, entry in enumerate(f.array(value.get("tools"), "tool_choice.tools"))
                     for tool in self._chosen(entry, f"tool_choice.tools[{i}]")]  # fmt: skip
            if not names and value.get("mode") == "required":
                raise bad_request(f"tool_choice.tools: none of them is a tool of the client{self._without()}")
            chosen = [{"type": "function", "function": {"name": name}} for name in names]
            allowed = {"mode": value.get("mode") or "auto", "tools": chosen}
            return {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
        tool = next(self._chosen(value, "tool_choice"), None)
        if tool is None:
            what = value.get("name") or value.get("type")
            raise bad_request(f"tool_choice: tools has no client tool {f.shown(what)}{self._without()}")
        return {"tool_choice": {"type": "function", "function": {"name": tool.qualified}}}

    def _chosen(self, entry: Any, path: str) -> Iterator[ClientTool]:
        """Yield the tools that an entry names; a namespace stands for all of its tools."""
        wanted = f.table(entry, path)
        name, namespace = wanted.get("name"), wanted.get("namespace")
        for tool in self._tools.values():
            if wanted.get("type") == "namespace":
                if tool.namespace == name:
                    yield tool
            elif (name or wanted.get("type")) in (tool.name, tool.qualified) and namespace in (None, tool.namespace):
                yield tool

    def _without(self) -> str:
        kinds = ", ".join(dict.fromkeys(self._left_out))
        return f"; {kinds} cannot be served here" if kinds else ""


def _joined(namespace: str, name: str) -> str:
    if not namespace:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def _function(kind: str, tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return a tool in the model's form, without its final name."""
    if kind == "custom":
        return _custom(tool, path)
    if kind == "function":
        return {key: value for key, value in tool.items() if key != "type" and value is not None}
    known = KNOWN[kind]
    schema = {"type": "object", "properties": dict(known.properties), "required": list(known.required)}
    return {"description": known.description, "parameters": schema}


def _custom(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return a free-text tool as a function with the text as its argument."""
    form = tool.get("format") if isinstance(tool.get("format"), Mapping) else {}
    assert isinstance(form, Mapping)
    about = [f.text(tool.get("description") or "", f"{path}.description")]
    if isinstance(form.get("definition"), str):
        about.append(
            f"The input follows this grammar ({form.get('syntax') or form.get('type')}):\n{form['definition']}"
        )
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return {"description": "\n".join(text for text in about if text), "parameters": schema}


def custom_input(arguments: str) -> str:
    """Return the free text in the arguments of a custom tool's call, even if truncated; else the raw arguments."""
    for end in ("", '"}', "}"):
        try:
            value = json.loads(arguments + end)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and isinstance(value.get("input"), str):
            return str(value["input"])
    return arguments
