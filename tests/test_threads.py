"""The thread team: results do not depend on how threads wait, and a sleeping thread is woken."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from kernel_harness import LIBRARY, Harness, Segment

from ikcli.backends.cpu.lower import RULES
from ikcli.backends.cpu.threads import Team
from ikcli.backends.memory import aligned_zeros
from ikcli.gguf.constants import GGMLType
from ikcli.graph import Node, Weight

K, N_ROWS, N_THREADS = 64, 512, 4
ASLEEP, SLEEPS, LAST_SLEEPS = 33, 34, 35  # words of the shared block, see kernels/waiting.py


def chain(n_pairs: int) -> tuple[Harness, dict[Node, np.ndarray]]:
    """Products one after the other, each of which reads all rows of the one before."""
    harness = Harness(1, 64, RULES)
    x = node = harness.input("x", K)
    rng = np.random.default_rng(1)
    weights = {}
    for i in range(n_pairs):
        for name, k, n in ((f"up {i}", K, N_ROWS), (f"down {i}", N_ROWS, K)):
            weights[name] = aligned_zeros(4 * k * n)
            weights[name].view(np.float32)[:] = rng.normal(size=k * n) / np.sqrt(k)
            node = harness.graph.mul_mat(Weight(name, GGMLType.F32, (k, n)), node, name)
    harness.compile(node, N_THREADS, weights)
    places = {name: int(w.ctypes.data) for name, w in weights.items()}
    harness.program.bind(LIBRARY, harness.state.ctypes.data, harness.arena, places, {})
    return harness, {x: rng.normal(size=(1, K)).astype(np.float32)}


@pytest.mark.parametrize("sleeps", [0, 1 << 40], ids=["yield", "sleep"])
def test_results_do_not_depend_on_how_threads_wait(sleeps: int) -> None:
    """More threads than cores, so that most barriers are waited for; every job ends with the same bits."""
    harness, inputs = chain(4)
    team, n_ops = Team(LIBRARY, N_THREADS), len(harness.program.ops)

    def result(n_threads: int) -> np.ndarray:
        harness.prepare([Segment(1)], inputs)  # memory of earlier values is used again
        team._words[SLEEPS] = sleeps
        assert team.run(harness.program.address, n_ops, n_threads) == 0
        return harness.program.view(harness.arena, harness.program.result, 1).copy()

    expected = result(1)
    assert np.isfinite(expected).all() and expected.any()
    for _ in range(50):
        assert np.array_equal(result(N_THREADS), expected)
    team.close()
    assert team._words[ASLEEP] == 0 and not any(t.is_alive() for t in team._threads)


def test_workers_park_after_sleeping_without_a_job() -> None:
    team, parked = Team(LIBRARY, 2), threading.Event()
    real = team._parked[1].wait
    team._words[SLEEPS] = 1 << 40
    team._parked[1].wait = lambda timeout=None: parked.set() or real(timeout)  # type: ignore[method-assign]
    team._parked[1].set()  # on a busy machine it may have parked before it could be observed
    assert parked.wait(30)
    team.close()
    assert team._words[ASLEEP] == 0 and team._words[LAST_SLEEPS] == 0
