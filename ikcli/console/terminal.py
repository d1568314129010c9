"""Read lines from a user: in a terminal with editing, history and completion (prompt_toolkit), else as they come.

Both readers raise EOFError at the end of input and KeyboardInterrupt for Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

Complete = Callable[[str], Iterable[tuple[str, int, str]]]
"""Text before the cursor -> (completion, characters of the text that it replaces, help)."""


class TerminalInput(Protocol):
    """A source of inputs."""

    edits: bool
    """Whether the user can edit a text that is offered."""

    def read(self, prompt: str, default: str = "") -> str:
        """Return the next input; `default` is offered for editing."""


class PlainInput:
    """Reads lines of standard input. A backslash at the end continues the line; `multiline`: until a line ends in /."""

    def __init__(self, *, multiline: bool = False, echo_prompt: bool = True) -> None:
        self.edits = False
        self._multiline, self._echo = multiline, echo_prompt

    def read(self, prompt: str, default: str = "") -> str:
        if self._echo:
            sys.stderr.write(prompt)  # stdout is for the text of the model
            sys.stderr.flush()
        lines: list[str] = []
        while True:
            line = sys.stdin.readline()
            if not line:
                if lines:
                    return "\n".join(lines)
                raise EOFError
            line = line.rstrip("\r\n")
            end = "/" if self._multiline else "\\"
            goes_on = line.endswith(end) != self._multiline
            lines.append(line.removesuffix(end))
            if not goes_on:
                return "\n".join(lines)


class LineEditor:
    """Reads with prompt_toolkit: Enter sends, Alt-Enter or Ctrl-J starts a new line; reversed with `multiline`."""

    def __init__(self, complete: Complete, *, multiline: bool = False, color: bool = True) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
        from prompt_toolkit.output import ColorDepth

        self.edits = True
        self._session: PromptSession[str] = PromptSession(
            history=_history(history_path()),
            multiline=True,
            key_bindings=_keys(swapped=multiline),
            completer=_completer(complete),
            complete_while_typing=True,
            auto_suggest=AutoSuggestFromHistory(),
            enable_open_in_editor=True,
            color_depth=None if color else ColorDepth.DEPTH_1_BIT,
            prompt_continuation=lambda width, number, wrapped: " " * width,
            reserve_space_for_menu=4,
        )

    def read(self, prompt: str, default: str = "") -> str:
        from prompt_toolkit.formatted_text import FormattedText

        return self._session.prompt(FormattedText([("bold ansigreen", prompt)]), default=default)


def history_path() -> Path:
    """Return the history file, following the XDG base directories."""
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if state else Path.home() / ".local" / "state") / "ik" / "chat-history"


def _history(path: Path) -> Any:
    """Return a history in the file, or in memory if it cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600))
    except OSError:
        return InMemoryHistory()

    class Forgiving(FileHistory):
        """Ignores a full disk, which loses history but not the conversation."""

        def store_string(self, string: str) -> None:
            with suppress(OSError):
                super().store_string(string)

    return Forgiving(str(path))


def _keys(*, swapped: bool) -> Any:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    def send(event: Any) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\") and not swapped:
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    def new_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    keys.add("enter")(new_line if swapped else send)
    keys.add("escape", "enter")(send if swapped else new_line)
    if not swapped:
        keys.add("c-j")(new_line)
    return keys


def _completer(complete: Complete) -> Any:
    from prompt_toolkit.completion import Completer, Completion

    class Commands(Completer):
        def get_completions(self, document: Any, complete_event: Any) -> Iterator[Completion]:
            for text, n_replaced, help in complete(document.text_before_cursor):
                yield Completion(text, start_position=-n_replaced, display_meta=help)

    return Commands()


@contextmanager
def interruptible(stop: Callable[[], None]) -> Iterator[None]:
    """Make Ctrl-C call `stop` and nothing else; typed keys are not echoed, which would disturb the answer."""
    before = signal.signal(signal.SIGINT, lambda number, frame: stop())
    try:
        with _without_echo():
            yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _without_echo() -> Iterator[None]:
    """Yield the terminal, if input comes from one, with keys kept for the next input and not shown."""
    if sys.platform == "win32" or not sys.stdin.isatty():
        yield
        return
    import termios

    fd = sys.stdin.fileno()
    if os.tcgetpgrp(fd) != os.getpgrp():  # a background process that changes the terminal is stopped
        yield
        return
    before = termios.tcgetattr(fd)
    quiet = list(before)
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(fd, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
