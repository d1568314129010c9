"""The thread team: Python threads that stay inside compiled code (without the GIL) while there is work.

The calling thread is number 0. Workers wait for a new epoch with a short spin, then yield. After about a millisecond
without work they return to Python and sleep on an event, so an idle session costs no CPU.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import numpy as np

from ikcli.backends.memory import aligned_zeros
from ikcli.native.kernel_cache import KernelKey
from ikcli.native.kernel_library import KernelLibrary, native_function

LAUNCH = KernelKey("executor", "make_launch")
WORKER = KernelKey("executor", "make_worker")
_STOP, _NODES = 32, 40  # words of the shared block, see kernels/executor.py


class Team:
    """`size` threads including the caller's; `run` executes a program with up to n of them."""

    def __init__(
        self, library: KernelLibrary, size: int, cpus: Sequence[frozenset[int]] | None = None, nodes: Sequence[int] = ()
    ) -> None:
        """Start the workers; `cpus`: the CPUs of each thread, the caller's first; None: any.

        `nodes`: which of the mirrored weights each thread reads, if programs have several.
        """
        library.require([LAUNCH, WORKER])
        self.size = size
        self._launch = native_function(library[LAUNCH], 4)
        worker_address = library[WORKER]
        self._words = aligned_zeros(8 * (_NODES + size)).view(np.int64)
        self._words[_NODES : _NODES + len(nodes)] = nodes
        self._sync: int = self._words.ctypes.data
        self._parked = [threading.Event() for _ in range(size)]
        self._sleeping = [False] * size
        self._announced = 0  # jobs for more than one thread, ever
        self._cpus = cpus
        if cpus is not None:
            os.sched_setaffinity(0, cpus[0])
        self._threads = [
            threading.Thread(target=self._work, args=(i, worker_address), name=f"ik-cpu-{i}", daemon=True)
            for i in range(1, size)
        ]
        for t in self._threads:
            t.start()

    def _work(self, ith: int, worker_address: int) -> None:
        if self._cpus is not None:
            os.sched_setaffinity(0, self._cpus[ith])
        worker = native_function(worker_address, 3)
        epoch = 0
        while True:
            epoch = worker(self._sync, ith, epoch)
            if epoch < 0:
                return
            self._parked[ith].clear()
            self._sleeping[ith] = True
            # A launcher announces its job before it looks at the flags, so one of the two always sees the other.
            if 2 * self._announced == epoch and not self._words[_STOP]:
                self._parked[ith].wait()
            self._sleeping[ith] = False

    def run(self, program: int, n_ops: int, n_threads: int) -> int:
        """Execute n_ops ops of the program at this address; return 0, or 1 + the index of an op that failed."""
        n = min(n_threads, self.size)
        if n > 1:
            self._announced += 1
            if any(self._sleeping):
                for event in self._parked:
                    event.set()
        return self._launch(self._sync, program, n_ops, n)

    def close(self) -> None:
        """Stop the workers."""
        self._words[_STOP] = 1
        for ith in range(1, self.size):
            self._parked[ith].set()
        for t in self._threads:
            t.join(timeout=5)
