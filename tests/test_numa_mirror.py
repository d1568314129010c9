"""--numa mirror: threads read the weights of their node, work is shared, memory is counted, refusals are sentences."""

from __future__ import annotations

import os

import numpy as np
import pytest
from kernel_harness import LIBRARY, Harness, Segment

from ikcli.backends.cpu.call_records import CallRecords
from ikcli.backends.cpu.lower import RULES
from ikcli.backends.cpu.threads import Team
from ikcli.backends.memory import aligned_zeros
from ikcli.engine.plan.planner import Planner
from ikcli.engine.run import mirror, numa, weight_memory
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.session import Session
from ikcli.errors import IkError, UsageError
from ikcli.gguf.constants import GGMLType
from ikcli.graph import Weight
from ikcli.settings.run import RunConfig, default_model

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")

K, N_ROWS, N_NODES = 64, 512, 3


def test_copies_of_records_share_their_counters_alone() -> None:
    records = CallRecords(3, 5000, copies=N_NODES)
    whole = records._memory.view(np.int64)
    for i in range(3):
        for copy in range(N_NODES):
            words = records.words(i, copy)
            assert words.ctypes.data == records.address(i) + copy * records.distance and words.nbytes == 5000
            words[:] = 10 * i + copy
            at = (words.ctypes.data - whole.ctypes.data) // 8 - 8
            assert whole[at] == (100 + i if copy else 0)
            whole[at] = 100 + i
    assert all((records.words(i, copy) == 10 * i + copy).all() for i in range(3) for copy in range(N_NODES))
    assert CallRecords(2, 40).distance == 0


def product(*marks: float) -> Harness:
    """A product with f32 weights of one value for each node, so that a row says whose weights it was computed with."""
    harness = Harness(1, 64, RULES)
    x = harness.input("x", K)
    y = harness.graph.mul_mat(Weight("w", GGMLType.F32, (K, N_ROWS)), x, "y")
    copies = []
    for mark in marks:
        copies.append(aligned_zeros(4 * K * N_ROWS))
        copies[-1].view(np.float32)[:] = mark / K
    harness.compile(y, 2, {"w": copies[0], **{f"copy {i}": c for i, c in enumerate(copies)}})
    places = [{"w": c.ctypes.data} for c in copies]
    harness.program.bind(LIBRARY, harness.state.ctypes.data, harness.arena, places[0], {}, mirrors=places[1:])
    harness.prepare([Segment(1)], {x: np.ones((1, K), np.float32)})
    return harness


@pytest.mark.parametrize("nodes", [(0, 0), (1, 1), (2, 2), (0, 1), (2, 1)], ids=str)
def test_threads_read_the_weights_of_their_node(nodes: tuple[int, int]) -> None:
    """Counted by the rows that each copy gave: none comes from a node without threads, and none is missing."""
    harness = product(1.0, 2.0, 4.0)
    team = Team(LIBRARY, 2, nodes=nodes)
    n_ops = len(harness.program.ops)
    read = np.zeros(5, int)
    for _ in range(20):
        assert team.run(harness.program.address, n_ops, 2) == 0
        rows = harness.program.view(harness.arena, harness.program.result, 1)[0]
        read += np.bincount(np.rint(rows).astype(int), minlength=5)
        rows[:] = 0
    team.close()
    assert read.sum() == 20 * N_ROWS and {int(m) for m in np.flatnonzero(read)} <= {1 << node for node in nodes}
    remote = sum(int(read[1 << node]) for node in range(N_NODES) if node not in nodes)
    assert remote == 0


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> list[frozenset[int]]:
    """A made-up machine: the CPUs of this process are on node 0, node 1 has two others; threads are not pinned."""
    own = frozenset(os.sched_getaffinity(0))
    nodes = [own, frozenset({max(own) + 1, max(own) + 2})]
    monkeypatch.setattr(numa, "read_nodes", lambda: dict(enumerate(nodes)))
    monkeypatch.setattr(numa, "visible_cpus", lambda: own | nodes[1])
    monkeypatch.setattr(numa, "_balancing", lambda: False)
    monkeypatch.setattr(numa.os, "sched_setaffinity", lambda pid, cpus: None)
    return nodes


def config(**changes: object) -> RunConfig:
    return RunConfig(model=default_model(), n_threads=2, n_threads_batch=2, n_ubatch=16, warmup=False, **changes)


def test_results_stay_the_same_and_every_node_has_a_copy(
    two_nodes: list[frozenset[int]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    touched: list[tuple[int, set[frozenset[int]]]] = []
    real = numa.spread
    monkeypatch.setattr(
        weight_memory.numa,
        "spread",
        lambda memory, cpus, stripe: touched.append((len(memory), {*cpus})) or real(memory, cpus, stripe),
    )
    batch, logits = Batch.single([5, 9, 11], logits="all"), []
    for changes in ({}, {"numa": "mirror"}):
        with Session.open(config(**changes), n_ctx=256) as session:
            logits.append(session.decode(batch).copy())
            if changes:
                weights = session.model.n_bytes(session.runner.host_weights)
                assert session.runner.memory(list(session.programs.values()), session.model)["CPU"]["weights"] == (
                    2 * weights
                )
                copies = session.runner.cpu.mirror
                assert copies.nodes == [0, 1]
                (second,) = copies.addresses()
                assert second.keys() == session.runner.host_weights.keys()
                assert not {*second.values()} & {*session.runner.host_weights.values()}
    assert np.array_equal(*logits)
    # Pages of a copy are touched by threads of one node, so its threads, which alone read it, read nothing remote.
    assert [cpus for _, cpus in touched] == [{two_nodes[0]}, {two_nodes[1]}]
    err = capsys.readouterr().err
    assert f"numa: 2 copies of {weights / 2**20:.0f} MiB of weights, one per node, read by 1, 1 threads of it" in err


def test_a_plan_counts_all_copies(two_nodes: list[frozenset[int]]) -> None:
    one, both = (
        Planner.of_file(c).plan(c).memory.parts["CPU"]["weights"]
        for c in (config(command="plan"), config(command="plan", numa="mirror"))
    )
    assert both == 2 * one


def test_changed_weights_reach_all_copies(two_nodes: list[frozenset[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    with Session.open(config(numa="mirror"), n_ctx=256) as session:
        name = "output_norm.weight"
        session.model._held[name][...] = 3
        session.runner.update_weights(session.model, [name])
        (second,) = session.runner.cpu.mirror._copies
        assert (second[name] == 3).all()


def test_what_cannot_be_mirrored(two_nodes: list[frozenset[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "available_memory", lambda: 1 << 20)
    with pytest.raises(IkError, match=r"2 copies of the weights take \d+ MiB, 1 MiB are available; --numa distribute"):
        Session.open(config(numa="mirror"), n_ctx=256)
    one_thread = RunConfig(model=default_model(), n_threads=1, n_threads_batch=1, numa="mirror")
    with pytest.raises(UsageError, match="this run has one thread; leave it out"):
        Session.open(one_thread, n_ctx=256)
    monkeypatch.setattr(numa, "read_nodes", lambda: {0: two_nodes[0]})
    with pytest.raises(UsageError, match="has CPUs of one NUMA node; leave it out"):
        Session.open(config(numa="mirror"), n_ctx=256)


def test_nothing_elsewhere_is_mirrored() -> None:
    assert mirror.mirror_of(config(), 2, "GPUs").n_copies == 1
    with pytest.raises(UsageError, match="cannot be used with GPUs; use --numa distribute"):
        mirror.mirror_of(config(numa="mirror"), 2, "GPUs")
