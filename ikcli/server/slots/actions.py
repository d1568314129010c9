"""Save, restore and erase slots."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from ikcli.engine.run.adapters import Added
from ikcli.engine.run.session import Session
from ikcli.server.slots import slot_file
from ikcli.server.slots.slot import Slot
from ikcli.server.slots.states import SlotActionResult


@dataclass(slots=True, eq=False)
class Action:
    """Save, restore or erase a slot."""

    id_slot: int
    action: str
    path: Path | None
    future: Future[SlotActionResult]

    def perform(self, session: Session, slot: Slot, added: Added) -> SlotActionResult:
        """Carry it out; `added`: the additions with which a restored slot must have been computed."""
        start = time.perf_counter()
        n_bytes = 0
        if self.path is None:
            n_tokens, slot.n_past = slot.n_past, 0
        elif self.action == "save":
            n_tokens = slot.n_past
            n_bytes = slot_file.save(session, slot.id, slot.cached, self.path, slot.added)
        else:
            tokens, saved, n_bytes = slot_file.load(session, self.path, slot.n_ctx, added)
            n_tokens = session.sequences.load(slot.id, saved)
            slot.adopt(tokens[:n_tokens])
            slot.added = added
        session.truncate(slot.id, slot.n_past)
        return SlotActionResult(slot.id, n_tokens, n_bytes, 1e3 * (time.perf_counter() - start))
