"""The parts of a graph: row counts, weights, cache tensors, nodes, and the base class of operations.

Values are 2-D, row-major, contiguous float32 (i32 for routing tables). The number of rows is symbolic, so one recorded
graph serves every batch up to the size it was planned for:

    Rows.TOKENS    rows of the micro-batch            Rows.OUTPUTS   rows whose logits were requested
    Rows.KV        all cached positions of the sequences in the micro-batch, in segment order ("compact" rows)

times an integer factor (`n_expert_used` for rows sorted by expert).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar, Protocol

import numpy.typing as npt

from ikcli.gguf.constants import GGMLType
from ikcli.graph.micro_batch import MicroBatch

Array = npt.NDArray[Any]


class Rows(Enum):
    """The meaning of one row of a value."""

    TOKENS = "n_tokens"
    OUTPUTS = "n_outputs"
    KV = "n_kv"


@dataclass(frozen=True, slots=True)
class RowSpec:
    """A symbolic number of rows: `symbol * factor`."""

    symbol: Rows
    factor: int = 1


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the model file (or derived from it): shape in GGUF order (ne0 = row length first).

    `row0`/`n_rows` select a range of rows of the 2-D matrix without copying.
    """

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    row0: int = 0
    n_rows: int = -1

    @property
    def ne0(self) -> int:
        return self.shape[0]

    @property
    def ne1(self) -> int:
        """Return the rows of one matrix."""
        full = self.shape[1] if len(self.shape) > 1 else 1
        return full if self.n_rows < 0 else self.n_rows

    @property
    def ne2(self) -> int:
        """Return the number of matrices (experts, heads)."""
        return self.shape[2] if len(self.shape) > 2 else 1

    def rows(self, row0: int, n_rows: int) -> Weight:
        """Return rows row0 .. row0+n_rows-1 of the matrix."""
        return Weight(self.name, self.type, self.shape, self.row0 + row0, n_rows)


class Per(Enum):
    """The owner of one row of a cache tensor."""

    CELL = "a position of a sequence"
    WINDOW = "one of the last positions of a sequence: cells that are used again once no query sees them any more"
    SEQUENCE = "a sequence: a state of fixed size, zero where the sequence begins (position 0) whatever is stored"


@dataclass(frozen=True, slots=True)
class Cache:
    """One layer's cache tensor: `rows` rows of `cols` elements of `type`; transposed: `cols` rows of all cells."""

    kind: str  # "k", "v", "kv" (MLA: rope 64 | latent 512), "kv_t" (transposed latent); "k.1": of a layer's second run
    il: int
    cols: int
    type: GGMLType
    transposed: bool = False
    per: Per = Per.CELL

    @property
    def content(self) -> str:
        """Return what it holds: the kind, without the run of the layer."""
        return self.kind.partition(".")[0]

    def rows(self, n_cells: int, n_seq: int, n_window: int = 0) -> int:
        """Return the rows of the tensor in a session with these cells, sequences, and window cells per sequence."""
        return {Per.CELL: n_cells, Per.WINDOW: n_seq * n_window, Per.SEQUENCE: n_seq}[self.per]


class Place(Enum):
    """The device that computes an op whose operands are on several; ops with a cache run where the cache is."""

    WEIGHT = "where its weights are"
    INPUTS = "where its inputs are, or at the layer's home where these are on several devices"
    FIRST_INPUT = "where its first input is"
    HOST = "in RAM, where the caller provides the value or what it depends on"
    EVERYWHERE = "on every device that needs it, as it is small and costs nothing to repeat"


