"""Write functions as signatures, which say what a JSON schema says in a fraction of its tokens.

    get_weather(city: string, unit?: "celsius" | "fahrenheit"): Weather of a city
    - city: with its country

The grammar enforces the schema itself, so details that a signature leaves out (patterns, bounds) still hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ikcli.chat.families.schemas import parameters_of, referred, values_of
from ikcli.chat.messages import Tool

_MOST_DEPTH = 5
_MOST_PARTS = 2000
_KINDS = ("string", "number", "integer", "boolean", "array", "object", "null")


def signature(tool: Tool) -> str:
    """Return the function with its parameters, and a line for each described one."""
    writer = _Writer(tool.parameters)
    head = f"{tool.name}({writer.members(tool.parameters, 0)})"
    head += f": {tool.description.strip()}" if tool.description.strip() else ""
    return "\n".join([head, *writer.notes(tool.parameters, "", 0)])


class _Writer:
    """Writes the parts of a schema; recursive ones are written out to a limited depth."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._left = _MOST_PARTS

    def members(self, schema: Any, depth: int) -> str:
        found = parameters_of(schema, self._root)
        return ", ".join(
            f"{name}{'' if name in found.required else '?'}: {self._type(value, depth + 1)}"
            for name, value in found.properties.items()
        )

    def _type(self, schema: Any, depth: int) -> str:
        self._left -= 1
        schema = _resolved(schema, self._root)
        values = values_of(schema, self._root)
        if values.listed:
            return " | ".join(json.dumps(value, ensure_ascii=False) for value in values.listed)
        deep = depth > _MOST_DEPTH or self._left < 0
        if not isinstance(schema, Mapping) or values.untyped or not values.types or deep:
            return "any"
        options = schema.get("anyOf") or schema.get("oneOf")
        if isinstance(options, list) and options:
            return " | ".join(dict.fromkeys(self._type(option, depth + 1) for option in options))
        whole = values.types - ({"integer"} if "number" in values.types else set())
        return " | ".join(self._kind(kind, schema, depth) for kind in _KINDS if kind in whole)

    def _kind(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        if kind == "array" and isinstance(schema.get("items"), Mapping):
            item = self._type(schema["items"], depth + 1)
            return f"({item})[]" if " | " in item else f"{item}[]"
        members = self.members(schema, depth) if kind == "object" else ""
        return f"{{{members}}}" if members else kind

    def notes(self, schema: Any, path: str, depth: int) -> Iterator[str]:
        """Yield descriptions and defaults, parameter by parameter."""
        for name, own in parameters_of(schema, self._root).properties.items():
            self._left -= 1
            if depth > _MOST_DEPTH or self._left < 0:
                return
            target = _resolved(own, self._root)
            said = " ".join(part for part in (_described(own) or _described(target), _default(own)) if part)
            if said:
                yield f"- {path}{name}: {said}"
            yield from self.notes(target, f"{path}{name}.", depth + 1)
            items = target.get("items") if isinstance(target, Mapping) else None
            if isinstance(items, Mapping):
                yield from self.notes(_resolved(items, self._root), f"{path}{name}[].", depth + 1)


def _described(schema: Any) -> str:
    text = schema.get("description") if isinstance(schema, Mapping) else None
    return " ".join(text.split()) if isinstance(text, str) else ""


def _default(schema: Any) -> str:
    value = schema.get("default") if isinstance(schema, Mapping) else None
    return "" if value is None else f"(default {json.dumps(value, ensure_ascii=False)})"


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    for _ in range(_MOST_DEPTH):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            return schema
        schema = referred(schema["$ref"], root)
    return {}


__all__ = ["signature"]
