"""Helpers for writing weight formats."""

from ikcli.backends.cpu.jit import inline
from ikcli.backends.cpu.simd.vec import st_f32


def one_row(dot_row):
    """A `dot` for formats whose rows stand alone, from dot_row(w, a, k) -> float."""

    @inline
    def dot(w, a, k, out):
        st_f32(out, dot_row(w, a, k))

    return dot
