"""Presets, folders, downloads and sleep with real processes: what a client of llama.cpp's router does."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_hub import FakeHub
from hub_fixtures import server  # noqa: F401  (fixture)
from live_router import HI, Router
from live_server import WAIT, wait_for

from ikcli.settings.run import default_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")


class Listener:
    """Events of a server, as they come."""

    def __init__(self, base: str) -> None:
        self.events: list[dict[str, Any]] = []
        self.ended = False
        self._stream = httpx.stream("GET", base + "/models/sse", timeout=WAIT)
        answer = self._stream.__enter__()
        assert answer.headers["content-type"] == "text/event-stream"
        self._lines = answer.iter_lines()
        next(self._lines)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self._lines:
            if line.startswith("data: "):
                self.events.append(json.loads(line.removeprefix("data: ")))
        self.ended = True

    def statuses(self, model: str) -> list[str]:
        return [e["data"]["status"] for e in self.events if e["model"] == model and e["event"] == "model_status"]

    def has(self, model: str, event: str) -> bool:
        return any((e["model"], e["event"]) == (model, event) for e in self.events)


@pytest.fixture
def hub(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:  # noqa: F811
    """The hub of processes."""
    server.reset()
    server.add("user/demo", {"demo-BF16.gguf": default_model().read_bytes()})
    for name, value in (("HF_ENDPOINT", server.url), ("HF_HUB_CACHE", str(tmp_path / "hub")), ("HF_TOKEN", "")):
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def preset(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "plain.gguf").symlink_to(default_model())
    path = tmp_path / "presets.ini"
    path.write_text(
        f"version = 1\n[*]\nc = 512\ncache-ram = 8\n[one]\nmodel = {default_model()}\nload-on-startup = true\n"
        f"[two]\nmodel = {default_model()}\nalias = gpt-4\n",
        encoding="utf-8",
    )
    return path


@pytest.fixture
def router(hub: FakeHub, preset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Router]:
    monkeypatch.setenv("LLAMA_ARG_MODELS_DIR", str(tmp_path / "models"))
    argv = ("--models-preset", str(preset), "--models-max", "1", "--no-models-autoload", "-t", "1")
    found = Router(*argv, log=tmp_path / "log")
    yield found
    assert found.stop() == 0, found.text()
    assert "Traceback" not in found.text(), found.text()


def test_a_preset_a_folder_and_a_download(router: Router, preset: Path, hub: FakeHub) -> None:
    wait_for(lambda: router.states() == {"one": "loaded", "two": "unloaded", "plain": "unloaded"})
    heard = Listener(router.base)
    assert router.ask("one").status_code == 200
    (one, *_) = router.get("/models").json()["data"]
    assert one["meta"]["n_params"] > 0 and one["max_model_len"] == 512
    assert {"--threads=1", "--ctx-size=512"} < set(one["status"]["args"])
    refused = router.ask("gpt-4")
    assert refused.status_code == 400 and "POST /models/load" in refused.json()["error"]["message"]
    assert router.post(
        "/v1/chat/completions?autoload=true", {"model": "gpt-4", "messages": HI, "max_tokens": 2}
    ).is_success
    assert router.states() == {"one": "unloaded", "two": "loaded", "plain": "unloaded"}
    assert len(router.children()) == 1

    assert router.post("/models", {"model": "user/demo"}).json() == {"success": True}
    wait_for(lambda: heard.has("user/demo:BF16", "download_finished"))
    assert router.post("/models/load", {"model": "user/demo:BF16"}).json() == {"success": True}
    assert router.ask("user/demo:BF16").status_code == 200

    text = preset.read_text(encoding="utf-8").replace("[two]", "[three]")
    preset.write_text(text + "[user/demo:BF16]\nc = 256\n", encoding="utf-8")
    data = router.get("/models?reload=1").json()["data"]
    assert [one["id"] for one in data] == ["one", "three", "user/demo:BF16", "plain"]
    wait_for(lambda: not router.children())  # it has another context now
    assert heard.has("two", "model_remove") and heard.has("*", "models_reload")
    preset.write_text("[*\n", encoding="utf-8")
    broken = router.get("/models?reload=1")
    assert broken.status_code == 500 and f"{preset}: line 1: a section" in broken.json()["error"]["message"]
    preset.write_text(text, encoding="utf-8")
    deleted = httpx.delete(router.base + "/models", params={"model": "user/demo:BF16"}, timeout=WAIT)
    assert deleted.json() == {"success": True} and "user/demo:BF16" not in router.states()
    wait_for(lambda: heard.has("user/demo:BF16", "model_remove"))
    assert heard.statuses("user/demo:BF16") == ["loading", "loaded", "unloaded"]
    assert heard.statuses("two")[:2] == ["loading", "loaded"] and heard.statuses("one") == ["unloaded"]
    assert router.stop() == 0
    wait_for(lambda: heard.ended)  # the server does not wait for its listeners


def test_a_single_model_sleeps(tmp_path: Path) -> None:
    """Its memory is given back, looking at it does not wake it, and a request does."""
    argv = ("-t", "1", "-c", "512", "-a", "m,n", "--metrics", "--sleep-idle-seconds", "1")
    single = Router(*argv, log=tmp_path / "log")
    single.wait_ready()
    (awake,) = single.get("/v1/models").json()["data"]
    assert awake["id"] == "m" and awake["aliases"] == ["n"] and single.get("/slots").status_code == 200
    answer = single.ask("whatever").json()
    wait_for(lambda: single.get("/props").json()["is_sleeping"])
    wait_for(lambda: not single.children())
    assert single.get("/health").json()["status"] == "ok"
    listed = single.get("/v1/models").json()
    assert listed["data"][0]["status"]["value"] == "sleeping" and listed["data"][0]["meta"] == awake["meta"]
    assert listed["models"][0]["slug"] == "m"
    assert re.search(r"llamacpp:tokens_predicted_total [1-9]", single.get("/metrics").text)
    assert single.get("/props").json()["chat_template"] and not single.children()
    again = single.ask("whatever").json()
    assert again["choices"][0]["message"].keys() == answer["choices"][0]["message"].keys()
    assert len(single.children()) == 1 and single.get("/props").json()["is_sleeping"] is False
    assert single.stop() == 0
    assert "Traceback" not in single.text(), single.text()


@pytest.mark.slow  # starts servers as the tests above do
def test_servers_that_cannot_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    def error(*line: str) -> tuple[int, str]:
        words = [sys.executable, "-m", "ikcli", "serve", "--port", "0", *line]
        done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT, check=False)
        assert "Traceback" not in done.stderr + done.stdout
        return done.returncode, done.stderr

    broken = tmp_path / "broken.gguf"
    broken.write_bytes(default_model().read_bytes()[:-1000])
    code, text = error("-m", str(broken), "--sleep-idle-seconds", "5")
    assert code in (1, 2) and str(broken) in text
    code, text = error("--replicas", "2", "--sleep-idle-seconds", "5")
    assert code == 2 and "--sleep-idle-seconds cannot be used with replicas" in text
    code, text = error("--models-dir", str(tmp_path / "absent"))
    assert code == 2 and "cannot read" in text
    monkeypatch.setenv("LLAMA_ARG_MODELS_PRESET", str(tmp_path / "absent.ini"))
    code, text = error()
    assert code == 2 and "cannot read" in text and "absent.ini" in text
