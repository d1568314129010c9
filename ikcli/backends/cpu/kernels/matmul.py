"""mul_mat for every weight type (named as in `formats.py`), dense and by expert.

Blocks of weight rows are the work items. With few activation rows each weight row is dotted straight from memory. With
more, the block is dequantized once into tiles that all activation rows then share. Both are batch-invariant: the result
of a row does not depend on the other rows. They differ from each other; a program defines "few".
"""

from ikcli.backends.cpu.kernels.basic import swiglu_span
from ikcli.backends.cpu.kernels.common import WORK, n_rows, next_span, queues_of
from ikcli.backends.cpu.kernels.format_api import few_dots, unpack_sixteen
from ikcli.backends.cpu.kernels.formats import is_float, weight_format
from ikcli.backends.cpu.kernels.formats_float import float_block
from ikcli.backends.cpu.kernels.gemm import quant_tile
from ikcli.backends.cpu.kernels.gemm_arm64 import quant_tile_arm64
from ikcli.backends.cpu.kernels.gemm_avx2 import avx2_tile
from ikcli.backends.cpu.kernels.glu import glu_span
from ikcli.backends.cpu.kernels.records import kernel
from ikcli.backends.cpu.params_products import ByExpertParams, MulMatParams, UpGateParams, UpGluParams
from ikcli.backends.cpu.tile_modes import (
    MOST_OF_TWO,
    TILE_COUNTS,
    TILE_ROWS,
    TILES_TOGETHER,
    multiplies_tiles_together,
    rows_at_once,
    tile_bias,
    tile_bytes_per_step,
    tile_mode,
)
from ikcli.native import isa
from ikcli.native.jit import inline
from ikcli.native.simd.control import atomic_add
from ikcli.native.simd.vec import ld_i64

_FIRST_LEVEL = 31 << 10  # bytes of tiles that stay in the first-level cache, beside activations
_ALL_BLOCKS = 1 << 30  # no limit: products of narrow vectors take longer than reading tiles from the second level
_ITEMS_PER_THREAD = 4  # at least, so that threads end at about the same time


