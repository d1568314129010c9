"""Lower a graph on any device: buffers of one arena, references to them, and their lifetimes.

A backend's `Lowering` adds its own ops and its own memory outside the arena; its `Program` resolves every `Ref`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ikcli.graph import Cache, Lifetime, Node, Rows, RowSpec, assign_offsets


@dataclass(frozen=True, slots=True)
class Ref:
    """`offset` bytes into a buffer, a weight (by name) or a cache tensor.

    A buffer is given by index; backends define the meaning of negative ones.
    """

    target: int | str | Cache
    offset: int = 0

    def __add__(self, n_bytes: int) -> Ref:
        return Ref(self.target, self.offset + n_bytes)


@dataclass(slots=True)
class Buffers:
    """The part of a lowering that allocates buffers, sized for `max_rows` rows per symbol."""

    max_rows: Mapping[Rows, int]
    sizes: list[int] = field(default_factory=list, init=False)
    _node_buffers: dict[Node, int] = field(default_factory=dict, init=False)
    _shared: dict[Any, Ref] = field(default_factory=dict, init=False)
    _current: Node | None = field(default=None, init=False)

    @abstractmethod
    def buffer(self, n_bytes: int) -> Ref:
        """Return temporary memory, alive from the first to the last op that names it."""

    def new_buffer(self, size: int) -> int:
        """Return the index of a new buffer of exactly `size` bytes."""
        self.sizes.append(size)
        return len(self.sizes) - 1

    def rows(self, spec: RowSpec) -> int:
        """Return the most rows that a value of this spec can have."""
        return self.max_rows[spec.symbol] * spec.factor

    def shared(self, key: Any, make: Callable[[], Ref]) -> Ref:
        """Return a derived buffer that is made once per key (quantized activations of one input, for instance)."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def out(self, node: Node, n_bytes: int = 0) -> Ref:
        """Return the output buffer of a node (default size: rows x columns of 4 bytes)."""
        if node not in self._node_buffers:
            self._node_buffers[node] = buffer_index(self.buffer(n_bytes or self.rows(node.rows) * node.cols * 4))
        return Ref(self._node_buffers[node])

    def alias(self, node: Node, other: Node) -> Ref:
        """Let `node` write over `other`'s buffer (in-place ops)."""
        self._node_buffers[node] = self._node_buffers[other]
        return Ref(self._node_buffers[node])

    def has_out(self, node: Node) -> bool:
        """Return whether a node has a buffer."""
        return node in self._node_buffers

    def begin(self, node: Node) -> None:
        """Attribute the ops emitted from here on to this node."""
        self._current = node

    def place(
        self, ops: Sequence[Iterable[object]], kept: Mapping[int, tuple[int, int]], elsewhere: Collection[int]
    ) -> tuple[list[int], int]:
        """Place the buffers in one arena; return their offsets and the bytes of the arena.

        `ops`: the buffers that each op names. `kept` buffers also live from one given op to another; those `elsewhere`
        take no room.
        """
        first, last = [len(ops)] * len(self.sizes), [-1] * len(self.sizes)
        for i, words in enumerate(ops):
            for w in words:
                if type(w) is Ref and type(b := w.target) is int and b >= 0:
                    if last[b] < 0:
                        first[b] = i
                    last[b] = i
        for b, (a, z) in kept.items():
            first[b], last[b] = min(first[b], a), max(last[b], z)
        return assign_offsets(
            [
                Lifetime(0, 0, 0) if last[b] < 0 or b in elsewhere else Lifetime(size, first[b], last[b])
                for b, size in enumerate(self.sizes)
            ]
        )


def buffer_index(ref: Ref) -> int:
    """Return the index of the buffer that a Ref points into."""
    assert isinstance(ref.target, int)
    return ref.target
