"""`ik serve --models` with the demo model: real processes, which end however the server ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from encoder_models import encoder_file
from engine_client import ENDLESS
from live_router import HI, Router, alive
from live_server import WAIT, wait_for
from tiers import some

from ikcli.settings.run import default_model


def models_file(folder: Path) -> Path:
    path = folder / "models.toml"
    path.write_text(
        """
memory = "45MiB"
[defaults]
threads = 1
ctx-size = 512
cache-ram = 8
[models.one]
aliases = ["gpt-4"]
[models.two]
parallel = 2
""",
        encoding="utf-8",
    )
    return path


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    folder = tmp_path_factory.mktemp("router")
    found = Router("--models", str(models_file(folder)), "--metrics", log=folder / "log")
    found.wait_ready()
    yield found
    pids = found.children()
    assert found.stop() == 0, found.text()
    assert not any(alive(pid) for pid in pids)
    assert "Traceback" not in found.text(), found.text()


def test_models_come_and_go_on_demand(router: Router) -> None:
    for path in ("/favicon.png", "/usage?id=1", "/nothing"):
        assert router.get(path).status_code == 404
    assert router.post("/models/nothing", {}).status_code == 404 and router.get("/").status_code == 200
    shown = router.post("/api/show", {"model": "gpt-4"}).json()
    tags = router.get("/api/tags").json()["models"]
    assert set(router.states().values()) == {"unloaded"}
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda name: router.ask(name), ("one", "gpt-4", "one")))
    assert [answer.status_code for answer in answers] == [200] * 3 and answers[1].json()["model"] == "gpt-4"
    assert router.states() == {"one": "loaded", "two": "unloaded"} and len(router.children()) == 1
    loaded = router.post("/api/show", {"model": "gpt-4"}).json()
    assert {**shown, "modified_at": ""} == {**loaded, "modified_at": ""}, "the same before it is loaded and after"
    assert tags[0]["details"] == loaded["details"] and tags[0]["size"] > 0
    assert router.ask("two").status_code == 200
    assert router.states() == {"one": "unloaded", "two": "loaded"} and len(router.children()) == 1
    assert len(router.get("/slots?model=two").json()) == 2
    text = router.get("/metrics").text
    assert 'llamacpp:model_loads{model="one"} 1.0' in text and 'llamacpp:model_loaded{model="two"} 1.0' in text
    assert "llamacpp:tokens_predicted_total" in router.get("/metrics?model=two").text


def test_streams_and_errors_pass_through(router: Router) -> None:
    body = {"model": "two:latest", "messages": HI, "options": {"num_predict": 4, "temperature": 0}}
    with httpx.stream("POST", router.base + "/api/chat", json=body, timeout=WAIT) as stream:
        assert stream.headers["content-type"] == "application/x-ndjson" and stream.headers["server"] == "ik"
        pieces = [json.loads(line) for line in stream.iter_lines()]
    assert pieces[-1]["done"] and len(pieces) > 2
    whole = router.post("/api/chat", body | {"stream": False}).json()
    assert whole["message"]["content"] == "".join(piece["message"]["content"] for piece in pieces)
    wrong = router.ask("two", temperature="hot")
    assert wrong.status_code == 400 and "temperature" in wrong.json()["error"]["message"]
    unknown = router.ask("three")
    assert unknown.status_code == 404 and "one, two" in unknown.json()["error"]["message"]
    assert router.post("/api/chat", {"model": "three"}).json()["error"].startswith("model 'three' not found")
    assert httpx.post(router.base + "/v1/chat/completions", content=b"{", timeout=WAIT).status_code == 400
    assert [one["name"] for one in router.get("/api/tags").json()["models"]] == ["one", "two"]


@pytest.mark.slow  # starts servers of its own
def test_loading_and_unloading_by_request(router: Router) -> None:
    router.ask("two")
    assert router.post("/models/load", {"model": "two"}).status_code == 400
    assert router.post("/models/unload", {"model": "two"}).json() == {"success": True}
    assert router.states()["two"] == "unloaded" and not router.children()
    assert router.post("/models/unload", {"model": "two"}).status_code == 400
    assert router.post("/models/load", {"model": "two"}).json() == {"success": True}
    assert [one["name"] for one in router.get("/api/ps").json()["models"]] == ["two"]
    assert router.post("/api/generate", {"model": "two", "keep_alive": "1h"}).json()["done_reason"] == "load"
    assert not router.get("/api/ps").json()["models"][0]["expires_at"].startswith("9999")
    assert router.post("/api/chat", {"model": "two", "keep_alive": "soon"}).status_code == 400
    router.post("/api/generate", {"model": "two", "keep_alive": 0})
    wait_for(lambda: router.states()["two"] == "unloaded")
    router.ask("two")
    assert router.post("/models/load", {"model": "three"}).status_code == 404
    assert router.post("/models/load", {}).status_code == 400


def test_a_dead_process_is_replaced(router: Router) -> None:
    router.ask("two")
    with httpx.stream(
        "POST", router.base + "/completion", timeout=WAIT,
        json={"model": "two", "prompt": "a", "n_predict": ENDLESS, "ignore_eos": True, "stream": True},
    ) as stream:  # fmt: skip
        lines = stream.iter_lines()
        next(lines)
        (pid,) = router.children()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):  # cut off, not ended as if it were whole
            list(lines)
    wait_for(lambda: router.states()["two"] == "unloaded")
    (entry,) = (one for one in router.get("/models").json()["data"] if one["id"] == "two")
    assert entry["status"]["failed"] and "SIGKILL" in entry["status"]["error"]
    assert router.ask("two").status_code == 200


def test_departing_clients_free_their_slots(router: Router) -> None:
    body = {"model": "two", "prompt": "a", "n_predict": ENDLESS, "ignore_eos": True, "stream": True}
    router.ask("two")
    with httpx.stream("POST", router.base + "/completion", json=body, timeout=WAIT) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert sum(slot["is_processing"] for slot in router.get("/slots?model=two").json()) == 1
    wait_for(lambda: not any(slot["is_processing"] for slot in router.get("/slots?model=two").json()))


@pytest.mark.slow  # starts servers of its own
def test_users_of_several_models(tmp_path: Path) -> None:
    keys, models = tmp_path / "keys.toml", tmp_path / "models.toml"
    keys.write_text('[anna]\nkey = "a"\nmodels = ["b"]\n[ben]\nkey = "b"\ntokens-per-day = 40\n', encoding="utf-8")
    models.write_text(
        "[defaults]\nthreads = 1\nctx-size = 512\ncache-ram = 8\n[models.m]\naliases = ['b']\n[models.n]\n"
    )
    router = Router("--models", str(models), "--keys", str(keys), "--metrics", log=tmp_path / "log")
    router.wait_ready()

    def ask(key: str, model: str, **fields: Any) -> httpx.Response:
        body = {"model": model, "messages": HI, "max_tokens": 5, "stream_options": {"include_usage": True}} | fields
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(router.base + "/v1/chat/completions", json=body, headers=headers, timeout=WAIT)

    assert ask("a", "n").status_code == 403 and ask("x", "m").status_code == 401
    first = ask("a", "m")
    assert first.status_code == 200
    ask("a", "b", stream=True)
    text = httpx.get(router.base + "/metrics", headers={"X-Api-Key": "a"}, timeout=WAIT).text
    total = first.json()["usage"]["prompt_tokens"] * 2
    assert f'llamacpp:user_prompt_tokens_total{{user="anna"}} {float(total)}' in text
    assert 'llamacpp:user_tokens_predicted_total{user="anna"} 10.0' in text
    while (answer := ask("b", "m")).status_code == 200:
        assert answer.json()["usage"]["completion_tokens"] == 5
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) > 0
    assert router.stop() == 0
    assert "Traceback" not in router.text(), router.text()


def embedding_models(folder: Path) -> Path:
    """Of three models one generates, one only embeds, one ranks."""
    encoder_file(folder / "vec.gguf")
    encoder_file(folder / "rank.gguf", ranks=True)
    path = folder / "models.toml"
    path.write_text(
        f"""
