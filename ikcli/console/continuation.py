"""A text that the model continues without a template: once, or in turns with a user (`-i`).

The text is kept as the model saw it: pieces of text and token ids, as /completion accepts them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ikcli.chat.parser import ChatDelta
from ikcli.console.answers import Answer, AnswerCounts, AnswerSource, Body, PromptCache
from ikcli.console.output import put
from ikcli.console.terminal import TerminalInput, interruptible


@dataclass(frozen=True, slots=True)
class Turns:
    """How the user takes part. `first`: before the model; texts around every input; BOS before it, if not None."""

    first: bool = False
    prefix: str = ""
    suffix: str = ""
    bos: int | None = None


class Continuation:
    """A text under continuation. `reverse` holds the texts at which the model stops."""

    def __init__(
        self,
        source: AnswerSource,
        prompt: str,
        reverse: tuple[str, ...] = (),
        cache: PromptCache | None = None,
        *,
        display: bool = True,
    ) -> None:
        """Start a text; `display`: print the prompt before the continuation."""
        self.total = AnswerCounts()
        self._source, self._reverse, self._cache = source, reverse, cache
        self._parts: list[str | int] = [prompt]
        self._shown = "" if not display else prompt
        self._last = self._shown[-1:] or "\n"

    def once(self) -> Answer:
        """Continue and print, including a stop text."""
        body: Body = {"prompt": self._prompt(), "stop": list(self._reverse)}
        prepared = self._cache.prepare(body, chat=False) if self._cache is not None else AnswerCounts()
        stream = self._source.complete(body)
        with interruptible(stream.cancel):
            self._print(stream)
        answer = stream.answer
        self.total = self.total.plus(answer.counts.beyond(prepared))
        if answer.stop == "word":  # kept as text, since the last token may overlap the stop text
            put(answer.word)
            self._last = answer.word
            self._parts.append(answer.text + answer.word)
        else:
            self._parts += answer.tokens
        return answer

    def _prompt(self) -> str | list[str | int]:
        """Return the model's input: one text, or texts and tokens; an array of texts would mean several prompts."""
        parts: list[str | int] = []
        for part in self._parts:
            if isinstance(part, str) and parts and isinstance(parts[-1], str):
                parts[-1] += part
            else:
                parts.append(part)
        return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else parts

    def converse(self, input: TerminalInput, turns: Turns) -> None:
        """Continue in turns, until the input ends."""
        waiting = turns.first
        if waiting:
            self._show_prompt()
        while True:
            if waiting and not self._take_input(input, turns):
                return
            answer = self.once()
            if answer.stop == "eos" and self._reverse:
                put(self._reverse[0])
                self._parts.append(self._reverse[0])
            elif answer.stop != "word":
                self.end_line()
            waiting = True

    def _take_input(self, input: TerminalInput, turns: Turns) -> bool:
        """Append the user's input to the text; nothing if it is empty."""
        interrupted = False
        while True:
            try:
                text = input.read(turns.prefix)
                break
            except EOFError:
                return False
            except KeyboardInterrupt:
                if interrupted:
                    return False
                interrupted = True
        self._last = "\n"
        if text:
            self._parts += [] if turns.bos is None else [turns.bos]
            self._parts.append(f"{turns.prefix}{text}\n{turns.suffix}")
            put(turns.suffix)
        return True

    def end_line(self) -> None:
        """Begin a new line if the text does not end with one."""
        if self._last != "\n":
            put("\n")
            self._last = "\n"

    def _show_prompt(self) -> None:
        """Print the prompt once, after the model has accepted it."""
        shown, self._shown = self._shown, ""
        put(shown)

    def _print(self, deltas: Iterable[ChatDelta]) -> None:
        """Print the prompt and what follows; nothing if the model refuses."""
        for delta in deltas:
            self._show_prompt()
            put(delta.content)
            self._last = delta.content[-1:] or self._last
        self._show_prompt()
