"""`-thp` and `--mlock`: huge pages for our own memory, and weights locked in RAM.

Both are requests to the system and never fail a run: a refusal is reported once, with the way to get the permission.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ikcli.engine.run import numa

_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # numbers of Linux
_MIB = 2**20

if TYPE_CHECKING:
    from ikcli.engine.run.model import Model
    from ikcli.engine.run.runner import Runner
    from ikcli.settings.run import RunConfig

Range = tuple[int, int]  # address, bytes
SystemCall = Callable[[int, int], int]


def inner_pages(memory: Range, page: int = mmap.PAGESIZE) -> Range | None:
    """Return the whole pages inside a range, or None if there are none."""
    address, n_bytes = memory
    first, stop = -(-address // page) * page, (address + n_bytes) // page * page
    return (first, stop - first) if stop > first else None


def outer_pages(ranges: Iterable[Range], page: int = mmap.PAGESIZE) -> list[Range]:
    """Return the pages that ranges touch; adjacent and overlapping ones are joined."""
    joined: list[list[int]] = []
    for address, n_bytes in sorted(r for r in ranges if r[1] > 0):
        first, stop = address // page * page, -(-(address + n_bytes) // page) * page
        if joined and first <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], stop)
        else:
            joined.append([first, stop])
    return [(first, stop - first) for first, stop in joined]


def thp_state(path: Path = _THP) -> str:
    """Return the system's setting (`always`, `madvise`, `never`), or an empty text where it has none."""
    try:
        text = path.read_text()
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]


def use_huge_pages(buffers: Iterable[Range], weights: Iterable[Range], mapped: bool, state: str) -> list[str]:
    """Request huge pages for empty buffers and weights in RAM; return warnings. `mapped`: some weights are mapped."""
    if state not in ("always", "madvise"):
        why = "this system has no transparent huge pages" if not state else "they are switched off on this system"
        return [f"-thp has no effect: {why}"]
    for memory in buffers:
        _madvise(memory, _MADV_HUGEPAGE)
    for memory in weights:
        _madvise(memory, _MADV_HUGEPAGE)
        _madvise(memory, _MADV_COLLAPSE)  # they are filled already; older kernels collapse them later by themselves
    if mapped:
        return ["-thp: weights mapped from the file keep small pages; --no-mmap reads them into RAM with huge ones"]
    return []


def _madvise(memory: Range, advice: int) -> None:
    pages = inner_pages(memory)
    libc = _libc()
    if pages is not None and libc is not None and sys.platform == "linux":
        libc.madvise(ctypes.c_void_p(pages[0]), ctypes.c_size_t(pages[1]), advice)


def lock_weights(ranges: Iterable[Range], lock: SystemCall | None = None, limit: int | None = None) -> list[str]:
    """Lock the pages of weights in RAM; return a warning if not all of them could be locked."""
    lock = lock or _mlock
    pages = outer_pages(ranges)
    total, done = sum(n for _, n in pages), 0
    for address, n_bytes in pages:
        error = lock(address, n_bytes)
        if error:
            limit = memlock_limit() if limit is None else limit
            allowed = f" (the limit is {limit / _MIB:.0f} MiB)" if limit >= 0 else ""
            return [
                f"--mlock: {done / _MIB:.0f} of {total / _MIB:.0f} MiB of weights locked, then the system refused"
                f"{allowed}: {os.strerror(error)}; raise the limit with ulimit -l, or LimitMEMLOCK of a service"
            ]
        done += n_bytes
    return []


def memlock_limit() -> int:
    """Return the bytes this process may lock, or -1 without a limit or where the limit is unknown."""
    try:
        import resource
    except ImportError:
        return -1
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return -1 if soft == resource.RLIM_INFINITY else soft


def _mlock(address: int, n_bytes: int) -> int:
    """Call mlock; return 0 or the error number."""
    libc = _libc()
    if libc is None:
        import errno

        return errno.ENOSYS
    if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(n_bytes)) == 0:
        return 0
    return ctypes.get_errno()


def _libc() -> ctypes.CDLL | None:
    return None if sys.platform == "win32" else ctypes.CDLL(None, use_errno=True)


def place(config: RunConfig, model: Model, runner: Runner, cpus: list[frozenset[int]] | None) -> list[str]:
    """Apply huge pages, first touch and locking as requested, before any buffer is used; return warnings."""
    notes: list[str] = []
    buffers = runner.host_buffers
    if config.thp:
        in_ram, mapped = model.memory(runner.host_weights)
        empty = [(int(b.ctypes.data), b.nbytes) for b in buffers]
        notes += use_huge_pages(empty, in_ram, bool(mapped), thp_state())
    if config.numa is not None and cpus is not None:
        numa.touch(buffers, cpus)
    if config.mlock:
        in_ram, mapped = model.memory(runner.host_weights)
        notes += lock_weights([*in_ram, *mapped])
    return notes
