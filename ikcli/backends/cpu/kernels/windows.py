"""Locate the rows of the last positions of a sequence in window caches."""

from ikcli.backends.cpu.cell_places import WINDOWS
from ikcli.backends.cpu.kernels.common import SEG_WORDS, SEGMENTS, state_word
from ikcli.native.jit import inline
from ikcli.native.simd.vec import ld_i64


@inline
def window_cell(params, segment):
    """Return the address of the cell of position 0 of a segment (possibly virtual)."""
    i = (segment - state_word(params, SEGMENTS)) // (8 * SEG_WORDS)
    return ld_i64(state_word(params, WINDOWS) + 8 * i)
