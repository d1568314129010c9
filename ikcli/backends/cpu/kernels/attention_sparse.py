"""Flash attention to chosen positions: rows of the cache are gathered by cell, everything else is attention.py.

A task has one token, because tokens choose different positions. Its positions are numbered as in the list of chosen
cells, so nothing is masked, and parts of a split task are parts of the list.
"""

from ikcli.backends.cpu.kernels.attention import AHEAD, make_combine, make_flash_attn
from ikcli.backends.cpu.kernels.kv import make_prefetch_row, make_stage
from ikcli.backends.cpu.kernels.sgemm import CHUNK_ROW
from ikcli.backends.cpu.params_attention import PrefixParams, SparseParams
from ikcli.native.jit import inline
from ikcli.native.simd.vec import ld_i32


def make_stage_chosen(type_):
    """Return stage_chosen(params, part, cells, kv_head, dst, chunk_bytes, position, n): rows of cells, as chunks."""
    stage, prefetch_row = make_stage(type_), make_prefetch_row(type_)

    @inline
    def stage_chosen(params, part, cells, kv_head, dst, chunk_bytes, position, n):
        stride, width = part.row_bytes, part.width
        element = part.offset + kv_head * part.head_stride
        here = cells + kv_head * params.list_bytes + 4 * position
        for i in range(n):
            # Rows are scattered, so the hardware cannot know the next ones.
            prefetch_row(part.at + ld_i32(here + 4 * min(i + AHEAD, n - 1)) * stride, element, width)
            stage(dst + CHUNK_ROW * i, chunk_bytes, part.at + ld_i32(here + 4 * i) * stride, element, width)

    return stage_chosen


def make_flash_sparse(k_types, v_type, more=""):
    """Return the kernel for these element types of K and V; `more`: "s" with sinks."""
    return make_flash_attn(k_types, v_type, "i" + more, make_stage_chosen, SparseParams)


def make_combine_sparse(more=""):
    """Return the kernel that merges the parts of split tasks."""
    return make_combine("i" + more, SparseParams)


def make_stage_prefixed(type_):
    """Return stage_prefixed(...), as above, of f32 rows before all positions, then of rows of cells."""
    stage, stage_chosen = make_stage("f32"), make_stage_chosen(type_)

    @inline
    def stage_prefixed(params, part, cells, kv_head, dst, chunk_bytes, position, n):
        first = max(min(params.n_prefix - position, n), 0)
        for i in range(first):
            row = params.prefix + (position + i) * params.prefix_bytes
            stage(dst + CHUNK_ROW * i, chunk_bytes, row, part.offset, part.width)
        if first < n:
            at = position + first - params.n_prefix
            stage_chosen(params, part, cells, kv_head, dst + CHUNK_ROW * first, chunk_bytes, at, n - first)

    return stage_prefixed


def make_flash_prefixed(k_types, v_type):
    """Return the kernel with rows before all positions."""
    return make_flash_attn(k_types, v_type, "if", make_stage_prefixed, PrefixParams)


def make_combine_prefixed():
    """Return the kernel that merges the parts of its split tasks."""
    return make_combine("if", PrefixParams)
