"""What this machine can do at best, measured: products from registers and reading of memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from kernel_harness import Harness, Segment
from leaves import Custom

from ikcli.backends.cpu.kernels.peaks import CHAINS, KINDS
from ikcli.backends.cpu.lower import RULES
from ikcli.backends.cpu.program import CpuLowering
from ikcli.gguf.constants import GGMLType
from ikcli.graph import Node, Weight
from ikcli.native import isa
from ikcli.native.kernel_cache import KernelKey


def product_peak(kind: str, threads: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Multiplications and additions per second of all threads; kind: one of KINDS. 0 if the CPU lacks them."""
    needed = {"bf16": {"avx512bf16"}, "i16": {"avx512vnni"}}.get(kind, set())
    if not needed <= isa.current().features:
        return 0.0
    n = 400_000

    def lower(low: CpuLowering, node: Node) -> None:
        low.emit(KernelKey("peaks", "make_products", (kind,)), node.rows, n, low.out(node, 256 * low.n_threads))

    sums, ops, _ = KINDS[kind]
    return ops * CHAINS * sums.n * n * threads / _shortest(lower, threads, 20, clock)


def read_peak(threads: int, n_bytes: int = 1 << 29) -> float:
    """Bytes per second that all threads read from memory."""
    data = np.ones(n_bytes, np.uint8)

    def lower(low: CpuLowering, node: Node) -> None:
        w = Weight("w", GGMLType.F32, (n_bytes // 4,))
        key = KernelKey("peaks", "make_read")
        low.emit(key, node.rows, low.weight(w), n_bytes, low.out(node, 256 * low.n_threads))

    return n_bytes / _shortest(lower, threads, 7, time.perf_counter, {"w": data})


def _shortest(
    lower: Callable[[CpuLowering, Node], None],
    threads: int,
    repeat: int,
    clock: Callable[[], float],
    weights: dict[str, np.ndarray] | None = None,
) -> float:
    """Seconds of the fastest run of one op."""
    run = Harness(1, 1, RULES.replaced({Custom: lambda low, node, op: lower(low, node)}))
    run.compile(run.graph.record(Custom(run.input("x", 16), 16), "peak"), threads, weights)
    times = []
    for _ in range(repeat):
        run.prepare([Segment(1)], {})
        run.arena[:] = 0
        start = clock()
        run.execute()
        times.append(clock() - start)
    return min(times)
