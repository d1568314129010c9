"""How a server reads requests and ends answers, byte by byte: alone, as a router, and in front of replicas."""

from __future__ import annotations

import asyncio
import json

import pytest
from proxies import (
    SERVERS,
    TEXT,
    TOKENS,
    RawAnswer,
    chunks,
    is_kept,
    post,
    post_chunked,
    reply,
    run,
    serving,
    writes,
)

from ikcli.server.http import body as body_module
from ikcli.server.http.server import settings_of
from ikcli.settings.run import RunConfig

server = pytest.mark.parametrize("kind", SERVERS)


@server
def test_trailers_are_no_headers(kind: str) -> None:
    """A key behind the body comes too late."""
    trailed = post_chunked(TEXT, path=b"/tokenize").removesuffix(b"\r\n") + b"X-Api-Key: k\r\n\r\n"

    async def work() -> None:
        async with serving(kind, api_key="k") as s, s.client() as client:
            assert (await client.ask(trailed)).status == 401 and not s.asked
            assert (await client.ask(trailed.replace(b"Host: x", b"X-Api-Key: k"))).status == 200

    run(work)


@server
def test_the_limit_of_bodies(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds for the whole body, however it is cut; the refusal comes before the rest, and connections stay."""
    monkeypatch.setattr(body_module, "MAX_BODY", 1000)
    exact = TEXT + b" " * (1000 - len(TEXT))
    pieces = [exact[i : i + 100] for i in range(0, 1000, 100)]

    def is_refused(answer: RawAnswer) -> bool:
        return answer.status == 413 and b"more than 1000 bytes" in answer.body

    async def work() -> None:
        async with serving(kind) as s, s.client() as client:
            for request in (post(exact, path=b"/tokenize"), post_chunked(*pieces, path=b"/tokenize")):
                assert (await client.ask(request)).status == 200
            assert [asked.body for asked in s.asked] == [exact] * 2 * bool(s.asked)
            over = post(exact + b" ", path=b"/tokenize")
            for request in (over, post_chunked(*pieces, b" ", path=b"/tokenize")):
                for parts in ((request,), [request[i : i + 150] for i in range(0, len(request), 150)]):
                    assert is_refused(await client.ask(*parts, method="POST"))
                    await is_kept(client)
            head, _, rest = over.partition(b"\r\n\r\n")
            for more in (b"", b"\r\nExpect: 100-continue"):
                answer = await client.ask(head + more + b"\r\n\r\n")
                assert is_refused(answer) and not answer.interim, "before any byte of the body"
                client.writer.write(rest)
                await is_kept(client)
            assert len(s.asked) == 2 * bool(s.asked)

    run(work)


@server
def test_lengths_that_are_wrong(kind: str) -> None:
    """What a length leaves out is the next request, what it lacks is waited for; two ways of framing are refused."""

    async def work() -> None:
        async with serving(kind) as s:
            async with s.client() as client:
                short = post(TEXT, path=b"/tokenize") + b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n"
                assert (await client.ask(short)).status == 200 and (await client.answer()).status == 404
            async with s.client() as client:
                client.writer.write(post(TEXT + b"x", path=b"/tokenize")[:-1])
                await asyncio.sleep(0.02)
                assert not s.asked[1:]
            before = len(s.asked)
            for head in (b"Content-Length: 5", b"Content-Length: 5, 5", b"Content-Length: -1", b"Content-Length: 0x5"):
                async with s.client() as client:
                    other = b"Content-Length: 6" if b"," not in head else b"X: y"
                    lines = b"POST /tokenize HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n" + other + b"\r\n\r\n"
                    assert (await client.ask(lines + b"{   }")).status == 400 and await client.closed()
            async with s.client() as client:
                both = post(chunks(b"{}"), b"Transfer-Encoding: chunked", path=b"/tokenize")
                assert (await client.ask(both)).status == 400 and await client.closed()
            assert len(s.asked) == before

    run(work)


@server
def test_bodies_that_do_not_come(kind: str) -> None:
    """Whoever sends none within the time is told so, as is whoever stops within one."""

    async def work() -> None:
        async with serving(kind, timeout=0.05) as s:
            for request in (post(TEXT, path=b"/tokenize")[:-1], post_chunked(TEXT, path=b"/tokenize")[:-5]):
                answer = await s.ask(request)
                assert answer.status == 408 and b"did not arrive within 0.05 seconds" in answer.body
            assert not s.asked
        async with serving(kind, timeout=0) as s, s.client() as client:
            answer = await client.ask(post(TEXT, path=b"/tokenize")[:-1], TEXT[-1:])
            assert answer.status == 200

    run(work)


@server
def test_clients_that_leave_before_the_end_of_their_request(kind: str) -> None:
    """It is their mistake, in the log alone, and no process hears of it."""

    async def work() -> None:
        async with serving(kind) as s:
            for request in (post(TEXT, path=b"/tokenize")[:-1], post_chunked(TEXT, path=b"/tokenize")[:-5]):
                async with s.client() as client:
                    client.writer.write(request)
                    await client.writer.drain()
                    await asyncio.sleep(0.01)
            while s.log.getvalue().count('path="/tokenize"') < 2:
                await asyncio.sleep(0.005)
            assert s.log.getvalue().count("status=400") == 2 and not s.asked

    run(work)


def test_web_sockets_are_not_looked_for() -> None:
    """Also where a library for them is installed, which would take their requests."""
    assert settings_of(RunConfig(), None, {}).ws == "none"


@server
def test_clients_without_chunks(kind: str) -> None:
    """HTTP/1.0: an answer of unknown length ends with its connection."""
    stream = b'{"prompt": "a", "n_predict": 2, "stream": true, "messages": []}'
    sent = b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks(b"data: 1\n\n", b"data: 2\n\n")

    async def work() -> None:
        async with serving(kind, writes(sent)) as s, s.client() as client:
            answer = await client.ask(post(stream, version=b"1.0"))
            assert answer.status == 200 and answer.all(b"connection") == [b"close"]
            assert not answer.all(b"transfer-encoding") + answer.all(b"content-length")
            assert answer.body.startswith(b"data: ") and answer.body.endswith(b"\n\n")
            async with s.client() as other:
                whole = await other.ask(post(b"{}", version=b"1.0", path=b"/nothing"))
                assert whole.status == 404 and int(whole.all(b"content-length")[0]) == len(whole.body)
                assert await other.closed()

    run(work)


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
@server
def test_other_protocols_are_not_offered(kind: str, protocol: bytes) -> None:
    """A request that would change to one is answered as any other."""
    more = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AA\r\nSec-WebSocket-Version: 13"

    async def work() -> None:
        async with serving(kind, writes(reply(json.dumps(TOKENS).encode()))) as s, s.client() as client:
            chunked = post_chunked(TEXT[:4], TEXT[4:], headers=(b"upgrade: " + protocol, more), path=b"/tokenize")
            for parts in ((chunked,), (chunked[:60], chunked[60:-9], chunked[-9:]),
                          (post(TEXT, b"Upgrade: " + protocol, more, path=b"/tokenize"),),
                          (post(TEXT, b"Upgrade: " + protocol, more, path=b"/tokenize")[:-3], TEXT[-3:])):  # fmt: skip
                answer = await client.ask(*parts)
                assert answer.status == 200 and json.loads(answer.body) == TOKENS and not answer.interim
                await is_kept(client)
            bare = b"GET /nothing HTTP/1.1\r\nHost: x\r\nUpgrade: " + protocol + b"\r\n" + more + b"\r\n\r\n"
            client.writer.write(bare + bare)
            assert [(await client.answer("GET")).status for _ in range(2)] == [404, 404]
            await is_kept(client)
            for asked in s.asked:
                assert asked.body == TEXT and not asked.all(b"upgrade") + asked.all(b"http2-settings")
            tunnel = await client.ask(b"CONNECT x:1 HTTP/1.1\r\nHost: x:1\r\n\r\n")
            assert tunnel.status == 400 and await client.closed()

    run(work)


@server
def test_addresses_with_any_bytes(kind: str) -> None:
    async def work() -> None:
        async with serving(kind) as s, s.client() as client:
            for path in (b"/nothing?a=%ff", b"/%ff", b"/%00?a&b=c"):
                answer = await client.ask(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
                assert answer.status == 404 and b"File Not Found" in answer.body, path
            assert not s.asked

    run(work)
