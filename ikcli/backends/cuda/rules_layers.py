"""Lower every op that is neither attention nor a matrix product; kernels in `kernels/layer_*.cu`.

Every node is computed and stored, but several may share a launch: sums with the norm that follows, norms of heads with
their rotation, queries with keys (`merging.py`). At generation a launch costs more than the data it moves.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ikcli.backends.cuda.activations import (
    PER_BLOCK,
    THREADS,
    When,
    activations,
    format_args,
    parts_of,
    row_grid,
)
from ikcli.backends.cuda.layouts import PlanLayout
from ikcli.backends.cuda.lower import RULES, Arg, GpuLaunch, GpuLowering, Grid, Ref
from ikcli.backends.cuda.merging import merged_heads, merged_latent, merged_norm, norm_threads
from ikcli.backends.cuda.upload import device_row_bytes
from ikcli.errors import UnsupportedError
from ikcli.graph import HeadSlice, Node, RowSpec, Weight
from ikcli.graph.activations import GATED, Glu
from ikcli.graph.ops_alibi import Alibi
from ikcli.graph.ops_elements import Activate, Clamp, Gate, Norm, PosScale, Scale, SoftCap
from ikcli.graph.ops_experts import (
    GATINGS,
    AddId,
    MoeGroups,
    MoeResident,
    MoeRoute,
    MoeSort,
    MoeSum,
    ScaleId,
    route_of,
    sort_of,
)
from ikcli.graph.ops_media import MeanRows, MergeRows
from ikcli.graph.ops_rows import Add, Concat, ConcatHeads, GetRows, Hadamard, RmsNorm, Rope, RopeTable, SwiGlu

__all__ = ["activations", "plan_layout", "zero_dropped"]

FEW_TOKENS = 16  # rows that one block routes and sorts, a warp each
MAX_EXPERTS, MAX_USED, MAX_GROUPS = 1023, 32, 32  # layer_moe.cu
MANY_EXPERTS = 512  # more take kernels with further experts per lane
MAX_PAIRS = 1 << 18
MAX_HADAMARD = 12288  # floats of a head in 48 KB of shared memory


def _int(x: int) -> np.int32:
    return np.int32(x)


def _f32(x: float) -> np.float32:
    return np.float32(x)


def _warps(spec: RowSpec, per_row: int, per_block: int) -> Grid:
    """Return the grid of one warp per item, per_row of them in a row."""
    return lambda c: parts_of(c.rows(spec) * per_row, per_block)


def _emit_spans(low: GpuLowering, node: Node, kernel: str, *args: Arg) -> None:
    """Emit a kernel whose blocks compute PER_BLOCK columns of a row each."""
    grid = row_grid(node.rows, parts_of(node.cols, PER_BLOCK))
    low.emit(kernel, grid, THREADS, 0, low.state, *low.row_args(node.rows), *args)


# --- rows and elements ------------------------------------------------------------------------------------------------
@RULES.add(RmsNorm, "x w eps offset n_cols")
def _rms_norm(low: GpuLowering, node: Node, op: RmsNorm) -> None:
    x, w, width, groups = op.x, op.w, op.width, node.cols // op.width
    if merged_norm(low, node, op):
        return
    src = low.out(x) + 4 * op.offset
    if groups == 1:
        low.emit("layer_norm_rows", row_grid(node.rows), norm_threads(width), 0, low.state, *low.row_args(node.rows),
                 src, x.cols, 0, 0, 0, 0, low.weight(w), low.out(node), _int(width), _f32(op.eps),
                 *format_args())  # fmt: skip
    else:
        low.emit("layer_norm_groups", _warps(node.rows, groups, 4), 128, 0, low.state, *low.row_args(node.rows), src,
                 x.cols, low.weight(w), low.out(node), _int(groups), _int(width), _f32(op.eps))  # fmt: skip


@RULES.add(Add, "x y")
def _add(low: GpuLowering, node: Node, op: Add) -> None:
    x, y = op.x, op.y
    other, y_cols = (low.weight(y), 0) if isinstance(y, Weight) else (low.out(y), node.cols)
    _emit_spans(low, node, "layer_add", low.out(x), other, y_cols, low.out(node), _int(node.cols))


@RULES.add(Scale, "x factor")
def _scale(low: GpuLowering, node: Node, op: Scale) -> None:
    _emit_spans(low, node, "layer_scale", low.out(op.x), low.out(node), _int(node.cols), _f32(op.factor))


@RULES.add(PosScale, "x scale length shift")
def _pos_scale(low: GpuLowering, node: Node, op: PosScale) -> None:
    _emit_spans(low, node, "layer_pos_scale", low.out(op.x), low.out(node), _int(node.cols), _f32(op.scale),
                _int(op.length), _int(op.shift))  # fmt: skip


@RULES.add(SoftCap, "x cap")
def _softcap(low: GpuLowering, node: Node, op: SoftCap) -> None:
    _emit_spans(low, node, "layer_softcap", low.out(op.x), low.out(node), _int(node.cols), _f32(op.cap))


@RULES.add(Gate, "x gate kind")
def _gate(low: GpuLowering, node: Node, op: Gate) -> None:
    _emit_spans(low, node, "layer_gate", low.out(op.x), low.out(op.gate), low.out(node), _int(node.cols),
                _int(node.cols // op.gate.cols), _int(("sigmoid", "softplus", "product").index(op.kind)))  # fmt: skip


@RULES.add(SwiGlu, "gate up act")
def _swiglu(low: GpuLowering, node: Node, op: SwiGlu) -> None:
    kernel = "layer_swiglu" if op.act.plain else "layer_glu"
    _emit_spans(low, node, kernel, low.out(op.gate), low.out(op.up), low.out(node), _int(node.cols),
                *glu_args(op.act), *format_args())  # fmt: skip


def glu_args(act: Glu) -> tuple[Arg, ...]:
    """Return the arguments of layer_glu for an activation; layer_swiglu needs none."""
    return () if act.plain else (_int(GATED.index(act.kind)), _f32(act.limit), _f32(act.alpha))


@RULES.add(Clamp, "x limit")
def _clamp(low: GpuLowering, node: Node, op: Clamp) -> None:
    _emit_spans(low, node, "layer_clamp", low.out(op.x), low.out(node), _int(node.cols), _f32(op.limit))


@RULES.add(Activate, "x kind")
def _activate(low: GpuLowering, node: Node, op: Activate) -> None:
    _emit_spans(low, node, "layer_glu", low.out(op.x), 0, low.out(node), _int(node.cols), _int(GATED.index(op.kind)),
                _f32(0), _f32(0), *format_args())  # fmt: skip


def _row_floats(w: Weight) -> int:
    """Return the values between rows of a float32 weight on the device."""
    return device_row_bytes(w.type, w.ne0) // 4


_NORMS = ("layer", "rms", "l2", "none")


@RULES.add(Norm, "x w b eps width kind")
def _norm(low: GpuLowering, node: Node, op: Norm) -> None:
    args: list[Arg] = []
    for w in (op.w, op.b):
        if w is None:
            args += [0, _int(1), _int(0)]
        else:
            rows, stride = (w.ne1, _row_floats(w)) if w.ne0 == op.width else (w.ne0 // op.width, op.width)
            args += [low.weight(w), _int(rows), _int(stride)]
    low.emit("layer_norm_any", row_grid(node.rows, node.cols // op.width), norm_threads(op.width), 0, low.state,
             *low.row_args(node.rows), low.out(op.x), *args, low.out(node), _int(node.cols), _int(op.width),
             _f32(op.eps), _int(_NORMS.index(op.kind)))  # fmt: skip


@RULES.add(Concat, "parts")
def _concat(low: GpuLowering, node: Node, op: Concat) -> None:
    _concat_slices(low, node, [HeadSlice(x, 0, x.cols, 0) for x in op.parts], 1)


@RULES.add(ConcatHeads, "parts n_head")
def _concat_heads(low: GpuLowering, node: Node, op: ConcatHeads) -> None:
    if not merged_latent(low, node, op):
        _concat_slices(low, node, list(op.parts), op.n_head)


def _concat_slices(low: GpuLowering, node: Node, parts: list[HeadSlice], heads: int) -> None:
    """Concatenate slices, two parts per launch."""
    out_head = node.cols // heads
    at = 0
    while parts:
        pair, parts = parts[:2], parts[2:]
        sources: list[Arg] = []
        sizes = [at, out_head]
        for part in pair:
            src = part.node
            sources += [low.out(src) + 4 * part.offset, src.cols, _int(part.head_stride), _int(part.width)]
            sizes += [part.offset, src.cols, part.head_stride, part.width]
        width = sum(part.width for part in pair)
        unit = 4 if all(n % 4 == 0 for n in sizes) else 1
        none = [sources[0], 0, _int(0), _int(0)] if len(pair) == 1 else []
        low.emit("layer_concat", row_grid(node.rows, parts_of(heads * width, unit * THREADS)), THREADS, 0, low.state,
                 *low.row_args(node.rows), *sources, *none, low.out(node) + 4 * at, node.cols, _int(out_head),
                 _int(heads), _int(unit))  # fmt: skip
        at += width


@RULES.add(GetRows, "x")
def _get_rows(low: GpuLowering, node: Node, op: GetRows) -> None:
    _emit_spans(low, node, "layer_get_rows", low.out(op.x), low.out(node), _int(node.cols))


@RULES.add(MergeRows, "x n")
def _merge_rows(low: GpuLowering, node: Node, op: MergeRows) -> None:
    """Copy: rows that follow each other are rows of n times as many columns already."""
    n, unit = node.cols, 4 if node.cols % 4 == 0 else 1
    none: tuple[Arg, ...] = (low.out(op.x), 0, _int(0), _int(0))
    low.emit("layer_concat", row_grid(node.rows, parts_of(n, unit * THREADS)), THREADS, 0, low.state,
             *low.row_args(node.rows), low.out(op.x), n, _int(0), _int(n), *none, low.out(node), n, _int(n), _int(1),
             _int(unit))  # fmt: skip


@RULES.add(MeanRows, "x n")
def _mean_rows(low: GpuLowering, node: Node, op: MeanRows) -> None:
    _emit_spans(low, node, "layer_mean_rows", low.out(op.x), low.out(node), _int(node.cols), _int(op.n))


# --- heads ------------------------------------------------------------------------------------------------------------
@RULES.add(RopeTable, "inv_freq mscale lag")
def _rope_table(low: GpuLowering, node: Node, op: RopeTable) -> None:
    freqs = np.asarray(op.inv_freq, dtype=np.float64)
    low.emit("layer_rope_table", lambda c: parts_of(c.n_tokens * len(freqs), 128), 128, 0, low.state, low.out(node),
             low.constant(freqs.tobytes()), _int(len(freqs)), _f32(op.mscale), _int(op.lag))  # fmt: skip


@RULES.add(Alibi, "width slopes")
def _alibi(low: GpuLowering, node: Node, op: Alibi) -> None:
    slopes = low.constant(np.asarray(op.slopes, np.float32).tobytes()) if op.slopes else 0
    low.emit("layer_alibi", row_grid(node.rows, max(len(op.slopes), 1)), 32, 0, low.state, *low.row_args(node.rows),
             slopes, low.out(node), _int(op.width))  # fmt: skip


@RULES.add(Rope, "x table n_head head_dim offset neox")
def _rope(low: GpuLowering, node: Node, op: Rope) -> None:
    merged_heads(low, node, op)


@RULES.add(Hadamard, "x n_head head_dim offset blocks")
def _hadamard(low: GpuLowering, node: Node, op: Hadamard) -> None:
    heads, dim, sizes = op.n_head, op.head_dim, op.blocks
    if dim > MAX_HADAMARD or len(sizes) > 15:
        raise UnsupportedError(
            f"{node.name}: heads of {dim} columns in {len(sizes)} blocks are too large to be transformed on the GPU; "
            "turn off -khad and -vhad"
        )
    blocks = sum((n.bit_length() - 1) << 4 * i for i, n in enumerate(sizes))
    warps = max(1, min(4, MAX_HADAMARD // dim))
    low.emit("layer_hadamard", _warps(node.rows, heads, warps), 32 * warps, 4 * dim * warps, low.state,
             *low.row_args(node.rows), low.out(op.x), low.out(node), _int(heads), _int(dim), _int(op.offset), blocks,
             _int(len(sizes)))  # fmt: skip


# --- mixture of experts -----------------------------------------------------------------------------------------------
def plan_layout(low: GpuLowering, plan: Node) -> PlanLayout:
    """Return the offsets of a moe_sort node's sections behind `low.out(plan)`."""
    return PlanLayout(low.rows(plan.rows), sort_of(plan).n_expert)


