"""Calls written as JSON objects with a name and arguments, alone or in a list, between markers.

Hermes and Qwen (`<tool_call>{...}</tool_call>`), Mistral Nemo (`[TOOL_CALLS][{...}]`), Granite, Phi-4, Nemotron,
Apriel, MiniMax M1, Command-R, Llama 3 (no marker at all) and relatives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from ikcli.chat.families.base import (
    BLANK,
    CALL_ID,
    SPACE,
    CallSink,
    Chars,
    Family,
    Marker,
    Node,
    Repeat,
    any_of,
    arguments_schema,
    calls_of,
    finish_text,
    quoted,
    seq,
)
from ikcli.chat.messages import Tool
from ikcli.chat.reader import Malformed, Reader, Sink, Wait

_NAMES = ("name", "tool_name", "function_name")
_ARGUMENTS = ("arguments", "parameters", "args", "input")
_IDS = ("id", "tool_call_id", "call_id")


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of a call's object as the model was taught them; `id` empty: it writes none."""

    name: str = "name"
    arguments: str = "arguments"
    id: str = ""
    id_text: Node = CALL_ID
    id_first: bool = False


class JsonCalls(Family):
    """JSON calls after `open`, a list of them if `array`, or one per line if `lines`, then `close`."""

    def __init__(
        self,
        name: str,
        open: str,
        close: str = "",
        *,
        array: bool = False,
        lines: bool = False,
        keys: Keys | None = None,
        also: tuple[str, ...] = (),
    ) -> None:
        """Read calls after `open` and after the other openings in `also`."""
        self.name = name
        self.openings = (open, *also)
        self.markers = tuple(m for m in (open, close, *also) if m)
        self._open, self._close, self._array, self._lines = open, close, array, lines
        self._keys = keys or Keys()

    def tree(self, tools: Sequence[Tool], parallel: bool) -> Node:
        """Return the tree of calls whose arguments each tool's schema accepts."""
        call = any_of(object_tree(tool, self._keys) for tool in tools)
        close: tuple[Node | str, ...] = (SPACE, Marker(self._close)) if self._close else ()
        if self._array:
            calls = calls_of(call, parallel, seq(",", SPACE))
            return seq(Marker(self._open), SPACE, "[", SPACE, calls, SPACE, "]", *close)
        if self._lines:
            return seq(Marker(self._open), SPACE, calls_of(call, parallel, seq("\n")), *close)
        one = seq(Marker(self._open), SPACE, call, *close)
        return calls_of(one, parallel, SPACE)

    def calls(self, out: CallSink, reader: Reader, opening: str) -> Wait:
        """Read the value and the closing marker, which may be missing."""
        yield from reader.spaces()
        if (yield from reader.peek()) == "[":
            yield from read_list(out, reader)
        else:
            yield from read_object(out, reader)
            out.mark()
        reader.keep = reader.pos
        yield from reader.spaces()
        while self._lines and (yield from reader.peek()) == "{":
            yield from read_object(out, reader)
            out.mark()
            reader.keep = reader.pos
            yield from reader.spaces()
        if self._close and not (yield from reader.closing(self._close)) and reader.pos < len(reader.text):
            reader.pos = reader.keep


class NameKeyCalls(Family):
    """A list of objects whose only key is the function's name: `[{"f": {...}}]` (Apertus)."""

    def __init__(self, name: str, open: str, close: str) -> None:
        self.name = name
        self.openings = (open,)
        self.markers = (open, close)
        self._open, self._close = open, close

    def tree(self, tools: Sequence[Tool], parallel: bool) -> Node:
        """Return the tree of calls whose arguments each tool's schema accepts."""
        call = any_of(seq("{" + quoted(t.name) + ":", BLANK, arguments_schema(t), "}") for t in tools)
        calls = calls_of(call, parallel, seq(",", BLANK))
        return seq(Marker(self._open), "[", calls, "]", Marker(self._close))

    def calls(self, out: CallSink, reader: Reader, opening: str) -> Wait:
        """Read the list and the closing marker, which may be missing."""
        yield from reader.spaces()
        yield from reader.literal("[")
        mark: str | None = ","
        while mark == ",":
            yield from reader.spaces()
            yield from reader.literal("{")
            out.begin_call((yield from reader.key()))
            yield from read_arguments(out.arguments, reader)
            yield from reader.spaces()
            yield from reader.literal("}")
            out.end_call()
            out.mark()
            yield from reader.spaces()
            mark = yield from reader.one_of((",", "]"))
        out.mark()
        yield from reader.spaces()
        yield from reader.closing(self._close)


