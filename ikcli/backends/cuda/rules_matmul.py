"""Lower matrix products and embeddings; kernels in `kernels/weights_*.cu`.

There are two kernels per weight type. `mv_*` reads a matrix once for up to 8 activation rows and is batch-invariant.
`mm_*` works on tiles (`matmul_tiles.py`). Both take one matrix, one per head, or (with the tiles of a `moe_sort` plan)
one per expert; activation rows of experts are found through the plan, not gathered. The bucket decides which one runs.
Quantized types take activations of int8 per 32 values, float types float32 as they are: all their products are `exact`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ikcli.backends.cuda.activations import When, activations, format_args
from ikcli.backends.cuda.layouts import max_tiles
from ikcli.backends.cuda.lower import RULES, Arg, Counts, GpuLowering, Ref
from ikcli.backends.cuda.matmul_tiles import PART_BYTES, PART_COLUMNS, Tile, parts_of, tiles_of
from ikcli.backends.cuda.rules_layers import glu_args, plan_layout, zero_dropped
from ikcli.backends.cuda.upload import DeviceRowFormat, device_format, is_float, table_bytes, table_name
from ikcli.errors import UnsupportedError
from ikcli.graph import HeadSlice, Node, RowSpec, Weight
from ikcli.graph.ops_experts import MoeGroups, MoeUpGate, MulMatId, sort_of
from ikcli.graph.ops_rows import Embed, EmbedTypes, MulMat, MulMatHeads

MV_THREADS = EMBED_THREADS = 128  # weights_matvec.cuh
MV_ROWS = 8
FEW_PER_EXPERT = 4  # rows per expert up to which `mv_*` reads fewer bytes per result than `mm_*` needs time
WARPS_PER_SM = 16  # that should have work in a product of one row


@dataclass(frozen=True, slots=True)
class ProductInput:
    """Activation rows: address, bytes between rows and between heads; sorted row p is row order[p] // divisor."""

    at: Ref
    row: int
    head: int
    order: Arg = 0
    divisor: int = 1


@dataclass(frozen=True, slots=True)
class Matrices:
    """Weights of a product: `count` matrices of equal shape (heads; 1 for experts, which the plan chooses)."""

    w: Weight
    fmt: DeviceRowFormat
    count: int

    @property
    def row_bytes(self) -> int:
        return self.fmt.row_bytes(self.w.ne0)

    @property
    def units(self) -> int:
        """Return the blocks of 32 columns, or the columns of float types."""
        return self.w.ne0 if self.fmt.columns == 1 else self.w.ne0 // 32

    def args(self, low: GpuLowering, *more: Arg) -> tuple[Arg, ...]:
        """Return the weight arguments of the kernels."""
        rows = self.w.shape[1] if len(self.w.shape) > 1 else 1
        return (low.weight(self.w, self.row_bytes), *more, self.row_bytes, rows * self.row_bytes,
                np.int32(self.w.ne1), np.int32(self.units))  # fmt: skip


def matrices(w: Weight, count: int) -> Matrices:
    """Return the weights of a product; raise UnsupportedError for types without kernels."""
    return Matrices(w, device_format(w.type, w.name), count)


def table(low: GpuLowering, w: Weight) -> Arg:
    """Return the grid that the kernels of a type read, or 0."""
    found = table_name(w.type)
    return 0 if not found else low.shared(("grid", found), lambda: low.constant(table_bytes(found)))


