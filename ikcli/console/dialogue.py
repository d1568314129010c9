"""A conversation on a terminal: what slash commands and the input loop act on."""

from __future__ import annotations

from typing import Any

from ikcli.console.conversation import Conversation
from ikcli.console.render import Renderer, end_note
from ikcli.console.terminal import TerminalInput, interruptible
from ikcli.errors import IkError
from ikcli.log import error


class Dialogue:
    """A conversation on a terminal. An error is printed, and the conversation goes on."""

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
        """Tell the person something."""
        self.renderer.note(text)

    def offer(self, text: str) -> None:
        """Let the next input begin with this."""
        self._offer = text

    def settings(self) -> dict[str, Any]:
        """What applies to the next answer."""
        return self.conversation.source.settings() | self.conversation.fields

    def say(self, text: str) -> None:
        """A message of the user, and its answer; without one it is taken back."""
        self.conversation.say(text)
        if not self.answer():
            self.conversation.undo()
            self._offer = text if self.edits else ""

    def answer(self) -> bool:
        """Let the model answer; False, and the person is told why, if it cannot."""
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
