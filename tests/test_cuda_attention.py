"""Attention kernels on the emulated device against float64 NumPy, with NaN in all memory that must not be read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuda_attention import LIMITS, SMALL, Run, Segment, error, expected, fill
from cuda_emulation import needs_emulation

from ikcli.backends.cuda.lower import Counts, DeviceLimits
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.graph import HeadSlice, Node, Per, Rows, Weight

pytestmark = needs_emulation
T = GGMLType
BOUND = {True: 5e-3, False: 1e-3}  # bf16 or not


def absorbed(run: Run, n_head: int, type_: T, *, flash: bool = True) -> Node:
    """MLA 576/512: V is a view of the K row."""
    g = run.graph
    q, latent, row = run.input("q", n_head * 192), run.input("q2", n_head * 512), run.input("kv", 576)
    cache = g.cache("kv", 576, type_)
    g.kv_store(cache, row, "store")
    return g.attention([HeadSlice(q, 128, 64, 192), HeadSlice(latent, 0, 512, 512)], [HeadSlice(cache, 0, 576, 0)],
                       HeadSlice(cache, 64, 512, 0), "kqv", n_head=n_head, n_head_kv=1, scale=192**-0.5,
                       flash=flash)  # fmt: skip


def grouped(run: Run, n_head: int, n_head_kv: int, width: int, types: tuple[T, T], *, v_width: int = 0,
            window: int = 0, chunk: int = 0, sinks: bool = False, softcap: float = 0.0,
            per: Per = Per.CELL, ranged: bool = False) -> Node:  # fmt: skip
    """Separate K and V caches."""
    g, dv = run.graph, v_width or width
    q, k, v = run.input("q", n_head * width), run.input("k", n_head_kv * width), run.input("v", n_head_kv * dv)
    kc, vc = g.cache("k", k.cols, types[0], per=per), g.cache("v", v.cols, types[1], per=per)
    g.kv_store(kc, k, "k_store")
    g.kv_store(vc, v, "v_store")
    return g.attention([HeadSlice(q, 0, width, width)], [HeadSlice(kc, 0, width, width)], HeadSlice(vc, 0, dv, dv),
                       "kqv", n_head=n_head, n_head_kv=n_head_kv, scale=width**-0.5, flash=True, window=window,
                       chunk=chunk, sinks=_sinks(run, n_head) if sinks else None, softcap=softcap,
                       ranged=ranged)  # fmt: skip


def _sinks(run: Run, n_head: int) -> Weight:
    w = Weight("sinks", T.F32, (n_head,))
    run.weights[w] = np.random.default_rng(5).uniform(-1, 6, n_head).astype(np.float32)
    return w


def expanded(run: Run, n_head: int, type_: T) -> Node:
    """Prompt path of MLA: the rotated part of keys from the cache, the rest from a value with a row per position."""
    g = run.graph
    q, row, kv = run.input("q", n_head * 192), run.input("row", 576), run.input("kv", n_head * 256, Rows.KV)
    cache = g.cache("kv", 576, type_)
    g.kv_store(cache, row, "store")
    return g.attention([HeadSlice(q, 128, 64, 192), HeadSlice(q, 0, 128, 192)],
                       [HeadSlice(cache, 0, 64, 0), HeadSlice(kv, 0, 128, 256)], HeadSlice(kv, 128, 128, 256), "kqv",
                       n_head=n_head, n_head_kv=n_head, scale=192**-0.5, flash=True)  # fmt: skip


def values_of(run: Run, segments: Sequence[Segment], scale: float = 1.0) -> dict[Node, np.ndarray]:
    rng = np.random.default_rng(7)
    n = {Rows.TOKENS: sum(s.n_tokens for s in segments), Rows.KV: sum(s.pos + s.n_tokens for s in segments)}
    shapes = [(x, (n[x.rows.symbol], x.cols)) for x in run.leaves]
    return {x: (scale * rng.standard_normal(shape)).astype(np.float32) for x, shape in shapes}


def check(run: Run, node: Node, segments: Sequence[Segment], *, seed: int = 1, scale: float = 1.0) -> np.ndarray:
    """Run with random data; the result must be the oracle's. Returns it."""
    rng = np.random.default_rng(seed)
    for cache in run.graph.caches.values():
        fill(run, cache, segments, rng)
    values = values_of(run, segments, scale)
    (found,) = run(segments, values, seed=seed)
    assert np.isfinite(found).all()
    bound = BOUND[any(c.type == T.BF16 for c in run.graph.caches.values())]
    assert error(found, expected(run, node, segments, values)) < bound, run.kernels()
    return found


