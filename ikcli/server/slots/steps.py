"""Compute the tokens of slots: a step of those that generate, a piece of a prompt, and what follows from their logits.

A request that fails takes no other with it: results of a slot depend on no other slot, and after an exception in a
micro-batch of several slots each of them is tried alone.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVarTuple

import numpy as np
import numpy.typing as npt

from ikcli.engine.pipeline.driver import StageLostError
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.media import Placed
from ikcli.engine.run.session import Session
from ikcli.sampling.sampler import token_logprobs
from ikcli.server.slots.embeddings import EmbeddingTask
from ikcli.server.slots.failures import check_finite, failure_of
from ikcli.server.slots.generation import Generation, as_info
from ikcli.server.slots.log import Logger, log_timings
from ikcli.server.slots.messages import Event
from ikcli.server.slots.projector import ServedProjector
from ikcli.server.slots.reuse import Reuse
from ikcli.server.slots.slot import GENERATION, IDLE, Slot, Task
from ikcli.server.slots.speculative import Speculator
from ikcli.server.slots.states import Counters, ModelInfo, model_info

FloatRows = npt.NDArray[np.float32]
Arguments = TypeVarTuple("Arguments")
_STEPS_WITHOUT = 1000  # drafts, after one failed


class Steps:
    """Slots of a session and the work on their tokens; see the module. `worker.py` says whose turn it is."""

    def __init__(self, session: Session, log: Logger) -> None:
        self.session, self._log = session, log
        self.tokenizer = session.tokenizer
        n_ctx = min(session.longest_text, session.model.hp.n_ctx_train)
        self.slots = [Slot(i, n_ctx) for i in range(session.n_seq_max)]
        self.model: ModelInfo = model_info(session, n_ctx)
        self.projector: ServedProjector | None = None
        self.counters = Counters()
        self._outbox: list[tuple[Task | EmbeddingTask, Event]] = []
        self._awake = threading.Event()
        self._step_number = 0
        self._reuse = Reuse(session, self.slots, log)
        self._speculator = Speculator(session, log)

    # --- events -----------------------------------------------------------------------------------------------------
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

    # --- tokens -----------------------------------------------------------------------------------------------------
    def _generate(self, slots: Sequence[Slot]) -> None:
        """Compute a token of each of these slots, which use the same additions."""
        full = [s for s in slots if s.n_past >= s.n_ctx]
        for s in full:
            self._shift(s)
        ready = [s for s in slots if s not in full] if full else slots
        if not ready:
            return
        speculator = self._speculator
        drafted: Sequence[Slot] = ()
        if speculator.rest:
            speculator.rest -= 1
            speculator.measures = speculator.rest & 7 == 1  # now and then, so that its pace is known
        else:
            drafted = self._propose(ready)
        self.session.apply(ready[0].added)
        start = time.perf_counter()
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
        seconds = time.perf_counter() - start
        n_rows = len(logits)
        generations = [s.generation for s in drafted if s.generation]
        before = sum(g.n_accepted for g in generations) if generations else 0
        sums = np.add.reduce(logits, axis=1).tolist()
        at = 0
        for s in ready:
            n = 1 + len(s.draft)
            self._guarded(s, self._advance, s, logits, sums, at)
            at += n
        for s in drafted:
            s.draft = ()
        if speculator.measures:
            n_right = sum(g.n_accepted for g in generations) - before
            speculator.checked(len(ready), n_rows, seconds, len(ready) + n_right)

    def _propose(self, slots: Sequence[Slot]) -> Sequence[Slot]:
        """Draft for slots; return those that have a draft. Where drafting fails, answers go on without."""
        try:
            return self._speculator.propose(slots)
        except StageLostError:
            raise
        except Exception as e:
            self._log("ERR", "speculation", f"drafting failed; {_STEPS_WITHOUT} steps go on without: {e}",
                      {"error": type(e).__name__})  # fmt: skip
            self._speculator.rest = _STEPS_WITHOUT
            for slot in slots:
                slot.draft = ()
            return ()

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
        n_right = 0
        for i, guess in enumerate((*draft, -1)):
            if not math.isfinite(sums[at + i]):
                check_finite(logits[at + i])
            if not self._take(slot, g, logits[at + i]):
                return
            if guess != slot.last:
                break
            n_right += 1
            g.n_accepted += 1
            g.accepted_by_position[i] += 1
            slot.push(slot.last)
        if draft:
            self._speculator.judged(slot, n_right)
            start = time.perf_counter()
            slot.repairs = not self._roll_back(slot)
            if n_right < len(draft) and not slot.repairs:
                self._speculator.repaired(time.perf_counter() - start)

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
            "INFO", "update_slots", "slot context shift", {**ids_of(slot), "n_keep": slot.n_past, "n_ctx": slot.n_ctx}
        )

    # --- prompts ----------------------------------------------------------------------------------------------------
    def _advance_prompt(self, slot: Slot, n: int) -> None:
        g = slot.generation
        assert g is not None and slot.task is not None
        tokens = slot.target[slot.n_past : slot.n_past + n]
        is_last = slot.n_todo == n
        wanted = "all" if slot.wants_prompt_logits else "last" if is_last else "none"
        self._deliver()
        self.session.apply(slot.added)
        start = time.perf_counter()
        logits = self._compute(slot, tokens, wanted)
        if slot.repairs:
            self._speculator.repaired(time.perf_counter() - start, 1)
            slot.repairs = False
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
        if slot.in_prompt:
            self._speculator.begins(slot)
        self._take(slot, g, logits)

    def _finish(self, slot: Slot, g: Generation) -> None:
        assert slot.task is not None
        self.counters.predicted(g.output.n_total, g.predicted_seconds)
        self.counters.speculation(g.n_drafts, g.n_drafted, g.accepted_by_position)
        ids, timings = ids_of(slot), g.timings(slot.n_past)
        drafts = self._speculator.summary(slot) if self._speculator else {}
        self._send(slot.task, g.final(slot.n_past))
        slot.n_past = self.session.truncate(slot.id, slot.n_past)
        self._speculator.finished(slot)
        slot.release()
        self._reuse.finished(slot)
        if all(s.state == IDLE for s in self.slots):
            self._deliver()  # nothing is going to be computed; the log can wait
        log_timings(self._log, ids, timings, truncated=g.truncated, **drafts)

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
        self._log("ERR", "update_slots", failure.message, ids_of(slot))
        slot.release()
        if task is not None:
            self._send(task, failure)


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


def ids_of(slot: Slot) -> dict[str, object]:
    """Return the fields of a log line that name a slot and its request."""
    return {"id_slot": slot.id, "id_task": slot.id_task}
