"""The operations of every weight format: few products, and sixteen rows to a tile.

A group is the rows stored together (`fmt.rows`): 1, or 4, 8, 16 for the interleaved types. `w` is the address of a
group, `k` the number of columns. Tile modes and layout: `tile_modes.py`. Activation rows: `activations.py`.
"""

from ikcli.backends.cpu.kernels.group_dot import group_dot
from ikcli.backends.cpu.kernels.groupformat import GroupFormat, unpack_group
from ikcli.backends.cpu.kernels.row_dot import MOST_ROWS, row_dot, row_dots, rows_side_by_side
from ikcli.backends.cpu.kernels.row_dot_arm64 import row_dot_arm64
from ikcli.backends.cpu.kernels.row_dot_avx2 import row_dot_avx2
from ikcli.backends.cpu.kernels.unpack_tile import unpack_tile
from ikcli.backends.cpu.tile_modes import TILE_ROWS
from ikcli.native import isa
from ikcli.native.jit import inline


def few_dots(fmt):
    """Return dots(w, row_bytes, n, a, a_stride, m, k, out, out_stride): n weight rows times m activation rows.

    The n rows are whole groups. Strides are in bytes. Weights are decoded once for several activation rows; each
    result is that of the row alone, bit for bit.
    """
    # Elsewhere dot products take most of the time, and a lot of code.
    has_dots = bool({"avx512vnni", "avxvnni", "dotprod"} & isa.current().features)
    if isinstance(fmt, GroupFormat) or isa.current().is_arm64:
        make = group_dot if isinstance(fmt, GroupFormat) else row_dot_arm64
        return _by_groups(
            fmt, _by_powers_of_two(*(make(fmt, n) for n in (1, 2, 4))) if has_dots else _one_by_one(make(fmt, 1))
        )
    if has_dots:
        n_rows = rows_side_by_side(fmt)
        return _side_by_side(row_dot(fmt), row_dots(fmt, n_rows), n_rows)
    return _by_groups(fmt, _one_by_one(row_dot_avx2(fmt) if isa.current().plain_avx2 else row_dot(fmt)))


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
