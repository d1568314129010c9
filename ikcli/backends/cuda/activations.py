"""Convert activation rows once per input and kind for the matrix products that read them.

The launch that computes a value also writes its converted rows where it can (norms, swiglu); otherwise a conversion is
launched. Layouts: `layouts.py`; kernels: `kernels/layer_rows.cu`, `layer_common.cuh`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ikcli.backends.cuda.layouts import half_row_bytes, q8_row_bytes, scaled_row_bytes, split_row_bytes
from ikcli.backends.cuda.lower import Arg, Counts, GpuLaunch, GpuLowering, Grid, Ref
from ikcli.backends.cuda.parameters import places
from ikcli.errors import UnsupportedError
from ikcli.graph import HeadSlice, Node, RowSpec

When = Callable[[Counts], bool]
THREADS = 256
PER_BLOCK = 4 * THREADS  # columns that a block of an element-wise kernel does
WANT_Q8, WANT_BF16 = 1, 2  # layer_common.cuh


def parts_of(n: int, per_block: int) -> int:
    """Return the number of blocks for n items."""
    return -(-n // per_block)


def row_grid(spec: RowSpec, parts: int = 1) -> Grid:
    """Return one block per row and part of a row; rows come first, since only that dimension may exceed 65535."""
    return lambda c: (c.rows(spec), parts, 1)


@dataclass(frozen=True, slots=True)
class Activations:
    """Converted rows: address, bytes between rows, bytes between heads of a row."""

    at: Ref
    row_bytes: int
    head_bytes: int


@dataclass(slots=True)
class Wanted:
    """Condition for converted rows: one of their readers runs. None: always."""

    readers: list[When | None] = field(default_factory=list)

    def __call__(self, counts: Counts) -> bool:
        return any(when is None or when(counts) for when in self.readers)


@dataclass(slots=True)
class Formats:
    """The argument that tells a kernel which rows to make beside its float32 result."""

    q8: Wanted | None = None
    bf16: Wanted | None = None

    def __call__(self, counts: Counts) -> np.int32:
        q8 = WANT_Q8 if self.q8 is not None and self.q8(counts) else 0
        return np.int32(q8 | (WANT_BF16 if self.bf16 is not None and self.bf16(counts) else 0))


def format_args() -> tuple[Arg, ...]:
    """Return FORMATS of a kernel that can make activation rows: none wanted yet."""
    return 0, 0, 0, 0, Formats()


def formats_of(op: GpuLaunch) -> Formats | None:
    """Return the formats of a launch that can make activation rows, else None."""
    formats = op.arg("wanted") if "wanted" in (places(op.kernel) or ()) else None
    assert formats is None or isinstance(formats, Formats)
    return formats


def makes_formats(op: GpuLaunch) -> bool:
    """Return whether a launch makes activation rows."""
    formats = formats_of(op)
    return formats is not None and (formats.q8 is not None or formats.bf16 is not None)


def producer(low: GpuLowering, node: Node, first: int = 0) -> int:
    """Return the index of the last op, not before `first`, that computes a node; -1 without one."""
    for i in range(len(low.ops) - 1, first - 1, -1):
        if low.ops[i].node is node or node in low.ops[i].also:
            return i
    return -1


_ROW_BYTES: dict[str, Callable[[int], int]] = {
    "q8": q8_row_bytes, "bf16": half_row_bytes, "f16": half_row_bytes,
    "scaled": scaled_row_bytes, "split": split_row_bytes,
}  # fmt: skip


def kind_row_bytes(kind: str, k: int) -> int:
    """Return the bytes of an activation row of k values, by kind."""
    return _ROW_BYTES[kind](k)


def activations(low: GpuLowering, x: HeadSlice, heads: int, kind: str, when: When | None = None) -> Activations:
    """Return the rows of a node as `kind`, converted once.

    A row has columns offset + h*head_stride .. +width for each head h. `when`: the condition under which the caller's
    launch runs; the rows exist only then. q8 needs widths of n*32.
    """
    src = x.node
    if kind == "q8" and x.width % 32:
        raise UnsupportedError(f"{src.name}: rows of {x.width} columns cannot be quantized in blocks of 32")
    row = kind_row_bytes(kind, x.width)

    def make() -> Ref:
        out = low.buffer(low.rows(src.rows) * heads * row)
        if not _by_producer(low, x, heads, kind, out, row, when):
            _convert(low, x, heads, kind, out, row, when)
        return out

    n = len(low.sizes)
    at = low.shared(("activations", kind, src, x.offset, x.width, x.head_stride, heads), make)
    if at.target != n:
        _also_when(low, at, when)
    return Activations(at, heads * row, row)


def _convert(low: GpuLowering, x: HeadSlice, heads: int, kind: str, out: Ref, row: int, when: When | None) -> None:
    src = x.node
    values = x.width if kind == "q8" else -(-x.width // 8) * 8
    per_block = PER_BLOCK if kind == "q8" else 2 * PER_BLOCK
    blocks = heads if kind == "scaled" else parts_of(heads * values, per_block)
    low.emit(f"layer_to_{kind}", row_grid(src.rows, blocks), THREADS, 0, low.state,
             *low.row_args(src.rows), low.out(src) + 4 * x.offset, src.cols, np.int32(heads), x.head_stride,
             np.int32(x.width), out, row, when=Wanted([when]))  # fmt: skip


def _by_producer(low: GpuLowering, x: HeadSlice, heads: int, kind: str, out: Ref, row: int, when: When | None) -> bool:
    """Let the launch that computes the value write the rows too; return whether it can."""
    at = producer(low, x.node)
    if at < 0 or kind not in ("q8", "bf16") or x.width % 32 or low.ops[at].when is not None:
        return False
    op = low.ops[at]
    formats = formats_of(op)
    if formats is None or op.arg("out") != low.out(x.node):
        return False
    if op.kernel == "layer_latent":
        if not _unrotated(op, x, heads):
            return False
    elif heads != 1 or x.width != x.node.cols:
        return False
    setattr(formats, kind, Wanted([when]))
    rows: dict[str, Arg] = {kind: out, f"{kind}_bytes": row}
    low.ops[at] = op.changed(**rows)
    return True


def _unrotated(op: GpuLaunch, x: HeadSlice, heads: int) -> bool:
    """Return whether these are the columns before the rotated ones of all queries of a layer_latent launch."""
    if op.arg("b") != 0 or op.arg("w") != 0:
        return False
    return (x.offset, x.width, x.head_stride, heads) == (0, *op.named("offset dim heads"))


def _also_when(low: GpuLowering, at: Ref, when: When | None) -> None:
    """Register one more reader of rows that exist already."""
    key = ("made by op", at)  # where it was found last: a cache expanded head by head is read thousands of times
    hint = low._shared.get(key)
    last = hint.target if hint is not None and isinstance(hint.target, int) else len(low.ops)
    for i in (*((last,) if last < len(low.ops) else ()), *range(len(low.ops) - 1, -1, -1)):
        op = low.ops[i]
        if at not in op.args:
            continue
        wanted, formats = op.when, formats_of(op)
        if formats is not None:
            wanted = formats.q8 if op.arg("q8") == at else formats.bf16
        if isinstance(wanted, Wanted):
            wanted.readers.append(when)
            low._shared[key] = Ref(i)
            return
    raise AssertionError("no launch makes these activation rows")
