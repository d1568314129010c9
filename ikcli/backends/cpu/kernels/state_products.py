"""Products of chunks of tokens with states that lie in blocks of 16 columns, [rows][16], and triangular systems.

A pair of blocks is one product where the registers suffice: each number of the other factor is then loaded once for 32
columns, which matters as the tokens of a chunk do not fit into the first-level cache beside a state.
"""

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.kernels.sgemm import (
    BLOCKS,
    BY_LANE,
    CHUNK,
    fma_f32x16,
    four_lanes,
    load_f32x16_at,
    loop,
    offset,
)
from ikcli.native.jit import inline
from ikcli.native.simd.vec import f32x16, llvm_type, pointer, splat_value

LINE = 64  # bytes of a row of 16 columns
_I64, _F32 = ir.IntType(64), ir.FloatType()


def blocks_at_once(n_block):
    """Return how many of n_block blocks of columns a product takes: 2 if that divides them, or 1."""
    return 2 if len(BLOCKS) > 1 and n_block % 2 == 0 else 1


def _addresses(builder, at, row, vector, m, nv):
    found = []
    for _ in range(m):
        here = at
        for v in range(nv):
            found.append(here)
            here = builder.add(here, vector) if v + 1 < nv else here
        at = builder.add(at, row)
    return found


def _make_block(m, nv, start):
    @intrinsic
    def block(typingctx, a, chunk_bytes, b, b_row, b_block, n_chunks, c, c_row, c_block, scale, scale_step):
        def codegen(context, builder, sig, args):
            a, chunk_bytes, b, b_row, b_block, n_chunks, c, c_row, c_block, scale, scale_step = args
            zero = ir.Constant(llvm_type(f32x16), None)
            if start == "zero":
                accs = [zero] * (m * nv)
            else:
                accs = [load_f32x16_at(builder, at) for at in _addresses(builder, c, c_row, c_block, m, nv)]
            if start == "scale":
                for i in range(m):
                    factor = splat_value(builder, f32x16, load_f32x16_at(builder, scale, _F32))
                    accs[i * nv : (i + 1) * nv] = [builder.fmul(x, factor) for x in accs[i * nv : (i + 1) * nv]]
                    scale = builder.add(scale, scale_step)

            def four_columns(state):
                at, bt, *accs = state
                spread = [four_lanes(builder, offset(builder, at, LINE * i), "f32") for i in range(m if BY_LANE else 0)]
                for k in range(4):
                    rows = [load_f32x16_at(builder, x) for x in _addresses(builder, bt, b_row, b_block, 1, nv)]
                    for i in range(m):
                        if spread:
                            x = spread[i][k]
                        else:
                            number = load_f32x16_at(builder, offset(builder, at, LINE * i + 4 * k), _F32)
                            x = splat_value(builder, f32x16, number)
                        for v in range(nv):
                            accs[i * nv + v] = fma_f32x16(builder, x, rows[v], accs[i * nv + v])
                    bt = builder.add(bt, b_row)
                return [offset(builder, at, 16), bt, *accs]

            def chunk(state):
                at, bt, *accs = state
                _, bt, *accs = loop(builder, ir.Constant(_I64, CHUNK // 4), [at, bt, *accs], four_columns)
                return [builder.add(at, chunk_bytes), bt, *accs]

            _, _, *accs = loop(builder, n_chunks, [a, b, *accs], chunk)
            for x, at in zip(accs, _addresses(builder, c, c_row, c_block, m, nv), strict=True):
                builder.store(x, pointer(builder, at, x.type), align=1)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 11), codegen

    return block


def make_state_product(nv, start):
    """Return product(a, chunk_bytes, n_rows, b, b_row, b_block, n_chunks, c, c_row, c_block, scale, scale_step).

    C[n_rows][16 nv] = A B. A comes in chunks of 16 columns, a row of which is 64 bytes. Of B and C, `row` is the number
    of bytes between rows, `block` that between blocks of 16 columns. `start`: "zero", "add" (C is added to), or "scale"
    (C is added to after row i of it was multiplied by the number at scale + scale_step * i).
    """
    m = 8 if nv > 1 else BLOCKS[-1][0]
    block = _make_block(m, nv, start)

    @inline
    def product(a, chunk_bytes, n_rows, b, b_row, b_block, n_chunks, c, c_row, c_block, scale, scale_step):
        for i in range(0, n_rows, m):
            block(a + LINE * i, chunk_bytes, b, b_row, b_block, n_chunks, c + c_row * i, c_row, c_block,
                  scale + scale_step * i, scale_step)  # fmt: skip

    return product


@intrinsic
def solve16(typingctx, factors, u, u_row):
    """Solve in turn for t = 0 .. 15: u[t] += sum over i < t of factors[t][i] u[i]; rows of u are u_row bytes apart."""

    def codegen(context, builder, sig, args):
        factors, u, u_row = args
        # Column after column of the triangle: its 15 - i additions are independent, while in a row each waits for the
        # last.
        places = _addresses(builder, u, u_row, u_row, 16, 1)
        rows = [load_f32x16_at(builder, at) for at in places]
        for i in range(16):
            for t in range(i + 1, 16):
                factor = load_f32x16_at(builder, offset(builder, factors, LINE * t + 4 * i), _F32)
                rows[t] = fma_f32x16(builder, splat_value(builder, f32x16, factor), rows[i], rows[t])
        for at, row in zip(places, rows, strict=True):
            builder.store(row, pointer(builder, at, row.type), align=1)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), codegen
