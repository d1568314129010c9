"""Talks to an engine in tests: runs requests, collects their events, waits for conditions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikcli.engine.plan.sizes import session_of
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.session import Session
from ikcli.sampling.params import SamplerParams
from ikcli.server.slots.engine import Engine, Ticket
from ikcli.server.slots.log import silent
from ikcli.server.slots.messages import Delta, Event, Failure, Final, GenerationRequest
from ikcli.server.slots.pipeline_worker import worker_of
from ikcli.server.slots.slot import Slot, Task
from ikcli.settings.run import RunConfig
from ikcli.settings.server import ServerConfig

GREEDY = SamplerParams(temperature=0)
WAIT = 60  # seconds until a test gives up
ENDLESS = 10**9  # tokens; a full context is shifted, while -1 ends with the context of the training
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
        stop(engine)


def stop(engine: Engine, *, drain: bool = False) -> None:
    """Shut down; fails if the engine's thread does not end."""
    thread = threading.Thread(target=engine.shutdown, kwargs={"drain": drain}, daemon=True)
    thread.start()
    thread.join(WAIT)
    assert not thread.is_alive(), f"the engine did not stop within {WAIT} seconds: {engine.slots()}"


class Pause:
    """A listener that holds the engine at the first event of a request until a test lets it go on.

    Small models generate hundreds of tokens before a busy machine wakes the thread of a test, so "while this request
    runs" has to be made true.
    """

    def __init__(self) -> None:
        self._reached, self._over = threading.Event(), threading.Event()

    def __call__(self, event: Event) -> None:
        self._reached.set()
        assert self._over.wait(WAIT), "the test did not end the pause"

    def wait(self) -> None:
        """Return once the engine is held."""
        assert self._reached.wait(WAIT), f"no event within {WAIT} seconds"

    def end(self) -> None:
        """Let the engine go on."""
        self._over.set()


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
            found = self._changed.wait_for(lambda: condition(self.events), WAIT)
            assert found, f"not within {WAIT} seconds; the last events are {self.events[-3:]}"

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
        assert time.monotonic() < end, f"not within {WAIT} seconds"
        time.sleep(0.002)


class ByHand:
    """The worker of an engine whose steps a test takes itself, so that it sees what is between them."""

    def __init__(self, session: Session) -> None:
        self.worker = worker_of(session, silent)

    def post(self, prompt: Sequence[int], n_predict: int = 16, **fields: Any) -> Posted:
        """A request; it begins with the next step."""
        task = Task(len(self.worker._inbox), request(prompt, n_predict, **fields), lambda event: None)
        events: list[Event] = []
        task.on_event = events.append
        self.worker.post(task)
        return Posted(task, events)

    def step(self, n: int = 1) -> None:
        """What the engine's thread does between two looks at its inbox."""
        for _ in range(n):
            self.worker._receive()
            self.worker._launch()
            self.worker.step()
            self.worker._deliver()

    def until(self, condition: Callable[[], Any], most: int = 2000) -> None:
        """Steps until something is so."""
        for _ in range(most):
            if condition():
                return
            self.step()
        raise AssertionError(f"not within {most} steps: {[s.snapshot() for s in self.worker.slots]}")

    def repeated(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], Any]]:
        """Texts that slots compute again (shifted, taken back) and the logits behind them, as they come."""
        found: list[tuple[list[int], Any]] = []
        done = self.worker._prompt_done

        def note(slot: Slot, g: Any, logits: Any) -> None:
            if not slot.in_prompt:
                found.append((slot.cached.tolist(), logits.copy()))
            done(slot, g, logits)

        monkeypatch.setattr(self.worker, "_prompt_done", note)
        return found

    def check_same(self, text: list[int], logits: Any, tolerance: float) -> None:
        """Logits are those behind this text, computed in an empty sequence (the last one of the session).

        And of none that lacks a token: what can be told from that is not all the same.
        """
        session = self.worker.session
        seq = session.n_seq_max - 1

        def fresh(tokens: list[int]) -> Any:
            session.truncate(seq, 0)
            return np.array(session.decode(Batch.single(tokens, 0, seq)))[0]

        wanted = fresh(text)
        error = np.abs(logits - wanted).max()
        assert error < tolerance * wanted.std(), (error, wanted.std())
        others = [fresh(text[:i] + text[i + 1 :]) for i in (0, len(text) // 2, len(text) - 2)]
        assert min(np.abs(other - wanted).max() for other in others) > 4 * error
        session.truncate(seq, 0)


@dataclass
class Posted:
    """A request of `ByHand` and its events."""

    task: Task
    events: list[Event]

    @property
    def final(self) -> Final | None:
        return next((e for e in self.events if isinstance(e, Final)), None)


@contextmanager
def by_hand(path: Path, n_slots: int = 1, *, server: dict[str, Any] | None = None, **changes: Any) -> Iterator[ByHand]:
    """A worker with a model of its own."""
    settings = {"command": "serve", "model": path, "n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "warmup": False}
    config = RunConfig(**(settings | changes), server=ServerConfig(**(server or {})))
    outputs = session_of(config)[1].outputs
    with Session.open(config, n_seq_max=n_slots, n_step=n_slots, outputs=outputs) as session:
        hand = ByHand(session)
        yield hand
        hand.worker._close()
