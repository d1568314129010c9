"""The folder of `--cache-disk`: nodes of the prompt cache as files, written and removed by a thread of their own.

The folder may be shared by servers and by models. Files of others count for the limit; the least recently used files
are removed first, whichever server wrote them.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ikcli.engine.run.adapters import NOTHING
from ikcli.engine.run.saved_sequence import Checkpoint
from ikcli.errors import IkError
from ikcli.files import make_private_folder
from ikcli.server.prefix import node_file
from ikcli.server.prefix.node_file import SUFFIX, Content
from ikcli.server.prefix.rest import Rest
from ikcli.server.slots.log import Logger

_AHEAD = 3  # files that are read ahead of the one that is copied into a slot
_ABANDONED = 600.0  # seconds after which an unfinished file belongs to no running server
_LOOK = 64  # files written between two looks at what others wrote


@dataclass(slots=True, eq=False)
class StoredFile:
    """A file that holds the positions from `start` on of one or, after a split, several nodes.

    `places`: positions of its checkpoints. `writing`: jobs of the writing thread that it waits for.
    """

    name: str
    start: int
    places: frozenset[int] = frozenset()
    writing: int = 0


@dataclass(frozen=True, slots=True)
class _Job:
    """A file to write, or checkpoints to add to it (`adds`)."""

    file: StoredFile
    content: Content
    before: Sequence[str]
    adds: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a job of the writing thread: what the file lacks, and which files were removed.

    `failed`: the file does not exist; or, with `places`, it has no checkpoints at these positions.
    """

    job: _Job
    failed: bool = False
    places: frozenset[int] = frozenset()
    removed: tuple[str, ...] = ()

    @property
    def file(self) -> StoredFile:
        return self.job.file


