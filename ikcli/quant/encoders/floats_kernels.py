"""Kernels that convert between F32 and the 16-bit floats, rounded to nearest even.

Arguments: source, destination, elements.
"""

# mypy: ignore-errors
# (compiled from bytecode; intrinsics have no Python body that a type checker could follow)

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
from ikcli.native.simd.vec import ld_f32, load_f32x16, st_f32, store_f32x16

_READ = {"f16": (load_f16x16, ld_f16), "bf16": (load_bf16x16, ld_bf16)}
_WRITE = {"f16": (store_f16x16, st_f16), "bf16": (store_bf16x16, st_bf16)}


def make_widen(name):
    """Return widen(src, dst, n): `f16` or `bf16` to f32."""
    load16, load1 = _READ[name]

    def widen(src, dst, n):
        whole = n - n % 16
        for i in range(0, whole, 16):
            store_f32x16(dst + 4 * i, load16(src + 2 * i))
        for i in range(whole, n):
            st_f32(dst + 4 * i, load1(src + 2 * i))

    return widen, 3, False


def make_narrow(name):
    """Return narrow(src, dst, n): f32 to `f16` or `bf16`."""
    store16, store1 = _WRITE[name]

    def narrow(src, dst, n):
        whole = n - n % 16
        for i in range(0, whole, 16):
            store16(dst + 2 * i, load_f32x16(src + 4 * i))
        for i in range(whole, n):
            store1(dst + 2 * i, ld_f32(src + 4 * i))

    return narrow, 3, False
