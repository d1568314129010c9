"""Running the server: sockets, the engine's life, signals, draining.

The server listens first and loads the model in the engine's thread, so that /health can report it. One process serves
one port, and the address must be free. The first SIGTERM or SIGINT lets running requests finish for up to
`--shutdown-timeout` seconds; a second one stops at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import stat
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import uvicorn

from ikcli import __version__
from ikcli.errors import IkError, UsageError
from ikcli.files import make_private_folder
from ikcli.hostinfo import physical_cores
from ikcli.server.http.app import build_app
from ikcli.server.http.auth import key_summary, private_file, read_keys
from ikcli.server.http.chat import check_options
from ikcli.server.http.connection import Connection
from ikcli.server.http.logs import ServerLog
from ikcli.server.http.state import PASSED, ServerState, hosts_of
from ikcli.server.http.users import Users, read_users
from ikcli.server.slots.engine import Engine
from ikcli.settings.run import RunConfig
from ikcli.settings.server import ServerConfig

if TYPE_CHECKING:
    from ikcli.engine.plan.planner import Planner

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(config: RunConfig, planner: Planner | None = None) -> int:
    """Serve until a signal comes.

    Raise IkError if the address is taken or options are wrong. Return 1 if the model cannot be loaded.
    """
    server = config.server
    log = ServerLog(json=server.log_format == "json", verbose=config.verbose or config.verbosity > 0)
    state = ServerState(config, None, read_keys(server), log, read_users(server.keys))
    state.defaults  # noqa: B018  (wrong options end the program before anything is loaded)
    check_options(config)
    check_folders(config)
    check_cache_disk(server)
    if server.log_prompts_dir is not None:
        make_private_folder(server.log_prompts_dir, "--log-prompts-dir")
    tls = tls_of(config)
    listener = listen(server.host, server.port, shared=server.reuse_port)
    try:
        state.engine = Engine(config, n_slots=config.n_parallel, logger=log, planner=planner)
        app = build_app(state)
        return _run(config, state, log, app, listener, tls)
    finally:
        close(listener, server.host)


def check_cache_disk(server: ServerConfig) -> None:
    """Make the folder of the prompt cache; raise UsageError if it or the options beside it cannot be used."""
    if server.cache_disk is None:
        return
    if server.cache_ram == 0:
        raise UsageError("--cache-disk keeps rows in RAM until they are written; set -cram above 0")
    make_private_folder(server.cache_disk, "--cache-disk")


def check_folders(config: RunConfig) -> None:
    """Raise UsageError if a folder for files does not exist."""
    folders = {"--slot-save-path": config.server.slot_save_path}
    folders["--control-vector-path"] = config.adapters.control_vector_path
    for option, folder in folders.items():
        if folder is not None and not folder.is_dir():
            raise UsageError(f"{option} {folder} is not a directory; create it or name another one")


def tls_of(config: RunConfig) -> dict[str, Any]:
    """Return key and certificate. Raise UsageError if only one is given or a file is missing."""
    key = private_file(config.server.ssl_key_file, "--ssl-key-file")
    cert = private_file(config.server.ssl_cert_file, "--ssl-cert-file")
    if (key is None) != (cert is None):
        raise UsageError("--ssl-key-file and --ssl-cert-file belong together; give both")
    return {} if key is None else {"ssl_keyfile": key, "ssl_certfile": cert}


class Listener(socket.socket):
    """A listening socket; `others` are the sockets of further addresses of --host."""

    others: tuple[Listener, ...] = ()


def sockets_of(listener: socket.socket) -> list[socket.socket]:
    """Return all sockets that `listen` opened."""
    return [listener, *(listener.others if isinstance(listener, Listener) else ())]


def listen(host: str, port: int, *, shared: bool = False) -> Listener:
    """Open the socket of an address, or of several separated by commas: names, paths ending in .sock, or fd:N.

    `shared`: other processes may listen on the port too. Raise IkError if an address cannot be used.
    """
    hosts = hosts_of(host)
    several = sum(not _is_local(one) for one in hosts) > 1
    found: list[Listener] = []
    try:
        for one in hosts:
            first = next((sock for sock in found if not _is_unix(sock)), None)
            number = first.getsockname()[1] if first is not None and not port else port
            found.append(_listen_one(one, number, shared=shared, v6only=several))
    except IkError:
        for sock in found:
            sock.close()
        raise
    found[0].others = tuple(found[1:])
    return found[0]


def _is_unix(sock: socket.socket) -> bool:
    return hasattr(socket, "AF_UNIX") and sock.family == socket.AF_UNIX


def _is_local(host: str) -> bool:
    return host.endswith(".sock") or host.startswith(PASSED)


def _listen_one(host: str, port: int, *, shared: bool, v6only: bool) -> Listener:
    if host.endswith(".sock"):
        return _listen_unix(host)
    if host.startswith(PASSED):
        return _passed(host)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as e:
        raise IkError(f"--host {host}: {e.strerror or e}") from None
    sock = Listener(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            _share(sock)
        if v6only and family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(1024)
    except (OSError, OverflowError) as e:
        sock.close()
        reason = getattr(e, "strerror", None) or e
        raise IkError(f"cannot listen on {host} port {port}: {reason}; choose another one with --port") from None
    return sock


def _share(sock: socket.socket) -> None:
    if not hasattr(socket, "SO_REUSEPORT"):
        raise UsageError("--reuse-port: this system cannot share ports")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def _listen_unix(path: str) -> Listener:
    if not hasattr(socket, "AF_UNIX"):
        raise UsageError(f"--host {path}: this system has no Unix sockets; name an address such as 127.0.0.1")
    sock = Listener(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        sock.bind(path)
        sock.listen(1024)
    except OSError as e:
        sock.close()
        raise IkError(f"cannot listen on {path}: {e.strerror or e}; choose another path with --host") from None
    return sock


def _passed(host: str) -> Listener:
    try:
        sock = Listener(fileno=int(host.removeprefix(PASSED)))
        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            sock.detach()
            raise ValueError
    except (OSError, ValueError, OverflowError):
        raise UsageError(f"--host {host}: this file descriptor is not a listening socket") from None
    return sock


def _remove_stale(path: str) -> None:
    """Remove a socket file that no process listens on any more."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)


