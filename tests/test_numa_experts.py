"""--numa distribute: experts are spread whole over the nodes, and computed by the threads of their node."""

from __future__ import annotations

import os

import numpy as np
import pytest
from kernel_harness import LIBRARY, Harness, Segment

from ikcli.backends.cpu.lower import RULES
from ikcli.backends.cpu.program import NODE, TABLE
from ikcli.backends.cpu.threads import Team
from ikcli.backends.lowering import Ref
from ikcli.backends.memory import aligned_zeros
from ikcli.engine.plan.memory_plan import verdict_lines
from ikcli.engine.plan.planner import Planner
from ikcli.engine.run import numa, weight_memory
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.numa import expert_parts, stripe_owners
from ikcli.engine.run.session import Session
from ikcli.gguf.constants import GGMLType
from ikcli.graph import Weight
from ikcli.native.kernel_library import native_function
from ikcli.settings.run import RunConfig, default_model

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")

STRIPE = numa.STRIPE


def remote_bytes(owner_node: np.ndarray, at: int, size: int, n_expert: int, n_nodes: int) -> int:
    """Return the bytes of experts that are in the memory of another node than that of their expert."""
    remote = 0
    for node, part in enumerate(expert_parts(n_expert, n_nodes)):
        first, stop = at + size * part.start, at + size * part.stop
        for stripe in range(first // STRIPE, -(-stop // STRIPE)):
            if owner_node[stripe] != node:
                remote += min(stop, (stripe + 1) * STRIPE) - max(first, stripe * STRIPE)
    return remote


@pytest.mark.parametrize(
    ("n_nodes", "n_threads", "n_expert", "size"),
    [(2, 4, 128, 3 << 20), (2, 5, 8, 99 << 20), (4, 16, 62, 7_000_064), (8, 8, 256, 1_234_944)],
)
def test_experts_are_in_the_memory_of_their_node(n_nodes: int, n_threads: int, n_expert: int, size: int) -> None:
    """On made-up topologies; a stripe in which two nodes meet belongs to one of them, and nothing else is remote."""
    nodes = [i % n_nodes for i in range(n_threads)]
    tensors = [(5 * STRIPE + 4096, size, n_expert), (5 * STRIPE + 8192 + size * n_expert, size, n_expert)]
    end = tensors[1][0] + size * n_expert
    owners = stripe_owners(end + 9 * STRIPE, nodes, tensors)
    assert np.array_equal(owners[:5], np.arange(5) % n_threads)  # other weights: in stripes
    owner_node = np.array(nodes)[owners]
    for at, _, _ in tensors:
        remote = remote_bytes(owner_node, at, size, n_expert, n_nodes)
        assert remote <= (n_nodes + 1) * STRIPE // 2
        striped = np.arange(len(owners)) % n_threads % n_nodes
        assert remote_bytes(striped, at, size, n_expert, n_nodes) > size * n_expert * (1 - 1 / n_nodes) * 0.9
    assert np.bincount(owners, minlength=n_threads).max() <= 1.3 * len(owners) / n_threads + 9
    parts = expert_parts(n_expert, n_nodes)
    assert [e for part in parts for e in part] == list(range(n_expert))


def test_memory_of_experts_is_touched_by_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """`divided` passes on where each tensor's experts are."""
    cpus = [frozenset({0}), frozenset({4})]
    monkeypatch.setattr(numa, "read_nodes", lambda: dict(enumerate(cpus)))
    found: list[np.ndarray] = []
    monkeypatch.setattr(weight_memory.numa, "spread", lambda memory, cpus, stripe, owners: found.append(owners))
    monkeypatch.setattr(weight_memory, "reserve", lambda n_bytes, pages: np.zeros(64, np.uint8))
    sizes = {"a": 3 * STRIPE, "experts": 8 * STRIPE, "b": 3 * STRIPE}
    weight_memory.divided(sizes, weight_memory.TRANSPARENT, cpus, {"experts": 4, "elsewhere": 4})
    assert found[0].tolist() == [0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 1]


K, N_ROWS, N_EXPERT = 64, 64, 6


class Experts:
    """A product by expert, whose weights are the number of the node that reads them: rows say who computed them."""

    def __init__(self, n_nodes: int, chosen: list[int]) -> None:
        harness, tokens = Harness(len(chosen), 64, RULES), len(chosen)
        graph = harness.graph
        x, logits = harness.input("x", K), harness.input("logits", N_EXPERT)
        route = graph.moe_route(logits, None, "route", n_used=1, gating="softmax", norm=True, scale=1.0)
        plan = graph.moe_sort(route, N_EXPERT, "plan")
        y = graph.mul_mat_id(Weight("w", GGMLType.F32, (K, N_ROWS, N_EXPERT)), x, plan, "y")
        copies = [aligned_zeros(4 * K * N_ROWS * N_EXPERT) for _ in range(n_nodes)]
        for node, copy in enumerate(copies):
            copy.view(np.float32)[:] = (node + 1) / K
        harness.compile(y, 2, {f"copy {i}": c for i, c in enumerate(copies)} | {"w": copies[0]})
        places = [{"w": int(c.ctypes.data)} for c in copies]
        self.program = harness.program
        self.program.bind(LIBRARY, harness.state.ctypes.data, harness.arena, places[0], {}, None, places[1:], n_nodes)
        scores = np.zeros((tokens, N_EXPERT), np.float32)
        scores[np.arange(tokens), chosen] = 9
        self._harness, self._inputs = harness, {x: np.ones((tokens, K), np.float32), logits: scores}
        self._n = tokens
        self.op = next(i for i, op in enumerate(self.program.ops) if any(w == Ref(NODE) for w in op.words))

    def prepare(self) -> None:
        self._harness.prepare([Segment(self._n)], self._inputs)

    def readers(self) -> np.ndarray:
        """Return the node + 1 that computed each value; 0: nobody yet."""
        return np.nan_to_num(self.program.view(self._harness.arena, self.program.result, self._n)).round().astype(int)


def test_threads_take_the_experts_of_their_node_and_then_help() -> None:
    """Counted by values; rows are sorted by expert, of which nodes 0, 1 and 2 have two each."""
    experts = Experts(3, [0, 1, 3, 5])
    own = {0: [0, 1], 1: [2], 2: [3]}  # rows of the experts of each node
    records = experts.program._records
    assert records is not None
    for node, rows in own.items():
        experts.prepare()
        team = Team(LIBRARY, 1, nodes=[node])
        assert team.run(experts.program.address, experts.op, 1) == 0
        counters = (records.address(experts.op) - records._memory.ctypes.data) // 8 - 8
        head = records._memory.view(np.int64)[counters : counters + 8]
        assert not head.any()
        others = [i for i in range(3) if i != node]
        head[others] = 1 << 40  # their experts are taken: the thread has those of its node alone
        kernel = native_function(LIBRARY[experts.program.ops[experts.op].kernel], 3)
        kernel(records.address(experts.op) + node * records.distance, 0, 1)
        found = experts.readers()
        assert (found[rows] == node + 1).all() and not np.delete(found, rows, 0).any()
        head[others] = 0  # now it helps with all others, in one go, and leaves no work behind
        kernel(records.address(experts.op) + node * records.distance, 0, 1)
        assert (experts.readers() == node + 1).all()
        head[:] = 0
        team.close()


def test_counters_of_all_nodes_are_cleared() -> None:
    """A second run of the same program computes all rows again, by threads of two nodes."""
    experts = Experts(2, [0, 2, 3, 5, 5])
    team, n_ops = Team(LIBRARY, 2, nodes=[0, 1]), len(experts.program.ops)
    for _ in range(10):
        experts.prepare()
        assert team.run(experts.program.address, n_ops, 2) == 0
        found = experts.readers()
        assert found.shape == (5, N_ROWS) and np.isin(found, (1, 2)).all()
    team.close()
    assert Ref("w" + TABLE) in experts.program.ops[experts.op].words


def test_results_stay_the_same_and_the_plan_says_where_experts_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A made-up machine: the CPUs of this process are on node 0, node 1 has two others; threads are not pinned."""
    own = frozenset(os.sched_getaffinity(0))
    nodes = [own, frozenset({max(own) + 1, max(own) + 2})]
    monkeypatch.setattr(numa, "read_nodes", lambda: dict(enumerate(nodes)))
    monkeypatch.setattr(numa, "visible_cpus", lambda: own | nodes[1])
    monkeypatch.setattr(numa, "_balancing", lambda: False)
    monkeypatch.setattr(numa.os, "sched_setaffinity", lambda pid, cpus: None)
    batch, logits = Batch.single([5, 9, 11], logits="all"), []
    for changes in ({}, {"numa": "distribute"}):
        config = RunConfig(model=default_model(), n_threads=2, n_threads_batch=2, n_ubatch=16, warmup=False, mmap=False,
                           **changes)  # fmt: skip
        with Session.open(config, n_ctx=256) as session:
            logits.append(session.decode(batch).copy())
            placed = session.run_plan.expert_nodes
    assert np.array_equal(*logits)
    assert placed.counts and {*placed.counts.values()} == {session.model.hp.n_expert} and placed.nodes == [0, 1]
    assert sum(placed.n_bytes) == session.model.n_bytes(placed.counts)
    planner = Planner.of_file(config)
    assert placed.line() in verdict_lines(planner, planner.plan(config))
    assert placed.line() in capsys.readouterr().err and placed.line().endswith("MiB) by 1 thread")