class Disk:
    """The files of one model in a folder. All but the writing runs in the engine's thread."""

    def __init__(
        self, folder: Path, limit: int, waiting: int, about: Mapping[str, Any], rest: Rest, log: Logger
    ) -> None:
        """`limit`: bytes of the folder. `waiting`: bytes of RAM that may wait to be written."""
        make_private_folder(folder, "--cache-disk")
        self.about = about
        self._folder, self._limit, self._most, self._rest, self._log = folder, limit, waiting, rest, log
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._reports: queue.Queue[Report] = queue.Queue()
        self.n_waiting = 0  # bytes handed over and not reported yet
        self._total, self._n_written = 0, 0
        self._failed, self._failed_bytes = "", 0  # the problem told last, and the most that could not be written
        self._look()
        self._readers = ThreadPoolExecutor(_AHEAD, "ik-cache-read")
        self._writer = threading.Thread(target=self._write_all, name="ik-cache-write", daemon=True)
        self._writer.start()

    def found(self) -> Iterator[tuple[StoredFile, Content]]:
        """Yield the usable files of this model, those of earlier positions first, as far as their texts are complete.

        Files whose earlier positions are missing are removed. Others are counted in one line of the log.
        """
        for path in self._folder.glob(f".*{SUFFIX}.*.tmp"):  # of a server that was killed
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED:
                    path.unlink()
        ours: list[tuple[StoredFile, Content]] = []
        n_other = 0
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            content = node_file.peek(path, self.about)
            n_other += content is None
            if content is not None:
                ours.append(
                    (StoredFile(path.name, content.start, frozenset(c.n_tokens for c in content.checkpoints)), content)
                )
        known: dict[str, int] = {}
        n_good = 0
        for file, content in sorted(ours, key=lambda one: one[1].start):
            if content.start and not 0 < content.start <= known.get(content.after, 0):
                self._unlink(file.name)
                continue
            known[file.name] = content.start + len(content.tokens)
            n_good += 1
            yield file, content
        others = f"; {n_other} files of another model, version or cache type are ignored" if n_other else ""
        self._log("INFO", "init", f"prompt cache on disk: {n_good} files in {self._folder}, limit "
                  f"{self._limit / (1 << 30):.1f} GiB{others}", {"n_files": n_good, "n_ignored": n_other})  # fmt: skip

    # --- read -------------------------------------------------------------------------------------------------------
    def read(self, files: Iterable[StoredFile]) -> Iterator[Content | None]:
        """Yield the contents of files, read ahead by other threads; None for one that cannot be used."""
        pending = list(files)
        waiting = [self._readers.submit(self._read, file) for file in pending[:_AHEAD]]
        for i, file in enumerate(pending):
            content = waiting[i].result()
            if i + _AHEAD < len(pending):
                waiting.append(self._readers.submit(self._read, pending[i + _AHEAD]))
            if isinstance(content, IkError):
                self._log("WARN", "prompt_cache", f"{content}; its tokens are computed again", {"file": file.name})
                self._unlink(file.name)
            yield None if isinstance(content, IkError) else content

    def _read(self, file: StoredFile) -> Content | IkError:
        try:
            return node_file.read(self._folder / file.name, self.about, self._rest)
        except IkError as e:
            return e

    def used(self, names: Iterable[str]) -> None:
        """Note that files were used now, at the same time, since none is of use without those before it."""
        now = time.time_ns()
        for name in names:
            with contextlib.suppress(OSError):
                os.utime(self._folder / name, ns=(now, now))

    # --- write ------------------------------------------------------------------------------------------------------
    def has_room(self, n_bytes: int) -> bool:
        """Return whether something of this size may be handed over to the writing thread."""
        return not self.n_waiting or self.n_waiting + n_bytes <= self._most

    def write(self, file: StoredFile, content: Content, before: Sequence[str]) -> None:
        """Hand over a file; its report follows. `before`: the files of earlier positions, which it needs."""
        self._hand_over(_Job(file, content, before))

    def add(self, file: StoredFile, checkpoints: Sequence[Checkpoint], before: Sequence[str]) -> None:
        """Hand over checkpoints that were made after the file was written."""
        file.places |= {c.n_tokens for c in checkpoints}
        content = Content("", file.start, np.zeros(0, np.int32), NOTHING, (), tuple(checkpoints))
        self._hand_over(_Job(file, content, before, adds=True))

    def _hand_over(self, job: _Job) -> None:
        job.file.writing += 1
        self.n_waiting += job.content.n_bytes
        self._jobs.put(job)

    def reports(self, *, wait: bool = False) -> Iterator[Report]:
        """Yield what the writing thread did since the last call; `wait`: until everything is written."""
        while self.n_waiting or not wait:
            try:
                report = self._reports.get(block=wait)
            except queue.Empty:
                return
            report.file.writing -= 1
            self.n_waiting -= report.job.content.n_bytes
            yield report

    def close(self) -> None:
        """Wait until everything is written."""
        self._jobs.put(None)
        self._writer.join()
        self._readers.shutdown()

    def _write_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            name = job.file.name
            if job.before and not (self._folder / job.before[-1]).exists():  # nothing can be done with this one alone
                self._unlink(name)
                self._reports.put(Report(job, failed=True))
                continue
            try:
                size = self._perform(job)
            except IkError as e:  # the file itself is damaged or was removed by another server
                self._log("WARN", "prompt_cache", f"{e}; its tokens are computed again", {"file": name})
                self._unlink(name)
                self._reports.put(Report(job, failed=True))
                continue
            except OSError as e:
                problem = e.strerror or str(e)
                if problem != self._failed:
                    self._log("WARN", "prompt_cache", f"cannot write to {self._folder}: {problem}; the prompt cache "
                              "goes on in RAM", {"file": name})  # fmt: skip
                self._failed, self._failed_bytes = problem, max(self._failed_bytes, job.content.n_bytes)
                places = (c.n_tokens for c in job.content.checkpoints) if job.adds else ()
                self._reports.put(Report(job, failed=True, places=frozenset(places)))
                continue
            if job.content.n_bytes >= self._failed_bytes:  # less may still fit a full disk
                self._failed, self._failed_bytes = "", 0
            self._total += size
            self._n_written += 1
            self.used((*job.before, name))
            look = self._total > self._limit or self._n_written % _LOOK == 0
            self._reports.put(Report(job, removed=self._look(name) if look else ()))

    def _perform(self, job: _Job) -> int:
        """Write a file, or add checkpoints to it; return by how many bytes the folder grew."""
        path = self._folder / job.file.name
        if job.adds:
            return node_file.extend(path, self.about, job.content.checkpoints, self._rest)
        return 0 if path.exists() else node_file.write(path, self.about, job.content)

    def _look(self, newest: str = "") -> tuple[str, ...]:
        """Measure the folder; remove the least recently used files until it is within the limit; return their names.

        Of those used at the same time, the ones of later positions go first: names begin with the position.
        """
        files = []
        for path in self._folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):
                about = path.stat()
                files.append((path.name != newest, -about.st_mtime_ns, path.name, about.st_size))
        removed, total = [], 0
        for _, _, name, size in sorted(files):
            total += size
            if total > self._limit:
                total -= size
                removed.append(name)
                self._unlink(name)
        self._total = total
        return tuple(removed)

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self._folder / name).unlink()
