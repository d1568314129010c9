"""Hand-over of engine events to the event loop: any number of them with one wake-up.

The engine thread only appends to a deque and requests a wake-up if none is pending. The event loop then delivers the
events to their jobs. A job is the set of generations of one HTTP request.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from ikcli.server.slots.messages import (
    Delta,
    Embedded,
    EmbeddingRequest,
    Event,
    Failure,
    Final,
    GenerationRequest,
    RequestTimings,
)

if TYPE_CHECKING:
    from starlette.types import Receive

_write = ctypes.PyDLL(None).write
_write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
EngineRequest = GenerationRequest | EmbeddingRequest
# Tuples: a union would be rebuilt for every event.
_ENDS = (Final, Embedded, Failure)
_COUNTED = (Delta, Final, Embedded)


class TicketLike(Protocol):
    """A request in the engine."""

    id_task: int

    def cancel(self) -> None:
        """Cancel the request; may be called more than once."""


class Submitter(Protocol):
    """The part of the engine that a job needs."""

    def submit(self, request: EngineRequest, on_event: object) -> TicketLike:
        """Queue a request; its events come from the engine's thread."""


class Disconnected(Exception):
    """Raised when the client has disconnected and its generations are cancelled."""


class Bridge:
    """Carrier of all jobs' events from the engine's thread to one event loop.

    It wakes the loop by writing a byte without releasing the GIL. `call_soon_threadsafe` would release it: the loop
    would take the GIL and the engine would wait to get it back just when it was about to start computing, which
    releases the GIL anyway.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._events: deque[tuple[Job, int, Event]] = deque()
        self._waking = False
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
            weakref.finalize(self, os.close, end)
        loop.add_reader(self._reader, self._hand_over)

    def push(self, job: Job, index: int, event: Event) -> None:
        """Queue an event from the engine's thread; return at once."""
        self._events.append((job, index, event))
        if not self._waking:
            self._waking = True
            _write(self._writer, b"\0", 1)

    def push_end(self, job: Job, index: int, event: Event) -> None:
        """Queue an event like `push`, but only if it ends a generation."""
        if isinstance(event, _ENDS):
            self.push(job, index, event)

    def _hand_over(self) -> None:
        os.read(self._reader, 1)
        self._waking = False
        events = self._events
        while events:
            job, index, event = events.popleft()
            job.deliver(index, event)


class Job:
    """The generations of one HTTP request, cancelled if the client disconnects."""

    def __init__(self, bridge: Bridge, *, stream: bool, on_close: Callable[[int, int], None] | None = None) -> None:
        """Prepare the generations of a request.

        With `stream`, deltas and progress are delivered too, not only the ends. `on_close` receives `n_tokens`.
        """
        self._on_close = on_close
        self._bridge = bridge
        self._stream = stream
        self._tickets: list[TicketLike] = []
        self._ready: list[tuple[int, Event]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._open = 0
        self._watcher: asyncio.Task[None] | None = None
        self._gone = False
        self._quiet = True
        self._timer: asyncio.TimerHandle | None = None
        self._timings: dict[int, RequestTimings] = {}  # for `on_close`
        self._at_end: Callable[[], None] | None = None

    def at_end(self, call: Callable[[], None]) -> None:
        """Register a function to call when the request is over, however it ends."""
        self._at_end = call

    @property
    def n_tokens(self) -> tuple[int, int]:
        """Prompt tokens and generated tokens of all generations so far; counted only with `on_close`."""
        timings = self._timings.values()
        return sum(t.cache_n + t.prompt_n for t in timings), sum(t.predicted_n for t in timings)

    def start(self, engine: Submitter, requests: Sequence[EngineRequest], receive: Receive) -> None:
        """Submit the requests and watch the connection."""
        self._open = len(requests)
        for index, request in enumerate(requests):
            push = self._bridge.push if self._stream else self._bridge.push_end
            self._tickets.append(engine.submit(request, partial(push, self, index)))
        self._watcher = asyncio.ensure_future(self._watch(receive))

    def deliver(self, index: int, event: Event) -> None:
        """Deliver an event to this job; runs on the event loop."""
        if isinstance(event, _ENDS):
            self._open -= 1
        self._quiet = False
        if self._on_close is not None and isinstance(event, _COUNTED):
            self._timings[index] = event.timings
        self._ready.append((index, event))
        self._wake()

    @property
    def finished(self) -> bool:
        """Whether every generation has ended and its events were taken."""
        return not self._open and not self._ready

    async def events(self) -> list[tuple[int, Event]]:
        """Return the events since the last call, waiting for one if there are none.

        The list is empty when `ping_every` has passed without an event. Raise Disconnected if the client has
        disconnected.
        """
        if not self._ready and not self._gone:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._gone:
            raise Disconnected
        ready, self._ready = self._ready, []
        return ready

    def ping_every(self, seconds: float) -> None:
        """Make `events` return an empty list after this many seconds without an event."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self._tick, seconds)

    def _tick(self, seconds: float) -> None:
        if self._quiet:
            self._wake()
        self._quiet = True
        self.ping_every(seconds)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Cancel what is still running and stop watching; must be called at the end of every request."""
        if self._open:
            for ticket in self._tickets:
                ticket.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._on_close is not None:
            self._on_close(*self.n_tokens)
            self._on_close = None
        if self._at_end is not None:
            self._at_end()
            self._at_end = None

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        for ticket in self._tickets:
            ticket.cancel()
        self._wake()
