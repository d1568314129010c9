"""A replica without a model: a process that is started like `ik serve` and says which one answered.

Bodies choose: `wait` never ends, `stream` begins and never ends, `die` ends the process without an answer.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path


def option(name: str) -> str:
    words = sys.argv
    joined = [word.partition("=")[2] for word in words if word.startswith(f"{name}=")]
    return joined[-1] if joined else words[words.index(name) + 1]


KEY = Path(option("--api-key-file")).read_text("utf-8")
FIRST = option("--first-slot")
MODEL = Path(option("--model")).read_text("utf-8")
N = 0


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    global N
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    body = await reader.readexactly(int(head.lower().partition("content-length: ")[2].partition("\r\n")[0]))
    status, answer = 200, f'{{"first": {FIRST}, "pid": {os.getpid()}, "model": "{MODEL}"}}'.encode()
    if head.split()[1] == "/health":
        status = 200
    elif f"authorization: Bearer {KEY}\r\n" not in head:
        status = 401
    elif head.split()[1] == "/metrics":
        answer = b"# TYPE llamacpp:n_asked_total counter\nllamacpp:n_asked_total %d\n" % N
    elif b"die" in body:
        os._exit(7)
    else:
        N += 1
        print("asked", file=sys.stderr, flush=True)
    if b"wait" in body:
        await asyncio.Event().wait()
    if b"stream" in body:
        writer.write(b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n")
        await writer.drain()
        await asyncio.Event().wait()
    writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(answer)) + answer)
    await writer.drain()
    writer.close()


async def main() -> None:
    print("begins", flush=True)
    listener = socket.socket(fileno=int(option("--host").removeprefix("fd:")))
    async with await asyncio.start_server(serve, sock=listener) as server:
        await server.serve_forever()


if MODEL == "broken":
    sys.exit("error: the model is broken")
asyncio.run(main())
