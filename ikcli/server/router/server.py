"""Running a server in front of others: its socket, the processes behind it, signals; the one of several models."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from pathlib import Path
from typing import Protocol

from ikcli.config import RunConfig
from ikcli.server.http.auth import read_keys
from ikcli.server.http.logs import ServerLog
from ikcli.server.http.server import SignalServer, announce, close, ignore_signals, listen, settings_of, tls_of
from ikcli.server.http.users import Users, read_users
from ikcli.server.router.app import RouterState, build_app
from ikcli.server.router.child import Child
from ikcli.server.router.entries import ModelEntry, ModelsFile
from ikcli.server.router.manager import Manager


def serve_models(config: RunConfig, file: ModelsFile) -> int:
    """Serve until a signal comes. IkError if the address is taken or options are wrong."""
    server = config.server
    log = ServerLog(json=server.log_format == "json", verbose=config.verbose or config.verbosity > 0)
    keys, users, tls = read_keys(server), read_users(server.keys), tls_of(config)
    listener = listen(server.host, server.port)
    try:
        with tempfile.TemporaryDirectory(prefix="ik-") as folder:
            manager = Manager(file, lambda entry, socket: _child(config, entry, socket), Path(folder), log)
            state = RouterState(config, manager, keys, log, users)
            runner = FrontServer(settings_of(config, build_app(state), tls), manager)
            run_front(config, runner, keys, users, log, listener)
    finally:
        close(listener, server.host)
    return 0


def _child(config: RunConfig, entry: ModelEntry, socket: Path) -> Child:
    """The process of a model. What the front does is switched off there."""
    server = config.server
    front = ["-a", ",".join(entry.names), "--log-format", server.log_format, "--no-webui", "--metrics"]
    front += ["--timeout", str(server.timeout), "--shutdown-timeout", str(server.shutdown_timeout)]
    grace = float(server.shutdown_timeout)
    return Child(entry.name, [*entry.argv, *front], socket, grace=grace, prefix=server.log_format != "json")


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
