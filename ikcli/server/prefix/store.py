"""Store cached rows of texts whose slot was given away, each once; give them back to any slot.

Rows are copied between the store and the slot. The attention kernels read the cells of a sequence side by side, so a
copy is paid once per request, where a table of blocks would be looked up for every token of every layer.

What leaves first when the limit is reached follows GreedyDual-Size-Frequency: the least time to compute it again, times
uses, per byte, above a clock that advances to the value of what was dropped last. A text that is not used therefore
ages while others come and go, and a prefix that many texts share, or that is slow to compute, stays longer.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ikcli.engine.run.adapters import Added
from ikcli.engine.run.saved_sequence import Checkpoint
from ikcli.engine.run.sequences import Sequences
from ikcli.server.prefix.cost import Cost
from ikcli.server.prefix.keys import Tokens
from ikcli.server.prefix.tree import BLOCK, Node, Rows, Tree, checkpoints_of


@dataclass(frozen=True, slots=True)
class Match:
    """What the store has of a text: `n_same` tokens, of which a slot can take `n`.

    `cover`: a checkpoint whose windows reach further than n, and are cut to it.
    """

    path: Sequence[Node]
    n_same: int
    n: int
    cover: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class _Victim:
    """What can be dropped: the rows of a node, or one of its checkpoints."""

    node: Node
    checkpoint: Checkpoint | None = None

    @property
    def exists(self) -> bool:
        """Return whether it did not go with something else."""
        mine = self.checkpoint is None or any(c is self.checkpoint for c in self.node.checkpoints)
        return mine and self.node.parent is not None


class PrefixStore:
    """Rows of texts, at most `limit` bytes of them; see the module. Only the engine's thread uses it."""

    def __init__(self, sequences: Sequences, limit: int, block: int = BLOCK) -> None:
        """Start empty, with room for `limit` bytes; `block`: most positions of a node."""
        self.limit, self._block = limit, block
        self.cost = Cost()
        self.tree = Tree(sequences.cut)
        self._sequences = sequences
        self._clock, self._turn = 0.0, 0
        self.n_dropped = 0  # positions that left for lack of room

    def __len__(self) -> int:
        """Return the number of texts."""
        return self.tree.n_texts

    @property
    def n_bytes(self) -> int:
        return self.tree.n_bytes

    # --- find and give back -----------------------------------------------------------------------------------------
    def find(self, tokens: Tokens, added: Added) -> Match:
        """Return what is stored of the beginning of a text."""
        path, n_same = self.tree.find(tokens, added)
        kind = self._sequences.kind
        if kind.is_free or not path:
            return Match(path, n_same, n_same)
        n = max((c.n_tokens for c in checkpoints_of(path, n_same)), default=0)
        if not kind.has_states and n < n_same:
            cover = next((c for c in _later(path[-1], n_same) if c.first <= kind.first_needed(n_same)), None)
            if cover is not None:
                return Match(path, n_same, n_same, cover)
        return Match(path, n_same, n)

    def load(self, seq: int, match: Match, first: int) -> int:
        """Give a sequence the matching rows; positions before `first` are equal in it already.

        Return how many positions the sequence then has.
        """
        sequences, n = self._sequences, match.n
        for node in match.path:
            begin, end = max(first, node.start), min(n, node.end)
            if begin < end:
                sequences.write(seq, begin, sequences.cut(node.rows, begin - node.start, end - node.start))
        known = checkpoints_of(match.path, n)
        windows: Rows = ()
        begin = n
        if match.cover is not None:
            begin = match.cover.first
            windows = tuple(part[: n - begin] for part in sequences.window_parts(match.cover))
        self._touch([node for node in match.path if node.start < n])
        return sequences.arrive(seq, n, known, windows, begin)

    # --- take in ----------------------------------------------------------------------------------------------------
    def keep(self, seq: int, tokens: Tokens, added: Added) -> int:
        """Store the cache of a sequence, or its beginning if not all of it fits; return the number of tokens stored."""
        known: Sequence[Checkpoint] = ()
        if not self._sequences.kind.is_free:
            known = self._that_fit(self._sequences.known(seq, len(tokens)))
            tokens = tokens[: known[-1].n_tokens if known else 0]  # rows after the last checkpoint cannot be used
        if not self.limit or not len(tokens):
            return 0
        path, n = self.tree.find(tokens, added)
        if path and path[-1].end > n:
            path[-1] = self.tree.split(path[-1], n - path[-1].start)
        room = _Room(self)
        for node in path:
            node.pins += 1
        while n < len(tokens):
            block = tokens[n : n + self._block]
            rows = self._sequences.read(seq, n, len(block))
            if not room.make(block.nbytes + sum(part.nbytes for part in rows)):
                break
            path.append(self.tree.add(path[-1] if path else self.tree.root(added), block, rows))
            path[-1].pins += 1
            n += len(block)
        self._touch(path)
        self._hang(path, known, room)
        for node in path:
            node.pins -= 1
        if not self._sequences.kind.is_free and path:
            self._prune(path[-1])
        return n

    def _that_fit(self, known: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
        """Return the checkpoints up to the last one that fits together with the rows before it."""
        per_token = sum(a * b for a, b in self._sequences.shapes(1, 1)) + np.dtype(np.int32).itemsize
        n = len(known)
        while n and known[n - 1].n_bytes + known[n - 1].n_tokens * per_token > self.limit:
            n -= 1
        return known[:n]

    def _hang(self, path: Sequence[Node], known: Sequence[Checkpoint], room: _Room) -> None:
        """Hang checkpoints on the nodes of a path, the last ones first, as long as there is room."""
        for checkpoint in reversed(known):
            for node in path:
                if node.start < checkpoint.n_tokens <= node.end:
                    new = all(c.n_tokens != checkpoint.n_tokens for c in node.checkpoints)
                    if new and room.make(checkpoint.n_bytes):
                        self.tree.hang(node, checkpoint)

    def _touch(self, path: Sequence[Node]) -> None:
        self._turn += 1
        for node in path:
            node.uses += 1
            node.turn, node.clock = self._turn, self._clock

    def clear(self) -> None:
        self.tree.clear()

    # --- make room --------------------------------------------------------------------------------------------------
    def victims(self, node: Node) -> Iterator[_Victim]:
        """Yield what can be dropped of a node now."""
        if node.pins or node.parent is None:
            return
        if not self._sequences.kind.is_free:
            yield from (_Victim(node, c) for c in node.checkpoints)
        elif not node.children:
            yield _Victim(node)

    def value(self, victim: _Victim) -> float:
        """Return what something is worth: see the module."""
        node, checkpoint = victim.node, victim.checkpoint
        if checkpoint is None:
            first, n, n_bytes = node.start, len(node.tokens), node.n_bytes
        else:
            before = checkpoints_of(node.path(), checkpoint.n_tokens - 1)
            first = before[-1].n_tokens if before else 0
            n, n_bytes = checkpoint.n_tokens - first, checkpoint.n_bytes
        return node.clock + node.uses * self.cost.seconds(first, n) / max(n_bytes, 1)

    def drop(self, victim: _Victim) -> Node | None:
        """Drop something; return the node above it if that may now be dropped."""
        node, checkpoint = victim.node, victim.checkpoint
        if checkpoint is None:
            parent = node.parent
            self.n_dropped += len(node.tokens)
            self.tree.remove(node)
            return parent
        self.tree.drop_checkpoint(node, checkpoint)
        self._prune(node)
        return None

    def passed(self, value: float) -> None:
        """Advance the clock to the value of what was dropped."""
        self._clock = max(self._clock, value)

    def _prune(self, node: Node | None) -> None:
        """Remove rows that no checkpoint needs, from this node upwards."""
        while node is not None and node.parent is not None and not node.children and not node.pins:
            last = node.checkpoints[-1].n_tokens if node.checkpoints else node.start
            if last == node.end:
                return
            self.n_dropped += node.end - last
            if last > node.start:
                self.tree.trim(node, last - node.start)
                return
            parent = node.parent
            self.tree.remove(node)
            node = parent


class _Room:
    """Makes room in a store; what could be dropped is looked for once, and only if the store is full."""

    def __init__(self, store: PrefixStore) -> None:
        self._store = store
        self._heap: list[tuple[float, int, int, _Victim]] | None = None
        self._n = 0

    def make(self, n_bytes: int) -> bool:
        """Drop the least valuable things until n more bytes fit; return False if that is impossible."""
        store = self._store
        while store.n_bytes + n_bytes > store.limit:
            if self._heap is None:
                self._heap = []
                for node in store.tree.nodes():
                    self._offer(node)
            if not self._heap:
                return False
            value, _, _, victim = heapq.heappop(self._heap)
            if not victim.exists:
                continue
            store.passed(value)
            above = store.drop(victim)
            if above is not None:
                self._offer(above)
        return True

    def _offer(self, node: Node) -> None:
        assert self._heap is not None
        for victim in self._store.victims(node):
            self._n += 1
            heapq.heappush(self._heap, (self._store.value(victim), node.turn, self._n, victim))


def _later(node: Node, n: int) -> Iterator[Checkpoint]:
    """Yield the checkpoints after position n, on this node and below it."""
    for one in node.walk():
        yield from (c for c in one.checkpoints if c.n_tokens > n)
