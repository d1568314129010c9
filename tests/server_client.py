"""Talking to the server's application in the same process, with a fake engine behind it."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
from fake_engine import FakeEngine, fake_tokenizer

from ikcli.server.http.app import build_app
from ikcli.server.http.auth import read_keys
from ikcli.server.http.logs import ServerLog
from ikcli.server.http.state import ServerState
from ikcli.settings.run import RunConfig
from ikcli.settings.server import ServerConfig


def _as_uvicorn(app: Any) -> Any:
    """Names of headers are bytes only, as they leave a socket."""

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        async def plain(message: Any) -> None:
            if "headers" in message:
                message = {**message, "headers": [(bytes(name), value) for name, value in message["headers"]]}
            await send(message)

        await app(scope, receive, plain)

    return wrapped


class Client:
    """Requests to an application; every call has an event loop of its own, as the state is made anew for it."""

    def __init__(self, *, config: RunConfig | None = None, engine: FakeEngine | None = None, **server: Any) -> None:
        self.engine = engine or FakeEngine(fake_tokenizer())
        config = config or RunConfig(command="serve")
        settings = ServerConfig(**({"alias": "m", "ui": False} | server))
        self.config = replace(config, n_parallel=self.engine.n_slots, server=settings)
        self.log = io.StringIO()

    def state(self) -> ServerState:
        log = ServerLog(verbose=self.config.verbose, out=self.log)
        return ServerState(self.config, self.engine, read_keys(self.config.server), log)

    def app(self) -> Any:
        return _as_uvicorn(build_app(self.state()))

    def __call__(self, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
        import asyncio

        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app())
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=10) as client:
                if body is not None:
                    options["json"] = body
                return await client.request(method, path, **options)

        return asyncio.run(run())

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self("GET", path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self("POST", path, body, **options)

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream; names are checked against `type` where an event has both."""
        response = self.post(path, body | {"stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream"
        return list(parse_events(response.text))


def parse_events(text: str) -> Iterator[Any]:
    """Data of server-sent events; "[DONE]" as text."""
    assert text.endswith("\n\n")
    for block in text.split("\n\n")[:-1]:
        lines = block.split("\n")
        if lines == [":"]:
            continue
        name = lines.pop(0).removeprefix("event: ") if lines[0].startswith("event: ") else ""
        assert len(lines) == 1 and lines[0].startswith("data: "), block
        data = lines[0].removeprefix("data: ")
        value = data if data == "[DONE]" else json.loads(data)
        if name:
            assert value["type"] == name
        yield value
