"""Measure the peaks (roofline) of this machine: products from registers and reads from memory.

The kernels are in `kernels/peaks.py`. Threads wait for each other, then all run; a pass lasts from the first start to
the last end. Of products the fastest pass counts. Reading gets faster than it stays while a burst lasts, so its rates
are returned pass by pass.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ikcli.backends.cpu.params import HEAD, Params
from ikcli.backends.cpu.params_peaks import SCRATCH_BYTES, ProductsParams, ReadParams
from ikcli.native import isa
from ikcli.native.kernel_cache import KernelKey
from ikcli.native.kernel_library import native_function, shared_library

OPS = {"f32": 2, "bf16": 4, "i16": 4, "i8": 8}
"""Kind of products -> multiplications and additions of one of the LANES."""
LANES, CHAINS = 16, 24  # of an iteration of the kernel
_NEEDS = {"bf16": {"avx512bf16"}, "i16": {"avx2"}}
_ITERATIONS = 400_000

Clock = Callable[[], float]


def product_peak(
    kind: str, threads: int, clock: Clock = time.perf_counter, repeat: int = 20, seconds: float = 0.0
) -> float:
    """Measure multiplications and additions per second of all threads; 0 if the CPU lacks the instruction.

    `kind`: one of OPS. There are `repeat` passes, and more until `seconds` are over.
    """
    if not _NEEDS.get(kind, set()) <= isa.current().features:
        return 0.0
    scratch = np.zeros(SCRATCH_BYTES * threads, np.uint8)
    params = ProductsParams(n=_ITERATIONS, scratch=scratch.ctypes.data)
    times = _passes(KernelKey("peaks", "make_products", (kind,)), params, threads, repeat, seconds, clock)
    return OPS[kind] * CHAINS * LANES * _ITERATIONS * threads / min(times)


def read_rates(
    data: npt.NDArray[np.uint8], threads: int, *, cpus: Sequence[frozenset[int]] = (), fill: bool = True,
    repeat: int = 3, seconds: float = 0.0,
) -> list[float]:  # fmt: skip
    """Read memory with all threads, again and again; return the bytes per second of every pass.

    There are `repeat` passes, and more until `seconds` are over. `cpus`: the CPUs that each thread is pinned to. With
    `fill` each thread first fills the part that it reads, so that the part is on the thread's own NUMA node.
    """
    n_bytes = len(data) // SCRATCH_BYTES * SCRATCH_BYTES
    scratch = np.zeros(SCRATCH_BYTES * threads, np.uint8)
    params = ReadParams(data=data.ctypes.data, n_bytes=n_bytes, scratch=scratch.ctypes.data)
    times = _passes(
        KernelKey("peaks", "make_read"),
        params,
        threads,
        repeat,
        seconds,
        time.perf_counter,
        cpus,
        data if fill else None,
    )
    return [n_bytes / t for t in times]


def _passes(
    key: KernelKey, params: Params, threads: int, repeat: int, seconds: float, clock: Clock,
    cpus: Sequence[frozenset[int]] = (), data: npt.NDArray[np.uint8] | None = None,
) -> list[float]:  # fmt: skip
    """Return the seconds of every pass."""
    shared_library().require([key])
    kernel = native_function(shared_library()[key], 3)
    words = np.array([*[0] * len(HEAD), *params.words], np.int64)
    at = words.ctypes.data
    if threads == 1 and not cpus:  # here, so that a clock of this thread counts it
        if data is not None:
            data[:] = 1
        times: list[float] = []
        end = time.perf_counter() + seconds
        while len(times) < repeat or time.perf_counter() < end:
            start = clock()
            kernel(at, 0, 1)
            times.append(clock() - start)
        return times
    spans: list[list[tuple[float, float]]] = [[] for _ in range(threads)]
    begun: list[float] = []  # when passes began
    more = [True]

    def decide() -> None:
        """Decide while all threads wait whether another pass begins."""
        begun.append(time.perf_counter())
        more[0] = len(begun) <= repeat or begun[-1] < begun[0] + seconds

    gate = threading.Barrier(threads, decide)

    def work(ith: int) -> None:
        if cpus and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cpus[ith])
        if data is not None:
            n = len(data) // SCRATCH_BYTES
            data[SCRATCH_BYTES * (n * ith // threads) : SCRATCH_BYTES * (n * (ith + 1) // threads)] = 1
        while True:
            gate.wait()
            if not more[0]:
                return
            start = clock()
            kernel(at, ith, threads)
            spans[ith].append((start, clock()))

    team = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(threads)]
    for t in team:
        t.start()
    for t in team:
        t.join()
    return [max(stop for _, stop in one) - min(start for start, _ in one) for one in zip(*spans, strict=True)]
