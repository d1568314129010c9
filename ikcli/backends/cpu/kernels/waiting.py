"""Wait for other threads: spin, yield, or, while other programs compete for the cores, sleep.

A thread that must wait spins for a few microseconds, then yields the core each time round. If it gets the core back
much later, other programs want it. From then on, threads sleep until what they wait for happens. Yielding would give
away a time slice for a wait of microseconds; a thread that slept is mostly back on its core at once, so that threads
get their slices at the same time. Where nothing competes, waking a thread takes longer than most waits: so a yield
tries now and then whether the other programs are gone, less often the longer they stay.

Words of the executor's shared block (bytes from its start):
    264 threads asleep   272 sleeps until a wait yields again   280 ... after the last long yield
"""

from ikcli.native.jit import inline
from ikcli.native.simd.control import atomic_add, atomic_load, atomic_store, pause, sleep_while, wake_all, yield_cpu

ASLEEP, SLEEPS, LAST_SLEEPS = 264, 272, 280
# Waiting counts in rounds of a spin. A worker without a job returns after so many.
_SPINS, _ROUNDS_OF_YIELD, _ROUNDS_OF_SLEEP = 1000, 4, 400
IDLE_ROUNDS = 13000
# Other programs compete: these spins take longer than waits for a thread that runs, at a barrier and between jobs.
BARRIER_SPINS, JOB_SPINS = 3000, 8000
_LONG_NS = 200_000  # of a yield, if another program had the core
_LEAST_SLEEPS, _MOST_SLEEPS = 8, 512
_SLEEP_NS = 20_000_000


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
