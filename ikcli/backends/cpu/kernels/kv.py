"""Read and write KV cache rows: elements of every cache type, the kv_store and kv_rows kernels.

A cache row holds `cols` elements of f32, f16 or bf16, or quantized (kv_blocks.py). A new cache type needs two device
functions: one returns 16 elements as f32 (at an index that is a multiple of 16 for block types), one stores a run of
f32. Types whose elements can be addressed one by one also need `_LOAD1`.
"""

from ikcli.backends.cpu.kernels import kv_blocks
from ikcli.backends.cpu.kernels.basic import copy_f32
from ikcli.backends.cpu.kernels.common import CELLS, KV_CELLS, n_rows, state_word
from ikcli.backends.cpu.kernels.records import kernel
from ikcli.backends.cpu.params_attention import KvRowsParams, KvStoreParams, KvStoreTransposedParams
from ikcli.native.jit import inline
from ikcli.native.simd.control import prefetch
from ikcli.native.simd.half import (
    ld_bf16,
    ld_f16,
    load_bf16x16,
    load_f16x16,
    st_bf16,
    st_f16,
    store_bf16x16,
    store_f16x16,
)
from ikcli.native.simd.vec import ld_f32, ld_i64, load_f32x16, st_f32, store_f32x16, zero_f32x16


# --- 16 elements, one element ----------------------------------------------------------------------------------------
def _make_at(load, size):
    """Return at(row, i): the address of element i."""

    @inline
    def at(row, i):
        return load(row + size * i)

    return at


_FLOATS = {"f32": (load_f32x16, ld_f32, 4), "f16": (load_f16x16, ld_f16, 2), "bf16": (load_bf16x16, ld_bf16, 2)}
LOAD16 = {name: _make_at(load, size) for name, (load, _, size) in _FLOATS.items()} | kv_blocks.LOAD16
_LOAD1 = {name: _make_at(load, size) for name, (_, load, size) in _FLOATS.items()}
_GEOMETRY = {"f32": (0, 1, 4), "f16": (0, 1, 2), "bf16": (0, 1, 2), **kv_blocks.GEOMETRY}


def make_load_tail(type_):
    """Return load_tail(dst, row, i, n): fewer than 16 elements as f32; slices of block types have none."""
    if type_ not in _LOAD1:

        @inline
        def no_tail(dst, row, i, n):
            return

        return no_tail
    load1 = _LOAD1[type_]

    @inline
    def load_tail(dst, row, i, n):
        for j in range(n):
            st_f32(dst + 4 * j, load1(row, i + j))

    return load_tail


def make_stage(type_):
    """Return stage(dst, chunk_bytes, row, i, n): elements [i, i+n) of a row as f32, zero padded.

    Every chunk_bytes hold 16 elements.
    """
    load16, load_tail = LOAD16[type_], make_load_tail(type_)

    @inline
    def stage(dst, chunk_bytes, row, i, n):
        end = i + (n & ~15)
        while i & 31 == 0 and i + 32 <= end:  # two halves of a block have the same scale
            x, y = load16(row, i), load16(row, i + 16)
            store_f32x16(dst, x)
            store_f32x16(dst + chunk_bytes, y)
            dst += 2 * chunk_bytes
            i += 32
        while i < end:
            store_f32x16(dst, load16(row, i))
            dst += chunk_bytes
            i += 16
        if n & 15 != 0:
            store_f32x16(dst, zero_f32x16())
            load_tail(dst, row, i, n & 15)

    return stage


def make_prefetch_row(type_):
    """Return prefetch_row(row, i, n), which prefetches the cache lines of elements [i, i+n)."""
    header, block, size = _GEOMETRY[type_]

    @inline
    def prefetch_row(row, i, n):
        end = row + header + (i + n + block - 1) // block * size
        row += header + i // block * size
        while row < end:
            prefetch(row)
            row += 64

    return prefetch_row


# --- storing ---------------------------------------------------------------------------------------------------------
@inline
def _store_f32(row, i, src, n):
    copy_f32(row + 4 * i, src, n)


@inline
def _store_f16(row, i, src, n):
    dst, full = row + 2 * i, n & ~15
    for j in range(0, full, 16):
        store_f16x16(dst + 2 * j, load_f32x16(src + 4 * j))
    for j in range(full, n):
        st_f16(dst + 2 * j, ld_f32(src + 4 * j))


@inline
def _store_bf16(row, i, src, n):
    dst, full = row + 2 * i, n & ~15
    for j in range(0, full, 16):
        store_bf16x16(dst + 2 * j, load_f32x16(src + 4 * j))
    for j in range(full, n):
        st_bf16(dst + 2 * j, ld_f32(src + 4 * j))


STORE = {"f32": _store_f32, "f16": _store_f16, "bf16": _store_bf16, **kv_blocks.STORE}
_STORE1 = {"f32": (4, st_f32), "f16": (2, st_f16), "bf16": (2, st_bf16)}


# --- kernels ---------------------------------------------------------------------------------------------------------
def make_kv_store(type_):
    store = STORE[type_]

    @kernel(KvStoreParams)
    def kv_store(params, ith, nth):
        x, stride, cols = params.x, params.stride, params.cols
        cache, row_bytes, first = params.cache, params.row_bytes, params.first
        cells = state_word(params, params.cells)
        rows = n_rows(params)
        for t in range(rows * ith // nth, rows * (ith + 1) // nth):
            store(cache + ld_i64(cells + 8 * t) * row_bytes, first, x + t * stride, cols)

    return kv_store


def make_kv_store_transposed(type_):
    size, store1 = _STORE1[type_]

    @kernel(KvStoreTransposedParams)
    def kv_store_transposed(params, ith, nth):
        x, stride, cols = params.x, params.stride, params.cols
        cache, n_cells = params.cache, params.n_cells
        cells = state_word(params, CELLS)
        rows = n_rows(params)
        for c in range(cols * ith // nth, cols * (ith + 1) // nth):
            for t in range(rows):
                store1(cache + size * (c * n_cells + ld_i64(cells + 8 * t)), ld_f32(x + t * stride + 4 * c))

    return kv_store_transposed


def make_kv_rows(type_):
    load16, load_tail = LOAD16[type_], make_load_tail(type_)

    @kernel(KvRowsParams)
    def kv_rows(params, ith, nth):
        cache, row_bytes, first = params.cache, params.row_bytes, params.first
        cols, out = params.cols, params.out
        cells = state_word(params, KV_CELLS)
        rows = n_rows(params)
        full = cols & ~15
        for r in range(rows * ith // nth, rows * (ith + 1) // nth):
            row = cache + ld_i64(cells + 8 * r) * row_bytes
            dst = out + 4 * r * cols
            for i in range(0, full, 16):
                store_f32x16(dst + 4 * i, load16(row, first + i))
            load_tail(dst + 4 * full, row, first + full, cols - full)

    return kv_rows
