"""Replicas on nodes of Ray, which is a fake here: real processes, nodes that die, files that nodes lack or changed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_processes import Answer, Bench
from fake_ray import FakeRay, Node, RayError
from proxies import run
from quant_models import write_model

from ikcli.cli.front_options import paths_passed_on
from ikcli.cli.parser import parse
from ikcli.errors import IkError, UnsupportedError
from ikcli.fleet import files, ray_cluster
from ikcli.gguf import digests as digest
from ikcli.gguf.reader import open_gguf
from ikcli.server.front import ray_node as node_module
from ikcli.server.front import ray_process
from ikcli.server.front import replicas as replicas_module
from ikcli.server.front.placement import LaunchSpec
from ikcli.server.front.ray_node import ReplicaLaunch
from ikcli.server.front.ray_placement import RayPlacement
from ikcli.server.http.logs import ServerLog
from ikcli.settings.fleet import BatchConfig
from ikcli.settings.run import RunConfig
from ikcli.settings.server import ServerConfig

STUB = Path(__file__).with_name("stub_server.py")
Stub = Callable[..., "Cluster"]


class Cluster:
    """A front over fake nodes, whose replicas have one processor each."""

    def __init__(self, model: Path, nodes: tuple[Node, ...], n: int = 2, ray: str = "auto", **server: Any) -> None:
        self.ray, self.model = FakeRay(*nodes), model
        config = RunConfig(
            command="serve", n_parallel=2, n_threads=1, n_threads_batch=1,
            server=ServerConfig(alias="m", replicas=n, shutdown_timeout=1, **server),
            fleet=BatchConfig(ray=ray, ray_node=next((node.kind for node in nodes if node.kind), "")),
        )  # fmt: skip
        spec = LaunchSpec(config, ("--model", str(model)), (model,))
        self.log = ServerLog(out=None)
        self.placement = RayPlacement(spec, self.log)
        self.n = n

    def run(self, work: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
        async def inside() -> None:
            bench = Bench(self.n, placement=self.placement, api_key="admin")
            async with bench.running():
                await work(bench)

        self.placement.open()
        try:
            run(inside)
        finally:
            self.placement.close()
        assert not any(node.actors for node in self.ray.machines), "all are stopped"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """Makes clusters; replicas are stubs that say what their model file holds."""
    plain = ReplicaLaunch.child

    def child(start: ReplicaLaunch, say: Any) -> Any:
        found = plain(start, say)
        found._argv = [sys.executable, str(STUB), *found._argv[4:]]
        return found

    monkeypatch.setattr(ReplicaLaunch, "child", child)
    monkeypatch.setattr(replicas_module, "_LONGEST_PAUSE", 0.05)
    monkeypatch.setenv("IK_CACHE_DIR", str(tmp_path / "cache"))
    model = tmp_path / "model.txt"
    model.write_text("one")

    def make(*nodes: Node, **options: Any) -> Cluster:
        found = Cluster(model, nodes, **options)
        monkeypatch.setattr(ray_cluster, "import_ray", lambda: found.ray)
        return found

    yield make


async def ask(b: Bench, body: Any = None, path: str = "/completion") -> Any:
    answer = await b.ask(path, {"prompt": "p"} if body is None else body, key="admin")
    assert answer.status == 200, answer.body
    return answer.json()


async def about(b: Bench) -> list[dict[str, Any]]:
    return list((await b.ask("/replicas", key="admin")).json())


def test_one_on_every_node(cluster: Stub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With their logs here, a key of the run that nobody sees, and no options from their environment."""
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "17")
    nodes = Node(2), Node(2)
    one = cluster(*nodes)

    async def work(b: Bench) -> None:
        assert [len(node.actors) for node in nodes] == [1, 1]
        found = [await ask(b, {"prompt": "p", "id_slot": slot}) for slot in (0, 2)]
        assert [answer["first"] for answer in found] == [0, 2] and found[0]["model"] == "one"
        where = [f"node 127.0.0.1, process {answer['pid']}" for answer in found]
        assert [shown["where"] for shown in await about(b)] == where
        key = b.supervisor.replicas[0].process.key
        assert len(key) > 30
        for pid in (answer["pid"] for answer in found):
            assert key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
            assert b"LLAMA_ARG" not in Path(f"/proc/{pid}/environ").read_bytes()
        address = b.supervisor.replicas[0].process.address
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"POST /completion HTTP/1.1\r\nauthorization: Bearer admin\r\ncontent-length: 0\r\n\r\n")
        assert b" 401 " in await reader.readline()
        writer.close()

    one.run(work)
    assert not one.ray.on
    out, err = capsys.readouterr()
    assert "replica 0: begins\n" in out and "replica 1: begins\n" in out and err.count("asked") == 2
    asked = one.ray.asked[0]
    assert (asked["num_cpus"], asked["num_gpus"], asked["resources"]) == (1, 0, {})


