"""The message of one generation while it arrives."""

from __future__ import annotations

from collections.abc import Callable

from ikcli.chat.parser import ChatDelta, ChatMessage, ChatParser
from ikcli.server.slots.messages import Delta, Final

ParserMaker = Callable[[], ChatParser]


class Incoming:
    """Reader of generated text with a parser; `message` holds what has arrived so far."""

    def __init__(self, parser: ChatParser) -> None:
        self._parser = parser
        self.calls_tools = False

    @property
    def message(self) -> ChatMessage:
        """The message that the deltas so far add up to."""
        return self._parser.message

    def delta(self, event: Delta) -> list[ChatDelta]:
        """Return the deltas that an event adds."""
        return self._seen(self._parser.feed(event.text))

    def final(self, event: Final) -> list[ChatDelta]:
        """Return the deltas that the end adds."""
        return self._seen([*self._parser.feed(event.tail.text), *self._parser.flush()])

    def whole(self, event: Final) -> ChatMessage:
        """Return the message of a generation that was not streamed."""
        self._seen([*self._parser.feed(event.text), *self._parser.flush()])
        return self._parser.message

    def _seen(self, deltas: list[ChatDelta]) -> list[ChatDelta]:
        self.calls_tools = self.calls_tools or any(delta.index >= 0 for delta in deltas)
        return deltas
