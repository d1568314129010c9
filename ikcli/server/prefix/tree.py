"""A radix tree over the keys of positions. Its nodes hold rows of the cache; each row is stored once.

A node covers a run of at most `BLOCK` positions, so that a long text can leave memory piece by piece and a split copies
little. Checkpoints (see `engine/run/saved_sequence.py`) hang on the node that covers the position before them. Texts
that were computed with different additions (adapters, control vectors) have trees of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ikcli.engine.run.adapters import Added
from ikcli.engine.run.saved_sequence import Bytes, Checkpoint
from ikcli.server.prefix.disk import StoredFile
from ikcli.server.prefix.keys import Tokens, common_prefix

BLOCK = 512  # most positions of a node

Rows = tuple[Bytes, ...]
Cut = Callable[[Rows, int, int], Rows]  # rows, first position, end -> views of these positions


@dataclass(slots=True, eq=False)
class Node:
    """The positions start..end-1 below a parent. The root covers none.

    Without `rows` they are only on disk, in `file`, which may hold more positions; checkpoints then have no parts.
    `pins` counts users beside the tree, who need the rows to stay. `uses` counts requests that took these rows; `turn`
    is the number of the last of them and `clock` the store's clock at that time.
    """

    tokens: Tokens
    start: int
    rows: Rows | None = ()
    parent: Node | None = None
    children: dict[int, Node] = field(default_factory=dict)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    file: StoredFile | None = None
    pins: int = 0
    uses: int = 0
    turn: int = 0
    clock: float = 0.0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def n_bytes(self) -> int:
        """Return the bytes of keys, rows and checkpoints in RAM; 0 if they are only on disk."""
        if self.rows is None:
            return 0
        rows = sum(part.nbytes for part in self.rows)
        return self.tokens.nbytes + rows + sum(c.n_bytes for c in self.checkpoints)

    @property
    def is_needed(self) -> bool:
        """Return whether a node below has rows in RAM, which need those of this node."""
        return any(child.rows is not None for child in self.children.values())

    @property
    def is_written_now(self) -> bool:
        """Return whether the writing thread works on its file."""
        return self.file is not None and self.file.writing > 0

    def walk(self) -> Iterator[Node]:
        """Yield this node and all below it, parents first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children.values()))

    def path(self) -> list[Node]:
        """Return the nodes from below the root down to this one."""
        found: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    def detach(self) -> None:
        """Take this node out of the tree."""
        if self.parent is not None:
            del self.parent.children[int(self.tokens[0])]
            self.parent = None


