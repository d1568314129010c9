"""Measure the peaks (roofline) of this machine: products from registers and reads from memory.

The kernels are in `kernels/peaks.py`. Threads wait for each other, then all run. The fastest of several runs counts,
from the first start to the last end.
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
_NEEDS = {"bf16": {"avx512bf16"}, "i16": {"avx512vnni"}}
_ITERATIONS = 400_000

Clock = Callable[[], float]


def product_peak(kind: str, threads: int, clock: Clock = time.perf_counter, repeat: int = 20) -> float:
    """Measure multiplications and additions per second of all threads; 0 if the CPU lacks the instruction.

    `kind`: one of OPS.
    """
    if not _NEEDS.get(kind, set()) <= isa.current().features:
        return 0.0
    scratch = np.zeros(SCRATCH_BYTES * threads, np.uint8)
    key = KernelKey("peaks", "make_products", (kind,))
    seconds = _shortest(key, ProductsParams(n=_ITERATIONS, scratch=scratch.ctypes.data), threads, repeat, clock)
    return OPS[kind] * CHAINS * LANES * _ITERATIONS * threads / seconds


def read_peak(threads: int, n_bytes: int = 1 << 29, cpus: Sequence[frozenset[int]] = (), repeat: int = 7) -> float:
    """Measure the bytes per second that all threads read from memory; `cpus`: the CPUs that each thread is pinned to.

    Each thread fills the part that it reads, so that the part is on the thread's own NUMA node.
    """
    n_bytes = n_bytes // SCRATCH_BYTES * SCRATCH_BYTES
    data, scratch = np.empty(n_bytes, np.uint8), np.zeros(SCRATCH_BYTES * threads, np.uint8)
    params = ReadParams(data=data.ctypes.data, n_bytes=n_bytes, scratch=scratch.ctypes.data)
    key = KernelKey("peaks", "make_read")
    return n_bytes / _shortest(key, params, threads, repeat, time.perf_counter, cpus, data)


def _shortest(
    key: KernelKey, params: Params, threads: int, repeat: int, clock: Clock,
    cpus: Sequence[frozenset[int]] = (), data: npt.NDArray[np.uint8] | None = None,
) -> float:  # fmt: skip
    """Return the seconds of the fastest run."""
    shared_library().require([key])
    kernel = native_function(shared_library()[key], 3)
    words = np.array([*[0] * len(HEAD), *params.words], np.int64)
    at = words.ctypes.data
    if threads == 1 and not cpus:  # here, so that a clock of this thread counts it
        if data is not None:
            data[:] = 1
        times = []
        for _ in range(repeat):
            start = clock()
            kernel(at, 0, 1)
            times.append(clock() - start)
        return min(times)
    spans = np.zeros((threads, repeat, 2))
    gate = threading.Barrier(threads)

    def work(ith: int) -> None:
        if cpus and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cpus[ith])
        if data is not None:
            n = len(data) // SCRATCH_BYTES
            data[SCRATCH_BYTES * (n * ith // threads) : SCRATCH_BYTES * (n * (ith + 1) // threads)] = 1
        for i in range(repeat):
            gate.wait()
            spans[ith, i, 0] = clock()
            kernel(at, ith, threads)
            spans[ith, i, 1] = clock()

    team = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(threads)]
    for t in team:
        t.start()
    for t in team:
        t.join()
    return float((spans[:, :, 1].max(axis=0) - spans[:, :, 0].min(axis=0)).min())
