"""Reuse computed tokens: those that slots hold, prompts cached in RAM, conversations on disk."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ikcli.engine.plan.devices import available_memory
from ikcli.engine.run.adapters import Added
from ikcli.engine.run.session import Session
from ikcli.server.slots.log import Logger
from ikcli.server.slots.prompt_cache import Entry, PromptCache, Tokens, common_prefix, default_limit
from ikcli.server.slots.sessions import Sessions
from ikcli.server.slots.slot import IDLE, Slot

KEEP_AT_LEAST = 16  # tokens worth keeping when another prompt takes their place, or fetching again
_ON_DISK = 32  # tokens worth a file
_QUIET = 20.0  # seconds after which an idle conversation is written


class Reuse:
    """Keeps and restores sequence states; see the module. Only the engine's thread uses it."""

    def __init__(self, session: Session, slots: Sequence[Slot], log: Logger, quiet: float = _QUIET) -> None:
        config = session.config.server
        self._session, self._slots, self._quiet = session, slots, quiet
        self.prompts = PromptCache(default_limit(config.cache_ram, available_memory()))
        self.sessions: Sessions | None = None
        if config.sessions is not None:
            self.sessions = Sessions(session, config.sessions, config.sessions_limit << 20, slots[0].n_ctx, log)
        self._due: dict[int, float] = {}  # when the cache of a slot is written, by slot number

    def replace(self, slot: Slot, n: int) -> int:
        """Keep the content that the slot is about to lose, all except its first n tokens."""
        if slot.n_past - n < KEEP_AT_LEAST:
            return n
        unsaved = self._due.pop(slot.id, None) is not None and slot.n_past >= _ON_DISK
        in_ram = self.prompts.limit and not self.prompts.has(slot.cached, slot.added)
        if in_ram or (unsaved and self.sessions is not None):
            entry = self._entry(slot)
            if in_ram:
                self.prompts.put(entry)
            if unsaved and self.sessions is not None:
                self.sessions.keep(entry)
        return n

    def _entry(self, slot: Slot) -> Entry:
        return Entry(slot.cached.copy(), self._session.sequences.save(slot.id, slot.n_past), slot.added)

    def fetch(self, slot: Slot, prompt: Tokens, added: Added) -> int:
        """Give the slot as much of the prompt as is stored anywhere; return the number of those tokens.

        The last token of a prompt is always computed, for its logits.
        """
        most = len(prompt) - 1
        sequences = self._session.sequences

        def shared(s: Slot) -> int:
            if s.added != added:
                return 0
            return sequences.reach(s.id, min(common_prefix(s.cached, prompt), most))

        n = shared(slot)
        self.replace(slot, n)
        donor = max(self._slots, key=shared)
        n_donor = shared(donor)
        stored = self.prompts.best(prompt[:most], max(n + KEEP_AT_LEAST, n_donor), added)
        n_stored = stored[1] if stored is not None else 0
        if self.sessions is not None:
            on_disk = self.sessions.best(prompt[:most], max(n + _ON_DISK, n_donor, n_stored), added)
            if on_disk is not None:
                saved, tokens, n_disk = on_disk
                n = sequences.load(slot.id, saved, n_disk)
                slot.adopt(tokens[:n])
                return n
        if stored is not None:
            entry, n_stored = stored
            n = sequences.load(slot.id, entry.saved, n_stored)
            slot.adopt(entry.tokens[:n])
        elif n_donor > n + KEEP_AT_LEAST:
            n = sequences.copy(donor.id, slot.id, n, n_donor)
            slot.adopt(donor.cached[:n])
        return n

    # --- sessions on disk -------------------------------------------------------------------------------------------
    def finished(self, slot: Slot) -> None:
        """Note that a request of the slot is done; its content is written when it stays unchanged for a while."""
        if self.sessions is not None and slot.n_past >= _ON_DISK:
            self._due[slot.id] = time.monotonic() + self._quiet

    def write_quiet(self) -> float | None:
        """Write conversations that were idle for a while; return the seconds until there may be more, None: never."""
        if not self._due or self.sessions is None:
            return None
        now = time.monotonic()
        for slot in self._slots:
            if slot.state != IDLE or self._due.get(slot.id, now + 1) > now:
                continue
            known = slot.n_past < _ON_DISK or self.sessions.has(slot.cached, slot.added)
            if known or self.sessions.keep(self._entry(slot)):
                del self._due[slot.id]
            else:
                self._due[slot.id] = now + 1  # the disk is slow
        waiting = [due for i, due in self._due.items() if self._slots[i].state == IDLE]
        return max(min(waiting) - now, 0) if waiting else None

    def close(self) -> None:
        """Write the content of all slots, and wait for it."""
        if self.sessions is None:
            return
        for slot in self._slots:
            slot.n_past = self._session.truncate(slot.id, slot.n_past)
            if slot.n_past >= _ON_DISK and not self.sessions.has(slot.cached, slot.added):
                self.sessions.keep(self._entry(slot), wait=True)
        self.sessions.close()
