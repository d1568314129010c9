"""Emit the matrix micro-kernels of quantized weights for ARM64: a tile of 16 rows times a few activation rows.

Tiles (`gemm.py`) hold signed bytes here. With dotprod, group j of a block holds bytes 4j..4j+3 of each row, and one
instruction multiplies those of four rows by four bytes of an activation row. With i8mm, groups 2j and 2j+1 are
interleaved, so that 16 bytes are eight columns of two rows, and one instruction multiplies them by eight columns of two
activation rows: twice as many products.

Eight rows of the tile pass at a time: their integer sums, the float sums of all 16 rows and what is being multiplied
fill the 32 registers.
"""

import functools

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.kernels.gemm import add_or_store
from ikcli.backends.cpu.tile_modes import LAYOUT, multiplies_matrices, scales_per_block
from ikcli.native.simd import arm64
from ikcli.native.simd.emit import F32, I32, Emitter
from ikcli.native.simd.vec import i8x16, llvm_type, pointer

_FLOATS = ir.VectorType(F32, 4)
_QUADS = 4  # of the rows of a tile


def _lanes(*values):
    return ir.Constant(ir.VectorType(I32, len(values)), list(values))


@functools.cache
def quant_tile_arm64(mode, nt):
    """Return `gemm.quant_tile` of one tile: tile_stride is unused."""
    header, block_bytes = LAYOUT[mode]
    with_min, halves = mode[0] == "m", scales_per_block(mode)
    products = _matrix_products if multiplies_matrices() else _dot_products

    @intrinsic
    def micro(typingctx, tiles, tile_stride, first, n_blocks, a, a_stride, k, out, out_stride, n_lanes):
        def codegen(context, builder, sig, args):
            tiles, _, first, n_blocks, a, a_stride, k, out, out_stride, n_lanes = args
            e = Emitter(builder)
            a = e.offset(a, e.times(first, 32))
            rows = [e.opaque(e.offset(a, e.times(a_stride, t))) for t in range(nt)]
            tile = e.opaque(e.offset(tiles, e.times(first, block_bytes)))
            acc = {(t, q): e.variable(ir.Constant(_FLOATS, None)) for t in range(nt) for q in range(_QUADS)}
            outs = {(t, 0): e.offset(out, e.times(out_stride, t)) for t in range(nt)}
            for at in outs.values():
                e.prefetch(at, write=True)
            # Parts of an activation row (`kernels/activations.py`): four bytes per 32 columns each, or per 16.
            nb4, scales_at = builder.lshr(k, e.int(3)), e.offset(k, e.times(first, -28))
            sums_at = e.offset(scales_at, nb4)
            if halves == 2:
                sums_at = e.offset(sums_at, nb4, nb4, nb4, nb4, e.times(first, 4))

            def floats(at):
                return builder.load(pointer(builder, at, _FLOATS), align=1)

            def splat(at):
                x = builder.load(pointer(builder, at, F32), align=1)
                x = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), x, ir.Constant(I32, 0))
                return builder.shuffle_vector(x, x, _lanes(0, 0, 0, 0))

            def add(slot, x, y):
                builder.store(_fma(builder, x, y, builder.load(slot)), slot)

            with e.loop(n_blocks) as ib:
                # Hidden from LLVM, which would reach most of a block by subtracting from an address behind it.
                block, ib4 = e.opaque(e.offset(tile, e.times(ib, block_bytes))), e.times(ib, 4)
                codes_at, x_at = e.offset(block, header), [e.offset(row, e.times(ib, 32)) for row in rows]
                for upper in (0, 2):
                    # LLVM would mix both halves until registers spill.
                    e.barrier()
                    parts = {}
                    for half in range(halves):
                        dots = products(e, codes_at, x_at, upper, range(half, 2, halves) if halves == 2 else range(2))
                        for (t, q), dot in dots.items():
                            scale = floats(e.offset(block, 64 * half + 16 * q))
                            x = builder.sitofp(dot, _FLOATS)
                            old = parts.get((t, q))
                            parts[t, q] = builder.fmul(x, scale) if old is None else _fma(builder, x, scale, old)
                    d = [splat(e.offset(row, scales_at, ib4)) for row in rows]
                    for (t, q), part in parts.items():
                        add(acc[t, q], part, d[t])
                if with_min:
                    for half in range(halves):
                        s = [splat(e.offset(row, sums_at, e.times(ib4, halves), 4 * half)) for row in rows]
                        for q in range(_QUADS):
                            minimum = floats(e.offset(block, 64 * (halves + half) + 16 * q))
                            for t in range(nt):
                                add(acc[t, q], minimum, s[t])
            sums = [arm64.joined(builder, [builder.load(acc[t, q]) for q in range(_QUADS)]) for t in range(nt)]
            add_or_store(e, {(t, 0): e.variable(v) for t, v in enumerate(sums)}, outs, n_lanes, first)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), codegen

    return micro


def _fma(builder, x, y, z):
    fnty = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    fn = builder.module.globals.get("llvm.fma.v4f32") or ir.Function(builder.module, fnty, "llvm.fma.v4f32")
    return builder.call(fn, [x, y, z])


def _dot_products(e, codes_at, x_at, upper, sixteens):
    """Return {(activation row, quad of rows): i32x4} of quads `upper` and the next, of these 16 columns of a block."""
    dots = {(t, q): ir.Constant(arm64.WORDS, None) for t in range(len(x_at)) for q in (upper, upper + 1)}
    for c in sixteens:
        x = [e.b.bitcast(e.load(i8x16, e.offset(at, 16 * c)), arm64.WORDS) for at in x_at]
        for j in range(4):
            for q in (upper, upper + 1):
                codes = e.load(i8x16, e.offset(codes_at, 64 * (4 * c + j) + 16 * q))
                for t, v in enumerate(x):
                    four = e.b.bitcast(e.b.shuffle_vector(v, v, _lanes(j, j, j, j)), codes.type)
                    dots[t, q] = arm64.signed_dot(e.b, dots[t, q], codes, four)
    return dots


def _matrix_products(e, codes_at, x_at, upper, sixteens):
    """Return the same by products of two rows by two; an activation row without another is its own other one."""
    pairs = [x_at[t : t + 2] if t + 1 < len(x_at) else [x_at[t]] * 2 for t in range(0, len(x_at), 2)]
    twos = ir.VectorType(ir.IntType(64), 2)
    dots = {(p, r): ir.Constant(arm64.WORDS, None) for p in range(len(pairs)) for r in range(4)}
    for c in sixteens:
        x = []
        for pair in pairs:
            both = [e.b.bitcast(e.load(i8x16, e.offset(at, 16 * c)), twos) for at in pair]
            x.append([e.b.bitcast(e.b.shuffle_vector(*both, _lanes(j, 2 + j)), llvm_type(i8x16)) for j in range(2)])
        for j in range(2):
            for r in range(4):
                codes = e.load(i8x16, e.offset(codes_at, 128 * (2 * c + j) + 16 * (2 * upper + r)))
                for p in range(len(pairs)):
                    dots[p, r] = arm64.matrix_product(e.b, dots[p, r], x[p][j], codes)
    found = {}
    for p in range(len(pairs)):
        for q in range(2):
            two = [e.b.bitcast(dots[p, 2 * q + r], twos) for r in range(2)]
            for t in range(2):
                if 2 * p + t < len(x_at):
                    found[2 * p + t, upper + q] = e.b.bitcast(e.b.shuffle_vector(*two, _lanes(t, 2 + t)), arm64.WORDS)
    return found
