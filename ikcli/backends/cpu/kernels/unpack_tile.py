"""Dequantize sixteen rows of a plain format into a tile: decode row by row, then transpose in registers.

Decoding leaves the codes of 256 columns row-major in 4 KiB of stack. 16 x 16 transpositions of 32-bit groups (four
codes) write them in the order of the tile: one store per 64 codes instead of sixteen. Prompts of a few tokens, where
unpacking costs as much as the products, become two to three times as fast. Tile modes: `tile_modes.py`.
"""

import functools

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.kernels.gemm import add_negative, split_signs, tile_scale
from ikcli.backends.cpu.kernels.row_emitter import RowEmitter
from ikcli.backends.cpu.kernels.rowformat import copy_blocks
from ikcli.backends.cpu.kernels.vector_emitter import indices
from ikcli.backends.cpu.tile_modes import (
    FIRST_SUM,
    folds_scales,
    has_signs,
    has_whole_tile,
    minima_per_block,
    multiplies_matrices,
    scales_per_block,
    tile_bias,
    tile_layout,
    tile_mode,
)
from ikcli.native.simd.emit import transpose16
from ikcli.native.simd.vec import const_vector, f32x16, i8x64, i32x16, llvm_type, pointer

_VECTOR = 64
_ROWS = 16


def _step_address(e, fmt, row_w, i, whole, rest, copy):
    """Return where step i of a row lies: in the row, or for a partial step in a copy padded with zeros."""
    src = e.offset(row_w, fmt.header_bytes, e.times(i, fmt.step_bytes))
    if fmt.block_columns == 256:
        return src
    is_cut = e.b.icmp_signed("==", i, whole)
    with e.b.if_then(is_cut):
        bytes_ = ir.ArrayType(ir.IntType(8), fmt.step_bytes)
        e.b.store(ir.Constant(bytes_, None), pointer(e.b, copy, bytes_))
        copy_blocks(e, fmt, src, copy, e.b.udiv(rest, e.int(fmt.block_columns)))
    return e.b.select(is_cut, copy, src)


