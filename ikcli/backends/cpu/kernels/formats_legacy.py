"""Weight formats with one half-float scale per 32 columns: q8_0, q5_0, q4_0 (layouts: ggml-common.h)."""

from ikcli.backends.cpu.jit import inline
from ikcli.backends.cpu.kernels.format_api import one_row
from ikcli.backends.cpu.simd.dot import dot_u8_i8_half
from ikcli.backends.cpu.simd.lanes import (
    bits_i8x32,
    first_i32x8,
    scatter_dwords,
)
from ikcli.backends.cpu.simd.rowdot import row_dot
from ikcli.backends.cpu.simd.vec import (
    concat_i8x16,
    cvt_i32x8_f32,
    ld_f16,
    ld_f32,
    load_i8x16,
    load_i8x32,
    reduce_add,
    splat_f32x8,
    splat_i8x16,
    splat_i8x32,
    st_f32,
    vadd,
    vand,
    vfma,
    vlshr,
    vor,
    vshl,
    vxor,
    zero_f32x8,
)


@inline
def nibbles(p):
    """32 codes 0..15 from 16 bytes: low nibbles, then high nibbles."""
    v = load_i8x16(p)
    mask = splat_i8x16(15)
    return concat_i8x16(vand(v, mask), vand(vlshr(v, 4), mask))


@inline
def codes_q8_0(w):
    """32 codes + 128."""
    return vxor(load_i8x32(w + 2), splat_i8x32(128))


@inline
def codes_q4_0(w):
    """32 codes + 120 (so that 8 becomes 128)."""
    return vadd(nibbles(w + 2), splat_i8x32(120))


def _make_dot32(type_name, codes, block_bytes):
    """dot_row of a symmetric format of 32-column blocks; rows need not be multiples of 256 columns."""
    whole = row_dot(type_name)

    @inline
    def dot_row(w, a, k):
        total = whole(w, a, k)
        first, nb = k // 256 * 8, k // 32
        if first == nb:
            return total
        acc = zero_f32x8()
        for ib in range(first, nb):
            p = w + ib * block_bytes
            dot = dot_u8_i8_half(first_i32x8(a + k + 8 * nb + 4 * ib), codes(p), load_i8x32(a + 32 * ib))
            acc = vfma(cvt_i32x8_f32(dot), splat_f32x8(ld_f16(p) * ld_f32(a + k + 4 * ib)), acc)
        return total + reduce_add(acc)

    return dot_row


# --- q8_0: d f16, 32 int8 --------------------------------------------------------------------------------------------
@inline
def unpack_q8_0(w, tile, r, k):
    for _ in range(k // 32):
        st_f32(tile + 4 * r, ld_f16(w))
        scatter_dwords(tile + 64 + 4 * r, codes_q8_0(w))
        w += 34
        tile += 576


# --- q4_0: d f16, 16 bytes (low nibbles first half) ------------------------------------------------------------------
@inline
def unpack_q4_0(w, tile, r, k):
    for _ in range(k // 32):
        st_f32(tile + 4 * r, ld_f16(w))
        scatter_dwords(tile + 64 + 4 * r, codes_q4_0(w))
        w += 18
        tile += 576


# --- q5_0: d f16, fifth bits u32, 16 bytes of nibbles ---------------------------------------------------------------
@inline
def codes_q5_0(w):
    """32 codes + 112 (so that 16 becomes 128)."""
    high = vshl(bits_i8x32(w + 2), 4)
    return vadd(vor(nibbles(w + 6), high), splat_i8x32(112))


@inline
def unpack_q5_0(w, tile, r, k):
    for _ in range(k // 32):
        st_f32(tile + 4 * r, ld_f16(w))
        scatter_dwords(tile + 64 + 4 * r, codes_q5_0(w))
        w += 22
        tile += 576


FORMATS = {
    "q8_0": (1, one_row(_make_dot32("q8_0", codes_q8_0, 34)), unpack_q8_0),
    "q4_0": (1, one_row(_make_dot32("q4_0", codes_q4_0, 18)), unpack_q4_0),
    "q5_0": (1, one_row(_make_dot32("q5_0", codes_q5_0, 22)), unpack_q5_0),
}
