"""Reuse computed tokens: those that slots hold, and those of the prompt cache in RAM and on disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

from ikcli.engine.run.adapters import Added
from ikcli.engine.run.session import Session
from ikcli.errors import UsageError
from ikcli.hostinfo import available_memory
from ikcli.server.prefix.disk import Disk
from ikcli.server.prefix.explain import TextOf, excerpt, find_miss, tree_lines
from ikcli.server.prefix.keys import Tokens, common_prefix, default_limit
from ikcli.server.prefix.rest import AS_CACHED
from ikcli.server.prefix.reused import Reused
from ikcli.server.prefix.store import PrefixStore
from ikcli.server.slots import slot_file
from ikcli.server.slots.log import Logger
from ikcli.server.slots.slot import IDLE, Slot

KEEP_AT_LEAST = 16  # tokens worth keeping when another prompt takes their place, or fetching again
_ON_DISK = 32  # tokens worth a file
_PATIENCE = 0.1  # seconds that a question waits for the engine to finish what it does with the cache
_QUIET = 20.0  # seconds after which an idle conversation is written


class Reuse:
    """Keeps and restores sequence states; see the module. Only the engine's thread uses it, except for `held`."""

    def __init__(self, session: Session, slots: Sequence[Slot], log: Logger, quiet: float = _QUIET) -> None:
        config = session.config.server
        self._session, self._slots, self._quiet = session, slots, quiet
        limit = default_limit(config.cache_ram, available_memory())
        self.store = PrefixStore(session.sequences, limit, rest=config.cache_rest)
        if config.cache_rest != AS_CACHED and not self.store.rest.packs:
            why = "the cache has no f16 rows of a multiple of 32 elements"
            log("WARN", "init", f"--cache-rest {config.cache_rest} changes nothing: {why}", {})
        if config.cache_disk is not None:
            if not self.store.limit:
                raise UsageError("--cache-disk keeps rows in RAM until they are written; set -cram above 0")
            about = slot_file.about(session) | self.store.rest.about
            self.store.attach(Disk(config.cache_disk, config.cache_disk_bytes, limit // 4, about, self.store.rest, log))
        self._changing = threading.Lock()  # of the store, by the engine's thread
        self._due: dict[int, float] = {}  # when the cache of a slot is written, by slot number

    def replace(self, slot: Slot, n: int) -> int:
        """Keep the content that the slot is about to lose, all except its first n tokens."""
        if slot.n_past - n < KEEP_AT_LEAST:
            return n
        with self._changing:
            self.store.keep(slot.id, slot.cached, slot.added)
        self._due.pop(slot.id, None)
        return n

    def fetch(self, slot: Slot, prompt: Tokens, added: Added) -> Reused:
        """Give the slot as much of the prompt as is stored anywhere; return where those tokens came from.

        The last token of a prompt is always computed, for its logits.
        """
        most = len(prompt) - 1
        wanted, sequences = prompt[:most], self._session.sequences
        same = {s.id: common_prefix(s.cached, wanted) if s.added == added else 0 for s in self._slots}
        shared = {s.id: sequences.reach(s.id, same[s.id]) if same[s.id] else 0 for s in self._slots}
        n = shared[slot.id]
        self.replace(slot, n)
        donor = max(self._slots, key=lambda s: shared[s.id])
        n_donor = shared[donor.id]
        match = self.store.find(wanted, added)
        miss = find_miss(prompt, most, match, [(s.cached, same[s.id]) for s in self._slots])
        if match.n > max(n + KEEP_AT_LEAST, n_donor):
            own = n
            with self._changing:
                n, n_disk = self.store.load(slot.id, match, own)
            slot.adopt(wanted[:n])
            return Reused(min(own, n), max(n - own - n_disk, 0), n_disk, miss)
        if n_donor > n + KEEP_AT_LEAST:
            n = sequences.copy(donor.id, slot.id, n, n_donor)
            slot.adopt(wanted[:n])
        return Reused(n, 0, 0, miss)

    def held(self, prompt: Tokens, added: Added) -> Reused | None:
        """Return what `fetch` would find for a slot that holds nothing else; None if the store is in use for too long.

        Any thread may call this. Slots may change meanwhile, so their part is an estimate.
        """
        wanted, sequences = prompt[:-1], self._session.sequences
        in_slots = 0
        for slot in self._slots:
            if slot.added == added and (same := common_prefix(slot.cached, wanted)):
                in_slots = max(in_slots, min(sequences.reach(slot.id, same), same))
        if not self._changing.acquire(timeout=_PATIENCE):
            return None
        try:
            match = self.store.find(wanted, added)
            on_disk = [node for node in match.path if node.rows is None]
            n_disk = sum(max(min(node.end, match.n) - max(node.start, in_slots), 0) for node in on_disk)
        finally:
            self._changing.release()
        return Reused(in_slots, max(match.n - in_slots, 0) - n_disk, n_disk)

    def explain(self, text_of: TextOf) -> Iterator[str]:
        """Yield lines about what slots and the store hold."""
        for slot in self._slots:
            if slot.n_past:
                yield f"slot {slot.id}: {slot.n_past} tokens  {excerpt(text_of, slot.cached)}"
        yield from tree_lines(self.store.tree, text_of)

    # --- on disk ---------------------------------------------------------------------------------------------------
    def finished(self, slot: Slot) -> None:
        """Note that a request of the slot is done; its content is written when it stays unchanged for a while."""
        if self.store.disk is not None and slot.n_past >= _ON_DISK:
            self._due[slot.id] = time.monotonic() + self._quiet

    def write_quiet(self) -> float | None:
        """Write conversations that were idle for a while; return the seconds until there may be more, None: never."""
        if self.store.disk is None:
            return None
        with self._changing:
            return self._write_quiet()

    def _write_quiet(self) -> float | None:
        self.store.save()
        if not self._due:
            return None
        now = time.monotonic()
        for slot in self._slots:
            if slot.state != IDLE or self._due.get(slot.id, now + 1) > now:
                continue
            if slot.n_past >= _ON_DISK:
                self.store.keep(slot.id, slot.cached, slot.added)
            del self._due[slot.id]
        waiting = [due for i, due in self._due.items() if self._slots[i].state == IDLE]
        return max(min(waiting) - now, 0) if waiting else None

    def close(self) -> None:
        """Write the content of all slots, and wait for it."""
        if self.store.disk is None:
            return
        with self._changing:
            for slot in self._slots:
                slot.n_past = self._session.truncate(slot.id, slot.n_past)
                if slot.n_past >= _ON_DISK:
                    self.store.keep(slot.id, slot.cached, slot.added)
            self.store.save(wait=True)
            self.store.disk.close()
