"""The whole server with the demo model: real sockets, the official clients, disconnects, signals."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from engine_client import ENDLESS
from live_server import WAIT, Server, wait_for
from tiers import some

from ikcli.settings.run import default_model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with contextlib.suppress(OSError):
        default_model()
    folder = tmp_path_factory.mktemp("serve")
    found = Server("-np", "2", "--metrics", "--slot-save-path", str(folder), "-a", "demo", log=folder / "log")
    found.wait_ready()
    yield found
    assert found.stop() == 0, found.text()
    assert "Traceback" not in found.text()


def test_openai_client(server: Server) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=server.base + "/v1", api_key="none", timeout=WAIT, max_retries=0)
    messages = [{"role": "user", "content": "What is a list?"}]
    answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=8, temperature=0)
    assert answer.choices[0].finish_reason == "length" and answer.choices[0].message.content
    assert answer.usage.completion_tokens == 8
    stream = client.chat.completions.create(model="demo", messages=messages, max_tokens=8, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == answer.choices[0].message.content
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["red", "green"]}}}
    found = client.chat.completions.create(model="demo", messages=messages, response_format=schema)
    assert json.loads(found.choices[0].message.content) in ("red", "green")
    tool = {"type": "function", "function": {"name": "look", "parameters": {"enum": [{"at": 1}, {"at": 2}]}}}
    called = client.chat.completions.create(model="demo", messages=messages, tools=[tool], tool_choice="required")
    assert called.choices[0].finish_reason == "tool_calls"
    call = called.choices[0].message.tool_calls[0]
    assert call.function.name == "look" and json.loads(call.function.arguments)["at"] in (1, 2)
    completion = client.completions.create(model="demo", prompt="The list", max_tokens=4, logprobs=2, echo=True)
    assert completion.choices[0].text.startswith("The list")
    assert len(completion.choices[0].logprobs.tokens) == len(completion.choices[0].logprobs.token_logprobs)
    response = client.responses.create(model="demo", input="What is a list?", max_output_tokens=3, temperature=0)
    assert response.status == "incomplete" and response.output_text
    events = list(client.responses.create(model="demo", input="What?", max_output_tokens=2, stream=True))
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    embedded = client.embeddings.create(model="demo", input=["text", "other text"])
    assert [len(item.embedding) for item in embedded.data] == [256, 256] and embedded.usage.prompt_tokens > 2
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="demo", messages=messages, extra_body={"temperature": "hot"})
    assert [model.id for model in client.models.list()] == ["demo"]


def test_anthropic_style(server: Server) -> None:
    body = {
        "model": "demo",
        "max_tokens": 6,
        "temperature": 0,
        "messages": [{"role": "user", "content": "What is a list?"}],
    }
    answer = server.post("/v1/messages", body).json()
    assert answer["content"][0]["type"] == "text" and answer["stop_reason"] == "max_tokens"
    with httpx.stream("POST", server.base + "/v1/messages", json=body | {"stream": True}, timeout=WAIT) as stream:
        lines = list(stream.iter_lines())
    assert lines[0] == "event: message_start" and lines[-2].startswith("data: ") and "message_stop" in lines[-2]
    assert server.post("/v1/messages/count_tokens", body).json()["input_tokens"] > 5


def test_raw_request_and_stream(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT)
    body = json.dumps({"prompt": "The list", "n_predict": 3, "stream": True})
    connection.request("POST", "/completion", body)  # as curl without a header for the content type
    response = connection.getresponse()
    assert response.status == 200 and response.getheader("content-type") == "text/event-stream"
    events = response.read().decode().split("\n\n")
    assert events[-1] == "" and all(event.startswith("data: {") for event in events[:-1])
    connection.request("GET", "/health")
    assert json.loads(connection.getresponse().read())["status"] == "ok"
    connection.close()


def test_names_of_headers_that_pages_look_for(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT)
    connection.request("OPTIONS", "/completion", headers={"Origin": "http://a.example"})
    sent = dict(connection.getresponse().getheaders())
    connection.close()
    assert sent["Access-Control-Allow-Origin"] == "http://a.example"
    assert sent["Access-Control-Allow-Methods"] == "GET, POST" and sent["Access-Control-Allow-Headers"] == "*"


def test_greedy_answers_do_not_depend_on_company(server: Server) -> None:
    body = {"prompt": "The following", "n_predict": 24, "temperature": 0, "cache_prompt": False}
    alone = server.post("/completion", body).json()["content"]
    noise = {"prompt": "Something else", "n_predict": 40, "logit_bias": [[5, 9]], "ignore_eos": True, "stop": ["zz"]}
    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(server.post, "/completion", noise) for _ in range(3)]
        mine = [pool.submit(server.post, "/completion", body) for _ in range(3)]
        assert {one.result().json()["content"] for one in mine} == {alone}
        assert all(one.result().status_code == 200 for one in others)


def test_departing_clients_free_their_slots(server: Server) -> None:
    endless = {"prompt": "a", "n_predict": ENDLESS, "ignore_eos": True, "temperature": 1}
    for stream in (False, True):
        for _ in range(3):  # more than there are slots
            sock = socket.create_connection(("127.0.0.1", server.port))
            data = json.dumps(endless | {"stream": stream}).encode()
            head = b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data)
            sock.sendall(head + data)
            if stream:
                assert sock.recv(10)
            else:
                wait_for(lambda: server.busy() > 0)
            sock.close()
        wait_for(lambda: server.busy() == 0)
    assert server.post("/completion", {"prompt": "a", "n_predict": 1}).status_code == 200


def test_idle_and_half_sent_connections_block_nobody(server: Server) -> None:
    sockets = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
    for sock in sockets[:10]:
        sock.sendall(b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert server.get("/health").status_code == 200
    assert server.post("/completion", {"prompt": "a", "n_predict": 1}).status_code == 200
    for sock in sockets:
        sock.close()


def test_slots_are_saved_and_restored(server: Server) -> None:
    body = {"prompt": "The quick brown fox", "n_predict": 4, "temperature": 0, "id_slot": 0}
    first = server.post("/completion", body).json()
    saved = server.post("/slots/0?action=save", {"filename": "a.bin"}).json()
    assert saved["n_saved"] > 4 and saved["n_written"] > 0
    assert server.post("/slots/0?action=erase", {}).json()["n_erased"] == saved["n_saved"]
    restored = server.post("/slots/1?action=restore", {"filename": "a.bin"}).json()
    assert restored["n_restored"] == saved["n_saved"]
    again = server.post("/completion", body | {"id_slot": 1}).json()
    assert again["content"] == first["content"] and again["timings"]["prompt_n"] == 1
    assert server.post("/slots/0?action=restore", {"filename": "absent.bin"}).status_code == 400
    assert server.post("/completion", {"prompt": "a", "n_predict": 1, "id_slot": 0}).status_code == 200


def test_long_prompts_are_refused_or_shifted(server: Server) -> None:
    response = server.post("/completion", {"prompt": [5] * 3000, "n_predict": 1})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "exceed_context_size_error" and error["n_prompt_tokens"] == 3000 and error["n_ctx"] == 512


def test_metrics_count(server: Server) -> None:
    before = _metric(server, "tokens_predicted_total")
    server.post("/completion", {"prompt": "a", "n_predict": 5, "ignore_eos": True})
    assert _metric(server, "tokens_predicted_total") >= before + 5


def _metric(server: Server, name: str) -> float:
    lines = server.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(f"llamacpp:{name} ")).split()[1])


def test_port_in_use_is_one_clear_error(server: Server) -> None:
    command = [sys.executable, "-m", "ikcli", "serve", "--port", str(server.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {server.port}" in done.stderr and "Traceback" not in done.stderr


def test_missing_folder_for_slots_is_said_at_the_start(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ikcli", "serve", "--port", "0", "--slot-save-path", str(tmp_path / "absent")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 2 and "--slot-save-path" in done.stderr and "Traceback" not in done.stderr


def test_first_signal_drains_second_stops(tmp_path: Path) -> None:
    server = Server("--shutdown-timeout", "600", log=tmp_path / "log")
    server.wait_ready()
    body = {"prompt": "a", "n_predict": 60, "ignore_eos": True, "temperature": 1}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, "/completion", body)
        wait_for(lambda: server.busy() == 1 or running.done())
        server.process.send_signal(signal.SIGTERM)
        assert len(running.result().json()["generation_settings"]) > 5
        assert server.process.wait(WAIT) == 0
    server = Server("--shutdown-timeout", "600", "-c", "32768", log=tmp_path / "log2")
    server.wait_ready()
    endless = {"prompt": "a", "n_predict": ENDLESS, "ignore_eos": True}

    def ask() -> None:
        with contextlib.suppress(httpx.HTTPError):
            server.post("/completion", endless)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_for(lambda: server.busy() == 1)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(WAIT) == 0
    thread.join()


@pytest.mark.slow  # starts servers of its own
@pytest.mark.parametrize("number", some([signal.SIGTERM, signal.SIGINT], [signal.SIGTERM]))
def test_signals_until_the_end_change_nothing(tmp_path: Path, number: signal.Signals) -> None:
    server = Server(log=tmp_path / "log")
    server.wait_ready()
    while server.process.poll() is None:
        server.process.send_signal(number)
        time.sleep(0.01)
    assert server.process.returncode == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_models_that_cannot_load_end_the_server(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(default_model().read_bytes()[:200_000])
    command = [sys.executable, "-m", "ikcli", "serve", "--port", "0", "-m", str(broken)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 1 and "error:" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow  # starts five servers
def test_a_socket_of_whoever_starts_the_server(tmp_path: Path) -> None:
    """As service managers do: it listens before the server does."""
    listener = socket.create_server(("127.0.0.1", 0))
    number = listener.fileno()
    command = [sys.executable, "-m", "ikcli", "serve", "-t", "1", "-c", "256", "--host"]
    with (tmp_path / "log").open("wb") as out:
        process = subprocess.Popen([*command, f"fd:{number}"], stdout=out, stderr=out, pass_fds=[number])
    base = f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    try:
        wait_for(lambda: httpx.get(base + "/health", timeout=WAIT).status_code == 200)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT) == 0
    with (tmp_path / "no socket").open("wb") as file:
        for host in (f"fd:{file.fileno()}", "fd:", "fd:x", "fd:-1"):
            done = subprocess.run(
                [*command, host], capture_output=True, text=True, timeout=WAIT, pass_fds=[file.fileno()]
            )
            problem = f"--host {host}: this file descriptor is not a listening socket"
            assert done.returncode == 2 and problem in done.stderr, done.stderr
            assert "Traceback" not in done.stderr


def test_unix_socket_and_key(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    command = [sys.executable, "-m", "ikcli", "serve", "--host", str(path), "--api-key", "k", "-t", "1", "-c", "256"]
    with (tmp_path / "log").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        wait_for(path.exists)
        client = httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x", timeout=WAIT)
        wait_for(lambda: client.get("/health").status_code == 200)
        assert client.get("/props").status_code == 401
        assert client.get("/props", headers={"Authorization": "Bearer k"}).status_code == 200
        client.close()
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT) == 0
    assert not path.exists()
