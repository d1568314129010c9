"""Lowering rules: graph nodes to kernel calls (attention has its own file, `lower_attention.py`).

Numba is never imported here: the sizes that kernels and lowering must agree on are small functions of this module.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ikcli.backends.cpu.lower_recurrent import RULES
from ikcli.backends.cpu.program import CpuLowering, Ref, f32_bits, f64_bits
from ikcli.backends.cpu.tile_modes import (
    MOST_TILES,
    PAIRS_BLOCK,
    PAIRS_PART,
    TILE_ROWS,
    makes_integers,
    rounds_activations,
    tile_bytes,
    tiles_per_thread,
)
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.graph import HeadSlice, Node, RowSpec, Weight
from ikcli.graph.activations import Glu
from ikcli.graph.ops_alibi import Alibi
from ikcli.graph.ops_elements import Activate, Clamp, Gate, Norm, PosScale, Scale, SoftCap
from ikcli.graph.ops_experts import AddId, ExpertProduct, MoeRoute, MoeSort, MoeSum, MoeUpGate, MulMatId, ScaleId
from ikcli.graph.ops_rows import (
    Add,
    Concat,
    ConcatHeads,
    Embed,
    GetRows,
    MulMat,
    MulMatHeads,
    RmsNorm,
    Rope,
    RopeTable,
    SwiGlu,
)
from ikcli.native import isa
from ikcli.native.kernel_cache import KernelKey
from ikcli.quant.formats import row_size

FLOAT_TYPES = (GGMLType.F32, GGMLType.F16, GGMLType.BF16, GGMLType.BF16_R16)
ROW_SLACK = 512  # dots of a partial last step read past the end of an activation row
FLOAT_TILE_BYTES = 512 * 32 * 4


def stored_name(type_: GGMLType, tensor: str = "a tensor") -> str:
    """Name under which the kernels know a weight's type (`kernels/formats.py`); UnsupportedError names the tensor."""
    t = TYPES[type_]
    if t.cpu:
        numbers = (t.block_size, t.type_size, t.row_meta_size, t.rows)
        return ",".join([t.name, t.cpu, t.tile, *map(str, numbers), f"{t.matmul_scale:g}"])
    if type_ in FLOAT_TYPES:
        return t.name
    known = ", ".join(other.name for other in TYPES.values() if other.cpu or other.type in FLOAT_TYPES)
    raise UnsupportedError(f"{tensor} is {t.name}, which has no CPU kernel yet; use a file in {known}")


def activation_kind(type_: GGMLType) -> str:
    """How the kernels of a weight type want activation rows (`kernels/activations.py`)."""
    if type_ in (GGMLType.BF16, GGMLType.BF16_R16) and rounds_activations():
        return "bf16"
    if type_ is GGMLType.F16 and makes_integers():
        return "i16"
    return "f32" if type_ in FLOAT_TYPES else "q8"


def _kind_of_rows(low: CpuLowering, w: Weight, rows: RowSpec) -> str:
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
@RULES.add(Embed, "w by_position")
def _embed(low: CpuLowering, node: Node, op: Embed) -> None:
    w = op.w
    if TYPES[w.type].rows > 1:
        raise UnsupportedError(
            f"{w.name} is {TYPES[w.type].name}, whose rows are interleaved and cannot be looked up one by one; "
            "use a file that keeps it in a plain type"
        )
    args = low.weight(w), row_size(w.type, w.ne0), w.ne0, low.out(node)
    if op.by_position:
        key = KernelKey("embed", "make_embed_positions", (stored_name(w.type, w.name),))
        low.emit(key, node.rows, *args, w.ne1, row_bytes=16 * w.ne0)
    else:
        low.emit(
            KernelKey("embed", "make_embed", (stored_name(w.type, w.name),)), node.rows, *args, row_bytes=16 * w.ne0
        )


