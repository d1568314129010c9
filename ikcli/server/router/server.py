"""Running a server in front of others: its socket, the processes behind it, signals; the one of several models."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ikcli.server.http.auth import read_keys
from ikcli.server.http.errors import ApiError
from ikcli.server.http.logs import ServerLog
from ikcli.server.http.server import SignalServer, announce, close, ignore_signals, listen, settings_of, tls_of
from ikcli.server.http.users import Users, read_users
from ikcli.server.router.app import build_app
from ikcli.server.router.child import Child
from ikcli.server.router.entries import ModelEntry, ModelsFile
from ikcli.server.router.environment import environment_behind
from ikcli.server.router.manager import Manager
from ikcli.server.router.state import RouterState
from ikcli.settings.run import RunConfig

_OF_SEVERAL = "LLAMA_ARG_MODELS_"
"""Begins the variables by which a process would be a server of several models itself."""


def serve_models(
    config: RunConfig, file: ModelsFile, read: Callable[[], ModelsFile] | None = None, *, single: bool = False
) -> int:
    """Serve until a signal comes. IkError if the address is taken or options are wrong; 1 if the only one cannot load.

    `read` reads the models again. `single`: there is one model, and clients see a server of this one.
    """
    server = config.server
    log = ServerLog(json=server.log_format == "json", verbose=config.verbose or config.verbosity > 0)
    keys, users, tls = read_keys(server), read_users(server.keys), tls_of(config)
    listener = listen(server.host, server.port, shared=server.reuse_port)
    try:
        with tempfile.TemporaryDirectory(prefix="ik-") as folder:
            manager = Manager(file, lambda entry, socket: _child(config, entry, socket), Path(folder), log)
            state = RouterState(config, manager, keys, log, users, read, single)
            runner = _ModelsServer(settings_of(config, build_app(state), tls), manager, single)
            run_front(config, runner, keys, users, log, listener)
    finally:
        close(listener, server.host)
    if runner.problem:
        print(f"error: {runner.problem}", file=sys.stderr)
        return 1
    return 0


def _child(config: RunConfig, entry: ModelEntry, socket: Path) -> Child:
    """The process of a model. What the front does is switched off there."""
    server = config.server
    front = [f"--alias={','.join(entry.names)}", "--log-format", server.log_format, "--no-webui", "--metrics"]
    front += ["--timeout", str(server.timeout), "--shutdown-timeout", str(server.shutdown_timeout)]
    grace = float(server.shutdown_timeout)
    return Child(
        entry.name, [*entry.argv, *front], socket,
        grace=grace, prefix=server.log_format != "json", environment=environment_behind(_OF_SEVERAL),
    )  # fmt: skip


class Processes(Protocol):
    """What is behind a front."""

    async def run(self) -> None:
        """What has to be done while the front listens, until cancelled."""

    async def close(self) -> None:
        """End all processes when their requests are done."""

    def kill(self) -> None:
        """End all processes at once."""


class FrontServer(SignalServer):
    """Starts processes when it listens; the second signal ends them at once."""

    def __init__(self, settings: object, processes: Processes) -> None:
        super().__init__(settings)  # type: ignore[arg-type]
        self._processes = processes
        self.loop: asyncio.AbstractEventLoop

    def begin(self) -> None:
        """Called on the loop."""

    async def run(self, listener: socket.socket) -> None:  # type: ignore[override]
        """Serve, and end all processes afterwards."""
        self.loop = asyncio.get_running_loop()
        self.begin()
        work = asyncio.ensure_future(self._processes.run())
        try:
            await self.serve(sockets=[listener])
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
            if self.force_exit:
                self._processes.kill()
            await self._processes.close()

    def handle_exit(self, sig: int, frame: object) -> None:
        """See SignalServer."""
        super().handle_exit(sig, frame)
        if self.force_exit:
            self._processes.kill()


class _ModelsServer(FrontServer):
    """`problem`: why the only model could not be loaded, which ends the server."""

    def __init__(self, settings: object, manager: Manager, single: bool) -> None:
        super().__init__(settings, manager)
        self._manager, self._single = manager, single
        self._first: asyncio.Task[None] | None = None
        self.problem = ""

    def begin(self) -> None:
        """See FrontServer."""
        if self._single:
            self._first = asyncio.ensure_future(self._load_first())

    async def _load_first(self) -> None:
        try:
            await self._manager.load(next(iter(self._manager.instances)))
        except ApiError as e:
            if not self.should_exit:
                self.problem, self.should_exit = e.message, True

    def handle_exit(self, sig: int, frame: object) -> None:
        """See SignalServer. Streams of events would never end by themselves."""
        super().handle_exit(sig, frame)
        self.loop.call_soon_threadsafe(self._manager.events.close)


def run_front(
    config: RunConfig,
    runner: FrontServer,
    keys: tuple[str, ...],
    users: Users,
    log: ServerLog,
    listener: socket.socket,
) -> None:
    """Announce and serve."""
    announce(config, keys, users, log, listener)
    try:
        asyncio.run(runner.run(listener))
    except KeyboardInterrupt:
        pass
    finally:
        ignore_signals()
