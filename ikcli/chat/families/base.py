"""Define what every template family implements: the text that opens tool calls, how to read and constrain them."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ikcli.chat.messages import Tool
from ikcli.chat.reader import Reader, Wait
from ikcli.grammar.spec import Chars, Choice, Literal, Marker, Node, Repeat, Schema, Until
from ikcli.grammar.spec import Sequence as Seq

SPACE = Chars((" ", "\t", "\r", "\n"), 0, 8)
"""White space a model may put between a marker and a value."""
BLANK = Chars((" ",), 0, 1)
CALL_ID = Chars(("az", "AZ", "09"), 9, 9)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The texts around a model's reasoning; `empty`: an empty pair of them means "no reasoning"."""

    open: str
    close: str
    empty: bool = False


class CallSink(Protocol):
    """Receives what a family reads; everything since the last `mark` may still turn out not to be a call."""

    tools: Mapping[str, Mapping[str, Any]]
    """Parameter schemas of the request's functions by name."""

    def begin_call(self, name: str, id: str = "") -> None:
        """Begin a call of `name`."""

    def arguments(self, text: str) -> None:
        """Append JSON text to the arguments of the call."""

    def end_call(self) -> None:
        """End the call."""

    def mark(self) -> None:
        """Commit what was read: nothing that follows can revoke it."""

    def content(self, text: str) -> None:
        """Append text to the answer."""


class TextSink(CallSink, Protocol):
    """Receives all parts of a message."""

    def thought(self, text: str) -> None:
        """Append text to the reasoning."""

    raw_reasoning: bool
    """True if reasoning stays in the content, with the texts around it."""

    def section(self, opening: str, before: str = "") -> Wait:
        """Read tool calls after `opening`, or take them as content, after `before`, if they are malformed."""


class Family:
    """A way of writing tool calls. `openings` begin calls anywhere, `start_openings` only where the answer begins."""

    name: str = ""
    openings: tuple[str, ...] = ()
    start_openings: tuple[str, ...] = ()
    lazy_start: tuple[str, ...] = ()
    """Texts at the start of the answer from which on the grammar holds, if not all `start_openings` mean a call."""
    markers: tuple[str, ...] = ()
    """Control tokens that have to stay in the text for reading it."""
    dropped: tuple[str, ...] = ()
    """Wrappers of the answer that are no part of it."""
    stops: tuple[str, ...] = ()
    own_message = False
    """True if `message` reads content and, unless `needs_tools`, reasoning too."""
    needs_tools = False
    """True if answers without tools are plain text."""

    def calls(self, out: CallSink, reader: Reader, opening: str) -> Wait:
        """Read calls; `opening` has been read. Malformed if the text is something else."""
        raise NotImplementedError

    def tree(self, tools: Sequence[Tool], parallel: bool) -> Node:
        """Return the tree of one or more calls, the opening included."""
        raise NotImplementedError

    def triggers(self, tools: Sequence[Tool]) -> tuple[str, ...]:
        """Return the texts that begin what `tree` accepts, anywhere in the answer."""
        return self.openings[:1]

    def start_triggers(self, tools: Sequence[Tool]) -> tuple[str, ...]:
        """Return the texts that begin what `tree` accepts at the start of the answer."""
        return self.lazy_start

    def message(self, out: TextSink, reader: Reader) -> Wait:
        """Read a whole message (families with `own_message`)."""
        raise NotImplementedError


def arguments_schema(tool: Tool) -> Schema:
    """Return the schema of a call's arguments, always an object."""
    parameters = dict(tool.parameters)
    if not {"type", "$ref", "anyOf", "oneOf", "allOf"} & parameters.keys():
        parameters["type"] = "object"
    return Schema(parameters, lenient=True, owner=tool.name)


def seq(*parts: Node | str) -> Node:
    """Return the parts as a sequence; texts become literals."""
    return Seq(tuple(Literal(p) if isinstance(p, str) else p for p in parts))


def whole(*parts: Node | str) -> Node:
    """Return the parts as a sequence that is read in one go (`Sequence.whole`)."""
    return Seq(tuple(Literal(p) if isinstance(p, str) else p for p in parts), whole=True)


def any_of(options: Iterable[Node]) -> Node:
    """Return a choice of the options."""
    found = tuple(options)
    return found[0] if len(found) == 1 else Choice(found)


def calls_of(call: Node, parallel: bool, between: Node | None = None) -> Node:
    """Return a tree of one call, or of several if calls may be parallel."""
    return Repeat(call, 1, None, between) if parallel else call


def quoted(text: str) -> str:
    """Return `text` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def finish_text(reader: Reader) -> Generator[None, None, str]:
    """Read all remaining text."""
    parts: list[str] = []
    yield from reader.until((), parts.append)
    return "".join(parts)


__all__ = [
    "BLANK",
    "CALL_ID",
    "SPACE",
    "CallSink",
    "Chars",
    "Choice",
    "Family",
    "Literal",
    "Marker",
    "Node",
    "Reasoning",
    "Repeat",
    "Schema",
    "TextSink",
    "Until",
    "any_of",
    "arguments_schema",
    "calls_of",
    "finish_text",
    "quoted",
    "seq",
    "whole",
]
