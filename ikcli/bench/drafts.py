"""Generate tokens greedily with drafts of a fixed length, as `ik serve` does for one slot, to time it in `ik bench`.

The text goes on from the random tokens of the test, or from one random token. So drafts are right as often as for a
text that the model itself has written.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ikcli.drafting.drafters import Drafter, Wanted, open_drafter
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.session import Session
from ikcli.measure.protocol import SessionLike, TokenIds
from ikcli.settings.drafts import limits, stages
from ikcli.settings.records import SpecStage


class Drafting:
    """The drafters of a session with one sequence, and what became of their drafts."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._n_drafted = self._n_accepted = 0
        self._drafters: list[tuple[SpecStage, Drafter]] = []
        try:
            for stage in stages(session.config):
                self._drafters.append((stage, open_drafter(stage, session)))
        except BaseException:
            self.close()
            raise

    def take_counts(self) -> tuple[int, int]:
        """Return the drafted and the accepted tokens since the last call."""
        counts = self._n_drafted, self._n_accepted
        self._n_drafted = self._n_accepted = 0
        return counts

    def generate(self, on: SessionLike, text: TokenIds, n: int, rng: np.random.Generator) -> None:
        """Compute n tokens after those of the text, which are in the cache; the first one is random."""
        assert on is self._session
        session, n_past, end = self._session, len(text), len(text) + n
        tokens = np.zeros(end + 1, np.int32)  # those in the cache, and the one after them
        tokens[:n_past], tokens[n_past] = text, rng.integers(0, session.n_vocab)
        history = tokens[: n_past + 1].tolist()
        owner = object()
        while n_past < end:
            draft = self._draft(tokens[: n_past + 1], history, owner, end - n_past - 1)
            if draft:
                session.sequences.checkpoint(0, passing=True)
                logits = session.step(Batch.single([history[-1], *draft], n_past, logits="all"))
            else:
                logits = session.step_each([history[-1]], [n_past], [0])
            best = logits.argmax(axis=1).tolist()
            n_right = next((i for i, guess in enumerate(draft) if guess != best[i]), len(draft))
            new = best[: n_right + 1]
            tokens[n_past + 1 : n_past + 1 + len(new)] = new
            history += new
            n_past += len(new)
            self._n_drafted += len(draft)
            self._n_accepted += n_right
            if n_right < len(draft):
                kept = session.truncate(0, n_past)
                if kept < n_past:
                    session.decode(Batch.single(tokens[kept:n_past], kept, logits="none"))
        for _, drafter in self._drafters:
            drafter.finished(0, owner)

    def _draft(self, text: TokenIds, history: Sequence[int], owner: object, room: int) -> list[int]:
        """Return the draft of the first drafter that has one, of at most `room` tokens."""
        config = self._session.config.server
        for stage, drafter in self._drafters:
            allowed = limits(stage, config)
            n_max = min(allowed.n_max, room, self._session.n_exact - 1)
            if n_max > 0:
                wanted = Wanted(0, owner, history, text, n_max, allowed.p_min)
                drafter.draft(drafter.prepare([wanted]))
                if len(wanted.found) >= allowed.least(n_max):
                    return wanted.found[:n_max]
        return []

    def close(self) -> None:
        """Release draft models."""
        for _, drafter in self._drafters:
            drafter.close()