def _make_multiply(fmt, n_tiles, most):
    """Return multiply(tiles, stride, n, k, a, a_stride, m, out, out_stride).

    It multiplies n weight rows in tiles by m activation rows. It takes at most `most` activation rows, a power of two,
    at a time, and as many columns as keep the tiles in the first-level cache while all activation rows pass. These
    columns of the rows are read once for all tiles.
    """
    some, height = _make_some(fmt, n_tiles, most), n_tiles * TILE_ROWS
    # Computed for TILES_TOGETHER whatever n_tiles is: how columns are divided changes the order of float additions, and
    # a result must not depend on the number of tiles.
    step_bytes = TILES_TOGETHER * tile_bytes_per_step(tile_mode(fmt))
    at_once = 8 * max(_FIRST_LEVEL // step_bytes, 1) if multiplies_tiles_together() else _ALL_BLOCKS

    @inline
    def multiply(tiles, stride, n, k, a, a_stride, m, out, out_stride):
        for first in range(0, k // 32, at_once):
            # These columns of all tiles pass by all activation rows before the next columns are touched.
            n_blocks = min(at_once, k // 32 - first)
            for r in range(0, n, height):
                tile = tiles + r // TILE_ROWS * stride
                some(tile, stride, first, n_blocks, min(height, n - r), k, a, a_stride, m, out + 4 * r, out_stride)

    return multiply


def _make_some(fmt, n_tiles, most):
    """Return `_make_multiply` for the blocks of 32 columns from `first` on."""
    # One kernel per power of two covers any number of rows with few shapes to compile.
    if isa.current().is_arm64:
        micro = quant_tile_arm64(fmt.mode, most)
    else:
        micro = avx2_tile(fmt, most) or quant_tile(tile_mode(fmt), tile_bias(fmt), most, n_tiles)
    rest = _make_some(fmt, n_tiles, most // 2) if most > 1 else _nothing

    @inline
    def some(tiles, stride, first, n_blocks, n, k, a, a_stride, m, out, out_stride):
        # What is left after the widest kernel is below `most`, so each narrower one runs at most once.
        while m >= most:
            micro(tiles, stride, first, n_blocks, a, a_stride, k, out, out_stride, n)
            a, out, m = a + most * a_stride, out + most * out_stride, m - most
        rest(tiles, stride, first, n_blocks, n, k, a, a_stride, m, out, out_stride)

    return some


@inline
def _nothing(tiles, stride, first, n_blocks, n, k, a, a_stride, m, out, out_stride):
    return


def _tile_block(type_name):
    """Return block(w, row_bytes, n, k, a, a_stride, m, out, out_stride, tiles), which dequantizes n rows into tiles."""
    fmt = weight_format(type_name)
    unpack, step_bytes = unpack_sixteen(fmt), tile_bytes_per_step(tile_mode(fmt))
    one = _make_multiply(fmt, 1, rows_at_once())
    # Three tiles by four rows take 0.6 loads per dot product, one tile by eight rows 1.1.
    height = TILES_TOGETHER * TILE_ROWS if multiplies_tiles_together() else TILE_ROWS
    together = _make_multiply(fmt, TILES_TOGETHER, 4) if multiplies_tiles_together() else one

    @inline
    def block(w, row_bytes, n, k, a, a_stride, m, out, out_stride, tiles):
        stride = (k + 255) // 256 * step_bytes
        for r in range(0, n, TILE_ROWS):
            # Lanes behind the last row repeat earlier ones, and are not stored.
            unpack(w + r * row_bytes, row_bytes, min(TILE_ROWS, n - r), tiles + r // TILE_ROWS * stride, k)
        # The order of additions is the same in both kernels, so it does not matter which of them takes a row.
        whole = n // height * height
        together(tiles, stride, whole, k, a, a_stride, m, out, out_stride)
        one(tiles + whole // TILE_ROWS * stride, stride, n - whole, k, a, a_stride, m, out + 4 * whole, out_stride)

    return block


def _integer_block(type_name):
    """Return (block, rows of a tile): out[t][r] for n rows, at most those of the tiles, and m activations.

    For few activations the block uses straight dots.
    """
    fmt = weight_format(type_name)
    dots, by_tile = few_dots(fmt), _tile_block(type_name)

    @inline
    def block(w, row_bytes, n, k, a, a_stride, m, out, out_stride, tiles, few):
        # Unpacking pays only if enough activation rows share the tile; below that, codes are used once, from registers.
        if m > few:
            by_tile(w, row_bytes, n, k, a, a_stride, m, out, out_stride, tiles)
            return
        dots(w, row_bytes, n, a, a_stride, m, k, out, out_stride)

    return block, TILE_ROWS


def _block(type_name, activations=""):
    """Return (block, rows of a tile)."""
    return float_block(type_name, activations) if is_float(type_name) else _integer_block(type_name)


@inline
def item_rows(height, n_tiles, n_w, nth):
    """Return the weight rows of a work item of tiles: those of all tiles if that leaves enough items."""
    # Taller items share each activation load between tiles; with too few items threads would idle at the end.
    for n in TILE_COUNTS:
        if n <= n_tiles and n_w >= _ITEMS_PER_THREAD * nth * n * height:
            return n * height
    return height


def make_mul_mat(type_name, activations=""):
    """Return the dense and per-head matmul; `activations`: "f32" where rows of f16 stay floats."""
    block, tile_rows = _block(type_name, activations)

    @kernel(MulMatParams)
    def mul_mat(params, ith, nth):
        p = params.product
        w, row_bytes, n_w, k = p.w, p.row_bytes, p.n_w, p.k
        a, a_stride, out, out_stride = p.a, p.a_stride, p.out, p.out_stride
        n_tiles, few = p.n_tiles, p.few
        # Tiles belong to a thread. All that threads share is the counter of work items.
        tiles = p.tiles + ith * n_tiles * p.tile_bytes
        heads, w_head, a_head, out_head = params.heads, params.w_head, params.a_head, params.out_head
        m = n_rows(params)
        height = tile_rows if m <= few else item_rows(tile_rows, n_tiles, n_w * heads, nth)
        per_head = (n_w + height - 1) // height
        total = per_head * heads
        if m == 0:
            return
        n_queues, sharing = queues_of(nth, m <= few)
        for turn in range(n_queues):
            queue = (ith * n_queues // nth + turn) % n_queues
            begin, end = total * queue // n_queues, total * (queue + 1) // n_queues
            while True:
                first, stop = next_items(params.address - WORK + 8 * queue, end - begin, sharing, m <= few)
                if first >= end - begin:
                    break
                for item in range(begin + first, begin + stop):
                    # Items of one head are adjacent, so that its activations stay in the cache.
                    h, r = item // per_head, item % per_head * height
                    block(
                        w + h * w_head + r * row_bytes, row_bytes, min(height, n_w - r), k, a + h * a_head, a_stride,
                        m, out + h * out_head + 4 * r, out_stride, tiles, few,
                    )  # fmt: skip

    return mul_mat


@inline
def next_items(counter, total, n_threads, streaming):
    """Return a range of work items of a queue: long runs if the weights are streamed, else one block at a time."""
    if streaming:
        return next_span(counter, total, n_threads)
    first = atomic_add(counter, 1)
    return first, min(first + 1, total)


@inline
def next_expert(offsets, n_expert, e):
    """Return the first expert from e on that has rows, or n_expert."""
    while e < n_expert and ld_i64(offsets + 8 * (e + 1)) == ld_i64(offsets + 8 * e):
        e += 1
    return e


@inline
def locate(offsets, n_expert, per_expert, item):
    """Return (expert, block) of a work item; experts without rows have no items."""
    e = next_expert(offsets, n_expert, 0)
    while item >= per_expert:
        item -= per_expert
        e = next_expert(offsets, n_expert, e + 1)
    return e, item


@inline
def count_active(offsets, n_expert):
    """Return how many of the first experts have rows."""
    total = 0
    for e in range(n_expert):
        if ld_i64(offsets + 8 * (e + 1)) > ld_i64(offsets + 8 * e):
            total += 1
    return total


@inline
def rows_of_two(height, n_w, nth):
    """Return the weight rows of a work item of two matrices that are streamed in turns: long runs of each."""
    for n in (MOST_OF_TWO, MOST_OF_TWO // 2, MOST_OF_TWO // 4, MOST_OF_TWO // 8):
        if n_w >= _ITEMS_PER_THREAD * nth * n:
            return n
    return height


def _by_expert(record, tile_rows, compute, streamed_rows):
    """Return a kernel that runs `compute` on every block of rows of every expert that has activation rows.

    compute(params, ith, e, at, n, k, x, m, y, tiles): `at` = bytes into the matrix of expert e, n rows.
    streamed_rows(tile_rows, n_w, nth): the rows of a block where weights are streamed; they may be more than the tiles
    have.
    """

    @kernel(record)
    def by_expert(params, ith, nth):
        p, experts = params.product, params.experts
        row_bytes, n_w, k = p.row_bytes, p.n_w, p.k
        a, a_stride, out, out_stride = p.a, p.a_stride, p.out, p.out_stride
        n_tiles, few = p.n_tiles, p.few
        tiles = p.tiles + ith * n_tiles * p.tile_bytes
        n_expert, offsets = experts.n_expert, experts.offsets
        n_active = count_active(offsets, n_expert)
        # On average few rows per expert: weights are then read once, straight from memory.
        streaming = ld_i64(offsets + 8 * n_expert) <= few * n_active
        if streaming:
            height = streamed_rows(tile_rows, n_w * n_active, nth)
        else:
            height = item_rows(tile_rows, n_tiles, n_w * n_active, nth)
        per_expert = (n_w + height - 1) // height
        n_nodes, total = experts.n_nodes, n_active * per_expert
        n_queues, sharing = queues_of(nth, streaming)
        own = ith * n_queues // nth
        if n_nodes > 1:  # a thread takes the experts in the memory of its node, then helps other nodes with theirs
            n_queues, sharing, own = n_nodes, nth, experts.node
        for turn in range(n_queues):
            queue = (own + turn) % n_queues
            begin, end = total * queue // n_queues, total * (queue + 1) // n_queues
            if n_nodes > 1:
                begin = count_active(offsets, n_expert * queue // n_nodes) * per_expert
                end = count_active(offsets, n_expert * (queue + 1) // n_nodes) * per_expert
            while True:
                first, stop = next_items(params.address - WORK + 8 * queue, end - begin, sharing, streaming)
                if first >= end - begin:
                    break
                # Searched for once per range; from then on the next expert follows the last.
                e, item = locate(offsets, n_expert, per_expert, begin + first)
                for _ in range(first, stop):
                    if item == per_expert:
                        e, item = next_expert(offsets, n_expert, e + 1), 0
                    # Activation rows are sorted by expert: those of one are adjacent in `a` and `out`.
                    lo, r = ld_i64(offsets + 8 * e), item * height
                    item += 1
                    m = ld_i64(offsets + 8 * e + 8) - lo
                    x, y = a + lo * a_stride, out + lo * out_stride + 4 * r
                    compute(params, ith, e, r * row_bytes, min(height, n_w - r), k, x, m, y, tiles)

    return by_expert


def make_mul_mat_id(type_name):
    """Return the expert matmul over rows sorted by expert."""
    block, tile_rows = _block(type_name)

    @inline
    def compute(params, ith, e, at, n, k, x, m, y, tiles):
        p = params.product
        few = p.few
        block(ld_i64(p.w + 8 * e) + at, p.row_bytes, n, k, x, p.a_stride, m, y, p.out_stride, tiles, few)

    return _by_expert(ByExpertParams, tile_rows, compute, _rows_of_one)


@inline
def _rows_of_one(height, n_w, nth):
    return height


def make_up_gate(type_name):
    """Return silu(gate) * up by expert."""

    @inline
    def glu(params, out, gate, up, n):
        swiglu_span(out, gate, up, 0, n)

    return _up_gate(UpGateParams, type_name, glu)


def make_up_glu(type_name, kind, limited):
    """Return another `Glu` of gate and up by expert."""
    span = glu_span(kind, limited)

    @inline
    def glu(params, out, gate, up, n):
        span(out, gate, up, 0, n, params.limit, params.alpha)

    return _up_gate(UpGluParams, type_name, glu)


def _up_gate(record, type_name, glu):
    """Return a kernel of both products by expert, combined by `glu(params, out, gate, up, n)`."""
    block, tile_rows = _block(type_name)

    @inline
    def compute(params, ith, e, at, n, k, x, m, y, tiles):
        p = params.product
        row_bytes, a_stride, out_stride = p.row_bytes, p.a_stride, p.out_stride
        # Both products are combined while they are in the cache, and the gate needs no matrix of its own.
        scratch, few = params.scratch + ith * params.scratch_bytes, p.few
        # Others than those of most experts may be many where weights are streamed: then tiles limit the rows.
        step = n if m <= few else p.n_tiles * tile_rows
        for r in range(0, n, step):
            rows, to, begin = min(step, n - r), y + 4 * r, at + r * row_bytes
            block(
                ld_i64(params.gate + 8 * e) + begin, row_bytes, rows, k, x, a_stride, m, scratch, 4 * rows, tiles, few
            )
            block(ld_i64(p.w + 8 * e) + begin, row_bytes, rows, k, x, a_stride, m, to, out_stride, tiles, few)
            for t in range(m):
                row = to + t * out_stride
                glu(params, row, scratch + 4 * rows * t, row, rows)

    return _by_expert(record, tile_rows, compute, rows_of_two)
