"""Flash attention for one token (generation) that reads the cache once, in the order in which it lies in memory.

A task is (token, range of positions) with all heads. Rows of K and V are converted in registers and multiplied at once
by the `m` query heads that share a KV head, several positions at a time. Nothing is staged, so a long context runs at
the speed of memory. While a tile of K is read, the same tile of V is prefetched, and then the next tile of K, some
lines with every step of a product: a burst of requests would be dropped. Statistics, parts of split tasks and their
merging are those of attention.py; everything is f32 except for the scores of q8_0 rows (attention_q8.py).
"""

import llvmlite.ir as ir
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.kernels.attention_few import load_q, make_flash_units, make_soft_max_tile
from ikcli.backends.cpu.kernels.attention_q8 import make_q8_scores, make_quantize_q
from ikcli.backends.cpu.kernels.attention_tasks import CORRECTION, part_row
from ikcli.backends.cpu.kernels.sgemm import (
    CHUNK_ROW,
    fma_f32x16,
    load_f32x16_at,
    loop,
    offset,
    rows_left,
    store_block,
    strided,
    sum_lanes,
)
from ikcli.backends.cpu.params_attention import STATS_BYTES
from ikcli.native import isa
from ikcli.native.jit import inline, merge
from ikcli.native.simd.control import emit_prefetch
from ikcli.native.simd.half import bf16_to_f32, half_to_f32
from ikcli.native.simd.vec import const_vector, f32x16, i16x16, i32x16, llvm_type, pointer, splat_value, st_f32

_F1 = np.float32(1.0)
_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
WIDE = isa.current().name == "avx512"
# Bytes of a step of columns and 16-column chunks in it.
STEPS = {"f32": (64, 1), "f16": (32, 1), "bf16": (32, 1), "q8_0": (34, 2)}


# --- a step of a row as f32 vectors ----------------------------------------------------------------------------------
def _load_f32(builder, at):
    return [load_f32x16_at(builder, at)]


def _bits16(builder, at):
    return builder.load(pointer(builder, at, ir.VectorType(_I16, 16)), align=1)


def _load_f16(builder, at):
    return [half_to_f32(builder, _bits16(builder, at))]


def _load_bf16(builder, at):
    return [bf16_to_f32(builder, _bits16(builder, at))]


def _load_q8_0(builder, at):
    # Spread before conversion: a half float that goes through a general register costs more.
    scale = splat_value(builder, i16x16, builder.load(pointer(builder, at, _I16), align=1))
    scale = half_to_f32(builder, scale)
    out = []
    for i in (2, 18):
        codes = builder.load(pointer(builder, offset(builder, at, i), ir.VectorType(_I8, 16)), align=1)
        codes = builder.sitofp(builder.sext(codes, llvm_type(i32x16)), llvm_type(f32x16))
        out.append(builder.fmul(codes, scale))
    return out


_LOAD = {"f32": _load_f32, "f16": _load_f16, "bf16": _load_bf16, "q8_0": _load_q8_0}


# --- products --------------------------------------------------------------------------------------------------------
def make_scores(type_, m, n, q_rows, lines):
    """Return scores: s[m rows][n] = Q . K of n adjacent cache rows, of which only n_left are read.

    Q is in chunks of q_rows rows. Every step prefetches `lines` cache lines from `next_` on.
    """
    size, chunks = STEPS[type_]

    @intrinsic
    def scores(typingctx, q, k, k_stride, n_left, n_chunks, s, s_stride, next_):
        def codegen(context, builder, sig, args):
            q, k, k_stride, n_left, n_chunks, s, s_stride, next_ = args
            rows = rows_left(builder, k, k_stride, n, n_left)

            def step(state):
                qt, kt, at, *accs = state
                out = list(accs)
                # Cached rows are converted once, for the m heads that share them.
                vectors = [_LOAD[type_](builder, builder.add(row, kt)) for row in rows]
                for c in range(chunks):
                    for i in range(m):
                        x = load_f32x16_at(builder, offset(builder, qt, CHUNK_ROW * (c * q_rows + i)))
                        for j in range(n):
                            out[i * n + j] = fma_f32x16(builder, x, vectors[j][c], out[i * n + j])
                at = emit_prefetch(builder, at, lines)
                return [offset(builder, qt, CHUNK_ROW * q_rows * chunks), offset(builder, kt, size), at, *out]

            zero = const_vector(f32x16, [0.0] * 16)
            count = builder.udiv(n_chunks, ir.Constant(_I64, chunks))
            start = [q, ir.Constant(_I64, 0), next_, *[zero] * (m * n)]
            _, _, _, *accs = loop(builder, count, start, step)
            # One tree of shuffles reduces all m * n sums together.
            store_block(builder, sum_lanes(builder, accs), m, n, s, s_stride)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8), codegen

    return scores


