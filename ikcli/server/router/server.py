"""Running a server of several models: its socket, the processes behind it, signals."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path

from ikcli.config import RunConfig
from ikcli.server.http.auth import read_keys
from ikcli.server.http.logs import ServerLog
from ikcli.server.http.server import SignalServer, announce, close, ignore_signals, listen, settings_of, tls_of
from ikcli.server.http.users import read_users
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
            runner = _Runner(settings_of(config, build_app(state), tls), manager)
            announce(config, keys, users, log, listener)
            try:
                asyncio.run(runner.run_with_models([listener]))
            except KeyboardInterrupt:
                pass
            finally:
                ignore_signals()
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


class _Runner(SignalServer):
    """Preloads models when it listens; the second signal ends their processes at once."""

    def __init__(self, settings: object, manager: Manager) -> None:
        super().__init__(settings)  # type: ignore[arg-type]
        self._manager = manager

    async def run_with_models(self, sockets: list[object]) -> None:
        """Serve, and end all processes afterwards."""
        tasks = [asyncio.ensure_future(self._manager.preload()), asyncio.ensure_future(self._manager.watch_ttl())]
        try:
            await self.serve(sockets=sockets)  # type: ignore[arg-type]
        finally:
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            if self.force_exit:
                self._manager.kill()
            await self._manager.close()

    def handle_exit(self, sig: int, frame: object) -> None:
        """See SignalServer."""
        super().handle_exit(sig, frame)
        if self.force_exit:
            self._manager.kill()
