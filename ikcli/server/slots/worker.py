"""The engine's thread: it assigns requests to slots and says whose tokens are computed next (`steps.py`)."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace

import numpy as np

from ikcli.engine.pipeline.driver import StageLostError
from ikcli.engine.run.control_vectors import VectorUse
from ikcli.engine.run.residency import places_now, uses_now
from ikcli.engine.run.session import Session
from ikcli.hostinfo import available_memory
from ikcli.sampling.short import draw_function
from ikcli.sampling.vocab import SamplerVocab
from ikcli.server.prefix.explain import describe
from ikcli.server.prefix.keys import default_limit
from ikcli.server.prefix.reused import Reused
from ikcli.server.slots.actions import Action
from ikcli.server.slots.checkpoints import keeping, places
from ikcli.server.slots.checks import refused
from ikcli.server.slots.embeddings import Embeddings, EmbeddingTask
from ikcli.server.slots.failures import engine_error, failure_of
from ikcli.server.slots.generation import Generation, Setting
from ikcli.server.slots.log import Logger, log_timings
from ikcli.server.slots.messages import EmbeddingRequest, Failure, GenerationRequest
from ikcli.server.slots.pictures import spans_of, whole_pictures
from ikcli.server.slots.scheduler import prompt_pieces
from ikcli.server.slots.slot import GENERATION, IDLE, PROMPT, Slot, Task, alike
from ikcli.server.slots.states import EngineError, EngineMetrics, per_second
from ikcli.server.slots.steps import Steps, ids_of
from ikcli.server.slots.vectors import ServedVectors

_SHUTTING_DOWN = Failure(503, "unavailable_error", "The server is shutting down")


class Worker(Steps):
    """Serve requests until stopped; see the module.

    Other threads call `post`, `wake`, `stop`, `check` and `metrics`.
    """

    def __init__(self, session: Session, log: Logger) -> None:
        super().__init__(session, log)
        self.config = session.config.server
        hp, n_ctx = session.model.hp, self.model.n_ctx_slot
        draw_function()  # compiled now rather than when the first request comes
        vocab = SamplerVocab.from_tokenizer(self.tokenizer, session.n_vocab)
        adapters = session.model.adapters
        self.added = adapters.added  # for requests that name no scales
        staged = session.config.fleet.stages > 1
        self.vectors = ServedVectors(adapters.vectors, hp, staged=staged, changed=self._use_vectors)
        self._setting = Setting(n_ctx, hp.n_ctx_train, self.config.context_shift, self.tokenizer, vocab)
        self._inbox: deque[Task | EmbeddingTask | Action] = deque()
        self._queue: deque[Task] = deque()
        self._actions: list[Action] = []
        self._changing = threading.Lock()  # of `added`
        self._stopping = ""  # "drain" or "now"
        self._was_busy = True
        self._text_of = self.tokenizer.decode if self.tokenizer.kind != "none" else lambda tokens: ""
        self._embeddings = Embeddings(session, self._reuse, self._count_prompt, self._send, log)
        self.model = replace(self.model, pooling=self._embeddings.name)
        limit = self._reuse.store.limit or default_limit(None, available_memory())
        session.sequences.keeping = keeping(self.config, limit // len(self.slots))
        self._announce(n_ctx)

    def _announce(self, n_ctx: int) -> None:
        if n_ctx < self.session.n_ctx_seq:
            self._log("WARN", "init", "slots are limited to the context the model was trained for",
                      {"n_ctx_slot": n_ctx, "n_ctx_seq": self.session.n_ctx_seq})  # fmt: skip
        limit = self._reuse.store.limit >> 20
        self._log("INFO", "init", f"prompt cache: up to {limit} MiB of RAM (set with -cram)", {"limit_mib": limit})
        for s in self.slots:
            self._log("INFO", "init", "new slot", {"id_slot": s.id, "n_ctx_slot": s.n_ctx})

    # --- from other threads -----------------------------------------------------------------------------------------
    def post(self, item: Task | EmbeddingTask | Action) -> None:
        """Hand an item to the engine's thread."""
        self._inbox.append(item)
        self._awake.set()

    def wake(self) -> None:
        self._awake.set()

    def set_scales(self, scales: tuple[float, ...]) -> None:
        """Set the scales of adapters for requests that begin from now on and name none."""
        with self._changing:
            self.added = replace(self.added, scales=scales)

    def _use_vectors(self, uses: tuple[VectorUse, ...]) -> None:
        with self._changing:
            self.added = replace(self.added, vectors=uses)

    def stop(self, drain: bool) -> None:
        """End `run` when everything is done, or now."""
        self._stopping = "drain" if drain and self._stopping != "now" else "now"
        self._awake.set()

    def check(self, request: GenerationRequest | EmbeddingRequest) -> Failure | None:
        """Return why a request cannot be served, without looking at the slots, or None."""
        if isinstance(request, EmbeddingRequest):
            return self._embeddings.check(request, self.model.n_ctx_slot, self.model.n_vocab)
        return refused(self.session, self.model, request)

    def held(self, request: GenerationRequest) -> Reused | None:
        """Return where tokens of a prompt could come from now; None if the cache is in use for too long."""
        return self._reuse.held(np.array(request.prompt, np.int32), self.added.of_request(request.lora))

    def metrics(self, *, reset: bool) -> EngineMetrics:
        """Return counters and gauges."""
        c, session, store = self.counters, self.session, self._reuse.store
        busy = sum(s.state != IDLE for s in self.slots)
        n_waiting = len(self._queue) + len(self._embeddings.waiting)
        n_cached = sum(s.n_past for s in self.slots)
        rates = per_second(c.recent_prompt), per_second(c.recent_predicted)
        if reset:
            c.reset_recent()
        experts = places_now(session.model, session.run_plan.placement.buffer_of, session.runner)
        return EngineMetrics(
            c.prompt_tokens, c.prompt_seconds, c.predicted_tokens, c.predicted_seconds, c.n_decode, c.n_busy_slots,
            c.n_tokens_max, c.drafted, c.accepted, c.drafts, dict(c.accepted_by_position),
            self._speculator.decisions, *rates, busy, n_waiting,
            len(self.slots) - busy, n_cached, n_cached / session.n_ctx, store.n_bytes, len(store), c.t_start,
            c.from_slots, c.from_ram, c.from_disk, experts, uses_now(session.runner),
        )  # fmt: skip

    # --- the loop ---------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Serve until stopped."""
        while True:
            if self._awake.is_set() or self._actions:  # post, cancel and stop set it
                self._awake.clear()
                self._receive()
            if self._stopping == "now":
                break
            self._launch()
            quiet = self._reuse.write_quiet()
            if any(s.state != IDLE for s in self.slots):
                self._was_busy = True
                self.step()
                continue
            self._deliver()
            if self._was_busy:
                self._log("INFO", "update_slots", "all slots are idle", {})
                self._was_busy = False
            if self._stopping and not self._inbox and not self._queue and not self._embeddings.waiting:
                break
            self._awake.wait(quiet)
        self._close()

    def _receive(self) -> None:
        """Take posted items; drop cancelled requests."""
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Task):
                self._queue.append(item)
            elif isinstance(item, EmbeddingTask):
                self._embeddings.add(item)
            else:
                self._actions.append(item)
        if any(t.cancelled for t in self._queue):
            self._queue = deque(t for t in self._queue if not t.cancelled)
        self._embeddings.drop_cancelled()
        for slot in self.slots:
            if slot.task is not None and slot.task.cancelled:
                self._log("INFO", "update_slots", "slot released: request cancelled", ids_of(slot))
                if slot.state == GENERATION and slot.generation is not None:
                    log_timings(self._log, ids_of(slot), slot.generation.timings(slot.n_past), cancelled=True)
                slot.release()
        waiting = []
        for action in self._actions:
            if self.slots[action.id_slot].state == IDLE:
                self._act(action)
            else:
                waiting.append(action)
        self._actions = waiting

    def abandon(self, error: Exception) -> None:
        """Fail all open requests after `run` raised an error."""
        self._close(failure_of(error))

    def _close(self, failure: Failure = _SHUTTING_DOWN) -> None:
        """Fail all open requests."""
        self._receive()
        for slot in self.slots:
            if slot.task is not None:
                self._send(slot.task, failure)
                slot.release()
        for task in self._queue:
            self._send(task, failure)
        self._embeddings.close(failure)
        for action in self._actions:
            action.future.cancel()
        self._queue.clear()
        self._deliver()
        self._reuse.close()
        self._speculator.close()

    # --- assign requests to slots -------------------------------------------------------------------------------------
    def _launch(self) -> None:
        """Start queued requests in order of arrival; one that waits for a certain slot lets others pass."""
        if not self._queue and not self._embeddings.waiting:
            return
        waiting: deque[Task] = deque()
        free = {s.id for s in self.slots if s.state == IDLE} - {a.id_slot for a in self._actions}
        before = self._queue[0].id if self._queue else None
        self._embeddings.launch([self.slots[i] for i in free], self.added, before)
        free = {i for i in free if self.slots[i].state == IDLE}
        while self._queue and free:
            task = self._queue.popleft()
            slot = self._choose_slot(task, free)
            if slot is None:
                waiting.append(task)
                continue
            try:
                self._begin(slot, task)
            except StageLostError:
                self._queue.appendleft(task)
                self._queue.extendleft(reversed(waiting))
                raise
            except Exception as e:
                slot.task = task
                self._fail(slot, e)
            if slot.state != IDLE:
                free.discard(slot.id)
        waiting.extend(self._queue)
        self._queue = waiting

    def _choose_slot(self, task: Task, free: set[int]) -> Slot | None:
        """Return the slot that was asked for, the one with the most similar prompt, or the least recently used one."""
        wanted = task.request.id_slot
        if wanted >= 0:
            return self.slots[wanted] if wanted in free else None
        slots = [self.slots[i] for i in sorted(free)]
        least = self.config.slot_prompt_similarity
        if least > 0 and task.request.cache_prompt:
            added = self.added.of_request(task.request.lora)
            same = [s for s in slots if s.added == added]
            best = max(same, key=lambda s: s.similarity(task.prompt), default=None)
            if best is not None and best.similarity(task.prompt) > least:
                return best
        return min(slots, key=lambda s: s.t_used)

    def _begin(self, slot: Slot, task: Task) -> None:
        request = task.request
        generation = Generation(request, self._setting, slot.id)
        if not request.prompt:
            self._send(task, generation.final(slot.n_past))
            return
        reuse = request.cache_prompt and not request.prompt_logprobs and not self.session.encodes
        added = self.added.of_request(task.request.lora)
        reused = self._reuse.fetch(slot, task.prompt, added) if reuse else Reused(self._reuse.replace(slot, 0))
        n = self.session.truncate(slot.id, reused.n)
        while (whole := whole_pictures(request.pictures, n)) < n:
            n = self.session.truncate(slot.id, whole)
        if self.projector is not None:
            self.session.sequences.set_spans(slot.id, spans_of(request.pictures, n))
        reused = reused.cut(n)
        self.counters.reuse(reused)
        slot.added = added
        needed = self.model.needs_checkpoints
        slot.begin(task, generation, reused, places(self.config, n, len(task.prompt), request.turns) if needed else {})
        slot.t_served = self._step_number
        if request.report_progress:
            self._send(task, generation.progress(n))
        self._log("INFO", "launch_slot_with_task", "slot is processing task", ids_of(slot))
        self._log("INFO", "update_slots", "kv cache rm [p0, end)", {**ids_of(slot), "p0": n})
        if reuse:
            self._log("INFO", "prompt_cache", "prompt tokens reused",
                      {**ids_of(slot), **describe(reused, self._text_of)})  # fmt: skip
        if self.config.cache_explain:
            for line in self._reuse.explain(self._text_of):
                self._log("INFO", "prompt_cache", line, {})

    # --- one step ---------------------------------------------------------------------------------------------------
    def step(self) -> None:
        """Compute a token of every generating slot, then at most one ubatch of prompts."""
        self._step_number += 1
        generating = [s for s in self.slots if s.state == GENERATION]
        for slots in alike(generating):
            self._generate(slots)
        prompts_wait = bool(generating) and not self.config.cont_batching
        waiting = [s for s in self.slots if s.state == PROMPT and not (s.in_prompt and prompts_wait)]
        for piece in prompt_pieces(waiting, self.session.n_ubatch) if waiting else ():
            self._guarded(piece.slot, self._advance_prompt, piece.slot, piece.n_tokens)
        if self._embeddings.slot is not None:
            self._deliver()
            self._embeddings.step(self.added, join=not self._queue)

    # --- slot actions -----------------------------------------------------------------------------------------------
    def _act(self, action: Action) -> None:
        """Carry out an action on an idle slot."""
        slot = self.slots[action.id_slot]
        self._deliver()
        if not action.future.set_running_or_notify_cancel():
            return
        try:
            done = action.perform(self.session, slot, self.added)
            numbers = {"n_tokens": done.n_tokens, "n_bytes": done.n_bytes, "ms": round(done.ms, 2)}
            self._log("INFO", f"slot_{action.action}", "slot action done", {"id_slot": slot.id, **numbers})
            action.future.set_result(done)
        except Exception as e:
            action.future.set_exception(e if isinstance(e, EngineError) else engine_error(e))