def test_a_node_dies(cluster: Stub) -> None:
    """What it had not answered another one does, a stream that began is cut, the replica comes back elsewhere."""
    nodes = Node(1), Node(1), Node(1)
    one = cluster(*nodes)

    async def work(b: Bench) -> None:
        node = next(n for n in nodes if n.actors and n.actors[0] is b.supervisor.replicas[0].process._actor)
        streamed = Answer(b.app, "/completion", {"prompt": "stream", "id_slot": 0}, key="admin")
        await b.until(lambda: bool(streamed.pieces))
        waiting = Answer(b.app, "/tokenize", {"content": "wait"}, key="admin")
        await b.until(lambda: sum(r.n_running for r in b.supervisor.replicas) == 2)
        on_it = b.supervisor.replicas[0].n_running == 2
        one.ray.end(node)
        await streamed.work
        assert streamed.body == b"one" and not streamed.ended
        if on_it:
            await b.until(lambda: b.supervisor.replicas[1].n_running == 1)
        waiting.leave()
        await waiting.work
        assert (await ask(b))["first"] == 2
        await b.until(lambda: b.supervisor.replicas[0].usable)
        shown = (await about(b))[0]
        assert "its node is lost: The actor's node was terminated." in shown["error"] and shown["starts"] == 2
        assert (await ask(b, {"prompt": "p", "id_slot": 0}))["first"] == 0 and len(nodes[2].actors) == 1

    one.run(work)


def test_what_has_not_begun_is_asked_again(cluster: Stub) -> None:
    """Of the same node, where the process is started again."""
    one = cluster(Node(1), n=1)

    async def work(b: Bench) -> None:
        before = (await ask(b))["pid"]
        waiting = Answer(b.app, "/completion", {"prompt": "wait"}, key="admin")
        await b.until(lambda: b.supervisor.replicas[0].n_running == 1)
        os.kill(before, signal.SIGKILL)
        await b.until(lambda: b.supervisor.replicas[0].n_starts == 2 and b.supervisor.replicas[0].n_running == 1)
        waiting.leave()
        await waiting.work
        shown = (await about(b))[0]
        assert (await ask(b))["pid"] != before and shown["error"] == "its process ended by signal SIGKILL"
        text = (await b.ask("/metrics", key="admin")).status
        assert text == 501  # not asked for

    one.run(work)


def test_no_room(cluster: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ray_process, "_PATIENCE", 0.02)
    one = cluster(Node(1))

    one.placement.open()

    async def inside() -> None:
        b = Bench(2, placement=one.placement, api_key="admin")
        task = asyncio.ensure_future(b.supervisor.run())
        await b.until(lambda: b.supervisor.opened)
        assert (await ask(b))["first"] in (0, 2)
        await asyncio.sleep(0.05)
        shown = [shown for shown in await about(b) if shown["state"] == "starting"]
        assert [one["where"] for one in shown] == ["no node yet"]
        one.ray.machines.append(Node(1))
        await b.until(lambda: all(r.usable for r in b.supervisor.replicas))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await b.supervisor.close()

    try:
        run(inside)
    finally:
        one.placement.close()
    said = capsys.readouterr().out
    assert "no node of Ray has room for the replica now; it waits" in said and 'needs="1 processors"' in said


def test_a_replaced_model_is_noticed(cluster: Stub) -> None:
    """A process that is started again for other reasons must not serve it beside the old one."""
    one = cluster(Node(2))

    async def work(b: Bench) -> None:
        pid = (await ask(b, {"prompt": "p", "id_slot": 0}))["pid"]
        one.model.write_text("two")
        os.kill(pid, signal.SIGKILL)
        await b.until(lambda: b.supervisor.replicas[0].n_ended > 1)
        assert "is another file than that of the server: to serve a new one restart all" in (await about(b))[0]["error"]
        assert (await ask(b))["model"] == "one"
        await ask(b, {}, "/replicas/restart")
        assert [(await ask(b, {"prompt": "p", "id_slot": slot}))["model"] for slot in (0, 2)] == ["two", "two"]
        one.model.unlink()
        refused = await b.ask("/replicas/restart", {}, key="admin")
        assert refused.status == 500 and "nothing was restarted: cannot read" in refused.json()["error"]["message"]
        assert [shown["starts"] for shown in await about(b)][1] == 2

    one.run(work)