@RULES.add(RmsNorm, "x w eps offset n_cols")
def _rms_norm(low: CpuLowering, node: Node, op: RmsNorm) -> None:
    low.emit(KernelKey("basic", "make_rms_norm"), node.rows, low.out(op.x), 4 * op.x.cols, 4 * op.offset,
             low.weight(op.w), low.out(node), node.cols, op.width, f32_bits(op.eps),
             row_bytes=8 * node.cols)  # fmt: skip


@RULES.add(Add, "x y")
def _add(low: CpuLowering, node: Node, op: Add) -> None:
    is_row = isinstance(op.y, Weight)
    other = low.weight(op.y) if isinstance(op.y, Weight) else low.out(op.y)
    low.emit(KernelKey("basic", "make_add"), node.rows, low.out(op.x), other, low.out(node), node.cols, int(is_row),
             row_bytes=12 * node.cols)  # fmt: skip


@RULES.add(Scale, "x factor")
def _scale(low: CpuLowering, node: Node, op: Scale) -> None:
    low.emit(KernelKey("elements", "make_scale"), node.rows, low.out(op.x), low.out(node), node.cols,
             f32_bits(op.factor), row_bytes=8 * node.cols)  # fmt: skip


@RULES.add(PosScale, "x scale length shift")
def _pos_scale(low: CpuLowering, node: Node, op: PosScale) -> None:
    low.emit(KernelKey("elements", "make_pos_scale"), node.rows, low.out(op.x), low.out(node), node.cols,
             f64_bits(op.scale), op.length, op.shift, row_bytes=8 * node.cols)  # fmt: skip


@RULES.add(SoftCap, "x cap")
def _softcap(low: CpuLowering, node: Node, op: SoftCap) -> None:
    low.emit(KernelKey("elements", "make_softcap"), node.rows, low.out(op.x), low.out(node), node.cols,
             f32_bits(op.cap), row_bytes=24 * node.cols)  # fmt: skip


@RULES.add(Gate, "x gate kind")
def _gate(low: CpuLowering, node: Node, op: Gate) -> None:
    low.emit(KernelKey("elements", "make_gate", (op.kind,)), node.rows, low.out(op.x), low.out(op.gate), low.out(node),
             node.cols, op.gate.cols, row_bytes=16 * node.cols)  # fmt: skip


@RULES.add(SwiGlu, "gate up act")
def _swiglu(low: CpuLowering, node: Node, op: SwiGlu) -> None:
    act, more = op.act, (() if op.act.plain else (f32_bits(op.act.limit), f32_bits(op.act.alpha)))
    key = KernelKey("basic", "make_swiglu") if act.plain else KernelKey("glu", "make_glu", _glu_args(act))
    low.emit(key, node.rows, low.out(op.gate), low.out(op.up), low.out(node), node.cols, *more,
             row_bytes=24 * node.cols)  # fmt: skip


def _glu_args(act: Glu) -> tuple[str, int]:
    """Of kernels that depend on the kind of gated activation."""
    return act.kind, int(act.limit > 0)


@RULES.add(Clamp, "x limit")
def _clamp(low: CpuLowering, node: Node, op: Clamp) -> None:
    low.emit(KernelKey("glu", "make_clamp"), node.rows, low.out(op.x), low.out(node), node.cols, f32_bits(op.limit),
             row_bytes=8 * node.cols)  # fmt: skip


@RULES.add(Activate, "x kind")
def _activate(low: CpuLowering, node: Node, op: Activate) -> None:
    low.emit(KernelKey("glu", "make_unary", (op.kind,)), node.rows, low.out(op.x), low.out(node), node.cols,
             row_bytes=16 * node.cols)  # fmt: skip


@RULES.add(Norm, "x w b kind eps width")
def _norm(low: CpuLowering, node: Node, op: Norm) -> None:
    params: list[int | Ref] = []
    for w in (op.w, op.b):
        params += [0, 1] if w is None else [low.weight(w), w.ne0 * w.ne1]
    key = KernelKey("norms", "make_norm", (op.kind, int(op.w is not None), int(op.b is not None)))
    low.emit(key, node.rows, low.out(op.x), *params, low.out(node), node.cols, op.width, f32_bits(op.eps),
             row_bytes=8 * node.cols)  # fmt: skip


