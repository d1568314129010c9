"""Emit the matrix micro-kernels of plain AVX2 for tiles of unsigned codes with a scale per 32 columns: see `gemm.py`.

A product of bytes leaves sums of two in 16 bits. Those of small codes stay there, one vector for each result, for as
many columns as they fit; only then they are widened.
"""

import functools

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.kernels.gemm import add_or_store
from ikcli.backends.cpu.tile_modes import tile_bias, tile_layout
from ikcli.native.simd.dot import most_addends
from ikcli.native.simd.emit import Emitter
from ikcli.native.simd.vec import call_llvm, f32x8, f32x16, i8x32, i32x8, llvm_type, pointer, splat_value

_SUMS_OF_TWO = ir.VectorType(ir.IntType(16), 16)
_GROUPS = 8  # of four columns in a block of 32


@functools.cache
def unsigned_tile(fmt, nt):
    """Return micro(tile, tile_stride, first, n_blocks, a, a_stride, k, out, out_stride, n_lanes) for a format, or None.

    out[t][0:n_lanes] = blocks first .. first + n_blocks - 1 of a tile times those of a[t], t < nt, as `quant_tile`.
    None: for other tiles, other machines, and codes so large that sums of two fill 16 bits.
    """
    bias, with_min = tile_bias(fmt), fmt.mode == "m32"
    most = fmt.most_with_minimum if with_min else 2 * bias - 1
    addends = min(_GROUPS, 1 << (most_addends(most).bit_length() - 1))
    if fmt.mode.endswith("16") or addends == 1:
        return None
    header, block_bytes = tile_layout(fmt.mode, bias)
    shift = 7 - (bias.bit_length() - 1)  # stored starts are for a bias of 128

    @intrinsic
    def micro(typingctx, tile, tile_stride, first, n_blocks, a, a_stride, k, out, out_stride, n_lanes):
        def codegen(context, builder, sig, args):
            tile, _, first, n_blocks, a, a_stride, k, out, out_stride, n_lanes = args
            e = Emitter(builder)
            a = e.offset(a, e.times(first, 32))
            # Hidden from LLVM, which would derive each address from the one before: a chain of additions.
            rows = [e.opaque(e.offset(a, e.times(a_stride, t))) for t in range(nt)]
            tile = e.opaque(e.offset(tile, e.times(first, block_bytes)))
            totals = e.opaque(e.room(64 * nt))  # in memory: all registers are for sums of products
            slots = {(t, 0): pointer(builder, e.offset(totals, 64 * t), llvm_type(f32x16)) for t in range(nt)}
            outs = {(t, 0): e.offset(out, e.times(out_stride, t)) for t in range(nt)}
            for slot in slots.values():
                builder.store(e.zero(f32x16), slot)
            # Without this, stores of spilled registers queue up behind result stores that wait for memory.
            for at in outs.values():
                e.prefetch(at, write=True)
            # Parts of an activation row (`kernels/activations.py`): four bytes per 32 columns each.
            nb4, scales_at = builder.lshr(k, e.int(3)), e.offset(k, e.times(first, -28))
            sums_at = e.offset(scales_at, nb4)
            starts_at = e.offset(sums_at, nb4)
            with e.loop(n_blocks) as ib:
                block, ib4 = e.offset(tile, e.times(ib, block_bytes)), e.times(ib, 4)
                columns, d_at, s_at = e.times(ib, 32), e.opaque(e.offset(scales_at, ib4)), e.offset(sums_at, ib4)
                first_at = e.opaque(e.offset(starts_at, ib4))
                dots = _products(e, e.offset(block, header), [e.offset(row, columns) for row in rows], addends)
                scales, minima = ([e.load(f32x8, e.offset(block, at + 32 * h)) for h in range(2)] for at in (0, 64))
                for t, row in enumerate(rows):
                    d, new = _splat(e, f32x8, e.offset(row, d_at)), []
                    of_minima = _splat(e, f32x8, e.offset(row, s_at)) if with_min else None
                    start = None if with_min else _splat(e, i32x8, e.offset(row, first_at))
                    for h in range(2):
                        dot = dots[t, h]
                        if start is not None:
                            dot = builder.add(dot, builder.ashr(start, ir.Constant(start.type, [shift] * 8)))
                        part = builder.fmul(builder.sitofp(dot, llvm_type(f32x8)), scales[h])
                        new.append(_fma(e, part, d, e.load(f32x8, e.offset(totals, 64 * t + 32 * h))))
                        if of_minima is not None:
                            new[h] = _fma(e, minima[h], of_minima, new[h])
                    for h in range(2):
                        e.store(new[h], e.offset(totals, 64 * t + 32 * h))
            add_or_store(e, slots, outs, n_lanes, first)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), codegen

    return micro


def _products(e, codes_at, rows, addends):
    """Return sums (t, h) of the products of a block with 32 columns of activation rows t.

    h: the lower or upper eight of the weight rows. `addends`: the groups of columns whose sums fit 16 bits.
    """
    ones = ir.Constant(_SUMS_OF_TWO, [1] * 16)
    dots, sums = {}, {}
    for j in range(_GROUPS):
        codes = [e.load(i8x32, e.offset(codes_at, 64 * j + 32 * h)) for h in range(2)]
        for t, row in enumerate(rows):
            x = e.b.bitcast(_splat(e, i32x8, e.offset(row, 4 * j)), llvm_type(i8x32))
            for h in range(2):
                product = call_llvm(e.b, "llvm.x86.avx2.pmadd.ub.sw", _SUMS_OF_TWO, [codes[h], x])
                sums[t, h] = e.b.add(sums[t, h], product) if (t, h) in sums else product
        # One group after the other: LLVM would mix them until registers run out.
        if (j + 1) % addends:
            sums = {th: e.in_register(v) for th, v in sums.items()}
            continue
        for th, v in sums.items():
            wide = call_llvm(e.b, "llvm.x86.avx2.pmadd.wd", llvm_type(i32x8), [v, ones])
            dots[th] = e.in_register(e.b.add(dots[th], wide) if th in dots else wide)
        sums = {}
    return dots


def _splat(e, vec, address):
    """Load a number into eight lanes."""
    return splat_value(e.b, vec, e.b.load(pointer(e.b, address, llvm_type(vec).element), align=1))


def _fma(e, x, y, z):
    return call_llvm(e.b, "llvm.fma.v8f32", z.type, [x, y, z])
