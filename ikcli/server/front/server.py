"""Run a server in front of processes: socket, signals and supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

from ikcli.server.front.supervisor import ProcessSupervisor
from ikcli.server.http.auth import read_keys
from ikcli.server.http.logs import ServerLog
from ikcli.server.http.server import SignalServer, announce, close, ignore_signals, listen, settings_of, tls_of
from ikcli.server.http.users import Users, read_users
from ikcli.settings.run import RunConfig


@dataclass(frozen=True)
class FrontOptions:
    """Log, keys, users and certificate, all read before the socket is opened."""

    config: RunConfig
    log: ServerLog
    keys: tuple[str, ...]
    users: Users
    tls: dict[str, Any]

    @classmethod
    def of(cls, config: RunConfig) -> FrontOptions:
        """Read log, keys, users and certificate. Raise IkError if a file or an option is wrong."""
        server = config.server
        log = ServerLog(json=server.log_format == "json", verbose=config.verbose or config.verbosity > 0)
        return cls(config, log, read_keys(server), read_users(server.keys), tls_of(config))


class FrontServer(SignalServer):
    """Server that runs the supervisor while it listens; a second signal kills all processes.

    `problem` is the reason if the server ends by itself.
    """

    def __init__(self, options: FrontOptions, app: ASGIApp, supervisor: ProcessSupervisor[Any, Any]) -> None:
        super().__init__(settings_of(options.config, app, options.tls))
        self._supervisor = supervisor
        self.loop: asyncio.AbstractEventLoop
        self.problem = ""

    def begin(self) -> None:
        """Start what needs the event loop."""

    async def run(self, listener: socket.socket) -> None:  # type: ignore[override]
        """Serve, then end all processes."""
        self.loop = asyncio.get_running_loop()
        self.begin()
        work = asyncio.ensure_future(self._supervisor.run())
        try:
            await self.serve(sockets=[listener])
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
            if self.force_exit:
                self._supervisor.kill()
            await self._supervisor.close()

    def handle_exit(self, sig: int, frame: object) -> None:
        """Handle a signal as SignalServer does; the second one kills all processes."""
        super().handle_exit(sig, frame)
        if self.force_exit:
            self._supervisor.kill()


def serve_front(options: FrontOptions, open_server: Callable[[], AbstractContextManager[FrontServer]]) -> int:
    """Listen, start the server, and serve until a signal or a problem ends it; return the exit code."""
    config = options.config
    listener = listen(config.server.host, config.server.port, shared=config.server.reuse_port)
    try:
        with open_server() as server:
            announce(config, options.keys, options.users, options.log, listener)
            try:
                asyncio.run(server.run(listener))
            except KeyboardInterrupt:
                pass
            finally:
                ignore_signals()
    finally:
        close(listener, config.server.host)
    if server.problem:
        print(f"error: {server.problem}", file=sys.stderr)
        return 1
    return 0
