"""Calls whose arguments are elements with the parameter's name, nested like the values: MiniMax-M3.

Every tag has a control token in front of it, so nothing in a text can be taken for one. Lists are elements `item`,
objects an element per key; texts stand as they are, other values are JSON. The schema decides which is which.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from ikcli.chat.families.base import (
    SPACE,
    CallSink,
    Chars,
    Family,
    Marker,
    Node,
    Repeat,
    Schema,
    Until,
    any_of,
    calls_of,
    seq,
    whole,
)
from ikcli.chat.families.schemas import Values, parameters_of, resolved, values_of, with_definitions
from ikcli.chat.families.xml_calls import json_or_text
from ikcli.chat.messages import Tool
from ikcli.chat.reader import Malformed, Reader, Wait

_MOST_DEPTH = 40
_TREE_DEPTH = 4
_ITEM = "item"
_NAME = seq(Chars(("AZ", "az", "_")), Chars(("AZ", "az", "09", "_", ".", "-"), 0, 63))


class ElementCalls(Family):
    """See the module."""

    name = "MiniMax M3"
    MARK = "]<]minimax[>["
    OPEN, CLOSE = MARK + "<tool_call>", MARK + "</tool_call>"
    openings = (OPEN,)
    markers = (MARK, OPEN, CLOSE)

    # what the grammar allows

    def tree(self, tools: Sequence[Tool], parallel: bool) -> Node:
        """Return the tree of calls whose arguments follow the schemas of the parameters."""
        calls = any_of(
            seq(whole(SPACE, *self._tag(f'<invoke name="{tool.name}">')),
                self._members(tool.parameters, tool.parameters, 0), whole(SPACE, *self._tag("</invoke>")))
            for tool in tools
        )  # fmt: skip
        ending = whole(SPACE, *self._tag("</tool_call>"))
        return seq(*self._tag("<tool_call>"), calls_of(calls, parallel), ending)

    def _tag(self, text: str) -> tuple[Marker, str]:
        return Marker(self.MARK), text

    def _members(self, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Node:
        found = parameters_of(schema, root)
        parts = []
        for key, value in found.properties.items():
            part = self._element(key, value, root, depth)
            parts.append(part if key in found.required else Repeat(part, 0, 1))
        return seq(*parts)

    def _element(self, key: str, schema: Any, root: Mapping[str, Any], depth: int) -> Node:
        return seq(whole(SPACE, *self._tag(f"<{key}>")), self._value(key, resolved(schema, root), root, depth))

    def _value(self, key: str, schema: Any, root: Mapping[str, Any], depth: int) -> Node:
        """Return the tree of a value and its closing tag."""
        closing, values = self._tag(f"</{key}>"), values_of(schema, root)
        if values.listed is not None:
            shown = (v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values.listed)
            return seq(any_of(seq(text) for text in dict.fromkeys(shown)), *closing)
        nested = values.types & {"array", "object"}
        if nested and depth < _TREE_DEPTH and len(values.types) == 1 and isinstance(schema, Mapping):
            if nested == {"array"}:
                inside: Node = Repeat(self._element(_ITEM, schema.get("items", {}), root, depth + 1))
            elif parameters_of(schema, root).properties:
                inside = self._members(schema, root, depth + 1)
            else:
                inside = Repeat(seq(whole(SPACE, Marker(self.MARK), "<"), _NAME, ">", self._free()))
            return seq(inside, whole(SPACE, *closing))
        if values.text or nested:
            return seq(Until(self.MARK), closing[1])
        return seq(Schema(with_definitions(schema, root), lenient=True), *closing)

    def _free(self) -> Node:
        return seq(Until(self.MARK), "</", _NAME, ">")

    # reading

    def calls(self, out: CallSink, reader: Reader, opening: str) -> Wait:
        """Read calls up to the closing tag, which may be missing at the end of the text."""
        yield from reader.spaces()
        yield from reader.literal(self.MARK + '<invoke name="')
        while True:
            yield from self._call(out, reader)
            yield from reader.spaces()
            if not (yield from reader.optional(self.MARK + '<invoke name="')):
                break
        yield from reader.closing(self.CLOSE)

    def _call(self, out: CallSink, reader: Reader) -> Wait:
        name = (yield from reader.name('"\n')).strip()
        yield from reader.literal('">')
        out.begin_call(name)
        root = out.tools.get(name, {})
        properties = parameters_of(root).properties
        before = "{"
        while True:
            yield from reader.spaces()
            if not (yield from reader.optional(self.MARK + "<")):
                raise Malformed("tag")
            if (yield from reader.optional("/")):
                break
            key = yield from self._name(reader)
            out.arguments(before + json.dumps(key, ensure_ascii=False) + ": ")
            before = ", "
            schema = properties.get(key, {})
            if key in properties and values_of(schema, root).types == {"string"}:
                yield from self._text(out, reader)
            else:
                value = yield from self._read(reader, schema, root, 0)
                out.arguments(json.dumps(value, ensure_ascii=False))
        yield from reader.literal("invoke>")
        out.arguments("{}" if before == "{" else "}")
        out.end_call()
        out.mark()

    def _text(self, out: CallSink, reader: Reader) -> Wait:
        """Pass on a text as a JSON string while it arrives."""
        out.arguments('"')
        mark = yield from reader.until(
            (self.MARK,), lambda piece: out.arguments(json.dumps(piece, ensure_ascii=False)[1:-1])
        )
        if mark is None:
            raise Malformed(self.MARK)
        out.arguments('"')
        yield from reader.literal("</")
        yield from self._name(reader)

    def _name(self, reader: Reader) -> Generator[None, None, str]:
        name = yield from reader.name(">\n")
        yield from reader.literal(">")
        return name

    def _read(self, reader: Reader, schema: Any, root: Mapping[str, Any], depth: int) -> Generator[None, None, Any]:
        """Read a value and its closing tag."""
        if depth > _MOST_DEPTH:
            raise Malformed("depth")
        schema = resolved(schema, root)
        values = values_of(schema, root)
        text = yield from reader.collect((self.MARK,))
        yield from reader.literal("<")
        if (yield from reader.optional("/")):
            yield from self._name(reader)
            return _leaf(text, values)
        own = schema if isinstance(schema, Mapping) else {}
        properties, members = parameters_of(own, root).properties, list[tuple[str, Any]]()
        while True:
            key = yield from self._name(reader)
            inner = properties.get(key, own.get("items", {}) if key == _ITEM else own.get("additionalProperties", {}))
            members.append((key, (yield from self._read(reader, inner, root, depth + 1))))
            yield from reader.spaces()
            yield from reader.literal(self.MARK + "<")
            if (yield from reader.optional("/")):
                yield from self._name(reader)
                break
        if all(key == _ITEM for key, _ in members) and _ITEM not in properties:
            return [value for _, value in members]
        return dict(members)


def _leaf(text: str, values: Values) -> Any:
    """Return the value of an element without others in it."""
    if not text.strip() and not values.text:
        return [] if "array" in values.types else {} if "object" in values.types else None
    return json.loads(json_or_text(text, values))
