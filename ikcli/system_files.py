"""Reads at an offset and locks of files, on systems that have the calls for it and on those (Windows) that do not."""

from __future__ import annotations

import os
import threading
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_seeking = threading.Lock()  # a file has one position for all threads


def read_at(fd: int, n_bytes: int, offset: int) -> bytes:
    """Read at most `n_bytes` at an offset; other threads may read the same file meanwhile."""
    if hasattr(os, "pread"):
        return os.pread(fd, n_bytes, offset)
    with _seeking:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, n_bytes)


def read_into(fd: int, into: memoryview, offset: int) -> int:
    """Read from an offset into memory; return the number of bytes that came."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [into], offset)
    found = read_at(fd, min(len(into), 16 << 20), offset)
    into[: len(found)] = found
    return len(found)


def lock(file: IO[Any], *, wait: bool = True) -> bool:
    """Lock a file until it is closed; without `wait`, return whether nobody else has.

    Where the system has no such locks, two processes that want the same file are not kept apart.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def lock_byte(file: IO[Any], place: int) -> bool:
    """Lock one byte of a file for this process; return whether no other process has."""
    if fcntl is None:
        return True
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except OSError:
        return False
    return True


def unlock_byte(file: IO[Any], place: int) -> None:
    """Unlock a byte that `lock_byte` locked."""
    if fcntl is not None:
        fcntl.lockf(file, fcntl.LOCK_UN, 1, place)
