"""Print answers as they arrive: plain text for pipes, Markdown for terminals.

Markdown is rendered block by block: finished blocks stay on the screen, and only the block that still grows is redrawn.
Plain output has the answer on stdout and the model's reasoning on stderr.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, TextIO

from ikcli.chat.parser import ChatDelta
from ikcli.console.answers import Answer
from ikcli.console.output import put

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.markdown import Markdown

FOLDED, SHOWN = "folded", "shown"


class Renderer(Protocol):
    """Shows one answer after the other."""

    thinking: str

    def show(self, deltas: Iterable[ChatDelta]) -> None:
        """Show an answer to its end."""

    def note(self, text: str) -> None:
        """Print a line of this program."""

    def dim(self, text: str) -> None:
        """Print text of lesser weight."""


def call_line(name: str, arguments: str) -> str:
    """Format a tool call as `name(city="Paris", days=3)`; arguments that are not a JSON object are shown unchanged."""
    try:
        values = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        return f"{name}({arguments.strip()})"
    return f"{name}({', '.join(f'{k}={json.dumps(v, ensure_ascii=False)}' for k, v in values.items())})"


def end_note(answer: Answer) -> str:
    """Return why an answer is incomplete; empty if it is complete."""
    if answer.stop == "cancelled":
        return "stopped"
    if answer.stop == "limit":
        full = answer.truncated and answer.counts.n_past + 1 >= answer.counts.n_ctx
        return "the context is full" if full else "the limit of tokens (-n) is reached"
    return ""


class _Calls:
    """Collects tool calls, which are shown when they are complete."""

    def __init__(self) -> None:
        self._open: list[list[str]] = []

    def add(self, delta: ChatDelta) -> None:
        while len(self._open) <= delta.index:
            self._open.append(["", ""])
        self._open[delta.index][0] += delta.name
        self._open[delta.index][1] += delta.arguments

    def lines(self) -> list[str]:
        return [f"→ calls {call_line(name, arguments)}" for name, arguments in self._open]


class PlainRenderer:
    """Prints text unchanged."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self.thinking = SHOWN
        self._out, self._err = out or sys.stdout, err or sys.stderr

    def show(self, deltas: Iterable[ChatDelta]) -> None:
        calls, thought, last = _Calls(), False, "\n"
        try:
            for delta in deltas:
                if delta.index >= 0:
                    calls.add(delta)
                elif delta.reasoning:
                    if self.thinking == SHOWN:
                        put(delta.reasoning, self._err)
                        thought = True
                elif delta.content:
                    if thought:
                        put("\n", self._err)
                        thought = False
                    put(delta.content, self._out)
                    last = delta.content
        finally:
            if thought:
                put("\n", self._err)
            if not last.endswith("\n"):
                put("\n", self._out)
            for line in calls.lines():
                put(line + "\n", self._out)

    def note(self, text: str) -> None:
        put(text + "\n", self._err)

    def dim(self, text: str) -> None:
        put(text + "\n", self._err)


class Fancy:
    """Renders Markdown in a terminal; reasoning is dimmed, and folded to one line once complete."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console

        self.thinking = FOLDED
        self.console = console or Console(file=sys.stdout, highlight=False, soft_wrap=False)

    def note(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    def dim(self, text: str) -> None:
        self.console.print(text, style="dim italic", markup=False, highlight=False)

    def show(self, deltas: Iterable[ChatDelta]) -> None:
        from rich.live import Live

        calls = _Calls()
        live = Live(console=self.console, auto_refresh=False, transient=True, vertical_overflow="crop")
        view = _View(self, live)
        with live:
            try:
                for delta in deltas:
                    if delta.index >= 0:
                        calls.add(delta)
                    else:
                        view.add(delta)
            finally:
                view.end()
        for line in calls.lines():
            self.console.print(line, style="bold cyan", markup=False, highlight=False)


_REDRAW_SECONDS = 0.05
_SHARE = 5


class _View:
    """The part of an answer that still changes."""

    def __init__(self, owner: Fancy, live: Live) -> None:
        self._owner, self._live = owner, live
        self._console = owner.console
        self._thought, self._content = "", ""
        self._t_thought = 0.0
        self._t_next = time.monotonic() + _REDRAW_SECONDS

    def add(self, delta: ChatDelta) -> None:
        if delta.reasoning:
            self._t_thought = self._t_thought or time.monotonic()
            self._thought += delta.reasoning
        if delta.content:
            if self._thought:
                self._end_thought()
            self._content += delta.content
            done, self._content = finished_blocks(self._content)
            if done:
                self._live.update("", refresh=True)
                self._markdown(done)
        now = time.monotonic()
        if now >= self._t_next:
            self._draw()
            took = time.monotonic() - now
            self._t_next = now + max(_REDRAW_SECONDS, took * _SHARE)  # most of the time is the model's

    def end(self) -> None:
        self._live.update("", refresh=True)
        if self._thought:
            self._end_thought()
        if self._content.strip():
            self._markdown(self._content)
        self._content = ""

    def _end_thought(self) -> None:
        from rich.text import Text

        text, self._thought = self._thought, ""
        seconds, self._t_thought = time.monotonic() - self._t_thought, 0.0
        self._live.update("", refresh=True)
        if self._owner.thinking == SHOWN:
            self._console.print(Text(text.strip(), style="dim italic"))
        else:
            n = len(text.split())
            self._owner.note(f"▸ thought for {seconds:.1f} s, {n} words (/think shows them)")

    def _draw(self) -> None:
        from rich.text import Text

        height = max(self._console.height - 2, 1)
        if self._thought:
            lines = Text(self._thought.strip(), style="dim italic").wrap(self._console, self._console.width)
            self._live.update(Text("\n").join(lines[-height:]), refresh=True)
        else:
            markdown = self._console.render_lines(_markdown(self._content), pad=False)
            shown = Text("\n").join(
                Text.assemble(*((s.text, s.style or "") for s in line if not s.control)) for line in markdown[-height:]
            )
            self._live.update(shown, refresh=True)

    def _markdown(self, text: str) -> None:
        self._console.print(_markdown(text))


def _markdown(text: str) -> Markdown:
    from rich.markdown import Markdown

    return Markdown(hard_breaks(text), code_theme="ansi_dark", hyperlinks=False)


def hard_breaks(text: str) -> str:
    """Return Markdown with line breaks preserved, as models intend them: a poem must not become a paragraph."""
    lines, fence = text.split("\n"), ""
    for i, line in enumerate(lines):
        mark = line.lstrip()[:3]
        if mark in ("```", "~~~") and fence in ("", mark):
            fence = "" if fence else mark
        elif line.strip() and not fence:
            lines[i] = line.rstrip() + "  "
    return "\n".join(lines)


def finished_blocks(text: str) -> tuple[str, str]:
    """Split Markdown at blank lines outside fences into complete blocks and the block that still grows.

    A list continues over blank lines, so it stays together with what is indented below it.
    """
    at, fence, position = 0, "", 0
    lines = text.splitlines(keepends=True)
    for i, line in enumerate(lines):
        mark = line.lstrip()[:3]
        if fence:
            if mark == fence:
                fence = ""
        elif mark in ("```", "~~~"):
            fence = mark
        elif not line.strip() and line.endswith("\n") and i + 1 < len(lines) and _begins_block(lines[i + 1]):
            at = position + len(line)
        position += len(line)
    return text[:at], text[at:]


def _begins_block(line: str) -> bool:
    """Return whether a line after a blank one certainly begins another block than a list before it."""
    return bool(line.strip()) and not line[0].isspace() and not line[0].isdigit() and line[0] not in "-*+"
