"""A program in a pseudo-terminal, for tests: what it prints, and keys for it. Nothing here waits for a fixed time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

WAIT = 120.0
"""Seconds to wait for what is sure to come, however busy the machine is."""
# Tests that run in the background of a shell ignore Ctrl-C, and what they start would, too.
_TAKE_TERMINAL = (
    "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[()][0-9A-B]|\x1b[=>78]|\x1b\][^\x07]*\x07|[\r\x07]")
_ASKS = "\x1b[?2004h"
"""What the line editor writes when it begins to read."""


def _environment() -> dict[str, str]:
    """Without a size that is not the terminal's."""
    return {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}


class Terminal:
    """`ik ARGS` in a terminal of 100 x 40 characters; `home` is where it may keep state."""

    def __init__(self, *args: str, home: Path, **env: str) -> None:
        self.raw = ""
        self._seen = 0
        self._asked = 0
        master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        settings = {"TERM": "xterm-256color", "XDG_STATE_HOME": str(home), "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, sys.executable, "-m", "ikcli", *args],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=_environment() | settings | env,
        )  # fmt: skip
        os.close(slave)
        self._master = master

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(WAIT)
        os.close(self._master)

    @property
    def text(self) -> str:
        """Everything it has printed, without control sequences."""
        return _ESCAPES.sub("", self.raw)

    def send(self, keys: str) -> None:
        """Press keys; Enter is \\r, Ctrl-C \\x03, Alt-Enter \\x1b\\r."""
        os.write(self._master, keys.encode())

    def say(self, text: str) -> None:
        """Wait until it asks for input, and give it a line."""
        self.wait_asked()
        self.send(text + "\r")

    def wait_asked(self) -> None:
        """Until it asks for the next input."""
        self._asked += 1
        self._until(lambda: self.raw.count(_ASKS) >= self._asked, f"input number {self._asked}")

    def expect(self, pattern: str) -> re.Match[str]:
        """Wait for text that matches, behind what was found last."""
        self._until(lambda: self._find(pattern), pattern)
        found = self._find(pattern)
        assert found
        self._seen = found.end()
        return found

    def _find(self, pattern: str) -> re.Match[str] | None:
        return re.compile(pattern).search(self.text, self._seen)

    def interrupt(self, pattern: str) -> None:
        """Press Ctrl-C until text matches: a signal that comes just before a read begins is noticed by the next one."""
        again = 0.0

        def pressed() -> bool:
            nonlocal again
            if self._find(pattern):
                return True
            if time.monotonic() > again:
                self.send("\x03")
                again = time.monotonic() + 5
            return False

        self._until(pressed, pattern)
        self.expect(pattern)

    def ended(self) -> int:
        """Its exit code, once it has ended."""
        end = time.monotonic() + WAIT
        while self._read() or self.process.poll() is None:
            assert time.monotonic() < end, f"it does not end:\n{self.text[-2000:]}"
        return self.process.wait(WAIT)

    def _until(self, condition: object, what: str) -> None:
        end = time.monotonic() + WAIT
        while not condition():  # type: ignore[operator]
            assert time.monotonic() < end, f"no {what} in:\n{self.text[-2000:]}"
            if not self._read() and self.process.poll() is not None and not self._read():
                assert condition(), f"ended without {what}:\n{self.text[-2000:]}"  # type: ignore[operator]

    def _read(self) -> bool:
        """Take what it has printed; False if that is nothing for now."""
        if not select.select([self._master], [], [], 0.1)[0]:
            return False
        data = b""
        with contextlib.suppress(OSError):  # its side is closed
            data = os.read(self._master, 65536)
        self.raw += data.decode("utf-8", "replace")
        return bool(data)
