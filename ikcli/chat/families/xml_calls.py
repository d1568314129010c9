"""Calls with every argument between its own tags: Qwen3-Coder, Seed-OSS, GLM 4.5, DeepSeek V3.2, MiniMax, Kimi K3.

A text argument stands as it is (no quoting); others are JSON. The parameter's schema tells which: the reader writes the
arguments object piece by piece. Nothing is escaped in a text, so the closing tag may be part of it: it ends the text
only where a parameter that is still to come follows, or the end of the call.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from ikcli.chat.families.schemas import Values, both, parameters_of, values_of, with_definitions
from ikcli.chat.messages import Tool
from ikcli.chat.reader import Malformed, Reader, Wait
from ikcli.chat.unescaped import text_until, value_until
from ikcli.grammar.spec import Gap, Pattern

_MOST_LITERAL = 100_000
_NOTHING = object()


@dataclass(frozen=True, slots=True)
class Tags:
    """The texts around a call, its name, each key and value; `value_lead` is the line break around a value.

    `lines`: line breaks around a value may be there although the template writes none.
    `attribute`: after the key follows one of these, the first for text and the others for JSON, and `attribute_end`.
    `tokens`: control tokens inside of these texts.
    `name_tail`: after `name_end` follow the number of the call and this text (Kimi K3).
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
    value_lead: str = "\n"
    lines: bool = False
    value_open: str = ""
    attribute: tuple[str, ...] = ()
    attribute_end: str = ">"
    name_tail: str = ""
    tokens: tuple[str, ...] = ()
    one_section: bool = False
    also: tuple[str, ...] = ()


QWEN3_CODER = Tags(
    "Qwen3 Coder", "<tool_call>", "</tool_call>", "<function=", ">", "</function>", "<parameter=", ">", "</parameter>",
    also=("<function=",),
)  # fmt: skip
SEED_OSS = Tags(
    "Seed-OSS", "<seed:tool_call>", "</seed:tool_call>", "<function=", ">", "</function>", "<parameter=", ">",
    "</parameter>", value_lead="", lines=True,
)  # fmt: skip
GLM_4_5 = Tags(
    "GLM 4.5", "<tool_call>", "</tool_call>", "", "", "", "<arg_key>", "</arg_key>", "</arg_value>",
    value_lead="", value_open="<arg_value>",
)  # fmt: skip
_DSML = ('string="true"', 'string="false"')
DEEPSEEK_V3_2 = Tags(
    "DeepSeek V3.2", "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", '<｜DSML｜invoke name="', '">',
    "</｜DSML｜invoke>", '<｜DSML｜parameter name="', '"', "</｜DSML｜parameter>", value_lead="", attribute=_DSML,
    one_section=True,
)  # fmt: skip
DEEPSEEK_V4 = Tags(
    "DeepSeek V4", "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", '<｜DSML｜invoke name="', '">',
    "</｜DSML｜invoke>", '<｜DSML｜parameter name="', '"', "</｜DSML｜parameter>", value_lead="", attribute=_DSML,
    one_section=True,
)  # fmt: skip
MINIMAX = Tags(
    "MiniMax M2", "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', '">', "</invoke>",
    '<parameter name="', '">', "</parameter>", value_lead="", one_section=True,
)  # fmt: skip
DOTS = replace(MINIMAX, name="dots", open="<dots_function_call>", close="</dots_function_call>")
STEP_3 = Tags(
    "Step 3", "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>",
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="', '">', "</steptml:invoke><｜tool_call_end｜>",
    '<steptml:parameter name="', '">', "</steptml:parameter>", value_lead="", one_section=True,
    tokens=(*(f"<｜tool_call{s}_{end}｜>" for s in ("", "s") for end in ("begin", "end")), "<｜tool_sep｜>"),
)  # fmt: skip
MINICPM_5 = Tags(
    "MiniCPM 5", '<function name="', "</function>", "", '">', "", '<param name="', '">', "</param>", value_lead="",
)  # fmt: skip
KIMI_K3 = Tags(
    "Kimi K3", "<|open|>tools<|sep|>", "<|close|>tools<|sep|>", '<|open|>call tool="', '" index="',
    "<|close|>call<|sep|>", '<|open|>argument key="', '"', "<|close|>argument<|sep|>", value_lead="",
    attribute=tuple(f'type="{name}"' for name in ("string", "number", "boolean", "null", "object", "array")),
    attribute_end="<|sep|>", name_tail='"<|sep|>', one_section=True, tokens=("<|open|>", "<|close|>", "<|sep|>"),
)  # fmt: skip


