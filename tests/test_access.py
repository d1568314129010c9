"""Who may ask a server, alone or in front of others: keys, users, what is open to everybody, and what is counted."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from proxies import FRONTS, SERVERS, Asked, Front, RawAnswer, post, reply, run, serving
from starlette.datastructures import Headers

from ikcli.cli.parser import parse
from ikcli.errors import UsageError
from ikcli.server.front import ray_node as node
from ikcli.server.front.child import Child
from ikcli.server.front.environment import OF_THE_FRONT
from ikcli.server.front.models_entries import ModelEntry
from ikcli.server.front.models_server import child_of
from ikcli.server.front.placement import LaunchSpec, LocalPlacement
from ikcli.server.front.ray_node import ReplicaLaunch
from ikcli.server.http import auth
from ikcli.server.http.users import User, Users
from ikcli.settings.run import RunConfig
from ikcli.settings.server import ServerConfig

front = pytest.mark.parametrize("kind", FRONTS)
server = pytest.mark.parametrize("kind", SERVERS)
OPEN = ("/health", "/v1/health", "/models", "/v1/models", "/api/tags", "/", "/index.html", "/favicon.ico")
CLOSED = ("/props", "/slots", "/metrics", "/nothing", "/health/", "/v1", "/models/load", "/replicas", "//health")


def get(path: str, *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


async def says_json(asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A process that knows what each request took; of `error` in a body it makes one, and `wait` it never answers."""
    body = await asked.read(reader)
    if asked.line.startswith(b"GET /usage?id="):
        writer.write(reply(b'{"prompt_tokens": 7, "completion_tokens": 3}'))
    elif b"wait" in body:
        await asyncio.Event().wait()
    else:
        writer.write(reply(b"{}", 400 if b"error" in body else 200))


def user(name: str, **limits: Any) -> User:
    return User(name, hashlib.sha256(f"{name}-key".encode()).digest(), **limits)


def bearer(name: str) -> bytes:
    return f"Authorization: Bearer {name}-key".encode()


def is_refused(answer: RawAnswer) -> bool:
    """Status, kind and message of a missing key."""
    error = json.loads(answer.body)["error"]
    if isinstance(error, dict):  # else in Ollama's style
        assert (error["code"], error["type"]) == (401, "authentication_error")
        error = error["message"]
    return answer.status == 401 and error == "Invalid API Key"


# --- keys -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("line", "file", "expected"),
    [
        (["--api-key", "a"], None, ("a",)),
        (["--api-key", "a,b, c ,"], None, ("a", "b", "c")),
        (["--api-key", "a", "--api-key", "b"], None, ("a", "b")),
        (["--api-key=a,b", "--api-key=c", "--api-key=a"], None, ("a", "b", "c")),
        ([], "f\n", ("f",)),
        ([], "# ours\nf\n\n g h \n#x\n", ("f", "g h")),
        (["--api-key", "a,b"], "f\na\r\ng", ("a", "b", "f", "g")),
        ([], None, ()),
        (["--api-key", ","], None, ()),
    ],
)
def test_which_keys_there_are(tmp_path: Path, line: list[str], file: str | None, expected: tuple[str, ...]) -> None:
    path = tmp_path / "keys"
    if file is not None:
        path.write_bytes(file.encode())
        line = [*line, "--api-key-file", str(path)]
    assert auth.read_keys(parse("serve", line).config.server) == expected


def test_keys_of_a_variable_are_those_of_the_line_if_it_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_API_KEY", "v,w")
    assert auth.read_keys(parse("serve", []).config.server) == ("v", "w")
    assert auth.read_keys(parse("serve", ["--api-key", "a", "--api-key", "b"]).config.server) == ("a", "b")
    chat = parse("chat", ["--url", "http://x", "--api-key", "a", "--api-key", "b"]).config
    assert chat.server.api_key == "b", "a client has one"


