"""SIMD intrinsics against NumPy lines; the instruction sets of other machines in child processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from numba import njit
from numba.extending import intrinsic
from tiers import some

from ikcli.native import isa
from ikcli.native.simd import control, dot, half, vec
from ikcli.native.simd import math as vmath

Array = npt.NDArray[Any]
F32 = np.float32
TESTS = Path(__file__).resolve().parent


def ordinary(n: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).standard_normal(n).astype(F32)


def bytes_of(n: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8)


def apply(load: Any, function: Any, store: Any, *operands: Array, out: Array) -> Array:
    """store(function(load(operand), ...)) once; numba compiles it here."""
    if len(operands) == 1:

        @njit
        def run(a, b, c, to):  # type: ignore[no-untyped-def]
            store(to, function(load(a)))
    elif len(operands) == 2:

        @njit
        def run(a, b, c, to):  # type: ignore[no-untyped-def]
            store(to, function(load(a), load(b)))
    else:

        @njit
        def run(a, b, c, to):  # type: ignore[no-untyped-def]
            store(to, function(load(a), load(b), load(c)))

    at = [x.ctypes.data for x in (*operands, *operands, *operands)[:3]]
    run(*at, out.ctypes.data)
    return out


# --- arithmetic -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "wanted"), [("vadd", np.add), ("vsub", np.subtract), ("vmul", np.multiply), ("vdiv", np.divide),
                         ("vmax", np.maximum), ("vmin", np.minimum)],
)  # fmt: skip
def test_float_binary(name: str, wanted: Callable[..., Array]) -> None:
    a, b = ordinary(16), ordinary(16, 2)
    found = apply(vec.load_f32x16, getattr(vec, name), vec.store_f32x16, a, b, out=np.empty(16, F32))
    np.testing.assert_array_equal(found, wanted(a, b))


@pytest.mark.parametrize(("name", "wanted"), [("vabs", np.abs), ("vround_even", np.rint)])
def test_float_unary(name: str, wanted: Callable[..., Array]) -> None:
    a = np.concatenate([ordinary(8) * 10, F32([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 1e9, -0.0])])
    found = apply(vec.load_f32x16, getattr(vec, name), vec.store_f32x16, a, out=np.empty(16, F32))
    np.testing.assert_array_equal(found, wanted(a))


def test_fma_rounds_once() -> None:
    a = np.full(16, 1 + 2.0**-12, F32)
    c = -(a * a)
    found = apply(vec.load_f32x16, vec.vfma, vec.store_f32x16, a, a, c, out=np.empty(16, F32))
    np.testing.assert_array_equal(found, (a.astype(np.float64) ** 2 + c).astype(F32))
    assert found[0] != 0


def test_reductions() -> None:
    @njit
    def run(a, to):  # type: ignore[no-untyped-def]
        v = vec.load_f32x16(a)
        vec.st_f32(to, vec.reduce_add(v))
        vec.st_f32(to + 4, vec.reduce_max(v))

    a, out = np.round(ordinary(16) * 100), np.empty(2, F32)
    run(a.ctypes.data, out.ctypes.data)
    assert (out[0], out[1]) == (a.sum(), a.max())


@pytest.mark.parametrize(("name", "wanted"), [("vand", np.bitwise_and), ("vor", np.bitwise_or),
                                              ("vxor", np.bitwise_xor), ("vadd", np.add)])  # fmt: skip
def test_byte_binary(name: str, wanted: Callable[..., Array]) -> None:
    a, b = bytes_of(64), bytes_of(64, 2)
    found = apply(vec.load_i8x64, getattr(vec, name), vec.store_i8x64, a, b, out=np.empty(64, np.uint8))
    np.testing.assert_array_equal(found, wanted(a, b))


def test_byte_shifts_do_not_cross_bytes() -> None:
    @njit
    def run(a, left, right):  # type: ignore[no-untyped-def]
        vec.store_i8x32(left, vec.vshl(vec.load_i8x32(a), 3))
        vec.store_i8x32(right, vec.vlshr(vec.load_i8x32(a), 4))

    a, left, right = bytes_of(32), np.empty(32, np.uint8), np.empty(32, np.uint8)
    run(a.ctypes.data, left.ctypes.data, right.ctypes.data)
    np.testing.assert_array_equal(left, a << np.uint8(3))
    np.testing.assert_array_equal(right, a >> np.uint8(4))


@pytest.mark.parametrize("n", range(17))
def test_partial_store_writes_nothing_else(n: int) -> None:
    @njit
    def run(a, to, n):  # type: ignore[no-untyped-def]
        vec.store_f32_first(to, vec.load_f32x16(a), n)

    a, out = ordinary(16), np.full(16, 99, F32)
    run(a.ctypes.data, out.ctypes.data, n)
    np.testing.assert_array_equal(out, np.where(np.arange(16) < n, a, 99))


# --- half floats ------------------------------------------------------------------------------------------------------
def float_patterns() -> Array:
    """Float32 of every kind: all exponents, ties, subnormals, the edges of f16, Inf."""
    exponents = np.arange(0, 256, dtype=np.uint32)[:, None] << 23
    mantissas = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7FFFFF], np.uint32)
    bits = (exponents | mantissas).reshape(-1)
    x = np.concatenate([bits, bits | np.uint32(1 << 31)]).view(F32)
    x = x[~np.isnan(x)]
    return np.concatenate([x, np.zeros(-len(x) % 16, F32)])


def to_bf16(x: Array) -> Array:
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@njit
def _store_halves(a, n, f16, f16_one, bf16, bf16_one):  # type: ignore[no-untyped-def]
    for i in range(0, n, 16):
        half.store_f16x16(f16 + 2 * i, vec.load_f32x16(a + 4 * i))
        half.store_bf16x16(bf16 + 2 * i, vec.load_f32x16(a + 4 * i))
    for i in range(n):
        half.st_f16(f16_one + 2 * i, vec.ld_f32(a + 4 * i))
        half.st_bf16(bf16_one + 2 * i, vec.ld_f32(a + 4 * i))


def stored_halves(x: Array) -> list[Array]:
    out = [np.empty(len(x), np.uint16) for _ in range(4)]
    _store_halves(x.ctypes.data, len(x), *(o.ctypes.data for o in out))
    return out


def test_rounding_to_halves() -> None:
    x = float_patterns()
    f16, f16_one, bf16, bf16_one = stored_halves(x)
    with np.errstate(over="ignore"):
        wanted = x.astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(f16, wanted)
    np.testing.assert_array_equal(f16_one, wanted)
    np.testing.assert_array_equal(bf16, to_bf16(x))
    np.testing.assert_array_equal(bf16_one, to_bf16(x))


def test_nan_stays_nan_in_halves() -> None:
    x = np.array([0x7F800001, 0x7FFFFFFF, 0x7FC00000, 0xFF800001] * 4, np.uint32).view(F32)
    f16, f16_one, bf16, bf16_one = stored_halves(x)
    for bits in (f16, f16_one):
        assert np.isnan(bits.view(np.float16)).all()
    for bits in (bf16, bf16_one):
        assert np.isnan((bits.astype(np.uint32) << 16).view(F32)).all()


def test_loading_halves_is_exact() -> None:
    @njit
    def run(a, n, f16, bf16, one):  # type: ignore[no-untyped-def]
        for i in range(0, n, 16):
            vec.store_f32x16(f16 + 4 * i, half.load_f16x16(a + 2 * i))
            vec.store_f32x16(bf16 + 4 * i, half.load_bf16x16(a + 2 * i))
        for i in range(n):
            vec.st_f32(one + 4 * i, half.ld_f16(a + 2 * i))

    bits = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    f16, bf16, one = (np.empty(65536, F32) for _ in range(3))
    run(bits.ctypes.data, 65536, f16.ctypes.data, bf16.ctypes.data, one.ctypes.data)
    np.testing.assert_array_equal(f16, bits.view(np.float16).astype(F32))
    np.testing.assert_array_equal(one, f16)
    wide = (bits.astype(np.uint32) << 16).view(F32)
    np.testing.assert_array_equal(bf16[~np.isnan(wide)], wide[~np.isnan(wide)])
    assert np.isnan(bf16[np.isnan(wide)]).all()


# --- exp and silu -----------------------------------------------------------------------------------------------------
@njit
def _exp_and_silu(a, n, exp, fast, silu):  # type: ignore[no-untyped-def]
    for i in range(0, n, 16):
        v = vec.load_f32x16(a + 4 * i)
        vec.store_f32x16(exp + 4 * i, vmath.vexp(v))
        vec.store_f32x16(fast + 4 * i, vmath.vexp_fast(v))
        vec.store_f32x16(silu + 4 * i, vmath.vsilu(v))


def exp_and_silu(x: Array) -> tuple[Array, Array, Array]:
    x = np.concatenate([x, np.zeros(-len(x) % 16)]).astype(F32)
    out = [np.empty(len(x), F32) for _ in range(3)]
    _exp_and_silu(x.ctypes.data, len(x), *(o.ctypes.data for o in out))
    return out[0], out[1], out[2]


def test_exp() -> None:
    x = np.concatenate([np.linspace(-87, 88, 160000), np.linspace(-1e-3, 1e-3, 1600)]).astype(F32)
    wanted = np.exp(x.astype(np.float64))
    exp, fast, _ = exp_and_silu(x)
    assert (np.abs(exp[: len(x)] / wanted - 1)).max() <= 2.5 * 2.0**-24 * 2
    below = x <= 0
    assert (np.abs(fast[: len(x)][below] / wanted[below] - 1)).max() <= 2.5 * 2.0**-24 * 2


def test_exp_at_the_extremes() -> None:
    exp, fast, _ = exp_and_silu(np.array([-1e30, -200, -88, 0, 89, 200, 1e30, np.nan] * 2))
    assert (exp[:3] <= 1.3e-38).all() and (exp[:3] >= 0).all() and exp[3] == 1
    assert np.isfinite(exp[4:7]).all() and (exp[4:7] > 2e38).all() and np.isnan(exp[7])
    assert (fast[:3] <= 1.3e-38).all() and fast[3] == 1


def test_silu() -> None:
    x = np.linspace(-80, 80, 16000).astype(F32)
    wanted = x / (1 + np.exp(-x.astype(np.float64)))
    np.testing.assert_allclose(exp_and_silu(x)[2][: len(x)], wanted, rtol=4e-7, atol=1e-37)


# --- integer dot products ---------------------------------------------------------------------------------------------
def _dot_of(emit: Callable[..., Any], sums: Any = vec.i32x16, codes: Any = vec.i8x64) -> Any:
    """dot(acc, u, s) of vectors in registers."""

    @intrinsic  # type: ignore[untyped-decorator]
    def of(typingctx, acc, u, s):  # type: ignore[no-untyped-def]
        return sums(sums, codes, codes), lambda context, builder, sig, args: emit(builder, *args)

    return of


_half_dot = _dot_of(lambda builder, acc, u, s: dot.emit_dot(builder, acc, u, s, 8), vec.i32x8, vec.i8x32)


@njit
def _dots(u, s, acc, out, half):  # type: ignore[no-untyped-def]
    vec.store_i32x16(out, dot.dot_u8_i8(vec.load_i32x16(acc), vec.load_i8x64(u), vec.load_i8x64(s)))
    vec.store_i32x8(half, _half_dot(vec.load_i32x8(acc), vec.load_i8x32(u), vec.load_i8x32(s)))


_small_dot = _dot_of(lambda builder, acc, u, s: dot.emit_dot(builder, acc, u, s, 16, 127))
_signed_dot = _dot_of(dot.emit_signed_dot)


@njit
def _restricted_dots(u, w, s, acc, small, signed):  # type: ignore[no-untyped-def]
    vec.store_i32x16(small, _small_dot(vec.load_i32x16(acc), vec.load_i8x64(u), vec.load_i8x64(s)))
    vec.store_i32x16(signed, _signed_dot(vec.load_i32x16(acc), vec.load_i8x64(w), vec.load_i8x64(s)))


# two products of codes up to 63 at a time, four of codes up to 31
_two_dots = _dot_of(lambda builder, acc, u, s: dot.emit_dots(builder, acc, [u] * 2, [s] * 2, 63))
_four_dots = _dot_of(lambda builder, acc, u, s: dot.emit_dots(builder, acc, [u] * 4, [s] * 4, 31))


@njit
def _dots_at_once(u63, u31, s, acc, two, four):  # type: ignore[no-untyped-def]
    vec.store_i32x16(two, _two_dots(vec.load_i32x16(acc), vec.load_i8x64(u63), vec.load_i8x64(s)))
    vec.store_i32x16(four, _four_dots(vec.load_i32x16(acc), vec.load_i8x64(u31), vec.load_i8x64(s)))


def check_restricted_dots() -> None:
    """On AVX2: exact for codes up to 127, and for signed ones (-128 included) times bytes that are not -128; so are
    several products of smaller codes at once."""
    assert [dot.most_addends(most) for most in (127, 63, 31)] == [1, 2, 4]
    rng = np.random.default_rng(6)
    cases = [(np.full(64, w, np.int8), np.full(64, s, np.int8)) for w in (-128, -1, 0, 127) for s in (-127, 0, 127)]
    cases += [(bytes_of(64, i).view(np.int8), bytes_of(64, 200 + i).view(np.int8)) for i in range(50)]
    for w, s in cases:
        s = np.maximum(s, -127)
        u, acc = (w & 127).view(np.uint8), rng.integers(-(2**30), 2**30, 16, dtype=np.int32)
        small, signed = np.empty(16, np.int32), np.empty(16, np.int32)
        _restricted_dots(*(x.ctypes.data for x in (u, w, s, acc, small, signed)))
        two, four = np.empty(16, np.int32), np.empty(16, np.int32)
        _dots_at_once(*(x.ctypes.data for x in (u & 63, u & 31, s, acc, two, four)))
        for found, codes, times in ((small, u, 1), (signed, w, 1), (two, u & 63, 2), (four, u & 31, 4)):
            sums = (codes.astype(np.int64) * s).reshape(16, 4).sum(axis=1)
            np.testing.assert_array_equal(found, acc + times * sums)


def check_dots() -> None:
    """Exact on random and on extreme operands: nothing may saturate."""
    if isa.current().plain_avx2:
        check_restricted_dots()
    rng = np.random.default_rng(5)
    cases = [(np.full(64, a, np.uint8), np.full(64, b, np.int8)) for a in (0, 1, 128, 255) for b in (-128, -1, 127)]
    cases.append((np.full(64, 255, np.uint8), np.resize([-128, 127], 64).astype(np.int8)))
    cases += [(bytes_of(64, i), bytes_of(64, 100 + i).view(np.int8)) for i in range(50)]
    for u, s in cases:
        acc = rng.integers(-(2**30), 2**30, 16, dtype=np.int32)
        out, half = np.empty(16, np.int32), np.empty(8, np.int32)
        _dots(*(x.ctypes.data for x in (u, s, acc, out, half)))
        sums = (u.astype(np.int64) * s).reshape(16, 4).sum(axis=1)
        np.testing.assert_array_equal(out, acc + sums)
        np.testing.assert_array_equal(half, (acc + sums)[:8])


def test_dots() -> None:
    check_dots()


@pytest.mark.parametrize("level", some(["avx2", "avxvnni", "portable"], ["avx2"]))
def test_other_instruction_sets(level: str) -> None:
    """The same results from the code for lesser machines."""
    cpu, features = isa.LEVELS[level]
    needed = {f[1:] for f in features.split(",") if f}
    if not needed <= isa.host().features:
        pytest.skip(f"this CPU lacks {', '.join(sorted(needed - isa.host().features))}")
    halves = "t.test_rounding_to_halves(); " if "f16c" in features else ""  # plain x86-64 has no conversions
    code = f"import test_cpu_simd as t; t.check_dots(); t.test_exp(); {halves}t.check_isa()"
    env = dict(
        os.environ, IK_CPU_ISA=level, NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES=features,
        PYTHONPATH=os.pathsep.join([str(TESTS), str(TESTS.parent)]),
    )  # fmt: skip
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout) == (0, f"{level}\n"), run.stderr[-2000:]


def check_isa() -> None:
    print(isa.current().name)


# --- atomics ---------------------------------------------------------------------------------------------------------
def test_atomic_add_from_many_threads() -> None:
    """Every number is handed out once."""
    import threading

    @njit(nogil=True)
    def run(counter, got, n):  # type: ignore[no-untyped-def]
        for i in range(n):
            got[i] = control.atomic_add(counter, 3)

    counter = np.zeros(1, np.int64)
    got = [np.zeros(20000, np.int64) for _ in range(3)]
    run(counter.ctypes.data, np.zeros(1, np.int64), 0)
    threads = [threading.Thread(target=run, args=(counter.ctypes.data, g, len(g))) for g in got]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    np.testing.assert_array_equal(np.sort(np.concatenate(got)), 3 * np.arange(60000))
