"""Calls that tell the system how to keep memory: huge pages and locked pages, and arithmetic on pages.

They exist on POSIX systems alone (huge pages on Linux); elsewhere they do nothing and say so.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import sys
from collections.abc import Iterable
from pathlib import Path

_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HUGE_PAGE, COLLAPSE = 14, 25  # advice of Linux

Range = tuple[int, int]  # address, bytes


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


def advise(memory: Range, advice: int) -> bool:
    """Advise the system about the whole pages of a range; return whether it accepted."""
    pages, libc = inner_pages(memory), _libc()
    if pages is None:
        return True
    if libc is None or sys.platform != "linux":
        return False
    return bool(libc.madvise(ctypes.c_void_p(pages[0]), ctypes.c_size_t(pages[1]), advice) == 0)


def memlock_limit() -> int:
    """Return the bytes this process may lock, or -1 without a limit or where the limit is unknown."""
    try:
        import resource
    except ImportError:
        return -1
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return -1 if soft == resource.RLIM_INFINITY else soft


def lock(address: int, n_bytes: int) -> int:
    """Call mlock; return 0 or the error number."""
    libc = _libc()
    if libc is None:
        return errno.ENOSYS
    if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(n_bytes)) == 0:
        return 0
    return ctypes.get_errno()


@functools.cache
def _libc() -> ctypes.CDLL | None:
    return None if sys.platform == "win32" else ctypes.CDLL(None, use_errno=True)
