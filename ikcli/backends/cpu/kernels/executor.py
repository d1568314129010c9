"""Walks a program: calls kernels in order on every thread of the team, with a barrier after each.

A program is int64 pairs (kernel address, params address). The barrier spins for a few microseconds, then yields the
core each time round, so that a busy machine slows us in proportion.

Shared block (int64 words, one cache line apart so that threads do not fight over them):
    0 arrivals   8 epoch   16 program   17 n_ops   18 n_threads   19 arrivals at start   20 status   24 stop
A kernel's dynamic work counter is the int64 at params - 64; thread 0 clears it one op later.
"""

from ikcli.backends.cpu.jit import inline
from ikcli.backends.cpu.simd.vec import atomic_add, atomic_load, atomic_store, call_kernel, ld_i64, libc_call0

ARRIVALS, EPOCH, PROGRAM, N_OPS, N_THREADS, START, STATUS, STOP = 0, 8, 16, 17, 18, 19, 20, 24
N_WORDS = 32
_SPINS = 2000
_IDLE_YIELDS = 4000


@inline
def barrier(sync, target):
    """Wait until `target` arrivals have been counted; returns when all threads of this op are here."""
    if atomic_add(sync + 8 * ARRIVALS, 1) + 1 >= target:
        return
    spins = 0
    while atomic_load(sync + 8 * ARRIVALS) < target:
        spins += 1
        if spins > _SPINS:
            libc_call0("sched_yield")


@inline
def run_job(sync, ith):
    program, n_ops = ld_i64(sync + 8 * PROGRAM), ld_i64(sync + 8 * N_OPS)
    nth, target = ld_i64(sync + 8 * N_THREADS), ld_i64(sync + 8 * START)
    for i in range(n_ops):
        if ith == 0 and i > 0:
            atomic_store(ld_i64(program + 16 * (i - 1) + 8) - 64, 0)
        status = call_kernel(ld_i64(program + 16 * i), ld_i64(program + 16 * i + 8), ith, nth)
        if status != 0:
            atomic_store(sync + 8 * STATUS, i + 1)
        if nth > 1:
            target += nth
            barrier(sync, target)
    if ith == 0 and n_ops > 0:
        atomic_store(ld_i64(program + 16 * (n_ops - 1) + 8) - 64, 0)


def make_launch():
    """launch(sync, program, n_ops, n_threads) -> 0, or 1 + index of the op that failed."""

    def launch(sync, program, n_ops, n_threads):
        atomic_store(sync + 8 * PROGRAM, program)
        atomic_store(sync + 8 * N_OPS, n_ops)
        atomic_store(sync + 8 * N_THREADS, n_threads)
        atomic_store(sync + 8 * START, atomic_load(sync + 8 * ARRIVALS))
        atomic_store(sync + 8 * STATUS, 0)
        if n_threads > 1:
            atomic_add(sync + 8 * EPOCH, 1)
        run_job(sync, 0)
        return atomic_load(sync + 8 * STATUS)

    return launch, 4, True


def make_worker():
    """worker(sync, ith, epoch) -> last epoch served; comes back to Python when there was nothing to do for a while."""

    def worker(sync, ith, epoch):
        idle = 0
        while idle < _IDLE_YIELDS:
            now = atomic_load(sync + 8 * EPOCH)
            if now == epoch:
                idle += 1
                if idle > _SPINS:
                    libc_call0("sched_yield")
                if atomic_load(sync + 8 * STOP) != 0:
                    return -1
                continue
            epoch = now
            idle = 0
            if ith < ld_i64(sync + 8 * N_THREADS):
                run_job(sync, ith)
        return epoch

    return worker, 3, True


def make_noop():
    """A kernel that does nothing: measures what an op costs."""

    def noop(params, ith, nth):
        pass

    return noop