def split_of(low: GpuLowering, m: Matrices, items: int) -> int:
    """Return log2 of the warps that share two weight rows, so that the product of one row fills the device.

    A negative result means that short rows share a warp. It depends on shapes only, so results are batch-invariant.
    """
    units = m.units if m.fmt.columns > 1 else -(-m.units // (4 if m.fmt.name == "f32" else 8))
    bits = -next((n for n in (3, 2, 1) if units <= 32 >> n), 0)
    while 0 <= bits < 2 and items << bits < WARPS_PER_SM * low.device.n_sm and units > 32 << bits:
        bits += 1
    return bits


_MANY = {"f16": "scaled", "bf16": "split"}  # activations of `mm_*` by the weights' format; else those of `mv_*`


def _input(low: GpuLowering, w: Weight, x: HeadSlice, heads: int, many: When | None = None) -> ProductInput:
    """Return the activations of `mv_*`, or with `many`, the condition under which it runs, of `mm_*`."""
    src, kind = x.node, "q8"
    if is_float(w.type):
        kind = _MANY.get(device_format(w.type).name, "") if many else ""
        if not kind:
            return ProductInput(low.out(src) + 4 * x.offset, 4 * src.cols, 4 * x.head_stride)
    a = activations(low, x, heads, kind, many if kind != "q8" else None)
    return ProductInput(a.at, a.row_bytes, a.head_bytes)


@dataclass(frozen=True, slots=True)
class Few:
    """Condition that a value has few rows."""

    rows: RowSpec
    most: int = MV_ROWS

    def __call__(self, c: Counts) -> bool:
        return c.rows(self.rows) <= self.most


def _dense(low: GpuLowering, node: Node, w: Weight, x: HeadSlice, heads: int) -> None:
    m, a, rows = matrices(w, heads), _input(low, w, x, heads), node.rows
    out = (low.out(node), node.cols, w.ne1)
    tail = (0, 0, 0, np.int32(1), table(low, w))
    many = low.rows(rows) > MV_ROWS
    if not (heads == 1 and _joined(low, node, m, a, many)):
        items = pairs_of(w.ne1)
        bits = split_of(low, m, items * heads)
        low.emit(f"mv_{m.fmt.name}", (_blocks(items, bits), 1, heads), MV_THREADS, 0, low.state, *low.row_args(rows),
                 *m.args(low, 0), a.at, a.row, a.head, *out, *tail, np.int32(bits), *_NO_MORE * 2,
                 when=Few(rows), instead=(f"mv_{m.fmt.name}_one", Few(rows, 1)))  # fmt: skip
    if many:
        a = _input(low, w, x, heads, _not(Few(rows)))
        _tiles(low, node, m, (a.at, a.row, a.head, *out, *tail))


def _tiles(low: GpuLowering, node: Node, m: Matrices, args: tuple[Arg, ...]) -> None:
    """Emit `mm_*` of all rows, and the sum of parts where the tiles alone would not fill the device."""
    rows, n_sm, k, per_row = node.rows, low.device.n_sm, m.w.ne0, 4 * node.cols
    narrow, wide = tiles_of(low.device, m.fmt)

    def tile(c: Counts) -> Tile:
        n = c.rows(rows)
        fills = wide is not None and n > wide.tokens and wide.count(m.w.ne1, n) * m.count >= n_sm
        return wide if wide is not None and fills else narrow

    def parts(c: Counts) -> int:
        t, n = tile(c), max(c.rows(rows), 1)
        return parts_of(t, n_sm, k, t.count(m.w.ne1, n) * m.count, n * per_row) if can_divide else 1

    can_divide = narrow.divisible(n_sm, k, narrow.count(m.w.ne1, 1) * m.count)
    n_bytes = min(PART_BYTES, k // PART_COLUMNS * low.rows(rows) * per_row)
    sums: Arg = low.buffer(n_bytes) if can_divide else 0

    def emit(t: Tile) -> None:
        low.emit(t.kernel, lambda c: (-(-m.w.ne1 // t.rows), -(-c.rows(rows) // t.tokens), m.count * parts(c)),
                 t.threads, t.shared, low.state, *low.row_args(rows), *m.args(low), *args, lambda c: np.int32(parts(c)),
                 sums, lambda c: c.rows(rows) * node.cols,
                 when=lambda c: not Few(rows)(c) and tile(c) is t)  # fmt: skip

    emit(narrow)
    if wide is not None and low.rows(rows) > wide.tokens:
        emit(wide)
    if can_divide:
        low.emit("weights_add_parts", lambda c: (c.rows(rows), -(-node.cols // 256), 1), 256, 0, low.state,
                 *low.row_args(rows), sums, lambda c: np.int32(parts(c)), lambda c: c.rows(rows) * node.cols,
                 low.out(node), np.int32(node.cols), when=lambda c: not Few(rows)(c) and parts(c) > 1)  # fmt: skip


def pairs_of(n_rows: int) -> int:
    """Return the items of `mv_*`: two rows each."""
    return -(-n_rows // 2)


def _blocks(items: int, bits: int) -> int:
    """Return the blocks of four warps."""
    return -(-items // (1 << 2 - bits))


# An absent further matrix of `mv_*`.
_NO_MORE: tuple[Arg, ...] = (0, np.int32(0), 0, 0)


def _joined(low: GpuLowering, node: Node, m: Matrices, a: ProductInput, many: bool) -> bool:
    """Let an earlier `mv_*` of this split with the same input compute this product too; it takes up to three matrices.

    The node keeps its own `mm_*`, if it has one; otherwise the earlier launch is noted as completing it.
    """
    kernel = f"mv_{m.fmt.name}"
    for i in range(low.turn_start, len(low.ops)):
        op = low.ops[i]
        if op.kernel != kernel or op.when != Few(node.rows) or op.named("x row_bytes") != (a.at, m.row_bytes):
            continue
        sizes = [_number(n) for n in op.named("n_rows n_rows1 n_rows2")]
        if sizes[2] or op.arg("tiles") != 0 or not isinstance(op.grid, tuple) or op.grid[2] != 1:
            continue
        j = 2 if sizes[1] else 1
        sizes[j] = m.w.ne1
        bits = split_of(low, m, sum(map(pairs_of, sizes)))
        more: dict[str, Arg] = {f"w{j}": low.weight(m.w, m.row_bytes), f"n_rows{j}": np.int32(m.w.ne1),
                                f"y{j}": low.out(node), f"y{j}_row": node.cols}  # fmt: skip
        op = op.changed(split=np.int32(bits), **more)
        grid = (sum(_blocks(pairs_of(n), bits) for n in sizes), 1, 1)
        low.ops[i] = replace(op, grid=grid, also=op.also if many else (*op.also, node))
        return True
    return False


def _number(arg: Arg) -> int:
    assert isinstance(arg, np.int32)
    return int(arg)


def _not(when: Callable[[Counts], bool]) -> Callable[[Counts], bool]:
    return lambda c: not when(c)


@RULES.add(MulMat, "w x exact")
def _mul_mat(low: GpuLowering, node: Node, op: MulMat) -> None:
    _dense(low, node, op.w, HeadSlice(op.x, 0, op.x.cols, 0), 1)


@RULES.add(MulMatHeads, "w x exact")
def _mul_mat_heads(low: GpuLowering, node: Node, op: MulMatHeads) -> None:
    _dense(low, node, op.w, op.x, op.w.ne2)


# --- mixture of experts -----------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ByExpert:
    """Products over the tiles of a plan."""

    low: GpuLowering
    plan: Node

    @property
    def n_expert(self) -> int:
        """Return the matrices of a weight."""
        return sort_of(self.plan).n_expert

    @property
    def has_many(self) -> bool:
        """Return whether a micro-batch can be too large for `mv_*`."""
        return not self._few(self.low.rows(self.plan.rows))

    def few(self, c: Counts) -> bool:
        """Return whether `mv_*` applies: few rows per expert, or few tokens, whose results must be batch-invariant."""
        return self._few(c.rows(self.plan.rows))

    def one(self, c: Counts) -> bool:
        """Return whether there is one token, which no expert has twice (but several experts may be of one group)."""
        sort = sort_of(self.plan)
        return c.rows(self.plan.rows) <= sort.n_used and not isinstance(sort.route.op, MoeGroups)

    def _few(self, pairs: int) -> bool:
        return pairs <= MV_ROWS * sort_of(self.plan).n_used or pairs <= FEW_PER_EXPERT * self.n_expert

    def input(self, w: Weight, x: Node, sorted_in: bool, many: bool = False) -> ProductInput:
        """Return rows of x for `mv_*` or `mm_*` with w, found through the plan unless they are sorted."""
        low, plan = self.low, self.plan
        a = _input(low, w, HeadSlice(x, 0, x.cols, 0), 1, _not(self.few) if many else None)
        if sorted_in:
            return a
        return ProductInput(a.at, a.row, 0, low.out(plan) + plan_layout(low, plan).order, sort_of(plan).n_used)

    def _tail(self, a: ProductInput, w: Weight, out: Ref, which: int) -> tuple[Arg, ...]:
        """Return activations, results, tiles of the plan and their number, order and divisor, table."""
        low, at, plan = self.low, plan_layout(self.low, self.plan), self.low.out(self.plan)
        return (a.at, a.row, 0, out, w.ne1, 0, plan + at.tiles(which), plan + at.counts + 4 * (1 + which), a.order,
                np.int32(a.divisor), table(low, w))  # fmt: skip

    def matvec(self, w: Weight, gate: Weight | None, a: ProductInput, out: Ref) -> None:
        """Emit `mv_*`: w . a, or with a gate silu(gate . a) * (w . a)."""
        low, m, rows = self.low, matrices(w, 1), self.plan.rows
        items = w.ne1 if gate is not None else pairs_of(w.ne1)
        bits = split_of(low, m, items * sort_of(self.plan).n_used)
        blocks = _blocks(items, bits)
        low.emit(f"mv_{m.fmt.name}", lambda c: (blocks, max_tiles(c.rows(rows), self.n_expert, 0), 1), MV_THREADS, 0,
                 low.state, *low.row_args(rows), *m.args(low, 0 if gate is None else low.weight(gate, m.row_bytes)),
                 *self._tail(a, w, out, 0), np.int32(bits), *_NO_MORE * 2, when=self.few,
                 instead=(f"mv_{m.fmt.name}_one", self.one))  # fmt: skip

    def gemm(self, w: Weight, x: Node, sorted_in: bool, out: Ref) -> None:
        """Emit `mm_*`: w . x for many rows."""
        low, m, rows = self.low, matrices(w, 1), self.plan.rows
        tile, _ = tiles_of(low.device, m.fmt)
        if self.has_many:
            a = self.input(w, x, sorted_in, many=True)
            low.emit(tile.kernel, lambda c: (-(-w.ne1 // tile.rows), max_tiles(c.rows(rows), self.n_expert, 1), 1),
                     tile.threads, tile.shared, low.state, *low.row_args(rows), *m.args(low),
                     *self._tail(a, w, out, 1), np.int32(1), 0, 0, when=_not(self.few))  # fmt: skip


@RULES.add(MulMatId, "w x plan sorted_in")
def _mul_mat_id(low: GpuLowering, node: Node, op: MulMatId) -> None:
    run = ByExpert(low, op.plan)
    a = run.input(op.w, op.x, op.sorted_in)
    run.matvec(op.w, None, a, low.out(node))
    run.gemm(op.w, op.x, op.sorted_in, low.out(node))
    zero_dropped(low, node, op.plan)


@RULES.add(MoeUpGate, "up gate x plan act")
def _moe_up_gate(low: GpuLowering, node: Node, op: MoeUpGate) -> None:
    up, gate, x, plan = op.up, op.gate, op.x, op.plan
    run, out = ByExpert(low, plan), low.out(node)
    a = run.input(up, x, False)
    fused = op.act.plain and device_format(up.type) == device_format(gate.type)
    if fused:
        run.matvec(up, gate, a, out)
    if run.has_many or not fused:
        other = low.buffer(low.rows(node.rows) * node.cols * 4)
        if not fused:
            run.matvec(up, None, a, out)
            run.matvec(gate, None, run.input(gate, x, False), other)
        run.gemm(up, x, False, out)
        run.gemm(gate, x, False, other)
        low.emit("layer_swiglu" if op.act.plain else "layer_glu",
                 lambda c: (c.rows(node.rows), -(-node.cols // 1024), 1), 256, 0, low.state, *low.row_args(node.rows),
                 other, out, out, np.int32(node.cols), *glu_args(op.act), *format_args(),
                 when=_not(run.few) if fused else None)  # fmt: skip
    zero_dropped(low, node, plan)


# --- embeddings -------------------------------------------------------------------------------------------------------
@RULES.add(EmbedTypes, "w sep")
def _embed_types(low: GpuLowering, node: Node, op: EmbedTypes) -> None:
    raise UnsupportedError(f"{node.name}: the CUDA backend has no {op.name}; use -ngl 0")


@RULES.add(Embed, "w")
def _embed(low: GpuLowering, node: Node, op: Embed) -> None:
    m = matrices(op.w, 1)
    low.emit(f"embed_{m.fmt.name}", lambda c: c.rows(node.rows), EMBED_THREADS, 0, low.state, low.weight(m.w),
             m.row_bytes, np.int32(m.units), low.out(node), table(low, m.w))  # fmt: skip
