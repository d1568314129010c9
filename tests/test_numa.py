"""--numa, -thp and --mlock: node lists, which CPUs threads get, page arithmetic, warnings; results do not change."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ikcli.backends.memory import aligned_zeros
from ikcli.engine.run import numa, weight_memory
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.host_memory import lock_weights
from ikcli.engine.run.numa import current_cpu, plan_threads, read_nodes, thread_cpus
from ikcli.engine.run.session import Session
from ikcli.engine.run.system_memory import inner_pages, outer_pages, thp_state
from ikcli.engine.run.weight_memory import Pages, divided
from ikcli.errors import UsageError
from ikcli.hostinfo import parse_cpulist
from ikcli.settings.run import RunConfig, default_model

linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs a system that lets programs choose CPUs")


def tree(root: Path, lists: dict[str, str]) -> Path:
    for name, text in lists.items():
        (root / name).mkdir(parents=True)
        (root / name / "cpulist").write_text(text)
    return root


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("5", {5}), ("\n", set()), ("0-1,64-65", {0, 1, 64, 65})],
)
def test_cpu_lists(text, cpus) -> None:
    assert parse_cpulist(text) == cpus


def test_damaged_cpu_list() -> None:
    with pytest.raises(ValueError):
        parse_cpulist("0-x")


def test_nodes(tmp_path) -> None:
    root = tree(
        tmp_path / "a", {"node0": "0-1,4-5", "node10": "6", "node2": "2-3", "node3": "", "node4": "x", "nodes": "9"}
    )
    (root / "node7").mkdir()  # without a list
    (root / "possible").write_text("0-10")
    assert read_nodes(root) == {0: {0, 1, 4, 5}, 2: {2, 3}, 10: {6}}
    assert list(read_nodes(root)) == [0, 2, 10]
    assert read_nodes(tmp_path / "none") == {}


NODES = {0: frozenset({0, 1, 4, 5}), 1: frozenset({2, 3, 6, 7})}


@pytest.mark.parametrize(
    ("mode", "allowed", "here", "expected"),
    [
        ("distribute", range(8), 0, [NODES[0], NODES[1], NODES[0]]),
        ("distribute", [0, 2, 3], 0, [{0}, {2, 3}, {0}]),
        ("distribute", [2, 3, 6], 2, None),  # one node is visible
        ("isolate", range(8), 6, [NODES[1]] * 3),
        ("isolate", range(8), None, [NODES[0]] * 3),
        ("isolate", [1, 6], 6, [{6}] * 3),
        ("numactl", range(8), 6, None),
    ],
)
def test_cpus_of_threads(mode, allowed, here, expected) -> None:
    assert thread_cpus(mode, 3, NODES, allowed, here) == expected
    assert thread_cpus(mode, 3, {0: NODES[0]}, allowed, here) is None
    assert thread_cpus(mode, 3, {}, allowed, here) is None


def test_current_cpu(tmp_path) -> None:
    stat = tmp_path / "stat"
    fields = ["S", *map(str, range(4, 53))]  # field 3 is the state
    stat.write_text(f"12 (a b) c) {' '.join(fields)}\n")
    assert current_cpu(stat) == 39  # the number of the field itself
    stat.write_text("12 (short) S 1")
    assert current_cpu(stat) is None and current_cpu(tmp_path / "none") is None


@linux
def test_plan_for_a_machine(monkeypatch) -> None:
    monkeypatch.setattr(numa, "read_nodes", lambda: {0: NODES[0]})
    spread = RunConfig(numa="distribute")
    assert plan_threads(RunConfig(), 2) == (None, [])
    assert plan_threads(spread, 2) == (None, ["--numa distribute has no effect: this machine has one node"])
    assert plan_threads(RunConfig(numa="numactl"), 2) == (None, [])
    monkeypatch.setattr(numa, "read_nodes", lambda: NODES)
    monkeypatch.setattr(numa, "visible_cpus", lambda: set(range(8)))
    monkeypatch.setattr(numa, "_balancing", lambda: True)
    cpus, warnings = plan_threads(spread, 2)
    assert cpus == [NODES[0], NODES[1]] and "numa_balancing" in warnings[0]


@linux
def test_cpus_that_were_asked_for(monkeypatch) -> None:
    monkeypatch.setattr(numa, "visible_cpus", lambda: set(range(8)))
    monkeypatch.setattr(numa, "read_nodes", lambda: NODES)
    monkeypatch.setattr(numa, "_balancing", lambda: False)
    few = RunConfig(cpu_mask=(1, 2), cpu_range=(5, 99))
    assert plan_threads(few, 2) == ([frozenset((1, 2, 5))] * 2, [])
    strict = replace(few, cpu_strict=True)
    assert plan_threads(strict, 4)[0] == [frozenset((cpu,)) for cpu in (1, 2, 5, 1)]
    assert plan_threads(RunConfig(cpu_strict=True), 2)[0] == [frozenset((0,)), frozenset((1,))]
    both = plan_threads(replace(few, numa="distribute"), 2)[0]
    assert both == [NODES[0] & few.cpus, NODES[1] & few.cpus]
    with pytest.raises(UsageError, match="none of the CPUs 99"):
        plan_threads(RunConfig(cpu_range=(99,)), 2)


@linux
def test_touch_writes_every_byte_and_pins_its_own_threads_only() -> None:
    before = os.sched_getaffinity(0)
    buffers = [aligned_zeros(5 * 2**21 + 77), aligned_zeros(3)]
    for b in buffers:
        b[:] = 1
    numa.touch(buffers, [frozenset(before)] * 3)
    assert not any(b.any() for b in buffers) and os.sched_getaffinity(0) == before


def remote_reads(owner: np.ndarray, n_nodes: int) -> tuple[float, float]:
    """Return the part of reads from other nodes, and the load of the busiest node as a multiple of the mean.

    Threads of all nodes read every page equally often, since they take rows as they get free.
    """
    share = np.bincount(owner, minlength=n_nodes) / len(owner)
    return float(1 - sum(share / n_nodes)), float(share.max() * n_nodes)


@pytest.mark.parametrize(("n_nodes", "n_threads", "n_mib"), [(2, 4, 64), (2, 5, 301), (4, 16, 1000)])
def test_stripes_load_all_nodes_alike(n_nodes: int, n_threads: int, n_mib: int) -> None:
    """On made-up topologies: every byte has one owner, and no node is read much more than the others."""
    nodes = {i: frozenset(range(4 * i, 4 * i + 4)) for i in range(n_nodes)}
    cpus = thread_cpus("distribute", n_threads, nodes, range(4 * n_nodes), 0)
    assert cpus is not None
    node_of = [next(i for i, own in nodes.items() if own >= mine) for mine in cpus]
    n_stripes = -(-n_mib // 2)
    owner = np.full(n_stripes, -1)
    for ith, starts in enumerate(numa.stripes(n_mib << 20, n_threads)):
        for start in starts:
            assert owner[start // numa.STRIPE] == -1
            owner[start // numa.STRIPE] = node_of[ith]
    assert (owner >= 0).all()
    remote, load = remote_reads(owner, n_nodes)
    assert remote == pytest.approx(1 - 1 / n_nodes) and load < 1.25
    by_one_thread = remote_reads(np.zeros(n_stripes, int), n_nodes)
    assert by_one_thread == (pytest.approx(1 - 1 / n_nodes), n_nodes)  # as many, but all from one node


@pytest.mark.parametrize("hugetlb", [0, 1 << 22], ids=["small", "large"])
def test_memory_for_weights_is_touched_by_pinned_threads(hugetlb: int, monkeypatch) -> None:
    """Stripes are as large as pages; each is touched by the thread whose node it belongs to."""
    node = threading.local()
    monkeypatch.setattr(numa.os, "sched_setaffinity", lambda pid, cpus: setattr(node, "cpus", cpus), raising=False)
    owners: dict[int, frozenset[int]] = {}

    class Memory:
        """Records who writes."""

        def __len__(self) -> int:
            return 9 << 20

        def __setitem__(self, part: slice, value: int) -> None:
            assert value == 0 and part.step == mmap.PAGESIZE
            owners.update(
                dict.fromkeys(range(part.start >> 21, min(part.stop, len(self) + (1 << 20)) >> 21), node.cpus)
            )

        def __getitem__(self, part: slice) -> np.ndarray:
            return np.zeros(0, np.uint8)

    monkeypatch.setattr(weight_memory, "reserve", lambda n_bytes, pages: Memory())
    cpus = [frozenset((0,)), frozenset((4,))]
    divided({"a": 9 << 20}, Pages(hugetlb=hugetlb), cpus)
    assert [min(owners[i]) for i in range(5)] == ([0, 0, 4, 4, 0] if hugetlb else [0, 4, 0, 4, 0])


def test_where_threads_and_memory_are_is_said(monkeypatch) -> None:
    monkeypatch.setattr(numa, "read_nodes", lambda: NODES)
    cpus = thread_cpus("distribute", 5, NODES, range(8), 0)
    line = numa.placement_line(cpus or [], 3 << 30)
    assert line == (
        "numa: threads: 3 on node 0, 2 on node 1; cache, buffers, 3072 MiB of weights: "
        "in stripes of 2 MiB on their nodes"
    )
    home = numa.placement_line(thread_cpus("isolate", 2, NODES, range(8), 6) or [], 0)
    assert home == "numa: threads: 2 on node 1; cache, buffers: in stripes of 2 MiB on their nodes"


def test_pages() -> None:
    assert inner_pages((100, 9000), 4096) == (4096, 4096)
    assert inner_pages((4096, 8192), 4096) == (4096, 8192)
    assert inner_pages((100, 4000), 4096) is None
    assert outer_pages([(9000, 10), (100, 200), (4000, 200), (20000, 0)], 4096) == [(0, 12288)]
    assert outer_pages([(0, 1), (8192, 1)], 4096) == [(0, 4096), (8192, 4096)]


def test_state_of_huge_pages(tmp_path) -> None:
    path = tmp_path / "enabled"
    path.write_text("always [madvise] never\n")
    assert thp_state(path) == "madvise" and thp_state(tmp_path / "none") == ""


def test_locking() -> None:
    calls: list[tuple[int, int]] = []

    def lock(address: int, n_bytes: int) -> int:
        calls.append((address, n_bytes))
        return errno.ENOMEM if len(calls) == 2 else 0

    page = mmap.PAGESIZE
    big = 1024 * page
    ranges = [(big * 10, big), (big * 20, big), (big * 30, big)]
    (warning,) = lock_weights(ranges, lock, 2**23)
    assert len(calls) == 2 and f"--mlock: {big >> 20} of {3 * big >> 20} MiB" in warning
    assert "the limit is 8 MiB" in warning and "ulimit -l" in warning
    assert "limit is" not in lock_weights([(0, page)], lambda a, n: errno.EPERM, -1)[0]
    assert lock_weights(ranges, lambda a, n: 0) == []


@pytest.mark.parametrize("mmap", [True, False])
def test_results_stay_the_same(mmap, monkeypatch, capsys) -> None:
    """With all three on a made-up machine of two nodes whose CPUs are those of this one."""
    batch = Batch.single([5, 9, 11], logits="all")
    logits = []
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    if before is not None:
        monkeypatch.setattr(
            numa, "plan_threads", lambda config, n: ([frozenset(before)] * n if config.numa else None, [])
        )
    spread = []
    real = numa.spread
    monkeypatch.setattr(numa, "spread", lambda memory, *rest: spread.append(len(memory)) or real(memory, *rest))
    for changes in ({}, {"numa": "distribute", "thp": True, "mlock": True}):
        config = RunConfig(model=default_model(), mmap=mmap, n_threads=2, n_threads_batch=2, n_ubatch=16, warmup=False,
                           **changes)  # fmt: skip
        with Session.open(config, n_ctx=256) as session:
            logits.append(session.decode(batch).copy())
    assert np.array_equal(*logits)
    assert ("mapped weights stay on the nodes" in capsys.readouterr().err) == (mmap and before is not None)
    assert bool(spread) == (not mmap and before is not None)
    assert before is None or os.sched_getaffinity(0) == before