class Llama3(Family):
    """Llama 3.x: the answer is `{"name": ..., "parameters": {...}}`; 3.1 has built-in tools after `<|python_tag|>`."""

    name = "Llama 3.x"
    start_openings = ("{",)

    def __init__(self, *, builtin_tools: bool) -> None:
        """Read `<|python_tag|>` too if the template has `builtin_tools`."""
        if builtin_tools:
            self.openings = self.markers = ("<|python_tag|>",)
            self.stops = ("<|eom_id|>",)
        # spellings up to the first key, so that an answer in JSON that is not a call stays free
        self.lazy_start = ('{"name":', '{"type":"function"', '{"type": "function"', '{"function":', '{ "name":')

    def tree(self, tools: Sequence[Tool], parallel: bool) -> Node:
        """Return the tree of one call; the model never writes a second one."""
        kind = Repeat(seq('"type":', BLANK, '"function",', BLANK), 0, 1)
        options = []
        for tool in tools:
            name = seq(any_of((seq('"name":'), seq('"function":'))), BLANK, quoted(tool.name) + ",", BLANK)
            parameters = seq('"parameters":', BLANK, arguments_schema(tool), Chars((" ", "\n"), 0, 1))
            options.append(seq("{", BLANK, kind, name, parameters, "}"))
        call = any_of(options)
        return any_of((call, seq(Marker("<|python_tag|>"), call))) if self.openings else call

    def calls(self, out: CallSink, reader: Reader, opening: str) -> Wait:
        """Read an object whose name is a known tool, or what follows `<|python_tag|>`."""
        if opening == "<|python_tag|>":
            yield from reader.spaces()
            if (yield from reader.peek()) != "{":
                yield from _python_tag(out, reader)
                return
            yield from read_object(out, reader)
        else:
            reader.pos -= 1
            yield from read_object(out, reader, known_only=True)
        out.mark()
        while (yield from reader.one_of((";", ","))) or (yield from reader.spaces()):
            if (yield from reader.peek()) == "{":
                yield from read_object(out, reader, known_only=True)
                out.mark()


_BUILTIN_CALL = re.compile(r"(\w+)\.call\((?:(\w+)=)(.*)\)\s*", re.DOTALL)
_CODE_TOOLS = ("python", "code_interpreter", "ipython")


def _python_tag(out: CallSink, reader: Reader) -> Wait:
    text = yield from finish_text(reader)
    match = _BUILTIN_CALL.fullmatch(text)
    code_tool = next((name for name in _CODE_TOOLS if name in out.tools), "")
    if match:
        try:
            value = json.loads(match[3])
        except ValueError:
            raise Malformed("built-in call") from None
        out.begin_call(match[1])
        out.arguments(json.dumps({match[2]: value}, ensure_ascii=False))
    elif code_tool:
        out.begin_call(code_tool)
        out.arguments(json.dumps({"code": text}, ensure_ascii=False))
    else:
        raise Malformed("code")
    out.end_call()


def object_tree(tool: Tool, keys: Keys) -> Node:
    """Return the tree of one call's object."""
    name = seq(f'"{keys.name}":', BLANK, quoted(tool.name))
    arguments = seq(f'"{keys.arguments}":', BLANK, arguments_schema(tool))
    parts: list[Node] = [name, arguments]
    if keys.id:
        id = seq(f'"{keys.id}":', BLANK, '"', keys.id_text, '"')
        parts.insert(0 if keys.id_first else 2, id)
    inner: list[Node | str] = ["{", SPACE]
    for i, part in enumerate(parts):
        inner += [",", SPACE, part] if i else [part]
    return seq(*inner, SPACE, "}")


def read_list(out: CallSink, reader: Reader) -> Wait:
    """Read `[{...}, {...}]`."""
    yield from reader.literal("[")
    mark: str | None = ","
    while mark == ",":
        yield from reader.spaces()
        yield from read_object(out, reader)
        out.mark()
        yield from reader.spaces()
        mark = yield from reader.one_of((",", "]"))
    out.mark()


def read_object(out: CallSink, reader: Reader, *, known_only: bool = False) -> Wait:
    """Read one call's object, keys in any order; stream the arguments if the name came first."""
    yield from reader.literal("{")
    name, id, early = "", "", ""
    begun = False
    while True:
        key = yield from reader.key()
        if not name and (key in _NAMES or (key == "function" and (yield from reader.peek()) == '"')):
            name = yield from reader.string()
            if not name or (known_only and name not in out.tools):
                raise Malformed("name")
        elif not begun and not early and key in _ARGUMENTS:
            if name:
                out.begin_call(name, id)
                begun = True
                yield from read_arguments(out.arguments, reader)
            else:
                held: list[str] = []
                yield from read_arguments(held.append, reader)
                early = "".join(held)
        elif key in _IDS and (yield from reader.peek()) == '"':
            id = yield from reader.string()
        elif known_only and key != "type":
            raise Malformed("key")
        elif key == "function" and not name and (yield from reader.peek()) == "{":
            name, early = yield from _nested(reader)
        else:
            yield from reader.json_value(lambda text: None)
        yield from reader.spaces()
        mark = yield from reader.one_of((",", "}"))
        if mark is None:
            raise Malformed("object")
        if mark == "}":
            break
    if not name:
        raise Malformed("name")
    if not begun:
        out.begin_call(name, id)
        out.arguments(early or "{}")
    out.end_call()


def _nested(reader: Reader) -> Generator[None, None, tuple[str, str]]:
    """Read name and arguments of `{"name": ..., "arguments": ...}` nested in OpenAI's own form."""
    parts: list[str] = []
    yield from reader.json_value(parts.append)
    value = json.loads("".join(parts))
    arguments = value.get("arguments", {})
    if not isinstance(value.get("name"), str):
        raise Malformed("name")
    return value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def read_arguments(sink: Sink, reader: Reader) -> Wait:
    """Pass on an object of arguments; a string is taken for the JSON text of one, null for no arguments."""
    char = yield from reader.peek()
    if char == "{":
        yield from reader.json_value(sink)
        return
    if char == '"':
        text = yield from reader.string()
        try:
            known = isinstance(json.loads(text or "{}"), dict)
        except (ValueError, RecursionError):
            known = False
        if not known:
            raise Malformed("arguments")
        sink(text or "{}")
        return
    yield from reader.literal("null")
    sink("{}")
