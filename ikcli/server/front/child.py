"""Run `ik serve` as a child process with a separate socket.

The child has its own session, so Ctrl-C reaches it only through this program, which lets running requests finish. On
Linux the kernel sends it SIGTERM when this program ends for any reason, so no child is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ikcli.errors import UsageError
from ikcli.server.front.process import LoadError, Process, print_line
from ikcli.server.http import jsontext

_POLL = 0.03  # seconds between two checks of a loading process
_PR_SET_PDEATHSIG = 1
_IS_POSIX = hasattr(os, "fork")
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class Child(Process):
    """A local process. `grace` is the time in seconds that running requests get when it is stopped."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        at: Path | str,
        *,
        grace: float,
        prefix: bool,
        key: str = "",
        cpus: frozenset[int] = frozenset(),
        environment: Mapping[str, str] | None = None,
        say: Callable[[str, bool], None] = print_line,
    ) -> None:
        """Describe a process without starting it.

        `at`: path of its Unix socket, or address of this machine where it listens on some port. `prefix`: log lines
        begin with the model's name. `key`: API key that its requests need. `cpus`: CPUs it may run on, all if None.
        `environment`: its whole environment, by default this program's. `say` receives its log lines, each with whether
        it comes from stderr.
        """
        if not _IS_POSIX:
            raise UsageError("this system cannot run several models or replicas behind one port; "
                             "start one `ik serve` for each")  # fmt: skip
        super().__init__(str(at) if isinstance(at, Path) else (at, 0), key)
        self._argv = [sys.executable, "-m", "ikcli", "serve", *argv]
        self._prefix = f"{name}: " if prefix else ""
        self._grace, self._cpus, self._environment, self._say = grace, cpus, environment, say
        self._said: deque[str] = deque(maxlen=20)
        self._process: asyncio.subprocess.Process | None = None
        self._relays: list[asyncio.Task[None]] = []

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while it runs."""
        return None if self._process is None else self._process.returncode

    @property
    def pid(self) -> int | None:
        """The process ID; None before the start."""
        return None if self._process is None else self._process.pid

    @property
    def where(self) -> str:
        """See Process."""
        return f"process {self.pid}"

    async def load(self) -> None:
        """See Process."""
        with contextlib.ExitStack() as stack:
            argv = [*self._argv, *self._key_options(stack)]
            if isinstance(self.address, str):
                await self._start([*argv, "--host", self.address])
            else:  # the process inherits the socket, so nobody else can take the port before it listens
                family = socket.AF_INET6 if ":" in self.address[0] else socket.AF_INET
                listener = stack.enter_context(socket.create_server((self.address[0], 0), family=family))
                self.address = listener.getsockname()[:2]
                await self._start([*argv, "--host", f"fd:{listener.fileno()}"], listener.fileno())
                listener.close()
            await self._until_ready()

    def _key_options(self, stack: contextlib.ExitStack) -> list[str]:
        """Pass the key in a file that exists while the process starts: its arguments are visible to every user."""
        if not self.key:
            return []
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ik-"))  # only its user can enter it
        path = Path(folder) / "key"
        path.write_text(self.key, encoding="utf-8")
        return ["--api-key-file", str(path)]

    async def _start(self, argv: list[str], *passed: int) -> None:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            pass_fds=passed,
            start_new_session=True,
            preexec_fn=self._prepare,
            env=self._environment,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self._relays = [
            asyncio.ensure_future(self._relay(self._process.stdout, False)),
            asyncio.ensure_future(self._relay(self._process.stderr, True)),
        ]

    def _prepare(self) -> None:
        """Set the CPU affinity, and SIGTERM on the death of the parent, in the child before it executes."""
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if self._cpus:
            os.sched_setaffinity(0, self._cpus)

    async def _until_ready(self) -> None:
        assert self._process is not None
        while not await self.healthy():
            if self._process.returncode is not None:
                await asyncio.gather(*self._relays)
                raise LoadError(self.last_words())
            await asyncio.sleep(_POLL)

    def last_words(self) -> str:
        """Return the reason for its end: its last error, else its exit code."""
        errors = [line for line in self._said if line.startswith("error: ")]
        if errors:
            return errors[-1].removeprefix("error: ")
        code = self.exit_code
        ended = f"by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        return f"its process ended {ended}"

    async def described(self) -> dict[str, Any]:
        """Return its own entry of /v1/models (`model`) and, for agents that look for it, `catalogue`."""
        status, body = await self.answer(b"/v1/models") or (0, b"")
        if status != 200:
            return {}
        found = jsontext.parse(body)
        return {"model": found["data"][0], "catalogue": found["models"]}

    async def wait(self) -> None:
        """See Process."""
        assert self._process is not None
        await self._process.wait()

    async def stop(self) -> None:
        """See Process."""
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
        if isinstance(self.address, str):
            with contextlib.suppress(OSError):
                Path(self.address).unlink()

    def kill(self) -> None:
        """See Process."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _relay(self, stream: asyncio.StreamReader, error: bool) -> None:
        """Relay its log lines, which may have any length."""
        rest = b""
        while data := await stream.read(1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                text = line.decode("utf-8", "replace")
                if error:
                    self._said.append(text)
                self._say(self._prefix + text, error)
