"""From format descriptions to the entries of `formats.FORMATS`."""

from ikcli.backends.cpu.kernels.groupformat import group_dot, unpack_group
from ikcli.backends.cpu.kernels.rowformat import row_dot, unpack_row
from ikcli.native.jit import inline
from ikcli.native.simd.vec import st_f32


def plain_formats(*formats):
    """name -> (rows, dot, unpack) for formats whose rows stand alone."""
    return {fmt.name: (1, _one_row(row_dot(fmt)), unpack_row(fmt)) for fmt in formats}


def _one_row(dot_row):
    @inline
    def dot(w, a, k, out):
        st_f32(out, dot_row(w, a, k))

    return dot


def group_formats(*formats):
    """As plain_formats for row-interleaved formats."""
    return {fmt.name: (fmt.rows, group_dot(fmt), unpack_group(fmt)) for fmt in formats}
