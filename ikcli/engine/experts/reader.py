"""Threads that read parts of files into memory, past the page cache where the file system allows it."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ikcli.engine.plan.expert_slots import BLOCK
from ikcli.errors import IkError
from ikcli.system_files import read_into

ReadInto = Callable[[int, memoryview, int], int]
"""Read from (file descriptor, offset) into memory and return how many bytes came, as `os.preadv` does."""


@dataclass(slots=True)
class Reading:
    """A part of a file to read: `n_bytes` from `offset` on, to `into[at:]`, where `at` is `offset` within its block."""

    path: Path
    offset: int
    n_bytes: int
    into: memoryview  # begins at a multiple of BLOCK and holds all blocks that the part touches
    done: Callable[[IkError | None], None]  # called by the reading thread
    work: Callable[[], None] | None = None  # done instead of reading


class _File:
    """A file opened twice: for direct reads if that is possible, and for the rest."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.plain = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except OSError as e:
            raise IkError(f"{path}: cannot be read ({e.strerror or e})") from None
        self.size = os.fstat(self.plain).st_size
        try:
            self.direct: int | None = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except (OSError, AttributeError):  # some file systems (tmpfs) and systems have no direct reads
            self.direct = None

    def read(self, read: ReadInto, r: Reading) -> None:
        """Fill the memory of a reading; raise IkError if the file ends or fails before."""
        first = r.offset // BLOCK * BLOCK
        stop = r.offset + r.n_bytes
        end = min(-(-stop // BLOCK) * BLOCK, self.size)
        at, direct = first, self.direct is not None
        while at < stop:
            fd = self.direct if direct and self.direct is not None else self.plain
            try:
                # Direct reads take whole blocks; behind the end of the file nothing comes.
                upto = -(-end // BLOCK) * BLOCK if direct else end
                n = read(fd, r.into[at - first : upto - first], at)
            except OSError as e:
                if direct:
                    direct = False  # the file system or memory does not suit direct reads after all
                    continue
                raise IkError(f"{self.path}: reading at byte {at} failed ({e.strerror or e})") from None
            if n <= 0:
                raise IkError(
                    f"{self.path}: the file ends at byte {at}, but an expert needs bytes up to {stop}; was it changed?"
                )
            at += n
            direct = direct and at % BLOCK == 0
        if not direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.plain, first, end - first, os.POSIX_FADV_DONTNEED)  # it is in a slot now

    def close(self) -> None:
        os.close(self.plain)
        if self.direct is not None:
            os.close(self.direct)


class Reader:
    """A pool of reading threads: what a step waits for comes first, then what `ahead` proposes.

    All state is guarded by `lock`, which the threads hold while they call `ahead`, but not while they read. So what is
    read ahead is decided when a thread has time for it.
    """

    def __init__(
        self,
        paths: set[Path],
        n_threads: int,
        lock: threading.RLock,
        ahead: Callable[[], Reading | None],
        read: ReadInto = read_into,
    ) -> None:
        self._files = {path: _File(path) for path in sorted(paths)}
        self._read, self._ahead = read, ahead
        self._wanted: deque[Reading] = deque()
        self._work = threading.Condition(lock)
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"expert-reader-{i}", daemon=True) for i in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def direct(self) -> bool:
        """Return whether all files are read past the page cache."""
        return all(file.direct is not None for file in self._files.values())

    def submit(self, readings: list[Reading]) -> None:
        """Queue readings that a step waits for."""
        with self._work:
            self._wanted.extend(readings)
            self._work.notify(len(readings))

    def wake(self) -> None:
        """Let idle threads ask `ahead` again."""
        with self._work:
            self._work.notify_all()

    def _take(self) -> Reading | None:
        with self._work:
            while not self._closed:
                r = self._wanted.popleft() if self._wanted else self._ahead()
                if r is not None:
                    return r
                self._work.wait()
        return None

    def take_wanted(self) -> Reading | None:
        """Take a reading from the queue, for a caller who would only wait for it; None if none is left there."""
        with self._work:
            return self._wanted.popleft() if self._wanted and not self._closed else None

    def perform(self, r: Reading) -> None:
        """Read, and say that it is done or has failed."""
        error = None
        try:
            if r.work is not None:
                r.work()
            else:
                self._files[r.path].read(self._read, r)
        except IkError as e:
            error = e
        except Exception as e:  # the step that waits must learn of it
            error = IkError(f"internal error: reading experts failed: {e!r}")
        r.done(error)

    def _run(self) -> None:
        while (r := self._take()) is not None:
            self.perform(r)

    def close(self) -> None:
        """Stop the threads after the reading that each is at, and close the files."""
        with self._work:
            self._closed = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join()
        for file in self._files.values():
            file.close()