@functools.cache
def unpack_tile(fmt):
    """Return unpack(w, row_bytes, n, tile, k): rows 0..n-1 to a tile of whole steps.

    The last row is repeated up to 16.
    """
    mode, folded = tile_mode(fmt), folds_scales(fmt)
    header, block_bytes = tile_layout(mode, tile_bias(fmt))
    with_signs, whole_scales = has_signs(mode, tile_bias(fmt)), has_whole_tile(fmt)
    halves = scales_per_block(mode)

    def decode(e, row_w, at_w, codes, floats):
        row = fmt.header(e, row_w)
        less = 0 if mode[0] == "m" else 128 - tile_bias(fmt)
        for j in range(4):
            v = (fmt.folded_codes if folded else fmt.codes)(e, at_w, j)
            e.store(e.b.sub(v, e.const64(less)) if less else v, e.offset(codes, _VECTOR * j))
        if whole_scales:
            scales = e.b.sext(fmt.scale_bytes(e, at_w), llvm_type(i32x16))
            twice = e.b.or_(e.b.and_(scales, e.ints([0xFFFF] * 16, i32x16)), e.b.shl(scales, e.ints([16] * 16, i32x16)))
            e.store(twice, floats[0])
            e.store(e.pick(fmt.units(e, at_w, row)[0], [0] * 16), floats[1])
            return
        e.store(fmt.folded_scales(e, at_w) if folded else fmt.scales(e, at_w, row), floats[0])
        if mode.startswith("m"):
            e.store(fmt.minima(e, at_w, row), floats[1])

    def transpose(e, src, stride):
        return transpose16(e.b, [e.load(f32x16, e.offset(src, stride * r)) for r in range(_ROWS)])

    def put_codes(e, codes, to):
        with e.loop(e.int(4)) as j:
            at = e.offset(to, e.times(j, 2 * block_bytes), header)
            for n, column in enumerate(transpose(e, e.offset(codes, e.times(j, _VECTOR)), 256)):
                e.store(column, e.offset(at, n // 8 * block_bytes + _VECTOR * (n % 8)))

    def put_signed(e, codes, to):
        with e.loop(e.int(4)) as j:
            at, per, start, first = e.offset(to, e.times(j, 2 * block_bytes)), 8 // halves, None, None
            for n, column in enumerate(transpose(e, e.offset(codes, e.times(j, _VECTOR)), 256)):
                block = e.offset(at, n // 8 * block_bytes)
                parts = split_signs(e, e.b.bitcast(column, llvm_type(i8x64)))
                for i, part in enumerate(parts):
                    e.store(part, e.offset(block, header + _VECTOR * (2 * (n % 8) + i)))
                half = n % 8 // per
                if n % per == 0:
                    start = const_vector(i32x16, [0 if whole_scales else FIRST_SUM] * 16)
                start = add_negative(e, start, *parts)
                if n % per < per - 1:
                    continue
                if not whole_scales:
                    e.store(start, e.offset(block, _VECTOR * (halves + half)))
                    continue
                scales = e.b.ashr(e.load(i32x16, e.offset(block, _VECTOR * half)), e.ints([16] * 16, i32x16))
                times_scales = e.b.mul(start, scales)
                if half:
                    e.store(e.b.add(first, times_scales), e.offset(block, _VECTOR * 2))
                first = times_scales

    def put_pairs(e, codes, to):
        """Put eight columns of two rows side by side, as products of matrices take them."""
        eights = ir.VectorType(ir.IntType(64), 8)
        with e.loop(e.int(4)) as j:
            at, src = e.offset(to, e.times(j, 2 * block_bytes), header), e.offset(codes, e.times(j, _VECTOR))
            for r in range(0, _ROWS, 2):
                pair = [e.b.load(pointer(e.b, e.offset(src, 256 * (r + i)), eights), align=1) for i in range(2)]
                for n in range(8):
                    both = e.b.shuffle_vector(*pair, indices([n, 8 + n]))
                    e.store(both, e.offset(at, n // 4 * block_bytes + 128 * (n % 4) + 8 * r))

    def put_floats(e, floats, to):
        for which, src in enumerate(floats):
            per = minima_per_block(mode) if which else halves
            for c, column in enumerate(transpose(e, src, _VECTOR)[: 8 * per]):
                at = c // per * block_bytes + _VECTOR * (which * halves + c % per)
                e.store(column if which else tile_scale(e.b, column, with_signs), e.offset(to, at))

    def put_whole(e, floats, to):
        for c, column in enumerate(transpose(e, floats[0], _VECTOR)):
            e.store(column, e.offset(to, c // 2 * block_bytes + _VECTOR * (c % 2)))
        units = transpose(e, floats[1], _VECTOR)[0]
        for c in range(8):
            e.store(units, e.offset(to, c * block_bytes + 3 * _VECTOR))

    put = put_signed if with_signs else put_pairs if multiplies_matrices() else put_codes

    @intrinsic
    def unpack(typingctx, w, row_bytes, n, tile, k):
        def codegen(context, builder, sig, args):
            w, row_bytes, n, tile, k = args
            e = RowEmitter(builder)
            codes = e.room(_ROWS * 256)
            floats = [e.room(_ROWS * _VECTOR) for _ in range(1 + (whole_scales or mode.startswith("m")))]
            copy = e.room(fmt.step_bytes)
            whole, rest, last = builder.lshr(k, e.int(8)), builder.and_(k, e.int(255)), e.offset(n, -1)
            with e.loop(builder.lshr(e.offset(k, 255), e.int(8))) as i:
                with e.loop(e.int(_ROWS)) as r:
                    index = builder.select(builder.icmp_signed("<", r, n), r, last)
                    row_w = e.offset(w, builder.mul(index, row_bytes))
                    next_tile = e.offset(row_w, e.times(row_bytes, _ROWS), e.times(i, fmt.step_bytes))
                    for line in range(0, fmt.step_bytes, 64):  # sixteen short streams: too many for the hardware
                        e.prefetch(e.offset(next_tile, line))
                    at_w = _step_address(e, fmt, row_w, i, whole, rest, copy)
                    to = [e.offset(f, e.times(r, _VECTOR)) for f in floats]
                    decode(e, row_w, at_w, e.offset(codes, e.times(r, 256)), to)
                step = e.offset(tile, e.times(i, 8 * block_bytes))
                (put_whole if whole_scales else put_floats)(e, floats, step)
                put(e, codes, step)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), codegen

    return unpack
