"""Embedding requests: the texts of all requests share micro-batches, in the cells of a free slot.

The content of that slot first moves to the prompt cache. Slots that generate take their tokens between two
micro-batches.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ikcli.engine.run.adapters import Added
from ikcli.engine.run.embedder import Embedder, check_embeds
from ikcli.engine.run.encoders import way_out
from ikcli.engine.run.pooling import Head, head_of, served_pooling
from ikcli.engine.run.session import Session
from ikcli.errors import UnsupportedError
from ikcli.server.slots.failures import failure_of
from ikcli.server.slots.log import Logger, log_prompt_time
from ikcli.server.slots.messages import Embedded, EmbeddingRequest, Event, Failure, RequestTimings
from ikcli.server.slots.reuse import Reuse
from ikcli.server.slots.slot import EMBEDDING, Slot

FloatRows = npt.NDArray[np.float32]


@dataclass(slots=True, eq=False)
class EmbeddingTask:
    """An embedding request in progress; `rows` by text, as they are done."""

    id: int
    request: EmbeddingRequest
    on_event: Callable[[Event], None]
    cancelled: bool = False
    rows: dict[int, FloatRows] = field(default_factory=dict)
    t_start: float = 0.0

    @property
    def n_tokens(self) -> int:
        """Return the number of tokens of all texts."""
        return sum(map(len, self.request.texts))


class Embeddings:
    """The embedding requests of a server; see the module. Only the engine's thread uses it, except `check`.

    `waiting`: queued requests. `slot`: the slot in use, as long as there is a micro-batch to compute.
    """

    def __init__(
        self,
        session: Session,
        reuse: Reuse,
        count: Callable[[int, float], None],
        send: Callable[[EmbeddingTask, Event], None],
        log: Logger,
    ) -> None:
        """Create an empty queue. `count` gets tokens and seconds of every micro-batch."""
        self._session, self._reuse, self._count, self._send, self._log = session, reuse, count, send, log
        self.pooling = served_pooling(session.config, session.model.file.metadata, session.model.hp.arch)
        self.problem = ""  # why embeddings are not available
        self._head: Head | None = None
        try:
            check_embeds(session)
            self._head = head_of(session.model, self.pooling)
        except UnsupportedError as e:
            if session.config.server.only_embeds or session.config.embed.pooling:
                raise
            self.problem = str(e)
            log("WARN", "init", "no embeddings", {"reason": self.problem})
        self.waiting: deque[EmbeddingTask] = deque()
        self._running: list[EmbeddingTask] = []
        self._embedder: Embedder | None = None
        self.slot: Slot | None = None

    @property
    def name(self) -> str:
        """Return the name of the pooling; it is empty if embeddings are not available."""
        return "" if self.problem else self.pooling.name.lower()

    def check(self, request: EmbeddingRequest, n_ctx: int, n_vocab: int) -> Failure | None:
        """Return why a request cannot be served, or None."""
        if self.problem:
            return Failure(501, "not_supported_error", self.problem)
        for i, tokens in enumerate(request.texts):
            if len(tokens) > n_ctx:
                text = f"text {i} ({len(tokens)} tokens) exceeds the available context size ({n_ctx} tokens); "
                session, hp = self._session, self._session.model.hp
                way = way_out(hp, session.n_ctx_seq, session.n_ubatch)
                text += "shorten it or start again with a larger -c" if hp.causal else way
                return Failure(400, "exceed_context_size_error", text, {"n_prompt_tokens": len(tokens), "n_ctx": n_ctx})
            if not tokens or not 0 <= min(tokens) <= max(tokens) < n_vocab:
                what = f"holds a token id outside the vocabulary of {n_vocab}" if tokens else "has no tokens"
                return Failure(400, "invalid_request_error", f"text {i} {what}")
        return None

    def add(self, task: EmbeddingTask) -> None:
        """Queue a request."""
        self.waiting.append(task)

    def drop_cancelled(self) -> None:
        """Drop cancelled requests."""
        if any(t.cancelled for t in self.waiting):
            self.waiting = deque(t for t in self.waiting if not t.cancelled)
        for task in [t for t in self._running if t.cancelled]:
            self._leave(task)

    def _leave(self, task: EmbeddingTask) -> None:
        assert self._embedder is not None
        self._running.remove(task)
        self._embedder.drop(lambda key: key[0] is task)

    # --- work -------------------------------------------------------------------------------------------------------
    def launch(self, free: Sequence[Slot], added: Added, before: int | None) -> None:
        """Take the slot that loses least; take the last free one only if `before` (a queued generation) is younger.

        `added`: for requests that name no scales of adapters.
        """
        if not self.waiting or self.slot is not None or not free:
            return
        first = self.waiting[0]
        if len(free) == 1 and before is not None and before < first.id:
            return
        slot = min(free, key=lambda s: (s.n_past, s.t_used))
        self._reuse.replace(slot, 0)
        slot.n_past, slot.state, slot.id_task = 0, EMBEDDING, first.id
        slot.added = added.of_request(first.request.lora)
        self.slot, self._embedder = slot, Embedder(self._session, self.pooling, slot.id, self._head)
        self._join(added)

    def _join(self, added: Added) -> None:
        """Add the texts of waiting requests that use the same adapters."""
        assert self.slot is not None and self._embedder is not None
        while self.waiting and added.of_request(self.waiting[0].request.lora) == self.slot.added:
            task = self.waiting.popleft()
            task.t_start = time.perf_counter()
            self._running.append(task)
            for i, tokens in enumerate(task.request.texts):
                self._embedder.add((task, i), tokens)

    def step(self, added: Added, *, join: bool) -> None:
        """Compute a micro-batch; with `join`, requests that came since `launch` take part."""
        assert self.slot is not None and self._embedder is not None
        if join:
            self._join(added)
        start, before = time.perf_counter(), self._embedder.n_tokens
        try:
            self._session.apply(self.slot.added)
            finished = self._embedder.step()
        except Exception as e:
            self._fail(failure_of(e))
        else:
            self._count(before - self._embedder.n_tokens, time.perf_counter() - start)
            for (task, i), rows in finished:
                task.rows[i] = rows
                if len(task.rows) == len(task.request.texts):
                    self._done(task)
        if not len(self._embedder):
            self._session.truncate(self.slot.id, 0)
            self.slot.release()
            self.slot = self._embedder = None

    def _done(self, task: EmbeddingTask) -> None:
        self._running.remove(task)
        ms = 1e3 * (time.perf_counter() - task.t_start)
        timings = RequestTimings(prompt_n=task.n_tokens, prompt_ms=ms, n_ctx=self._session.n_ctx_seq)
        self._send(task, Embedded(tuple(task.rows[i] for i in range(len(task.rows))), timings))
        log_prompt_time(self._log, {"id_task": task.id}, task.n_tokens, ms, n_texts=len(task.rows))

    def _fail(self, failure: Failure) -> None:
        """End the request whose text could not be computed."""
        assert self._embedder is not None
        task, _ = self._embedder.failed
        self._log("ERR", "embed", failure.message, {"id_task": task.id})
        self._leave(task)
        self._send(task, failure)

    def close(self, failure: Failure) -> None:
        """Fail all open requests."""
        for task in (*self._running, *self.waiting):
            self._send(task, failure)
        self._running.clear()
        self.waiting.clear()
        if self.slot is not None:
            self.slot.release()
