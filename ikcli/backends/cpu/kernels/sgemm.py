"""Register-blocked f32 products for attention: C[m][n] += sum_k A[m][k] * B[k][n], lanes along n.

A comes in *chunks*: 16 columns of `n` rows stored together, [chunk][row][16] f32. The same tile then serves both
products of attention: as K (A[m] = row, k = column) and as V (A[m] = column, k = row), with constant offsets between
the broadcasts. B and C are row-major with a row stride in bytes.

Of the kind "i16", A and B hold two adjacent k where one f32 would lie: the same code at twice the rate. C of the rows
product is i32 then.

Block shapes (m, vectors) keep the accumulators in registers: up to 24 of AVX-512's 32, fewer elsewhere.
"""

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.native import isa
from ikcli.native.jit import merge
from ikcli.native.simd.control import emit_prefetch
from ikcli.native.simd.dot import emit_dot_i16
from ikcli.native.simd.vec import call_llvm, f32x16, i32x16, llvm_type, pointer, splat_value

_I64, _I32, _F32 = ir.IntType(64), ir.IntType(32), ir.FloatType()
CHUNK = 16  # columns per chunk
CHUNK_ROW = 64  # bytes of one row of a chunk
# (m, vectors): m divides CHUNK. Wider first; the last entry has one vector and takes what remains.
BLOCKS = ((8, 3), (8, 2), (16, 1)) if isa.current().name == "avx512" else ((4, 1),)
MAX_VECTORS = BLOCKS[0][1]
BY_LANE = isa.current().is_arm64


def rows_left(builder, first, stride, n, n_left):
    """Return the addresses of n adjacent rows; those behind n_left repeat the last one."""
    rows = [first]
    for j in range(1, n):
        here = builder.icmp_signed("<", ir.Constant(_I64, j), n_left)
        # Selected, not branched on: the block is the same code for any number of rows.
        rows.append(builder.add(rows[-1], builder.select(here, stride, ir.Constant(_I64, 0))))
    return rows


def strided(builder, first, stride, n):
    """Return n addresses that are `stride` bytes apart."""
    found = [first]
    for _ in range(1, n):
        found.append(builder.add(found[-1], stride))
    return found


def offset(builder, base, n_bytes):
    """Return the LLVM value base + constant."""
    return builder.add(base, ir.Constant(_I64, n_bytes)) if n_bytes else base


def load_f32x16_at(builder, address, t=None):
    return builder.load(pointer(builder, address, t or llvm_type(f32x16)), align=1)


def fma_f32x16(builder, a, b, c):
    return call_llvm(builder, "llvm.fma.v16f32", llvm_type(f32x16), [a, b, c])


def loop(builder, count, carried, body):
    """Emit `for i in range(count): carried = body(carried)`, count >= 1; return the final LLVM values."""
    before = builder.basic_block
    head = builder.append_basic_block("block.loop")
    after = builder.append_basic_block("block.end")
    builder.branch(head)
    builder.position_at_end(head)
    i = builder.phi(_I64)
    i.add_incoming(ir.Constant(_I64, 0), before)
    phis = [builder.phi(x.type) for x in carried]
    for phi, x in zip(phis, carried, strict=True):
        phi.add_incoming(x, before)
    new = body(phis)
    end = builder.basic_block
    following = builder.add(i, ir.Constant(_I64, 1))
    i.add_incoming(following, end)
    for phi, x in zip(phis, new, strict=True):
        phi.add_incoming(x, end)
    builder.cbranch(builder.icmp_signed("<", following, count), head, after)
    builder.position_at_end(after)
    return new


def sum_lanes(builder, vectors):
    """Return a vector whose lane i is the sum of the lanes of vectors[i] (a power of two, up to their lanes)."""
    return fold_lanes(builder, vectors, builder.fadd)


