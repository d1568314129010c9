"""The engine's thread: it assigns requests to slots, computes micro-batches, chooses tokens and sends events.

A request that fails takes no other with it: results of a slot depend on no other slot, and after an exception in a
micro-batch of several slots each of them is tried alone.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVarTuple

import numpy as np
import numpy.typing as npt

from ikcli.engine.pipeline.driver import StageLostError
from ikcli.engine.plan.devices import available_memory
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.control_vectors import VectorUse
from ikcli.engine.run.media import Placed
from ikcli.engine.run.session import Session
from ikcli.sampling.sampler import token_logprobs
from ikcli.sampling.short import draw_function
from ikcli.sampling.vocab import SamplerVocab
from ikcli.server.prefix.explain import describe
from ikcli.server.prefix.keys import default_limit
from ikcli.server.prefix.reused import Reused
from ikcli.server.slots import slot_file
from ikcli.server.slots.checkpoints import keeping, places
from ikcli.server.slots.embeddings import Embeddings, EmbeddingTask
from ikcli.server.slots.failures import check_finite, engine_error, failure_of, invalid
from ikcli.server.slots.generation import Generation, Setting, as_info
from ikcli.server.slots.log import Logger, log_timings
from ikcli.server.slots.messages import EmbeddingRequest, Event, Failure, GenerationRequest
from ikcli.server.slots.pictures import spans_of, whole_pictures
from ikcli.server.slots.projector import ServedProjector
from ikcli.server.slots.reuse import Reuse
from ikcli.server.slots.scheduler import prompt_pieces
from ikcli.server.slots.slot import GENERATION, IDLE, PROMPT, Slot, Task, alike
from ikcli.server.slots.speculative import Speculator
from ikcli.server.slots.states import (
    Counters,
    EngineError,
    EngineMetrics,
    ModelInfo,
    SlotActionResult,
    model_info,
    per_second,
)
from ikcli.server.slots.vectors import ServedVectors

FloatRows = npt.NDArray[np.float32]
Arguments = TypeVarTuple("Arguments")


@dataclass(slots=True, eq=False)
class Action:
    """Save, restore or erase a slot."""

    id_slot: int
    action: str
    path: Path | None
    future: Future[SlotActionResult]


class Worker:
    """Serve requests until stopped; see the module.

    Other threads call `post`, `wake`, `stop`, `check` and `metrics`.
    """

    def __init__(self, session: Session, log: Logger) -> None:
        self.session, self._log = session, log
        self.config = session.config.server
        self.tokenizer = session.tokenizer
        hp = session.model.hp
        n_ctx = min(session.longest_text, hp.n_ctx_train)
        self.slots = [Slot(i, n_ctx) for i in range(session.n_seq_max)]
        self.model: ModelInfo = model_info(session, n_ctx)
        draw_function()  # compiled now rather than when the first request comes
        vocab = SamplerVocab.from_tokenizer(self.tokenizer, session.n_vocab)
        adapters = session.model.adapters
        self.added = adapters.added  # for requests that name no scales
        staged = session.config.fleet.stages > 1
        self.vectors = ServedVectors(adapters.vectors, hp, staged=staged, changed=self._use_vectors)
        self.projector: ServedProjector | None = None
        self._setting = Setting(n_ctx, hp.n_ctx_train, self.config.context_shift, self.tokenizer, vocab)
        self._inbox: deque[Task | EmbeddingTask | Action] = deque()
        self._queue: deque[Task] = deque()
        self._actions: list[Action] = []
        self._outbox: list[tuple[Task | EmbeddingTask, Event]] = []
        self._awake = threading.Event()
        self._changing = threading.Lock()  # of `added`
        self._stopping = ""  # "drain" or "now"
        self._step_number = 0
        self._was_busy = True
        self.counters = Counters()
        self._reuse = Reuse(session, self.slots, log)
        self._text_of = self.tokenizer.decode if self.tokenizer.kind != "none" else lambda tokens: ""
        self._embeddings = Embeddings(session, self._reuse, self._count_prompt, self._send, log)
        self.model = replace(self.model, pooling=self._embeddings.name)
        limit = self._reuse.store.limit or default_limit(None, available_memory())
        session.sequences.keeping = keeping(self.config, limit // len(self.slots))
        self._speculator = Speculator(session, log)
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
        n_ctx = self.model.n_ctx_slot
        if isinstance(request, EmbeddingRequest):
            return self._embeddings.check(request, n_ctx, self.model.n_vocab)
        if not self.model.generates:
            text = f"This server generates nothing, it only embeds. {self._instead()}"
            return Failure(501, "not_supported_error", text)
        n = len(request.prompt)
        if not -1 <= request.id_slot < len(self.slots):
            last = len(self.slots) - 1
            return invalid(f"id_slot {request.id_slot} does not exist; slots are 0 to {last}, -1 takes any")
        if n >= n_ctx:
            text = (
                f"the request ({n} tokens) exceeds the available context size ({n_ctx} tokens, the answer included); "
                "shorten it or start again with a larger -c"
            )
            return Failure(400, "exceed_context_size_error", text, {"n_prompt_tokens": n, "n_ctx": n_ctx})
        media = self.session.graph_config.media
        widest = max((one.picture.n_tokens for one in request.pictures), default=0)
        if media is not None and media.both and widest > self.session.n_ubatch:
            return invalid(
                f"an image of {widest} tokens, which see each other in both directions, must be in one micro-batch; "
                f"start again with -ub {widest} or more"
            )
        least = min(request.prompt, default=0) if not request.pictures else 0  # those of images are keys below 0
        if n and not 0 <= least <= max(request.prompt) < self.model.n_vocab:
            return invalid(f"the prompt holds a token id outside the vocabulary of {self.model.n_vocab}")
        return None

    def _instead(self) -> str:
        hp = self.session.model.hp
        if not hp.causal:
            return f"Its model ({hp.arch}) has no next token; use another one"
        return f"Start it without `{'--reranking' if self.config.reranking else '--embeddings'}`"

    def metrics(self, *, reset: bool) -> EngineMetrics:
        """Return counters and gauges."""
        c, session, store = self.counters, self.session, self._reuse.store
        busy = sum(s.state != IDLE for s in self.slots)
        n_waiting = len(self._queue) + len(self._embeddings.waiting)
        n_cached = sum(s.n_past for s in self.slots)
        rates = per_second(c.recent_prompt), per_second(c.recent_predicted)
        if reset:
            c.reset_recent()
        return EngineMetrics(
            c.prompt_tokens, c.prompt_seconds, c.predicted_tokens, c.predicted_seconds, c.n_decode, c.n_busy_slots,
            c.n_tokens_max, c.drafted, c.accepted, c.drafts, dict(c.accepted_by_position), *rates, busy, n_waiting,
            len(self.slots) - busy, n_cached, n_cached / session.n_ctx, store.n_bytes, len(store), c.t_start,
            c.from_slots, c.from_ram, c.from_disk,
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
                self._log("INFO", "update_slots", "slot released: request cancelled", _ids(slot))
                if slot.state == GENERATION and slot.generation is not None:
                    log_timings(self._log, _ids(slot), slot.generation.timings(slot.n_past), cancelled=True)
                slot.release()
        waiting = []
        for action in self._actions:
            if self.slots[action.id_slot].state == IDLE:
                self._act(action)
            else:
                waiting.append(action)
        self._actions = waiting

    def _close(self) -> None:
        """Fail all open requests."""
        failure = Failure(503, "unavailable_error", "The server is shutting down")
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

    def _send(self, task: Task | EmbeddingTask, event: Event) -> None:
        """Queue an event until the next computation starts: listeners then run beside it, not between two tokens."""
        self._outbox.append((task, event))

    def _deliver(self) -> None:
        """Deliver queued events; a listener that raises cancels its request."""
        for task, event in self._outbox:
            if task.cancelled:
                continue
            try:
                task.on_event(event)
            except Exception as e:
                task.cancelled = True
                self._awake.set()
                self._log("WARN", "send", "listener failed", {"id_task": task.id, "error": f"{type(e).__name__}: {e}"})
        self._outbox.clear()

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
        reuse = request.cache_prompt and not request.prompt_logprobs
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
        self._log("INFO", "launch_slot_with_task", "slot is processing task", _ids(slot))
        self._log("INFO", "update_slots", "kv cache rm [p0, end)", {**_ids(slot), "p0": n})
        if reuse:
            self._log("INFO", "prompt_cache", "prompt tokens reused",
                      {**_ids(slot), **describe(reused, self._text_of)})  # fmt: skip
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

    def _generate(self, slots: Sequence[Slot]) -> None:
        """Compute a token of each of these slots, which use the same additions."""
        full = [s for s in slots if s.n_past >= s.n_ctx]
        for s in full:
            self._shift(s)
        ready = [s for s in slots if s not in full] if full else slots
        if not ready:
            return
        drafted: Sequence[Slot] = ()
        if self._speculator:
            self._speculator.propose(ready)
            drafted = [s for s in ready if s.draft]
        self.session.apply(ready[0].added)
        try:
            if drafted:
                for s in drafted:
                    self.session.sequences.checkpoint(s.id, passing=True)
                batch = _batch(ready)
                self._deliver()
                logits = self.session.step(batch)
                if len(ready) > 1 and self.model.needs_checkpoints:
                    logits = logits.copy()  # rolling one slot back computes, which overwrites the rows of the others
            else:
                logits = self.session.step_each(*_next_tokens(ready), self._deliver)
        except StageLostError:
            raise
        except Exception as e:
            self._compute_alone(ready, e)
            return
        self._count(len(ready), max(s.n_past + 1 + len(s.draft) for s in ready))
        sums = np.add.reduce(logits, axis=1).tolist()
        at = 0
        for s in ready:
            n = 1 + len(s.draft)
            self._guarded(s, self._advance, s, logits, sums, at)
            at += n

    def _compute_alone(self, slots: Sequence[Slot], error: Exception) -> None:
        """Compute every slot alone after a failure, so that only the one at fault fails."""
        for s in slots:
            s.draft = ()
            if len(slots) == 1:
                self._fail(s, error)
            elif self._roll_back(s):
                self._generate([s])

    def _roll_back(self, slot: Slot) -> bool:
        """Roll back to the slot's tokens; return False if some of those have to be computed again as a prompt.

        A few, since a checkpoint before a draft, are computed at once: as one by one, to the last bit.
        """
        kept, n = self.session.truncate(slot.id, slot.n_past), slot.n_past
        if n - self.session.n_exact <= kept < n:
            self.session.step(Batch.single(slot.cached[kept:n], kept, slot.id))
        elif kept < n:
            slot.repeat_from(kept, slot.text_tokens())
            return False
        return True

    def _advance(self, slot: Slot, logits: FloatRows, sums: Sequence[float], at: int) -> None:
        """Take tokens from the logits of `last` (row `at`) and of the draft, as long as the draft is right."""
        g = slot.generation
        assert g is not None
        draft = slot.draft
        slot.push(slot.last)
        if draft:
            g.n_drafted += len(draft)
            g.n_drafts += 1
        for i, guess in enumerate((*draft, -1)):
            if not math.isfinite(sums[at + i]):
                check_finite(logits[at + i])
            if not self._take(slot, g, logits[at + i]):
                return
            if guess != slot.last:
                break
            g.n_accepted += 1
            g.accepted_by_position[i] += 1
            slot.push(slot.last)
        if draft:
            self._roll_back(slot)

    def _take(self, slot: Slot, g: Generation, logits: npt.NDArray[np.float32]) -> bool:
        """Choose the next token and send what is certain; return False if the slot stops generating."""
        token = g.choose(logits)
        goes_on = g.push(token)
        slot.last = token.id
        if g.bans_texts and (n_removed := g.rewind_banned()):
            self._rewind(slot, n_removed)
            return False
        if goes_on and slot.n_past + 1 >= slot.n_ctx and not g.may_shift:
            g.stop_for_context()
            goes_on = False
        assert slot.task is not None
        if not goes_on:
            self._finish(slot, g)
            return False
        if g.request.deltas:
            delta = g.delta(slot.n_past)
            if delta is not None:
                self._send(slot.task, delta)
        return True

    def _rewind(self, slot: Slot, n_removed: int) -> None:
        """Compute the last kept token again; the next one is then chosen without the banned one."""
        n_past = slot.n_past - n_removed  # the token removed last was not cached yet
        slot.repeat_from(self.session.truncate(slot.id, n_past), slot.cached[: n_past + 1].copy())

    def _shift(self, slot: Slot) -> None:
        """Drop old tokens and compute those after them again."""
        g = slot.generation
        assert g is not None
        slot.shift(self.tokenizer.add_bos)
        slot.n_past = self.session.truncate(slot.id, slot.n_past)
        self._log(
            "INFO", "update_slots", "slot context shift", {**_ids(slot), "n_keep": slot.n_past, "n_ctx": slot.n_ctx}
        )

    def _advance_prompt(self, slot: Slot, n: int) -> None:
        g = slot.generation
        assert g is not None and slot.task is not None
        tokens = slot.target[slot.n_past : slot.n_past + n]
        is_last = slot.n_todo == n
        wanted = "all" if slot.wants_prompt_logits else "last" if is_last else "none"
        self._deliver()
        self.session.apply(slot.added)
        logits = self._compute(slot, tokens, wanted)
        if slot.in_prompt and slot.n_past + n in slot.places:
            self.session.checkpoint(slot.id, likely=slot.places[slot.n_past + n])
        self._count(1, slot.n_past + n)
        slot.t_served = self._step_number
        if wanted == "all":
            self._prompt_logprobs(g, logits, slot.n_past)
        slot.append(tokens)
        if slot.in_prompt and g.request.report_progress:
            self._send(slot.task, g.progress(slot.n_past))
        if is_last:
            check_finite(logits[-1])
            self._prompt_done(slot, g, logits[-1])

    def _compute(self, slot: Slot, tokens: npt.NDArray[np.int32], wanted: str) -> FloatRows:
        """Compute target tokens, or the image that stands there; return the wanted logits."""
        placed = slot.picture
        if placed is None:
            return self.session.compute(Batch.single(tokens, slot.n_past, slot.id, logits=wanted))
        assert self.projector is not None  # no prompt has images without it
        batch = Batch.single(tokens, slot.n_past, slot.id, logits=wanted)
        return self.session.decode(replace(batch, media=(Placed(0, self.projector.encode(placed.picture)),)))

    def _prompt_logprobs(self, g: Generation, logits: FloatRows, first: int) -> None:
        """Collect the log-probabilities of the tokens after the positions from `first` on."""
        n_top = g.request.sampling.n_probs
        for i, row in enumerate(logits, first + 1):
            if i < len(g.request.prompt):
                check_finite(row)
                g.prompt_logprobs.append(as_info(token_logprobs(row, g.request.prompt[i], n_top)))

    def _prompt_done(self, slot: Slot, g: Generation, logits: npt.NDArray[np.float32]) -> None:
        if slot.in_prompt:
            seconds = g.prompt_done()
            self.counters.prompt(g.n_prompt_computed, seconds)
            self._reuse.store.cost.observe(g.reused.n, g.n_prompt_computed, seconds)
            if g.request.n_predict == 0:
                g.stop_type = "limit"
                self._finish(slot, g)
                return
        slot.state = GENERATION
        self._take(slot, g, logits)

    def _finish(self, slot: Slot, g: Generation) -> None:
        assert slot.task is not None
        self.counters.predicted(g.output.n_total, g.predicted_seconds)
        self.counters.speculation(g.n_drafts, g.n_drafted, g.accepted_by_position)
        ids, timings = _ids(slot), g.timings(slot.n_past)
        self._send(slot.task, g.final(slot.n_past))
        slot.n_past = self.session.truncate(slot.id, slot.n_past)
        self._speculator.finished(slot)
        slot.release()
        self._reuse.finished(slot)
        if all(s.state == IDLE for s in self.slots):
            self._deliver()  # nothing is going to be computed; the log can wait
        log_timings(self._log, ids, timings, truncated=g.truncated)

    def _count_prompt(self, n: int, seconds: float) -> None:
        self.counters.prompt(n, seconds)
        self._count(1, n)

    def _count(self, n_busy: int, n_tokens: int) -> None:
        """Count a micro-batch of this many slots, after which one of them holds this many tokens."""
        c = self.counters
        c.n_decode += 1
        c.n_busy_slots += n_busy
        c.n_tokens_max = max(c.n_tokens_max, n_tokens)

    # --- failures ---------------------------------------------------------------------------------------------------
    def _guarded(self, slot: Slot, work: Callable[[*Arguments], None], *args: *Arguments) -> None:
        """Run the work of one slot; a failure ends only its request."""
        try:
            work(*args)
        except StageLostError:
            raise
        except Exception as e:
            self._fail(slot, e)

    def _fail(self, slot: Slot, error: Exception) -> None:
        """End a request with an error and drop the cache of its slot, which may be wrong."""
        failure = failure_of(error)
        task, slot.n_past = slot.task, 0
        self.session.truncate(slot.id, 0)
        self._log("ERR", "update_slots", failure.message, _ids(slot))
        slot.release()
        if task is not None:
            self._send(task, failure)

    # --- slot actions -----------------------------------------------------------------------------------------------
    def _act(self, action: Action) -> None:
        """Carry out an action on an idle slot."""
        slot = self.slots[action.id_slot]
        self._deliver()
        if not action.future.set_running_or_notify_cancel():
            return
        try:
            action.future.set_result(self._perform(slot, action))
        except Exception as e:
            action.future.set_exception(e if isinstance(e, EngineError) else engine_error(e))

    def _perform(self, slot: Slot, action: Action) -> SlotActionResult:
        start = time.perf_counter()
        n_bytes = 0
        if action.path is None:
            n_tokens, slot.n_past = slot.n_past, 0
        elif action.action == "save":
            n_tokens = slot.n_past
            n_bytes = slot_file.save(self.session, slot.id, slot.cached, action.path, slot.added)
        else:
            added = self.added
            tokens, saved, n_bytes = slot_file.load(self.session, action.path, slot.n_ctx, added)
            n_tokens = self.session.sequences.load(slot.id, saved)
            slot.adopt(tokens[:n_tokens])
            slot.added = added
        self.session.truncate(slot.id, slot.n_past)
        ms = 1e3 * (time.perf_counter() - start)
        self._log("INFO", f"slot_{action.action}", "slot action done",
                  {"id_slot": slot.id, "n_tokens": n_tokens, "n_bytes": n_bytes, "ms": round(ms, 2)})  # fmt: skip
        return SlotActionResult(slot.id, n_tokens, n_bytes, ms)


def _next_tokens(slots: Sequence[Slot]) -> tuple[list[int], list[int], list[int]]:
    """Return tokens, positions and sequences."""
    return [s.last for s in slots], [s.n_past for s in slots], [s.id for s in slots]


def _batch(slots: Sequence[Slot]) -> Batch:
    """Return a batch with the last token of every slot and its draft; all logits are wanted."""
    tokens: list[int] = []
    pos: list[int] = []
    seq: list[int] = []
    for s in slots:
        tokens += (s.last, *s.draft)
        n = 1 + len(s.draft)
        pos += range(s.n_past, s.n_past + n)
        seq += [s.id] * n
    n = len(tokens)
    return Batch(np.array(tokens, np.int32), np.array(pos, np.int32), np.array(seq, np.int32), np.ones(n, np.bool_))


def _ids(slot: Slot) -> dict[str, object]:
    return {"id_slot": slot.id, "id_task": slot.id_task}
