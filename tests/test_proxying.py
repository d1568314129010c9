"""What a router and replicas pass on, byte by byte: bodies, headers, interim and early answers, kept connections."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from proxies import (
    FRONTS,
    TEXT,
    TOKENS,
    Asked,
    Backend,
    chunks,
    is_kept,
    post,
    post_chunked,
    reply,
    run,
    serving,
    writes,
)

from ikcli.server.front.upstream import Exchange, UpstreamError, end_to_end

front = pytest.mark.parametrize("kind", FRONTS)


@pytest.mark.parametrize("real", [False, True])
@front
def test_expect_continue(kind: str, real: bool) -> None:
    """One interim answer, from the front itself; what comes behind it is the answer."""

    async def script(asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        writer.write(reply(json.dumps(TOKENS).encode() if await asked.read(reader) == TEXT else b"{}"))

    async def work() -> None:
        async with serving(kind, script, real=real) as s, s.client() as client:
            for expect in (b"100-continue", b"100-Continue"):
                whole = post(TEXT, b"Expect: " + expect, path=b"/tokenize")
                for parts in ((whole,), (whole.removesuffix(TEXT), TEXT[:5], TEXT[5:])):
                    answer = await client.ask(*parts)
                    assert answer.interim in ([], [100]) and (len(parts) == 1 or answer.interim == [100])
                    assert answer.status == 200 and json.loads(answer.body) == TOKENS
            whole = post_chunked(TEXT[:9], TEXT[9:], headers=(b"Expect: 100-continue",), path=b"/tokenize")
            head, _, rest = whole.partition(b"\r\n\r\n")
            client.writer.write(head + b"\r\n\r\n")
            assert await client.head() == (100, []), "before anything of the body is sent"
            answer = await client.ask(rest, method="POST")
            assert not answer.interim and json.loads(answer.body) == TOKENS
            await is_kept(client)
            assert not any(asked.all(b"expect") for asked in s.asked)

    run(work)


@pytest.mark.parametrize("split", [False, True])
@front
def test_interim_answers_are_not_the_answer(kind: str, split: bool) -> None:
    parts = [
        b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 102 Processing\r\nx-a: 1\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\ncontent-length: 5\r\n\r\n", reply(b"done", 201, b"x-b: 2"),
    ]  # fmt: skip

    async def work() -> None:
        async with serving(kind, writes(*parts) if split else writes(b"".join(parts))) as s, s.client() as client:
            for _ in range(2):
                answer = await client.ask(post())
                assert (answer.status, answer.body) == (201, b"done")
                assert answer.all(b"x-b") == [b"2"] and not answer.all(b"x-a") + answer.all(b"link")
                assert answer.all(b"content-length") == [b"4"]

    run(work)


def test_headers_of_a_connection() -> None:
    given = [
        (b"Connection", b"close, X-One ,keep-alive"), (b"connection", b"x-two"), (b"X-One", b"1"), (b"x-TWO", b"2"),
        (b"Keep-Alive", b"timeout=5"), (b"TE", b"trailers"), (b"Trailer", b"x"), (b"Transfer-Encoding", b"chunked"),
        (b"Upgrade", b"h2c"), (b"Proxy-Connection", b"close"), (b"Proxy-Authorization", b"Basic x"),
        (b"Proxy-Authenticate", b"Basic"), (b"X-Three", b"3"), (b"Accept", b"a"), (b"accept", b"b"),
    ]  # fmt: skip
    assert end_to_end(given) == [(b"x-three", b"3"), (b"accept", b"a"), (b"accept", b"b")]


@front
def test_headers_of_a_connection_stay_there(kind: str) -> None:
    answer = reply(
        b"ok", 200, b"Connection: keep-alive, X-Hop", b"X-Hop: 1", b"Keep-Alive: timeout=9", b"Upgrade: h2c",
        b"Proxy-Authenticate: Basic", b"Trailer: x", b"X-End: 2", b"Server: child", b"Date: then", b"Vary: a",
        b"Set-Cookie: a=1", b"Set-Cookie: b=2", b"Content-Type: text/x",
    )  # fmt: skip

    async def work() -> None:
        async with serving(kind, writes(answer)) as s, s.client() as client:
            found = await client.ask(
                post(
                    b"{}", b"Connection: keep-alive, X-Hop, Content-Length", b"X-Hop: 1", b"Keep-Alive: timeout=9",
                    b"TE: trailers", b"Proxy-Authorization: Basic x", b"Proxy-Connection: keep-alive", b"X-End: 2",
                    b"Cookie: a=1", b"Accept-Encoding: gzip", b"Origin: http://a.example", b"Expect: 100-continue",
                )
            )  # fmt: skip
            (asked,) = s.asked
            passed = [b"host", b"connection", b"x-end", b"cookie", b"content-length"]
            assert [name for name, _ in asked.headers] == passed
            assert asked.all(b"connection") == [b"close"] and asked.all(b"content-length") == [b"2"]
            own = {b"server", b"date", b"vary", b"access-control-allow-origin"}
            rest = [item for item in found.headers if item[0] not in own]
            assert rest == [
                (b"x-end", b"2"), (b"set-cookie", b"a=1"), (b"set-cookie", b"b=2"), (b"content-type", b"text/x"),
                (b"content-length", b"2"),
            ]  # fmt: skip
            assert found.all(b"server") == [b"ik"] and found.all(b"vary") == [b"Origin"]
            await is_kept(client)

    run(work)


CREDENTIALS = (
    b"Authorization: Bearer secret-1", b"AUTHORIZATION:bearer secret-2", b"X-Api-Key: secret-2", b"x-api-KEY:secret-1"
)  # fmt: skip


@pytest.mark.parametrize("key", ["", "inner"])
@front
def test_keys_of_clients_end_at_the_front(kind: str, key: str) -> None:
    """A process gets its own key, if it wants one; in bodies and addresses there are none."""

    path = b"/props" if kind == "router" else b"/openapi.json"

    async def work() -> None:
        async with serving(kind, key=key, api_key="secret-1,secret-2") as s, s.client() as client:
            assert (await client.ask(post())).status == 401 and not s.asked
            for line in CREDENTIALS:
                get = b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n" + line + b"\r\n\r\n"
                for request in (post(b'{"a": 1}', line), post_chunked(b'{"a"', b": 1}", headers=(line,)), get):
                    assert (await client.ask(request)).status == 200
            both = post(b"{}", b"Authorization: Bearer wrong", b"X-Api-Key: secret-2")
            assert (await client.ask(both)).status == 200
            assert len(s.asked) == 3 * len(CREDENTIALS) + 1
            for asked in s.asked:
                assert asked.all(b"authorization") == ([b"Bearer inner"] if key else []) and not asked.all(b"x-api-key")
                assert b"secret" not in asked.line + asked.body + b"".join(value for _, value in asked.headers)
            assert "secret" not in s.log.getvalue()

    run(work)


@front
def test_bodies_in_chunks(kind: str) -> None:
    """However they are cut, and whatever follows them, the process gets one body with a length."""
    data = json.dumps({"prompt": "x" * 300}).encode()
    pieces = [data[i : i + 7] for i in range(0, len(data), 7)]
    trailers = b"Authorization: Bearer t\r\nX-Trailer: 1\r\nOrigin: x\r\n"
    whole = post_chunked(*pieces)
    trailed = whole.removesuffix(b"\r\n") + trailers + b"\r\n"

    async def work() -> None:
        async with serving(kind) as s, s.client() as client:
            for request in (whole, trailed):
                for n in (len(request), 100, 33):
                    parts = [request[i : i + n] for i in range(0, len(request), n)]
                    answer = await client.ask(*parts, method="POST")
                    assert (answer.status, answer.body) == (200, b"ok")
                    asked = s.asked[-1]
                    assert asked.body == data and asked.all(b"content-length") == [b"%d" % len(data)]
                    assert [name for name, _ in asked.headers] == [b"host", b"connection", b"content-length"]
            await is_kept(client)
            assert len(s.asked) == 6

    run(work)


@pytest.mark.parametrize("closes", [False, True])
@front
def test_early_answers_of_a_process(kind: str, closes: bool) -> None:
    """It answers, and may close, before it has read a body that no buffer of a socket holds."""
    leave = asyncio.Event()

    async def script(asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(b"too large", 413, b"content-type: text/x"))
        await writer.drain()
        if not closes:
            await leave.wait()

    async def work() -> None:
        async with serving(kind, script) as s, s.client() as client:
            for _ in range(2):
                answer = await client.ask(post(b'{"a": "' + b"x" * (2 << 20) + b'"}'))
                assert (answer.status, answer.body) == (413, b"too large")
                await is_kept(client)
            leave.set()

    run(work)


@front
def test_large_bodies_pass_whole(kind: str) -> None:
    """Also to a process that takes its time."""
    data = b'{"a": "' + bytes(ord("a") + i % 26 for i in range(1 << 20)) + b'"}'

    async def script(asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.02)
        writer.write(reply(b"%d" % (await asked.read(reader) == data)))

    async def work() -> None:
        async with serving(kind, script) as s:
            assert (await s.ask(post(data))).body == b"1"

    run(work)


ANSWERS = {
    "length": (b"HTTP/1.1 200 X\r\nContent-Length: 4\r\n\r\nabcd", b"abcd"),
    "empty": (b"HTTP/1.1 200 X\r\nContent-Length: 0\r\n\r\n", b""),
    "chunks": (b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks(b"ab", b"cd"), b"abcd"),
    "no chunks": (b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks(), b""),
    "trailers": (
        b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\nTrailer: x\r\n\r\n" + chunks(b"abcd", trailers=b"x: 1\r\n"),
        b"abcd",
    ),
    "no length": (b"HTTP/1.1 200 X\r\nContent-Type: a\r\n\r\nabcd", b"abcd"),
    "no length, 1.0": (b"HTTP/1.0 200 X\r\n\r\nabcd", b"abcd"),
    "nothing at all": (b"HTTP/1.1 200 X\r\n\r\n", b""),
    "more than its length": (b"HTTP/1.1 200 X\r\nConnection: close\r\nContent-Length: 4\r\n\r\nabcdefg", b"abcd"),
    "another one behind it": (reply(b"abcd") + reply(b"efghi", 500, b"x: y"), b"abcd"),
    "no content": (b"HTTP/1.1 204 X\r\n\r\n", b""),
    "no content, a length": (b"HTTP/1.1 204 X\r\nContent-Length: 0\r\n\r\n", b""),
    "not modified": (b"HTTP/1.1 304 X\r\nContent-Length: 9\r\n\r\n", b""),
    "an error": (b"HTTP/1.1 400 X\r\nContent-Length: 4\r\n\r\nabcd", b"abcd"),
    "not now": (b"HTTP/1.1 503 X\r\nContent-Length: 4\r\n\r\nabcd", b"abcd"),
}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", ANSWERS)
@front
def test_ends_of_answers(kind: str, name: str, split: bool) -> None:
    """For clients of either version, also those who ask for the head alone; connections stay."""
    sent, body = ANSWERS[name]
    status = int(sent.split(b" ")[1])
    head, _, rest = sent.partition(b"\r\n\r\n")
    script = writes(head[:5], head[5:] + b"\r\n\r\n", rest) if split else writes(sent)

    async def work() -> None:
        async with serving(kind, script) as s:
            async with s.client() as client:
                for _ in range(2):
                    answer = await client.ask(post())
                    assert (answer.status, answer.body) == (status, body)
                    assert not answer.all(b"trailer") + answer.all(b"x")
                    framing = answer.all(b"content-length") + answer.all(b"transfer-encoding")
                    assert len(framing) == (status not in (204, 304))
                head_only = await client.ask(b"HEAD /slots/1?model=m HTTP/1.1\r\nHost: x\r\n\r\n")
                assert head_only.status == 404 and not head_only.body
                await is_kept(client)
            async with s.client() as client:
                answer = await client.ask(post(version=b"1.0"))
                assert (answer.status, answer.body) == (status, body) and not answer.all(b"transfer-encoding")
                assert await client.closed()

    run(work)


BROKEN = {
    "nothing": b"",
    "half a head": b"HTTP/1.1 200 X\r\nContent-Le",
    "half a body": b"HTTP/1.1 200 X\r\nContent-Length: 9\r\n\r\nabcd",
    "only an interim answer": b"HTTP/1.1 100 Continue\r\n\r\n",
    "no chunk": b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n",
    "another protocol": b"HTTP/1.1 101 X\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nabcd",
    "no HTTP": b"SSH-2.0-x\r\n\r\n",
}


@pytest.mark.parametrize("name", BROKEN)
@front
def test_answers_that_are_none(kind: str, name: str) -> None:
    async def work() -> None:
        async with serving(kind, writes(BROKEN[name])) as s, s.client() as client:
            answer = await client.ask(post())
            assert answer.status == 502 and b"did not answer" in answer.body
            await is_kept(client)

    run(work)


@front
def test_a_stream_that_breaks_off_has_no_end(kind: str) -> None:
    async def work() -> None:
        begun = b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n"
        async with serving(kind, writes(begun)) as s:
            for version in (b"1.1", b"1.0"):
                async with s.client() as client:
                    client.writer.write(post(version=version))
                    assert (await client.head())[0] == 200
                    assert await client.reader.read() == (b"3\r\none\r\n" if version == b"1.1" else b"one")

    run(work)


@front
def test_what_is_asked_for_passes_as_it_is(kind: str) -> None:
    """Whatever `Host` says, and with characters that a request line cannot hold."""
    paths = {
        b"/tokenize?model=m&b=%20%26": b"/tokenize?model=m&b=%20%26",
        b"/%74okenize": b"/tokenize",
    }
    if kind == "router":
        paths |= {
            b"/slots/a%20b%0d%0ax?action=%3f": b"/slots/a%20b%0D%0Ax?action=%3f",
            b"/slots/a%3Fb%23c": b"/slots/a%3Fb%23c",
            b"/slots/%C3%A9": b"/slots/%C3%A9",
        }

    async def work() -> None:
        async with serving(kind) as s, s.client() as client:
            for asked, target in paths.items():
                for host in (b"x", b"x/slots?a=", b"\xe9"):
                    answer = await client.ask(post(path=asked).replace(b"Host: x", b"Host: " + host))
                    assert answer.status == 200, answer.body
                    assert s.asked[-1].line == b"POST " + target + b" HTTP/1.1"

    run(work)


def test_a_process_waits_for_who_reads_its_answer(tmp_path: Path) -> None:
    """What was not read is a little, however much is sent."""
    size, part = 8 << 20, chunks(b"x" * (1 << 16)).removesuffix(b"0\r\n\r\n")

    async def script(asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(size >> 16):
            writer.write(part)
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    async def work() -> None:
        backend = Backend(script, tmp_path / "s", "")
        await backend.load()
        async with Exchange(backend, "POST", b"/") as answer:
            n = 0
            async for piece in answer.chunks():
                await asyncio.sleep(0.001)
                assert answer._n_waiting < 1 << 20
                n += len(piece)
            assert n == size
        await backend.stop()

    run(work)


def test_what_is_cut_has_no_end(tmp_path: Path) -> None:
    """Though only the end of the connection tells where it is."""

    async def script(asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 X\r\n\r\nabcd")
        await asked.read(reader)
        await reader.read()

    async def work() -> None:
        backend = Backend(script, tmp_path / "s", "")
        await backend.load()
        async with Exchange(backend, "POST", b"/") as answer:
            backend.cut()
            with pytest.raises(UpstreamError, match="ended within an answer"):
                await answer.body()
        assert not backend.open
        await backend.stop()

    run(work)


def test_the_head_of_an_answer_alone(tmp_path: Path) -> None:
    """Its length is that of what is not sent."""

    async def work() -> None:
        backend = Backend(writes(b"HTTP/1.1 200 X\r\nContent-Length: 9\r\n\r\n"), tmp_path / "s", "")
        await backend.load()
        async with Exchange(backend, "HEAD", b"/") as answer:
            assert answer.status == 200 and await answer.body() == b"" and answer.headers == [(b"content-length", b"9")]
        await backend.stop()

    run(work)


@front
def test_requests_in_a_row_are_answered_in_order(kind: str) -> None:
    """Sent without waiting for the answers before."""

    async def script(asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = await asked.read(reader)
        await asyncio.sleep(0.01 if b"0" in body else 0)
        writer.write(reply(body))

    async def work() -> None:
        async with serving(kind, script) as s, s.client() as client:
            client.writer.write(b"".join(post(b'{"n": %d}' % i) if i % 2 else post_chunked(b'{"n"', b": %d}" % i)
                                         for i in range(4)))  # fmt: skip
            assert [(await client.answer()).body for _ in range(4)] == [b'{"n": %d}' % i for i in range(4)]

    run(work)


@front
def test_clients_that_leave_end_what_is_sent(kind: str) -> None:
    """Also while the process has not yet taken the whole request."""
    left, received = asyncio.Event(), list[int]()

    async def script(asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await left.wait()
        received.append(len(await reader.read()))

    async def work() -> None:
        async with serving(kind, script) as s:
            async with s.client() as client:
                client.writer.write(post(b'{"a": "' + b"x" * (4 << 20) + b'"}'))
                while not s.asked:
                    await asyncio.sleep(0.005)
            while s.backends[0].open:
                await asyncio.sleep(0.005)
            left.set()
            while not received:
                await asyncio.sleep(0.005)
            assert 0 < received[0] < 4 << 20

    run(work)