# --- absorbed MLA -----------------------------------------------------------------------------------------------------
ONE = [Segment(1, 3, 99)]


@pytest.mark.parametrize(
    ("n_head", "type_", "segments", "kernel"),
    [
        (16, T.F16, ONE, "f16s_r16"),
        (16, T.F16, [Segment(1, 0, 0)], "f16s_r16"),
        (5, T.F16, [Segment(4, 1, 28)], "f16s_r32"),
        (11, T.F16, [Segment(3, 2, 60), Segment(2, 180, 31)], "f16s_r32"),
        (12, T.Q8_0, [Segment(1, 5, 299)], "q8_r16"),
        (20, T.Q8_0, [Segment(2, 2, 64)], "q8_r32"),
        (128, T.F16, [Segment(1, 0, 32)], "f16s_r32"),
        (128, T.F16, [Segment(1, 0, 299)], "f16s_r32"),
        (20, T.Q8_0, [Segment(4, 2, 200)], "q8_r32"),
        (16, T.BF16, [Segment(1, 3, 150)], "bf16s_r16"),
        (20, T.BF16, [Segment(4, 3, 20), Segment(1, 100, 0)], "bf16s_r32"),
        (128, T.BF16, [Segment(1, 0, 40)], "bf16s_r32"),
        (16, T.F32, [Segment(1, 3, 40), Segment(1, 100, 5)], "f16s_r16"),
        *((12, t, [Segment(1, 3, 97), Segment(1, 160, 6)], "any_r16")
          for t in (T.Q8_KV, T.Q6_0, T.Q5_1, T.Q5_0, T.Q4_1, T.Q4_0, T.IQ4_NL)),
        (11, T.Q4_0, [Segment(3, 3, 67)], "any_r32"),
    ],
)  # fmt: skip
def test_absorbed(n_head: int, type_: T, segments: list[Segment], kernel: str) -> None:
    run = Run(5, 320)
    check(run, absorbed(run, n_head, type_), segments)
    assert f"attn_mla_{kernel}" in run.kernels()


@pytest.mark.parametrize(("n_head", "type_"), [(16, T.F16), (20, T.Q8_0), (11, T.Q4_0), (128, T.F16)])
def test_absorbed_in_one_part(n_head: int, type_: T) -> None:
    """Without attn_combine."""
    run = Run(1, 64)
    check(run, absorbed(run, n_head, type_), [Segment(1, 3, 58)])
    assert len(run.kernels()) == 1


@pytest.mark.parametrize(
    ("type_", "kernel"),
    [(T.F16, "f16_r32"), (T.F16, "f16_r16"), (T.BF16, "bf16_r32"), (T.Q8_0, "q8_r32"), (T.Q8_0, "q8_r16")],
)
def test_absorbed_on_a_small_gpu(type_: T, kernel: str) -> None:
    run = Run(16, 64, SMALL)
    tokens = (13, 3) if kernel.endswith("32") else (1, 1)
    check(run, absorbed(run, 16, type_), [Segment(tokens[0], 0, 9), Segment(tokens[1], 40, 4)])
    assert run.kernels()[0] == f"attn_mla_{kernel}"
    assert all(x.shared <= SMALL.max_shared for x in run.launched)


