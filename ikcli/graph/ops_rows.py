"""Operations on rows and their elements: embeddings, norms, matrix products, sums, rotations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ikcli.graph.activations import SILU, Glu
from ikcli.graph.core import Array, HeadSlice, Node, Op, Place, Rows, RowSpec, Run, SameSize, Weight


@dataclass(frozen=True, slots=True)
class Embed(Op):
    """Rows of an embedding for the micro-batch's tokens, or for their positions (NaN beyond the last row)."""

    name = "embed"
    place = Place.WEIGHT
    light = True

    w: Weight
    by_position: bool = False

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return RowSpec(Rows.TOKENS), self.w.ne0

    def compute(self, run: Run) -> Array:
        w = run.weight(self.w)
        if not self.by_position:
            return w[run.state.tokens]
        pos = run.state.pos
        return np.where(pos[:, None] < len(w), w[np.minimum(pos, len(w) - 1)], run.dtype(np.nan))


@dataclass(frozen=True, slots=True)
class EmbedTypes(Op):
    """Rows of an embedding for the part of the text that a token is in.

    Row 0 up to the first token `sep` of the text, then row 1 (`sep` -1: one part only). Texts are whole.
    """

    name = "embed_types"
    place = Place.WEIGHT
    light = True

    w: Weight
    sep: int = -1

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return RowSpec(Rows.TOKENS), self.w.ne0

    def compute(self, run: Run) -> Array:
        types = np.zeros(len(run.state.tokens), np.int64)
        for s in run.state.segments if self.sep >= 0 else ():
            at = np.flatnonzero(run.state.tokens[s.start : s.start + s.n_tokens] == self.sep)[:1]
            for first in at:
                types[s.start + first + 1 : s.start + s.n_tokens] = 1
        return run.weight(self.w).reshape(-1, self.w.ne0)[types]


@dataclass(frozen=True, slots=True)
class GetRows(Op):
    """The rows of x (one per token) whose logits were requested."""

    name = "get_rows"
    light = True

    x: Node

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return RowSpec(Rows.OUTPUTS, self.x.rows.factor), self.x.cols

    def compute(self, run: Run) -> Array:
        return run.value(self.x)[run.state.outputs]


@dataclass(frozen=True, slots=True)
class RmsNorm(Op):
    """RMS norm of columns [offset, offset + n_cols) of x, in groups of as many columns as w has."""

    name = "rms_norm"
    place = Place.WEIGHT

    x: Node
    w: Weight
    eps: float
    offset: int
    n_cols: int

    def __post_init__(self) -> None:
        if self.n_cols % self.w.ne0:
            raise ValueError(f"{self.w.name}: {self.n_cols} columns are not a multiple of the width {self.w.ne0}")

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.x.rows, self.n_cols

    @property
    def width(self) -> int:
        """Return the number of columns that are normed together."""
        return self.w.ne0

    def compute(self, run: Run) -> Array:
        x = run.value(self.x)[:, self.offset : self.offset + self.n_cols]
        groups = x.reshape(len(x), -1, self.width)
        mean = np.mean(groups * groups, axis=-1, keepdims=True, dtype=np.float64)
        scale: Array = (1.0 / np.sqrt(mean + self.eps)).astype(run.dtype)
        return (groups * scale * run.weight(self.w)).reshape(len(x), -1)


class Product(Op):
    """A product of rows with matrices of the model; with `by_expert` rows choose their matrices."""

    __slots__ = ()
    place = Place.WEIGHT
    by_expert = False

    @property
    def matrices(self) -> tuple[Weight, ...]:
        """Return the weights that rows of `source` are multiplied with."""
        raise NotImplementedError

    @property
    def source(self) -> Node:
        """Return the left operand."""
        raise NotImplementedError

    @property
    def n_matrices(self) -> int:
        """Return the number of matrices of a weight that every row is multiplied with."""
        return 1


class OneMatrix(Product):
    """A product of the rows of x with w."""

    __slots__ = ()
    w: Weight
    x: Node

    def __post_init__(self) -> None:
        if self.w.ne0 != self.x.cols:
            raise ValueError(f"{self.w.name} has rows of {self.w.ne0}, its input has {self.x.cols} columns")

    @property
    def matrices(self) -> tuple[Weight, ...]:
        return (self.w,)

    @property
    def source(self) -> Node:
        return self.x


@dataclass(frozen=True, slots=True)
class MulMat(OneMatrix):
    """x @ w.T: [rows, ne0] -> [rows, ne1].

    `exact`: compute with a float w in float32, however many the rows; see `Graph.exact`.
    """

    name = "mul_mat"
    policy = "MUL_MAT"

    w: Weight
    x: Node
    exact: bool = False

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.x.rows, self.w.ne1

    def compute(self, run: Run) -> Array:
        return run.value(self.x) @ run.weight(self.w).T


@dataclass(frozen=True, slots=True)
class MulMatHeads(Product):
    """Per head h: x[:, h] @ w[h].T with w (ne0 = x.width, ne1, n_head) -> [rows, n_head*ne1]; `exact` as in MulMat."""

    name = "mul_mat_heads"
    policy = "MUL_MAT"

    w: Weight
    x: HeadSlice
    exact: bool = False

    def __post_init__(self) -> None:
        if self.w.ne0 != self.x.width:
            raise ValueError(f"{self.w.name} has rows of {self.w.ne0}, heads of its input {self.x.width} columns")

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.source.rows, self.w.ne1 * self.w.ne2

    @property
    def matrices(self) -> tuple[Weight, ...]:
        return (self.w,)

    @property
    def source(self) -> Node:
        return self.x.node

    @property
    def n_matrices(self) -> int:
        return self.w.ne2

    def compute(self, run: Run) -> Array:
        w = run.weight(self.w)  # (n_head, ne1, ne0)
        x = head_columns(run.value(self.source), self.x, len(w))
        return np.matmul(x.transpose(1, 0, 2), w.transpose(0, 2, 1)).transpose(1, 0, 2).reshape(len(x), -1)