@RULES.add(MoeRoute, "logits bias n_used norm scale n_group n_group_used ser", gating=GATINGS)
def _moe_route(low: GpuLowering, node: Node, op: MoeRoute) -> None:
    n, n_used, n_group = op.n_expert, op.n_used, op.n_group
    if n > MAX_EXPERTS or n_used > MAX_USED or n_group > MAX_GROUPS:
        raise UnsupportedError(
            f"{node.name}: routing to {n_used} of {n} experts in {n_group} groups is more than the GPU kernels take "
            f"({MAX_USED} of {MAX_EXPERTS}, {MAX_GROUPS} groups); run this model without -ngl"
        )
    fewest, threshold = op.ser or (0, 0.0)
    kernel = "layer_moe_route_wide" if n > MANY_EXPERTS else "layer_moe_route"
    low.emit(kernel, _warps(node.rows, 1, 4), 128, _scores_bytes(op, 4), low.state,
             *low.row_args(node.rows), low.out(op.logits), low.weight(op.bias) if op.bias else 0, low.out(node),
             _int(n), _int(n_used), _int(GATINGS.index(op.gating)), _int(op.norm), _f32(op.scale), _int(n_group),
             _int(op.n_group_used), _int(max(fewest, 0)), _f32(threshold))  # fmt: skip


