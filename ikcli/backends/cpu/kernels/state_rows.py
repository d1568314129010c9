"""Locate states: tensors with one row per sequence, which recurrent ops read and replace."""

from ikcli.backends.cpu.kernels.common import SEG_POS, SEG_WORDS, SEGMENTS, state_word
from ikcli.native.jit import inline
from ikcli.native.simd.vec import ld_i64

SEQS = 10  # word of the state block: address of i64[n_seg], the sequence of each segment


@inline
def state_row(params, i, states, row_bytes):
    """Return the address of the state of segment i, in a tensor of rows of `row_bytes` bytes."""
    return states + row_bytes * ld_i64(state_word(params, SEQS) + 8 * i)


@inline
def begins(params, i):
    """Return whether segment i is the beginning of its sequence, whose state is zero whatever is stored."""
    return ld_i64(state_word(params, SEGMENTS) + 8 * (SEG_WORDS * i + SEG_POS)) == 0
