"""Lowering rules: graph nodes to kernel calls (attention has its own file, `lower_attention.py`).

Numba is never imported here: the sizes that kernels and lowering must agree on are small functions of this module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ikcli.backends.cpu import lower_attention
from ikcli.backends.cpu.program import Lowering, Ref, f32_bits
from ikcli.backends.cpu.tile_modes import (
    MODES,
    MOST_TILES,
    PAIRS_BLOCK,
    PAIRS_PART,
    TILE_ROWS,
    makes_integers,
    rounds_activations,
    tile_bytes,
    tiles_per_thread,
)
from ikcli.backends.lowering import as_node, as_weight
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.graph import HeadSlice, Node, Rows, RowSpec, Weight
from ikcli.native import isa
from ikcli.native.kernel_cache import KernelKey
from ikcli.quant.formats import get_format, row_size

FLOAT_TYPES = (GGMLType.F32, GGMLType.F16, GGMLType.BF16, GGMLType.BF16_R16)
ROW_SLACK = 512  # dots of a partial last step read past the end of an activation row
FLOAT_TILE_BYTES = 512 * 32 * 4
RULES: dict[str, Callable[[Lowering, Node], None]] = dict(lower_attention.RULES)


def rule(fn: Callable[[Lowering, Node], None]) -> Callable[[Lowering, Node], None]:
    """Register a lowering rule under its function name."""
    RULES[fn.__name__.strip("_")] = fn
    return fn


def type_name(w: Weight) -> str:
    """Name under which the kernels know a weight's type."""
    name = get_format(w.type).name
    if w.type in FLOAT_TYPES or name in MODES:
        return name
    known = ", ".join([*(get_format(t).name for t in FLOAT_TYPES), *MODES])
    raise UnsupportedError(f"{w.name} is {name}, which has no CPU kernel yet; use a file in {known}")


def activation_kind(type_: GGMLType) -> str:
    """How the kernels of a weight type want activation rows (`kernels/activations.py`)."""
    if type_ in (GGMLType.BF16, GGMLType.BF16_R16) and rounds_activations():
        return "bf16"
    if type_ is GGMLType.F16 and makes_integers():
        return "i16"
    return "f32" if type_ in FLOAT_TYPES else "q8"


def _kind_of_rows(low: Lowering, w: Weight, rows: RowSpec) -> str:
    """activation_kind, but that rows for generation, which will never be many, need no integers."""
    kind = activation_kind(w.type)
    return "f32" if kind == "i16" and low.independent and low.rows(rows) <= low.few_rows else kind


