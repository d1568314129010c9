"""`-thp` and `--mlock`: huge pages for buffers and weights, and weights locked in RAM.

Both are requests to the system and never fail a run: a refusal is reported once, with the way to get the permission.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ikcli.engine.run import numa
from ikcli.engine.run.huge_weights import HugeWeights, plentiful
from ikcli.engine.run.runner import Runner
from ikcli.engine.run.system_memory import HUGE_PAGE, Range, advise, lock, memlock_limit, outer_pages, thp_state
from ikcli.log import log

if TYPE_CHECKING:
    from ikcli.engine.run.model import Model
    from ikcli.settings.run import RunConfig

_MIB = 2**20
_LEAST = 64 * _MIB  # mapped weights below this are not worth a thread
_ON = ("always", "madvise")
SystemCall = Callable[[int, int], int]


def huge_weights(config: RunConfig, model: Model, runner: Runner) -> tuple[HugeWeights | None, list[str]]:
    """Bring mapped weights into huge pages; return what goes on beside the run, and warnings.

    By default it happens in the background, with `-thp` at once. It is up to the user with `--mlock` and `--numa`,
    which decide where weights are.
    """
    state = thp_state()
    asked = config.thp is True
    if asked and state not in _ON:
        why = "this system has no transparent huge pages" if not state else "they are switched off on this system"
        return None, [f"-thp has no effect: {why}"]
    if config.thp is False or state not in _ON:
        return None, []
    here = type(runner) is Runner and not runner.gpus and runner.cpu.experts is None  # all in the RAM of this process
    if not here or config.mlock or config.numa is not None:
        mapped = asked and model.mapped(runner.host_weights)
        text = "-thp: weights mapped from the file keep small pages here; --no-mmap reads them into RAM with huge ones"
        return None, [text] if mapped else []
    huge = HugeWeights(model, runner)
    if asked and huge.n_bytes:
        huge.at_once(config.n_threads)
        log(f"-thp: {huge.outcome}")
    if asked or huge.n_bytes <= _LEAST or not plentiful(huge.n_bytes):
        return None, []
    huge.request()
    return huge, []


def lock_weights(ranges: Iterable[Range], call: SystemCall = lock, limit: int | None = None) -> list[str]:
    """Lock the pages of weights in RAM; return a warning if not all of them could be locked."""
    pages = outer_pages(ranges)
    total, done = sum(n for _, n in pages), 0
    for address, n_bytes in pages:
        error = call(address, n_bytes)
        if error:
            limit = memlock_limit() if limit is None else limit
            allowed = f" (the limit is {limit / _MIB:.0f} MiB)" if limit >= 0 else ""
            return [
                f"--mlock: {done / _MIB:.0f} of {total / _MIB:.0f} MiB of weights locked, then the system refused"
                f"{allowed}: {os.strerror(error)}; raise the limit with ulimit -l, or LimitMEMLOCK of a service"
            ]
        done += n_bytes
    return []


def place(config: RunConfig, model: Model, runner: Runner, cpus: list[frozenset[int]] | None) -> list[str]:
    """Apply huge pages, first touch and locking, before any buffer is used; return warnings."""
    notes: list[str] = []
    buffers = runner.host_buffers
    # A large cache of which little is used takes more memory in huge pages, so by default it must fit twice.
    wanted = plentiful(sum(b.nbytes for b in buffers)) if config.thp is None else config.thp
    if wanted and thp_state() in _ON:
        for b in buffers:
            advise((int(b.ctypes.data), b.nbytes), HUGE_PAGE)
    if config.numa is not None and cpus is not None:
        numa.touch(buffers, cpus)
        experts = runner.cpu.expert_nodes
        striped = runner.host_weights if runner.cpu.mirror.n_copies == 1 else {}
        striped = {name: address for name, address in striped.items() if name not in experts.counts}
        log(numa.placement_line(cpus, sum(n for _, n in model.memory(striped)[0])))
        if experts.counts:
            log(experts.line())
        if model.mapped(runner.host_weights):
            notes.append(
                f"--numa {config.numa}: mapped weights stay on the nodes where the page cache has them; --no-mmap "
                "reads them into memory of the threads' nodes"
            )
    if config.mlock:
        in_ram, mapped = model.memory(runner.host_weights)
        notes += lock_weights([*in_ram, *mapped])
    return notes