def test_absorbed_without_flash_is_the_same() -> None:
    outs = []
    for flash in (True, False):
        run = Run(4, 128)
        outs.append(check(run, absorbed(run, 16, T.F16, flash=flash), ONE))
    assert np.array_equal(*outs)


@pytest.mark.parametrize("type_", [T.F16, T.Q8_0])
def test_large_values(type_: T) -> None:
    run = Run(4, 128)
    rng = np.random.default_rng(0)
    node = absorbed(run, 16, type_)
    fill(run, next(iter(run.graph.caches.values())), ONE, rng)
    values = values_of(run, ONE)
    q, latent, row = run.leaves
    values[q] *= 1 / 200
    values[latent] *= 1 / 200
    values[row] *= 200
    (found,) = run(ONE, values)
    assert error(found, expected(run, node, ONE, values)) < 1e-3


# --- grouped heads ----------------------------------------------------------------------------------------------------
F16, Q8_0 = (T.F16, T.F16), (T.Q8_0, T.Q8_0)


@pytest.mark.parametrize(
    ("heads", "width", "v_width", "types", "segments", "kernel"),
    [
        ((8, 2), 128, 128, F16, ONE, "128_f16"),
        ((5, 1), 64, 64, F16, [Segment(4, 3, 61), Segment(1, 150, 17)], "64_f16"),
        ((12, 4), 96, 96, F16, [Segment(1, 0, 255), Segment(1, 256, 0), Segment(1, 260, 30)], "96_f16"),
        ((3, 3), 80, 80, F16, [Segment(2, 0, 64)], "80_f16"),
        ((4, 2), 192, 128, F16, [Segment(3, 5, 33)], "192_f16"),
        ((20, 1), 256, 256, F16, [Segment(1, 5, 130)], "256_f16"),
        ((6, 1), 64, 64, Q8_0, [Segment(3, 3, 99), Segment(1, 150, 17)], "64_q8"),
        ((4, 4), 192, 128, Q8_0, [Segment(1, 3, 70)], "192_q8"),
        ((2, 1), 256, 256, Q8_0, [Segment(2, 3, 70)], "256_q8"),
        ((4, 4), 80, 80, (T.Q8_0, T.Q5_0), [Segment(3, 3, 40)], "80_any"),
        ((4, 2), 96, 96, (T.Q4_1, T.Q5_1), [Segment(3, 3, 40)], "96_any"),
        ((7, 1), 128, 128, (T.Q8_KV, T.Q4_0), [Segment(1, 3, 80)], "128_any"),
        ((4, 4), 192, 128, (T.Q8_0, T.IQ4_NL), [Segment(1, 3, 40)], "192_any"),
        ((2, 2), 256, 256, (T.Q6_0, T.F16), [Segment(2, 3, 70)], "256_any"),
        ((4, 4), 64, 64, (T.BF16, T.F32), [Segment(2, 3, 30)], "64_any"),
        ((4, 1), 64, 64, F16, [Segment(4, 3, 14)], "64_f16"),  # a warp whose positions some rows cannot see
    ],
)
def test_decode(heads: tuple[int, int], width: int, v_width: int, types: tuple[T, T], segments: list[Segment],
                kernel: str) -> None:  # fmt: skip
    run = Run(5, 320)
    check(run, grouped(run, *heads, width, types, v_width=v_width), segments)
    assert f"attn_decode_{kernel}" in run.kernels()