@dataclass(frozen=True, slots=True)
class Add(SameSize):
    """Element-wise sum; a weight (bias) is added to every row."""

    name = "add"

    x: Node
    y: Node | Weight

    def compute(self, run: Run) -> Array:
        y = run.weight(self.y) if isinstance(self.y, Weight) else run.value(self.y)
        return run.value(self.x) + y


@dataclass(frozen=True, slots=True)
class SwiGlu(Op):
    """silu(gate) * up, or what `act` says."""

    name = "swiglu"

    gate: Node
    up: Node
    act: Glu = SILU

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.gate.rows, self.gate.cols

    def compute(self, run: Run) -> Array:
        return self.act(run.value(self.gate), run.value(self.up))


@dataclass(frozen=True, slots=True)
class Concat(Op):
    """Columns of the parts side by side."""

    name = "concat"

    parts: tuple[Node, ...]

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.parts[0].rows, sum(p.cols for p in self.parts)

    def compute(self, run: Run) -> Array:
        return np.concatenate([run.value(x) for x in self.parts], axis=1)


@dataclass(frozen=True, slots=True)
class ConcatHeads(Op):
    """Per head, the parts side by side: [rows, n_head * sum(part widths)]. Sources are nodes of equal rows."""

    name = "concat_heads"

    parts: tuple[HeadSlice, ...]
    n_head: int

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.parts[0].node.rows, self.n_head * sum(p.width for p in self.parts)

    def compute(self, run: Run) -> Array:
        parts = [head_columns(run.value(p.node), p, self.n_head) for p in self.parts]
        return np.concatenate(parts, axis=2).reshape(len(parts[0]), -1)


@dataclass(frozen=True, slots=True)
class RopeTable(Op):
    """cos, sin (interleaved per pair) of position * inv_freq, times mscale: [n_tokens, 2*len(inv_freq)].

    `lag`: the table is that of the position so many before the token's.
    """

    name = "rope_table"
    place = Place.EVERYWHERE
    light = True

    inv_freq: tuple[float, ...]
    mscale: float
    lag: int = 0

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return RowSpec(Rows.TOKENS), 2 * len(self.inv_freq)

    def compute(self, run: Run) -> Array:
        theta = (run.state.pos.astype(np.float64) - self.lag)[:, None] * np.asarray(self.inv_freq)
        table = np.stack([np.cos(theta), np.sin(theta)], axis=-1) * self.mscale
        return table.reshape(len(theta), -1).astype(run.dtype)


@dataclass(frozen=True, slots=True)
class Rope(SameSize):
    """Rotate as many columns of every head as the table has, from `offset` on; copy the other columns.

    Pairs are (2i, 2i+1), or (i, i + n_rot/2) for neox.
    """

    name = "rope"

    x: Node
    table: Node
    n_head: int
    head_dim: int
    offset: int
    neox: bool

    def __post_init__(self) -> None:
        if self.x.cols != self.n_head * self.head_dim:
            raise ValueError(f"{self.x.cols} columns are not {self.n_head} heads of {self.head_dim}")

    @property
    def n_rot(self) -> int:
        """Return the number of rotated columns."""
        return self.table.cols

    def compute(self, run: Run) -> Array:
        x, table = run.value(self.x), run.value(self.table)
        out = x.reshape(len(x), self.n_head, self.head_dim).copy()
        part = out[:, :, self.offset : self.offset + self.n_rot]
        half = self.n_rot // 2
        first, second = (np.s_[..., :half], np.s_[..., half:]) if self.neox else (np.s_[..., 0::2], np.s_[..., 1::2])
        cos, sin = table[:, None, 0::2], table[:, None, 1::2]
        x0, x1 = part[first].copy(), part[second].copy()
        part[first] = x0 * cos - x1 * sin
        part[second] = x0 * sin + x1 * cos
        return out.reshape(len(x), -1)


@dataclass(frozen=True, slots=True)
class Hadamard(SameSize):
    """Orthonormal Walsh-Hadamard transform of every head, its own inverse, in blocks of powers of two.

    The blocks start at column `offset` of a head; other columns are copied.
    """

    name = "hadamard"

    x: Node
    n_head: int
    head_dim: int
    offset: int
    blocks: tuple[int, ...]

    def __post_init__(self) -> None:
        wrong = any(b < 1 or b & (b - 1) for b in self.blocks)
        if wrong or self.x.cols != self.n_head * self.head_dim or self.offset + sum(self.blocks) > self.head_dim:
            raise ValueError(f"blocks {self.blocks} from column {self.offset} do not fit heads of {self.head_dim}")

    def compute(self, run: Run) -> Array:
        x = run.value(self.x)
        out = x.reshape(len(x), self.n_head, self.head_dim).copy()
        at = self.offset
        for size in self.blocks:
            part = np.s_[..., at : at + size]
            out[part] = out[part] @ walsh(size).astype(run.dtype)
            at += size
        return out.reshape(len(x), -1)


# --- arithmetic -------------------------------------------------------------------------------------------------------
def softmax(x: Array) -> Array:
    """Return the softmax of every row."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def walsh(n: int) -> Array:
    """Return the orthonormal Walsh-Hadamard matrix of order n, a power of two."""
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]]) / np.sqrt(2)
    return h


def head_columns(x: Array, part: HeadSlice, n_head: int) -> Array:
    """Return the columns of a head slice: (rows, n_head, width)."""
    columns = part.offset + part.head_stride * np.arange(n_head)[:, None] + np.arange(part.width)
    return x[:, columns]
