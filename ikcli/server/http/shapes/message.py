"""An assistant's message while it arrives: deltas of content, reasoning and tool calls, and what they add up to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ikcli.server.engine.messages import Delta, Final


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """A new tool call (`name` and `id` set) or more of its arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """More of a message; one of the fields is set."""

    content: str = ""
    reasoning: str = ""
    tool: ToolDelta | None = None


class MessageParser(Protocol):
    """Reads generated text as it comes."""

    def feed(self, text: str) -> Sequence[MessageDelta]:
        """What `text` adds."""

    def finish(self) -> Sequence[MessageDelta]:
        """What is left at the end of the generation."""


@dataclass(slots=True)
class Call:
    """A tool call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Message:
    """What the deltas so far add up to."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, deltas: Iterable[MessageDelta]) -> None:
        """Take more."""
        for delta in deltas:
            self.content += delta.content
            self.reasoning += delta.reasoning
            if delta.tool is None:
                continue
            if delta.tool.index >= len(self.calls):
                self.calls.append(Call(delta.tool.id, delta.tool.name))
            self.calls[delta.tool.index].arguments += delta.tool.arguments


@dataclass(slots=True)
class Incoming:
    """The message of one generation: its parser and what came so far."""

    parser: MessageParser
    message: Message = field(default_factory=Message)

    def delta(self, event: Delta) -> list[MessageDelta]:
        """What an event adds."""
        return self._taken(self.parser.feed(event.text))

    def final(self, event: Final) -> list[MessageDelta]:
        """What the end adds."""
        return self._taken([*self.parser.feed(event.tail.text), *self.parser.finish()])

    def whole(self, event: Final) -> Message:
        """The message of a generation that was not streamed."""
        self._taken([*self.parser.feed(event.text), *self.parser.finish()])
        return self.message

    def _taken(self, deltas: Sequence[MessageDelta]) -> list[MessageDelta]:
        self.message.add(deltas)
        return list(deltas)
