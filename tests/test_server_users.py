"""Users with keys and limits: the file, who is let in, what is counted, and what is answered beyond a limit."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, Script, fake_tokenizer
from proxies import run
from server_client import Client

from ikcli.errors import UsageError
from ikcli.server.http.errors import ApiError
from ikcli.server.http.state import ServerState
from ikcli.server.http.users import Account, User, Users, read_users

HI = [{"role": "user", "content": "hi"}]
FILE = f"""
[anna]
key = "a-key"
requests-per-minute = 2
[ben]
sha256 = "{hashlib.sha256(b"b-key").hexdigest()}"
tokens_per_day = 60
models = ["m"]
[cleo]
key = "c-key"
models = ["other"]
max-concurrent = 1
"""


class Shared(Client):
    """A client whose requests all go to one state, as its counters live there."""

    def __init__(self, users: Users, **server: Any) -> None:
        super().__init__(metrics=True, **server)
        self.users = users

    def state(self) -> ServerState:
        state = super().state()
        state.users = self.users
        return state


def write(folder: Path, text: str = FILE) -> Path:
    path = folder / "keys.toml"
    path.write_text(text, encoding="utf-8")
    return path


def bearer(key: str) -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {key}"}}


def test_the_file(tmp_path: Path) -> None:
    anna, ben, cleo = (account.user for account in read_users(write(tmp_path)).accounts)
    assert anna == User("anna", hashlib.sha256(b"a-key").digest(), requests_per_minute=2)
    assert (ben.tokens_per_day, ben.models, cleo.max_concurrent) == (60, ("m",), 1)
    assert not read_users(None)


def test_files_that_others_can_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path)
    path.chmod(0o600)
    read_users(path)
    assert not capsys.readouterr().err
    path.chmod(0o644)
    read_users(path)
    assert f"{path} holds keys" in capsys.readouterr().err
    read_users(write(tmp_path, f"[a]\nsha256 = '{'0' * 64}'"))
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("", "names no user"),
        ("[a", "is not valid TOML"),
        ("a = 5", "a must be a table"),
        ("[a]", "a needs either key or sha256"),
        ("[a]\nkey = 'k'\nsha256 = 'x'", "a needs either key or sha256"),
        ("[a]\nkey = ''", "a.key must be a text"),
        ("[a]\nkey = 5", "a.key must be a text"),
        ("[a]\nsha256 = 'abc'", "a.sha256 must have 64"),
        ("[a]\nkey = 'k'\nrequests-per-minute = 0", "a.requests-per-minute must be a whole number"),
        ("[a]\nkey = 'k'\ntokens-per-day = 1.5", "a.tokens-per-day must be a whole number"),
        ("[a]\nkey = 'k'\nmax-concurrent = true", "a.max-concurrent must be a whole number"),
        ("[a]\nkey = 'k'\nmodels = 'm'", "a.models must be a list"),
        ("[a]\nkey = 'k'\nlimit = 5", "unknown key a.limit"),
        ("[a]\nkey = 'k'\n[b]\nkey = 'k'", "b has the same key as a"),
    ],
)
def test_mistakes_of_the_file_are_named(tmp_path: Path, text: str, key: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UsageError) as found:
        read_users(path)
    assert key in str(found.value) and str(path) in str(found.value)
    with pytest.raises(UsageError, match="cannot read"):
        read_users(tmp_path / "absent.toml")


def test_too_many_requests_in_the_style_of_every_api(tmp_path: Path) -> None:
    client = Shared(read_users(write(tmp_path)))
    for _ in range(2):
        assert client.post("/tokenize", {"content": "a"}, **bearer("a-key")).status_code == 200
    openai = client.post("/v1/chat/completions", {"messages": HI}, **bearer("a-key"))
    assert openai.status_code == 429 and 1 <= int(openai.headers["retry-after"]) <= 60
    assert openai.json()["error"]["type"] == "rate_limit_error" and "anna" in openai.json()["error"]["message"]
    anthropic = client.post("/v1/messages", {"messages": HI}, **bearer("a-key"))
    assert anthropic.status_code == 429 and anthropic.json()["type"] == "error"
    ollama = client.post("/api/chat", {"model": "m"}, **bearer("a-key"))
    assert ollama.status_code == 429 and isinstance(ollama.json()["error"], str)
    assert client.get("/props", **bearer("a-key")).status_code == 200


def test_tokens_are_counted_and_limited(tmp_path: Path) -> None:
    client = Shared(read_users(write(tmp_path)))
    body = {"prompt": "hi", "n_predict": 3, "stream": True}
    assert client.post("/completion", body, **bearer("b-key")).status_code == 200
    ben = client.users.accounts[1]
    n_prompt = len(client.engine.requests[-1].prompt)
    assert (ben.n_prompt, ben.n_predicted, ben.n_running, ben.n_requests) == (n_prompt, 3, 0, 1)
    while ben.tokens_today() < 60:
        assert client.post("/completion", body | {"stream": False}, **bearer("b-key")).status_code == 200
    refused = client.post("/completion", body, **bearer("b-key"))
    assert refused.status_code == 429 and 0 < int(refused.headers["retry-after"]) <= 86400
    text = client.get("/metrics", **bearer("a-key")).text
    assert f'llamacpp:user_tokens_predicted_total{{user="ben"}} {float(ben.n_predicted)}' in text
    assert 'llamacpp:user_requests_refused_total{user="ben"} 1.0' in text and "key" not in text.replace("# ", "")
    assert '"ben"' in client.log.getvalue() and "b-key" not in client.log.getvalue()


EMBEDDINGS = [
    ("/v1/embeddings", {"input": ["ab", [7, 8, 9]]}, "last"),
    ("/embedding", {"content": [7, 8, 9]}, "last"),
    ("/api/embed", {"model": "m", "input": ["ab", "abc"]}, "last"),
    ("/api/embeddings", {"model": "m", "prompt": "ab"}, "last"),
    ("/rerank", {"query": "q", "documents": ["ab", "c"]}, "rank"),
]


@pytest.mark.parametrize(("path", "body", "pooling"), EMBEDDINGS)
def test_tokens_of_embeddings_are_counted_and_limited(
    tmp_path: Path, path: str, body: dict[str, Any], pooling: str
) -> None:
    client = Shared(read_users(write(tmp_path)), engine=FakeEngine(fake_tokenizer(add_eos_token=True)))
    client.engine.model = replace(client.engine.model, pooling=pooling)
    assert client.post(path, body).status_code == 401
    assert client.post(path, body, **bearer("b-key")).status_code == 200
    (ben,) = (account for account in client.users.accounts if account.user.name == "ben")
    n = sum(map(len, client.engine.embedded[0].texts))
    assert n >= 3 and (ben.n_prompt, ben.n_predicted, ben.tokens_today()) == (n, 0, n)
    assert (
        f'llamacpp:user_prompt_tokens_total{{user="ben"}} {float(n)}' in client.get("/metrics", **bearer("b-key")).text
    )
    wrong = {name: 5 if name == "model" else [] for name in body}
    assert client.post(path, wrong, **bearer("b-key")).status_code in (200, 400) and ben.n_prompt == n
    ben.add(60 - n, 0)
    refused = client.post(path, body, **bearer("b-key"))
    assert refused.status_code == 429 and "60 tokens of ben" in refused.text
    assert ben.n_refused == 1 and len(client.engine.embedded) == 1


def test_answers_that_nobody_waits_for_count() -> None:
    """The client of an endless answer leaves: what was computed counts, the rest is not computed."""
    users = Users([User("dora", hashlib.sha256(b"k").digest(), max_concurrent=1)])
    client = Shared(users)
    client.engine.script = Script(endless=True, delay=0.002)

    async def work() -> None:
        transport = httpx.ASGITransport(app=client.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            for stream in (True, False):
                ask = http.post("/completion", json={"prompt": "a", "n_predict": -1, "stream": stream}, **bearer("k"))
                n_tickets, before = len(client.engine.tickets), users.accounts[0].n_predicted
                running = asyncio.ensure_future(ask)
                while len(client.engine.tickets) == n_tickets or client.engine.tickets[-1].n_sent < 3:
                    await asyncio.sleep(0.005)
                assert not client.engine.tickets[-1].cancelled.is_set()
                busy = await http.post("/completion", json={"prompt": "a"}, **bearer("k"))
                assert busy.status_code == 429 and busy.headers["retry-after"] == "1"
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                assert users.accounts[0].n_running == 0 and users.accounts[0].n_predicted >= before + 2
                assert client.engine.tickets[-1].cancelled.is_set() and len(client.engine.tickets) == n_tickets + 1

    run(work)


def test_limits_end_with_their_time() -> None:
    now = [1000.0 * 86400 + 86000]
    account = Account(User("e", b"", requests_per_minute=1, tokens_per_day=5), clock=lambda: now[0])
    with account.request():
        account.add(3, 4)
    with pytest.raises(ApiError) as found, account.request():
        pass
    assert found.value.headers == {"Retry-After": "400"} and "tokens" in str(found.value)
    now[0] += 400
    with account.request():
        pass
    with pytest.raises(ApiError) as found, account.request():
        pass
    assert found.value.headers == {"Retry-After": "60"} and "per minute" in str(found.value)
    now[0] += 60
    with account.request():
        pass
    assert account.n_refused == 2 and account.n_requests == 3
