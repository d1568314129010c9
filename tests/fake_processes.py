"""Stand-ins for processes behind a front: of models and of replicas, a front over these, and clients that read."""

from __future__ import annotations

import asyncio
import io
import json
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from ikcli.server.front.models_entries import ModelEntry
from ikcli.server.front.process import LoadError
from ikcli.server.front.replicas import ReplicaSupervisor
from ikcli.server.front.replicas_app import ReplicasState, build_app
from ikcli.server.front.upstream import Upstream
from ikcli.server.http.logs import ServerLog
from ikcli.settings.run import RunConfig
from ikcli.settings.server import ServerConfig

Handler = Callable[["FakeProcess", str, str, bytes, asyncio.StreamWriter], Awaitable[None]]


def head(status: int = 200, n: int | None = None) -> bytes:
    length = b"transfer-encoding: chunked" if n is None else b"content-length: %d" % n
    return b"HTTP/1.1 %d X\r\ncontent-type: text/plain\r\n%s\r\n\r\n" % (status, length)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def whole(writer: asyncio.StreamWriter, value: Any, status: int = 200) -> None:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    writer.write(head(status, len(data)) + data)
    await writer.drain()


class FakeChild:
    """The process of a model, without a server; `broken`: the names of models that cannot be loaded."""

    broken: frozenset[str] = frozenset()

    def __init__(self, entry: ModelEntry, journal: list[str]) -> None:
        self.name, self.journal = entry.name, journal
        self.exit_code: int | None = None
        self.socket = ""
        self._ended = asyncio.Event()

    async def load(self) -> None:
        self.journal.append(f"+{self.name}")
        await asyncio.sleep(0.01)
        if self.name in self.broken:
            self.exit_code = 1
            raise LoadError("the file is broken")

    async def wait(self) -> None:
        await self._ended.wait()

    async def stop(self) -> None:
        self.journal.append(f"-{self.name}")
        self.exit_code = 0
        self._ended.set()

    def kill(self) -> None:
        self.die()

    def die(self) -> None:
        self.exit_code = -9
        self._ended.set()

    def last_words(self) -> str:
        return "its process ended by signal SIGKILL"

    async def described(self) -> dict[str, Any]:
        return {"model": {"meta": {"name": self.name}}}

    async def answer(self, target: bytes) -> tuple[int, bytes]:
        return 200, b'{"is_sleeping": false}'


class FakeProcess(Upstream):
    """A server on a Unix socket that answers by a handler; `asked` are its requests, without checks."""

    def __init__(self, index: int, n: int, folder: str, bench: Bench) -> None:
        super().__init__(os.path.join(folder, f"{index}-{n}.sock"))
        self.index, self.bench = index, bench
        self.asked: list[tuple[str, bytes]] = []
        self.healthy_now = True
        self.gone: list[bytes] = []
        self._ended = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._heads: dict[asyncio.StreamWriter, str] = {}

    @property
    def where(self) -> str:
        return f"fake {self.index}"

    def header(self, writer: asyncio.StreamWriter, name: str) -> str:
        """A header of the request that is answered there."""
        return self._heads[writer].lower().partition(f"\r\n{name}: ")[2].partition("\r\n")[0]

    async def load(self) -> None:
        self.bench.journal.append(f"+{self.index}")
        await asyncio.sleep(0)
        if self.index in self.bench.broken:
            raise LoadError("the file is broken")
        self._server = await asyncio.start_unix_server(self._serve, str(self.address))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            request = await reader.readuntil(b"\r\n\r\n")
            text = request.decode()
            method, path, _ = text.split(" ", 2)
            length = int(request.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            body = await reader.readexactly(length)
            if path == "/health":
                if self.healthy_now:
                    await whole(writer, {})
                return
            self.asked.append((f"{method} {path}", body))
            self._heads[writer] = text
            work = asyncio.ensure_future(self.bench.handler(self, method, path, body, writer))
            left = asyncio.ensure_future(reader.read())
            await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.gone.append(body)
                work.cancel()
            left.cancel()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def wait(self) -> None:
        await self._ended.wait()

    async def stop(self) -> None:
        self.bench.journal.append(f"-{self.index}")
        self.kill()

    def kill(self) -> None:
        if hasattr(self, "_server"):
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        self._ended.set()

    def last_words(self) -> str:
        return "it was killed"


async def says_who(process: FakeProcess, method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
    await whole(writer, {"replica": process.index})


class Bench:
    """A front with fake replicas of two slots each, for which `handler` answers, or with those of `placement`."""

    def __init__(
        self,
        n: int = 2,
        handler: Handler = says_who,
        broken: tuple[int, ...] = (),
        placement: Any = None,
        **server: Any,
    ) -> None:
        self.handler, self.broken, self.journal = handler, set(broken), list[str]()
        self._folder = ""  # of sockets, while it runs
        self.log = io.StringIO()
        config = RunConfig(command="serve", n_parallel=2, server=ServerConfig(**({"alias": "m"} | server)))
        log = ServerLog(out=self.log)
        make, more = (placement.make, {"renew": placement.renew}) if placement else (self._make, {})
        self.supervisor = ReplicaSupervisor(n, 2, make, log, patience=float(config.server.timeout), **more)
        keys = ("admin",) if server.get("api_key") else ()
        self.state = ReplicasState(config, self.supervisor, keys, log)
        self.app = build_app(self.state)

    def _make(self, index: int, n: int) -> FakeProcess:
        return FakeProcess(index, n, self._folder, self)

    def process(self, index: int) -> FakeProcess:
        found = self.supervisor.replicas[index].process
        assert isinstance(found, FakeProcess)
        return found

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Bench]:
        with tempfile.TemporaryDirectory() as self._folder:
            task = asyncio.ensure_future(self.supervisor.run())
            try:
                await self.until(lambda: all(one.usable or one.n_ended for one in self.supervisor.replicas))
                yield self
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await self.supervisor.close()
        assert "internal error" not in self.log.getvalue(), self.log.getvalue()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.005)

    async def ask(self, path: str, body: Any = None, **options: Any) -> Answer:
        answer = Answer(self.app, path, body, **options)
        await answer.work
        return answer

    async def who(self, path: str, body: Any) -> int:
        found = await self.ask(path, body)
        assert found.status == 200, found.body
        return int(found.json()["replica"])


class Answer:
    """A request to the application: `sent` are the messages of the answer as they come; `leave` ends the client."""

    def __init__(self, app: Any, path: str, body: Any = None, key: str = "") -> None:
        data = b"" if body is None else json.dumps(body).encode()
        path, _, query = path.partition("?")
        headers = [(b"content-length", b"%d" % len(data)), (b"authorization", b"Bearer " + key.encode())]
        scope = {
            "type": "http", "method": "GET" if body is None else "POST", "path": path, "raw_path": path.encode(),
            "query_string": query.encode(), "headers": headers, "client": ("c", 1), "http_version": "1.1",
            "scheme": "http", "server": ("s", 1), "root_path": "",
        }  # fmt: skip
        self.sent: list[dict[str, Any]] = []
        self._left = asyncio.Event()
        self._incoming = [{"type": "http.request", "body": data, "more_body": False}]
        self.work = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._incoming:
            return self._incoming.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def leave(self) -> None:
        self._left.set()

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def pieces(self) -> list[bytes]:
        return [message["body"] for message in self.sent[1:] if message["body"]]

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def ended(self) -> bool:
        return bool(self.sent) and self.sent[-1].get("more_body") is False

    def json(self) -> Any:
        return json.loads(self.body)


def chat(text: str, *more: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, *({"role": "assistant", "content": t} for t in more)]}
