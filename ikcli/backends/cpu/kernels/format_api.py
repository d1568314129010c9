"""The operations of every weight format: few products, and sixteen rows to a tile.

A group is the rows stored together (`fmt.rows`): 1, or 4, 8, 16 for the interleaved types. `w` is the address of a
group, `k` the number of columns. Tile modes and layout: `tile_modes.py`. Activation rows: `activations.py`.
"""

from ikcli.backends.cpu.kernels.group_dot import group_dot
from ikcli.backends.cpu.kernels.groupformat import GroupFormat, unpack_group
from ikcli.backends.cpu.kernels.row_dot import MOST_ROWS, row_dot, row_dots
from ikcli.backends.cpu.kernels.row_dot_arm64 import row_dot_arm64, row_dots_arm64
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
    # Elsewhere dot products take most of the time, and a lot of code.
    has_dots = bool({"avx512vnni", "avxvnni", "dotprod"} & isa.current().features)
    if isinstance(fmt, GroupFormat):
        return (
            _by_powers_of_two(*(group_dot(fmt, n) for n in (1, 2, 4))) if has_dots else _one_by_one(group_dot(fmt, 1))
        )
    if isa.current().is_arm64:
        return _looped(row_dot_arm64(fmt), row_dots_arm64(fmt)) if has_dots else _one_by_one(row_dot_arm64(fmt))
    if has_dots:
        return _looped(row_dot(fmt), row_dots(fmt))
    return _one_by_one(row_dot_avx2(fmt) if isa.current().plain_avx2 else row_dot(fmt))


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