def hunyuan_3(suffix: str) -> Tags:
    """Return the tags of Hunyuan 3, whose names end in `suffix`."""
    call, key, value = (f"{name}{suffix}>" for name in ("tool_call", "arg_key", "arg_value"))
    return Tags(
        "Hunyuan 3", f"<tool_calls{suffix}>", f"</tool_calls{suffix}>", f"<{call}", f"<tool_sep{suffix}>", f"</{call}",
        f"<{key}", f"</{key}", f"</{value}", value_lead="", value_open=f"<{value}", one_section=True,
        tokens=(*(f"<{slash}tool_call{s}{suffix}>" for slash in ("", "/") for s in ("", "s")), f"<tool_sep{suffix}>"),
    )  # fmt: skip


def hunyuan_4(suffix: str) -> Tags:
    """Return the tags of Hunyuan 4: those of Hunyuan 3 without one behind the name."""
    tags = hunyuan_3(suffix)
    return replace(tags, name="Hunyuan 4", name_end="", tokens=tags.tokens[:-1])


class XmlCalls(Family):
    """Calls whose arguments are tagged one by one."""

    def __init__(self, tags: Tags) -> None:
        self.name = tags.name
        self.openings = (tags.open, *tags.also)
        texts = (tags.open, tags.close, tags.key_open, tags.value_open, tags.value_close, *tags.tokens)
        self.markers = tuple(t for t in texts if t)
        self._tags = tags
        self._token = re.compile(f"({'|'.join(map(re.escape, tags.tokens))})") if tags.tokens else None

    # what the grammar allows

    def tree(self, tools: Sequence[Tool], parallel: bool) -> Node:
        """Return the tree of calls; text arguments run up to their closing tag, others follow their schema."""
        t = self._tags
        names = [tool.name for tool in tools]
        arguments = [self._arguments_tree(tool) for tool in tools]
        tail: tuple[Node | str, ...] = (Chars(("09",), 1, 3), *self._parts(t.name_tail)) if t.name_tail else ()
        calls = [
            (self._parts(t.call_open + name + t.name_end), seq(*tail, rest))
            for name, rest in zip(names, arguments, strict=True)
        ]
        first = any_of(seq(*head, rest) for head, rest in calls)
        call_end: tuple[Node | str, ...] = (SPACE, *self._parts(t.call_close)) if t.call_close else ()
        opening, ending = self._parts(t.open, marker=True), whole(*call_end, SPACE, *self._parts(t.close, marker=True))
        if not t.one_section:
            return calls_of(seq(*opening, SPACE, first, ending), parallel, SPACE)
        more = any_of(seq(whole(*call_end, SPACE, *head), rest) for head, rest in calls)
        return seq(*opening, SPACE, first, *((Repeat(more),) if parallel else ()), ending)

    def _parts(self, text: str, *, marker: bool = False) -> tuple[Marker | str, ...]:
        """Return a text with its control tokens as markers; `marker`: without any, it may be one itself."""
        if self._token is None:
            return (Marker(text) if marker else text,)
        return tuple(Marker(part) if i % 2 else part for i, part in enumerate(self._token.split(text)) if part)

    def _arguments_tree(self, tool: Tool) -> Node:
        found = parameters_of(tool.parameters)
        parts = []
        to_come = list(found.properties)
        for key, schema in found.properties.items():
            ends = self._text([name for name in to_come if name != key])
            part = self._argument_tree(key, schema, tool.parameters, ends)
            if key in found.required:  # others may have been left out, and could still come
                to_come.remove(key)
            parts.append(part if key in found.required else Repeat(part, 0, 1))
        return seq(*parts)

    def _argument_tree(self, key: str, schema: Any, root: Mapping[str, Any], text: Until) -> Node:
        t = self._tags
        values = values_of(schema, root)
        head: tuple[Node | str, ...] = (whole(SPACE, *self._key(key)),)
        opening: tuple[Node | str, ...] = (SPACE, Marker(t.value_open)) if t.value_open else ()
        lead = (t.value_lead,) if t.value_lead else ()
        close = (Chars((" ", "\n"), 0, 4), *self._parts(t.value_close, marker=True))
        json_value = seq(Schema(with_definitions(schema, root), lenient=True), *close)
        if t.attribute:
            texts = both(values, Values(frozenset({"string"})))
            marks = [f" {mark}{t.attribute_end}" for mark in t.attribute]
            options = [seq(*self._parts(marks[0]), self._text_tree(texts, text))] * values.text
            if values.types != {"string"}:
                options.append(seq(any_of(seq(*self._parts(mark)) for mark in marks[1:]), json_value))
            return seq(*head, any_of(options))
        value = self._text_tree(values, text) if values.text else json_value
        return seq(*head, *opening, *lead, value)

    def _text_tree(self, values: Values, text: Until) -> Node:
        """Return the tree of a text, of one of the listed texts, or of null as text."""
        t = self._tags
        close = self._parts(t.value_close, marker=True)
        if values.listed is None:
            if self._token is None:
                return text
            first = close[0]  # texts hold no control tokens, so that the first closing tag ends them
            return seq(Until(first if isinstance(first, str) else first.text), *close[1:])
        shown = (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values.listed)
        lead = (t.value_lead,) if t.value_lead else ()
        return seq(any_of(seq(one) for one in dict.fromkeys(shown)), *lead, *close)

    def _key(self, key: str) -> tuple[Marker | str, ...]:
        """Return the tags around a parameter's name."""
        t = self._tags
        if not t.value_open:
            return self._parts(t.key_open + key + t.key_end)
        return Marker(t.key_open), key, Marker(t.key_end)

    def _text(self, to_come: Sequence[str] | None, *, wrapped: bool = True) -> Until:
        """Return what ends a text argument when these parameters (None: any) may still follow."""
        t = self._tags
        keys: list[Pattern] = [(Gap.SPACES, t.key_open, Gap.NAME, t.key_end)]
        if to_come is not None:
            keys = [(Gap.SPACES, t.key_open + name + t.key_end) for name in to_come]
        end: Pattern = (Gap.SPACES, t.call_close) if t.call_close else ()
        ends: list[Pattern] = [(*end, Gap.SPACES, t.close), (*end, Gap.SPACES, t.close, Gap.SPACES, Gap.END)]
        if t.call_close:
            ends.append((*end, Gap.SPACES, Gap.END))
        if t.one_section or not wrapped:
            ends.append((*end, Gap.SPACES, t.call_open, Gap.NAME, t.name_end))
        opening = (t.call_open, Gap.NAME, t.name_end) if t.call_open else (t.open, Gap.SPACES, Gap.NAME)
        nested = ((*opening, Gap.SPACES, t.key_open), (t.value_close, Gap.SPACES, t.call_close or t.close))
        return Until(t.value_close, (*keys, *ends), nested)

    # reading

    def calls(self, out: CallSink, reader: Reader, opening: str) -> Wait:
        """Read calls up to the closing tag, which may be missing."""
        t = self._tags
        if opening != t.open:  # the call itself, without its wrapper
            yield from self._call(out, reader, wrapped=False)
        else:
            yield from reader.spaces()
            if t.call_open:
                yield from reader.literal(t.call_open)
            yield from self._call(out, reader)
            while t.one_section and (yield from reader.optional(t.call_open)):
                yield from self._call(out, reader)
        if t.call_close:
            yield from reader.closing(t.close)

    def _call(self, out: CallSink, reader: Reader, *, wrapped: bool = True) -> Wait:
        t = self._tags
        if t.name_end:
            name = (yield from reader.name(t.name_end[0] + "\n")).strip()
            yield from reader.literal(t.name_end)
            if t.name_tail:
                yield from reader.collect((t.name_tail,))
        else:
            name = (yield from reader.name("<\n")).strip()
        out.begin_call(name)
        root = out.tools.get(name, {})
        properties = parameters_of(root).properties
        to_come = list(properties)
        yield from reader.spaces()
        first = True
        while (yield from reader.optional(t.key_open)):
            key = (yield from reader.collect((t.key_end,))).strip()
            out.arguments(("{" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            first = False
            known = key in properties
            to_come = [name for name in to_come if name != key]
            text = self._text(to_come if known else None, wrapped=wrapped)
            yield from self._value(out, reader, values_of(properties[key], root) if known else Values(), text)
            yield from reader.spaces()
        yield from reader.literal(t.call_close or t.close)
        out.arguments("{}" if first else "}")
        out.end_call()
        out.mark()
        yield from reader.spaces()

    def _value(self, out: CallSink, reader: Reader, values: Values, until: Until) -> Wait:
        t = self._tags
        if t.attribute:
            is_text = t.attribute[0] in (yield from reader.collect((t.attribute_end,)))
            values = Values(frozenset({"string"})) if is_text else Values()
        if t.value_open:
            yield from reader.spaces()
            yield from reader.literal(t.value_open)
        lines = bool(t.value_lead)
        if lines or t.lines:
            lines = (yield from reader.optional("\n")) or lines
        if values.types <= {"string", "null"} and values.text:
            yield from _read_text(out, reader, until, lines, nullable="null" in values.types)
            return
        raw = yield from _read_raw(reader, until, values)
        out.arguments(json_or_text(raw[: -1 if lines and raw.endswith("\n") else None], values))


def _read_text(out: CallSink, reader: Reader, until: Until, lines: bool, *, nullable: bool) -> Wait:
    """Pass on a text as a JSON string while it arrives."""
    null = nullable and (yield from reader.optional("null"))
    if null:
        rest: list[str] = []
        found = yield from text_until(reader, until, rest.append, trim=lines)
        text = json.dumps("null" + "".join(rest), ensure_ascii=False)
        out.arguments((text if found else text[:-1]) if rest or not found else "null")
    else:
        out.arguments('"')
        sink = lambda piece: out.arguments(json.dumps(piece, ensure_ascii=False)[1:-1])  # noqa: E731
        found = yield from text_until(reader, until, sink, trim=lines)
        out.arguments('"' if found else "")
    if not found:
        raise Malformed(until.end)


def _read_raw(reader: Reader, until: Until, values: Values) -> Generator[None, None, str]:
    """Read a value that may be JSON; a closing tag inside one of its strings does not end it."""
    if values.text and not values.untyped:
        parts: list[str] = []
        if not (yield from text_until(reader, until, parts.append)):
            raise Malformed(until.end)
        return "".join(parts)
    raw = yield from value_until(reader, replace(until, nested=None), _is_value)
    if raw is None:
        raise Malformed(until.end)
    return raw


def _is_value(raw: str) -> bool:
    """Return False if `raw` begins like a JSON list, object or string but does not end like one."""
    return not raw.lstrip().startswith(("{", "[", '"')) or _parsed(raw) is not _NOTHING


def json_or_text(raw: str, values: Values) -> str:
    """Return `raw` as JSON if it has one of the types beside text, otherwise as a JSON string."""
    value = _parsed(raw)
    if value is _NOTHING or (values.text and not values.untyped and not _is_other(value, values)):
        value = raw
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _is_other(value: Any, values: Values) -> bool:
    return not isinstance(value, str) and values.allows(value)


def _parsed(raw: str) -> Any:
    """Parse `raw` as JSON or as a Python literal (some templates print these); _NOTHING if it is neither."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        text = raw.strip()
        if not text.startswith(("[", "{", "True", "False", "None")) or len(text) > _MOST_LITERAL:
            return _NOTHING
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return _NOTHING
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return _NOTHING
    return value
