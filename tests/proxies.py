"""Servers with processes behind them, over real sockets: what the processes do, and what clients send, is bytes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvicorn
from fake_engine import FakeEngine, fake_tokenizer

from ikcli.server.front.models import ModelSupervisor
from ikcli.server.front.models_app import build_app as app_of_router
from ikcli.server.front.models_entries import ModelEntry, ModelsFile
from ikcli.server.front.models_state import ModelsState
from ikcli.server.front.replicas import ReplicaSupervisor
from ikcli.server.front.replicas_app import ReplicasState
from ikcli.server.front.replicas_app import build_app as app_of_replicas
from ikcli.server.front.upstream import Upstream
from ikcli.server.http.app import build_app
from ikcli.server.http.auth import read_keys
from ikcli.server.http.logs import ServerLog
from ikcli.server.http.server import listen, settings_of
from ikcli.server.http.state import ServerState
from ikcli.server.http.users import Users
from ikcli.settings.run import RunConfig
from ikcli.settings.server import ServerConfig

FRONTS = ("router", "replicas")
SERVERS = ("plain", *FRONTS)
WAIT = 60.0
TEXT = b'{"content": "Hello"}'
TOKENS = {"tokens": [259]}
Script = Callable[["Asked", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Asked:
    """A request as a process gets it; its body is `body` once it was read."""

    line: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""

    def all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]

    async def read(self, reader: asyncio.StreamReader) -> bytes:
        (length,) = self.all(b"content-length")
        self.body = await reader.readexactly(int(length))
        return self.body


def parse_head(head: bytes) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    line, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    pairs = (one.partition(b":") for one in lines)
    return line, [(name.lower(), value.strip()) for name, _, value in pairs]


def reply(body: bytes = b"ok", status: int = 200, *headers: bytes) -> bytes:
    lines = [b"HTTP/1.1 %d X" % status, *headers, b"content-length: %d" % len(body)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def chunks(*parts: bytes, trailers: bytes = b"") -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n" + trailers + b"\r\n"


async def says_ok(asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asked.read(reader)
    writer.write(reply())


class Backend(Upstream):
    """A process behind a port, for a router and for replicas: `script` answers, `asked` is what came."""

    def __init__(self, script: Script, path: Path, key: str) -> None:
        super().__init__(str(path), key)
        self.script, self.asked = script, list[Asked]()
        self.exit_code: int | None = None
        self.where = "here"
        self._ended = asyncio.Event()
        self._tasks = set[asyncio.Task[Any]]()

    async def load(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self.address))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            line, headers = parse_head(await reader.readuntil(b"\r\n\r\n"))
            if b" /health " in line:
                writer.write(reply())
            else:
                self.asked.append(Asked(line, headers))
                await self.script(self.asked[-1], reader, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the other end, or the test, is over
        finally:
            self._tasks.discard(task)
            writer.close()

    async def described(self) -> dict[str, Any]:
        return {}

    async def wait(self) -> None:
        await self._ended.wait()

    async def stop(self) -> None:
        self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)
        self._ended.set()

    def kill(self) -> None:
        self._ended.set()


class RealBackend(Backend):
    """What answers is the application of `ik serve`, with an engine that computes nothing."""

    async def load(self) -> None:
        config = RunConfig(command="serve", n_parallel=2, server=ServerConfig(alias="m", ui=False))
        state = ServerState(config, FakeEngine(fake_tokenizer()), (), ServerLog(out=io.StringIO()))
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.address))
        self._running = await _serve(config, build_app(state), listener)

    async def stop(self) -> None:
        await self._running()
        self._ended.set()


async def _serve(config: RunConfig, app: Any, listener: socket.socket) -> Callable[[], Awaitable[None]]:
    server = uvicorn.Server(settings_of(config, app, {}))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.ensure_future(server._serve([listener]))
    while not server.started:
        await asyncio.sleep(0.001)

    async def stop() -> None:
        server.should_exit = server.force_exit = True
        await task

    return stop


@dataclass
class Front:
    """A server that listens; `backend` is what it passes requests on to, if it does."""

    port: int
    log: io.StringIO
    state: Any
    backends: list[Backend] = field(default_factory=list)

    @property
    def asked(self) -> list[Asked]:
        return [asked for backend in self.backends for asked in backend.asked]

    @asynccontextmanager
    async def client(self) -> AsyncIterator[RawClient]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield RawClient(reader, writer)
        finally:
            writer.close()

    async def ask(self, *request: bytes, method: str = "") -> RawAnswer:
        """The answer to a request on a connection of its own."""
        async with self.client() as client:
            return await client.ask(*request, method=method)


@asynccontextmanager
async def serving(
    kind: str, script: Script = says_ok, *, real: bool = False, key: str = "", users: Users | None = None, **server: Any
) -> AsyncIterator[Front]:
    """A server of `SERVERS`. `key`: what its processes want; `real`: they are the application of `ik serve`."""
    log = io.StringIO()
    config = RunConfig(command="serve", n_parallel=2, server=ServerConfig(**({"alias": "m", "ui": False} | server)))
    logger, keys, users = ServerLog(out=log), read_keys(config.server), users or Users()
    make = RealBackend if real else Backend
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        backends: list[Any] = []

        def child(index: Any, n: Any) -> Any:
            backends.append(make(script, folder / f"{len(backends)}.sock", key))
            return backends[-1]

        if kind == "plain":
            state: Any = ServerState(config, FakeEngine(fake_tokenizer()), keys, logger, users)
            app = build_app(state)
        elif kind == "router":
            entries = {"m": ModelEntry("m", (), replace(config, server=ServerConfig()), {"CPU": 1})}
            supervisor = ModelSupervisor(ModelsFile(Path("f"), entries, (), {"CPU": 9}, 0), child, folder, logger)
            stack.push_async_callback(supervisor.close)
            state = ModelsState(config, supervisor, keys, logger, users)
            app = app_of_router(state)
        else:
            supervisor = ReplicaSupervisor(1, 2, child, logger, patience=5)
            work = asyncio.ensure_future(supervisor.run())
            stack.push_async_callback(supervisor.close)
            stack.callback(work.cancel)
            state = ReplicasState(config, supervisor, keys, logger, users)
            app = app_of_replicas(state)
            while not supervisor.opened:
                await asyncio.sleep(0.001)
        listener = listen("127.0.0.1", 0)
        stack.push_async_callback(await _serve(config, app, listener))
        yield Front(listener.getsockname()[1], log, state, backends)
    assert "internal error" not in log.getvalue(), log.getvalue()


@dataclass
class RawAnswer:
    """`interim`: statuses that came before that of the answer."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    interim: list[int]

    def all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]


