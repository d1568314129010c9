"""A conversation in a terminal, as used by slash commands and the input loop."""

from __future__ import annotations

from typing import Any

from ikcli.console.conversation import Conversation
from ikcli.console.render import Renderer, end_note
from ikcli.console.terminal import TerminalInput, interruptible
from ikcli.errors import IkError
from ikcli.log import error


class Dialogue:
    """A conversation in a terminal. Errors are printed, and the conversation goes on."""

    def __init__(self, conversation: Conversation, input: TerminalInput, renderer: Renderer) -> None:
        self.conversation, self.renderer = conversation, renderer
        self._input = input
        self._offer = ""
        self._leaving = False

    @property
    def edits(self) -> bool:
        """Whether texts can be offered for editing."""
        return self._input.edits

    def note(self, text: str) -> None:
        """Tell the user something."""
        self.renderer.note(text)

    def offer(self, text: str) -> None:
        """Prefill the next input with this text."""
        self._offer = text

    def settings(self) -> dict[str, Any]:
        """Return the settings of the next answer."""
        return self.conversation.source.settings() | self.conversation.fields

    def say(self, text: str) -> None:
        """Add a user message and get its answer; if there is none, remove the message."""
        self.conversation.say(text)
        if not self.answer():
            self.conversation.undo()
            self._offer = text if self.edits else ""

    def answer(self) -> bool:
        """Get an answer from the model; print why and return False if that fails."""
        try:
            stream = self.conversation.ask()
            with interruptible(stream.cancel):
                self.renderer.show(stream)
        except IkError as e:
            error(str(e))
            return False
        except KeyboardInterrupt:  # before there was an answer to stop
            self.note("[stopped]")
            return False
        answer = stream.answer
        self.conversation.take(answer)
        note = end_note(answer)
        if note:
            self.note(f"[{note}]")
        return True
