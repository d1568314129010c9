"""Store cached rows of texts whose slot was given away, each once; give them back to any slot.

Rows are copied between the store and the slot. The attention kernels read the cells of a sequence side by side, so a
copy is paid once per request, where a table of blocks would be looked up for every token of every layer.

What leaves first when the limit is reached follows GreedyDual-Size-Frequency: the least time to compute it again, times
uses, per byte, above a clock that advances to the value of what was dropped last. A text that is not used therefore
ages while others come and go, and a prefix that many texts share, or that is slow to compute, stays longer.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ikcli.engine.run.adapters import Added
from ikcli.engine.run.saved_sequence import Checkpoint
from ikcli.engine.run.sequences import Sequences
from ikcli.server.prefix import node_file
from ikcli.server.prefix.cost import Cost
from ikcli.server.prefix.disk import Disk, StoredFile
from ikcli.server.prefix.keys import Tokens
from ikcli.server.prefix.node_file import Content
from ikcli.server.prefix.rest import AS_CACHED, Rest
from ikcli.server.prefix.tree import BLOCK, Node, Rows, Tree, checkpoints_of


@dataclass(frozen=True, slots=True)
class Match:
    """What the store has of a text: `n_same` tokens, of which a slot can take `n`.

    `cover`: a checkpoint whose windows reach further than n, and are cut to it, and its node.
    """

    tokens: Tokens
    added: Added
    path: Sequence[Node]
    n_same: int
    n: int
    cover: tuple[Node, Checkpoint] | None = None

    @property
    def nodes(self) -> list[Node]:
        """Return the nodes whose rows or checkpoints are needed."""
        needed = [node for node in self.path if node.start < self.n]
        return needed if self.cover is None or self.cover[0] in needed else [*needed, self.cover[0]]


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

    def __init__(self, sequences: Sequences, limit: int, block: int = BLOCK, rest: str = AS_CACHED) -> None:
        """Start empty, with room for `limit` bytes; `block`: most positions of a node; `rest`: how rows are stored."""
        self.limit, self._block = limit, block
        self.cost = Cost()
        self.rest = Rest(sequences, rest)
        self.tree = Tree(self.rest.cut)
        self._sequences = sequences
        self._clock, self._turn = 0.0, 0
        self.disk: Disk | None = None
        self._unsaved: deque[tuple[Node, Added]] = deque()
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
            return Match(tokens, added, path, n_same, n_same)
        n = max((c.n_tokens for c in checkpoints_of(path, n_same)), default=0)
        if not kind.has_states and n < n_same:
            later = _later(path[-1], n_same)
            cover = next((one for one in later if one[1].first <= kind.first_needed(n_same)), None)
            if cover is not None:
                return Match(tokens, added, path, n_same, n_same, cover)
        return Match(tokens, added, path, n_same, n)

    def load(self, seq: int, match: Match, first: int) -> tuple[int, int]:
        """Give a sequence the matching rows; positions before `first` are equal in it already.

        Return how many positions the sequence then has, and how many of them came from disk. These are fewer than the
        match says if files turn out to be damaged.
        """
        while match.n > first:
            from_disk = self._copy(seq, match, first)
            if isinstance(from_disk, StoredFile):
                self._lose(from_disk.name)
                match = self.find(match.tokens, match.added)
                continue
            known, windows, n_disk = from_disk
            self._touch(match.nodes)
            begin = match.n if match.cover is None else match.cover[1].first
            n = self._sequences.arrive(seq, match.n, known, windows, begin)
            return n, min(n_disk, n)
        return self._sequences.truncate(seq, first), 0

    def _copy(self, seq: int, match: Match, first: int) -> StoredFile | tuple[list[Checkpoint], Rows, int]:
        """Copy rows; return the checkpoints, the rows of windows, and the positions that came from disk.

        A file that cannot be read is returned instead.
        """
        sequences, n, n_disk = self._sequences, match.n, 0
        windows: Rows = ()
        known: list[Checkpoint] = []
        for node, content in self._contents(match.nodes):
            if content is None:
                assert node.file is not None
                return node.file
            rows, at, checkpoints = content
            begin, end = max(first, node.start), min(n, node.end)
            if begin < end:
                self.rest.write(seq, begin, self.rest.cut(rows, begin - at, end - at))
                n_disk += end - begin if node.rows is None else 0
            known += [self.rest.unpack(c) for c in checkpoints if node.start < c.n_tokens <= min(node.end, n)]
            if match.cover is not None and match.cover[0] is node:
                last = self.rest.unpack(next(c for c in checkpoints if c.n_tokens == match.cover[1].n_tokens))
                windows = tuple(part[: n - last.first] for part in sequences.window_parts(last))
        return known, windows, n_disk

    def _contents(self, nodes: Sequence[Node]) -> Iterator[tuple[Node, tuple[Rows, int, Sequence[Checkpoint]] | None]]:
        """Yield rows, their first position and checkpoints of nodes; None for those whose file cannot be read."""
        on_disk = [node for node in nodes if node.rows is None or any(not c.parts for c in node.checkpoints)]
        files = list(dict.fromkeys(node.file for node in on_disk if node.file is not None))
        contents = zip(files, self.disk.read(files) if self.disk is not None and files else (), strict=True)
        file: StoredFile | None = None
        content: Content | None = None
        for node in nodes:
            if node not in on_disk:
                yield node, (node.rows or (), node.start, node.checkpoints)
                continue
            if node.file is not file:
                file, content = next(contents)
            if content is None:
                yield node, None
                return
            newer = {c.n_tokens: c for c in node.checkpoints if c.parts}
            checkpoints = [newer.get(c.n_tokens, c) for c in content.checkpoints]
            checkpoints += [c for n, c in newer.items() if all(n != other.n_tokens for other in checkpoints)]
            rows, at = (content.rows, content.start) if node.rows is None else (node.rows, node.start)
            yield node, (rows, at, sorted(checkpoints, key=lambda c: c.n_tokens))
        if self.disk is not None:
            self.disk.used(dict.fromkeys(node.file.name for node in nodes if node.file is not None))

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
        here = all(self._fill(seq, node, room) for node in path)
        while here and n < len(tokens):
            block = tokens[n : n + self._block]
            rows = self.rest.read(seq, n, len(block))
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
        if self.disk is not None:
            self._unsaved.extend((node, added) for node in path if node.parent is not None and _is_unsaved(node))
            self.save()
        return n

    def _fill(self, seq: int, node: Node, room: _Room) -> bool:
        """Read the rows of a node that is only on disk; return False if they do not fit."""
        if node.rows is not None:
            return True
        rows = self.rest.read(seq, node.start, len(node.tokens))
        if not room.make(node.tokens.nbytes + sum(part.nbytes for part in rows)):
            return False
        self.tree.fill(node, rows)
        return True

    def _that_fit(self, known: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
        """Return the checkpoints up to the last one that fits together with the rows before it."""
        per_token = sum(a * b for a, b in self.rest.shapes(1)) + np.dtype(np.int32).itemsize
        n = len(known)
        while n and known[n - 1].n_bytes + known[n - 1].n_tokens * per_token > self.limit:
            n -= 1
        return known[:n]

    def _hang(self, path: Sequence[Node], known: Sequence[Checkpoint], room: _Room) -> None:
        """Hang checkpoints on the nodes of a path, the last ones first, as long as there is room."""
        for checkpoint in reversed(known):
            for node in path:
                if node.start < checkpoint.n_tokens <= node.end and node.rows is not None:
                    new = all(c.n_tokens != checkpoint.n_tokens for c in node.checkpoints if c.parts)
                    if new and room.make((packed := self.rest.pack(checkpoint)).n_bytes):
                        self.tree.hang(node, packed)

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
        if node.pins or node.parent is None or node.rows is None or node.is_written_now:
            return
        if not self._sequences.kind.is_free:
            yield from (_Victim(node, c) for c in node.checkpoints if c.parts)
        elif not node.is_needed:
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
            self._leave(node)
            return parent
        self.tree.drop_checkpoint(node, checkpoint)
        self._prune(node)
        return None

    def passed(self, value: float) -> None:
        """Advance the clock to the value of what was dropped."""
        self._clock = max(self._clock, value)

    def _prune(self, node: Node | None) -> None:
        """Remove rows that no checkpoint needs, from this node upwards."""
        while node is not None and node.parent is not None and not (node.is_needed or node.pins or node.is_written_now):
            last = max((c.n_tokens for c in node.checkpoints if c.parts), default=node.start)
            if last == node.end or (last > node.start and (node.file is not None or node.children)):
                return
            if last > node.start:
                self.n_dropped += node.end - last
                self.tree.trim(node, last - node.start)
                return
            parent = node.parent
            self._leave(node)
            node = parent

    def _leave(self, node: Node) -> None:
        """Drop the rows of a node, all of which are on disk or lost."""
        if node.rows is None:
            return
        if node.file is not None:
            self.tree.unload(node)
            return
        self.n_dropped += len(node.tokens)
        self._cut_off(node)

    def _cut_off(self, node: Node) -> None:
        """Remove a node and all below it."""
        for one in reversed(list(node.walk())):
            self.tree.remove(one)

    # --- disk -------------------------------------------------------------------------------------------------------
    def attach(self, disk: Disk) -> None:
        """Use a folder from now on: list what is in it, write what is kept."""
        self.disk = disk
        texts: dict[str, Tokens] = {}
        for file, content in disk.found():
            text = np.concatenate((texts[content.after][: content.start], content.tokens)) if content.start else (
                content.tokens
            )  # fmt: skip
            texts[file.name] = text
            path, n = self.tree.find(text, content.added)
            if n < content.start or n == len(text):
                continue
            if path and path[-1].end > n:
                path[-1] = self.tree.split(path[-1], n - path[-1].start)
            node = self.tree.add(path[-1] if path else self.tree.root(content.added), text[n:], None)
            node.file = file
            node.checkpoints = [c for c in content.checkpoints if c.n_tokens > node.start]

    def save(self, *, wait: bool = False) -> None:
        """Hand what is not on disk yet to the writing thread, as much as it takes; `wait`: all of it."""
        disk = self.disk
        if disk is None:
            return
        self._take_reports(disk, wait=False)
        while self._unsaved:
            node, added = self._unsaved[0]
            if node.parent is not None and node.rows is not None and _is_unsaved(node):
                if not disk.has_room(node.n_bytes):
                    if not wait:
                        return
                    self._take_reports(disk, wait=True)
                self._write(disk, node, added)
            self._unsaved.popleft()
        if wait:
            self._take_reports(disk, wait=True)

    def _write(self, disk: Disk, node: Node, added: Added) -> None:
        """Hand over a node whose parent is on disk or handed over, or the checkpoints that its file lacks."""
        earlier = tuple(dict.fromkeys(one.file.name for one in node.path()[:-1] if one.file is not None))
        if node.file is not None:
            disk.add(node.file, _unsaved(node), earlier)
            return
        before = node.parent
        after = before.file if before is not None else None
        if node.start and after is None:
            return  # the file before it could not be written
        text = np.concatenate([one.tokens for one in node.path()])
        checkpoints = tuple(c for c in node.checkpoints if c.parts)
        name = node_file.name_of(disk.about, added, node.start, text)
        node.file = StoredFile(name, node.start, frozenset(c.n_tokens for c in checkpoints))
        content = Content(after.name if after is not None else "", node.start, node.tokens, added, node.rows or (),
                          checkpoints)  # fmt: skip
        disk.write(node.file, content, earlier)

    def _take_reports(self, disk: Disk, *, wait: bool) -> None:
        for report in disk.reports(wait=wait):
            if report.places:
                report.file.places -= report.places
            elif report.failed:
                self._lose(report.file.name)
            for name in report.removed:
                self._lose(name)

    def _lose(self, name: str) -> None:
        """Note that a file is gone: what was only there, and what came after it, is lost."""
        for node in [node for node in self.tree.nodes() if node.file is not None and node.file.name == name]:
            self.tree.forget_file(node)
            if node.rows is None and node.parent is not None:
                self._cut_off(node)


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


def _is_unsaved(node: Node) -> bool:
    """Return whether a node or some of its checkpoints are not on disk."""
    return node.file is None or bool(_unsaved(node))


def _unsaved(node: Node) -> list[Checkpoint]:
    """Return the checkpoints of a node that its file lacks."""
    places = node.file.places if node.file is not None else ()
    return [c for c in node.checkpoints if c.parts and c.n_tokens not in places]


def _later(node: Node, n: int) -> Iterator[tuple[Node, Checkpoint]]:
    """Yield the checkpoints after position n, on this node and below it, with their nodes."""
    for one in node.walk():
        yield from ((one, c) for c in one.checkpoints if c.n_tokens > n)