class RawClient:
    """A connection on which any bytes can be sent, and answers are read as HTTP says they end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, *request: bytes, method: str = "") -> RawAnswer:
        """Send the parts of a request, one after the other, and read its answer."""
        for i, part in enumerate(request):
            if i:
                await asyncio.sleep(0.005)  # a segment of its own
            self.writer.write(part)
        return await self.answer(method or request[0].partition(b" ")[0].decode())

    async def head(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        line, headers = parse_head(await self.reader.readuntil(b"\r\n\r\n"))
        return int(line.split(b" ")[1]), headers

    async def answer(self, method: str = "POST") -> RawAnswer:
        interim = []
        while (found := await self.head())[0] < 200:
            interim.append(found[0])
        status, headers = found
        of = dict(headers)
        if method == "HEAD" or status in (204, 304):
            body = b""
        elif of.get(b"transfer-encoding") == b"chunked":
            body = b""
            while size := int((await self.reader.readuntil(b"\r\n")), 16):
                body += (await self.reader.readexactly(size + 2))[:-2]
            assert await self.reader.readexactly(2) == b"\r\n", "no trailers"
        elif b"content-length" in of:
            body = await self.reader.readexactly(int(of[b"content-length"]))
        else:
            body = await self.reader.read()
        return RawAnswer(status, headers, body, interim)

    async def closed(self) -> bool:
        """Whether the connection ends now, with nothing more on it."""
        return not await self.reader.read()


def post(body: bytes = b"{}", *headers: bytes, path: bytes = b"/completion", version: bytes = b"1.1") -> bytes:
    """A request with a length."""
    return _request(path, version, *headers, b"Content-Length: %d" % len(body)) + body


def post_chunked(*parts: bytes, headers: tuple[bytes, ...] = (), path: bytes = b"/completion") -> bytes:
    """The head of a request with chunks, and these."""
    return _request(path, b"1.1", *headers, b"Transfer-Encoding: chunked") + chunks(*parts)


def _request(path: bytes, version: bytes, *headers: bytes) -> bytes:
    lines = [b"POST %s HTTP/%s" % (path, version), b"Host: x", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def writes(*parts: bytes) -> Script:
    """A process that reads a request and writes these, each as a segment of its own, and closes."""

    async def script(asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked.read(reader)
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.005)

    return script


async def is_kept(client: RawClient) -> None:
    """The connection goes on, and what comes next on it is the answer to what is asked next."""
    again = await client.ask(b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n")
    assert again.status == 404 and b"File Not Found" in again.body


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run it, with a limit for what never ends."""

    async def limited() -> None:
        async with asyncio.timeout(WAIT):
            await work()

    asyncio.run(limited())