def make_values(type_, m, steps, lines):
    """Return values: o[m rows][`steps` column steps] = o * scale[row] + P V over n >= 1 rows.

    Prefetch `lines` per row.
    """
    size, chunks = STEPS[type_]
    wide = steps * chunks

    @intrinsic
    def values(typingctx, p, p_stride, v, v_stride, n, o, o_stride, scale, next_):
        def codegen(context, builder, sig, args):
            p, p_stride, v, v_stride, n, o, o_stride, scale, next_ = args
            rows, outs, accs = strided(builder, p, p_stride, m), strided(builder, o, o_stride, m), []
            for i in range(m):
                factor = splat_value(builder, f32x16, load_f32x16_at(builder, offset(builder, scale, 4 * i), _F32))
                accs += [builder.fmul(load_f32x16_at(builder, offset(builder, outs[i], 64 * j)), factor)
                         for j in range(wide)]  # fmt: skip

            def position(state):
                four, vt, at, *accs = state
                x = [vec for step in range(steps) for vec in _LOAD[type_](builder, offset(builder, vt, size * step))]
                out = []
                for i in range(m):
                    w = splat_value(builder, f32x16, load_f32x16_at(builder, builder.add(rows[i], four), _F32))
                    out += [fma_f32x16(builder, w, x[j], accs[i * wide + j]) for j in range(wide)]
                at = emit_prefetch(builder, at, lines)
                return [offset(builder, four, 4), builder.add(vt, v_stride), at, *out]

            _, _, _, *accs = loop(builder, n, [ir.Constant(_I64, 0), v, next_, *accs], position)
            for i in range(m):
                for j in range(wide):
                    at = offset(builder, outs[i], 64 * j)
                    builder.store(accs[i * wide + j], pointer(builder, at, accs[0].type), align=1)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 9), codegen

    return values


# --- kernel ----------------------------------------------------------------------------------------------------------
def make_part_bytes(type_):
    """Return part_bytes(params, part, segment, head): address of a KV head's columns at position 0."""
    size, chunks = STEPS[type_]

    @inline
    def part_bytes(params, part, segment, head):
        row, element = part_row(params, part, segment, head)
        return row + element // (16 * chunks) * size

    return part_bytes


def shapes(m):
    """Return how many rows are multiplied at once, by how many positions of K, by how many 16-column chunks of V.

    Their sums fill the registers. Several rows share what K and V are converted to.
    """
    if WIDE:
        at_once = min(m, 8)
        return at_once, 16 // at_once, min(8, 16 // at_once)
    at_once = min(m, 2) if isa.current().is_arm64 else 1
    return at_once, 4 // at_once, 4 // at_once