@RULES.add(Concat, "parts")
def _concat(low: CpuLowering, node: Node, op: Concat) -> None:
    at = 0
    for part in op.parts:
        low.emit(KernelKey("basic", "make_concat"), node.rows, low.out(part), 4 * part.cols, part.cols,
                 low.out(node) + 4 * at, 4 * node.cols, 1, 0, 0, row_bytes=8 * part.cols)  # fmt: skip
        at += part.cols


@RULES.add(ConcatHeads, "parts n_head")
def _concat_heads(low: CpuLowering, node: Node, op: ConcatHeads) -> None:
    n_head = op.n_head
    width = node.cols // n_head
    at = 0
    for part in op.parts:
        src = part.node
        low.emit(KernelKey("basic", "make_concat"), node.rows, low.out(src) + 4 * part.offset, 4 * src.cols, part.width,
                 low.out(node) + 4 * at, 4 * node.cols, n_head, 4 * part.head_stride, 4 * width,
                 row_bytes=8 * n_head * part.width)  # fmt: skip
        at += part.width


@RULES.add(GetRows, "x")
def _get_rows(low: CpuLowering, node: Node, op: GetRows) -> None:
    low.emit(KernelKey("basic", "make_get_rows"), node.rows, low.out(op.x), low.out(node), node.cols,
             row_bytes=8 * node.cols)  # fmt: skip


@RULES.add(RopeTable, "inv_freq mscale")
def _rope_table(low: CpuLowering, node: Node, op: RopeTable) -> None:
    freqs = np.asarray(op.inv_freq, dtype=np.float64)
    low.emit(KernelKey("basic", "make_rope_table"), node.rows, low.out(node), len(freqs),
             low.constant(freqs.tobytes()), f32_bits(op.mscale), row_bytes=256 * len(freqs))  # fmt: skip


@RULES.add(Alibi, "width slopes")
def _alibi(low: CpuLowering, node: Node, op: Alibi) -> None:
    slopes = low.constant(np.asarray(op.slopes, np.float32).tobytes()) if op.slopes else 0
    low.emit(KernelKey("elements", "make_alibi"), node.rows, low.out(node), op.width, slopes, max(len(op.slopes), 1),
             row_bytes=16 * node.cols)  # fmt: skip


@RULES.add(Rope, "x table n_head head_dim offset neox")
def _rope(low: CpuLowering, node: Node, op: Rope) -> None:
    low.emit(KernelKey("basic", "make_rope"), node.rows, low.out(op.x), low.out(op.table), low.out(node), op.n_head,
             op.head_dim, op.offset, op.n_rot, int(op.neox), row_bytes=16 * node.cols)  # fmt: skip


# --- matrix products --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class InputRows:
    """Input rows of a matmul: address, bytes between rows, bytes between heads."""

    at: Ref
    stride: int
    head_stride: int


def _activations(low: CpuLowering, w: Weight, x: HeadSlice, heads: int) -> InputRows:
    """The input as the weight's kernel wants it: float rows as they are, or converted once per distinct input."""
    src = x.node
    kind = _kind_of_rows(low, w, src.rows)
    if kind == "f32":
        return InputRows(low.out(src) + 4 * x.offset, 4 * src.cols, 4 * x.head_stride)
    row = kind_row_bytes(kind, x.width)

    def convert() -> Ref:
        out = low.buffer(low.rows(src.rows) * heads * row + ROW_SLACK)
        low.emit(KernelKey("activations", "make_convert", (kind,)), src.rows, low.out(src), 4 * src.cols, 4 * x.offset,
                 heads, 4 * x.head_stride, x.width, out, row, row_bytes=heads * (4 * x.width + row))  # fmt: skip
        return out

    at = low.shared((kind, src, x.offset, x.width, x.head_stride, heads), convert)
    return InputRows(at, heads * row, row)