[defaults]
threads = 1
ctx-size = 128
cache-ram = 8
[models.talk]
[models.vec]
model = "{folder}/vec.gguf"
aliases = ["text-embedding-3-small"]
[models.rank]
model = "{folder}/rank.gguf"
""",
        encoding="utf-8",
    )
    return path


@pytest.mark.slow  # starts servers of its own
def test_embeddings_of_several_models(tmp_path: Path) -> None:
    """Each request goes to the model that it names, and its tokens are counted for its user."""
    keys = tmp_path / "keys.toml"
    keys.write_text('[anna]\nkey = "a"\n[ben]\nkey = "b"\nmodels = ["vec"]\ntokens-per-day = 8\n')
    keys.chmod(0o600)
    argv = ("--models", str(embedding_models(tmp_path)), "--metrics", "--keys", str(keys))
    router = Router(*argv, log=tmp_path / "log")
    router.wait_ready()

    def post(path: str, body: dict[str, Any], key: str = "a") -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(router.base + path, json=body, headers=headers, timeout=WAIT)

    def used(user: str) -> float:  # which is counted when the answer was sent
        text = httpx.get(router.base + "/metrics", headers={"Authorization": "Bearer a"}, timeout=WAIT).text
        return float(text.split(f'user_prompt_tokens_total{{user="{user}"}} ')[1].split("\n")[0])

    found = post("/v1/embeddings", {"model": "text-embedding-3-small", "input": ["a castle", "dog"]}).json()
    vectors = np.array([one["embedding"] for one in found["data"]])
    assert vectors.shape == (2, 64) and np.linalg.norm(vectors[0]) == pytest.approx(1)
    assert found["usage"]["prompt_tokens"] == 7
    wait_for(lambda: used("anna") == 7)
    ollama = post("/api/embed", {"model": "vec:latest", "input": "a castle"}).json()
    assert ollama["embeddings"][0] == pytest.approx(vectors[0].tolist(), abs=1e-5)
    wait_for(lambda: used("anna") == 11)
    ranked = post("/rerank", {"model": "rank", "query": "where do kings live?", "documents": ["a castle", "a dog"]})
    assert sorted(one["index"] for one in ranked.json()["results"]) == [0, 1]
    wait_for(lambda: used("anna") == 31)
    generated = post("/v1/embeddings", {"model": "talk", "input": "a castle"}).json()
    assert len(generated["data"][0]["embedding"]) == 256
    assert {name for name, pid in router.states_of("a").items() if pid == "loaded"} == {"talk", "vec", "rank"}
    assert post("/v1/chat/completions", {"model": "vec", "messages": HI}).status_code == 501
    assert post("/v1/embeddings", {"model": "rank", "input": "a"}).status_code == 501
    assert post("/rerank", {"model": "vec", "query": "a", "documents": ["b"]}).status_code == 501
    shown = post("/api/show", {"model": "vec"}).json()
    assert shown["capabilities"] == ["embedding"] and shown["details"]["family"] == "bert"
    post("/models/unload", {"model": "vec"})
    assert post("/api/show", {"model": "vec"}).json()["capabilities"] == ["embedding"]
    assert post("/v1/embeddings", {"model": "talk", "input": "a"}, "b").status_code == 403
    for n in (4, 8):
        assert post("/v1/embeddings", {"model": "vec", "input": "a castle"}, "b").status_code == 200
        wait_for(lambda n=n: used("ben") == n)
    assert post("/v1/embeddings", {"model": "vec", "input": "a castle"}, "b").status_code == 429
    assert router.stop() == 0
    assert "Traceback" not in router.text(), router.text()


@pytest.mark.slow  # starts servers of its own
@pytest.mark.parametrize("number", some([signal.SIGTERM, signal.SIGINT], [signal.SIGTERM]))
def test_signals_end_all_processes(tmp_path: Path, number: signal.Signals) -> None:
    """While one model answers and another is loading; the second signal does not wait for either."""
    models = tmp_path / "models.toml"
    text = "[defaults]\nthreads = 1\nctx-size = 32768\ncache-ram = 8\n[models.a]\n[models.b]\n"
    models.write_text(text, encoding="utf-8")
    router = Router("--models", str(models), "--shutdown-timeout", "600", log=tmp_path / "log")
    router.wait_ready()
    body = {"model": "a", "prompt": "x", "n_predict": ENDLESS, "ignore_eos": True, "stream": True}
    asked = httpx.stream("POST", router.base + "/completion", json=body, timeout=WAIT)
    with ThreadPoolExecutor(1) as pool, asked as stream:
        lines = stream.iter_lines()
        next(lines)
        loading = pool.submit(router.post, "/models/load", {"model": "b"})
        wait_for(lambda: len(router.children()) == 2)
        pids = router.children()
        router.process.send_signal(number)
        time.sleep(0.3)
        router.process.send_signal(number)
        assert router.process.wait(WAIT) == 0, router.text()
        with contextlib.suppress(httpx.HTTPError):
            loading.result()
    assert len(pids) == 2 and not any(alive(pid) for pid in pids)
    assert "Traceback" not in router.text(), router.text()


@pytest.mark.slow  # starts servers of its own
def test_files_that_break_later_do_not_end_the_server(tmp_path: Path) -> None:
    """A model that was well when the server started; then no process outlives a server that is killed."""
    model = tmp_path / "m.gguf"
    model.write_bytes(default_model().read_bytes())
    text = f'[defaults]\nthreads = 1\nctx-size = 512\ncache-ram = 8\n[models.a]\nmodel = "{model}"\n[models.b]\n'
    path = tmp_path / "models.toml"
    path.write_text(text, encoding="utf-8")
    router = Router("--models", str(path), log=tmp_path / "log")
    router.wait_ready()
    model.write_bytes(b"no model")
    failed = router.ask("a")
    assert failed.status_code == 500 and str(model) in failed.json()["error"]["message"]
    assert router.ask("b").status_code == 200
    pids = router.children()
    assert pids
    router.process.kill()
    router.process.wait(WAIT)
    end = time.monotonic() + WAIT
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.02)
