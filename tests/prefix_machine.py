"""Random requests, cancellations, slot saves, shifts and evictions over sequences whose rows tell their text."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from sequence_memory import CELLS, STATES, TRANSPOSED, WINDOWS, Shelf, rows_of

from ikcli.engine.run.adapters import NOTHING, Added
from ikcli.engine.run.sequences import Keeping
from ikcli.graph import Per
from ikcli.server.prefix.disk import Disk
from ikcli.server.prefix.store import PrefixStore
from ikcli.server.slots.log import silent
from ikcli.server.slots.reuse import Reuse
from ikcli.server.slots.slot import Slot

KINDS = [(CELLS, TRANSPOSED), (CELLS, WINDOWS), (CELLS, STATES), (CELLS, TRANSPOSED, WINDOWS, STATES)]
N_CTX = 240
OTHER = Added((0.5,))
APART = 50_000


def keys_of(text: tuple[int, ...]) -> npt.NDArray[np.int32]:
    """What the server sees of a text, the same for all additions."""
    return np.array([t % APART for t in text], np.int32)


def text_of(branch: int, n: int) -> tuple[int, ...]:
    """One of 27 texts that share beginnings of 0, 30 and 70 tokens."""
    a, b, c = branch // 9, branch // 3, branch
    return tuple((i, a, b if i >= 30 else 0, c if i >= 70 else 0).__hash__() % 40_000 for i in range(n))


class Prefixes(RuleBasedStateMachine):
    """See the module. Whatever happens, a slot holds the rows of its text, and the store counts every byte."""

    n_slots = 4

    @initialize(kind=st.sampled_from(KINDS), mib=st.sampled_from([0, 1]), disk=st.sampled_from([0, 40_000, 1 << 20]))
    def begin(self, kind: Any, mib: int, disk: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.disk_limit = disk if mib else 0
        self.shelf = Shelf(*kind, n_ctx=N_CTX, n_seq=self.n_slots)
        self.shelf.sequences.keeping = Keeping(most=4, spread=True)
        config = SimpleNamespace(server=SimpleNamespace(cache_ram=mib, cache_disk=None, cache_rest="cache"))
        self.slots = [Slot(i, N_CTX) for i in range(self.n_slots)]
        session: Any = SimpleNamespace(config=config, sequences=self.shelf.sequences)
        self.reuse = Reuse(session, self.slots, silent)
        self.start(mib << 20)
        self.saved: Any = None

    def start(self, limit: int) -> None:
        """An empty store, which finds what is on disk."""
        self.reuse.store = PrefixStore(self.shelf.sequences, limit, block=16)
        if self.disk_limit:
            folder = Path(self.folder.name)
            store = self.reuse.store
            store.attach(Disk(folder, self.disk_limit, 20_000, {"test": 1}, store.rest, silent))

    def end(self) -> None:
        if self.reuse.store.disk is not None:
            self.reuse.store.save(wait=True)
            self.reuse.store.disk.close()

    def teardown(self) -> None:
        if hasattr(self, "reuse"):
            self.end()
            self.folder.cleanup()

    @rule()
    def restart(self) -> None:
        limit = self.reuse.store.limit
        self.end()
        self.start(limit)

    @rule()
    def write(self) -> None:
        self.reuse.store.save(wait=True)

    @rule(which=st.integers(0, 99), how=st.sampled_from(["remove", "cut", "change"]))
    def damage(self, which: int, how: str) -> None:
        files = sorted(Path(self.folder.name).glob("*.rows"))
        if not files:
            return
        self.reuse.store.save(wait=True)
        file = files[which % len(files)]
        if not file.exists():
            return
        data = file.read_bytes()
        if how == "remove":
            file.unlink()
        else:
            file.write_bytes(data[:-5] if how == "cut" else data[:-50] + bytes([data[-50] ^ 1]) + data[-49:])

    @rule(
        i=st.integers(0, 3), branch=st.integers(0, 26), n=st.integers(2, N_CTX - 20), done=st.floats(0, 1),
        every=st.integers(5, 24), more=st.integers(0, 19), added=st.sampled_from([NOTHING, NOTHING, OTHER]),
    )  # fmt: skip
    def request(self, i: int, branch: int, n: int, done: float, every: int, more: int, added: Added) -> None:
        """A prompt, of which a part is computed before it is cancelled, then some generated tokens."""
        slot, prompt = self.slots[i % self.n_slots], text_of(branch, n)
        if added == OTHER:
            prompt = tuple(t + APART for t in prompt)  # rows of the same tokens differ with other additions
        keys = keys_of(prompt)
        before = [(s.id, s.added, s.cached.copy()) for s in self.slots]
        reused = self.reuse.fetch(slot, keys, added)
        held = max((_shared(c, keys) for _, a, c in before if a == added), default=0)
        if self.shelf.sequences.kind.is_free:
            assert reused.n >= min(held, n - 1) - 16
        assert reused.n <= n - 1
        kept = self.shelf.sequences.truncate(slot.id, reused.n)
        slot.n_past, slot.added = kept, added
        self.shelf.holds(slot.id, prompt[:kept])
        end = kept + int(done * (n - kept))
        self.append(slot, prompt[kept:end], every)
        if end == n:
            self.append(slot, tuple(range(prompt[0], prompt[0] + more)), 1)

    def append(self, slot: Slot, tokens: tuple[int, ...], every: int) -> None:
        """Compute tokens in pieces, with checkpoints after those of more than one."""
        for at in range(0, len(tokens), every):
            piece = tokens[at : at + every]
            self.shelf.add(slot.id, piece)
            slot.append(keys_of(piece))
            if every > 1:
                self.shelf.checkpoint(slot.id)

    @rule(i=st.integers(0, 3), keep=st.integers(0, 40), drop=st.integers(1, 60))
    def shift(self, i: int, keep: int, drop: int) -> None:
        slot = self.slots[i % self.n_slots]
        text = self.shelf.texts[slot.id]
        kept = self.shelf.truncate(slot.id, min(keep, len(text)))
        slot.n_past = kept
        rest = text[kept : max(kept, keep)] + text[max(kept, keep) + drop :]
        self.append(slot, rest, 20)

    @rule(i=st.integers(0, 3))
    def save(self, i: int) -> None:
        slot = self.slots[i % self.n_slots]
        self.saved = (
            self.shelf.sequences.save(slot.id, slot.n_past), slot.cached.copy(), slot.added, self.shelf.texts[slot.id],
        )  # fmt: skip

    @rule(i=st.integers(0, 3))
    def restore(self, i: int) -> None:
        if self.saved is None:
            return
        slot, (saved, tokens, added, text) = self.slots[i % self.n_slots], self.saved
        n = self.shelf.sequences.load(slot.id, saved)
        slot.adopt(tokens[:n])
        slot.added = added
        self.shelf.holds(slot.id, text[:n])

    @rule(i=st.integers(0, 3))
    def erase(self, i: int) -> None:
        slot = self.slots[i % self.n_slots]
        self.shelf.truncate(slot.id, 0)
        slot.n_past = 0

    @rule(limit=st.sampled_from([500, 2000, 5000, 12_000, 100_000]))
    def resize(self, limit: int) -> None:
        """Start again with another limit."""
        self.end()
        self.start(limit if self.reuse.store.limit else 0)

    @invariant()
    def the_store_is_right(self) -> None:
        if not hasattr(self, "reuse"):
            return
        store, tree = self.reuse.store, self.reuse.store.tree
        nodes = list(tree.nodes())
        assert store.n_bytes == sum(node.n_bytes for node in nodes) <= max(store.limit, 0)
        assert tree.n_nodes == len(nodes) and len(store) == sum(not node.children for node in nodes)
        assert (store.disk is not None) == bool(self.disk_limit)
        cells = [c for c in self.shelf.arrays.rows if c.per is Per.CELL]
        for added, root in tree.roots.items():
            for node in root.walk():
                if node.parent is None:
                    continue
                assert node.pins == 0 and node.start == node.parent.end and 0 < len(node.tokens) <= 16
                keys = [int(t) for one in node.path() for t in one.tokens]
                text = tuple(t + APART if added == OTHER else t for t in keys)
                if node.rows is None:
                    assert node.file is not None and not node.is_needed
                    continue
                for cache, part in zip(cells, node.rows, strict=True):
                    wanted = rows_of(cache, text)[node.start :]
                    found = part.reshape(2, -1, 4).swapaxes(0, 1).reshape(-1, 8) if cache.transposed else part
                    assert np.array_equal(found, wanted)


def _shared(a: Any, b: Any) -> int:
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


class OneSlot(Prefixes):
    n_slots = 1