def test_key_files_without_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    for text in ("", "\n \n", "# only this\n"):
        path.write_text(text)
        with pytest.raises(UsageError, match=f"{path} holds no API key"):
            auth.read_keys(ServerConfig(api_key="a", api_key_file=path))
    path.write_bytes(b"\xff\n")
    for wrong in (path, tmp_path, tmp_path / "absent"):
        with pytest.raises(UsageError, match=f"--api-key-file: .*{wrong}"):
            auth.read_keys(ServerConfig(api_key_file=wrong))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("authorization", "Bearer first", True),
        ("authorization", "bearer second", True),
        ("authorization", "BEARER  third ", True),
        ("x-api-key", "first", True),
        ("x-api-key", "second", True),
        ("x-api-key", "third", True),
        ("authorization", "first", False),
        ("authorization", "Basic first", False),
        ("authorization", "Bearerfirst", False),
        ("authorization", "Bearer", False),
        ("authorization", "Bearer firs", False),
        ("authorization", "Bearer firstt", False),
        ("authorization", "Bearer First", False),
        ("authorization", "Bearer first,second", False),
        ("x-api-key", "", False),
        ("x-api-key", "Bearer first", False),
        ("x-api-key", "\xe9", False),
        ("api-key", "first", False),
    ],
)
def test_what_carries_a_key(name: str, value: str, expected: bool) -> None:
    """Every key counts, the first as well as the last."""
    keys = ("first", "second", "third")
    assert auth.allowed(keys, Headers({name: value})) is expected
    wrong = Headers({name: value, "x-api-key" if name == "authorization" else "authorization": "Bearer wrong"})
    assert auth.allowed(keys, wrong) is expected
    assert auth.allowed((), Headers({name: value}))


def test_no_key_is_in_the_log() -> None:
    assert auth.key_summary(("12345678",)) == "api_key: ****"
    assert auth.key_summary(("123456789",)) == "api_key: ****6789"
    assert auth.key_summary(("a", "b")) == "api_key: 2 keys loaded"


@server
def test_what_is_open(kind: str) -> None:
    """To everybody: whether it is there, what it serves, the page. Only to look, and nothing that changes a thing."""

    async def work() -> None:
        async with serving(kind, says_json, api_key="a-key", metrics=True) as s, s.client() as client:
            for path in OPEN:
                for method in ("GET", "HEAD"):
                    answer = await client.ask(get(path, method=method))
                    assert answer.status in (200, 404) and (answer.status == 200) is (path in OPEN[:5]), path
                assert is_refused(await client.ask(get(path, method="POST"))), path
            for path in (*CLOSED, "/models?reload=1", "/models?a=b&reload=0", "/health?x&reload"):
                assert is_refused(await client.ask(get(path))), path
            options = await client.ask(get("/props", "Origin: http://a", method="OPTIONS"))
            assert options.status == 200 and options.all(b"access-control-allow-origin") == [b"http://a"]
            asked = {one.line for one in s.asked}
            assert asked <= {b"GET %s HTTP/1.1" % path.encode() for path in OPEN[2:5]}, "of the list of models alone"
            for path in CLOSED:
                assert (await client.ask(get(path, "X-Api-Key: a-key"))).status != 401, path

    run(work)