class Tree:
    """The nodes of all texts; see the module. `n_bytes`, `n_nodes` and `n_texts` (leaves) are exact at any time."""

    def __init__(self, cut: Cut) -> None:
        """Start empty; `cut` slices rows by position."""
        self._cut = cut
        self.roots: dict[Added, Node] = {}
        self.n_bytes = self.n_nodes = self.n_texts = 0

    def find(self, tokens: Tokens, added: Added) -> tuple[list[Node], int]:
        """Return the nodes that a text passes, from the top, and how many of its first tokens they cover.

        The last node may be covered in part.
        """
        path: list[Node] = []
        node, n = self.roots.get(added), 0
        while node is not None and n < len(tokens):
            below = node.children.get(int(tokens[n]))
            if below is None:
                break
            same = common_prefix(below.tokens, tokens[n:])
            path.append(below)
            n += same
            node = below if same == len(below.tokens) else None
        return path, n

    def root(self, added: Added) -> Node:
        """Return the root of the texts with these additions."""
        if added not in self.roots:
            self.roots[added] = Node(np.zeros(0, np.int32), 0)
        return self.roots[added]

    def add(self, parent: Node, tokens: Tokens, rows: Rows | None) -> Node:
        """Add a node for the positions after those of `parent`; without rows it is only on disk."""
        node = Node(tokens.copy(), parent.end, rows, parent)
        self.n_texts += bool(parent.children) or parent.parent is None
        parent.children[int(tokens[0])] = node
        self.n_bytes += node.n_bytes
        self.n_nodes += 1
        return node

    def hang(self, node: Node, checkpoint: Checkpoint) -> None:
        """Hang a checkpoint on a node that covers its last position, in place of one at the same position."""
        others = [c for c in node.checkpoints if c.n_tokens != checkpoint.n_tokens]
        self.n_bytes -= node.n_bytes
        node.checkpoints = sorted([*others, checkpoint], key=lambda c: c.n_tokens)
        self.n_bytes += node.n_bytes

    def drop_checkpoint(self, node: Node, checkpoint: Checkpoint) -> None:
        """Forget a checkpoint, or its parts if it is on disk."""
        kept = [_on_disk(node, c) if c is checkpoint else c for c in node.checkpoints]
        node.checkpoints = [c for c in kept if c is not None]
        self.n_bytes -= checkpoint.n_bytes

    def fill(self, node: Node, rows: Rows) -> None:
        """Give rows to a node that is only on disk."""
        node.rows = rows
        self.n_bytes += node.n_bytes

    def unload(self, node: Node) -> None:
        """Drop what a node that is on disk has in RAM."""
        assert node.file is not None
        self.n_bytes -= node.n_bytes
        left = [_on_disk(node, c) for c in node.checkpoints]
        node.rows, node.checkpoints = None, [c for c in left if c is not None]

    def forget_file(self, node: Node) -> None:
        """Note that the file of a node is gone."""
        node.file = None
        if node.rows is not None:
            node.checkpoints = [c for c in node.checkpoints if c.parts]

    def split(self, node: Node, n: int) -> Node:
        """Cut a node after its first n positions; return the first part, below which the rest now hangs."""
        assert node.parent is not None and 0 < n < len(node.tokens)
        first = Node(node.tokens[:n].copy(), node.start, self._copies(node.rows, 0, n), node.parent)
        first.file = node.file
        first.uses, first.turn, first.clock = node.uses, node.turn, node.clock
        first.checkpoints = [c for c in node.checkpoints if c.n_tokens <= first.end]
        node.checkpoints = [c for c in node.checkpoints if c.n_tokens > first.end]
        node.rows = self._copies(node.rows, n, len(node.tokens))
        node.tokens, node.start = node.tokens[n:].copy(), first.end
        node.parent.children[int(first.tokens[0])] = first
        first.children[int(node.tokens[0])] = node
        node.parent = first
        self.n_nodes += 1
        return first

    def trim(self, node: Node, n: int) -> None:
        """Drop all but the first n positions of a node that has no children."""
        assert not node.children and 0 < n < len(node.tokens)
        self.n_bytes -= node.n_bytes
        node.rows, node.tokens = self._copies(node.rows, 0, n), node.tokens[:n].copy()
        node.checkpoints = [c for c in node.checkpoints if c.n_tokens <= node.end]
        self.n_bytes += node.n_bytes

    def remove(self, node: Node) -> None:
        """Remove a node that has no children."""
        assert not node.children and node.parent is not None
        parent = node.parent
        node.detach()
        self.n_texts -= bool(parent.children) or parent.parent is None
        self.n_bytes -= node.n_bytes
        self.n_nodes -= 1

    def clear(self) -> None:
        self.roots.clear()
        self.n_bytes = self.n_nodes = self.n_texts = 0

    def nodes(self) -> Iterator[Node]:
        """Yield all nodes except roots, parents first."""
        for root in self.roots.values():
            yield from (node for node in root.walk() if node.parent is not None)

    def _copies(self, rows: Rows | None, first: int, end: int) -> Rows | None:
        if rows is None:
            return None
        return tuple(part.copy() for part in self._cut(rows, first, end))


def _on_disk(node: Node, checkpoint: Checkpoint) -> Checkpoint | None:
    """Return a checkpoint without its parts if they are in the file of the node."""
    if node.file is None or checkpoint.n_tokens not in node.file.places:
        return None
    return replace(checkpoint, parts=())


def checkpoints_of(path: Sequence[Node], n: int) -> list[Checkpoint]:
    """Return the checkpoints on a path up to n positions, ascending."""
    return [c for node in path for c in node.checkpoints if c.n_tokens <= n]
