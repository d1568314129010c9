"""Calls of Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,other:[1,2]}<tool_call|>`.

Arguments look like JSON without quotes around keys, and with a control token as the quote around texts, in which
nothing is escaped: a quote ends a text only where what follows may follow. Keys come in alphabetical order, as the
model's template writes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ikcli.chat.families.base import (
    SPACE,
    CallSink,
    Chars,
    Family,
    Literal,
    Marker,
    Node,
    Repeat,
    Schema,
    Until,
    any_of,
    calls_of,
    seq,
)
from ikcli.chat.families.schemas import parameters_of, resolved, values_of, with_definitions
from ikcli.chat.messages import Tool
from ikcli.chat.reader import Malformed, Reader, Sink, Wait
from ikcli.chat.unescaped import text_until
from ikcli.grammar.spec import Gap, Pattern

_QUOTE = '<|"|>'
_MOST_DEPTH = 100
_FREE_DEPTH = 3  # of values without a schema
_KEY = seq(Chars(("AZ", "az", "_")), Chars(("AZ", "az", "09", "_", ".", "-"), 0, 63))
_KINDS = ("string", "number", "integer", "boolean", "null", "array", "object")
_VALUES = (_QUOTE, *"{[-0123456789tfn")  # what values begin with


class GemmaCalls(Family):
    """See the module."""

    name = "Gemma 4"
    OPEN, CLOSE = "<|tool_call>", "<tool_call|>"
    openings = (OPEN,)
    markers = (OPEN, CLOSE, _QUOTE)
    stops = ("<|tool_response>",)

    def tree(self, tools: Sequence[Tool], parallel: bool) -> Node:
        """Return the tree of calls whose arguments follow the schemas of the parameters."""
        call = any_of(seq(f"call:{tool.name}", _object_tree(tool.parameters, tool.parameters, 0)) for tool in tools)
        return calls_of(seq(Marker(self.OPEN), call, Marker(self.CLOSE)), parallel)

    def calls(self, out: CallSink, reader: Reader, opening: str) -> Wait:
        """Read calls up to the closing mark, which may be missing at the end of the text."""
        yield from reader.spaces()
        yield from reader.literal("call:")
        out.begin_call((yield from reader.name("{ \n")).strip())
        yield from reader.spaces()
        if (yield from reader.peek()) != "{":
            raise Malformed("{")
        yield from _read_members(out.arguments, reader, 0, "{")
        out.end_call()
        out.mark()
        yield from reader.spaces()
        yield from reader.closing(self.CLOSE)


# --- reading ----------------------------------------------------------------------------------------------------------
def _read_value(sink: Sink, reader: Reader, depth: int, text: Until) -> Wait:
    """Read one value and pass it on as JSON; `text` says how texts end there."""
    if depth > _MOST_DEPTH:
        raise Malformed("depth")
    if (yield from reader.optional(_QUOTE)):
        sink('"')
        if not (yield from text_until(reader, text, lambda piece: sink(_escaped(piece)))):
            raise Malformed(_QUOTE)
        sink('"')
        return
    char = yield from reader.peek()
    if char and char in "{[":
        yield from _read_members(sink, reader, depth, char)
    else:
        yield from reader.json_value(sink, depth)


def _read_members(sink: Sink, reader: Reader, depth: int, opening: str) -> Wait:
    closing = "}" if opening == "{" else "]"
    text = Until(_QUOTE, _followers(opening, depth))
    yield from reader.literal(opening)
    yield from reader.spaces()
    sink(opening)
    if (yield from reader.optional(closing)):
        sink(closing)
        return
    while True:
        if opening == "{":
            sink(json.dumps((yield from _read_key(reader)), ensure_ascii=False) + ": ")
        yield from _read_value(sink, reader, depth + 1, text)
        yield from reader.spaces()
        mark = yield from reader.one_of((",", closing))
        if mark is None:
            raise Malformed(closing)
        if mark == closing:
            sink(closing)
            return
        sink(", ")
        yield from reader.spaces()


def _followers(opening: str, depth: int) -> tuple[Pattern, ...]:
    """Return what may follow a text inside a list or object."""
    outside: tuple[str | Gap, ...] = (",", "}", "]") if depth else (GemmaCalls.CLOSE, Gap.END)
    if opening == "[":
        more: list[Pattern] = [(Gap.SPACES, ",", Gap.SPACES, value) for value in _VALUES]
        return (*more, *((Gap.SPACES, "]", Gap.SPACES, mark) for mark in outside))
    key: Pattern = (Gap.SPACES, ",", Gap.SPACES)
    ends = ((Gap.SPACES, "}", Gap.SPACES, mark) for mark in outside)
    return ((*key, Gap.KEY, Gap.SPACES, ":"), (*key, _QUOTE), *ends)


def _read_key(reader: Reader) -> Any:
    """Read a key, bare or in quotes, and the colon after it."""
    if (yield from reader.optional(_QUOTE)):
        key = yield from reader.collect((_QUOTE,))
        yield from reader.spaces()
    elif (yield from reader.peek()) == '"':
        key = yield from reader.string()
        yield from reader.spaces()
    else:
        key = (yield from reader.name(":{}[],\n")).strip()
    yield from reader.literal(":")
    yield from reader.spaces()
    return key


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


# --- constraints ------------------------------------------------------------------------------------------------------
def _object_tree(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Node:
    """Return the tree of an object with the properties that its schema names, in alphabetical order."""
    found = parameters_of(schema, root)
    members = [
        (seq(f"{key}:", _value_tree(value, root, depth + 1)), key in found.required)
        for key, value in sorted(found.properties.items())
    ]
    firsts = []
    for i, (member, needed) in enumerate(members):
        rest = (seq(",", other) if wanted else Repeat(seq(",", other), 0, 1) for other, wanted in members[i + 1 :])
        firsts.append(seq(member, *rest))
        if needed:
            break
    if not firsts:
        return seq("{}")
    inside = any_of(firsts)
    return seq("{", inside if found.required else Repeat(inside, 0, 1), "}")


def _value_tree(schema: Any, root: Mapping[str, Any], depth: int) -> Node:
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _FREE_DEPTH + 3:
        return _free_tree(0)
    values = values_of(schema, root)
    if values.listed:
        return any_of(_constant_tree(value) for value in values.listed)
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(options, list) and options:
        return any_of(_value_tree(option, root, depth + 1) for option in options)
    if values.untyped or not values.types:
        return _free_tree(0)
    types = values.types - ({"integer"} if "number" in values.types else set())
    return any_of(_typed_tree(kind, schema, root, depth) for kind in _KINDS if kind in types)


def _typed_tree(kind: str, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Node:
    if kind == "string":
        return _text_tree()
    if kind == "array":
        return _list_tree(_value_tree(schema.get("items", {}), root, depth + 1))
    if kind == "object":
        return _object_tree(schema, root, depth) if parameters_of(schema, root).properties else _free_object(0)
    return Schema({**with_definitions(schema, root), "type": kind}, lenient=True)  # type: ignore[dict-item]


def _free_tree(depth: int) -> Node:
    """Return the tree of any value, with lists and objects nested up to a depth."""
    scalars = (_text_tree(), *(Schema({"type": kind}) for kind in ("number", "boolean", "null")))
    if depth >= _FREE_DEPTH:
        return any_of(scalars)
    return any_of((*scalars, _list_tree(_free_tree(depth + 1)), _free_object(depth)))


def _free_object(depth: int) -> Node:
    member = seq(_KEY, ":", _free_tree(depth + 1))
    return seq("{", Repeat(member, 0, None, Literal(",")), "}")


def _list_tree(item: Node) -> Node:
    return seq("[", Repeat(item, 0, None, seq(",", SPACE)), "]")


def _text_tree() -> Node:
    return seq(Marker(_QUOTE), Until(_QUOTE))


def _constant_tree(value: Any) -> Node:
    if isinstance(value, str):
        return seq(Marker(_QUOTE), value, Marker(_QUOTE))
    return seq(json.dumps(value))