@dataclass(frozen=True, slots=True)
class Op:
    """An operation: operands (nodes, weights, caches, head slices, tuples of these), then settings.

    A subclass is a frozen dataclass. It gives its ggml name, its attributes (below), the size of its value and
    `compute`, its meaning in NumPy, against which backends are tested. Operands are the fields that hold such values.
    """

    name: ClassVar[str]
    place: ClassVar[Place] = Place.INPUTS
    policy: ClassVar[str] = ""  # what -op calls it; only ops with a name are computed on a GPU with weights in RAM
    light: ClassVar[bool] = False  # moves so little for a few tokens that one thread does it
    is_table: ClassVar[bool] = False  # the value holds ids or plans, not rows of numbers
    ends_split: ClassVar[bool] = False  # other devices go on with the value while this one does the rest
    stores: ClassVar[bool] = False  # writes its cache; others read it
    dtype: ClassVar[str] = "f32"

    @property
    def shape(self) -> tuple[RowSpec, int]:
        """Return rows and columns of the value; 0 columns: no value."""
        raise NotImplementedError

    def compute(self, run: Run) -> Array:
        """Return the value, (rows, cols), in the arithmetic of `run`."""
        raise NotImplementedError

    def operands(self) -> Iterator[Node | Weight | Cache]:
        """Yield the operands in the order of the fields; a head slice yields its source."""
        for f in fields(self):
            yield from _operands(getattr(self, f.name))


class SameSize(Op):
    """An op whose value has the rows and columns of `x`."""

    __slots__ = ()
    x: Node

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.x.rows, self.x.cols


def _operands(value: object) -> Iterator[Node | Weight | Cache]:
    if isinstance(value, Node | Weight | Cache):
        yield value
    elif isinstance(value, HeadSlice):
        yield value.source
    elif isinstance(value, tuple):
        for x in value:
            yield from _operands(x)


@dataclass(eq=False, slots=True)
class Node:
    """One recorded operation; `il` is its layer (-1: outside of layers), which its name carries too (`ffn_out-3`)."""

    op: Op
    name: str
    il: int = -1
    index: int = -1
    inputs: tuple[Node | Weight | Cache, ...] = field(init=False)
    rows: RowSpec = field(init=False)
    cols: int = field(init=False)

    def __post_init__(self) -> None:
        self.inputs = tuple(self.op.operands())
        self.rows, self.cols = self.op.shape

    @property
    def dtype(self) -> str:
        """Return the type of the elements."""
        return self.op.dtype

    def nodes(self) -> Iterator[Node]:
        """Yield the values it reads."""
        return (x for x in self.inputs if isinstance(x, Node))

    def weights(self) -> Iterator[Weight]:
        """Yield the tensors of the model it reads."""
        return (x for x in self.inputs if isinstance(x, Weight))

    def caches(self) -> Iterator[Cache]:
        """Yield the cache tensors it reads or writes."""
        return (x for x in self.inputs if isinstance(x, Cache))

    def __repr__(self) -> str:
        return f"{self.name} = {self.op.name}[{self.rows.symbol.value}*{self.rows.factor} x {self.cols}]"


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """Columns `offset + h*head_stride .. +width` of a row, for head h (head_stride 0: shared by all heads)."""

    source: Node | Cache
    offset: int
    width: int
    head_stride: int

    @property
    def node(self) -> Node:
        """Return the source, which must be a node."""
        assert isinstance(self.source, Node)
        return self.source


class Run(Protocol):
    """The state that `Op.compute` works with: values computed so far, weights, caches, the micro-batch."""

    dtype: type
    state: MicroBatch

    def value(self, node: Node) -> Array:
        """Return the value of a node that was computed before."""

    def weight(self, w: Weight) -> Array:
        """Return a weight, (matrices, rows, row length), without leading dimensions of 1."""

    def cached(self, cache: Cache) -> Array:
        """Return all rows of a cache tensor, (cells, cols); of states (sequences, cols), which ops write in place."""

    def store(self, cache: Cache, x: Array, offset: int) -> None:
        """Write a row per token of the micro-batch, from column `offset` on."""


def power_of_two_parts(n: int) -> tuple[int, ...]:
    """Return n as a sum of distinct powers of two, largest first."""
    return tuple(1 << i for i in reversed(range(n.bit_length())) if n >> i & 1)
