"""What a connection leaves behind when its client is gone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import struct
import weakref
from typing import Any

import pytest
import uvicorn

from ikcli.server.http.connection import Connection


async def _app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def _serve_one(reset: bool) -> weakref.ref[Any]:
    """Answer one request on a kept-alive connection, end it, and return what is left of its protocol."""
    config = uvicorn.Config(_app, http=Connection, lifespan="off", log_config=None, port=0, timeout_keep_alive=1000)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.001)
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"ok")
    (protocol,) = server.server_state.connections
    assert protocol.timeout_keep_alive_task is not None
    found = weakref.ref(protocol)
    del protocol
    if reset:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    while server.server_state.connections:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0)
    server.should_exit = True
    await task
    return found


@pytest.mark.parametrize("reset", [False, True])
def test_a_connection_that_ended_is_forgotten(reset: bool) -> None:
    async def check() -> None:
        found = await _serve_one(reset)
        gc.collect()
        assert found() is None  # the loop, which would hold a timer, still runs

    asyncio.run(check())
