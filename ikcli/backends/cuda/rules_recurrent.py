"""Lower recurrent layers; kernels in `kernels/layer_recurrent.cu`, `kernels/delta_*.cu` and `mamba2_scan.cu`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ikcli.backends.cuda.activations import PER_BLOCK, THREADS, format_args, parts_of, row_grid
from ikcli.backends.cuda.lower import RULES, Arg, Counts, GpuLowering, Grid
from ikcli.backends.cuda.upload import device_row_bytes
from ikcli.backends.weight_checks import check_f32
from ikcli.errors import UnsupportedError
from ikcli.graph import Node, Rows, Weight
from ikcli.graph.ops_recurrent import Decay, DeltaNet, GatedNorm, L2Norm, Mamba2Scan, SelectiveScan, ShortConv

CONV_TOKENS, MAX_TAPS, SCAN_STATE = 32, 16, 16  # layer_recurrent.cu
KEY_COLUMNS = (64, 128, 256)  # the kernels of delta_net.cu
V_COLUMNS = 32  # of a block of one, and of delta_scan.cu
CHUNK, CHUNK_COLUMNS = 64, 128  # tokens of a chunk, most columns of keys and values (delta_chunks.cuh)
CHUNK_TERMS, CHUNK_KEYS, CHUNK_FACTORS = 49152, 65536, 1024  # bytes of a chunk and head
CHUNK_SHARED = 98304 + 2432  # delta_chunks.cu
# Tokens of a segment, on average, from which on chunks are faster: with a decay per head, per column.
CHUNKS_FROM = (40, 80)
# Of mamba2_scan.cu: most rows of a state, tokens of a segment from which on chunks are faster, bytes of a block.
MAMBA2_STATE, MAMBA2_CHUNKS_FROM, MAMBA2_SHARED = 256, 16, 4 * 64 * (3 * 68 + 2 * 72)
TURN_SLOTS = 16  # chunks that there is memory for: what is written then stays in L2 until it is read
# Kernels of delta_scan.cu and their bytes of shared memory, the fastest first; the last one fits every GPU.
SCANS = (("delta_scan_s4", 4 * 32768 + 33 * 1024), ("delta_scan", 2 * 32768 + 33 * 1024))


@RULES.add(ShortConv, "state parts weights biases linear")
def _short_conv(low: GpuLowering, node: Node, op: ShortConv) -> None:
    if op.n_taps > MAX_TAPS:
        raise UnsupportedError(f"{node.name}: {op.n_taps} taps are more than the GPU kernel takes ({MAX_TAPS})")
    at = 0
    for i, (x, w) in enumerate(zip(op.parts, op.weights, strict=True)):
        check_f32(w, "weights of short convolutions")
        bias: Arg = low.weight(op.biases[i]) if op.biases else 0
        low.emit("layer_short_conv", _conv_grid(x.cols), 128, 0, low.state, low.out(x),
                 np.int32(x.cols), low.weight(w), np.int32(device_row_bytes(w.type, w.ne0) // 4), np.int32(op.n_taps),
                 bias, low.cache(op.state) + 4 * at, op.state.cols, np.int32(node.cols),
                 low.out(node) + 4 * at, np.int32(op.linear))  # fmt: skip
        at += x.cols


def _conv_grid(cols: int) -> Grid:
    """Return one block per tokens of a segment and 128 columns; segments end anywhere."""
    return lambda c: (c.n_tokens // CONV_TOKENS + c.n_segments, parts_of(cols, 128), 1)


@RULES.add(L2Norm, "x offset n_cols width eps")
def _l2_norm(low: GpuLowering, node: Node, op: L2Norm) -> None:
    groups = node.cols // op.width
    low.emit("layer_l2_groups", lambda c: parts_of(c.rows(node.rows) * groups, 4), 128, 0, low.state,
             *low.row_args(node.rows), low.out(op.x) + 4 * op.offset, op.x.cols, low.out(node), np.int32(groups),
             np.int32(op.width), np.float32(op.eps))  # fmt: skip


def _value_step(w: Weight) -> int:
    """Return the floats from one value of a weight to the next: rows of one value are padded, one row is not."""
    return device_row_bytes(w.type, w.ne0) // 4 if w.ne0 == 1 else 1


@RULES.add(Decay, "x dt a bound")
def _decay(low: GpuLowering, node: Node, op: Decay) -> None:
    low.emit("layer_decay", row_grid(node.rows, parts_of(node.cols, PER_BLOCK)), THREADS, 0, low.state,
             *low.row_args(node.rows), low.out(op.x), low.weight(op.dt), low.weight(op.a),
             np.int32(_value_step(op.a)), low.out(node), np.int32(node.cols), np.int32(node.cols // op.n_head),
             np.float32(op.bound))  # fmt: skip


@RULES.add(DeltaNet, "state q k v decay beta n_head n_head_k scale tiled")
def _delta_net(low: GpuLowering, node: Node, op: DeltaNet) -> None:
    dk, dv = op.k.width, op.v.width
    most = next((n for n in KEY_COLUMNS if n >= dk), None)
    if most is None:
        raise UnsupportedError(
            f"{node.name}: keys of {dk} columns are wider than the GPU kernels take ({KEY_COLUMNS[-1]}); run this "
            "model without -ngl"
        )
    slices: list[Arg] = []
    for part in (op.q, op.k, op.v):
        slices += [low.out(part.node) + 4 * part.offset, part.node.cols, np.int32(part.head_stride)]
    least = CHUNKS_FROM[op.by_column]
    in_chunks = _fits_chunks(op) and low.max_rows[Rows.TOKENS] >= least
    kernel = f"delta_net_{most}" + "_columns" * op.by_column
    low.emit(kernel, lambda c: (c.n_segments, op.n_head, parts_of(dv, V_COLUMNS)), 128, _staged(most, op.by_column),
             low.state, low.cache(op.state),
             op.state.cols, *slices, low.out(op.decay), low.out(op.beta), low.out(node), np.int32(op.n_head),
             np.int32(op.n_head_k), np.int32(dk), np.int32(dv), np.float32(op.scale), np.int32(op.tiled),
             when=partial(_by_token, least) if in_chunks else None)  # fmt: skip
    if in_chunks:
        _delta_chunks(low, node, op, slices, least)


def _fits_chunks(op: DeltaNet) -> bool:
    """Return whether the kernels for chunks take the op: they read four columns at once."""
    aligned = all((s.offset | s.head_stride | s.node.cols | s.width) % 4 == 0 for s in (op.q, op.k, op.v))
    return aligned and max(op.k.width, op.v.width) <= CHUNK_COLUMNS


def _by_token(least: int, c: Counts) -> bool:
    return c.n_tokens < least * c.n_segments


def _slots(least: int, c: Counts) -> int:
    """Return the most chunks of all segments together; segments begin anywhere."""
    return 0 if _by_token(least, c) else (c.n_tokens - 1) // CHUNK + c.n_segments


def _delta_chunks(low: GpuLowering, node: Node, op: DeltaNet, slices: list[Arg], least: int) -> None:
    """Emit the delta rule by chunks, as many at a time as memory allows.

    The part that does not read the state comes first, then the states.
    """
    n, dv, by_column, most = op.n_head, op.v.width, op.by_column, low.max_rows[Rows.TOKENS]
    most_slots = (most - 1) // CHUNK + most // least
    turn = min(TURN_SLOTS, most_slots)
    key_heads = n if by_column else op.n_head_k
    work = [low.buffer(turn * heads * n_bytes) for heads, n_bytes in
            ((n, CHUNK_TERMS), (key_heads, CHUNK_KEYS), (n, 4 * dv * CHUNK), (n, CHUNK_FACTORS))]  # fmt: skip
    sizes = np.int32(n), np.int32(op.n_head_k), np.int32(op.k.width), np.int32(dv)
    slices_of_v = parts_of(dv, V_COLUMNS)
    scan, shared = next(s for s in SCANS if s[1] <= low.device.max_shared or s is SCANS[-1])
    for slot in range(0, most_slots, turn):

        def some(c: Counts, slot: int = slot) -> int:
            return max(0, min(turn, _slots(least, c) - slot))

        def grid(c: Counts, some: Callable[[Counts], int] = some) -> tuple[int, int, int]:
            return some(c), n, 1

        def when(c: Counts, some: Callable[[Counts], int] = some) -> bool:
            return some(c) > 0

        low.emit("delta_chunks" + "_columns" * by_column, grid, 256, CHUNK_SHARED,
                 low.state, *work, np.int32(slot), *slices, low.out(op.decay), low.out(op.beta), *sizes,
                 np.int32(op.tiled), when=when)  # fmt: skip
        low.emit(scan + "_columns" * by_column, lambda c: (c.n_segments, n, slices_of_v), 256, shared, low.state,
                 low.cache(op.state), op.state.cols, *work, np.int32(slot), np.int32(turn), low.out(node), *sizes,
                 np.float32(op.scale), np.int32(op.tiled), when=when)  # fmt: skip


def _staged(most: int, by_column: bool) -> int:
    """Return the shared memory bytes for keys, queries and decays of some tokens."""
    tokens, row = 2048 // most, most + 16
    return 4 * tokens * (2 * row + 1 + (row if by_column else 1))


@RULES.add(SelectiveScan, "state x dt b c a d dt_bias")
def _selective_scan(low: GpuLowering, node: Node, op: SelectiveScan) -> None:
    check_f32(op.a, "decays of a selective scan")
    if op.n_state != SCAN_STATE:
        raise UnsupportedError(
            f"{node.name}: the GPU kernel takes a state of {SCAN_STATE} numbers per column, not {op.n_state}; run this "
            "model without -ngl"
        )
    slices: list[Arg] = []
    for part in (op.b, op.c):
        slices += [low.out(part.node) + 4 * part.offset, part.node.cols]
    low.emit("layer_selective_scan", lambda c: (c.n_segments, parts_of(node.cols, 128), 1), 128, 0, low.state,
             low.cache(op.state), op.state.cols, low.out(op.x), low.out(op.dt), *slices, low.weight(op.a),
             np.int32(device_row_bytes(op.a.type, op.a.ne0) // 4), low.weight(op.d), low.weight(op.dt_bias),
             low.out(node), np.int32(node.cols))  # fmt: skip


@RULES.add(Mamba2Scan, "state x dt b c a d dt_bias n_head n_group slopes")
def _mamba2_scan(low: GpuLowering, node: Node, op: Mamba2Scan) -> None:
    if op.n_state > MAMBA2_STATE:
        raise UnsupportedError(
            f"{node.name}: a state of {op.n_state} rows is longer than the GPU kernels take ({MAMBA2_STATE}); run this "
            "model without -ngl"
        )
    args: list[Arg] = []
    for part in (op.x, op.b, op.c):
        args += [low.out(part.node) + 4 * part.offset, part.node.cols, np.int32(part.head_stride)]
    args.append(0 if op.dt is None else low.out(op.dt))
    for w, numbers in ((op.a, [-x for x in op.slopes]), (op.d, [0.0] * op.n_head)):
        if w is None:
            args += [low.constant(np.asarray(numbers, np.float32).tobytes()), np.int32(1)]
        else:
            check_f32(w, "numbers of a scan")
            args += [low.weight(w), np.int32(_value_step(w))]
    args += [0 if op.dt_bias is None else low.weight(op.dt_bias), low.out(node)]  # 0: every step is 1
    args += [np.int32(n) for n in (op.n_head, op.n_group, op.n_state, op.x.width)]
    state = low.state, low.cache(op.state), op.state.cols
    in_chunks = low.max_rows[Rows.TOKENS] >= MAMBA2_CHUNKS_FROM
    by_token = partial(_by_token, MAMBA2_CHUNKS_FROM)
    low.emit("mamba2_scan", lambda c: (c.n_segments, op.n_head, op.x.width // 16), 128, 0, *state, *args,
             when=by_token if in_chunks else None)  # fmt: skip
    if in_chunks:
        low.emit("mamba2_chunks", lambda c: (c.n_segments, op.n_head, parts_of(op.x.width, 64)), 256, MAMBA2_SHARED,
                 *state, *args, when=lambda c: not by_token(c))  # fmt: skip


@RULES.add(GatedNorm, "x w gate eps activation")
def _gated_norm(low: GpuLowering, node: Node, op: GatedNorm) -> None:
    groups = node.cols // op.w.ne0
    low.emit("layer_gated_norm", lambda c: parts_of(c.rows(node.rows) * groups, 4), 128, 0, low.state,
             *low.row_args(node.rows), low.out(op.x), low.weight(op.w), low.out(op.gate), low.out(node),
             np.int32(groups), np.int32(op.w.ne0), np.float32(op.eps), np.int32(op.activation == "sigmoid"),
             *format_args(), when=_always if op.w.ne0 % 32 else None)  # fmt: skip


def _always(counts: Counts) -> bool:
    """Return True: a launch with a condition is not asked to write rows for matrix products.

    Its blocks of 32 columns would be cut by groups of other widths.
    """
    return True
