"""mul_mat for every weight type, dense and by expert.

A block of 16 weight rows (32 for float types) is one work item. With few activation rows each weight row is dotted
straight from memory; with more, the block is unpacked once into a tile that all activation rows then share. Both give
the same result for a row whatever the other rows are, but not the same as each other; a program says what "few" means.
"""

from ikcli.backends.cpu.kernels.basic import swiglu_span
from ikcli.backends.cpu.kernels.common import n_rows, next_span, next_work, word
from ikcli.backends.cpu.kernels.format_api import few_dots, unpack_sixteen
from ikcli.backends.cpu.kernels.formats import FORMATS
from ikcli.backends.cpu.kernels.formats_float import float_block
from ikcli.backends.cpu.kernels.gemm import quant_tile
from ikcli.backends.cpu.tile_modes import MODES
from ikcli.native.jit import inline
from ikcli.native.simd.vec import ld_i64


def _tile_block(type_name):
    """block(w, row_bytes, n, k, a, a_stride, m, out, out_stride, tile) by way of a tile of n <= 16 rows."""
    unpack = unpack_sixteen(FORMATS[type_name])
    micro8, micro4, micro2, micro1 = (quant_tile(MODES[type_name], nt) for nt in (8, 4, 2, 1))

    @inline
    def block(w, row_bytes, n, k, a, a_stride, m, out, out_stride, tile):
        unpack(w, row_bytes, n, tile, k)
        nb = k // 32
        t = 0
        while t + 8 <= m:
            micro8(tile, nb, a + t * a_stride, a_stride, k, out + t * out_stride, out_stride, n)
            t += 8
        if t + 4 <= m:
            micro4(tile, nb, a + t * a_stride, a_stride, k, out + t * out_stride, out_stride, n)
            t += 4
        if t + 2 <= m:
            micro2(tile, nb, a + t * a_stride, a_stride, k, out + t * out_stride, out_stride, n)
            t += 2
        if t < m:
            micro1(tile, nb, a + t * a_stride, a_stride, k, out + t * out_stride, out_stride, n)

    return block


def _integer_block(type_name):
    """out[t][r] for n <= 16 rows and m activations: straight dots for few activations."""
    fmt = FORMATS[type_name]
    rows, dots, by_tile = fmt.rows, few_dots(fmt), _tile_block(type_name)

    @inline
    def block(w, row_bytes, n, k, a, a_stride, m, out, out_stride, tile, few):
        if m > few:
            by_tile(w, row_bytes, n, k, a, a_stride, m, out, out_stride, tile)
            return
        for r in range(0, n, rows):
            dots(w + r * row_bytes, a, a_stride, m, k, out + 4 * r, out_stride)

    return block, 16


def _block(type_name):
    return _integer_block(type_name) if type_name in FORMATS else float_block(type_name)


def make_mul_mat(type_name):
    """Dense and per-head matmul. Output row t, head h, weight row r: out + t*out_stride + h*out_head + 4*r.

    params: 3 w, 4 row bytes of w, 5 rows of w, 6 k, 7 a, 8 bytes between activation rows, 9 out, 10 out_stride (bytes),
    11 tiles, 12 tile bytes, 13 heads, 14 bytes between heads of w, 15 of a, 16 of out, 17 few.
    """
    block, height = _block(type_name)

    def mul_mat(params, ith, nth):
        w, row_bytes, n_w, k = word(params, 3), word(params, 4), word(params, 5), word(params, 6)
        a, a_stride, out, out_stride = word(params, 7), word(params, 8), word(params, 9), word(params, 10)
        tile = word(params, 11) + ith * word(params, 12)
        heads, w_head, a_head, out_head = word(params, 13), word(params, 14), word(params, 15), word(params, 16)
        m, few = n_rows(params), word(params, 17)
        per_head = (n_w + height - 1) // height
        total = per_head * heads
        if m == 0:
            return
        while True:
            first, stop = next_items(params, total, nth, m <= few)
            if first >= total:
                return
            for item in range(first, stop):
                h, r = item // per_head, item % per_head * height
                block(
                    w + h * w_head + r * row_bytes, row_bytes, min(height, n_w - r), k, a + h * a_head, a_stride, m,
                    out + h * out_head + 4 * r, out_stride, tile, few,
                )  # fmt: skip

    return mul_mat


