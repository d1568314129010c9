"""Compile missing kernels into the cache, in as many worker processes as this process has CPUs.

Every kernel is compiled once, even if several processes need it: the one that compiles holds a lock on a byte of one
file of the cache folder, chosen by the kernel's name, and the system releases it when a process dies. A worker that
finishes a kernel gets the next one, preferably a similar one, since a worker compiles what kernels share only once.
Workers end with the call, unless `keep_workers` was called: importing Numba takes as long as compiling a kernel.
"""

from __future__ import annotations

import atexit
import os
import selectors
import subprocess
import sys
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ikcli.errors import IkError
from ikcli.hostinfo import visible_cpus
from ikcli.native import isa
from ikcli.native.kernel_cache import (
    ADVICE,
    PACKAGE_DIR,
    KernelKey,
    adopt,
    cache_dir,
    has_code_names,
    has_kernels,
    is_cached,
    keep_code,
)
from ikcli.system_files import lock_byte, unlock_byte

Progress = Callable[[int, int], None]
_COSTS = {"attention_": 20, "matmul": 8}  # of the kernels of modules that begin so; others take about 2
_MOST_EARLY = 16  # hardly a run needs fewer kernels
_POLL = 0.02  # seconds between looks at a kernel that another process compiles
_kept: dict[tuple[str, ...], list[_Worker]] | None = None
_early: dict[tuple[str, ...], list[_Worker]] = {}
_most: int | None = None


def keep_workers(most: int | None = None) -> None:
    """Keep workers until this process ends, for programs that ask for kernels many times.

    `most`: the number of workers, for one of several such programs; default: the number of CPUs.
    """
    global _kept, _most
    _most = most
    if _kept is None:
        _kept = {}
        atexit.register(_end_kept)


def start_early() -> None:
    """Start workers if nothing is cached yet: they import Numba while this process reads a model."""
    if _kept is None and not _early and not has_kernels():
        kind, env = _target(cache_dir())
        _early[kind] = [_Worker(cache_dir(), env) for _ in range(min(_number(), _MOST_EARLY))]


def compile_kernels(keys: Sequence[KernelKey], progress: Progress | None = None) -> None:
    """Compile kernels into the cache; `progress(done, total)` after each."""
    directory = cache_dir()
    _make_writable(directory)
    left, done = list(keys), 0

    def tell(n: int) -> None:
        nonlocal done
        done += n
        if progress and n:
            progress(done, len(keys))

    with (directory / "lock").open("ab") as lock:
        while left:
            mine = [key for key in left if lock_byte(lock, _place(key))]  # no other process compiles it now
            try:
                named = has_code_names(directory)
                todo = [key for key in mine if not is_cached(key) and not (named and adopt(directory, key))]
                tell(len(mine) - len(todo))
                _compile(directory, todo, lambda: tell(1))
            finally:
                for key in mine:
                    unlock_byte(lock, _place(key))
            left = [key for key in left if key not in mine]
            finished = [key for key in left if is_cached(key)]
            tell(len(finished))
            left = [key for key in left if key not in finished]
            if left and not mine:
                time.sleep(_POLL)


def _place(key: KernelKey) -> int:
    return zlib.crc32(key.file_name.encode()) >> 1


class _Worker:
    """A process that compiles one kernel after the other."""

    def __init__(self, directory: Path, env: dict[str, str]) -> None:
        command = [sys.executable, "-P", "-m", "ikcli.native.compile_worker", str(directory)]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._key: KernelKey | None = None
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0, env=env
        )

    def give(self, key: KernelKey) -> None:
        """Send a kernel to compile; the worker prints a line when it is done."""
        assert self.process.stdin is not None
        self._key = key
        try:
            self.process.stdin.write(f"{key.line}\n".encode())
        except BrokenPipeError:
            raise self.failure() from None

    def finished(self) -> KernelKey:
        """Return the kernel that the worker has compiled, now that its line has come."""
        assert self.process.stdout is not None and self._key is not None
        if not self.process.stdout.readline():
            raise self.failure()
        return self._key

    def failure(self) -> IkError:
        """Return the error of a worker that ended prematurely."""
        self.process.wait()
        self._errors.seek(0)
        return IkError(f"compiling kernels failed: {self._errors.read().decode(errors='replace').strip()[-2000:]}")

    def end(self) -> None:
        """Let the worker finish and wait for it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()
        self._errors.close()


@contextmanager
def _workers(directory: Path, n: int) -> Iterator[list[_Worker]]:
    """Yield at most n workers for this folder and target."""
    kind, env = _target(directory)
    found = _kept.setdefault(kind, []) if _kept is not None else []
    found += _early.pop(kind, [])
    found += [_Worker(directory, env) for _ in range(n - len(found))]
    try:
        yield found[:n]
    except BaseException:
        for worker in found:
            worker.process.kill()
            worker.end()
        found.clear()
        raise
    if _kept is None:
        for worker in found:
            worker.end()


def _target(directory: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return what workers for this folder have in common, and their environment."""
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(PACKAGE_DIR.parent), os.environ.get("PYTHONPATH", "")]))
    target = isa.current()
    if target.architecture == isa.machine() and (target.feature_string or target is not isa.host()):
        env |= {"NUMBA_CPU_NAME": target.cpu, "NUMBA_CPU_FEATURES": target.feature_string}
    return (str(directory), env["PYTHONPATH"], target.cpu, target.feature_string), env


def _number() -> int:
    return _most or len(visible_cpus())


def _end_kept() -> None:
    for workers in (_kept or {}).values():
        for worker in workers:
            worker.end()


def _compile(directory: Path, keys: Sequence[KernelKey], finished: Callable[[], None]) -> None:
    """Compile the kernels that no other process compiles."""
    if not keys:
        return
    n = max(1, min(len(keys), _number()))
    shares = _shares(keys, n)
    with _workers(directory, n) as workers, selectors.DefaultSelector() as selector:
        for worker, share in zip(workers, shares, strict=True):
            first = share.popleft() if share else max(shares, key=len).pop()
            assert worker.process.stdout is not None
            selector.register(worker.process.stdout, selectors.EVENT_READ, (worker, share))
            worker.give(first)
        busy = len(workers)
        while busy:
            for event, _ in selector.select():
                worker, share = event.data
                key = worker.finished()
                longest = max(shares, key=len)
                if longest:
                    worker.give(share.popleft() if share else longest.pop())
                else:
                    busy -= 1
                keep_code(directory, key)
                finished()


def _shares(keys: Sequence[KernelKey], n: int) -> list[deque[KernelKey]]:
    """Return the kernels of n workers: those of a module together, and those that take long first."""
    modules: dict[str, list[KernelKey]] = {}
    for key in sorted(keys, key=lambda key: key.line):
        modules.setdefault(key.module, []).append(key)
    shares, costs = [deque[KernelKey]() for _ in range(n)], [0] * n
    for group in sorted(modules.values(), key=lambda group: (-_cost(group[0]), -len(group))):
        least = costs.index(min(costs))
        shares[least] += group
        costs[least] += _cost(group[0]) * len(group)
    return shares


def _cost(key: KernelKey) -> int:
    """Return about how long a kernel takes, in tenths of a second."""
    return next((cost for module, cost in _COSTS.items() if key.module.startswith(module)), 2)


def _make_writable(directory: Path) -> None:
    """Create the cache folder; raise IkError if it cannot be written to."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".probe.{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as e:
        raise IkError(f"{directory}: the kernel cache cannot be written ({e.strerror or e}); {ADVICE}") from None
