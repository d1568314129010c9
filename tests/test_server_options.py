"""Options of the server about its port, its web page and what it keeps: addresses, CORS, settings, prompts, tags."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fake_engine import FakeEngine, fake_tokenizer
from server_client import Client
from test_server_http import error_of

from ikcli.errors import IkError, UsageError
from ikcli.files import make_private_folder
from ikcli.log import forget_notices
from ikcli.server.http.page_settings import page_settings
from ikcli.server.http.server import Connection, SignalServer, close, listen
from ikcli.server.http.state import is_behind
from ikcli.server.slots.states import EngineMetrics
from ikcli.settings.embed import EmbedConfig
from ikcli.settings.prompt import ChatConfig
from ikcli.settings.run import RunConfig
from ikcli.settings.server import ServerConfig

ORIGIN = "https://a.example"


# --- addresses ----------------------------------------------------------------------------------------------------
async def _app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def test_several_addresses(tmp_path: Path) -> None:
    path = tmp_path / "ik.sock"
    host = f"127.0.0.1, 127.0.0.2,{path}"
    listener = listen(host, 0)
    port = listener.getsockname()[1]

    async def ask(opened: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bytes:
        opened[1].write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await opened[0].read()
        opened[1].close()
        return answer

    async def work() -> None:
        server = SignalServer(uvicorn.Config(_app, http=Connection, lifespan="off", log_config=None))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.001)
        assert (await ask(await asyncio.open_connection("127.0.0.1", port))).endswith(b"ok")
        assert (await ask(await asyncio.open_connection("127.0.0.2", port))).endswith(b"ok")
        assert (await ask(await asyncio.open_unix_connection(path))).endswith(b"ok")
        server.should_exit = True
        await task

    asyncio.run(work())
    close(listener, host)
    assert not path.exists() and all(sock.fileno() < 0 for sock in (listener, *listener.others))


def test_an_address_that_is_taken_frees_the_others() -> None:
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(IkError, match=r"cannot listen on 127\.0\.0\.2"):
            listen("127.0.0.1,127.0.0.2", port)
        listen("127.0.0.1", port).close()
    with pytest.raises(UsageError, match="names no address"):
        listen(" ,", 0)


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_the_address_of_all_is_ipv6_alone_beside_others() -> None:
    try:
        alone = listen("::", 0)
    except IkError:
        pytest.skip("needs IPv6")
    both = listen("127.0.0.1,::", 0)
    with alone, both, both.others[0]:
        assert alone.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == 0
        assert both.others[0].getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == 1
        assert both.getsockname()[1] == both.others[0].getsockname()[1]


def test_ports_are_shared_if_wanted() -> None:
    first = listen("127.0.0.1", 0, shared=True)
    port = first.getsockname()[1]
    with first:
        listen("127.0.0.1", port, shared=True).close()
        with pytest.raises(IkError, match="cannot listen"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", False), ("/a.sock", True), ("fd:3", True), ("fd:3,/a.sock", True), ("0.0.0.0,/a.sock", False)],
)
def test_who_may_be_in_front(host: str, expected: bool) -> None:
    assert is_behind(RunConfig(server=ServerConfig(host=host))) is expected


# --- CORS ---------------------------------------------------------------------------------------------------------
def preflight(client: Client, **headers: str) -> dict[str, str]:
    answer = client("OPTIONS", "/completion", headers={"Origin": ORIGIN, **headers})
    assert answer.status_code == 200
    name = "access-control-allow-"
    return {key.removeprefix(name): value for key, value in answer.headers.items() if key.startswith(name)}


def test_what_browsers_may_send() -> None:
    usual = {"origin": ORIGIN, "credentials": "true", "methods": "GET, POST", "headers": "*"}
    assert preflight(Client()) == usual
    asked = {"Access-Control-Request-Headers": "authorization, content-type"}
    assert preflight(Client(), **asked) == usual | {"headers": "authorization, content-type"}
    client = Client(cors_methods="GET", cors_headers="X-A, X-B", cors_credentials=False)
    found = preflight(client, **asked)
    assert found == {"origin": ORIGIN, "credentials": "false", "methods": "GET", "headers": "X-A, X-B"}


# --- the page -----------------------------------------------------------------------------------------------------
def test_settings_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forget_notices()
    text = (
        '{"temperature": 0.2, "systemMessage": "Be brief.", "typ_p": 1, "samplers": ["top_k"], "theme": "dark", "x": 1}'
    )
    client = Client(ui_config=text, ui=True)
    expected = {"temperature": 0.2, "system": "Be brief.", "typical_p": 1, "samplers": "top_k"}
    assert client.get("/ui-config.json").json() == client.get("/props").json()["ui_settings"] == expected
    assert capsys.readouterr().err.count("the web page has no setting theme, x") == 1
    file = tmp_path / "page.json"
    file.write_text('{"stop": ["a", "b"], "custom": {"min_p": 0}, "top_k": null}', encoding="utf-8")
    found, unknown = page_settings(ServerConfig(ui_config_file=file))
    assert found == {"stop": "a\nb", "extra": '{"min_p": 0}', "top_k": ""} and not unknown
    assert Client(ui=True).get("/ui-config.json").json() == {} == Client().get("/props").json()["ui_settings"]
    error_of(Client(api_key="key", ui_config=text, ui=True).get("/ui-config.json"), 401, "authentication_error")
    assert Client(ui=False).get("/ui-config.json").status_code == 404


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "--ui-config is not JSON"), ("[]", "must be a JSON object"), ('{"top_k": "7"}', "top_k must be a number"),
     ('{"seed": true}', "seed must be a number"), ('{"systemMessage": 5}', "systemMessage must be a text")],
)  # fmt: skip
def test_settings_of_the_page_that_are_wrong(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        page_settings(ServerConfig(ui_config=text))
    file = tmp_path / "page.json"
    with pytest.raises(UsageError, match="cannot read"):
        page_settings(ServerConfig(ui_config_file=file))
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=r"page\.json"):
        page_settings(ServerConfig(ui_config_file=file))


# --- prompts ------------------------------------------------------------------------------------------------------
def test_prompts_are_written(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "prompts"
    make_private_folder(folder, "--log-prompts-dir")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    client = Client(log_prompts_dir=folder)
    client.post("/completion", {"prompt": ["one", "two"], "n_cmpl": 2})
    client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == [f"{i:012d}.txt" for i in range(3)]
    texts = [file.read_text(encoding="utf-8") for file in files]
    assert texts[:2] == ["<|bos|>one", "<|bos|>two"] and texts[2].endswith("hi<|im_end|>\n<|im_start|>assistant\n")
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)


def test_prompts_that_cannot_be_written(tmp_path: Path) -> None:
    client = Client(log_prompts_dir=tmp_path / "absent")
    assert client.post("/completion", {"prompt": "one"}).status_code == 200
    assert "prompt not written" in client.log.getvalue()
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UsageError, match="--log-prompts-dir"):
        make_private_folder(file / "sub", "--log-prompts-dir")
    if os.geteuid():
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(UsageError, match="--log-prompts-dir"):
            make_private_folder(tmp_path / "locked", "--log-prompts-dir")


# --- the rest -----------------------------------------------------------------------------------------------------
def test_names_and_tags() -> None:
    model = Client(alias="one, two,one", tags="small, chat").get("/v1/models").json()["data"][0]
    assert (model["id"], model["aliases"], model["tags"]) == ("one", ["one", "two"], ["small", "chat"])
    assert model["architecture"] == {"input_modalities": ["text"], "output_modalities": ["text"]}
    assert model["meta"]["n_ctx"] == 256
    assert Client().get("/v1/models").json()["data"][0]["tags"] == []
    props = Client().get("/props").json()
    assert props["media_marker"] and props["is_sleeping"] is False and props["build_info"]


def test_suffix_first() -> None:
    extra = {"<|fim_prefix|>": 3, "<|fim_suffix|>": 3, "<|fim_middle|>": 3}
    client = Client(engine=FakeEngine(fake_tokenizer(extra=extra)), spm_infill=True)
    client.post("/infill", {"input_prefix": "Hello", "input_suffix": "}", "prompt": "x"})
    sent = client.engine.tokenizer.decode(client.engine.requests[-1].prompt)
    assert sent == "<|bos|><|fim_suffix|>}<|fim_prefix|>Hello<|fim_middle|>x"


def test_control_tokens_are_sent() -> None:
    for special in (True, False):
        client = Client(config=RunConfig(command="serve", chat=ChatConfig(special=special)))
        client.post("/completion", {"prompt": "x"})
        client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
        assert [one.keep_special for one in client.engine.requests] == [special] * 2


def test_norm_of_vectors() -> None:
    config = RunConfig(command="serve", embed=EmbedConfig(normalize=-1))
    client = Client(config=config)
    plain = client.post("/embedding", {"content": [7, 8, 9]}).json()[0]["embedding"][0]
    assert plain[:2] == [7, 3]
    unit = client.post("/embedding", {"content": [7, 8, 9], "embd_normalize": 2}).json()[0]["embedding"][0]
    assert unit[:2] == pytest.approx([7 / 58**0.5, 3 / 58**0.5])


def test_metrics_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(metrics=True)
    text = client.get("/metrics").text
    assert "llamacpp:spec_decode_num_drafts_total 0.0\n" in text and "per_pos" not in text
    found = EngineMetrics(drafts_total=5, accepted_by_position={0: 4, 1: 2})
    monkeypatch.setattr(client.engine, "metrics", lambda reset: replace(found))
    lines = client.get("/metrics").text.splitlines()
    assert "llamacpp:spec_decode_num_drafts_total 5.0" in lines
    assert "# TYPE llamacpp:spec_decode_num_accepted_tokens_per_pos_total counter" in lines
    assert 'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 4.0' in lines
    assert 'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 2.0' in lines
