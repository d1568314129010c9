"""The engine's thread for a pipeline-parallel model: it keeps enough micro-batches in flight to keep all stages busy.

Generating slots are divided into as many groups as there are stages. While the token of one group is chosen, the others
are computed. Pieces of prompts follow one another without waiting. Everything goes along one chain, so changes of a
sequence (rollback, saving, other adapters) take effect after what was submitted before; only the tokens of slots in
flight are not known yet. If a stage is lost, the model is loaded again and every slot computes its text again from the
beginning; clients notice a pause.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ikcli.engine.pipeline.driver import PipelineRunner, StageLostError
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.session import Session
from ikcli.errors import IkError
from ikcli.server.slots.failures import check_finite
from ikcli.server.slots.log import Logger
from ikcli.server.slots.scheduler import Piece, prompt_pieces
from ikcli.server.slots.slot import GENERATION, IDLE, PROMPT, Slot, Task
from ikcli.server.slots.worker import Worker

FloatRows = npt.NDArray[np.float32]
_TRIES = 3  # attempts to load the model again


@dataclass(slots=True)
class _MicroBatch:
    """A micro-batch in flight: its requests, and the function that handles its logits."""

    tasks: Sequence[tuple[Slot, Task]]
    collected: Callable[[FloatRows], None]


def worker_of(session: Session, log: Logger) -> Worker:
    """Return a worker that suits the session."""
    return PipelineWorker(session, log) if isinstance(session.runner, PipelineRunner) else Worker(session, log)


class PipelineWorker(Worker):
    """Serve requests with a pipeline of stages; see the module."""

    def __init__(self, session: Session, log: Logger) -> None:
        super().__init__(session, log)
        self._in_flight: deque[_MicroBatch] = deque()
        self._waiting: set[int] = set()  # slots whose next token is in flight
        self._prompt_next = False

    def run(self) -> None:
        """Serve until stopped, even if stages are lost."""
        while True:
            try:
                super().run()
                return
            except StageLostError as error:
                self._recover(error)

    def step(self) -> None:
        """Submit what is ready, then collect the oldest micro-batch.

        With drafts, which are made from tokens, one micro-batch is in flight at a time.
        """
        if self._speculator:
            super().step()
            return
        self._step_number += 1
        while self.session.n_in_flight < self.session.runner.depth and self._submit_one():
            pass
        if self._in_flight:
            self._collect()

    # --- submit -----------------------------------------------------------------------------------------------------
    def _submit_one(self) -> bool:
        """Submit a group of generating slots or a piece of a prompt; return False if there is neither.

        It alternates between the two if there are both.
        """
        generating = [s for s in self.slots if s.state == GENERATION]
        ready = [s for s in generating if s.id not in self._waiting]
        prompts_wait = bool(generating) and not self.config.cont_batching
        waiting = [
            s
            for s in self.slots
            if s.state == PROMPT and s.id not in self._waiting and not (s.in_prompt and prompts_wait)
        ]
        pieces = prompt_pieces(waiting, self.session.n_ubatch)
        if pieces and (self._prompt_next or not ready):
            self._prompt_next = False
            self._guarded(pieces[0].slot, self._submit_piece, pieces[0])
            return True
        if not ready:
            return False
        self._prompt_next = True
        full = [s for s in ready if s.n_past >= s.n_ctx]
        for s in full:
            self._shift(s)
        alike = [s for s in ready if s not in full and s.added == ready[-1].added]
        n_stages = self.session.runner.depth - 1
        if alike:
            self._submit_tokens(alike[: -(-len(generating) // n_stages)])
        return True

    def _submit_tokens(self, slots: Sequence[Slot]) -> None:
        """Submit the next token of each slot."""
        self._deliver()
        try:
            self.session.apply(slots[0].added)
            self.session.submit_each([s.last for s in slots], [s.n_past for s in slots], [s.id for s in slots])
        except StageLostError:
            raise
        except IkError as error:
            for s in slots:
                self._fail(s, error)
            return
        tasks = self._note(slots)

        def collected(logits: FloatRows) -> None:
            self._count(len(tasks), max(s.n_past + 1 for s, _ in tasks))
            sums = np.add.reduce(logits, axis=1).tolist()
            for i, (s, task) in enumerate(tasks):
                if s.task is task:
                    self._waiting.discard(s.id)
                    self._guarded(s, self._advance, s, logits, sums, i)

        self._in_flight.append(_MicroBatch(tasks, collected))

    def _note(self, slots: Sequence[Slot]) -> list[tuple[Slot, Task]]:
        tasks = [(s, s.task) for s in slots if s.task is not None]
        self._waiting.update(s.id for s, _ in tasks)
        return tasks

    def _submit_piece(self, piece: Piece[Slot]) -> None:
        """Submit a piece of a prompt.

        Its tokens count as cached from now on: the next piece may follow at once.
        """
        slot, n = piece.slot, piece.n_tokens
        g, task = slot.generation, slot.task
        assert g is not None and task is not None
        first = slot.n_past
        tokens = slot.target[first : first + n]
        is_last, in_prompt = slot.n_todo == n, slot.in_prompt
        wanted = "all" if slot.wants_prompt_logits else "last" if is_last else "none"
        self._deliver()
        self.session.apply(slot.added)
        self.session.submit(Batch.single(tokens, first, slot.id, logits=wanted))
        slot.append(tokens)
        slot.t_served = self._step_number
        if is_last:
            self._waiting.add(slot.id)

        def collected(logits: FloatRows) -> None:
            self._count(1, first + n)
            if slot.task is not task:
                return
            if is_last:
                self._waiting.discard(slot.id)
            self._guarded(slot, arrive, logits)

        def arrive(logits: FloatRows) -> None:
            if wanted == "all":
                self._prompt_logprobs(g, logits, first)
            if in_prompt and g.request.report_progress:
                self._send(task, g.progress(first + n))
            if is_last:
                check_finite(logits[-1])
                self._prompt_done(slot, g, logits[-1])

        self._in_flight.append(_MicroBatch([(slot, task)], collected))
        if in_prompt and slot.n_past in slot.places:
            self.session.checkpoint(slot.id, likely=slot.places[slot.n_past])

    # --- collect ----------------------------------------------------------------------------------------------------
    def _collect(self) -> None:
        """Collect the logits of the oldest micro-batch; drop those of requests that have ended."""
        oldest = self._in_flight.popleft()
        try:
            logits = self.session.collect()
        except StageLostError:
            raise
        except IkError as error:
            for s, task in oldest.tasks:
                if s.task is task:
                    self._fail(s, error)
            return
        oldest.collected(logits)

    def _fail(self, slot: Slot, error: Exception) -> None:
        self._waiting.discard(slot.id)
        super()._fail(slot, error)

    def _begin(self, slot: Slot, task: Task) -> None:
        self._waiting.discard(slot.id)  # of a request that was cancelled
        super()._begin(slot, task)

    # --- a lost stage -----------------------------------------------------------------------------------------------
    def _recover(self, error: StageLostError) -> None:
        """Load the model again; raise IkError if that fails."""
        self._in_flight.clear()
        self._waiting.clear()
        for tried in range(_TRIES):
            self._log("ERR", "update_slots", f"{error}; the model is loaded again", {"try": tried + 1})
            try:
                self.session.restart()
                break
            except IkError as again:
                error = StageLostError(str(again))
        else:
            self._stopping = "now"
            self._close()
            raise IkError(str(error))
        for slot in self.slots:
            if slot.state == IDLE:
                slot.n_past = 0
            elif slot.state == GENERATION:
                slot.repeat_from(0, slot.text_tokens())
            elif slot.state == PROMPT:
                slot.n_past = 0
                if slot.in_prompt and slot.generation is not None:
                    slot.generation.prompt_logprobs.clear()
        self._log("INFO", "update_slots", "the stages are there again; slots compute their text again", {})