@pytest.mark.slow
@pytest.mark.parametrize(("width", "v_width"), [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_decode_and_prefill_bf16(width: int, v_width: int) -> None:
    types = T.BF16, T.BF16
    for n in (2, 40):
        run = Run(64, 160)
        check(run, grouped(run, 4, 2, width, types, v_width=v_width), [Segment(n, 3, 70)])


@pytest.mark.parametrize(
    ("heads", "width", "v_width", "types", "segments", "kernels"),
    [
        ((6, 2), 128, 128, F16, [Segment(40, 3, 99)], ["128_f16_r128w", "128_f16_r64"]),
        ((2, 2), 128, 128, F16, [Segment(13, 3, 0), Segment(20, 150, 77)], ["128_f16_r64"]),
        ((6, 2), 64, 64, (T.Q8_0, T.F16), [Segment(30, 3, 99), Segment(20, 150, 1)], ["64_f16_r128w", "64_f16_r64"]),
        ((2, 1), 80, 80, F16, [Segment(65, 0, 64)], ["80_f16_r128w", "80_f16_r64"]),
        ((2, 1), 96, 96, (T.F32, T.Q4_0), [Segment(20, 0, 3)], ["96_f16_r64"]),
        ((2, 2), 192, 128, F16, [Segment(65, 0, 0)], ["192_f16_r128w", "192_f16_r64"]),
        ((1, 1), 256, 256, F16, [Segment(40, 3, 90), Segment(20, 150, 1)], ["256_f16_r64"]),
    ],
)
def test_prefill(heads: tuple[int, int], width: int, v_width: int, types: tuple[T, T], segments: list[Segment],
                 kernels: list[str]) -> None:  # fmt: skip
    """On a GPU that tiles of 128 rows fill, and on one that they leave idle."""
    for kernel, sms in zip(kernels, (1, 132), strict=False):
        run = Run(72, 256, DeviceLimits((9, 0), sms, 232448, 233472, 1 << 20, "some SMs"))
        check(run, grouped(run, *heads, width, types, v_width=v_width), segments)
        assert f"attn_prefill_{kernel}" in run.kernels()


@pytest.mark.parametrize("width", [64, 128])
def test_prefill_on_a_small_gpu(width: int) -> None:
    run = Run(72, 256, replace(SMALL, n_sm=1))
    check(run, grouped(run, 6, 2, width, F16), [Segment(50, 3, 99)])
    wide = "w" if width == 64 else ""
    assert f"attn_prefill_{width}_f16_r128{wide}" in run.kernels()
    assert all(x.shared <= SMALL.max_shared for x in run.launched)


@pytest.mark.parametrize("type_", [T.F16, T.Q8_0, T.Q4_0, pytest.param(T.BF16, marks=pytest.mark.slow)])
def test_expanded(type_: T) -> None:
    run = Run(64, 256)
    check(run, expanded(run, 3, type_), [Segment(40, 3, 90), Segment(20, 150, 1)])
    packs = [x for x in run.launched if x.kernel.startswith("kv_rows")]
    assert len(packs) == (1 if type_ in (T.F16, T.BF16) else 2)  # keys and values of the expanded latent at once


# --- other shapes -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("width", "types"), [(48, F16), (32, Q8_0), (10, (T.F32, T.BF16)), (16, (T.Q4_0, T.F16))])
def test_any_head_size(width: int, types: tuple[T, T]) -> None:
    run = Run(8, 96)
    check(run, grouped(run, 4, 2, width, types), [Segment(3, 3, 40), Segment(4, 60, 0)])
    assert run.kernels()[-1] == "attn_any"


def turned(run: Run, type_k: T, type_v: T) -> Node:
    """MLA with values from a transposed copy of the latent (`-mla 1 -fa off`)."""
    g = run.graph
    q, latent, row = run.input("q", 3 * 192), run.input("q2", 3 * 512), run.input("kv", 576)
    cache, copy = g.cache("kv", 576, type_k), g.cache("kv_t", 512, type_v, transposed=True)
    g.kv_store(cache, row, "store")
    g.kv_store(copy, row, "store_t", offset=64)
    return g.attention([HeadSlice(q, 128, 64, 192), HeadSlice(latent, 0, 512, 512)], [HeadSlice(cache, 0, 576, 0)],
                       HeadSlice(copy, 0, 512, 0), "kqv", n_head=3, n_head_kv=1, scale=192**-0.5,
                       flash=False)  # fmt: skip


@pytest.mark.parametrize("type_", [T.F16, T.F32])
def test_transposed_values(type_: T) -> None:
    run = Run(4, 64)
    check(run, turned(run, T.Q8_0, type_), [Segment(2, 3, 30), Segment(1, 40, 2)])
    assert run.kernels()[-1] == "attn_any"


def test_transposed_copy_of_the_same_values_is_not_read() -> None:
    run, segments = Run(4, 64), [Segment(4, 3, 0)]
    check(run, turned(run, T.F16, T.F16), segments)
    assert run.kernels()[0] == "attn_mla_f16s_r16"


# --- parts, independence, repetition ----------------------------------------------------------------------------------
FEW_SMS = DeviceLimits((9, 0), 3, 232448, 233472, 1 << 20, "3 SMs")


@pytest.mark.parametrize("n_kv", [1, 127, 128, 129, 257, 384, 385, 386, 700])
def test_parts_with_fixed_bounds(n_kv: int) -> None:
    """Tokens on both sides of a bound, and of the position from which parts are larger."""
    n = min(n_kv, 3)
    run = Run(3, 800, FEW_SMS, batch_invariant=True)
    check(run, absorbed(run, 16, T.F16), [Segment(n, 7, n_kv - n)])
    run = Run(3, 800, FEW_SMS, batch_invariant=True)
    check(run, grouped(run, 4, 1, 64, F16), [Segment(n, 7, n_kv - n)])


def test_parts_follow_what_the_cache_holds() -> None:
    """Not what it could hold: blocks of a part for one new token, on an H200."""

    def longest_part(build: Callable[[Run], Node], block: int, n_kv: int, n_cells: int) -> int:
        run = Run(1, n_cells, batch_invariant=True)
        build(run)
        most = {Rows.TOKENS: 1, Rows.OUTPUTS: 1, Rows.KV: n_cells}
        program = run.program()
        program.bind(0, 0, {}, {}, dict.fromkeys(run.graph.caches.values(), 0))
        launches = program.launches(Counts(1, 1, n_kv, 1, n_kv).bucket(most))
        attn = next(x for x in launches if x.kernel.startswith(("attn_mla", "attn_decode")))
        fixed = int(attn.args[-2] if "mla" in attn.kernel else attn.args[-6])
        size = max(2, math.ceil(math.ceil(n_kv / block) / fixed))
        assert (attn.grid[1] if "mla" in attn.kernel else attn.grid[2]) * size * block >= n_kv
        return size

    for n_cells in (32768, 131072):
        assert longest_part(lambda r: absorbed(r, 128, T.F16), 32, 32768, n_cells) == 32
        assert longest_part(lambda r: grouped(r, 32, 8, 128, F16), 64, 32768, n_cells) == 11
        assert longest_part(lambda r: absorbed(r, 16, T.F16), 32, 4096, n_cells) == 2


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_parts_of_equal_size(parts: int) -> None:
    limits = DeviceLimits((9, 0), parts, 232448, 233472, 1 << 20, "few SMs")
    for build in (lambda r: absorbed(r, 20, T.Q8_0), lambda r: grouped(r, 4, 1, 128, Q8_0)):
        run = Run(2, 1100, limits)
        check(run, build(run), [Segment(1, 3, 1030)])
        attn = next(x for x in run.launched if x.kernel.startswith(("attn_mla", "attn_decode")))
        assert attn.grid[1] * attn.grid[2] == (parts if "mla" in attn.kernel else min(9, 2 * parts))


@pytest.mark.parametrize("which", ["mla", "grouped", "window"])
@pytest.mark.parametrize("pos", [125, 382, 510, 766])
def test_tokens_do_not_depend_on_each_other(which: str, pos: int) -> None:
    """Bits of a token alone, with others behind it (also beyond a bound of parts), and beside another sequence."""

    def bits(segments: list[Segment], rows: slice) -> np.ndarray:
        run = Run(8, 1024, FEW_SMS, batch_invariant=True)
        if which == "mla":
            absorbed(run, 16, T.F16)
        else:
            grouped(run, 4, 2, 64, Q8_0, window=100 if which == "window" else 0, sinks=which == "window")
        rng = np.random.default_rng(3)
        for cache in run.graph.caches.values():
            fill(run, cache, [Segment(0, 0, 1000)], rng)
        values = {x: np.random.default_rng(i).standard_normal((8, x.cols)) for i, x in enumerate(run.leaves)}
        return run(segments, {x: v[rows] for x, v in values.items()})[0]

    together = bits([Segment(4, 0, pos), Segment(1, 800, 20)], slice(0, 5))
    for n in (1, 2, 3, 4):
        assert np.array_equal(bits([Segment(n, 0, pos)], slice(0, n)), together[:n]), n
    assert np.array_equal(bits([Segment(1, 800, 20)], slice(4, 5)), together[4:])


def test_same_bits_in_any_order_of_threads() -> None:
    for build in (lambda r: absorbed(r, 16, T.Q8_0), lambda r: grouped(r, 4, 1, 128, Q8_0)):
        outs = []
        for seed in (1, 2, 3):
            run = Run(2, 512, batch_invariant=True)
            build(run)
            rng = np.random.default_rng(0)
            for cache in run.graph.caches.values():
                fill(run, cache, [Segment(1, 3, 290)], rng)
            outs.append(run([Segment(1, 3, 290)], values_of(run, [Segment(1, 3, 290)]), seed=seed)[0])
        assert np.array_equal(outs[0], outs[1]) and np.array_equal(outs[0], outs[2])


def test_grids_for_more_rows_than_there_are() -> None:
    """A captured graph serves every step of its bucket."""
    run = Run(64, 512)
    node = grouped(run, 4, 2, 128, F16)
    segments = [Segment(9, 3, 60)]
    rng = np.random.default_rng(0)
    for cache in run.graph.caches.values():
        fill(run, cache, segments, rng)
    values = values_of(run, segments)
    (found,) = run(segments, values, counts=Counts(64, 1, 512, 8, 512))
    assert error(found, expected(run, node, segments, values)) < 1e-3


# --- what queries see -----------------------------------------------------------------------------------------------
VIEWS = [
    {"window": 1}, {"window": 16}, {"window": 63}, {"window": 64}, {"window": 65}, {"window": 500},
    {"chunk": 64}, {"chunk": 33, "window": 40}, {"sinks": True}, {"softcap": 3.0},
    {"window": 70, "sinks": True, "softcap": 20.0},
]  # fmt: skip


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(
    ("kernel", "types", "segments", "sms"),
    [
        ("decode_64_f16", F16, [Segment(1, 3, 255)], 132),
        ("decode_64_f16", F16, [Segment(3, 3, 62), Segment(1, 300, 129), Segment(4, 500, 0)], 2),
        ("decode_64_q8", Q8_0, [Segment(3, 3, 126)], 1),
        ("prefill_64_f16_r64", F16, [Segment(40, 3, 200)], 132),
        ("prefill_64_f16_r128w", F16, [Segment(70, 3, 63), Segment(33, 300, 128)], 1),
        ("any", F16, [Segment(5, 3, 100), Segment(2, 300, 0)], 132),
    ],
)
def test_views(kernel: str, types: tuple[T, T], segments: list[Segment], sms: int, view: dict[str, Any]) -> None:
    limits = DeviceLimits((9, 0), sms, 232448, 233472, 1 << 20, "some SMs")
    for batch_invariant in (False, True) if kernel.startswith("decode") else (False,):
        run = Run(103, 640, limits, batch_invariant=batch_invariant)
        check(run, grouped(run, 4, 2, 48 if kernel == "any" else 64, types, **view), segments)
        assert f"attn_{kernel}" in run.kernels()


@pytest.mark.parametrize("n", [1, 40])
def test_what_lies_before_a_window_is_not_read(n: int) -> None:
    """NaN there, and the work is that of the window: as many parts as it has blocks."""
    for types, view in ((F16, {"window": 100}), (Q8_0, {"window": 100}), (F16, {"chunk": 128})):
        run, segments = Run(n, 4200), [Segment(n, 3, 4096)]
        node = grouped(run, 4, 2, 64, types, **view)
        rng = np.random.default_rng(1)
        for cache in run.graph.caches.values():
            fill(run, cache, segments, rng)
            run.caches[cache][: 3 + (4096 if "chunk" in view else 3997)] = 0xFF
        values = values_of(run, segments)
        (found,) = run(segments, values)
        assert error(found, expected(run, node, segments, values)) < 1e-3
        attn = next(x for x in run.launched if x.kernel.startswith(("attn_decode", "attn_prefill")))
        assert attn.grid[2] <= 2


@pytest.mark.parametrize("n", [1, 5, 40])
@pytest.mark.parametrize("width", [64, 48])
@pytest.mark.parametrize("types", [F16, Q8_0, (T.BF16, T.F32)])
def test_caches_of_windows(types: tuple[T, T], width: int, n: int) -> None:
    """Two sequences of 160 cells; the first 2000 positions of one are gone: the cell of its position 0 is below 0."""
    segments = [Segment(n, 3, 2070, -2000), Segment(2, 2200, 30, 160)]
    run = Run(n + 2, 2400, window_cells=320)
    node = grouped(run, 4, 2, width, types, window=64, per=Per.WINDOW)
    check(run, node, segments)
    assert "attn_any" in run.kernels() or width == 64


def test_sinks_must_be_f32() -> None:
    run = Run(2, 32)
    node = grouped(run, 4, 2, 64, F16, sinks=True)
    run.graph.nodes[-1].op = replace(node.op, sinks=Weight("sinks", T.F16, (4,)))
    with pytest.raises(UnsupportedError, match="sinks of attention must be f32"):
        run.program()


# --- what is not a number ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("which", ["mla", "decode", "prefill", "any"])
def test_nan_in_the_cache_shows(which: str, where: str, parts: int) -> None:
    """A NaN among the keys makes every value of its KV head NaN, one among the values that column, in any part."""
    limits = DeviceLimits((9, 0), 2 * parts, 232448, 233472, 1 << 20, "few SMs") if which != "mla" else LIMITS
    n = 40 if which == "prefill" else 1
    run, segments = Run(n, 700, limits), [Segment(n, 3, 600)]
    node = absorbed(run, 16, T.F16) if which == "mla" else grouped(run, 4, 2, 48 if which == "any" else 64, F16)
    rng = np.random.default_rng(0)
    for cache in run.graph.caches.values():
        fill(run, cache, segments, rng)
    last = list(run.caches)[-1 if where == "v" else 0]
    run.caches[last].view(np.float16)[3 + 250, 70 if which == "mla" and where == "v" else 0] = np.nan
    values = values_of(run, segments)
    (found,) = run(segments, values)
    wanted = expected(run, node, segments, values)
    assert np.isnan(wanted).any() and np.array_equal(np.isnan(found), np.isnan(wanted)), run.kernels()


# --- refusals ---------------------------------------------------------------------------------------------------------
def test_refusals() -> None:
    run = Run(2, 32)
    x = run.input("x", 64)
    run.graph.kv_store(run.graph.cache("kv_t", 64, T.Q8_0, transposed=True), x, "store")
    with pytest.raises(UnsupportedError, match="transposed V cache cannot be of type q8_0"):
        run.program()
    run = Run(2, 32)
    run.graph.kv_store(run.graph.cache("k", 48, T.Q8_0), run.input("x", 48), "store")
    with pytest.raises(UnsupportedError, match="-ctk f16"):
        run.program()
    run = Run(2, 32)
    run.graph.kv_store(run.graph.cache("k", 64, T.Q4_K), run.input("x", 64), "store")
    with pytest.raises(UnsupportedError, match="no KV cache of type q4_K"):
        run.program()
    run = Run(2, 32)
    grouped(run, 4, 4, 24, Q8_0)
    with pytest.raises(UnsupportedError, match="multiples of 16"):
        run.program()
    assert LIMITS.n_sm == 132
