"""From format descriptions to the entries of `formats.FORMATS`."""

from ikcli.backends.cpu.kernels.groupformat import group_dot, unpack_group
from ikcli.backends.cpu.kernels.rowformat import row_dot, row_dots, unpack_row
from ikcli.backends.cpu.kernels.unpack_tile import unpack_tile
from ikcli.native.jit import inline
from ikcli.native.simd.vec import st_f32

_PLAIN = {}


def plain_formats(*formats):
    """name -> (rows, dot, unpack) for formats whose rows stand alone."""
    _PLAIN.update({fmt.name: fmt for fmt in formats})
    return {fmt.name: (1, _one_row(row_dot(fmt)), unpack_row(fmt)) for fmt in formats}


def _one_row(dot_row):
    @inline
    def dot(w, a, k, out):
        st_f32(out, dot_row(w, a, k))

    return dot


def several_dots(name):
    """(dots4, dots2) of a plain format (see `row_dots`); None for other formats."""
    return (row_dots(_PLAIN[name], 4), row_dots(_PLAIN[name], 2)) if name in _PLAIN else None


def tile_of_rows(name):
    """unpack(w, row_bytes, n, tile, k) of a plain format (see `unpack_tile`); None for other formats."""
    return unpack_tile(_PLAIN[name]) if name in _PLAIN else None


def group_formats(*formats):
    """As plain_formats for row-interleaved formats."""
    return {fmt.name: (fmt.rows, group_dot(fmt), unpack_group(fmt)) for fmt in formats}
