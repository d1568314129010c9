"""Walk a program: every op is cut into n_threads parts, which free threads claim and execute.

A program is entries of int64 words: kernel address, params address, bytes that a row moves (0 = many), bytes from
params to those of the next NUMA node (0 = nodes have none of their own). An op starts when all parts of the op before
it are done. Threads never wait for a thread that has not started a part: on a busy machine, where one of the threads
may be off its core for milliseconds, the others do its parts. One thread claims adjacent ops that move few bytes
together, because handing an op over from core to core takes longer than the op itself.

Shared block (int64 words, one cache line apart so that threads do not fight over them):
    0 parts claimed   8 parts done (both count over all jobs)   16 epoch: number of the job, then the job:
    17 program   18 n_ops   19 n_threads   20 parts claimed at its start   24 status
    32 stop   33 to 35: see waiting.py
    40 node of thread 0, 41 of thread 1, ... (which of the params of an op it uses)
A kernel's dynamic work counter is the int64 at params - WORK; products have more of them behind it, for several queues.
The thread that starts the next op clears them.
"""

from ikcli.backends.cpu.kernels.common import MOST_QUEUES, WORK, n_rows
from ikcli.backends.cpu.kernels.records import at
from ikcli.backends.cpu.kernels.waiting import BARRIER_SPINS, IDLE_ROUNDS, JOB_SPINS, changed, relax
from ikcli.backends.cpu.params import Params
from ikcli.native.jit import inline
from ikcli.native.simd.control import atomic_add, atomic_cas, atomic_load, atomic_store, call_kernel

CLAIMED, DONE, EPOCH, PROGRAM, N_OPS, N_THREADS, BASE, STATUS = 0, 64, 128, 136, 144, 152, 160, 192
STOP, NODES = 256, 320
ENTRY = 32  # bytes of an entry of a program
_ALONE = 32768  # bytes that one thread moves faster than two agree

params_at = at(Params)


@inline
def clear_counters(entry):
    """Clear the work counters of an op, one for each of its queues: they share a cache line."""
    counters = atomic_load(entry + 8) - WORK
    for i in range(MOST_QUEUES):
        atomic_store(counters + 8 * i, 0)


@inline
def run_part(sync, program, i, part, n_threads, node):
    """Execute one part of op i; the first part of an op clears the work counter of the op before it."""
    if part == 0 and i > 0:
        # Not by the op itself at its end: only now are all of its parts done, so no thread reads the counter any more.
        clear_counters(program + ENTRY * (i - 1))
    entry = program + ENTRY * i
    params = atomic_load(entry + 8) + node * atomic_load(entry + 24)
    status = call_kernel(atomic_load(entry), params, part, n_threads)
    if status != 0:
        atomic_store(sync + STATUS, i + 1)


@inline
def n_alone(program, i, n_ops):
    """Return how many ops from i on are left to one thread in this run."""
    n = 0
    while i + n < n_ops:
        entry = program + ENTRY * (i + n)
        row_bytes = atomic_load(entry + 16)
        if row_bytes == 0 or n_rows(params_at(atomic_load(entry + 8))) * row_bytes > _ALONE:
            break
        n += 1
    return n


@inline
def help_job(sync, program, n_ops, n_threads, base, node):
    """Claim and execute parts until all are claimed."""
    end = base + n_ops * n_threads
    rounds = 0
    while True:
        claim = atomic_load(sync + CLAIMED)
        if claim >= end:
            return
        # Claims count over all ops of the job, so one number says both the op and the part.
        i = (claim - base) // n_threads
        # The barrier between ops: the next op may read what any part of this one writes.
        done = atomic_load(sync + DONE)
        if done < base + i * n_threads:
            rounds = relax(sync, DONE, done, rounds, BARRIER_SPINS)
            continue
        part = claim - base - i * n_threads
        alone = n_alone(program, i, n_ops) if part == 0 else 0
        parts = max(alone * n_threads, 1)
        # A failed exchange means that another thread took this part: look again.
        if atomic_cas(sync + CLAIMED, claim, claim + parts) != 0:
            for j in range(i, i + alone):
                run_part(sync, program, j, 0, 1, node)
            if alone == 0:
                run_part(sync, program, i, part, n_threads, node)
            if (atomic_add(sync + DONE, parts) + parts - base) % n_threads == 0:
                changed(sync, DONE)
            rounds = 0


def make_launch():
    """Return launch(sync, program, n_ops, n_threads) -> 0, or 1 + index of the op that failed."""

    def launch(sync, program, n_ops, n_threads):
        atomic_store(sync + STATUS, 0)
        node = atomic_load(sync + NODES)
        if n_threads == 1:
            for i in range(n_ops):
                run_part(sync, program, i, 0, 1, node)
        else:
            # Counters are never reset: a worker that still holds old numbers finds no part left to claim.
            base = atomic_load(sync + CLAIMED)
            atomic_add(sync + EPOCH, 1)  # odd: the job is being written
            atomic_store(sync + PROGRAM, program)
            atomic_store(sync + N_OPS, n_ops)
            atomic_store(sync + N_THREADS, n_threads)
            atomic_store(sync + BASE, base)
            atomic_add(sync + EPOCH, 1)
            changed(sync, EPOCH)
            help_job(sync, program, n_ops, n_threads, base, node)
            rounds = 0
            # All parts are claimed; wait for those that other threads are still executing.
            while True:
                done = atomic_load(sync + DONE)
                if done == base + n_ops * n_threads:
                    break
                rounds = relax(sync, DONE, done, rounds, BARRIER_SPINS)
        if n_ops > 0:
            clear_counters(program + ENTRY * (n_ops - 1))
        return atomic_load(sync + STATUS)

    return launch, 4, True


def make_worker():
    """Return worker(sync, ith, epoch) -> last epoch served; it returns to Python after a while without work."""

    def worker(sync, ith, epoch):
        idle = 0
        node = atomic_load(sync + NODES + 8 * ith)
        while idle < IDLE_ROUNDS:
            now = atomic_load(sync + EPOCH)
            if now == epoch or now % 2 == 1:
                if atomic_load(sync + STOP) != 0:
                    return -1
                idle = relax(sync, EPOCH, now, idle, JOB_SPINS)
                continue
            program, n_ops = atomic_load(sync + PROGRAM), atomic_load(sync + N_OPS)
            n_threads, base = atomic_load(sync + N_THREADS), atomic_load(sync + BASE)
            # The job's words are read without a lock; an unchanged epoch proves that they belong together.
            if atomic_load(sync + EPOCH) != now:
                continue
            epoch = now
            idle = 0
            if ith < n_threads:
                help_job(sync, program, n_ops, n_threads, base, node)
        return epoch

    return worker, 3, True


def make_noop():
    """Return a kernel that does nothing, to measure what an op costs."""

    def noop(params, ith, nth):
        pass

    return noop
