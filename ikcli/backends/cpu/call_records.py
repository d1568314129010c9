"""Memory for the parameters of kernel calls, once or, for weights mirrored or spread over NUMA nodes, once per node.

A kernel finds the counters of its work items 64 bytes before its parameters. Threads of all nodes share them, while
each node has parameters of its own with its number and the addresses of its weights. So with copies, the page before
the parameters is the same memory in each of them, mapped several times.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import numpy as np
import numpy.typing as npt

from ikcli.backends.memory import aligned_zeros
from ikcli.errors import IkError

HEAD_BYTES = 64  # of the counter
_FIXED, _SHARED = 0x10, 0x01  # of Linux
_FAILED = ctypes.c_void_p(-1).value

Words = npt.NDArray[np.int64]


class CallRecords:
    """Records of `n_bytes` for each of `n` calls; `distance`: bytes from a record to its next copy, 0 without one."""

    def __init__(self, n: int, n_bytes: int, copies: int = 1) -> None:
        self._n_bytes, self.distance = n_bytes, 0
        if copies == 1:
            self._item = -(-(HEAD_BYTES + n_bytes) // 64) * 64
            self._memory = aligned_zeros(self._item * n)
            self._first = HEAD_BYTES
            return
        page = mmap.PAGESIZE
        self._item = page + -(-n_bytes // page) * page
        self.distance = self._item * n
        self._memory = _mirrored(n, self._item, copies)
        self._first = page

    def words(self, i: int, copy: int = 0) -> Words:
        """Return the words of a record."""
        at = self._first + self._item * i + self.distance * copy
        return self._memory[at : at + self._n_bytes].view(np.int64)

    def address(self, i: int) -> int:
        """Return the address of the first copy of a record."""
        return int(self._memory.ctypes.data) + self._first + self._item * i


def _mirrored(n: int, item: int, copies: int) -> npt.NDArray[np.uint8]:
    """Return `copies` regions of n items, whose first pages are the same memory in all of them."""
    if not hasattr(os, "memfd_create"):
        raise IkError(
            "--numa mirror and distribute: only Linux can map the counters of work into several copies of a program"
        )
    size, page = n * item, mmap.PAGESIZE
    if not n:
        return aligned_zeros(0)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    access = mmap.PROT_READ | mmap.PROT_WRITE
    file = os.memfd_create("ik-calls")
    try:
        os.ftruncate(file, size * copies)
        base = libc.mmap(None, size * copies, access, _SHARED, file, 0)
        places = [(base + copy * size + i * item, i * item) for copy in range(1, copies) for i in range(n)]
        if base == _FAILED or any(
            libc.mmap(address, page, access, _SHARED | _FIXED, file, at) == _FAILED for address, at in places
        ):
            raise IkError(f"--numa: memory for programs was not mapped: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(file)
    memory = (ctypes.c_uint8 * (size * copies)).from_address(base)
    weakref.finalize(memory, libc.munmap, base, size * copies)
    return np.ctypeslib.as_array(memory)
