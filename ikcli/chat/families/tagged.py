"""Calls with the name between markers and the arguments as one JSON object.

DeepSeek R1/V3/V3.1, Kimi K2, PLaMo 3, newer Mistral (`[TOOL_CALLS]name[ARGS]{...}`), `<function=name>{...}</function>`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ikcli.chat.families.base import (
    CALL_ID,
    SPACE,
    CallSink,
    Chars,
    Family,
    Marker,
    Node,
    Repeat,
    TextSink,
    Until,
    any_of,
    arguments_schema,
    calls_of,
    seq,
)
from ikcli.chat.families.json_calls import read_arguments, read_list, read_object
from ikcli.chat.messages import Tool
from ikcli.chat.reader import Malformed, Reader, Wait
from ikcli.chat.unescaped import text_until


class DeepSeek(Family):
    """`begin call-begin function sep name` and a JSON block (R1, V3), or `call-begin name sep {...}` (V3.1)."""

    BEGIN = "<｜tool▁calls▁begin｜>"
    END = "<｜tool▁calls▁end｜>"
    CALL = "<｜tool▁call▁begin｜>"
    CALL_END = "<｜tool▁call▁end｜>"
    SEP = "<｜tool▁sep｜>"
    openings = (BEGIN, CALL, "<｜tool_calls_begin｜>", "<｜tool calls begin｜>", "<｜tool\\_calls\\_begin｜>")
    markers = (BEGIN, END, CALL, CALL_END, SEP)

    def __init__(self, *, fenced: bool) -> None:
        """Read arguments from a JSON code block if `fenced`."""
        self.name = "DeepSeek R1" if fenced else "DeepSeek V3.1"
        self._fenced = fenced

    def tree(self, tools: Sequence[Tool], parallel: bool) -> Node:
        """Return the tree of calls whose arguments each tool's schema accepts."""
        options = []
        for tool in tools:
            arguments = arguments_schema(tool)
            if self._fenced:
                options.append(seq("function", Marker(self.SEP), tool.name + "\n```json\n", arguments, "\n```"))
            else:
                options.append(seq(tool.name, Marker(self.SEP), arguments))
        call = seq(Marker(self.CALL), any_of(options), Marker(self.CALL_END))
        return seq(Marker(self.BEGIN), calls_of(call, parallel, SPACE), SPACE, Marker(self.END))

    def calls(self, out: CallSink, reader: Reader, opening: str) -> Wait:
        """Read calls up to the end marker, which may be missing."""
        yield from reader.spaces()
        if opening != self.CALL:
            yield from reader.literal(self.CALL)
        while True:
            yield from self._call(out, reader)
            yield from reader.spaces()
            if (yield from reader.one_of((self.CALL, self.END))) != self.CALL:
                return

    def _call(self, out: CallSink, reader: Reader) -> Wait:
        name = (yield from reader.collect((self.SEP,))).strip()
        yield from reader.spaces()
        fenced = (yield from reader.peek()) != "{"
        if fenced:
            name = (yield from reader.name("\n")).strip()
            yield from reader.spaces()
            yield from reader.optional("```json")
            yield from reader.spaces()
        if not name:
            raise Malformed("name")
        out.begin_call(name)
        yield from read_arguments(out.arguments, reader)
        out.end_call()
        out.mark()
        yield from reader.spaces()
        if fenced:
            yield from reader.closing("```")
            yield from reader.spaces()
        yield from reader.closing(self.CALL_END)
        out.mark()


def _end_call(out: CallSink, reader: Reader, *closings: str) -> Wait:
    """End a call whose arguments were read, and read what closes it; the text may end before."""
    out.end_call()
    out.mark()
    yield from reader.spaces()
    for text in closings:
        yield from reader.closing(text)
        yield from reader.spaces()
    out.mark()


