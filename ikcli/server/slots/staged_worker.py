"""The engine's thread for a model in stages: as many micro-batches under way as keep all stages busy.

Generating slots are divided into as many groups as there are stages, and while one group's token is taken the others
are computed; pieces of prompts follow one another without waiting. Everything goes along one chain, so what is done to
a sequence (going back, saving, other adapters) comes after what was launched before, and only the tokens of
a slot that is under way are not known yet. If a stage is lost, the model is loaded again and every slot computes its
text again from the beginning; requests notice a pause.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ikcli.engine.pipeline.driver import StagedRunner, StageLostError
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.session import Session
from ikcli.errors import IkError
from ikcli.server.slots.failures import check_finite
from ikcli.server.slots.log import Logger
from ikcli.server.slots.scheduler import Piece, prompt_pieces
from ikcli.server.slots.slot import GENERATION, IDLE, PROMPT, Slot, Task
from ikcli.server.slots.worker import Worker

FloatRows = npt.NDArray[np.float32]
_TRIES = 3  # to load the model again


@dataclass(slots=True)
class _Flight:
    """A micro-batch under way: of which requests, and what is done with its logits."""

    tasks: Sequence[tuple[Slot, Task]]
    land: Callable[[FloatRows], None]


def worker_of(session: Session, log: Logger) -> Worker:
    """The one that fits the session."""
    return StagedWorker(session, log) if isinstance(session.runner, StagedRunner) else Worker(session, log)


class StagedWorker(Worker):
    """See the module."""

    def __init__(self, session: Session, log: Logger) -> None:
        super().__init__(session, log)
        self._flights: deque[_Flight] = deque()
        self._waiting: set[int] = set()  # slots whose next token is under way
        self._prompt_next = False

    def run(self) -> None:
        """Serve until stopped, whatever is lost."""
        while True:
            try:
                super().run()
                return
            except StageLostError as error:
                self._recover(error)

    def step(self) -> None:
        """Launch what can be, then take what lands first. With drafts, which are made from tokens, one at a time."""
        if self._speculator:
            super().step()
            return
        self._step_number += 1
        while self.session.under_way < self.session.runner.depth and self._launch_one():
            pass
        if self._flights:
            self._land()

    # --- launching --------------------------------------------------------------------------------------------------
    def _launch_one(self) -> bool:
        """A group of generating slots or a piece of a prompt, in turn where there are both; False if there is none."""
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
            self._guarded(pieces[0].slot, self._launch_piece, pieces[0])
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
            self._launch_tokens(alike[: -(-len(generating) // n_stages)])
        return True

    def _launch_tokens(self, slots: Sequence[Slot]) -> None:
        """The next token of each."""
        self._deliver()
        try:
            self.session.apply(slots[0].added)
            self.session.launch_each([s.last for s in slots], [s.n_past for s in slots], [s.id for s in slots])
        except StageLostError:
            raise
        except IkError as error:
            for s in slots:
                self._fail(s, error)
            return
        tasks = self._note(slots)

        def land(logits: FloatRows) -> None:
            self._count(len(tasks), max(s.n_past + 1 for s, _ in tasks))
            sums = np.add.reduce(logits, axis=1).tolist()
            for i, (s, task) in enumerate(tasks):
                if s.task is task:
                    self._waiting.discard(s.id)
                    self._guarded(s, self._advance, s, logits, sums, i)

        self._flights.append(_Flight(tasks, land))

    def _note(self, slots: Sequence[Slot]) -> list[tuple[Slot, Task]]:
        tasks = [(s, s.task) for s in slots if s.task is not None]
        self._waiting.update(s.id for s, _ in tasks)
        return tasks

    def _launch_piece(self, piece: Piece[Slot]) -> None:
        """A piece of a prompt. Its tokens count as cached from here on: the next piece may follow at once."""
        slot, n = piece.slot, piece.n_tokens
        g, task = slot.generation, slot.task
        assert g is not None and task is not None
        first = slot.n_past
        tokens = slot.goal[first : first + n]
        is_last, in_prompt = slot.n_todo == n, slot.in_prompt
        wanted = "all" if slot.wants_prompt_logits else "last" if is_last else "none"
        self._deliver()
        self.session.apply(slot.added)
        self.session.launch(Batch.single(tokens, first, slot.id, logits=wanted))
        slot.append(tokens)
        slot.t_served = self._step_number
        if is_last:
            self._waiting.add(slot.id)

        def land(logits: FloatRows) -> None:
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

        self._flights.append(_Flight([(slot, task)], land))
        if in_prompt and slot.n_past in slot.places:
            self.session.checkpoint(slot.id, likely=slot.places[slot.n_past])

    # --- landing ----------------------------------------------------------------------------------------------------
    def _land(self) -> None:
        """Take the logits of the oldest micro-batch; those of requests that are gone are dropped."""
        flight = self._flights.popleft()
        try:
            logits = self.session.land()
        except StageLostError:
            raise
        except IkError as error:
            for s, task in flight.tasks:
                if s.task is task:
                    self._fail(s, error)
            return
        flight.land(logits)

    def _fail(self, slot: Slot, error: Exception) -> None:
        self._waiting.discard(slot.id)
        super()._fail(slot, error)

    def _begin(self, slot: Slot, task: Task) -> None:
        self._waiting.discard(slot.id)  # of a request that was cancelled
        super()._begin(slot, task)

    # --- a lost stage -----------------------------------------------------------------------------------------------
    def _recover(self, error: StageLostError) -> None:
        """Load the model again; IkError if that cannot be done."""
        self._flights.clear()
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