def kind_row_bytes(kind: str, k: int) -> int:
    """Bytes of an activation row of k values."""
    if kind == "f32":
        return 4 * k
    if kind == "q8":
        return activation_row_bytes(k)
    whole = -(-k // PAIRS_BLOCK) * PAIRS_BLOCK
    lines = -(-2 * k // 64) if kind == "bf16" else 6 * whole // 64 + -(-k // PAIRS_PART)
    return 64 * (lines | 1)  # an odd number of cache lines, so that rows do not share sets


def activation_row_bytes(k: int) -> int:
    """Bytes of a quantized activation row (kernels/activations.py)."""
    return -(-(k + 28 * (k // 32)) // 64) * 64 + -(-k // 256) * (256 + 64 * isa.current().plain_avx2)


def plan_bytes(n_pairs: int, n_expert: int) -> int:
    """Bytes of a moe_sort plan (kernels/moe.py)."""
    return 8 * (2 + 2 * n_expert + 2 * n_pairs)


# --- rows and elements ------------------------------------------------------------------------------------------------
@rule
def _embed(low: Lowering, node: Node) -> None:
    w = as_weight(node.inputs[0])
    if get_format(w.type).rows > 1:
        raise UnsupportedError(
            f"{w.name} is {get_format(w.type).name}, whose rows are interleaved and cannot be looked up one by one; "
            "use a file that keeps it in a plain type"
        )
    key = KernelKey("embed", "make_embed", (type_name(w),))
    low.emit(key, node.rows, low.weight(w), row_size(w.type, w.ne0), w.ne0, low.out(node),
             row_bytes=16 * w.ne0)  # fmt: skip


@rule
def _rms_norm(low: Lowering, node: Node) -> None:
    x, w = as_node(node.inputs[0]), as_weight(node.inputs[1])
    a = node.attrs
    low.emit(KernelKey("basic", "make_rms_norm"), node.rows, low.out(x), 4 * x.cols, 4 * a["offset"], low.weight(w),
             low.out(node), node.cols, a["width"], f32_bits(a["eps"]), row_bytes=8 * node.cols)  # fmt: skip


@rule
def _add(low: Lowering, node: Node) -> None:
    x, y = as_node(node.inputs[0]), node.inputs[1]
    is_row = isinstance(y, Weight)
    other = low.weight(y) if isinstance(y, Weight) else low.out(as_node(y))
    low.emit(KernelKey("basic", "make_add"), node.rows, low.out(x), other, low.out(node), node.cols, int(is_row),
             row_bytes=12 * node.cols)  # fmt: skip


@rule
def _swiglu(low: Lowering, node: Node) -> None:
    gate, up = as_node(node.inputs[0]), as_node(node.inputs[1])
    low.emit(KernelKey("basic", "make_swiglu"), node.rows, low.out(gate), low.out(up), low.out(node), node.cols,
             row_bytes=24 * node.cols)  # fmt: skip


@rule
def _concat(low: Lowering, node: Node) -> None:
    at = 0
    for part in map(as_node, node.inputs):
        low.emit(KernelKey("basic", "make_concat"), node.rows, low.out(part), 4 * part.cols, part.cols,
                 low.out(node) + 4 * at, 4 * node.cols, 1, 0, 0, row_bytes=8 * part.cols)  # fmt: skip
        at += part.cols


@rule
def _concat_heads(low: Lowering, node: Node) -> None:
    n_head = node.attrs["n_head"]
    width = node.cols // n_head
    at = 0
    for part in node.attrs["parts"]:
        src = as_node(part.source)
        low.emit(KernelKey("basic", "make_concat"), node.rows, low.out(src) + 4 * part.offset, 4 * src.cols, part.width,
                 low.out(node) + 4 * at, 4 * node.cols, n_head, 4 * part.head_stride, 4 * width,
                 row_bytes=8 * n_head * part.width)  # fmt: skip
        at += part.width


@rule
def _get_rows(low: Lowering, node: Node) -> None:
    low.emit(KernelKey("basic", "make_get_rows"), node.rows, low.out(as_node(node.inputs[0])), low.out(node), node.cols,
             row_bytes=8 * node.cols)  # fmt: skip


@rule
def _rope_table(low: Lowering, node: Node) -> None:
    freqs = np.asarray(node.attrs["inv_freq"], dtype=np.float64)
    low.emit(KernelKey("basic", "make_rope_table"), node.rows, low.out(node), len(freqs),
             low.constant(freqs.tobytes()), f32_bits(node.attrs["mscale"]), row_bytes=256 * len(freqs))  # fmt: skip


@rule
def _rope(low: Lowering, node: Node) -> None:
    x, table, a = as_node(node.inputs[0]), as_node(node.inputs[1]), node.attrs
    low.emit(KernelKey("basic", "make_rope"), node.rows, low.out(x), low.out(table), low.out(node), a["n_head"],
             a["head_dim"], a["offset"], a["n_rot"], int(a["neox"]), row_bytes=16 * node.cols)  # fmt: skip


# --- matrix products --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Activations:
    """Input rows of a matmul: address, bytes between rows, bytes between heads."""

    at: Ref
    stride: int
    head_stride: int


def _activations(low: Lowering, w: Weight, x: HeadSlice, heads: int) -> Activations:
    """The input as the weight's kernel wants it: float rows as they are, or converted once per distinct input."""
    src = as_node(x.source)
    kind = _kind_of_rows(low, w, src.rows)
    if kind == "f32":
        return Activations(low.out(src) + 4 * x.offset, 4 * src.cols, 4 * x.head_stride)
    row = kind_row_bytes(kind, x.width)

    def convert() -> Ref:
        out = low.buffer(low.rows(src.rows) * heads * row + ROW_SLACK)
        low.emit(KernelKey("activations", "make_convert", (kind,)), src.rows, low.out(src), 4 * src.cols, 4 * x.offset,
                 heads, 4 * x.head_stride, x.width, out, row, row_bytes=heads * (4 * x.width + row))  # fmt: skip
        return out

    at = low.shared((kind, src, x.offset, x.width, x.head_stride, heads), convert)
    return Activations(at, heads * row, row)


def _tiles(low: Lowering, w: Weight) -> tuple[Ref, int, int]:
    """Scratch for unpacked rows, bytes of a tile, tiles of a thread; UnsupportedError if rows cut a group."""
    rows = get_format(w.type).rows
    if w.row0 % rows or w.ne1 % rows:
        raise UnsupportedError(
            f"{w.name} is {type_name(w)}, whose groups of {rows} rows would be cut; `ik repack --unrepack` the file"
        )
    if w.type in FLOAT_TYPES:
        size, count = FLOAT_TILE_BYTES, 1
    else:
        size, count = tile_bytes(type_name(w), w.ne0), tiles_per_thread(type_name(w), w.ne0)
    return low.buffer(size * count * low.n_threads), size, count


def _emit_mul_mat(low: Lowering, node: Node, w: Weight, x: HeadSlice, heads: int) -> None:
    row = row_size(w.type, w.ne0)
    a = _activations(low, w, x, heads)
    full_rows = w.shape[1] if len(w.shape) > 1 else 1
    low.emit(KernelKey("matmul", "make_mul_mat", (type_name(w),)), node.rows, low.weight(w, row), row, w.ne1, w.ne0,
             a.at, a.stride, low.out(node), 4 * node.cols, *_tiles(low, w), low.few_rows, heads, full_rows * row,
             a.head_stride, 4 * w.ne1, row_bytes=heads * w.ne1 * row)  # fmt: skip


@rule
def _mul_mat(low: Lowering, node: Node) -> None:
    w, x = as_weight(node.inputs[0]), as_node(node.inputs[1])
    _emit_mul_mat(low, node, w, HeadSlice(x, 0, x.cols, 0), 1)


@rule
def _mul_mat_heads(low: Lowering, node: Node) -> None:
    w = as_weight(node.inputs[0])
    _emit_mul_mat(low, node, w, node.attrs["x"], w.ne2)


# --- mixture of experts -----------------------------------------------------------------------------------------------
@rule
def _moe_route(low: Lowering, node: Node) -> None:
    logits, bias, a = as_node(node.inputs[0]), node.inputs[1], node.attrs
    fewest, threshold = a["ser"] or (0, 0.0)
    scratch = 4 * (2 * a["n_expert"] + a["n_group"])
    low.emit(KernelKey("moe", "make_route"), node.rows, low.out(logits),
             low.weight(bias) if isinstance(bias, Weight) else 0, low.out(node), a["n_expert"], a["n_used"],
             int(a["gating"] == "softmax"), int(a["norm"]), f32_bits(a["scale"]), a["n_group"], a["n_group_used"],
             max(fewest, 0), f32_bits(threshold), low.buffer(scratch * low.n_threads), scratch,
             row_bytes=16 * (2 + a["n_used"]) * a["n_expert"])  # fmt: skip


@rule
def _moe_sort(low: Lowering, node: Node) -> None:
    route, n_expert, n_used = as_node(node.inputs[0]), node.attrs["n_expert"], node.attrs["n_used"]
    out = low.out(node, plan_bytes(low.rows(node.rows), n_expert))
    low.emit(KernelKey("moe", "make_sort"), route.rows, low.out(route), out, n_expert, n_used,
             row_bytes=1)  # fmt: skip


def _sorted_activations(low: Lowering, w: Weight, x: Node, plan: Node, sorted_in: bool) -> Activations:
    """Input rows in expert order."""
    n_expert, n_used = plan.attrs["n_expert"], plan.attrs["n_used"]
    kind = _kind_of_rows(low, w, x.rows)
    if sorted_in:
        return _activations(low, w, HeadSlice(x, 0, x.cols, 0), 1)
    row = kind_row_bytes(kind, x.cols)

    def gather() -> Ref:
        out = low.buffer(low.rows(plan.rows) * row + ROW_SLACK)
        order = low.out(plan) + 8 * (2 + 2 * n_expert)
        low.emit(KernelKey("activations", "make_gather", (kind,)), x.rows, low.out(x), 4 * x.cols, order, n_used,
                 x.cols, out, row, low.out(plan), row_bytes=n_used * (4 * x.cols + row))  # fmt: skip
        return out

    return Activations(low.shared(("sorted", kind, x, plan), gather), row, 0)


def _emit_by_expert(low: Lowering, node: Node, factory: str, w: Weight, a: Activations, *more: int | Ref) -> None:
    plan = as_node(node.inputs[-1])
    row = row_size(w.type, w.ne0)
    low.emit(KernelKey("matmul", factory, (type_name(w),)), node.rows, low.weight(w), row, w.ne1, w.ne0, a.at, a.stride,
             low.out(node), 4 * node.cols, *_tiles(low, w), low.few_rows, w.ne2, row * w.ne1, low.out(plan) + 8,
             *more)  # fmt: skip
    if as_node(plan.inputs[0]).attrs["ser"]:
        route = as_node(plan.inputs[0])
        low.emit(KernelKey("moe", "make_zero_dropped"), route.rows, low.out(node), node.cols, low.out(plan),
                 plan.attrs["n_used"])  # fmt: skip


@rule
def _mul_mat_id(low: Lowering, node: Node) -> None:
    w, x, plan = as_weight(node.inputs[0]), as_node(node.inputs[1]), as_node(node.inputs[2])
    a = _sorted_activations(low, w, x, plan, node.attrs["sorted_in"])
    _emit_by_expert(low, node, "make_mul_mat_id", w, a)


@rule
def _moe_up_gate(low: Lowering, node: Node) -> None:
    up, gate = as_weight(node.inputs[0]), as_weight(node.inputs[1])
    x, plan = as_node(node.inputs[2]), as_node(node.inputs[3])
    a = _sorted_activations(low, up, x, plan, False)
    scratch = low.rows(x.rows) * MOST_TILES * TILE_ROWS * 4
    _emit_by_expert(low, node, "make_up_gate", up, a, low.weight(gate), low.buffer(scratch * low.n_threads), scratch)


@rule
def _moe_sum(low: Lowering, node: Node) -> None:
    y, route, plan = (as_node(x) for x in node.inputs)
    low.emit(KernelKey("moe", "make_sum"), node.rows, low.out(y), low.out(route), low.out(plan), node.cols,
             plan.attrs["n_used"], plan.attrs["n_expert"], low.out(node),
             row_bytes=4 * (plan.attrs["n_used"] + 1) * node.cols)  # fmt: skip


def max_rows(n_tokens: int, n_outputs: int, n_cells: int) -> dict[Rows, int]:
    """Row limits of a program."""
    return {Rows.TOKENS: n_tokens, Rows.OUTPUTS: n_outputs, Rows.KV: n_cells}