def test_a_node_without_the_model_fetches_it(cluster: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a newer one, at a rolling restart; its name there is what it was."""
    one = cluster(Node(2))
    source, absent = one.model, tmp_path / "other" / "model.txt"
    plain = files.needed_of
    monkeypatch.setattr(
        "ikcli.server.front.ray_placement.needed_of",
        lambda found: [files.Needed((absent,), n.sizes, n.digest, n.sources) for n in plain(found)],
    )
    begin = one.placement._begin
    monkeypatch.setattr(
        one.placement, "_begin", lambda start: begin(files.moved(start, {source: absent}))
    )  # the node knows the path, but has no such file

    async def work(b: Bench) -> None:
        assert (await ask(b))["model"] == "one"
        kept = tmp_path / "cache" / "fleet" / digest.of_input(source)[:32] / "model.txt"
        assert kept.read_text() == "one"
        source.write_text("two")
        await ask(b, {}, "/replicas/restart")
        assert {(await ask(b, {"prompt": "p", "id_slot": slot}))["model"] for slot in (0, 2)} == {"two"}
        assert kept.read_text() == "one" and not absent.exists()

    one.run(work)


@pytest.mark.parametrize("how", ["version", "begin", "load"])
def test_nodes_that_cannot_serve_end_the_server(cluster: Stub, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = cluster(Node(2))
    wanted = {
        "version": "node 127.0.0.1 has ik 0.0.1, the front is",
        "begin": "No module named 'ikcli'; is ik installed there?",
        "load": "the model is broken",
    }[how]
    if how == "version":
        monkeypatch.setattr(node_module, "__version__", "0.0.1")
    elif how == "begin":
        one.ray.fails = RayError("The actor died\nNo module named 'ikcli'")
    else:
        one.model.write_text("broken")

    async def work(b: Bench) -> None:
        await b.until(lambda: bool(b.supervisor.failure))
        assert wanted in b.supervisor.failure

    one.run(work)


def test_one_that_does_not_answer_is_replaced(cluster: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "_CHECK", 0.02)
    monkeypatch.setattr(replicas_module, "_PATIENCE", 0.1)
    one = cluster(Node(1), n=1)

    async def work(b: Bench) -> None:
        pid = (await ask(b))["pid"]
        os.kill(pid, signal.SIGSTOP)
        assert (await ask(b))["pid"] != pid
        assert not Path(f"/proc/{pid}").exists() and (await about(b))[0]["error"] == "it did not answer"

    one.run(work)


def test_places_that_are_too_small(cluster: Stub) -> None:
    for nodes, options, message in (
        ((Node(0),), {}, "a replica has 1 threads, no node of Ray has more than 0 processors; use -t"),
        ((Node(4), Node(0, gpus=4)), {"replica_gpus": 1}, "--replica-gpus 1: no node of Ray has so many GPUs"),
    ):
        one = cluster(*nodes, **options)
        with pytest.raises(IkError, match=message):
            one.placement.open()
        assert not one.ray.on
    one = cluster(Node(2, kind="fast"))
    one.ray.machines[0].kind = "slow"
    with pytest.raises(IkError, match="--ray-node fast: no node of Ray has this resource, they offer slow"):
        one.placement.open()


def test_ray_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None)))
    with pytest.raises(UnsupportedError, match=r'not installed: pip install "ikcli\[ray\]"'):
        Cluster(tmp_path / "m", ()).placement.open()


def test_on_this_machine_they_share_its_threads(cluster: Stub) -> None:
    one = cluster(Node(2), ray="local", cache_ram=64)
    one.placement.open()
    try:
        options = one.placement._spec.shared(1)
        assert "--threads=1" in options and any(word.startswith("--cache-ram=") for word in options)
        assert one.placement.one_first and one.placement._file_server is None and one.placement._cpus == 1
    finally:
        one.placement.close()


def test_paths_hold_on_other_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are absolute, words of their own, and what is only written is not fetched."""
    monkeypatch.chdir(tmp_path)
    argv = ["-m", "a.gguf", "-md", "/d.gguf", "--lora", "l1", "--lora-scaled", "l2", "0.5", "--slot-save-path", "slots"]
    words, inputs = paths_passed_on(
        "serve", parse("serve", [*argv, "--grammar-file", "g", "--api-key-file", "k"]).config
    )
    pairs = {words[i]: words[i + 1] for i in range(len(words) - 1)}
    assert pairs["--model"] == str(tmp_path / "a.gguf") and pairs["--slot-save-path"] == str(tmp_path / "slots")
    assert pairs[str(tmp_path / "l2")] == "0.5" and "--api-key-file" not in words
    assert set(inputs) == {Path("/d.gguf"), *(tmp_path / name for name in ("a.gguf", "l1", "l2", "g"))}
    again = parse("serve", words).config
    assert again.adapters.lora == (tmp_path / "l1",) and again.adapters.lora_scaled[0].scale == 0.5


def test_a_model_is_known_by_all_that_its_header_says(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf")
    before = digest.of_input(path)
    assert digest.of_input(path) == before != digest.of_file(path)
    data = path.read_bytes()
    name = b"general.architecture"
    path.write_bytes(data.replace(name, b"general.architectur3"))
    assert name in data and digest.of_model(open_gguf(path)) and digest.of_input(path) != before
    with pytest.raises(IkError, match="cannot read"):
        digest.of_input(tmp_path / "absent")
