"""The engine: slots over one session in a separate thread. Requests come in from any thread; events leave from its own.

The thread checks its inbox between two micro-batches, so cancelling, queueing and slot actions wait for one at most.
`worker.py` does the work of a step; this file is the interface for other threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing, nullcontext
from pathlib import Path

from ikcli.engine.plan.planner import Planner
from ikcli.engine.plan.sizes import session_of
from ikcli.engine.run.opening import open_session
from ikcli.errors import IkError
from ikcli.server.prefix.reused import Reused
from ikcli.server.slots.actions import Action
from ikcli.server.slots.embeddings import EmbeddingTask
from ikcli.server.slots.log import Logger, silent
from ikcli.server.slots.messages import EmbeddingRequest, Event, Failure, GenerationRequest
from ikcli.server.slots.pictures import PictureReader
from ikcli.server.slots.pipeline_worker import worker_of
from ikcli.server.slots.projector import ServedProjector
from ikcli.server.slots.slot import Task
from ikcli.server.slots.states import EngineError, EngineMetrics, ModelInfo, SlotActionResult, SlotState
from ikcli.server.slots.vectors import ServedVectors
from ikcli.server.slots.worker import Worker
from ikcli.settings.run import RunConfig
from ikcli.tokenizer import Tokenizer
from ikcli.vision.opening import open_projector


class Ticket:
    """A submitted request."""

    def __init__(self, task: Task | EmbeddingTask, wake: Callable[[], None]) -> None:
        self._task, self._wake = task, wake

    @property
    def id_task(self) -> int:
        return self._task.id

    def cancel(self) -> None:
        """Stop the request: no more events, and its slot is free at the next step.

        Any thread may call this any number of times.
        """
        self._task.cancelled = True
        self._wake()


class Engine:
    """Serve requests over one session; see the module. `state`: loading, ready, failed (see `load_error`), stopped."""

    def __init__(
        self, config: RunConfig, *, n_slots: int, logger: Logger = silent, planner: Planner | None = None
    ) -> None:
        self.config, self.n_slots, self._log = config, n_slots, logger
        self.state = "loading"
        self.load_error: IkError | None = None
        self._planner = planner
        self._worker: Worker | None = None
        self._loaded = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ik-engine", daemon=True)
        self._next_task = 0
        self._lock = threading.Lock()
        self._closing = False

    # --- life -------------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Load the model in the engine's thread and begin to serve."""
        self._thread.start()

    def wait_loaded(self, timeout: float | None = None) -> bool:
        """Wait until the model is loaded or has failed to load; return whether it is loaded."""
        self._loaded.wait(timeout)
        return self.state == "ready"

    def _run(self) -> None:
        try:
            n, outputs = self.n_slots, session_of(self.config)[1].outputs
            planner = self._planner or Planner.of_file(self.config)
            projector = open_projector(self.config, planner.hp)
            media = projector.media_config if projector is not None else None
            opened = open_session(self.config, n_seq_max=n, n_step=n, outputs=outputs, media=media, planner=planner)
            with opened as session, nullcontext() if projector is None else closing(projector):
                self._worker = worker_of(session, self._log)
                if projector is not None:
                    self._worker.projector = ServedProjector(projector)
                self.state = "ready"
                self._loaded.set()
                if not self._closing:
                    self._serve(self._worker)
        except IkError as e:
            self._fail(e)
        except Exception as e:
            self._fail(
                IkError(f"internal error{'' if self._loaded.is_set() else ' while loading'}: {type(e).__name__}: {e}")
            )

    def _serve(self, worker: Worker) -> None:
        """Let the worker run; if it ends with an error, no request waits for it."""
        try:
            worker.run()
        except Exception as e:
            self.state = "failed"
            worker.abandon(e)
            raise

    def _fail(self, error: IkError) -> None:
        what = "the engine stopped" if self._loaded.is_set() else "unable to load model"
        self.load_error, self.state = error, "failed"
        self._log("ERR", "load_model", what, {"error": str(error)})
        self._loaded.set()

    def shutdown(self, *, drain: bool) -> None:
        """Stop the thread: after all requests are done (`drain`), or now; then open requests fail with 503.

        A second call without `drain` cuts a draining one short.
        """
        self._closing = True
        if self._worker is not None:
            self._worker.stop(drain)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        if self.state == "ready":
            self.state = "stopped"

    # --- requests ---------------------------------------------------------------------------------------------------
    def submit(self, request: GenerationRequest | EmbeddingRequest, on_event: Callable[[Event], None]) -> Ticket:
        """Queue a request; `on_event` is called from the engine's thread and must return at once.

        A request that cannot be served gets a Failure event, never an exception.
        """
        with self._lock:
            task: Task | EmbeddingTask
            if isinstance(request, EmbeddingRequest):
                task = EmbeddingTask(self._next_task, request, on_event)
            else:
                task = Task(self._next_task, request, on_event)
            self._next_task += 1
        worker = self._worker
        if self.state != "ready" or worker is None or self._closing:
            on_event(self._unavailable())
            return Ticket(task, lambda: None)
        refused = worker.check(request)
        if refused is not None:
            on_event(refused)
        else:
            worker.post(task)
        return Ticket(task, worker.wake)

    def _unavailable(self) -> Failure:
        if self._closing or self.state == "stopped":
            return Failure(503, "unavailable_error", "The server is shutting down")
        if self.state == "failed":
            return Failure(500, "server_error", f"The model could not be loaded: {self.load_error}")
        return Failure(503, "unavailable_error", "Loading model")

    def slot_action(self, id_slot: int, action: str, path: Path | None = None) -> Future[SlotActionResult]:
        """Save, restore (both with `path`) or erase a slot once it is idle; failures raise EngineError."""
        future: Future[SlotActionResult] = Future()
        worker = self._worker
        if self.state != "ready" or worker is None or self._closing:
            f = self._unavailable()
            future.set_exception(EngineError(f.status, f.type, f.message))
        elif not 0 <= id_slot < self.n_slots:
            future.set_exception(_invalid(f"slot {id_slot} does not exist; there are slots 0 to {self.n_slots - 1}"))
        elif action not in ("save", "restore", "erase") or (action != "erase" and path is None):
            future.set_exception(_invalid(f"unknown slot action '{action}'; use save, restore or erase"))
        else:
            worker.post(Action(id_slot, action, path, future))
        return future

    @property
    def scales(self) -> tuple[float, ...]:
        """Return the scales of the adapters for requests that name none.

        Raise EngineError 503 before the model is ready.
        """
        return self._ready().added.scales

    def set_scales(self, scales: tuple[float, ...]) -> None:
        """Set the scales for requests that begin from now on."""
        worker = self._ready()
        if len(scales) != len(worker.added.scales):
            raise _invalid(f"{len(scales)} scales of adapters for {len(worker.added.scales)} adapters")
        worker.set_scales(scales)

    @property
    def vectors(self) -> ServedVectors:
        """Return the control vectors; raise EngineError 503 before the model is ready."""
        return self._ready().vectors

    # --- state --------------------------------------------------------------------------------------------------------
    @property
    def model(self) -> ModelInfo:
        """Return the loaded model; raise EngineError 503 before it is ready."""
        return self._ready().model

    @property
    def pictures(self) -> PictureReader | None:
        """Return the reader of images, None without a projector; raise EngineError 503 before the model is ready."""
        return self._ready().projector

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer; raise EngineError 503 before it is ready."""
        return self._ready().tokenizer

    def slots(self) -> list[SlotState]:
        """Return the state of every slot; empty before the model is ready."""
        return [s.snapshot() for s in self._worker.slots] if self._worker is not None else []

    def cached_tokens(self) -> list[tuple[int, ...]]:
        """Return the tokens in the cache of every slot; empty before the model is ready."""
        return [tuple(s.cached.tolist()) for s in self._worker.slots] if self._worker is not None else []

    def held(self, request: GenerationRequest) -> Reused | None:
        """Return where tokens of the prompt could come from now; None if the cache is in use for too long."""
        return self._ready().held(request)

    def metrics(self, *, reset: bool = False) -> EngineMetrics:
        """Return counters and gauges; `reset` starts the averages again."""
        return self._worker.metrics(reset=reset) if self._worker is not None else EngineMetrics()

    def _ready(self) -> Worker:
        if self._worker is None:
            f = self._unavailable()
            raise EngineError(f.status, f.type, f.message)
        return self._worker


def _invalid(message: str) -> EngineError:
    return EngineError(400, "invalid_request_error", message)