def fold_lanes(builder, vectors, op):
    """Do sum_lanes with op(x, y) instead of a sum.

    Lanes are joined in the same order whatever the number of vectors: 8 apart, then 4, 2, 1.
    """
    lanes = vectors[0].type.count
    width = lanes  # that still belong to one input
    while width > 1:
        half = width // 2
        low = [w + i for w in range(0, lanes, width) for i in range(half)]
        if len(vectors) > 1:
            low += [lanes + i for i in low]
            pairs = [(vectors[i], vectors[i + 1]) for i in range(0, len(vectors), 2)]
        else:
            pairs = [(vectors[0], vectors[0])]
            low = [i for i in low if i < vectors[0].type.count]
        vectors = [_fold(builder, a, b, low, half, op) for a, b in pairs]
        width = half
    return vectors[0]


def store_block(builder, sums, m, n, at, stride):
    """Store lanes of a vector as m rows of n floats, `stride` bytes apart; lane i*n + j is column j of row i."""
    for i in range(m):
        pick = ir.Constant(ir.VectorType(_I32, n), [i * n + j for j in range(n)])
        row = builder.shuffle_vector(sums, sums, pick)
        builder.store(row, pointer(builder, at, row.type), align=1)
        at = builder.add(at, stride)


def _fold(builder, a, b, low, half, op):
    t = ir.VectorType(_I32, len(low))
    x = builder.shuffle_vector(a, b, ir.Constant(t, low))
    y = builder.shuffle_vector(a, b, ir.Constant(t, [i + half for i in low]))
    return op(x, y)


# kind: (lanes of A and B, element of A, lanes of C, acc + a * b)
KINDS = {
    "f32": (f32x16, _F32, f32x16, lambda builder, acc, a, b: fma_f32x16(builder, a, b, acc)),
    "i16": (i32x16, _I32, i32x16, emit_dot_i16),
}


def four_lanes(builder, at, kind):
    """Return four adjacent elements, each in all lanes, of one load: ARM64 multiplies by a lane of a register."""
    type_, element = KINDS[kind][:2]
    four = load_f32x16_at(builder, at, ir.VectorType(element, 4))
    picks = [ir.Constant(ir.VectorType(_I32, type_.n), [i] * type_.n) for i in range(4)]
    return [builder.shuffle_vector(four, four, pick) for pick in picks]


def _step(builder, a, a_stride, b, accs, m, nv, kind, spread=None):
    """Add one k: accs[i][v] += A[i] * B[v]; `spread`: A[i] in all lanes."""
    type_, element, _, multiply = KINDS[kind]
    # nv loads and m broadcasts feed m * nv products.
    rows = [load_f32x16_at(builder, offset(builder, b, 64 * v), llvm_type(type_)) for v in range(nv)]
    out = []
    for i in range(m):
        if spread:
            x = spread[i]
        else:
            x = splat_value(builder, type_, load_f32x16_at(builder, offset(builder, a, i * a_stride), element))
        out += [multiply(builder, accs[i * nv + v], x, rows[v]) for v in range(nv)]
    return out


def _store_block(builder, accs, c, c_stride, m, nv):
    for i in range(m):
        for v in range(nv):
            builder.store(accs[i * nv + v], pointer(builder, offset(builder, c, 64 * v), accs[0].type), align=1)
        c = builder.add(c, c_stride)


def _load_block(builder, c, c_stride, m, nv):
    accs = []
    for _ in range(m):
        accs += [load_f32x16_at(builder, offset(builder, c, 64 * v)) for v in range(nv)]
        c = builder.add(c, c_stride)
    return accs