def _matmul(factory: str, w: Weight, *kinds: int | str) -> KernelKey:
    return KernelKey("matmul", factory, (stored_name(w.type, w.name), *kinds))


def _tiles(low: CpuLowering, w: Weight) -> tuple[Ref, int, int]:
    """Scratch for unpacked rows, bytes of a tile, tiles of a thread; UnsupportedError if rows cut a group."""
    t, rows = TYPES[w.type], TYPES[w.type].rows
    if w.row0 % rows or w.ne1 % rows:
        raise UnsupportedError(
            f"{w.name} is {t.name}, whose groups of {rows} rows would be cut; `ik repack --unrepack` the file"
        )
    if w.type in FLOAT_TYPES:
        size, count = FLOAT_TILE_BYTES, 1
    else:
        size, count = tile_bytes(t.tile, w.ne0), tiles_per_thread(t.tile, w.ne0)
    return low.buffer(size * count * low.n_threads), size, count


def _emit_mul_mat(low: CpuLowering, node: Node, w: Weight, x: HeadSlice, heads: int) -> None:
    row = row_size(w.type, w.ne0)
    a = _activations(low, w, x, heads)
    full_rows = w.shape[1] if len(w.shape) > 1 else 1
    low.emit(_matmul("make_mul_mat", w), node.rows, low.weight(w, row), row, w.ne1, w.ne0,
             a.at, a.stride, low.out(node), 4 * node.cols, *_tiles(low, w), low.few_rows, heads, full_rows * row,
             a.head_stride, 4 * w.ne1, row_bytes=heads * w.ne1 * row)  # fmt: skip


@RULES.add(MulMat, "w x")
def _mul_mat(low: CpuLowering, node: Node, op: MulMat) -> None:
    _emit_mul_mat(low, node, op.w, HeadSlice(op.x, 0, op.x.cols, 0), 1)


@RULES.add(MulMatHeads, "w x")
def _mul_mat_heads(low: CpuLowering, node: Node, op: MulMatHeads) -> None:
    _emit_mul_mat(low, node, op.w, op.x, op.w.ne2)


# --- mixture of experts -----------------------------------------------------------------------------------------------
@RULES.add(
    MoeRoute, "logits bias n_used norm scale n_group n_group_used ser", gating=("softmax", "sigmoid")
)  # fmt: skip
def _moe_route(low: CpuLowering, node: Node, op: MoeRoute) -> None:
    fewest, threshold = op.ser or (0, 0.0)
    scratch = 4 * (2 * op.n_expert + op.n_group)
    low.emit(KernelKey("moe", "make_route"), node.rows, low.out(op.logits), low.weight(op.bias) if op.bias else 0,
             low.out(node), op.n_expert, op.n_used, int(op.gating == "softmax"), int(op.norm), f32_bits(op.scale),
             op.n_group, op.n_group_used, max(fewest, 0), f32_bits(threshold), low.buffer(scratch * low.n_threads),
             scratch, row_bytes=16 * (2 + op.n_used) * op.n_expert)  # fmt: skip


@RULES.add(MoeSort, "route n_expert")
def _moe_sort(low: CpuLowering, node: Node, op: MoeSort) -> None:
    out = low.out(node, plan_bytes(low.rows(node.rows), op.n_expert))
    low.emit(KernelKey("moe", "make_sort"), op.route.rows, low.out(op.route), out, op.n_expert, op.n_used,
             row_bytes=1)  # fmt: skip