class KimiK2(Family):
    """`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>` in a section."""

    name = "Kimi K2"
    BEGIN = "<|tool_calls_section_begin|>"
    END = "<|tool_calls_section_end|>"
    CALL = "<|tool_call_begin|>"
    ARGUMENTS = "<|tool_call_argument_begin|>"
    CALL_END = "<|tool_call_end|>"
    openings = (BEGIN, CALL)
    markers = (BEGIN, END, CALL, ARGUMENTS, CALL_END)

    def tree(self, tools: Sequence[Tool], parallel: bool) -> Node:
        """Return the tree of calls whose arguments each tool's schema accepts."""
        options = (
            seq(f"functions.{t.name}:", Chars(("09",), 1, 4), Marker(self.ARGUMENTS), arguments_schema(t))
            for t in tools
        )
        call = seq(Marker(self.CALL), any_of(options), Marker(self.CALL_END))
        return seq(Repeat(Marker(self.BEGIN), 0, 1), calls_of(call, parallel), Repeat(Marker(self.END), 0, 1))

    def triggers(self, tools: Sequence[Tool]) -> tuple[str, ...]:
        """Return the opening of the section and, for calls without a section, that of a call."""
        return self.openings

    def calls(self, out: CallSink, reader: Reader, opening: str) -> Wait:
        """Read calls up to the end marker, which may be missing."""
        yield from reader.spaces()
        if opening == self.BEGIN:
            yield from reader.literal(self.CALL)
        while True:
            id = (yield from reader.collect((self.ARGUMENTS,))).strip()
            name = id.rpartition(":")[0] or id
            out.begin_call(name.removeprefix("functions."), id if ":" in id else "")
            yield from reader.spaces()
            yield from read_arguments(out.arguments, reader)
            yield from _end_call(out, reader, self.CALL_END)
            if (yield from reader.one_of((self.CALL, self.END))) != self.CALL:
                return


class Plamo3(Family):
    """`begin_tool_request begin_tool_name name end_tool_name begin_tool_arguments {...}` in a section, all as tags."""

    name = "PLaMo 3"
    BEGIN, END = "<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>"
    CALL = "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>"
    ARGUMENTS = "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>"
    CALL_END = "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
    openings = (BEGIN,)
    markers = ("<|plamo:begin_", "<|plamo:end_", ":plamo|>", "<|plamo:constrain|>", "<|plamo:msg|>")
    dropped = ("<|plamo:tag|>",)

    def tree(self, tools: Sequence[Tool], parallel: bool) -> Node:
        """Return the tree of calls whose arguments each tool's schema accepts."""
        options = (seq(tool.name + self.ARGUMENTS, arguments_schema(tool)) for tool in tools)
        call = seq(self.CALL, any_of(options), self.CALL_END)
        return seq(self.BEGIN, calls_of(call, parallel), self.END)

    def calls(self, out: CallSink, reader: Reader, opening: str) -> Wait:
        """Read calls up to the end of the section, which may be missing."""
        yield from reader.spaces()
        yield from reader.literal(self.CALL)
        while True:
            out.begin_call((yield from reader.collect((self.ARGUMENTS,))).strip())
            yield from reader.spaces()
            yield from read_arguments(out.arguments, reader)
            yield from _end_call(out, reader, self.CALL_END)
            if (yield from reader.one_of((self.CALL, self.END))) != self.CALL:
                return


class Hunyuan(Family):
    """`<tool_call>name`, a JSON block and `</tool_call>`, in `<tool_calls>`; a list of objects is read too."""

    name = "Hunyuan"
    BEGIN, END, CALL, CALL_END = "<tool_calls>", "</tool_calls>", "<tool_call>", "</tool_call>"
    openings = (BEGIN,)
    markers = (BEGIN, END, CALL, CALL_END)

    def tree(self, tools: Sequence[Tool], parallel: bool) -> Node:
        """Return the tree of calls whose arguments each tool's schema accepts."""
        options = (seq(tool.name + "\n```json\n", arguments_schema(tool), "\n```") for tool in tools)
        call = seq(Marker(self.CALL), any_of(options), Marker(self.CALL_END))
        return seq(Marker(self.BEGIN), SPACE, calls_of(call, parallel, SPACE), SPACE, Marker(self.END))

    def calls(self, out: CallSink, reader: Reader, opening: str) -> Wait:
        """Read calls up to the end of the section, which may be missing."""
        yield from reader.spaces()
        if (yield from reader.peek()) == "[":
            yield from read_list(out, reader)
            yield from reader.spaces()
            yield from reader.closing(self.END)
            return
        yield from reader.literal(self.CALL)
        while True:
            out.begin_call((yield from reader.name("\n")).strip())
            yield from reader.spaces()
            fenced = yield from reader.optional("```json")
            yield from reader.spaces()
            yield from read_arguments(out.arguments, reader)
            yield from _end_call(out, reader, *("```",) * fenced, self.CALL_END)
            if (yield from reader.one_of((self.CALL, self.END))) != self.CALL:
                return


