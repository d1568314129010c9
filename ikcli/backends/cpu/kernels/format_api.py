"""The operations of every weight format: few products, and sixteen rows to a tile.

A group is the rows stored together (`fmt.rows`): 1, or 4, 8, 16 for the interleaved types. `w` is the address of a
group, `k` the number of columns. Tile modes and layout: `tile_modes.py`. Activation rows: `activations.py`.
"""

from ikcli.backends.cpu.kernels.activations import TWICE_AT
from ikcli.backends.cpu.kernels.group_dot import group_dot
from ikcli.backends.cpu.kernels.groupformat import GroupFormat, unpack_group
from ikcli.backends.cpu.kernels.row_dot import MOST_ROWS, row_dot, row_dots, rows_side_by_side, two_rows
from ikcli.backends.cpu.kernels.row_dot_arm64 import row_dot_arm64, row_dots_arm64
from ikcli.backends.cpu.kernels.row_dot_avx2 import row_dot_avx2, row_dots_avx2, two_rows_avx2
from ikcli.backends.cpu.kernels.unpack_tile import unpack_tile
from ikcli.backends.cpu.tile_modes import HALF_STEP, TILE_ROWS
from ikcli.native import isa
from ikcli.native.jit import inline


def few_dots(fmt):
    """Return dots(w, row_bytes, n, a, a_stride, m, k, out, out_stride): n weight rows times m activation rows.

    The n rows are whole groups. Strides are in bytes. Weights are decoded once for several activation rows; each
    result is that of the row alone, bit for bit.
    """
    has_dots = isa.current().vnni or "dotprod" in isa.current().features
    short_vectors = isa.current().short_vectors
    if isinstance(fmt, GroupFormat):
        if has_dots or short_vectors:
            return _by_groups(fmt, _by_powers_of_two(*(group_dot(fmt, n) for n in (1, 2, 4))))
        return _by_groups(fmt, _one_by_one(group_dot(fmt, 1)))
    if isa.current().is_arm64:
        row = row_dot_arm64(fmt)
        return _by_groups(fmt, _looped(row, row_dots_arm64(fmt)) if has_dots else _one_by_one(row))
    if short_vectors:
        return _or_by_two(fmt, _side_by_side(row_dot_avx2(fmt), row_dots_avx2(fmt), 1), two_rows_avx2)
    if has_dots:
        n_rows = rows_side_by_side(fmt)
        return _or_by_two(fmt, _side_by_side(row_dot(fmt), row_dots(fmt, n_rows), n_rows), two_rows)
    # Elsewhere dot products take most of the time, and a lot of code.
    return _or_by_two(fmt, _by_groups(fmt, _one_by_one(row_dot(fmt))), two_rows)


def _by_groups(fmt, of_group):
    rows = fmt.rows

    @inline
    def dots(w, row_bytes, n, a, a_stride, m, k, out, out_stride):
        for r in range(0, n, rows):
            of_group(w + r * row_bytes, a, a_stride, m, k, out + 4 * r, out_stride)

    return dots


def _one_by_one(dot1):
    @inline
    def dots(w, a, a_stride, m, k, out, out_stride):
        for t in range(m):
            dot1(w, a + t * a_stride, a_stride, k, out + t * out_stride, out_stride)

    return dots


def _looped(dot1, dot_some):
    @inline
    def dots(w, a, a_stride, m, k, out, out_stride):
        while m > 1:
            n = min(m, MOST_ROWS)
            dot_some(w, a, a_stride, n, k, out, out_stride)
            a, out, m = a + n * a_stride, out + n * out_stride, m - n
        if m:
            dot1(w, a, a_stride, k, out, out_stride)

    return dots


def _side_by_side(dot1, dot_some, n_rows):
    @inline
    def dots(w, row_bytes, n, a, a_stride, m, k, out, out_stride):
        whole = n // n_rows * n_rows if m > 1 else 0
        for r in range(0, whole, n_rows):
            for t in range(0, m, MOST_ROWS):
                x, y = a + t * a_stride, out + t * out_stride + 4 * r
                dot_some(w + r * row_bytes, row_bytes, x, a_stride, min(m - t, MOST_ROWS), k, y, out_stride)
        for r in range(whole, n):  # one activation row, or the last weight rows of a matrix
            for t in range(m):
                dot1(w + r * row_bytes, a + t * a_stride, a_stride, k, out + t * out_stride + 4 * r, out_stride)

    return dots


def _or_by_two(fmt, dots, make_two):
    """Return `dots`, or for rows of HALF_STEP columns a function that reads two of them as one row of 256 columns.

    Alone, such a row would be copied to fill half of a step. Rows of attention heads (`attn_k_b`) are as short.
    """
    if fmt.block_columns > 32 or fmt.header_bytes:
        return dots
    two = make_two(fmt)

    @inline
    def dots_or_two(w, row_bytes, n, a, a_stride, m, k, out, out_stride):
        whole = n & ~1 if k == HALF_STEP else 0
        for r in range(0, whole, 2):
            for t in range(m):
                two(w + r * row_bytes, a + t * a_stride + TWICE_AT, out + t * out_stride + 4 * r)
        dots(w + whole * row_bytes, row_bytes, n - whole, a, a_stride, m, k, out + 4 * whole, out_stride)

    return dots_or_two


def _by_powers_of_two(dot1, dot2, dot4):
    # Decoding is a small part of these products: a loop over activation rows, with codes in memory, takes longer.
    @inline
    def dots(w, a, a_stride, m, k, out, out_stride):
        while m >= 4:
            dot4(w, a, a_stride, k, out, out_stride)
            a, out, m = a + 4 * a_stride, out + 4 * out_stride, m - 4
        if m >= 2:
            dot2(w, a, a_stride, k, out, out_stride)
            a, out, m = a + 2 * a_stride, out + 2 * out_stride, m - 2
        if m:
            dot1(w, a, a_stride, k, out, out_stride)

    return dots


def unpack_sixteen(fmt):
    """Return unpack(w, row_bytes, n, tile, k): a whole tile; if n < 16, groups from the last one on are repeated."""
    if not isinstance(fmt, GroupFormat):
        return unpack_tile(fmt)
    rows, unpack_rows = fmt.rows, unpack_group(fmt)

    @inline
    def unpack(w, row_bytes, n, tile, k):
        for r in range(0, TILE_ROWS, rows):
            unpack_rows(w + min(r, n - rows) * row_bytes, tile, r, k)

    return unpack
