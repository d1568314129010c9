"""Multiply a weight row by a quantized activation row with plain AVX2, in the order of columns.

A product of bytes takes a few instructions there, and adding lanes costs as much as multiplying. With a scale per 32
columns, each block is therefore scaled in place by a float broadcast to all lanes, and lanes are added once per row.
With a scale per 16 columns, sums stay at 16 bits for as long as they fit, and scales are brought into the order in
which the sums come out, which costs nothing. The bias of codes is applied to the sums of activations.
"""

import functools

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.kernels.activation_row import ActivationRow
from ikcli.backends.cpu.kernels.row_emitter import RowEmitter
from ikcli.backends.cpu.kernels.rowformat import prefetch_step, steps
from ikcli.backends.cpu.tile_modes import most_code
from ikcli.native.simd.lanes import folded
from ikcli.native.simd.vec import call_llvm, f32x8, f32x16, i8x32, i32x8, llvm_type, magnitude, with_sign

_TWICE = [i // 2 for i in range(16)]
# blocks of 16 columns in the order in which `_sums_of_sixteen` has their sums: every other one of eight, the others
_APART = tuple(8 * n + 2 * i + odd for n in range(2) for odd in range(2) for i in range(4))
_PAIRS = ir.VectorType(ir.IntType(16), 16)
_MOST_SUM = 32767


@functools.cache
def row_dot_avx2(fmt):
    """Return dot(w, a, a_stride, k, out, out_stride): out[0] for one activation row; strides are unused."""
    mode = fmt.mode
    vec, per_block = (f32x8, 1) if mode.endswith("32") else (f32x16, 2)

    @intrinsic
    def dot(typingctx, w, a, a_stride, k, out, out_stride):
        def codegen(context, builder, sig, args):
            w, a, _, k, out, _ = args
            e = (RowEmitter if per_block == 1 else _ApartEmitter)(builder)
            x, row = ActivationRow(e, a, k), fmt.header(e, w)
            room = _room(e)
            # Two, so that successive additions do not wait for each other.
            sums = [e.variable(e.zero(vec)) for _ in range(2)]

            def add(n, x, y):
                builder.store(e.fused(x, y, builder.load(sums[n])), sums[n])

            for i, at_w, valid in steps(e, fmt, e.offset(w, fmt.header_bytes), k):
                prefetch_step(e, fmt, at_w)
                scales = fmt.scales(e, at_w, row)
                factors = fmt.minima(e, at_w, row) if mode[0] == "m" else offsets(e, fmt, at_w, scales)
                if factors is not None:
                    add(0, factors, x.scaled_sums(e, i, valid, 1) if per_block == 1 else _sums_apart(e, x, i, valid))
                if per_block == 1:
                    d = x.scales(e, i, valid)
                    # Through memory, which is read into all lanes one float at a time: no shuffles (see `_room`).
                    to, back = room
                    e.store(e.mul(scales, d), to)
                    for b, v in enumerate(_products(e, fmt, mode, at_w, x, i)):
                        scale = e.splat(e.single(e.offset(back, 4 * b)))
                        add((b + 1) % 2, e.ints_to_f32(_sums_of_two(e, v)), scale)
                else:
                    v = _sums_of_sixteen(e, list(_products(e, fmt, mode, at_w, x, i)), most_code(fmt, mode))
                    add(1, e.ints_to_f32(v), e.mul(scales, _scales_apart(e, x, i, valid)))
            total = folded(builder, builder.fadd(*(builder.load(slot) for slot in sums)), 1)
            e.store(total, out)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return dot


class _ApartEmitter(RowEmitter):
    scale_order = _APART


def _sums_apart(e, x, i, valid):
    """Return the scaled sums of the activations of step i in the order of `_APART`, zeros beyond `valid` blocks."""
    if valid is not None:
        return e.pick(x.scaled_sums(e, i, valid, 2), _APART)
    return e.load(f32x16, e.offset(x.sums_apart_at, e.times(i, 64)))


def _scales_apart(e, x, i, valid):
    """Return the scales of the activations' eight blocks for the 16 blocks of `_APART`, zeros beyond `valid` blocks."""
    if valid is not None:
        return e.pick(x.scales(e, i, valid), [n // 2 for n in _APART])
    at = e.offset(x.d_at, e.times(i, 32))
    four = [e.singles(e.offset(at, first), 4) for first in (0, 16)]
    return e.joined([e.pick(v, [*range(4)] * 2) for v in four])


def _room(e):
    """Allocate eight floats on the stack; return an address to write to, and another to read from.

    LLVM sees no connection between the two: it would shuffle lanes instead of reading one float into all of them.
    """
    with e.b.goto_entry_block():
        slot = e.b.alloca(llvm_type(f32x8))
    to = e.opaque(e.b.ptrtoint(slot, ir.IntType(64)))
    return to, e.opaque(to)


def offsets(e, fmt, w, scales):
    """Return scales times the difference between values and `dot_codes`, or None."""
    if fmt.most_magnitude() or not (fmt.bias or fmt.shift):
        return None
    count = scales.type.count
    plain, shifted = (ir.Constant(scales.type, [float(x)] * count) for x in (-fmt.bias, fmt.shift - fmt.bias))
    on = fmt.shifted_blocks(e, w)
    if on is None:
        return e.mul(scales, plain)
    if on.type.count < count:
        on = e.in_scale_order(e.pick(on, _TWICE))
    return e.mul(scales, e.b.select(on, shifted, plain))


def _products(e, fmt, mode, w, x, i):
    """Yield for each block of 32 columns of step i the sums of two products, 16 lanes of 16 bits."""
    at, magnitudes_at = (e.offset(start, e.times(i, 256)) for start in (x.codes_at, x.second_at))
    for j in range(4):
        apart = fmt.magnitudes(e, w, j) if fmt.most_magnitude() else None
        codes = apart[0] if apart else fmt.dot_codes(e, w, j)
        for half in range(2):
            lanes = range(32 * half, 32 * half + 32)
            v = e.pick(codes, lanes)
            there = 64 * j + 32 * half
            y = e.load(i8x32, e.offset(at, there))
            if apart:
                u, y = v, with_sign(e.b, y, e.pick(apart[1], lanes))
            elif mode[0] == "m" or fmt.bias:
                u = v
            # The instruction multiplies unsigned by signed bytes, so one factor gives its sign to the other.
            elif fmt.full_range:  # magnitudes of the weights, as the sign of -128 cannot be changed
                u, y = magnitude(e.b, v), with_sign(e.b, y, v)
            else:
                u, y = e.load(i8x32, e.offset(magnitudes_at, there)), with_sign(e.b, v, y)
            yield call_llvm(e.b, "llvm.x86.avx2.pmadd.ub.sw", _PAIRS, [u, y])


def _sums_of_two(e, v):
    """Add adjacent lanes of 16 bits into 8 lanes of 32."""
    ones = ir.Constant(_PAIRS, [1] * 16)
    return call_llvm(e.b, "llvm.x86.avx2.pmadd.wd", llvm_type(i32x8), [v, ones])


def _sums_of_sixteen(e, pairs, most):
    """Return the sums of the 16 blocks of 16 columns, i32x16 in the order of `_APART`.

    `pairs` come from `_products` of codes up to `most`.
    """
    largest = 2 * most * 127

    def merge(vectors, op):
        return [call_llvm(e.b, op, x.type, [x, y]) for x, y in zip(vectors[::2], vectors[1::2], strict=True)]

    # Additions of 16-bit lanes handle twice as many sums as those of 32-bit lanes, while no sum can overflow.
    while len(pairs) > 2 and 2 * largest <= _MOST_SUM:
        pairs, largest = merge(pairs, "llvm.x86.avx2.phadd.w"), 2 * largest
    sums = [_sums_of_two(e, v) for v in pairs]
    while len(sums) > 2:
        sums = merge(sums, "llvm.x86.avx2.phadd.d")
    return e.joined(sums)
