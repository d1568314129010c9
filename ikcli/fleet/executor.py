"""Executors of units of work: in this process, in several processes on this machine, or in Ray actors on many machines.

A factory makes one worker per process, which does one unit at a time. All executors give the same results; only the
order in which units end differs. If a worker dies, another one repeats its unit.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for
from typing import Any, Protocol

from ikcli.errors import IkError
from ikcli.log import warn

TRIES = 3
"""How often a unit is tried before workers that die on it end the run."""


class UnitWorker(Protocol):
    """A worker that does units, on the machine and in the process where it was made."""

    def do(self, unit: Any) -> Any:
        """Return the result of a unit; IkError ends the whole run."""

    def close(self) -> None:
        """Release what the worker holds."""


class Factory(Protocol):
    """Makes a worker; can be pickled."""

    def __call__(self) -> UnitWorker: ...


class Executor(Protocol):
    """A way to run units."""

    n_workers: int

    def run(self, factory: Factory, units: Sequence[Any], ahead: int | None = None) -> Generator[tuple[int, Any]]:
        """Yield (index, result) of every unit as units end.

        `ahead` limits how many units beyond the first unfinished one may begin. Where results are large and wanted in
        order, it bounds how many of them wait.
        """


class LocalExecutor:
    """Runs units one after the other in this process."""

    n_workers = 1

    def run(self, factory: Factory, units: Sequence[Any], ahead: int | None = None) -> Generator[tuple[int, Any]]:
        """Yield results; see Executor."""
        if not units:
            return
        worker = factory()
        try:
            for i, unit in enumerate(units):
                yield i, worker.do(unit)
        finally:
            worker.close()


_factory: Factory | None = None
_worker: UnitWorker | None = None


def _begin(factory: Factory) -> None:
    global _factory
    _factory = factory
    # Ctrl-C reaches all processes of the terminal; only the command reports it
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent dies: a pool does not notice a killed parent, and its workers would stay."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait_for([parent.sentinel])
    os._exit(1)


def _do(unit: Any) -> Any:
    global _worker
    if _worker is None:  # not in _begin, because a pool prints and loses the errors of initializers
        assert _factory is not None
        _worker = _factory()
    return _worker.do(unit)


class ProcessExecutor:
    """Runs units in several processes on this machine, with one worker each."""

    def __init__(self, n_workers: int) -> None:
        self.n_workers = n_workers

    def run(self, factory: Factory, units: Sequence[Any], ahead: int | None = None) -> Generator[tuple[int, Any]]:
        """Yield results; see Executor."""
        places = [_Place(factory) for _ in range(min(self.n_workers, len(units)))]
        try:
            yield from _spread(places, Queue(len(units), ahead), lambda place, i: place.submit(units[i]))
        finally:
            for place in places:
                place.close()


class _Place:
    """A slot for one process; if the process died, the next unit starts another one."""

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        self._pool = self._new()

    def _new(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(self._factory,))

    def submit(self, unit: Any) -> Future[Any]:
        try:
            return self._pool.submit(_do, unit)
        except BrokenProcessPool:
            self._pool = self._new()
            return self._pool.submit(_do, unit)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class Queue:
    """Indices of the units still to do, in order. Units of dead workers are put back."""

    def __init__(self, n_units: int, ahead: int | None = None) -> None:
        self._todo, self._tries = list(range(n_units))[::-1], [0] * n_units
        self._ahead, self._first, self._done = ahead, 0, set[int]()

    def __bool__(self) -> bool:
        return bool(self._todo)

    @property
    def ready(self) -> bool:
        """Whether a unit may begin."""
        return bool(self._todo) and (self._ahead is None or self._todo[-1] < self._first + self._ahead)

    def begin(self) -> int:
        """Take the next unit and return its index."""
        i = self._todo.pop()
        self._tries[i] += 1
        return i

    def done(self, i: int) -> None:
        """Mark a unit as finished."""
        self._done.add(i)
        while self._first in self._done:
            self._done.remove(self._first)
            self._first += 1

    def again(self, i: int, what: str) -> None:
        """Put back a unit whose worker died; IkError if that has happened TRIES times."""
        if self._tries[i] >= TRIES:
            raise IkError(f"{what} {TRIES} times at unit {i + 1}; see the messages above, or try fewer workers")
        warn(f"{what}; its unit is done again")
        self._todo = sorted([*self._todo, i], reverse=True)


def _spread(
    places: Sequence[_Place], queue: Queue, submit: Callable[[_Place, int], Future[Any]]
) -> Iterator[tuple[int, Any]]:
    """Give each place one unit at a time, in order, and repeat the units of places that died."""
    idle = list(places)
    busy: dict[Future[Any], tuple[_Place, int]] = {}

    def fill() -> None:
        while queue.ready and idle:
            place, i = idle.pop(0), queue.begin()
            busy[submit(place, i)] = place, i

    fill()
    while busy:
        found: list[tuple[int, Any]] = []
        for future in wait(busy, return_when=FIRST_COMPLETED).done:
            place, i = busy.pop(future)
            idle.append(place)
            try:
                found.append((i, future.result()))
                queue.done(i)
            except BrokenProcessPool:
                queue.again(i, "the process of a worker died")
        fill()  # before yielding, because the caller takes a while to use the results
        yield from found


class ByKind:
    """Runs units given as (kind, unit) on the executor of their kind; all kinds run at the same time."""

    def __init__(self, works: Mapping[str, Executor]) -> None:
        self._works = works
        self.n_workers = sum(work.n_workers for work in works.values())

    def run(self, factory: Factory, units: Sequence[Any], ahead: int | None = None) -> Generator[tuple[int, Any]]:
        """Yield results; see Executor."""
        found: queue.SimpleQueue[tuple[int, Any] | BaseException | None] = queue.SimpleQueue()
        stop = threading.Event()

        def work(kind: str) -> None:
            mine = [i for i, unit in enumerate(units) if unit[0] == kind]
            try:
                for i, result in self._works[kind].run(factory, [units[i][1] for i in mine], ahead):
                    found.put((mine[i], result))
                    if stop.is_set():
                        break
                found.put(None)
            except BaseException as error:  # raised again in the thread that waits
                found.put(error)

        threads = [threading.Thread(target=work, args=(kind,), daemon=True) for kind in self._works]
        for thread in threads:
            thread.start()
        try:
            left = len(threads)
            while left:
                got = found.get()
                if isinstance(got, BaseException):
                    raise got
                if got is None:
                    left -= 1
                else:
                    yield got
        finally:
            stop.set()