def _scores_bytes(route: MoeRoute, warps: int) -> int:
    """Return the shared memory of routing: probabilities by expert, and scores to compare groups."""
    return 4 * warps * route.n_expert * (2 if route.n_group > 1 else 1)


@RULES.add(MoeGroups, "route size")
def _moe_groups(low: GpuLowering, node: Node, op: MoeGroups) -> None:
    low.emit("layer_moe_groups", row_grid(node.rows), 32, 0, low.state, *low.row_args(node.rows), low.out(op.route),
             low.out(node), _int(op.n_used), _int(op.size))  # fmt: skip


@RULES.add(MoeResident, "route table n_slots uses")
def _moe_resident(low: GpuLowering, node: Node, op: MoeResident) -> None:
    raise UnsupportedError(f"{node.name}: the table of slots is in RAM, so the CPU computes {op.name}")


@RULES.add(MoeSort, "route n_expert")
def _moe_sort(low: GpuLowering, node: Node, op: MoeSort) -> None:
    route, n_expert, n_used = op.route, op.n_expert, op.n_used
    at = plan_layout(low, node)
    if at.n_pairs > MAX_PAIRS:
        raise UnsupportedError(f"{node.name}: {at.n_pairs} pairs of token and expert are too many; lower -ub")
    out = low.out(node, at.n_bytes)
    sections = [out, out + at.position, out + at.offsets, out + at.counts, out + at.tiles(0), out + at.tiles(1)]
    when = _few_in_one_block(low, route, sections)
    warps = 16 if 256 < n_expert <= MANY_EXPERTS else 32
    low.emit("layer_moe_sort", 1, 32 * warps, _sort_bytes(n_expert, warps), low.state, *low.row_args(route.rows),
             low.out(route), *sections, _int(n_expert), _int(n_used), when=when)  # fmt: skip