def make_rows_block(m, nv, accumulate, kind):
    """Return rows_block: C[m rows of A][nv vectors] (+)= A B, with k along the columns of A (`n_chunks` chunks)."""

    @intrinsic
    def rows_block(typingctx, a, chunk_bytes, b, b_stride, n_chunks, c, c_stride):
        def codegen(context, builder, sig, args):
            a, chunk_bytes, b, b_stride, n_chunks, c, c_stride = args
            if accumulate:
                start = _load_block(builder, c, c_stride, m, nv)
            else:
                start = [ir.Constant(llvm_type(KINDS[kind][2]), None)] * (m * nv)

            def four_columns(state):
                at, bt, *accs = state
                fours = [
                    four_lanes(builder, offset(builder, at, i * CHUNK_ROW), kind) for i in range(m if BY_LANE else 0)
                ]
                # Four unrolled: broadcasts have constant offsets, and counting takes a small part of the instructions.
                for k in range(4):
                    spread = [four[k] for four in fours]
                    accs = _step(builder, offset(builder, at, 4 * k), CHUNK_ROW, bt, accs, m, nv, kind, spread)
                    bt = builder.add(bt, b_stride)
                return [offset(builder, at, 16), bt, *accs]

            def chunk(state):
                at, bt, *accs = state
                _, bt, *accs = loop(builder, ir.Constant(_I64, CHUNK // 4), [at, bt, *accs], four_columns)
                return [builder.add(at, chunk_bytes), bt, *accs]

            _, _, *accs = loop(builder, n_chunks, [a, b, *start], chunk)
            _store_block(builder, accs, c, c_stride, m, nv)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7), codegen

    return rows_block


def make_columns_block(m, nv, kind, unit):
    """Return columns_block: C[m columns of A][nv vectors] = C * scale[nv vectors] + A^T B.

    k runs along `n_rows` >= 1 rows of one chunk. Integer sums are multiplied by the nv vectors `unit` bytes behind
    `scale`. If nv is 1, every step prefetches a cache line from `ask` on, and the address after them is returned.
    """
    integers = KINDS[kind][2] is i32x16
    lines = int(integers and nv == 1)

    @intrinsic
    def columns_block(typingctx, a, b, b_stride, n_rows, c, c_stride, scale, ask):
        def codegen(context, builder, sig, args):
            a, b, b_stride, n_rows, c, c_stride, scale, ask = args

            def rescaled():
                factor = [load_f32x16_at(builder, offset(builder, scale, 64 * v)) for v in range(nv)]
                old = _load_block(builder, c, c_stride, m, nv)
                return [builder.fmul(x, factor[i % nv]) for i, x in enumerate(old)]

            # Float sums go on from the old output; integer ones start at 0 and join it at the end, as it is f32.
            accs = [ir.Constant(llvm_type(i32x16), None)] * (m * nv) if integers else rescaled()

            def row(state):
                at, bt, ask, *accs = state
                # Columns of a chunk are adjacent, so the m broadcasts of a step read one cache line.
                accs = _step(
                    builder, at, 4, bt, accs, m, nv, kind, BY_LANE and m == 4 and four_lanes(builder, at, kind)
                )
                ask = emit_prefetch(builder, ask, lines)
                return [offset(builder, at, CHUNK_ROW), builder.add(bt, b_stride), ask, *accs]

            _, _, ask, *accs = loop(builder, n_rows, [a, b, ask, *accs], row)
            if integers:
                units = [load_f32x16_at(builder, offset(builder, scale, unit + 64 * v)) for v in range(nv)]
                sums = [builder.sitofp(x, llvm_type(f32x16)) for x in accs]
                accs = [fma_f32x16(builder, x, units[i % nv], old)
                        for i, (x, old) in enumerate(zip(sums, rescaled(), strict=True))]  # fmt: skip
            _store_block(builder, accs, c, c_stride, m, nv)
            return ask

        return types.intp(*[types.intp] * 8), codegen

    return columns_block


def _make_rows_product(m, nv, accumulate, kind):
    block = make_rows_block(m, nv, accumulate, kind)

    @merge
    def rows_product(a, chunk_bytes, n_rows, b, b_stride, n_chunks, c, c_stride):
        for i in range(0, n_rows, m):
            block(a + CHUNK_ROW * i, chunk_bytes, b, b_stride, n_chunks, c + i * c_stride, c_stride)

    return rows_product


def _make_columns_product(m, nv, kind, unit):
    block = make_columns_block(m, nv, kind, unit)

    @merge
    def columns_product(a, chunk_bytes, n_chunks, b, b_stride, n_rows, c, c_stride, scale, ask):
        # All columns of a chunk before the next one: its rows stay in the cache.
        for chunk in range(n_chunks):
            for i in range(0, CHUNK, m):
                at = c + (chunk * CHUNK + i) * c_stride
                ask = block(a + chunk * chunk_bytes + 4 * i, b, b_stride, n_rows, at, c_stride, scale, ask)

    return columns_product


def make_rows_product(accumulate, kind="f32"):
    """Return rows_product(vectors, a, chunk_bytes, n_rows, b, b_stride, n_chunks, c, c_stride).

    C[n_rows][16*vectors] (+)= A B. Writes up to 15 rows more than n_rows: A and C must have them.
    """
    shapes = [_make_rows_product(*shape, accumulate, kind) for shape in BLOCKS]
    if len(shapes) == 1:
        one = shapes[0]

        @merge
        def rows_product1(vectors, a, chunk_bytes, n_rows, b, b_stride, n_chunks, c, c_stride):
            one(a, chunk_bytes, n_rows, b, b_stride, n_chunks, c, c_stride)

        return rows_product1
    three, two, one = shapes

    @merge
    def rows_product(vectors, a, chunk_bytes, n_rows, b, b_stride, n_chunks, c, c_stride):
        if vectors == 3:
            three(a, chunk_bytes, n_rows, b, b_stride, n_chunks, c, c_stride)
        elif vectors == 2:
            two(a, chunk_bytes, n_rows, b, b_stride, n_chunks, c, c_stride)
        else:
            one(a, chunk_bytes, n_rows, b, b_stride, n_chunks, c, c_stride)

    return rows_product


def make_columns_product(kind="f32", unit=0):
    """Return columns_product(vectors, a, chunk_bytes, n_chunks, b, b_stride, n_rows, c, c_stride, scale, ask).

    C[16*n_chunks][16*vectors] = C * scale + A^T B over n_rows >= 1 rows of A and B; C is f32. The sums of "i16" are
    multiplied by the vectors `unit` bytes behind scale; with one vector, memory from `ask` on is prefetched meanwhile.
    """
    shapes = [_make_columns_product(*shape, kind, unit) for shape in BLOCKS]
    if len(shapes) == 1:
        one = shapes[0]

        @merge
        def columns_product1(vectors, a, chunk_bytes, n_chunks, b, b_stride, n_rows, c, c_stride, scale, ask):
            one(a, chunk_bytes, n_chunks, b, b_stride, n_rows, c, c_stride, scale, ask)

        return columns_product1
    three, two, one = shapes

    @merge
    def columns_product(vectors, a, chunk_bytes, n_chunks, b, b_stride, n_rows, c, c_stride, scale, ask):
        if vectors == 3:
            three(a, chunk_bytes, n_chunks, b, b_stride, n_rows, c, c_stride, scale, ask)
        elif vectors == 2:
            two(a, chunk_bytes, n_chunks, b, b_stride, n_rows, c, c_stride, scale, ask)
        else:
            one(a, chunk_bytes, n_chunks, b, b_stride, n_rows, c, c_stride, scale, ask)

    return columns_product


@intrinsic
def transpose16(typingctx, src, src_stride, dst, dst_stride):
    """Transpose 16x16 f32 from rows at src to rows at dst; strides in bytes."""

    def codegen(context, builder, sig, args):
        src, src_stride, dst, dst_stride = args
        rows = []
        for _ in range(16):
            rows.append(load_f32x16_at(builder, src))
            src = builder.add(src, src_stride)
        i32 = ir.IntType(32)
        low = ir.Constant(ir.VectorType(i32, 16), [x for i in range(8) for x in (i, i + 16)])
        high = ir.Constant(ir.VectorType(i32, 16), [x for i in range(8, 16) for x in (i, i + 16)])
        # Each round interleaves vector i with vector i + 8; after four of them rows are columns.
        for _ in range(4):
            rows = [builder.shuffle_vector(rows[i], rows[i + 8], pick) for i in range(8) for pick in (low, high)]
        for row in rows:
            builder.store(row, pointer(builder, dst, row.type), align=1)
            dst = builder.add(dst, dst_stride)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), codegen