def make_flash_stream(k_type, v_type, m, more=""):
    """Return the kernel, with the parameters of make_flash_few.

    `m`: query heads of a KV head rounded up to a power of two, at most 16.
    """
    m = int(m)
    soft_max_tile = make_soft_max_tile(more.replace("w", ""))  # one token sees all that its task begins with
    at_once, positions, columns = shapes(m)
    v_size, v_chunks_step = STEPS[v_type]
    k_size, k_chunks_step = STEPS[k_type]
    in_codes = k_type == "q8_0" and (WIDE or isa.current().is_arm64)
    k_at_once = at_once
    if in_codes and not WIDE:  # integer sums take a quarter of the registers there
        k_at_once, positions = m, 16 // m
    rounds, k_rounds = m // at_once, m // k_at_once
    # While K is read, V of the same positions is prefetched, and the other way round. Requests are spread evenly over
    # the steps of the products: the CPU drops those of a burst.
    v_lines = -(-positions * v_size * k_chunks_step // (64 * v_chunks_step * k_rounds))
    k_lines = -(-columns * k_size // (64 * k_chunks_step * rounds))
    quantize_q = make_quantize_q(m, positions) if in_codes else None
    dot = (make_q8_scores(m, positions, 2 * v_lines) if in_codes
           else make_scores(k_type, at_once, positions, m, v_lines))  # fmt: skip
    wide = make_values(v_type, at_once, columns // v_chunks_step, k_lines)
    narrow = make_values(v_type, at_once, 1, 1)
    k_bytes, v_bytes = make_part_bytes(k_type), make_part_bytes(v_type)

    @merge
    def tile_scores(params, segment, position, n, q, s, s_stride):
        """Compute s[unit][row][n] of the positions from `position` on, and prefetch their rows of V."""
        k_stride, v_stride = params.k[0].row_bytes, params.v.row_bytes
        units, n_chunks = params.units, params.k_chunks
        v = v_bytes(params, params.v, segment, 0) + position * v_stride
        step = positions * v_stride // (units * k_rounds)
        for t in range(0, n, positions):
            for u in range(units):
                k = k_bytes(params, params.k[0], segment, u) + (position + t) * k_stride
                for r in range(0, m, k_at_once):
                    dot(q + u * params.q_unit + CHUNK_ROW * r, k, k_stride, n - t, n_chunks,
                        s + (u * m + r) * s_stride + 4 * t, s_stride, v)  # fmt: skip
                    v += step

    @merge
    def add_values(params, v, n, p, p_stride, o, scale, ask, step):
        """Compute o[row][column] of one unit = o * scale + P V, and prefetch what comes next."""
        v_stride, chunks = params.v.row_bytes, params.v_cols >> 4
        c = 0
        while c < chunks:
            full = c + columns <= chunks
            for r in range(0, m, at_once):
                at = o + 64 * (r * chunks + c)
                if full:
                    wide(p + r * p_stride, p_stride, v, v_stride, n, at, 64 * chunks, scale + 4 * r, ask)
                else:
                    narrow(p + r * p_stride, p_stride, v, v_stride, n, at, 64 * chunks, scale + 4 * r, ask)
                ask += step
            width = columns if full else v_chunks_step
            c += width
            v += width // v_chunks_step * v_size

    @merge
    def add_tile(params, segment, q, k, v, s, o, stats, rows, n, position, last):
        """Add one tile; unless it is the last one, prefetch the next tile of K."""
        s_stride, units, k_stride = 4 * (params.tile + 16), params.units, params.k[0].row_bytes
        tile_scores(params, segment, position, n, q, s, s_stride)
        calls = (params.v_cols // 16 + columns - 1) // columns * rounds
        ask, step = s, 0
        if not last:
            ask = k_bytes(params, params.k[0], segment, 0) + (position + n) * k_stride
            step = n * k_stride // (units * calls)
        for u in range(units):
            p, unit_stats = s + u * m * s_stride, stats + u * STATS_BYTES
            for r in range(rows):
                soft_max_tile(params, p + r * s_stride, n, position, unit_stats + 4 * r)
            for r in range(rows, m):  # rows that only fill up the power of two: soft_max_tile sets no factor for them
                st_f32(unit_stats + CORRECTION + 4 * r, _F1)
            values = v_bytes(params, params.v, segment, u) + position * params.v.row_bytes
            o_unit = o + u * params.o_unit
            add_values(params, values, n, p, s_stride, o_unit, unit_stats + CORRECTION, ask + u * calls * step, step)

    if in_codes:

        @inline
        def prepare(params, token, unit, rows, q, tmp):
            load_q(params, token, unit, rows, m, tmp)
            quantize_q(tmp, params.k_chunks, q)

    else:

        @inline
        def prepare(params, token, unit, rows, q, tmp):
            load_q(params, token, unit, rows, m, q)

    return make_flash_units(prepare, add_tile, more)