def _few_in_one_block(low: GpuLowering, route: Node, sections: list[Ref]) -> When | None:
    """Let one block route and sort few rows, if routing was the last launch.

    Returns the condition under which sorting is still to be done.
    """
    last = low.ops[-1] if len(low.ops) > low.turn_start else None
    if last is None or last.node is not route or last.kernel != "layer_moe_route":
        return None
    op = route.op
    assert isinstance(op, MoeRoute)
    n_expert, spec = op.n_expert, route.rows
    shared = max(_scores_bytes(op, FEW_TOKENS), _sort_bytes(n_expert, FEW_TOKENS))
    low.ops[-1] = replace(last, when=lambda c: c.rows(spec) > FEW_TOKENS)
    low.ops.append(GpuLaunch("layer_moe_route_sort", 1, 32 * FEW_TOKENS, shared, (*last.args, *sections), route,
                      lambda c: c.rows(spec) <= FEW_TOKENS))  # fmt: skip
    return lambda c: c.rows(spec) > FEW_TOKENS


def _sort_bytes(n_expert: int, warps: int) -> int:
    """Return the shared memory of sorting; with many experts only some warps count."""
    warps = warps if n_expert <= MANY_EXPERTS else 8
    return 4 * ((warps + 1) * (n_expert + 1) + 33)


@RULES.add(ScaleId, "x by plan")
def _scale_id(low: GpuLowering, node: Node, op: ScaleId) -> None:
    order = low.out(op.plan) + plan_layout(low, op.plan).order
    by, n_used = (low.weight(op.by), 0) if isinstance(op.by, Weight) else (low.out(op.by), op.sort.n_used)
    _emit_spans(low, node, "layer_scale_id", low.out(op.x), by, order, low.out(node), _int(node.cols), _int(n_used))


@RULES.add(MoeSum, "y route plan weighted")
def _moe_sum(low: GpuLowering, node: Node, op: MoeSum) -> None:
    _emit_spans(low, node, "layer_moe_sum", low.out(op.y), low.out(op.route) if op.weighted else 0,
                low.out(op.plan) + plan_layout(low, op.plan).position, low.out(node), _int(node.cols),
                _int(op.sort.n_used))  # fmt: skip


@RULES.add(AddId, "x w plan")
def _add_id(low: GpuLowering, node: Node, op: AddId) -> None:
    order = low.out(op.plan) + plan_layout(low, op.plan).order
    _emit_spans(low, node, "layer_add_id", low.out(op.x), low.weight(op.w), _row_floats(op.w), order, low.out(node),
                _int(node.cols))  # fmt: skip


def zero_dropped(low: GpuLowering, node: Node, plan: Node) -> None:
    """Zero the rows of slots dropped by `-ser` in an expert product; emit nothing where none can be dropped."""
    if route_of(sort_of(plan).route).drops:
        low.emit("layer_zero_dropped", row_grid(node.rows, parts_of(node.cols, THREADS)), THREADS, 0, low.state,
                 *low.row_args(node.rows), low.out(plan) + plan_layout(low, plan).counts, low.out(node),
                 _int(node.cols))  # fmt: skip