@inline
def next_items(params, total, nth, streaming):
    """Range of work items: long runs if the weights are streamed, else one block at a time."""
    if streaming:
        return next_span(params, total, nth)
    first = next_work(params, 1)
    return first, min(first + 1, total)


@inline
def next_expert(offsets, n_expert, e):
    """First expert from e on that has rows, or n_expert."""
    while e < n_expert and ld_i64(offsets + 8 * (e + 1)) == ld_i64(offsets + 8 * e):
        e += 1
    return e


@inline
def locate(offsets, n_expert, per_expert, item):
    """(expert, block) of a work item; experts without rows have no items."""
    e = next_expert(offsets, n_expert, 0)
    while item >= per_expert:
        item -= per_expert
        e = next_expert(offsets, n_expert, e + 1)
    return e, item


@inline
def count_items(offsets, n_expert, per_expert):
    """Work items of all experts that have rows."""
    total = 0
    for e in range(n_expert):
        if ld_i64(offsets + 8 * (e + 1)) > ld_i64(offsets + 8 * e):
            total += per_expert
    return total


def _by_expert(height, compute):
    """Kernel that runs `compute` on every block of `height` rows of every expert that has activation rows.

    Rows offsets[e] .. offsets[e+1]-1 of a belong to expert e. params: 3 w, 4 row bytes, 5 rows per expert, 6 k, 7 a,
    8 a_stride, 9 out, 10 out_stride, 11 tiles, 12 tile bytes, 13 n_expert, 14 bytes per expert, 15 offsets
    (i64[n_expert + 1]), 16 few; compute(params, ith, at, n, k, x, m, y, tile): `at` = bytes into the weights, n rows.
    """

    def by_expert(params, ith, nth):
        row_bytes, n_w, k = word(params, 4), word(params, 5), word(params, 6)
        a, a_stride, out, out_stride = word(params, 7), word(params, 8), word(params, 9), word(params, 10)
        tile = word(params, 11) + ith * word(params, 12)
        n_expert, w_expert, offsets = word(params, 13), word(params, 14), word(params, 15)
        per_expert = (n_w + height - 1) // height
        total = count_items(offsets, n_expert, per_expert)
        streaming = ld_i64(offsets + 8 * n_expert) * per_expert <= word(params, 16) * total
        while True:
            first, stop = next_items(params, total, nth, streaming)
            if first >= total:
                return
            e, item = locate(offsets, n_expert, per_expert, first)
            for _ in range(first, stop):
                if item == per_expert:
                    e, item = next_expert(offsets, n_expert, e + 1), 0
                lo, r = ld_i64(offsets + 8 * e), item * height
                item += 1
                m = ld_i64(offsets + 8 * e + 8) - lo
                x, y = a + lo * a_stride, out + lo * out_stride + 4 * r
                compute(params, ith, e * w_expert + r * row_bytes, min(height, n_w - r), k, x, m, y, tile)

    return by_expert


def make_mul_mat_id(type_name):
    """Expert matmul over rows sorted by expert; params: `_by_expert`."""
    block, height = _block(type_name)

    @inline
    def compute(params, ith, at, n, k, x, m, y, tile):
        few = word(params, 16)
        block(word(params, 3) + at, word(params, 4), n, k, x, word(params, 8), m, y, word(params, 10), tile, few)

    return _by_expert(height, compute)


def make_up_gate(type_name):
    """silu(gate) * up by expert. params: `_by_expert`, then 17 gate weights, 18 scratch, 19 its bytes per thread."""
    block, height = _block(type_name)

    @inline
    def compute(params, ith, at, n, k, x, m, y, tile):
        row_bytes, a_stride, out_stride = word(params, 4), word(params, 8), word(params, 10)
        scratch, few = word(params, 18) + ith * word(params, 19), word(params, 16)
        block(word(params, 17) + at, row_bytes, n, k, x, a_stride, m, scratch, 4 * height, tile, few)
        block(word(params, 3) + at, row_bytes, n, k, x, a_stride, m, y, out_stride, tile, few)
        for t in range(m):
            row = y + t * out_stride
            swiglu_span(row, scratch + 4 * height * t, row, 0, n)

    return _by_expert(height, compute)
