"""Compile the repacking kernels: the bit moves of one interleaved unit as straight-line code.

A run of destination bytes whose parts come from neighbouring source bytes in the same way becomes one integer of 8, 4,
2 or 1 bytes: loads, shifts, masks, one store. Layouts are in `interleave.py`, the same moves in NumPy in `repack.py`.
"""

# mypy: ignore-errors
# (compiled from bytecode; intrinsics have no Python body that a type checker could follow)

import llvmlite.ir as ir
import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic

from ikcli.native.jit import inline
from ikcli.native.simd.half import load_f16x16, store_bf16x16
from ikcli.native.simd.vec import ld_u8, pointer, st_i8
from ikcli.quant.bitmoves import byte_terms
from ikcli.quant.interleave import layout_of

_APART = 1 << 16  # distance of the rows in the source addresses of the moves
_I64 = ir.IntType(64)


def _runs(found):
    """Yield (first byte, width, terms of the first byte) of the runs of destination bytes."""
    n = found.rows * found.n_bytes
    terms = byte_terms(*found.moves(_APART), n)
    i = 0
    while i < n:
        width = next(
            w for w in (8, 4, 2, 1) if i + w <= n and all(_follows(terms[i], terms[i + j], j) for j in range(w))
        )
        yield i, width, terms[i]
        i += width


def _follows(first, other, distance):
    return other == tuple((byte + distance, *rest) for byte, *rest in first)


def _part(builder, src, stride, term, width):
    """Emit one term of a destination integer."""
    byte, shift, mask = term
    t = ir.IntType(8 * width)
    at = builder.add(src, builder.mul(stride, ir.Constant(_I64, byte // _APART)))
    at = builder.add(at, ir.Constant(_I64, byte % _APART))
    x = builder.load(pointer(builder, at, t), align=1)
    if shift:
        x = (builder.shl if shift > 0 else builder.lshr)(x, ir.Constant(t, abs(shift)))
    spread = int.from_bytes(bytes([mask]) * width, "little")
    return x if mask == 255 else builder.and_(x, ir.Constant(t, spread))


def _copy(builder, src, dst, n):
    """Copy n bytes in the widest pieces."""
    done = 0
    while done < n:
        width = next(w for w in (32, 16, 8, 4, 2, 1) if done + w <= n)
        t = ir.VectorType(ir.IntType(8), width)
        at = ir.Constant(_I64, done)
        x = builder.load(pointer(builder, builder.add(src, at), t), align=1)
        builder.store(x, pointer(builder, builder.add(dst, at), t), align=1)
        done += width


def _scramble(builder, block, signs):
    """Replace the sign codes of a block by the XOR of their lower bits, eight bytes at a time."""
    n = signs.step * np.dtype(signs.dtype).itemsize
    for start in range(signs.start, signs.stop, 8):
        at = pointer(builder, builder.add(block, ir.Constant(_I64, start)), _I64)
        x = builder.load(at, align=1)
        for shift in (1, 2, 4):
            last = int(signs.mask(shift)) << 8 * (n - n // signs.step)  # the last integer of `step` holds the codes
            mask = sum(last << 8 * i for i in range(0, 8, n))
            x = builder.xor(x, builder.and_(builder.shl(x, ir.Constant(_I64, shift)), ir.Constant(_I64, mask)))
        builder.store(x, at, align=1)


def _unit_mover(found):
    """Return move(src, stride, dst), which makes one unit from blocks `stride` bytes apart."""

    @intrinsic
    def move(typingctx, src, stride, dst):
        def codegen(context, builder, sig, args):
            src, stride, dst = args
            if found.signs is not None:
                n = found.n_bytes
                scratch = cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(8), found.rows * n))
                copies = builder.ptrtoint(scratch, _I64)
                for r in range(found.rows):
                    block = builder.add(copies, ir.Constant(_I64, r * n))
                    _copy(builder, builder.add(src, builder.mul(stride, ir.Constant(_I64, r))), block, n)
                    _scramble(builder, block, found.signs)
                src, stride = copies, ir.Constant(_I64, n)
            for first, width, terms in _runs(found):
                value = None
                for term in terms:
                    part = _part(builder, src, stride, term, width)
                    value = part if value is None else builder.or_(value, part)
                to = builder.add(dst, ir.Constant(_I64, first))
                builder.store(value, pointer(builder, to, value.type), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), codegen

    return move


def make_bf16_of_f16():
    """Return bf16_of_f16(src, dst, n): round n half floats, a multiple of 16, to the nearest even bfloat16."""

    def bf16_of_f16(src, dst, n):
        for i in range(0, n, 16):
            store_bf16x16(dst + 2 * i, load_f16x16(src + 2 * i))

    return bf16_of_f16


def make_repack(layout):
    """Return repack(src, row bytes, header bytes, dst, its header bytes, units per row, number of groups).

    Rows are adjacent in both; the first bytes of a header are kept. `layout`: as for `layout_of`.
    """
    found = layout_of(layout)
    rows, n_bytes = found.rows, found.n_bytes
    move = _unit_mover(found)

    @inline
    def repack_group(src, stride, header, dst, kept, n_units):
        for r in range(rows):
            for i in range(kept):
                st_i8(dst + kept * r + i, ld_u8(src + stride * r + i))
        src += header
        dst += kept * rows
        for _ in range(n_units):
            move(src, stride, dst)
            src += n_bytes
            dst += n_bytes * rows

    def repack(src, stride, header, dst, kept, n_units, n_groups):
        group_bytes = rows * (kept + n_units * n_bytes)
        for g in range(n_groups):
            repack_group(src + g * rows * stride, stride, header, dst + g * group_bytes, kept, n_units)

    return repack, 7, False