def close(listener: socket.socket, host: str) -> None:
    """Close what `listen` opened and remove the files of Unix sockets."""
    for sock in sockets_of(listener):
        sock.close()
    for path in hosts_of(host):
        if path.endswith(".sock"):
            with contextlib.suppress(OSError):
                os.unlink(path)


def _run(
    config: RunConfig, state: ServerState, log: ServerLog, app: Any, listener: socket.socket, tls: dict[str, Any]
) -> int:
    runner = _Runner(settings_of(config, app, tls), state, log)
    announce(config, state.keys, state.users, log, listener)
    try:
        asyncio.run(runner.serve(sockets=[listener]))
    except KeyboardInterrupt:
        pass
    finally:
        state.engine.shutdown(drain=False)
        ignore_signals()
    if runner.load_failed:
        error = state.engine.load_error
        if error is not None:
            print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def settings_of(config: RunConfig, app: Any, tls: dict[str, Any]) -> uvicorn.Config:
    """Return the uvicorn settings for an application."""
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=config.server.shutdown_timeout,
        **tls,
    )


def announce(config: RunConfig, keys: tuple[str, ...], users: Users, log: ServerLog, listener: socket.socket) -> None:
    """Log where the server listens."""
    name = listener.getsockname()
    fields = {"n_threads_http": str(_threads(config)), "port": _port(name), "hostname": config.server.host}
    if keys:
        fields["api_key"] = key_summary(keys)
    if users:
        fields["users"] = str(len(users.accounts))
    log.info("main", "build info", build=__version__)
    log.info("main", "HTTP server listening", **fields)


def ignore_signals() -> None:
    """Ignore further signals: one that arrives while the process ends must not change its exit."""
    for sig in _SIGNALS:
        signal.signal(sig, signal.SIG_IGN)


def _port(name: Any) -> str:
    return str(name[1]) if isinstance(name, tuple) else ""


def _threads(config: RunConfig) -> int:
    """Return the value of --threads-http; whatever it is, one event loop serves the requests."""
    given = config.server.threads_http
    return given if given > 0 else max(config.n_parallel + 2, physical_cores() - 1)


class SignalServer(uvicorn.Server):
    """A uvicorn server that drains at the first signal and stops at once at the second."""

    def __init__(self, settings: uvicorn.Config) -> None:
        super().__init__(settings)
        self._signals = 0

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on the sockets that `listen` opened."""
        await super().serve(sockets=[one for sock in sockets or () for one in sockets_of(sock)])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals from now on.

        They are not raised again afterwards: ending by a signal is the normal exit.
        """
        for sig in _SIGNALS:
            signal.signal(sig, self.handle_exit)
        yield

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Drain at the first signal, stop at once at the second."""
        self._signals += 1
        self.should_exit = True
        if self._signals > 1:
            self.force_exit = True
            for task in list(self.server_state.tasks):
                task.get_loop().call_soon_threadsafe(task.cancel)


class _Runner(SignalServer):
    """Server that starts the engine once it listens, and exits if the model cannot be loaded."""

    def __init__(self, settings: uvicorn.Config, state: ServerState, log: ServerLog) -> None:
        super().__init__(settings)
        self._state = state
        self._log = log
        self.load_failed = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then load the model."""
        await super().startup(sockets)
        self._state.engine.start()
        self._loading = asyncio.ensure_future(self._watch_loading())

    async def _watch_loading(self) -> None:
        while self._state.engine.state == "loading":
            await asyncio.sleep(0.02)
        if self._state.engine.state == "failed":
            self.load_failed = True
            self.should_exit = True
            return
        gc.collect()
        gc.freeze()  # exempt the server's long-lived objects from garbage collection
        self._log.info("main", "model loaded")
        self._log.info("main", "chat template", **self._state.chat.log_fields())
        with contextlib.suppress(IkError):  # a model without vocabulary; requests with grammars report that themselves
            await asyncio.to_thread(self._state.grammar.prepare)
