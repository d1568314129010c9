"""Multiply float weights: tiles of up to 512 columns, and groups of 16 rows (rows that stand alone: float_few.py).

f32 is multiplied with float32 activations, and so are f16 and bf16 on machines without products of 16-bit integers
(float_pairs.py) and of bfloat16. Others multiply bf16 with activations rounded to bfloat16, in pairs of columns.
bf16_r16 holds groups of 16 rows as 64 bytes per pair of columns: lane r is row r, the even column in its lower half.
"""

import numpy as np

from ikcli.backends.cpu.kernels.float_few import make_few
from ikcli.backends.cpu.kernels.float_pairs import make_pair_step, make_unpack_pairs
from ikcli.backends.cpu.kernels.gemm import float_tile, unpack_float16
from ikcli.backends.cpu.tile_modes import PAIRS_PART, makes_integers, rounds_activations
from ikcli.native import isa
from ikcli.native.jit import inline
from ikcli.native.simd.control import prefetch_l2
from ikcli.native.simd.dot import dot_bf16
from ikcli.native.simd.half import ld_bf16, ld_f16, st_bf16
from ikcli.native.simd.vec import (
    bcast_f32x16,
    bits_i32x16_f32,
    ld_f32,
    ld_i32,
    load_f32x16,
    load_i32x16,
    splat_i32x16,
    st_f32,
    store_f32x16,
    vadd,
    vand,
    vfma,
    vshl,
    zero_f32x16,
)

_F0 = np.float32(0.0)
_KC = PAIRS_PART
_KINDS = {"f32": (ld_f32, 4), "f16": (ld_f16, 2), "bf16": (ld_bf16, 2)}
# Rows of a tile (16 or 32), and activation rows multiplied together: as many as the registers hold sums for.
_ROWS, _TOKENS = (32, 12) if isa.current().name == "avx512" else (16, 6)


def _plain(kind):
    """Return unpack_tile for rows that stand alone."""
    ld, size = _KINDS[kind]
    unpack = unpack_float16(kind)

    @inline
    def unpack_tile(w, row_bytes, n, k0, kc, tile):
        """Return n <= _ROWS rows of columns k0 .. k0+kc-1; missing rows repeat the last one."""
        w += size * k0
        full = kc & ~15
        for r in range(0, _ROWS, 16):
            first = min(r, n - 1)
            for i in range(0, full, 16):
                at = tile + 4 * (_ROWS * i + r)
                unpack(w + first * row_bytes + size * i, row_bytes, min(n - first, 16), at, 4 * _ROWS)
        for i in range(full, kc):
            for r in range(_ROWS):
                st_f32(tile + 4 * (_ROWS * i + r), ld(w + min(r, n - 1) * row_bytes + size * i))

    return unpack_tile


