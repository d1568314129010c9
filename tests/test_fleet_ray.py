"""Work on Ray: one machine that plays several nodes; workers, nodes and commands that die under way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fleet_deaths import Around, Deadly, change_workers, wait_until
from quant_models import write_model
from ray_nodes import Nodes, cluster, needs_ray

from ikcli.bench import fleet as fleet_bench
from ikcli.errors import IkError
from ikcli.fleet import files, ray_stages
from ikcli.fleet.choose import executor
from ikcli.fleet.executor import ByKind
from ikcli.gguf import digests as digest
from ikcli.gguf.reader import open_gguf
from ikcli.imatrix import fleet as fleet_imatrix
from ikcli.main import main
from ikcli.measure import fleet as fleet_windows
from ikcli.native.kernel_cache import cache_root
from ikcli.settings.run import default_model, default_text
from ikcli.study import fleet_calibrate, fleet_quantize, fleet_stats

pytestmark = [
    needs_ray,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,  # three nodes on one machine: minutes
]
KINDS = ("steady", "shaky")
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with cluster(KINDS) as found:
        yield found


@pytest.fixture(autouse=True)
def mended(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "nodes" in request.fixturenames:
        request.getfixturevalue("nodes").mend()


@dataclass(frozen=True)
class DeadlyNode(Deadly):
    """As `Deadly`, with the node of the worker: its raylet and all that this has begun."""

    def __call__(self) -> Any:
        worker = super().__call__()
        plain = worker.do

        def do(unit: Any) -> Any:
            mark = self.room / "node-died"
            if (self.room / "died").exists() and worker.n > self.at and not mark.exists():
                mark.touch()
                os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(unit)

        worker.do = do
        return worker


# --- the executor -----------------------------------------------------------------------------------------------------
class Places:
    """Says where it is done."""

    def __call__(self) -> Places:
        return self

    def do(self, unit: int) -> tuple[int, str]:
        import ray

        if unit < 0:
            raise IkError(f"{unit} is negative")
        return unit * unit, ray.get_runtime_context().get_node_id()

    def close(self) -> None:
        """Nothing is held."""


def test_no_cluster_at_the_address() -> None:
    words = [sys.executable, "-m", "ikcli", "quantize-stats", "--type", "q8_0", "--ray", "127.0.0.1:1"]
    found = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 1 and "no cluster answers there" in found.stderr and "Traceback" not in found.stderr


def test_errors_and_kinds_of_nodes(nodes: Nodes) -> None:
    with pytest.raises(IkError, match="-1 is negative"):
        list(executor(2, "auto", 1).run(Places(), [7, -1]))
    with pytest.raises(IkError, match="no node of Ray has this resource, they offer shaky, steady"):
        list(executor(1, "auto", 1, "fast").run(Places(), [1]))
    where = {}
    for kind in KINDS:
        results = dict(executor(1, "auto", 1, kind).run(Places(), list(range(4))))
        assert [results[i][0] for i in range(4)] == [0, 1, 4, 9]
        (where[kind],) = {node for _, node in results.values()}
    assert where["steady"] != where["shaky"]


def test_a_node_without_the_model_fetches_it(
    nodes: Nodes, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = stats(tmp_path)
    assert main(words) == 0
    alone = capsys.readouterr().out
    source = tmp_path / "in.gguf"
    other = tmp_path / "other-node" / "in.gguf"  # where no worker finds it
    monkeypatch.setattr(files, "parts_of", lambda path: (source,))
    change_workers(monkeypatch, fleet_stats, lambda f: files.moved(f, {source: other}))
    cached = cache_root().parent / "fleet" / digest.of_model(open_gguf(source))[:32]
    try:
        assert main([*words, "--ray", nodes.address, "--ray-workers", "2"]) == 0
        assert capsys.readouterr().out == alone
        assert (cached / "in.gguf").read_bytes() == source.read_bytes() and not other.exists()
    finally:
        shutil.rmtree(cached, ignore_errors=True)
        cached.with_suffix(".lock").unlink(missing_ok=True)


# --- every command ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    """`words` of a command but for its journal; what it made, from its output and the folder it worked in."""

    module: Any
    words: Callable[[Path], list[str]]
    made: Callable[[str, Path], Any]
    journal: str = "--journal"
    suffix: str = ""


def text_of(room: Path, n: int = 6000) -> str:
    path = room / "text.txt"
    path.write_text(default_text().read_text("utf-8")[20000 : 20000 + n], "utf-8")
    return str(path)


def perplexity(room: Path) -> list[str]:
    return ["perplexity", "-f", text_of(room), "-c", "64", "-b", "64", "-t", "1"]


def divergence(room: Path) -> list[str]:
    words, base = perplexity(room), str(room / "base.kld")
    with suppress(FileExistsError):
        (room / "made").mkdir()
        assert main([*words, "--kl-divergence-base", base]) == 0
    return [*words, "--kl-divergence-base", base, "--kl-divergence", "-ctk", "q4_0"]


def imatrix(room: Path) -> list[str]:
    return ["imatrix", "-f", text_of(room), "-c", "64", "-t", "1", "-ofreq", "3", "-o", str(room / "i.gguf"), "-lsim"]


def quantize(room: Path) -> list[str]:
    source = room / "in.gguf" if (room / "in.gguf").exists() else write_model(room / "in.gguf")
    (room / "list.txt").write_text("Q4_K_M\nIQ4_K\nQ8_0\n")
    return ["quantize", "-t", "1", "--matrix", str(room / "list.txt"), str(source), str(room / "out")]


def stats(room: Path) -> list[str]:
    source = room / "in.gguf" if (room / "in.gguf").exists() else write_model(room / "in.gguf")
    return ["quantize-stats", "-t", "1", "-m", str(source), "--type", "q4_K,iq2_k,q8_0", "--output-format", "jsonl"]


def calibrate(room: Path) -> list[str]:
    words = ["quantize", "-t", "1", "--target-bpw", "5", "--candidates", "q4_0,q5_0,q8_0", "--target-rows", "16"]
    words += ["--calibrate", text_of(room, 4000), "--calibrate-chunks", "1", "--calibrate-groups", "1", "--dry-run"]
    return [*words, "--write-recipe", str(room / "recipe.txt"), str(default_model()), "unused.gguf"]


def study(room: Path) -> list[str]:
    words = ["study", "-f", text_of(room, 4000), "--types", "q4_0,q8_0", "--by", "role", "--chunks", "2", "-c", "128"]
    return [*words, "-t", "1", "--precision", "0", "--json"]


CASES = {
    "perplexity": Case(fleet_windows, perplexity, lambda out, room: out),
    "kl-divergence": Case(fleet_windows, divergence, lambda out, room: out),
    "imatrix": Case(fleet_imatrix, imatrix, lambda out, room: (out, (room / "i.gguf").read_bytes())),
    "quantize": Case(
        fleet_quantize, quantize, lambda out, room: {p.name: p.read_bytes() for p in (room / "out").iterdir()}
    ),
    "quantize-stats": Case(fleet_stats, stats, lambda out, room: out),
    "calibrate": Case(
        fleet_calibrate, calibrate, lambda out, room: (room / "recipe.txt").read_text(), suffix=".calibrate"
    ),
    "study": Case(None, study, lambda out, room: json.loads(out)["results"], journal="-o"),
}


def result(case: Case, words: list[str], room: Path, capsys: Capture) -> Any:
    capsys.readouterr()
    assert main(words) == 0
    return case.made(capsys.readouterr().out, room)


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_quantize, "_UNIT", 1 << 14)


@pytest.mark.parametrize("name", CASES)
def test_a_worker_and_then_a_node_die(
    name: str, nodes: Nodes, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ikcli.commands import study as study_command

    case = CASES[name]
    words, journal = case.words(tmp_path), tmp_path / "j.jsonl"
    alone = result(case, words, tmp_path, capsys)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    change_workers(monkeypatch, case.module or study_command, lambda f: DeadlyNode(f, tmp_path))
    assert main([*words, "--ray", "auto", "--ray-workers", "2", case.journal, str(journal)]) == 0
    out, err = capsys.readouterr()
    assert case.made(out, tmp_path) == alone
    assert (tmp_path / "died").exists() and (tmp_path / "node-died").exists()
    assert err.count("its unit is done again") >= 2
    keys = [json.loads(line).get("key") for line in Path(f"{journal}{case.suffix}").read_text().splitlines()]
    assert len(keys) == len(set(keys))  # nothing is counted twice


@pytest.mark.parametrize("name", CASES)
def test_a_command_is_killed(name: str, nodes: Nodes, tmp_path: Path, capsys: Capture) -> None:
    case = CASES[name]
    words, journal = case.words(tmp_path), tmp_path / "j.jsonl"
    alone = result(case, words, tmp_path, capsys)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    kept = Path(f"{journal}{case.suffix}")
    divided = [*words, "--ray", nodes.address, "--ray-workers", "2", case.journal, str(journal)]
    driver = subprocess.Popen([sys.executable, "-m", "ikcli", *divided], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: kept.exists() and kept.read_bytes().count(b"\n") > 2, 120)
    finally:
        driver.kill()
        driver.wait()
    known = kept.read_bytes().count(b"\n")
    assert result(case, divided, tmp_path, capsys) == alone
    assert 2 < known <= kept.read_bytes().count(b"\n")


def test_bench_on_kinds_of_nodes(
    nodes: Nodes, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_bench, "ByKind", lambda works: Around(ByKind(works), lambda f: Deadly(f, tmp_path)))
    words = ["bench", "-p", "16", "-n", "2", "-r", "1", "-t", "1", "-ub", "8,16,32", "-o", "jsonl"]
    journal = tmp_path / "j.jsonl"
    assert main([*words, "--ray", "auto", "--ray-node", "steady,shaky", "--journal", str(journal)]) == 0
    out, err = capsys.readouterr()
    found = [json.loads(line) for line in out.splitlines()]
    assert [(r["node"], r["n_ubatch"], r["test"]) for r in found] == [
        (kind, n, test) for kind in KINDS for n in (8, 16, 32) for test in ("pp16", "tg2")
    ]
    assert err.count("its unit is done again") == 1
    assert journal.read_bytes().count(b"\n") == 1 + 2 * 3


def test_bench_goes_on_after_a_killed_command(nodes: Nodes, tmp_path: Path, capsys: Capture) -> None:
    """What was measured is kept, sample by sample, and nothing is measured twice."""
    journal = tmp_path / "j.jsonl"
    words = ["bench", "-p", "64", "-n", "16", "-r", "3", "-t", "1", "-ub", "8,16,32,64", "-o", "jsonl"]
    words += ["--ray", nodes.address, "--ray-node", "steady,shaky", "--journal", str(journal)]
    driver = subprocess.Popen([sys.executable, "-m", "ikcli", *words], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: journal.exists() and journal.read_bytes().count(b"\n") > 2, 120)
    finally:
        driver.kill()
        driver.wait()
    known = [json.loads(line) for line in journal.read_bytes().splitlines(keepends=True)[1:] if line.endswith(b"\n")]
    assert 2 <= len(known) < 8
    capsys.readouterr()
    assert main(words) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["node"], r["n_ubatch"], r["test"]) for r in rows] == [
        (kind, n, test) for kind in KINDS for n in (8, 16, 32, 64) for test in ("pp64", "tg16")
    ]
    records = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    assert records[: len(known)] == known
    assert len({r["key"] for r in records}) == len(records) == 8
    samples = [test["samples_ns"] for r in records for test in r["tests"]]
    assert sorted(samples) == sorted(r["samples_ns"] for r in rows)


def test_a_model_in_stages_on_two_nodes(
    nodes: Nodes, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node has one processor, so each has a stage; both fetch the model, which is not at the path of the command."""
    source = tmp_path / "in.gguf"
    shutil.copy(default_model(), source)
    words = ["perplexity", "-m", str(source), *perplexity(tmp_path)[1:]]
    assert main(words) == 0
    alone = capsys.readouterr().out
    plain = ray_stages.RaySupervisor.begin

    def hidden(self: Any, stages: Any) -> None:
        other = tmp_path / "other-node" / "in.gguf"
        monkeypatch.setattr(files, "parts_of", lambda path: (source,))
        plain(self, [files.moved(stage, {source: other}) for stage in stages])

    monkeypatch.setattr(ray_stages.RaySupervisor, "begin", hidden)
    cached = cache_root().parent / "fleet" / digest.of_model(open_gguf(source))[:32]
    try:
        assert main([*words, "--stages", "2", "--ray", nodes.address]) == 0
        out, err = capsys.readouterr()
        assert out == alone and "stages: layers 0-" in err
        assert (cached / "in.gguf").read_bytes() == source.read_bytes()
    finally:
        shutil.rmtree(cached, ignore_errors=True)
        cached.with_suffix(".lock").unlink(missing_ok=True)
