"""Float weights (f32, f16, bf16) times float32 activations: straight dots, and 32-row tiles of up to 512 columns.

bf16_r16 holds groups of 16 rows as 64 bytes per pair of columns: lane r is row r, the even column in its lower half.
"""

from ikcli.backends.cpu.kernels.gemm import float_tile, unpack_float16
from ikcli.native.jit import inline
from ikcli.native.simd.vec import (
    bcast_f32x16,
    bits_i32x16_f32,
    ld_bf16,
    ld_f16,
    ld_f32,
    load_bf16x16,
    load_f16x16,
    load_f32x16,
    load_i32x16,
    reduce_add,
    splat_i32x16,
    st_f32,
    store_f32x16,
    vadd,
    vand,
    vfma,
    vshl,
    zero_f32x16,
)

_KC = 512
_KINDS = {"f32": (load_f32x16, ld_f32, 4), "f16": (load_f16x16, ld_f16, 2), "bf16": (load_bf16x16, ld_bf16, 2)}


def _make_dot(kind):
    load, ld, size = _KINDS[kind]

    @inline
    def dot_row(w, a, k):
        a0, a1, a2, a3 = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()
        full = k & ~63
        for i in range(0, full, 64):
            p, x = w + size * i, a + 4 * i
            a0 = vfma(load(p), load_f32x16(x), a0)
            a1 = vfma(load(p + 16 * size), load_f32x16(x + 64), a1)
            a2 = vfma(load(p + 32 * size), load_f32x16(x + 128), a2)
            a3 = vfma(load(p + 48 * size), load_f32x16(x + 192), a3)
        total = reduce_add(vadd(vadd(a0, a1), vadd(a2, a3)))
        for i in range(full, k):
            total += ld(w + size * i) * ld_f32(a + 4 * i)
        return total

    return dot_row


def _plain(kind):
    """(few, unpack_tile) of rows that stand alone."""
    dot_row = _make_dot(kind)
    _, ld, size = _KINDS[kind]
    unpack = unpack_float16(kind)

    @inline
    def few(w, row_bytes, n, k, a, a_stride, m, out, out_stride):
        for r in range(n):
            for t in range(m):
                st_f32(out + t * out_stride + 4 * r, dot_row(w + r * row_bytes, a + t * a_stride, k))

    @inline
    def unpack_tile(w, row_bytes, n, k0, kc, tile):
        """n <= 32 rows of columns k0 .. k0+kc-1; missing rows repeat the last one."""
        w += size * k0
        full = kc & ~15
        n0, n1 = min(n, 16), max(n - 16, 1)
        second = w + (16 if n > 16 else n - 1) * row_bytes
        for i in range(0, full, 16):
            unpack(w + size * i, row_bytes, n0, tile + 128 * i, 128)
            unpack(second + size * i, row_bytes, n1, tile + 128 * i + 64, 128)
        for i in range(full, kc):
            for r in range(32):
                st_f32(tile + 128 * i + 4 * r, ld(w + min(r, n - 1) * row_bytes + size * i))

    return few, unpack_tile


def _sixteen_rows():
    """(few, unpack_tile) of bf16_r16; n is a multiple of 16."""

    @inline
    def even(v):
        return bits_i32x16_f32(vshl(v, 16))

    @inline
    def odd(v):
        return bits_i32x16_f32(vand(v, splat_i32x16(-65536)))

    @inline
    def few(w, row_bytes, n, k, a, a_stride, m, out, out_stride):
        for r in range(0, n, 16):
            for t in range(m):
                p, x = w + r * row_bytes, a + t * a_stride
                a0, a1, a2, a3 = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()
                for i in range(0, k & ~3, 4):
                    v0, v1 = load_i32x16(p + 32 * i), load_i32x16(p + 32 * i + 64)
                    a0 = vfma(even(v0), bcast_f32x16(x + 4 * i), a0)
                    a1 = vfma(odd(v0), bcast_f32x16(x + 4 * i + 4), a1)
                    a2 = vfma(even(v1), bcast_f32x16(x + 4 * i + 8), a2)
                    a3 = vfma(odd(v1), bcast_f32x16(x + 4 * i + 12), a3)
                for i in range(k & ~3, k, 2):
                    v0 = load_i32x16(p + 32 * i)
                    a0 = vfma(even(v0), bcast_f32x16(x + 4 * i), a0)
                    a1 = vfma(odd(v0), bcast_f32x16(x + 4 * i + 4), a1)
                store_f32x16(out + t * out_stride + 4 * r, vadd(vadd(a0, a1), vadd(a2, a3)))

    @inline
    def unpack_tile(w, row_bytes, n, k0, kc, tile):
        first = w + 32 * k0
        second = first + (n - 16) * row_bytes
        for i in range(0, kc, 2):
            v0, v1 = load_i32x16(first + 32 * i), load_i32x16(second + 32 * i)
            store_f32x16(tile + 128 * i, even(v0))
            store_f32x16(tile + 128 * i + 64, even(v1))
            store_f32x16(tile + 128 * i + 128, odd(v0))
            store_f32x16(tile + 128 * i + 192, odd(v1))

    return few, unpack_tile


def _make_block(few, unpack_tile):
    """As the integer blocks of `matmul.py`, for n <= 32 rows."""
    micro12, micro4, micro1 = float_tile(2, 12), float_tile(2, 4), float_tile(2, 1)

    @inline
    def block(w, row_bytes, n, k, a, a_stride, m, out, out_stride, tile, n_few):
        if m <= n_few:
            few(w, row_bytes, n, k, a, a_stride, m, out, out_stride)
            return
        for k0 in range(0, k, _KC):
            kc = min(_KC, k - k0)
            unpack_tile(w, row_bytes, n, k0, kc, tile)
            x = a + 4 * k0
            t = 0
            while t + 12 <= m:
                micro12(tile, kc, x + t * a_stride, a_stride, out + t * out_stride, out_stride, n, k0)
                t += 12
            while t + 4 <= m:
                micro4(tile, kc, x + t * a_stride, a_stride, out + t * out_stride, out_stride, n, k0)
                t += 4
            while t < m:
                micro1(tile, kc, x + t * a_stride, a_stride, out + t * out_stride, out_stride, n, k0)
                t += 1

    return block, 32


FLOAT_FORMATS = {kind: _make_block(*_plain(kind)) for kind in _KINDS} | {"bf16_r16": _make_block(*_sixteen_rows())}
