"""`ik serve --replicas 2` with the demo model: two real processes behind one port."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_client import ENDLESS
from live_router import alive, children_of
from live_server import WAIT, Server, wait_for

from ikcli.main import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")

COMMON = ("-m", "ikcli", "serve", "--port", "0")
OPTIONS = ("--replicas", "2", "-t", "2", "-c", "1024", "-np", "2", "--cache-ram", "8", "--temp", "0")


class Front(Server):
    """A server of replicas."""

    common = COMMON

    def replicas(self) -> list[dict[str, Any]]:
        return list(self.get("/replicas").json())

    def pids(self) -> list[int]:
        return [int(one["where"].removeprefix("process ")) for one in self.replicas()]

    def wait_all(self, starts: int = 1) -> None:
        wait_for(lambda: all(one["state"] == "ready" and one["starts"] >= starts for one in self.replicas()))

    def complete(self, prompt: str, n: int = 4, **fields: Any) -> httpx.Response:
        return self.post("/completion", {"prompt": prompt, "n_predict": n, "ignore_eos": True} | fields)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("replicas")
    (folder / "slots").mkdir()
    found = Front(*OPTIONS, "--metrics", "--slot-save-path", str(folder / "slots"), log=folder / "log")
    found.wait_ready()
    found.wait_all()
    yield found
    pids = found.pids()
    assert found.stop() == 0, found.text()
    assert not any(alive(pid) for pid in pids)
    assert "Traceback" not in found.text() and "internal error" not in found.text(), found.text()


def holders(front: Front) -> set[int]:
    """Replicas that have something in a slot."""
    return {slot["replica"] for slot in front.get("/slots").json() if slot["n_past"]}


def test_one_server_for_clients(front: Front) -> None:
    """Same answers from both, numbers of slots of all, what is merged, and a share of the processors each."""
    answers = [front.complete("def f(", id_slot=slot).json() for slot in (1, 2)]
    assert [answer["id_slot"] for answer in answers] == [1, 2] and answers[0]["content"] == answers[1]["content"]
    assert holders(front) == {0, 1} and [slot["id"] for slot in front.get("/slots").json()] == [0, 1, 2, 3]
    assert front.get("/props").json()["total_slots"] == 4 and front.get("/health").json()["slots_idle"] == 4
    (model,) = front.get("/v1/models").json()["data"]
    assert model["id"] == "demo.gguf" and model["meta"]["n_vocab"] > 0
    assert "/completion" in front.get("/openapi.json").json()["paths"]
    assert front.post("/tokenize", {"content": "abc"}).json()["tokens"]
    text = front.get("/metrics").text
    assert "llamacpp:tokens_predicted_total 8.0" in text
    assert 'llamacpp:replica_tokens_predicted_total{replica="1"} 4.0' in text
    masks = [os.sched_getaffinity(pid) for pid in front.pids()]
    if len(os.sched_getaffinity(0)) >= 2:
        assert not masks[0] & masks[1] and masks[0] | masks[1] == os.sched_getaffinity(0)
    wrong = front.complete("a", temperature="hot")
    assert wrong.status_code == 400 and "temperature" in wrong.json()["error"]["message"]


def test_a_conversation_is_computed_where_it_began(front: Front) -> None:
    """What it holds is seen in the numbers of cached tokens."""
    told: dict[str, list[dict[str, str]]] = {name: [{"role": "user", "content": name * 60}] for name in ("ab", "xyz")}
    for turn in range(3):
        for messages in told.values():
            body = {"messages": messages, "max_tokens": 4}
            answer = front.post("/v1/chat/completions", body).json()
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert (cached > 50) == (turn > 0), answer["usage"]
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "go on"}]
    assert holders(front) == {0, 1}


def test_slots_are_saved_and_restored_by_their_replica(front: Front) -> None:
    front.complete("a text to be kept", n=0, id_slot=3)
    saved = front.post("/slots/3?action=save", {"filename": "kept"}).json()
    assert saved["id_slot"] == 3 and saved["n_saved"] > 0
    restored = front.post("/slots/0?action=restore", {"filename": "kept"}).json()  # of the other replica
    assert restored["n_restored"] == saved["n_saved"]
    assert [item["filename"] for item in front.get("/list").json()] == ["kept"]
    cached = front.complete("a text to be kept", id_slot=0).json()["timings"]["cache_n"]
    assert cached >= saved["n_saved"] - 1
    assert front.post("/delete_prompt", {"filename": "kept"}).status_code == 200 and front.get("/list").json() == []


def test_a_conversation_follows_its_cache(front: Front) -> None:
    """Replica 0 computed it, but only replica 1 holds it now: replicas are asked."""
    text = "the value of the list is a number, " * 36
    n = len(front.post("/tokenize", {"content": text}).json()["tokens"])
    answers = [front.complete(text, n=0, id_slot=0).json(), front.complete(text, n=0).json()]
    assert [answer["id_slot"] for answer in answers] == [0, 0]
    assert front.post("/slots/0?action=save", {"filename": "moves"}).status_code == 200
    assert front.post("/slots/0?action=erase", {}).status_code == 200
    assert front.post("/slots/3?action=restore", {"filename": "moves"}).json()["n_restored"] >= n
    moved = front.complete(text, n=0).json()
    assert moved["id_slot"] == 3 and moved["timings"]["cache_n"] >= n - 1
    front.post("/delete_prompt", {"filename": "moves"})


def test_no_request_is_lost_when_a_replica_dies(front: Front) -> None:
    """Whole answers all come; a stream is cut if its beginning was sent. The replica is started again."""
    starts = [one["starts"] for one in front.replicas()]
    victim = front.pids()[0]
    body = {"prompt": "a", "n_predict": ENDLESS, "ignore_eos": True, "stream": True, "id_slot": 0}
    with (
        ThreadPoolExecutor(6) as pool,
        httpx.stream("POST", front.base + "/completion", json=body, timeout=WAIT) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        asked = [pool.submit(front.complete, f"{i} text", 40) for i in range(12)]
        wait_for(lambda: any(one.done() for one in asked))
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            list(lines)
        answers = [one.result() for one in asked]
    assert [answer.status_code for answer in answers] == [200] * 12
    assert all(answer.json()["tokens_predicted"] == 40 for answer in answers)
    front.wait_all()
    after = front.replicas()
    assert after[0]["starts"] > starts[0] and after[1]["starts"] == starts[1] and "SIGKILL" in after[0]["error"]
    assert not alive(victim)
    assert front.complete("again", id_slot=0).status_code == 200
    text = front.get("/metrics").text
    assert 'llamacpp:replica_requests_unanswered_total{replica="0"}' in text


@pytest.mark.slow  # starts servers of its own
def test_hangup_restarts_all_while_requests_are_answered(front: Front) -> None:
    before, starts = front.pids(), [one["starts"] for one in front.replicas()]
    front.process.send_signal(signal.SIGHUP)
    answers = []
    while [one["starts"] for one in front.replicas()] != [n + 1 for n in starts]:
        answers.append(front.complete("text", 8))
    front.wait_all()
    assert answers and all(answer.status_code == 200 for answer in answers)
    assert not set(before) & set(front.pids()) and not any(alive(pid) for pid in before)


def test_departing_clients_free_their_slots(front: Front) -> None:
    body = {"prompt": "a", "n_predict": ENDLESS, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", front.base + "/completion", json=body, timeout=WAIT) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert front.busy() == 1
    wait_for(lambda: front.busy() == 0)


@pytest.mark.slow  # starts servers of its own
def test_users_and_keys(tmp_path: Path) -> None:
    """They are the front's; options from a file and the environment reach the replicas, keys do not."""
    keys, options = tmp_path / "keys.toml", tmp_path / "ik.toml"
    keys.write_text('[anna]\nkey = "a"\n', encoding="utf-8")
    keys.chmod(0o600)
    options.write_text('ctx-size = 512\nreplicas = 2\n[serve]\napi-key = "very-secret"\n', encoding="utf-8")
    front = Front("--config", str(options), "--keys", str(keys), "--metrics", "-t", "2", log=tmp_path / "log")
    front.wait_ready()
    assert front.complete("a").status_code == 401
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    used = 0
    for stream in (False, True, False):
        answer = httpx.post(
            front.base + "/v1/chat/completions", json=body | {"stream": stream, "ignore_eos": True},
            headers={"Authorization": "Bearer a"}, timeout=WAIT,
        )  # fmt: skip
        assert answer.status_code == 200
        used += 5
    admin = {"X-Api-Key": "very-secret"}
    wait_for(
        lambda: (
            f'user_tokens_predicted_total{{user="anna"}} {float(used)}'
            in httpx.get(front.base + "/metrics", headers=admin, timeout=WAIT).text
        )
    )
    slots = httpx.get(front.base + "/slots", headers=admin, timeout=WAIT).json()
    assert slots[0]["n_ctx"] == 512
    for pid in children_of(front.process.pid):
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"secret" not in line and b"--first-slot" in line
    pids = children_of(front.process.pid)
    front.process.kill()  # no process is left behind
    front.process.wait(WAIT)
    wait_for(lambda: not any(alive(pid) for pid in pids))
    assert "secret" not in front.text() and "Traceback" not in front.text()


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--replicas", "0"), 2, "--replicas"),
        (("--replicas", "2", "--first-slot", "1"), 2, "--first-slot cannot be used with --replicas"),
        (("--replica-gpus", "1"), 2, "--replica-gpus is for --replicas"),
        (("--replicas", "2", "--slot-save-path", "nowhere"), 2, "nowhere is not a directory"),
        (("--replicas", "2", "--host", "256.1.1.1"), 1, "--host 256.1.1.1"),
        (("--replicas", "2", "-m", "absent.gguf"), 1, "absent.gguf"),
        (("--replicas", "2", "--models", "m.toml"), 2, "--replicas cannot be used with several models"),
        (("--replicas", "2", "--ray-node", "fast"), 2, "--ray-node names nodes of Ray; add --ray ADDRESS"),
        (("--ray", "auto", "--ray-node", "a,b"), 2, "--ray-node a,b: only ik bench takes several; name one"),
        pytest.param(  # waits for Ray
            ("--replicas", "2", "--ray", "127.0.0.1:1"),
            1,
            "--ray 127.0.0.1:1: no cluster answers there",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_wrong_options(
    options: tuple[str, ...],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["serve", "--port", "0", *options]) == code
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said


@pytest.mark.slow  # starts servers of its own
def test_a_model_that_no_process_can_load(tmp_path: Path) -> None:
    """What the front cannot know from headers: the server ends, and says what the process said."""
    broken = tmp_path / "draft.gguf"
    broken.write_bytes(b"no model")
    options = ("--replicas", "2", "-md", str(broken), "--spec-type", "draft", "-c", "512")
    done = subprocess.run([sys.executable, *COMMON, *options], capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 1 and str(broken) in done.stderr and "Traceback" not in done.stderr, done.stderr
