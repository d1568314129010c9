"""Many clients that leave at random points: no slot and no memory is lost; killed while saving, nothing is broken."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from live_server import WAIT, Server, wait_for

QUESTION = {"prompt": "def main(argv):\n", "n_predict": 32, "temperature": 0, "cache_prompt": False}
_CLIENTS = 12


def request_bytes(rng: random.Random) -> tuple[bytes, bool]:
    """(a random request, whether it streams)."""
    stream = rng.random() < 0.6
    body: dict[str, object] = {"stream": stream, "ignore_eos": True, "seed": rng.randrange(1000)}
    path = rng.choice(("/completion", "/v1/completions", "/v1/chat/completions"))
    n = rng.randrange(1, 40)
    if path == "/v1/chat/completions":
        body |= {"messages": [{"role": "user", "content": "list " * n}], "max_tokens": rng.randrange(1, 24)}
    else:
        body |= {"prompt": [rng.randrange(300, 2000) for _ in range(n)], "max_tokens": rng.randrange(1, 24)}
    if rng.random() < 0.1:
        body["grammar"] = 'root ::= ("a" | "b")+'
    data = json.dumps(body).encode()
    return b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(data)) + data, stream


async def one_client(port: int, rng: random.Random) -> None:
    """Send a request, perhaps not all of it, read perhaps a part of the answer, and leave, perhaps rudely."""
    data, _ = request_bytes(rng)
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        if rng.random() < 0.5:  # a reset instead of an orderly end
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        kind = rng.random()
        try:
            if kind < 0.1:
                writer.write(data[: rng.randrange(len(data))])
            elif kind < 0.5:
                writer.write(data)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(reader.read(1 << 16), rng.choice((0.001, 0.01, 0.03, 0.1)))
            elif kind < 0.7:
                writer.write(data)
                await reader.read(rng.randrange(1, 2000))
            else:
                writer.write(data.replace(b"Host: x", b"Host: x\r\nConnection: close"))
                answer = await reader.read(-1)
                assert answer.startswith(b"HTTP/1.1 200"), answer[:300]
        finally:
            writer.close()
            await writer.wait_closed()


async def crowd(port: int, n: int, seed: int) -> None:
    """n clients, some at a time."""
    todo = iter(range(n))

    async def worker() -> None:
        for i in todo:
            await one_client(port, random.Random(seed + i))

    await asyncio.gather(*(worker() for _ in range(_CLIENTS)))


def resident(server: Server) -> int:
    """KiB of memory of the server."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def n_files(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def soak(server: Server, n_warm: int, n: int, growth: float) -> None:
    fresh = server.post("/completion", QUESTION).json()["content"]
    asyncio.run(crowd(server.port, n_warm, 1_000_000))
    wait_for(lambda: server.busy() == 0)
    files, before = n_files(server), resident(server)
    asyncio.run(crowd(server.port, n, 0))
    wait_for(lambda: server.busy() == 0)
    metrics = server.get("/metrics").text
    assert "requests_processing 0" in metrics and "requests_deferred 0" in metrics
    assert server.post("/completion", QUESTION).json()["content"] == fresh
    wait_for(lambda: n_files(server) <= files)
    assert resident(server) <= before * (1 + growth), (before, resident(server))
    for slot in range(3):
        assert server.post("/completion", QUESTION | {"id_slot": slot}).json()["content"] == fresh


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    options = ("-np", "3", "--metrics", "-cram", "4", "--slot-save-path", str(tmp_path))
    found = Server(*options, log=tmp_path / "log")
    found.wait_ready()
    yield found
    assert found.stop() == 0, found.text()[-2000:]
    assert "Traceback" not in found.text() and "internal error" not in found.text()


needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")


@pytest.mark.slow  # starts a server of its own
@needs_proc
def test_departing_clients_leave_nothing_behind(server: Server) -> None:
    soak(server, 100, 200, 0.10)  # allocators have not settled after so few requests


@needs_proc
@pytest.mark.slow
def test_ten_thousand_departing_clients_leave_nothing_behind(server: Server) -> None:
    soak(server, 2500, 10_000, 0.02)


@pytest.mark.slow  # kills servers of its own
def test_killed_while_saving_leaves_the_old_file(tmp_path: Path) -> None:
    folder = tmp_path / "slots"
    folder.mkdir()
    options = ("-c", "4096", "--slot-save-path", str(folder))
    path = folder / "a.bin"
    old = b""
    for attempt in range(2):
        server = Server(*options, log=tmp_path / f"log{attempt}")
        server.wait_ready()
        if attempt:
            restored = server.post("/slots/0?action=restore", {"filename": "a.bin"})
            assert restored.status_code == 200, restored.text
            assert restored.json()["n_restored"] >= 10
        else:
            server.post("/completion", {"prompt": [400] * 10, "n_predict": 1})
            assert server.post("/slots/0?action=save", {"filename": "a.bin"}).status_code == 200
            old = path.read_bytes()
        server.post("/completion", {"prompt": [300 + attempt] * 1900, "n_predict": 1})
        present = set(folder.iterdir())
        thread = threading.Thread(target=_save, args=(server,))
        thread.start()
        end = time.monotonic() + WAIT
        while not set(folder.iterdir()) - present and thread.is_alive():
            assert time.monotonic() < end
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(WAIT)
        thread.join()
        left = set(folder.iterdir()) - {path}
        if left:  # it had not been renamed
            assert path.read_bytes() == old
        old = path.read_bytes()
        for other in left:
            other.unlink()


def _save(server: Server) -> None:
    with contextlib.suppress(httpx.HTTPError):
        server.post("/slots/0?action=save", {"filename": "a.bin"})