def _sorted_activations(low: CpuLowering, w: Weight, op: ExpertProduct) -> InputRows:
    """Input rows in expert order."""
    x, plan, n_expert, n_used = op.source, op.plan, op.sort.n_expert, op.sort.n_used
    kind = _kind_of_rows(low, w, x.rows)
    if op.sorted_in:
        return _activations(low, w, HeadSlice(x, 0, x.cols, 0), 1)
    row = kind_row_bytes(kind, x.cols)

    def gather() -> Ref:
        out = low.buffer(low.rows(plan.rows) * row + ROW_SLACK)
        order = low.out(plan) + 8 * (2 + 2 * n_expert)
        low.emit(KernelKey("activations", "make_gather", (kind,)), x.rows, low.out(x), 4 * x.cols, order, n_used,
                 x.cols, out, row, low.out(plan), row_bytes=n_used * (4 * x.cols + row))  # fmt: skip
        return out

    return InputRows(low.shared(("sorted", kind, x, plan), gather), row, 0)


def _emit_by_expert(
    low: CpuLowering,
    node: Node,
    op: ExpertProduct,
    factory: str,
    w: Weight,
    a: InputRows,
    *more: int | Ref,
    kinds: tuple[int | str, ...] = (),
) -> None:
    plan = op.plan
    row = row_size(w.type, w.ne0)
    low.emit(_matmul(factory, w, *kinds), node.rows, low.weight(w), row, w.ne1, w.ne0, a.at,
             a.stride, low.out(node), 4 * node.cols, *_tiles(low, w), low.few_rows, w.ne2, row * w.ne1,
             low.out(plan) + 8, *more)  # fmt: skip
    if op.route.ser:
        low.emit(KernelKey("moe", "make_zero_dropped"), op.sort.route.rows, low.out(node), node.cols, low.out(plan),
                 op.sort.n_used)  # fmt: skip


@RULES.add(MulMatId, "w x plan sorted_in")
def _mul_mat_id(low: CpuLowering, node: Node, op: MulMatId) -> None:
    _emit_by_expert(low, node, op, "make_mul_mat_id", op.w, _sorted_activations(low, op.w, op))


@RULES.add(MoeUpGate, "up gate x plan act")
def _moe_up_gate(low: CpuLowering, node: Node, op: MoeUpGate) -> None:
    a, act = _sorted_activations(low, op.up, op), op.act
    scratch = low.rows(op.x.rows) * MOST_TILES * TILE_ROWS * 4
    more = low.weight(op.gate), low.buffer(scratch * low.n_threads), scratch
    if act.plain:
        _emit_by_expert(low, node, op, "make_up_gate", op.up, a, *more)
    else:
        _emit_by_expert(low, node, op, "make_up_glu", op.up, a, *more, f32_bits(act.limit), f32_bits(act.alpha),
                        kinds=_glu_args(act))  # fmt: skip


@RULES.add(AddId, "x w plan")
def _add_id(low: CpuLowering, node: Node, op: AddId) -> None:
    low.emit(KernelKey("moe", "make_add_id"), op.sort.route.rows, low.out(op.x), low.weight(op.w), low.out(node),
             node.cols, low.out(op.plan), op.sort.n_expert, op.sort.n_used,
             row_bytes=12 * op.sort.n_used * node.cols)  # fmt: skip


@RULES.add(ScaleId, "x by plan")
def _scale_id(low: CpuLowering, node: Node, op: ScaleId) -> None:
    by = low.weight(op.by) if isinstance(op.by, Weight) else low.out(op.by)
    low.emit(KernelKey("moe", "make_scale_id", (isinstance(op.by, Node),)), op.sort.route.rows, low.out(op.x), by,
             low.out(node), node.cols, low.out(op.plan), op.sort.n_expert, op.sort.n_used,
             row_bytes=8 * op.sort.n_used * node.cols)  # fmt: skip


@RULES.add(MoeSum, "y route plan weighted")
def _moe_sum(low: CpuLowering, node: Node, op: MoeSum) -> None:
    low.emit(KernelKey("moe", "make_sum", (op.weighted,)), node.rows, low.out(op.y), low.out(op.route),
             low.out(op.plan), node.cols, op.sort.n_used, op.sort.n_expert, low.out(node),
             row_bytes=4 * (op.sort.n_used + 1) * node.cols)  # fmt: skip
