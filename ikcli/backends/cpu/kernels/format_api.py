"""The operations of every weight format: few products, and sixteen rows to a tile.

A group is the rows stored together (`fmt.rows`): 1, or 4, 8, 16 for the interleaved types. `w` is the address of a
group, `k` the number of columns. Tile modes and layout: `tile_modes.py`. Activation rows: `activations.py`.
"""

from ikcli.backends.cpu.kernels.group_dot import group_dot
from ikcli.backends.cpu.kernels.groupformat import GroupFormat, unpack_group
from ikcli.backends.cpu.kernels.row_dot import MOST_ROWS, row_dot
from ikcli.backends.cpu.kernels.row_dot_arm64 import row_dot_arm64
from ikcli.backends.cpu.kernels.row_dot_avx2 import row_dot_avx2
from ikcli.backends.cpu.kernels.unpack_tile import unpack_tile
from ikcli.backends.cpu.tile_modes import TILE_ROWS
from ikcli.native import isa
from ikcli.native.jit import inline


def few_dots(fmt):
    """Return dots(w, a, a_stride, m, k, out, out_stride): the rows of a group times m activation rows.

    Strides are in bytes. A group is decoded once for several activation rows; each result is that of the row alone, bit
    for bit.
    """
    features = isa.current().features
    is_group = isinstance(fmt, GroupFormat)
    if is_group or isa.current().is_arm64:
        make = group_dot if is_group else row_dot_arm64
    elif isa.current().plain_avx2:
        return _one_by_one(row_dot_avx2(fmt))
    else:
        make = row_dot
    if not {"avx512vnni", "avxvnni", "dotprod"} & features:
        # dot products take most of the time there, and a lot of code
        return _one_by_one(make(fmt, 1))
    if make is row_dot:
        return _looped(row_dot(fmt, 1), row_dot(fmt, MOST_ROWS), MOST_ROWS)
    return _unrolled(*(make(fmt, n) for n in (1, 2, 4)))


def _looped(dot1, dot_most, most):
    """Return dots for any number of activation rows from those of one, and of up to `most`."""

    @inline
    def dots(w, a, a_stride, m, k, out, out_stride):
        while m > 1:
            n = min(m, most)
            dot_most(w, a, a_stride, n, k, out, out_stride)
            a, out, m = a + n * a_stride, out + n * out_stride, m - n
        if m:
            dot1(w, a, a_stride, m, k, out, out_stride)

    return dots


def _unrolled(dot1, dot2, dot4):
    """Return dots for any number of activation rows; three of them cost as much as four."""

    @inline
    def dots(w, a, a_stride, m, k, out, out_stride):
        while m > 2:
            n = min(m, 4)
            dot4(w, a, a_stride, n, k, out, out_stride)
            a, out, m = a + n * a_stride, out + n * out_stride, m - n
        if m == 2:
            dot2(w, a, a_stride, m, k, out, out_stride)
        elif m == 1:
            dot1(w, a, a_stride, m, k, out, out_stride)

    return dots


def _one_by_one(dot1):
    @inline
    def dots(w, a, a_stride, m, k, out, out_stride):
        for t in range(m):
            dot1(w, a + t * a_stride, a_stride, 1, k, out + t * out_stride, out_stride)

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