@server
def test_every_key_lets_in(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("c-key\n# no-key\nd-key\n")

    async def work() -> None:
        async with serving(kind, says_json, api_key="a-key,b-key", api_key_file=file) as s, s.client() as client:
            names = ("a", "b", "c", "d", "no", "# no", "a-key,b")
            for i, name in enumerate(names):
                for header in (bearer(name), f"X-Api-Key: {name}-key".encode()):
                    answer = await client.ask(post(b'{"content": "Hello"}', header, path=b"/tokenize"))
                    assert answer.status == (200 if i < 4 else 401), header
            assert "-key" not in s.log.getvalue()

    run(work)


# --- users ------------------------------------------------------------------------------------------------------------
@server
def test_users_and_keys_beside_them(kind: str) -> None:
    """Limits are those of requests, not of questions; a key that is no user's has none."""
    anna = user("anna", requests_per_minute=2)
    cleo = user("cleo", models=("other",))
    body = b'{"content": "Hello"}'

    async def work() -> None:
        users = Users([anna, cleo])
        async with serving(kind, says_json, users=users, api_key="old-key") as s, s.client() as client:
            assert is_refused(await client.ask(post(body, path=b"/tokenize")))
            assert is_refused(await client.ask(post(body, bearer("x"), path=b"/tokenize")))
            for status in (200, 200, 429, 429):
                answer = await client.ask(post(body, bearer("anna"), path=b"/tokenize"))
                assert answer.status == status
            assert 1 <= int(answer.all(b"retry-after")[0]) <= 60 and b"rate_limit_error" in answer.body
            assert (await client.ask(get("/version", bearer("anna").decode()))).status == 200
            assert users.accounts[0].n_requests == 2 and users.accounts[0].n_refused == 2
            for path in (b"/tokenize", b"/api/show"):
                refused = await client.ask(post(body, bearer("cleo"), path=path))
                assert refused.status == 403 and b"may not use the model m, only other" in refused.body
            for _ in range(3):
                assert (await client.ask(post(body, b"X-Api-Key: old-key", path=b"/tokenize"))).status == 200
            assert users.accounts[0].n_running == 0 and 'user="anna"' in s.log.getvalue()

    run(work)


def _use(users: Users) -> tuple[int, int]:
    return users.accounts[0].n_prompt, users.accounts[0].n_predicted


@front
def test_tokens_are_counted_in_front(kind: str) -> None:
    """The process is asked what a request took, by a name that no client knows; only of answers, and of users."""

    async def work() -> None:
        users = Users([user("anna", tokens_per_day=15)])
        async with serving(kind, says_json, users=users, api_key="old-key") as s, s.client() as client:
            name = b"X-Ik-Request: forged"
            assert (await client.ask(post(b"{}", bearer("old"), name))).status == 200
            assert [asked.line for asked in s.asked] == [b"POST /completion HTTP/1.1"] and _use(users) == (0, 0)
            names = {header for asked in s.asked for header, _ in asked.headers}
            assert (await client.ask(post(b'{"a": "error"}', bearer("anna")))).status == 400 and _use(users) == (0, 0)
            ids = []
            for n in (1, 2):
                assert (await client.ask(post(b"{}", bearer("anna")))).status == 200
                assert _use(users) == (7 * n, 3 * n)
                asked, usage = s.asked[-2:]
                (added,) = [item for item in asked.headers if item[0] not in names]
                assert usage.line == b"GET /usage?id=" + added[1] + b" HTTP/1.1"
                ids.append(added[1])
            assert len(set(ids)) == 2
            assert (await client.ask(post(b"{}", bearer("anna")))).status == 429
            assert (await client.ask(get("/openapi.json", bearer("anna").decode()))).status in (200, 404)
            assert _use(users) == (14, 6)

    run(work)


@pytest.mark.parametrize("when", ["running", "counting"])
@front
def test_what_nobody_waits_for_is_counted(kind: str, when: str) -> None:
    """The process is asked until it knows; a client that leaves while it is asked changes nothing."""
    left, n_usage = asyncio.Event(), 0

    async def script(asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal n_usage
        await asked.read(reader)
        if asked.line.startswith(b"GET /usage?id="):
            n_usage += 1
            if when == "counting":
                await left.wait()
            known = when == "counting" or n_usage > 2
            writer.write(reply(b'{"prompt_tokens": 7, "completion_tokens": 3}', 200 if known else 404))
        elif when == "counting":
            writer.write(reply())
        else:
            writer.write(b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
            await writer.drain()
            assert not await reader.read(), "until the client has left"

    async def work() -> None:
        users = Users([user("anna")])
        async with serving(kind, script, users=users) as s:
            async with s.client() as client:
                client.writer.write(post(b"{}", bearer("anna")))
                if when == "running":
                    assert (await client.head())[0] == 200
                else:
                    while not n_usage:
                        await asyncio.sleep(0.005)
            await asyncio.sleep(0.02)
            left.set()
            while users.accounts[0].n_running:
                await asyncio.sleep(0.005)
            assert _use(users) == (7, 3) and n_usage == (1 if when == "counting" else 3)

    run(work)


@front
def test_requests_that_run_are_limited(kind: str) -> None:
    """Also those whose client has left by now, until they have ended."""

    async def work() -> None:
        users = Users([user("anna", max_concurrent=1)])
        async with serving(kind, says_json, users=users) as s, s.client() as other:
            async with s.client() as client:
                client.writer.write(post(b'{"a": "wait"}', bearer("anna")))
                while not s.asked:
                    await asyncio.sleep(0.005)
                assert (await other.ask(post(b"{}", bearer("anna")))).status == 429
            while users.accounts[0].n_running:
                await asyncio.sleep(0.005)
            assert (await other.ask(post(b"{}", bearer("anna")))).status == 200

    run(work)


# --- what processes are started with ----------------------------------------------------------------------------------
SECRETS = {
    "LLAMA_API_KEY": "secret", "LLAMA_ARG_API_KEY_FILE": "/secret", "LLAMA_ARG_SSL_KEY_FILE": "/secret",
    "LLAMA_ARG_SSL_CERT_FILE": "/secret", "LLAMA_ARG_API_PREFIX": "/secret", "LLAMA_ARG_HOST": "secret",
    "LLAMA_ARG_STATIC_PATH": "/secret", "LLAMA_ARG_PORT": "1", "LLAMA_ARG_CORS_ORIGINS": "secret",
}  # fmt: skip


def _of_router(config: RunConfig, tmp_path: Path) -> Any:
    return child_of(config, ModelEntry("m", ("--ctx-size=256",), config, {"CPU": 1}), tmp_path / "s")


def _of_replicas(config: RunConfig, tmp_path: Path) -> Any:
    placement = LocalPlacement(LaunchSpec(config, ("--ctx-size=256",)))
    placement.open()
    child = placement.make(0, 0)
    placement.close()
    return child


def _of_a_node(config: RunConfig, tmp_path: Path) -> Any:
    return ReplicaLaunch("replica 0", ("--ctx-size=256",), (), "inner", 5, True, False).child(lambda line, error: None)


@pytest.mark.parametrize("make", [_of_router, _of_replicas, _of_a_node])
def test_processes_are_not_told_what_is_about_the_port(
    make: Callable[[RunConfig, Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by options nor by variables: with a key they would refuse what the front passes on."""
    for name, text in (SECRETS | {"LLAMA_ARG_MODELS_DIR": "/secret", "OTHER": "kept"}).items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(node, "this_address", lambda: "127.0.0.1")
    config = parse("serve", ["--api-key", "secret", "--keys", "/secret", "--replicas", "2"]).config
    child = make(config, tmp_path)
    assert not any("secret" in word for word in child._argv)
    environment = child._environment
    assert environment["OTHER"] == "kept" and environment["PATH"]
    assert not SECRETS.keys() & environment.keys() and "LLAMA_ARG_MODELS_DIR" not in environment


def test_what_the_front_does_is_switched_off_behind_it(tmp_path: Path) -> None:
    line = ["--log-format", "json", "--timeout", "7", "--shutdown-timeout", "3", "--replicas", "2"]
    config = parse("serve", line).config
    for child in (_of_router(config, tmp_path), _of_replicas(config, tmp_path)):
        behind = parse("serve", child._argv[4:]).config
        assert behind.n_ctx == 256 and behind.server.metrics and not behind.server.ui
        server = behind.server
        assert (server.log_format, server.timeout, server.shutdown_timeout) == ("json", 7, 3)
        assert not server.api_key and server.keys is None and server.api_key_file is None
        assert child._prefix == "" and child._grace == 3.0


def test_the_key_of_a_process_is_in_a_file_while_it_starts(tmp_path: Path) -> None:
    """Arguments can be read by everybody on the machine, its folder by its user alone."""
    with contextlib.ExitStack() as stack:
        option, path = Child("r", (), "127.0.0.1", grace=5, prefix=True, key="inner")._key_options(stack)
        assert option == "--api-key-file" and Path(path).read_text("utf-8") == "inner"
        assert Path(path).parent.stat().st_mode & 0o077 == 0
        assert Child("r", (), "127.0.0.1", grace=5, prefix=True)._key_options(stack) == []
    assert not Path(path).exists()


def test_variables_of_models_reach_the_processes_of_a_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read them as the front did; replicas get them as options instead."""
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "512")
    config = replace(RunConfig(command="serve"), server=ServerConfig(replicas=2))
    assert _of_router(config, tmp_path)._environment["LLAMA_ARG_CTX_SIZE"] == "512"
    assert "LLAMA_ARG_CTX_SIZE" not in _of_replicas(config, tmp_path)._environment
    assert "server.api_key" in OF_THE_FRONT and "n_ctx" not in OF_THE_FRONT


@front
def test_a_front_that_is_asked_by_many_tells_them_apart(kind: str) -> None:
    """Requests of users that run at the same time are counted for each."""

    async def work() -> None:
        users = Users([user("anna"), user("ben")])
        async with serving(kind, says_json, users=users) as s:

            async def ask(front: Front, name: str) -> None:
                assert (await front.ask(post(b"{}", bearer(name)))).status == 200

            await asyncio.gather(*(ask(s, name) for name in ("anna", "ben", "anna")))
            assert [(one.n_requests, one.n_prompt) for one in users.accounts] == [(2, 14), (1, 7)]

    run(work)