# --- bfloat16 ---------------------------------------------------------------------------------------------------------
def _bf16():
    """Return unpack_tile for rows that stand alone."""
    unpack = unpack_float16("f32")  # moves pairs

    @inline
    def unpack_tile(w, row_bytes, n, k0, kc, tile):
        """Return pairs of columns k0 .. k0+kc-1 of n <= _ROWS rows; missing rows repeat the last one."""
        w += 2 * k0
        full = kc & ~31
        for r in range(0, _ROWS, 16):
            first = min(r, n - 1)
            for i in range(0, full, 32):
                at = tile + 2 * _ROWS * i + 4 * r
                unpack(w + first * row_bytes + 2 * i, row_bytes, min(n - first, 16), at, 4 * _ROWS)
        for i in range(full, (kc + 1) & ~1):
            for r in range(_ROWS):
                value = ld_bf16(w + min(r, n - 1) * row_bytes + 2 * i) if i < kc else _F0
                st_bf16(tile + 4 * (_ROWS * (i // 2) + r) + 2 * (i & 1), value)

    return unpack_tile


@inline
def _even(pairs):
    """Return the even columns of 16 pairs of bfloat16."""
    return bits_i32x16_f32(vshl(pairs, 16))


@inline
def _odd(pairs):
    return bits_i32x16_f32(vand(pairs, splat_i32x16(-65536)))


@inline
def _add_pair_bf16(total, pairs, x):
    """Return total + 16 rows of a column pair times two bfloat16 activations at x."""
    return dot_bf16(total, pairs, splat_i32x16(ld_i32(x)))


@inline
def _add_pair_f32(total, pairs, x):
    """Return total + 16 rows of a column pair times two float32 activations at x."""
    return vfma(_odd(pairs), bcast_f32x16(x + 4), vfma(_even(pairs), bcast_f32x16(x), total))


@inline
def _move_pairs(group, kc, tile):
    for i in range(0, kc, 2):
        store_f32x16(tile + 2 * _ROWS * i, load_f32x16(group + 32 * i))


@inline
def _split_pairs(group, kc, tile):
    for i in range(0, kc, 2):
        pairs = load_i32x16(group + 32 * i)
        store_f32x16(tile + 4 * _ROWS * i, _even(pairs))
        store_f32x16(tile + 4 * _ROWS * (i + 1), _odd(pairs))


def _sixteen_rows():
    """Return (few, unpack_tile) of bf16_r16; n is a multiple of 16."""
    add, size, unpack = (_add_pair_bf16, 2, _move_pairs) if rounds_activations() else (_add_pair_f32, 4, _split_pairs)

    @inline
    def few(w, row_bytes, n, k, a, a_stride, m, out, out_stride):
        for r in range(0, n, 16):
            for t in range(m):
                p, x = w + r * row_bytes, a + t * a_stride
                a0, a1, a2, a3 = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()
                for i in range(0, k & ~7, 8):
                    a0 = add(a0, load_i32x16(p + 32 * i), x + size * i)
                    a1 = add(a1, load_i32x16(p + 32 * i + 64), x + size * (i + 2))
                    a2 = add(a2, load_i32x16(p + 32 * i + 128), x + size * (i + 4))
                    a3 = add(a3, load_i32x16(p + 32 * i + 192), x + size * (i + 6))
                for i in range(k & ~7, k, 2):
                    a0 = add(a0, load_i32x16(p + 32 * i), x + size * i)
                store_f32x16(out + t * out_stride + 4 * r, vadd(vadd(a0, a1), vadd(a2, a3)))

    @inline
    def unpack_tile(w, row_bytes, n, k0, kc, tile):
        for r in range(0, _ROWS, 16):
            unpack(w + 32 * k0 + min(r, n - 16) * row_bytes, kc, tile + 4 * r)

    return few, unpack_tile


def _make_float_step(nt, pairs):
    """Return step(tile, k0, kc, k, a, a_stride, out, out_stride, n): a tile times nt activation rows."""
    micro, size = float_tile(_ROWS // 16, nt, pairs), 2 if pairs else 4

    @inline
    def step(tile, k0, kc, k, a, a_stride, out, out_stride, n):
        micro(tile, (kc + 1) // 2 if pairs else kc, a + size * k0, a_stride, out, out_stride, n, k0)

    return step


def _make_ask(size):
    """Return ask(w, row_bytes, n, k, k0, first, last), which prefetches rows into the L2 cache.

    It takes rows first .. last-1 of n of the next columns, or of the next n rows. size: bytes per weight.
    """

    @inline
    def ask(w, row_bytes, n, k, k0, first, last):
        begin = k0 + _KC
        if begin >= k:
            begin, w = 0, w + n * row_bytes
        n_bytes = size * min(_KC, k - begin)
        for r in range(first, min(last, n)):
            at = w + r * row_bytes + size * begin
            for i in range(0, n_bytes, 64):
                prefetch_l2(at + i)

    return ask


@inline
def _ask_nothing(w, row_bytes, n, k, k0, first, last):
    """Do nothing: groups of rows are read in memory order, which the hardware prefetcher follows."""


def _make_block(few, unpack_tile, make_step, ask):
    """Return a block like the integer blocks of `matmul.py`, for n <= _ROWS rows."""
    step_most, step4, step1 = (make_step(nt) for nt in (_TOKENS, 4, 1))

    @inline
    def block(w, row_bytes, n, k, a, a_stride, m, out, out_stride, tile, n_few):
        if m <= n_few:
            few(w, row_bytes, n, k, a, a_stride, m, out, out_stride)
            return
        for k0 in range(0, k, _KC):
            kc = min(_KC, k - k0)
            unpack_tile(w, row_bytes, n, k0, kc, tile)
            t = 0
            while t + _TOKENS <= m:
                step_most(tile, k0, kc, k, a + t * a_stride, a_stride, out + t * out_stride, out_stride, n)
                ask(w, row_bytes, n, k, k0, t * n // m, (t + _TOKENS) * n // m)
                t += _TOKENS
            while t + 4 <= m:
                step4(tile, k0, kc, k, a + t * a_stride, a_stride, out + t * out_stride, out_stride, n)
                t += 4
            while t < m:
                step1(tile, k0, kc, k, a + t * a_stride, a_stride, out + t * out_stride, out_stride, n)
                t += 1

    return block, _ROWS


def float_block(kind, activations=""):
    """Return (block, rows of it) of a float type; `activations` is "f32" for rows of f16 that stay floats."""
    if kind == "bf16_r16":
        return _make_block(*_sixteen_rows(), lambda nt: _make_float_step(nt, rounds_activations()), _ask_nothing)
    few, ask = make_few(kind), _make_ask(_KINDS[kind][1])
    if kind == "f16" and makes_integers() and activations != "f32":
        return _make_block(few, make_unpack_pairs(_ROWS), lambda nt: make_pair_step(_ROWS, nt), ask)
    pairs = kind == "bf16" and rounds_activations()
    return _make_block(few, _bf16() if pairs else _plain(kind), lambda nt: _make_float_step(nt, pairs), ask)
