"""The loop of a conversation: input, command or message, answer."""

from __future__ import annotations

from ikcli.console import slash
from ikcli.console.dialogue import Dialogue
from ikcli.errors import IkError
from ikcli.log import error

_PROMPT = "> "


class Repl(Dialogue):
    """The input loop of a dialogue."""

    def run(self) -> None:
        """Run until the user leaves."""
        while True:
            try:
                text = self._read()
                self._handle(text)
            except (EOFError, slash.Leave):
                return
            except IkError as e:
                error(str(e))

    def _read(self) -> str:
        """Return the next input; two consecutive Ctrl-C end it."""
        while True:
            prompt = f"result of {self.conversation.undone[0].name}> " if self.conversation.undone else _PROMPT
            offer, self._offer = self._offer, ""
            try:
                text = self._input.read(prompt, offer)
            except KeyboardInterrupt:
                if self._leaving:
                    raise EOFError from None
                self._leaving = True
                self.note("Ctrl-C once more, or Ctrl-D, leaves")
                continue
            self._leaving = False
            if text.strip():
                return text

    def _handle(self, text: str) -> None:
        if text.startswith("/"):
            slash.run(self, text)
        elif self.conversation.undone:
            self.conversation.give_result(text)
            if not self.conversation.undone:
                self.answer()
        else:
            self.say(text)
