"""Talks to an engine in tests: runs requests, collects their events, waits for conditions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ikcli.sampling.params import SamplerParams
from ikcli.server.slots.engine import Engine, Ticket
from ikcli.server.slots.messages import Delta, Event, Failure, Final, GenerationRequest
from ikcli.settings.run import RunConfig
from ikcli.settings.server import ServerConfig

GREEDY = SamplerParams(temperature=0)
WAIT = 60  # seconds until a test gives up
LOAD = 900  # ... while kernels may have to be compiled


@contextmanager
def serving(n_slots: int = 1, *, server: dict[str, Any] | None = None, **changes: Any) -> Iterator[Engine]:
    """A ready engine with the demo model, or `model=`; `server` has fields of ServerConfig."""
    settings = {"command": "serve", "n_ctx": 1024, "n_threads": 2, "n_threads_batch": 2, "warmup": False}
    config = RunConfig(**(settings | changes), server=ServerConfig(**(server or {})))
    engine = Engine(config, n_slots=n_slots)
    engine.start()
    try:
        assert engine.wait_loaded(LOAD), engine.load_error
        yield engine
    finally:
        engine.shutdown(drain=False)


class Call:
    """A submitted request and its events."""

    def __init__(self, engine: Engine, request: GenerationRequest, on_event: Callable[[Event], None] | None = None):
        self.events: list[Event] = []
        self._hook = on_event
        self._changed = threading.Condition()
        self.ticket: Ticket = engine.submit(request, self._take)

    def _take(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()
        if self._hook is not None:
            self._hook(event)

    def wait_for(self, condition: Callable[[list[Event]], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.events), WAIT), self.events[-3:]

    @property
    def end(self) -> Final | Failure:
        """The last event, once it is there."""
        self.wait_for(lambda events: bool(events) and isinstance(events[-1], Final | Failure))
        last = self.events[-1]
        assert isinstance(last, Final | Failure)
        return last

    @property
    def final(self) -> Final:
        end = self.end
        assert isinstance(end, Final), end
        return end

    @property
    def failure(self) -> Failure:
        end = self.end
        assert isinstance(end, Failure), end
        return end

    @property
    def streamed(self) -> str:
        """Text of all deltas and the tail."""
        tail = self.final.tail.text
        return "".join(e.text for e in self.events if isinstance(e, Delta)) + tail


def request(prompt: Sequence[int], n_predict: int = 16, **fields: Any) -> GenerationRequest:
    """A greedy request, if nothing else is said."""
    return GenerationRequest(**({"prompt": tuple(prompt), "sampling": GREEDY, "n_predict": n_predict} | fields))


def ask(engine: Engine, prompt: Sequence[int] | str, n_predict: int = 16, **fields: Any) -> Final:
    """The answer to one request."""
    ids = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    return Call(engine, request(ids, n_predict, **fields)).final


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that another thread brings about."""
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)
