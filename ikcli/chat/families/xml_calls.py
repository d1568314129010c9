"""Calls with every argument between its own tags: Qwen3-Coder, Seed-OSS, GLM 4.5, DeepSeek V3.2, MiniMax.

A text argument stands as it is (no quoting); others are JSON. The parameter's schema tells which: the reader writes the
arguments object piece by piece.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ikcli.chat.families.base import (
    SPACE,
    CallSink,
    Family,
    Marker,
    Node,
    Regex,
    Repeat,
    Schema,
    Until,
    any_of,
    calls_of,
    seq,
)
from ikcli.chat.messages import Tool
from ikcli.chat.reader import Malformed, Reader, Wait

_MOST_LITERAL = 100_000


@dataclass(frozen=True, slots=True)
class Tags:
    """The texts around a call, its name, each key and value; `lead` is the line break inside the tags.

    `attribute`: after the key follows ` string="true"` or `"false"` (DeepSeek V3.2), telling text from JSON.
    """

    name: str
    open: str
    close: str
    call_open: str
    name_end: str
    call_close: str
    key_open: str
    key_end: str
    value_close: str
    lead: str = "\n"
    value_lead: str = "\n"
    value_open: str = ""
    attribute: bool = False
    one_section: bool = False
    also: tuple[str, ...] = ()


QWEN3_CODER = Tags(
    "Qwen3 Coder", "<tool_call>", "</tool_call>", "<function=", ">", "</function>", "<parameter=", ">", "</parameter>",
    also=("<function=",),
)  # fmt: skip
SEED_OSS = Tags(
    "Seed-OSS", "<seed:tool_call>", "</seed:tool_call>", "<function=", ">", "</function>", "<parameter=", ">",
    "</parameter>", value_lead="",
)  # fmt: skip
GLM_4_5 = Tags(
    "GLM 4.5", "<tool_call>", "</tool_call>", "", "", "", "<arg_key>", "</arg_key>", "</arg_value>",
    value_lead="", value_open="<arg_value>",
)  # fmt: skip
DEEPSEEK_V3_2 = Tags(
    "DeepSeek V3.2", "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", '<｜DSML｜invoke name="', '">',
    "</｜DSML｜invoke>", '<｜DSML｜parameter name="', '"', "</｜DSML｜parameter>", value_lead="", attribute=True,
    one_section=True,
)  # fmt: skip
DEEPSEEK_V4 = Tags(
    "DeepSeek V4", "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", '<｜DSML｜invoke name="', '">',
    "</｜DSML｜invoke>", '<｜DSML｜parameter name="', '"', "</｜DSML｜parameter>", value_lead="", attribute=True,
    one_section=True,
)  # fmt: skip
MINIMAX = Tags(
    "MiniMax M2", "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', '">', "</invoke>",
    '<parameter name="', '">', "</parameter>", value_lead="", one_section=True,
)  # fmt: skip


class XmlCalls(Family):
    """Calls whose arguments are tagged one by one."""

    def __init__(self, tags: Tags) -> None:
        self.name = tags.name
        self.openings = (tags.open, *tags.also)
        self.markers = tuple(t for t in (tags.open, tags.close, tags.key_open, tags.value_open, tags.value_close) if t)
        self._tags = tags

    def tree(self, tools: Sequence[Tool], parallel: bool) -> Node:
        """Calls; text arguments are free up to their closing tag, others follow their schema."""
        t = self._tags
        call = any_of(self._call_tree(tool) for tool in tools)
        if t.one_section:
            return seq(Marker(t.open), SPACE, calls_of(call, parallel, SPACE), SPACE, Marker(t.close))
        return calls_of(seq(Marker(t.open), SPACE, call, SPACE, Marker(t.close)), parallel, SPACE)

    def _call_tree(self, tool: Tool) -> Node:
        t = self._tags
        properties = properties_of(tool.parameters)
        required = tool.parameters.get("required")
        names = required if isinstance(required, list) else []
        parts: list[Node | str] = [t.call_open + tool.name + t.name_end, SPACE]
        for key, schema in properties.items():
            part = self._argument_tree(key, schema, tool.parameters)
            parts += [part if key in names else Repeat(part, 0, 1)]
        return seq(*parts, t.call_close)

    def _argument_tree(self, key: str, schema: Any, root: Mapping[str, Any]) -> Node:
        t = self._tags
        text = _is_text(schema)
        head: list[Node | str] = (
            [Marker(t.key_open), key + t.key_end] if t.value_open else [t.key_open + key + t.key_end]
        )
        if t.attribute:
            head += [' string="true">' if text else ' string="false">']
        if t.value_open:
            head += [SPACE, Marker(t.value_open)]
        head += [t.value_lead]
        if text and isinstance(schema, Mapping) and _texts(schema.get("enum")):
            value: Node = seq(any_of(seq(e) for e in schema["enum"]), t.value_lead, Marker(t.value_close))
        elif text:
            value = Until(t.value_close)
        else:
            value = seq(
                Schema(with_definitions(schema, root), lenient=True), Regex(r"[ \n]{0,4}"), Marker(t.value_close)
            )
        return seq(*(h for h in head if h != ""), value, SPACE)

    def calls(self, out: CallSink, reader: Reader, opening: str) -> Wait:
        """Read calls up to the closing tag, which may be missing."""
        t = self._tags
        if opening != t.open:  # the call itself, without its wrapper
            yield from self._call(out, reader)
        else:
            yield from reader.spaces()
            if t.call_open:
                yield from reader.literal(t.call_open)
            yield from self._call(out, reader)
            while t.one_section and (yield from reader.optional(t.call_open)):
                yield from self._call(out, reader)
        yield from reader.optional(t.close)

    def _call(self, out: CallSink, reader: Reader) -> Wait:
        t = self._tags
        if t.name_end:
            name = (yield from reader.name(t.name_end[0] + "\n")).strip()
            yield from reader.literal(t.name_end)
        else:
            name = (yield from reader.name("<\n")).strip()
        out.begin_call(name)
        schema = properties_of(out.tools.get(name, {}))
        yield from reader.spaces()
        first = True
        while (yield from reader.optional(t.key_open)):
            key = (yield from reader.collect((t.key_end,))).strip()
            out.arguments(("{" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            first = False
            yield from self._value(out, reader, schema.get(key))
            yield from reader.spaces()
        if t.call_close:
            yield from reader.literal(t.call_close)
        elif (yield from reader.peek()) != t.close[0]:
            raise Malformed(t.close)
        out.arguments("{}" if first else "}")
        out.end_call()
        out.mark()
        yield from reader.spaces()

    def _value(self, out: CallSink, reader: Reader, schema: Any) -> Wait:
        t = self._tags
        text: bool | None = None if schema is None else _is_text(schema)
        if t.attribute:
            text = "true" in (yield from reader.collect((">",)))
        if t.value_open:
            yield from reader.spaces()
            yield from reader.literal(t.value_open)
        yield from reader.optional("\n")
        ends = ("\n" + t.value_close, t.value_close)
        if text:
            out.arguments('"')
            sink = lambda piece: out.arguments(json.dumps(piece, ensure_ascii=False)[1:-1])  # noqa: E731
            if (yield from reader.until(ends, sink)) is None:
                raise Malformed(t.value_close)
            out.arguments('"')
            return
        raw = yield from reader.collect(ends)
        out.arguments(_json_or_text(raw))


def _json_or_text(raw: str) -> str:
    try:
        return json.dumps(json.loads(raw), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return _python_literal(raw.strip()) or json.dumps(raw, ensure_ascii=False)


def _python_literal(text: str) -> str:
    """A list, dictionary, True, False or None as Python prints it (some templates do), as JSON; else nothing."""
    if not text.startswith(("[", "{", "True", "False", "None")) or len(text) > _MOST_LITERAL:
        return ""
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return ""


def properties_of(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schemas of a function's parameters by name."""
    found = parameters.get("properties")
    return found if isinstance(found, Mapping) else {}


def _is_text(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    kind = schema.get("type")
    if isinstance(kind, list):
        return "string" in kind and all(one in ("string", "null") for one in kind)
    return kind == "string" or (kind is None and _texts(schema.get("enum")))


def _texts(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(v, str) for v in values)


def with_definitions(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any] | bool:
    """A parameter's schema with the definitions of the whole, to which it may refer."""
    if not isinstance(schema, Mapping):
        return schema if isinstance(schema, bool) else {}
    return {**schema, **{k: root[k] for k in ("$defs", "definitions") if k in root and k not in schema}}
