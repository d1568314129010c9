"""`ik serve --replicas 2 --ray` on a cluster of one machine that plays several nodes; nodes and processes die."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_client import ENDLESS
from live_router import alive
from live_server import WAIT, wait_for
from quant_models import write_model
from ray_nodes import Nodes, cluster, needs_ray
from test_replicas_live import Front

pytestmark = [
    needs_ray,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,  # four nodes on one machine: minutes
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc"),
]
KINDS = ("one", "two", "spare")
OPTIONS = ("--replicas", "2", "-t", "1", "-c", "1024", "-np", "2", "--cache-ram", "8", "--temp", "0", "--metrics")
ADMIN = {"X-Api-Key": "admin"}


class RayFront(Front):
    """A server of replicas on Ray, which needs a key."""

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.base + path, json=body, timeout=WAIT, headers=ADMIN)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.base + path, timeout=WAIT, headers=ADMIN)

    def pids(self) -> list[int]:
        return [int(one["where"].rpartition("process ")[2]) for one in self.replicas()]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with cluster(KINDS) as found:
        yield found


@pytest.fixture(scope="module")
def front(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayFront]:
    folder = tmp_path_factory.mktemp("replicas")
    model = write_copy(folder / "m.gguf")
    found = RayFront(*OPTIONS, "-m", str(model), "--ray", nodes.address, "--api-key", "admin", log=folder / "log")
    found.wait_ready()
    found.wait_all()
    yield found
    pids = found.pids()
    assert found.stop() == 0, found.text()
    wait_for(lambda: not any(alive(pid) for pid in pids))
    assert "Traceback" not in found.text() and "internal error" not in found.text(), found.text()


def write_copy(path: Path) -> Path:
    from ikcli.settings.run import default_model

    shutil.copy(default_model(), path)
    return path


def parents(pid: int) -> list[int]:
    """The processes that began one, up to the first of all."""
    found = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(pid)
    return found


def kind_of(nodes: Nodes, pid: int) -> str:
    """The node that a process is on."""
    return next(kind for kind in KINDS if set(nodes.raylets(kind)) & set(parents(pid)))


def test_one_server_for_clients(front: RayFront, nodes: Nodes) -> None:
    """On a node each, which nobody reaches without the key of the run; counted together."""
    assert len({kind_of(nodes, pid) for pid in front.pids()}) == 2
    answers = [front.complete("def f(", id_slot=slot).json() for slot in (1, 2)]
    assert [answer["id_slot"] for answer in answers] == [1, 2] and answers[0]["content"] == answers[1]["content"]
    text = front.get("/metrics").text
    assert "llamacpp:tokens_predicted_total 8.0" in text
    assert 'llamacpp:replica_tokens_predicted_total{replica="1"} 4.0' in text
    lines = [line for line in front.text().splitlines() if line.startswith("replica 0: ") and "listening" in line]
    port = lines[0].partition('port="')[2].partition('"')[0]
    address = front.replicas()[0]["where"].split()[1].rstrip(",")
    for key in (None, "admin"):
        refused = httpx.post(
            f"http://{address}:{port}/completion", json={"prompt": "a"}, headers={"X-Api-Key": key} if key else {}
        )
        assert refused.status_code == 401
    told: list[dict[str, str]] = [{"role": "user", "content": "abc" * 60}]
    for turn in range(2):
        answer = front.post("/v1/chat/completions", {"messages": told, "max_tokens": 4}).json()
        assert (answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 50) == (turn > 0)
        told += [answer["choices"][0]["message"], {"role": "user", "content": "go on"}]


def test_no_request_is_lost_when_a_node_dies(front: RayFront, nodes: Nodes) -> None:
    """Whole answers all come, a stream that began is cut, and the replica is started on another node."""
    starts = [one["starts"] for one in front.replicas()]
    victim = front.pids()[0]
    kind = kind_of(nodes, victim)
    body = {"prompt": "a", "n_predict": ENDLESS, "ignore_eos": True, "stream": True, "id_slot": 0}
    with (
        ThreadPoolExecutor(6) as pool,
        httpx.stream("POST", front.base + "/completion", json=body, timeout=WAIT, headers=ADMIN) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        asked = [pool.submit(front.complete, f"{i} text", 40) for i in range(12)]
        wait_for(lambda: any(one.done() for one in asked))
        for pid in [*nodes.raylets(kind), *parents(victim)[:1], victim]:  # a machine without power: all at once
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            list(lines)
        answers = [one.result() for one in asked]
    assert [answer.status_code for answer in answers] == [200] * 12
    assert all(answer.json()["tokens_predicted"] == 40 for answer in answers)
    wait_for(lambda: front.replicas()[0]["starts"] > starts[0])
    front.wait_all()
    after = front.replicas()
    assert after[1]["starts"] == starts[1] and after[0]["error"]
    assert kind_of(nodes, front.pids()[0]) not in (kind, kind_of(nodes, front.pids()[1]))
    assert front.complete("again", id_slot=0).status_code == 200
    nodes.mend()


def test_a_raylet_dies(front: RayFront, nodes: Nodes) -> None:
    """The actors of its node end, and with them their processes."""
    victim = front.pids()[1]
    starts = front.replicas()[1]["starts"]
    for pid in nodes.raylets(kind_of(nodes, victim)):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not alive(victim))
    assert front.complete("meanwhile").status_code == 200
    wait_for(lambda: front.replicas()[1]["starts"] > starts)
    front.wait_all()
    assert "its node is lost" in front.replicas()[1]["error"]
    nodes.mend()


def test_a_node_falls_silent(front: RayFront, nodes: Nodes) -> None:
    """Its connections do not end, and nobody answers: what was asked there is answered by another one."""
    victim, starts = front.pids()[0], front.replicas()[0]["starts"]
    stopped = [*nodes.raylets(kind_of(nodes, victim)), *parents(victim)[:1], victim]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(front.complete, f"{i} silent") for i in range(4)]
            assert all(one.result().status_code == 200 for one in asked)
        wait_for(lambda: front.replicas()[0]["starts"] > starts)
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    front.wait_all()
    nodes.mend()


def test_restart_of_all_while_requests_are_answered(front: RayFront) -> None:
    before = front.pids()
    with ThreadPoolExecutor(1) as pool:
        restarted = pool.submit(front.post, "/replicas/restart", {})
        answers = []
        while not restarted.done():
            answers.append(front.complete("text", 8))
        assert restarted.result().json() == {"success": True}
    assert answers and all(answer.status_code == 200 for answer in answers)
    assert not set(before) & set(front.pids()) and not any(alive(pid) for pid in before)


def test_a_killed_front_leaves_nothing(front: RayFront, nodes: Nodes, tmp_path: Path) -> None:
    """On nodes of a kind; a model that changed there is noticed when a process is started again."""
    (kind,) = set(KINDS) - {kind_of(nodes, pid) for pid in front.pids()}
    model = write_copy(tmp_path / "m.gguf")
    options = ("--ray", nodes.address, "--ray-node", kind, "--api-key", "admin", "-t", "1", "-c", "512")
    other = RayFront(*options, "-m", str(model), log=tmp_path / "log")
    other.wait_ready()
    (pid,) = other.pids()
    assert kind_of(nodes, pid) == kind
    write_model(tmp_path / "other.gguf").replace(model)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: "is another file than that of the server" in other.replicas()[0]["error"])
    write_copy(model)
    wait_for(lambda: other.replicas()[0]["state"] == "ready")
    (pid,) = other.pids()
    other.process.kill()
    other.process.wait(WAIT)
    wait_for(lambda: not alive(pid))
