"""Walk a program: every op is cut into n_threads parts, which free threads claim and execute.

A program is entries of int64 words: kernel address, params address, bytes that a row moves (0 = many), bytes from
params to those of the next NUMA node (0 = nodes have none of their own). An op starts when all parts of the op before
it are done. Threads never wait for a thread that has not started a part: on a busy machine, where one of the threads
may be off its core for milliseconds, the others do its parts. One thread claims adjacent ops that move few bytes
together, because handing an op over from core to core takes longer than the op itself.

A thread that must wait spins for a few microseconds, then yields the core each time round. If it gets the core back
much later, other programs want it. From then on, threads sleep until what they wait for happens. Yielding would give
away a time slice for a wait of microseconds; a thread that slept is mostly back on its core at once, so that threads
get their slices at the same time. Where nothing competes, waking a thread takes longer than most waits: so a yield
tries now and then whether the other programs are gone, less often the longer they stay.

Shared block (int64 words, one cache line apart so that threads do not fight over them):
    0 parts claimed   8 parts done (both count over all jobs)   16 epoch: number of the job, then the job:
    17 program   18 n_ops   19 n_threads   20 parts claimed at its start   24 status
    32 stop   33 threads asleep   34 sleeps until a wait yields again   35 ... after the last long yield
    40 node of thread 0, 41 of thread 1, ... (which of the params of an op it uses)
A kernel's dynamic work counter is the int64 at params - WORK, and products by expert have one for each NUMA node behind
it; the thread that starts the next op clears them.
"""

from ikcli.backends.cpu.kernels.common import WORK, n_rows
from ikcli.backends.cpu.kernels.records import at
from ikcli.backends.cpu.params import Params
from ikcli.native.jit import inline
from ikcli.native.simd.control import (
    atomic_add,
    atomic_cas,
    atomic_load,
    atomic_store,
    call_kernel,
    pause,
    sleep_while,
    wake_all,
    yield_cpu,
)

CLAIMED, DONE, EPOCH, PROGRAM, N_OPS, N_THREADS, BASE, STATUS = 0, 64, 128, 136, 144, 152, 160, 192
STOP, ASLEEP, SLEEPS, LAST_SLEEPS = 256, 264, 272, 280
NODES = 320
ENTRY = 32  # bytes of an entry of a program
_ALONE = 32768  # bytes that one thread moves faster than two agree
# Waiting counts in rounds of a spin. A worker without a job returns after so many.
_SPINS, _ROUNDS_OF_YIELD, _ROUNDS_OF_SLEEP = 1000, 4, 400
_IDLE_ROUNDS = 13000
# Other programs compete: these spins take longer than waits for a thread that runs, at a barrier and between jobs.
_BARRIER_SPINS, _JOB_SPINS = 3000, 8000
_LONG_NS = 200_000  # of a yield, if another program had the core
_LEAST_SLEEPS, _MOST_SLEEPS = 8, 512
_SLEEP_NS = 20_000_000

params_at = at(Params)


@inline
def relax(sync, word, value, rounds, busy_spins):
    """Wait a little for another value than `value` in the int64 at sync + word; return the rounds waited so far."""
    sleeps = atomic_load(sync + SLEEPS)
    if rounds < (_SPINS if sleeps == 0 else busy_spins):
        pause()
        return rounds + 1
    if sleeps == 0:
        if yield_cpu() > _LONG_NS:
            sleeps = min(max(2 * atomic_load(sync + LAST_SLEEPS), _LEAST_SLEEPS), _MOST_SLEEPS)
            atomic_store(sync + LAST_SLEEPS, sleeps)
            atomic_store(sync + SLEEPS, sleeps)
        else:
            atomic_store(sync + LAST_SLEEPS, 0)
        return rounds + _ROUNDS_OF_YIELD
    atomic_store(sync + SLEEPS, sleeps - 1)
    atomic_add(sync + ASLEEP, 1)
    # The system compares the word with `value`, so a change before this call is not missed.
    sleep_while(sync + word, value, _SLEEP_NS)
    atomic_add(sync + ASLEEP, -1)
    return rounds + _ROUNDS_OF_SLEEP


@inline
def changed(sync, word):
    """Wake threads that sleep until this word changes."""
    if atomic_add(sync + ASLEEP, 0) != 0:
        wake_all(sync + word)


@inline
def clear_counters(entry):
    """Clear the work counters of an op; where nodes have params of their own, there may be one per node."""
    counters = atomic_load(entry + 8) - WORK
    atomic_store(counters, 0)
    if atomic_load(entry + 24) != 0:
        for i in range(1, WORK // 8):
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
            rounds = relax(sync, DONE, done, rounds, _BARRIER_SPINS)
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
                rounds = relax(sync, DONE, done, rounds, _BARRIER_SPINS)
        if n_ops > 0:
            clear_counters(program + ENTRY * (n_ops - 1))
        return atomic_load(sync + STATUS)

    return launch, 4, True


def make_worker():
    """Return worker(sync, ith, epoch) -> last epoch served; it returns to Python after a while without work."""

    def worker(sync, ith, epoch):
        idle = 0
        node = atomic_load(sync + NODES + 8 * ith)
        while idle < _IDLE_ROUNDS:
            now = atomic_load(sync + EPOCH)
            if now == epoch or now % 2 == 1:
                if atomic_load(sync + STOP) != 0:
                    return -1
                idle = relax(sync, EPOCH, now, idle, _JOB_SPINS)
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