class MistralArgs(Family):
    """`[TOOL_CALLS]name[ARGS]{...}` with an optional `[CALL_ID]id` after the name; a list of objects is read too."""

    name = "Mistral"
    openings = ("[TOOL_CALLS]",)
    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]")

    def __init__(self, *, call_id: bool) -> None:
        """Expect `[CALL_ID]` after a name if `call_id`."""
        self._call_id = call_id

    def tree(self, tools: Sequence[Tool], parallel: bool) -> Node:
        """Return the tree of calls whose arguments each tool's schema accepts."""
        id: tuple[Node, ...] = (Repeat(seq(Marker("[CALL_ID]"), CALL_ID), 0, 1),) * self._call_id
        call = any_of(seq(t.name, *id, Marker("[ARGS]"), arguments_schema(t)) for t in tools)
        return calls_of(seq(Marker("[TOOL_CALLS]"), call), parallel)

    def calls(self, out: CallSink, reader: Reader, opening: str) -> Wait:
        """Read one call; the next has its own opening."""
        yield from reader.spaces()
        first = yield from reader.peek()
        if first == "[":
            yield from read_list(out, reader)
            return
        if first == "{":
            yield from read_object(out, reader)
            return
        name = (yield from reader.name("[{")).strip()
        id = ""
        if (yield from reader.optional("[CALL_ID]")):
            id = (yield from reader.name("[{")).strip()
        yield from reader.optional("[ARGS]")
        yield from reader.spaces()
        out.begin_call(name, id)
        yield from read_arguments(out.arguments, reader)
        out.end_call()


class FunctionTag(Family):
    """`<function=name>{...}</function>` (Functionary 3.1 and Llama 3.x fine-tunes)."""

    name = "Functionary v3.1"
    openings = ("<function=",)
    markers = ("<|python_tag|>",)

    def tree(self, tools: Sequence[Tool], parallel: bool) -> Node:
        """Return the tree of calls whose arguments each tool's schema accepts."""
        call = any_of(seq(f"<function={t.name}>", arguments_schema(t), "</function>") for t in tools)
        return calls_of(call, parallel, SPACE)

    def calls(self, out: CallSink, reader: Reader, opening: str) -> Wait:
        """Read one call; the next has its own opening."""
        out.begin_call((yield from reader.name(">\n")).strip())
        yield from reader.literal(">")
        yield from reader.spaces()
        yield from read_arguments(out.arguments, reader)
        out.end_call()
        out.mark()
        yield from reader.spaces()
        yield from reader.closing("</function>")


class Recipients(Family):
    """Functionary 3.2: the prompt ends with `>>>`; the answer is `all` or a function's name, a line break, the text."""

    name = "Functionary v3.2"
    openings = (">>>",)
    own_message = True

    def tree(self, tools: Sequence[Tool], parallel: bool) -> Node:
        """Return the tree of calls; the first has no opening of its own."""
        call = any_of(seq(t.name + "\n", arguments_schema(t)) for t in tools)
        return seq(call, Repeat(seq(">>>", call))) if parallel else call

    def triggers(self, tools: Sequence[Tool]) -> tuple[str, ...]:
        """Return no texts: calls after the first are not constrained."""
        return ()

    def start_triggers(self, tools: Sequence[Tool]) -> tuple[str, ...]:
        """Return the names of the functions."""
        return tuple(f"{tool.name}\n" for tool in tools)

    def message(self, out: TextSink, reader: Reader) -> Wait:
        """Read content after `all` and calls after names; other text is content."""
        known = tuple(f"{name}\n" for name in ("all", *out.tools))
        following = Until(">>>", tuple((name,) for name in known))  # elsewhere it is text
        recipient, before = (yield from reader.one_of(known)), ""
        while True:
            if recipient is None:
                out.content(before)
                yield from reader.until((), out.content)
                return
            if recipient == "all\n":
                more = yield from text_until(reader, following, out.content, strip=True)
            else:
                yield from out.section(recipient, before)
                more = yield from text_until(reader, following, out.content, strip=True)
            if not more:
                return
            before = reader.stripped + more
            recipient = yield from reader.one_of(known)

    def calls(self, out: CallSink, reader: Reader, opening: str) -> Wait:
        """Read the arguments after the name and line break in `opening`."""
        yield from reader.spaces()
        out.begin_call(opening[:-1])
        yield from read_arguments(out.arguments, reader)
        out.end_call()
        out.mark()
        yield from reader.spaces()
