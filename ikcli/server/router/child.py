"""`ik serve` as a process on a Unix socket: started, watched, stopped.

It has a session of its own, so Ctrl-C reaches it through this program only, which lets running requests finish. On
Linux it is told to stop when this program ends in whatever way, so none is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import signal
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from ikcli.server.router.upstream import Exchange, UpstreamError

_POLL = 0.03  # seconds between two looks at a process that loads
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class LoadError(Exception):
    """The model could not be loaded; the text is what its process said last."""


class Child:
    """See the module. `grace`: seconds that its requests get when it is stopped."""

    def __init__(self, name: str, argv: Sequence[str], socket: Path, *, grace: float, prefix: bool) -> None:
        """`prefix`: lines of its log begin with the model's name."""
        self._argv = [sys.executable, "-m", "ikcli", "serve", *argv, "--host", str(socket)]
        self._prefix = f"{name}: " if prefix else ""
        self._grace = grace
        self._said: deque[str] = deque(maxlen=20)
        self._process: asyncio.subprocess.Process | None = None
        self._relays: list[asyncio.Task[None]] = []
        self.socket = str(socket)

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._process is None else self._process.returncode

    async def load(self) -> None:
        """Start it and wait until its model is loaded; LoadError if that fails."""
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
            preexec_fn=_end_with_parent if _libc is not None else None,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self._relays = [
            asyncio.ensure_future(self._relay(self._process.stdout, sys.stdout)),
            asyncio.ensure_future(self._relay(self._process.stderr, sys.stderr, remember=True)),
        ]
        while not await self._ready():
            if self._process.returncode is not None:
                await asyncio.gather(*self._relays)
                raise LoadError(self.last_words())
            await asyncio.sleep(_POLL)

    def last_words(self) -> str:
        """Why it ended, as far as it said so."""
        errors = [line for line in self._said if line.startswith("error: ")]
        if errors:
            return errors[-1].removeprefix("error: ")
        code = self.exit_code
        ended = f"by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        return f"its process ended {ended}"

    async def wait(self) -> None:
        """Wait until the process has ended."""
        assert self._process is not None
        await self._process.wait()

    async def stop(self) -> None:
        """End it: requests that run may finish within the grace time."""
        process = self._process
        if process is None:
            return
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._grace + 5):
                await process.wait()
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await process.wait()
        await asyncio.gather(*self._relays)
        with contextlib.suppress(OSError):
            Path(self.socket).unlink()

    def kill(self) -> None:
        """End it at once."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _ready(self) -> bool:
        try:
            async with Exchange(self.socket, "GET", b"/health") as answer:
                return answer.status == 200
        except UpstreamError:
            return False

    async def _relay(self, stream: asyncio.StreamReader, out: TextIO, remember: bool = False) -> None:
        """Pass its lines on; they may have any length."""
        rest = b""
        while data := await stream.read(1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                text = line.decode("utf-8", "replace")
                if remember:
                    self._said.append(text)
                with contextlib.suppress(OSError):  # nobody reads the log: the process goes on nevertheless
                    print(self._prefix + text, file=out, flush=True)


def _end_with_parent() -> None:
    """In the process before it starts: get SIGTERM when its parent ends."""
    assert _libc is not None
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
