"""KV cache and attention kernels against float64 NumPy, with NaN in all memory that must not be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numba
import numpy as np
import pytest
from attention_cases import (
    BF16,
    F16,
    F32,
    Q8_0,
    Built,
    absorbed,
    check,
    decode,
    encode,
    expanded,
    expected,
    gqa,
    has_kernel,
    how_rounded,
)
from kernel_harness import Harness, Segment
from tiers import CACHES, SAME_CACHES, some

from ikcli.backends.cpu.kernels import pair_sizes
from ikcli.backends.cpu.lower_attention import RULES
from ikcli.backends.cpu.tile_modes import makes_integers
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import row_n_bytes
from ikcli.native import isa


def joined(types: tuple[GGMLType, ...]) -> str:
    return "-".join(t.name for t in types)


# --- kv_store, kv_rows -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("type_", [F32, F16, BF16, Q8_0])
def test_store_and_read_back(type_: GGMLType, rng: np.random.Generator) -> None:
    """Bytes are those of the reference encoding; rows come back in compact order; other cells are untouched."""
    run = Harness(8, 32, RULES)
    g = run.graph
    g.il = 0
    x = run.input("x", 80)
    cache = g.cache("kv", 96, type_)
    g.kv_store(cache, x, "store", offset=16, cols=64, cache_offset=32)
    rows = g.kv_rows(cache, 48, 48, "rows")
    run.compile(rows, 2)
    values = rng.standard_normal((5, 80), dtype=np.float32) * np.float32(3)
    values[2, 16:48] = 0
    segments = [Segment(2, 20, 1), Segment(3, 4, 0)]
    row = np.full((1, 96), 0.5, dtype=np.float32)
    run.caches[cache][20] = encode(row, type_)
    before = run.caches[cache].copy()
    out = run(segments, {x: values})
    cells = [21, 22, 4, 5, 6]
    stored = run.caches[cache]
    first = row_n_bytes(type_, 32)
    np.testing.assert_array_equal(stored[cells, first:], encode(values[:, 16:], type_))
    np.testing.assert_array_equal(stored[cells, :first], before[cells, :first])
    others = [c for c in range(32) if c not in cells]
    np.testing.assert_array_equal(stored[others], before[others])
    np.testing.assert_array_equal(out, decode(stored[[20, 21, 22, 4, 5, 6]], type_)[:, 48:].astype(np.float32))


def test_widths_that_fill_no_vector(rng: np.random.Generator) -> None:
    run = Harness(4, 8, RULES)
    run.graph.il = 0
    x = run.input("x", 41)
    cache = run.graph.cache("k", 41, F16)
    run.graph.kv_store(cache, x, "store")
    rows = run.graph.kv_rows(cache, 3, 37, "rows")
    run.compile(rows, 2)
    values = rng.standard_normal((4, 41), dtype=np.float32)
    out = run([Segment(4, 4, 0)], {x: values})
    np.testing.assert_array_equal(out, values.astype(np.float16).astype(np.float32)[:, 3:40])


@pytest.mark.parametrize("type_", [F32, F16, BF16, Q8_0])
def test_nan_survives_the_cache(type_: GGMLType) -> None:
    run = Harness(1, 4, RULES)
    run.graph.il = 0
    x = run.input("x", 32)
    cache = run.graph.cache("k", 32, type_)
    run.graph.kv_store(cache, x, "store")
    run.compile(run.graph.kv_rows(cache, 0, 32, "rows"), 1)
    values = np.ones((1, 32), dtype=np.float32)
    values[0, 7] = np.nan
    assert np.isnan(run([Segment(1)], {x: values})).any()


# --- attention -------------------------------------------------------------------------------------------------------
LENGTHS = [1, 2, 3, 4, 5, 31, 32, 33, 255, 256, 257]


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("types", some([(F16, F16), (F32, F32), (BF16, BF16), (Q8_0, Q8_0), (Q8_0, F16)],
                                       [*SAME_CACHES, (F32, F32)]), ids=joined)  # fmt: skip
def test_cache_types(types: tuple[GGMLType, GGMLType], flash: bool) -> None:
    check(gqa(4, 2, 64, types, tokens=40, cells=128, flash=flash), [Segment(40, 3, 70)], 2)


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("n_kv", LENGTHS)
def test_prompts(n_kv: int, flash: bool) -> None:
    """Whole prompts from position 0."""
    check(gqa(6, 2, 64, (F16, F16), tokens=n_kv, cells=n_kv, flash=flash), [Segment(n_kv)], 2, n_kv)


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("n_kv", LENGTHS)
@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_one_token(n_kv: int, n_threads: int, flash: bool) -> None:
    """Generation, with and without splitting over positions."""
    check(gqa(4, 1, 64, (F16, F16), tokens=1, cells=300, flash=flash), [Segment(1, 40, n_kv - 1)], n_threads, n_kv)


STREAMED = [(1, 1, 64), (4, 4, 128), (12, 6, 80), (15, 5, 64), (16, 4, 128), (14, 2, 64), (5, 1, 96), (8, 1, 256)]


@pytest.mark.parametrize("types", some([(F16, F16), (F32, BF16), (BF16, F32), (Q8_0, F16), (F16, Q8_0), (Q8_0, Q8_0)],
                                       SAME_CACHES), ids=joined)  # fmt: skip
@pytest.mark.parametrize(("n_head", "n_head_kv", "width"), STREAMED)
def test_generation_of_several_sequences(
    n_head: int, n_head_kv: int, width: int, types: tuple[GGMLType, GGMLType]
) -> None:
    """One token each, with lengths around tiles and parts; the cache is read in place."""
    if Q8_0 in types and width % 32:
        types = (F16, F16)
    built = gqa(n_head, n_head_kv, width, types, tokens=4, cells=1500, flash=True)
    built.run.batch_invariant = True
    segments = [Segment(1, 0, 62), Segment(1, 100, 64), Segment(1, 200, 0), Segment(1, 300, 1000)]
    check(built, segments, 2, n_head)
    assert has_kernel(built, "attention_stream")


@pytest.mark.parametrize("type_", some([F16, F32, Q8_0], CACHES))
@pytest.mark.parametrize("n_head", [1, 2, 5, 8, 11, 16])
def test_generation_with_a_latent_cache(n_head: int, type_: GGMLType) -> None:
    """V lies inside the rows of K."""
    built = absorbed(n_head, type_, tokens=2, cells=900, flash=True)
    built.run.batch_invariant = True
    check(built, [Segment(1, 0, 130), Segment(1, 200, 600)], 2, n_head)
    kernels = {key.module for key in built.run.program.kernels}
    if n_head <= 8 or (type_ == F32 and isa.current().name == "avx512"):
        assert "attention_stream" in kernels
    elif makes_integers() and type_ != F32:
        assert "attention_pairs" in kernels


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("types", some([(F16, F16), (BF16, BF16), (Q8_0, Q8_0), (Q8_0, F16), (Q8_0, BF16)],
                                       SAME_CACHES), ids=joined)  # fmt: skip
@pytest.mark.parametrize(
    ("n_head", "n_head_kv", "width", "v_width"), [(12, 1, 64, 64), (20, 2, 96, 32), (9, 3, 32, 96)]
)
def test_few_rows_in_pairs(
    n_head: int, n_head_kv: int, width: int, v_width: int, types: tuple[GGMLType, GGMLType], tokens: int
) -> None:
    """Tasks of 9 to 16 rows, or of several tokens, with odd numbers of positions; V has rows of its own."""
    built = gqa(n_head, n_head_kv, width, types, v_width=v_width, tokens=tokens, cells=400, flash=True)
    check(built, [Segment(tokens, 10, 258)], 2)


@pytest.mark.parametrize("type_", some([F16, BF16, F32], [F16]))
@pytest.mark.parametrize("tokens", some([1, 2, 20], [1, 20]))
@pytest.mark.parametrize(("n_head", "width", "v_width"), [(3, 20, 20), (12, 20, 40), (6, 40, 24)])
def test_heads_that_fill_no_vector(n_head: int, width: int, v_width: int, tokens: int, type_: GGMLType) -> None:
    built = gqa(n_head, 3, width, (type_, type_), v_width=v_width, tokens=tokens, cells=400, flash=True)
    check(built, [Segment(tokens, 10, 258)], 2)


@pytest.mark.parametrize(("n_head", "n_head_kv", "type_"), [(16, 4, Q8_0), (12, 1, Q8_0), (16, 1, F16)])
def test_other_sequences_change_no_bits(n_head: int, n_head_kv: int, type_: GGMLType, rng: np.random.Generator) -> None:
    """A token of an independent program alone and next to others."""
    built = gqa(n_head, n_head_kv, 64, (type_, type_), tokens=3, cells=900, flash=True)
    built.run.batch_invariant = True
    run = built.run.compile(built.node, 2)
    for cache in built.stores:
        run.caches[cache][:] = encode(rng.standard_normal((900, cache.cols)), cache.type)
    segments = [Segment(1, 0, 62), Segment(1, 100, 300), Segment(1, 500, 333)]
    values = {x: rng.standard_normal((3, cols), dtype=np.float32) for x, cols in built.leaves.items()}
    out = run(segments, values)
    for i, segment in enumerate(segments):
        alone = run([segment], {x: rows[i : i + 1] for x, rows in values.items()})
        np.testing.assert_array_equal(alone[0], out[i])


def test_split_positions() -> None:
    """Long caches are split over positions: parts of unequal length, and sequences too short to split."""
    built = gqa(4, 1, 64, (F16, F16), tokens=3, cells=3000, flash=True)
    check(built, [Segment(1, 1000, 1999), Segment(1, 10, 3), Segment(1, 100, 700)], 3)


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize(
    ("n_head", "n_head_kv", "width"),
    [(1, 1, 32), (12, 4, 40), (16, 16, 64), (20, 4, 80), (40, 8, 96), (14, 2, 128), (3, 3, 256), (5, 1, 8), (7, 7, 72)],
)
def test_head_shapes(n_head: int, n_head_kv: int, width: int, flash: bool) -> None:
    built = gqa(n_head, n_head_kv, width, (F16, F16), tokens=30, cells=64, flash=flash)
    check(built, [Segment(11, 1, 17), Segment(19, 40, 0)], 2)


@pytest.mark.parametrize("flash", [True, False])
def test_value_width_of_its_own(flash: bool) -> None:
    check(gqa(4, 4, 192, (F16, F16), v_width=128, tokens=9, cells=64, flash=flash), [Segment(9, 5, 12)], 2)


@pytest.mark.parametrize("flash", [True, False])
def test_many_sequences(flash: bool) -> None:
    """Several sequences of different lengths and positions in one micro-batch."""
    segments = [Segment(1, 0, 9), Segment(30, 20, 100), Segment(5, 200, 0), Segment(1, 300, 255), Segment(2, 600, 63)]
    check(gqa(8, 2, 64, (F16, F16), tokens=64, cells=700, flash=flash), segments, 2)


@pytest.mark.parametrize("n_head", [1, 12, 16, 20, 40, 64, 128])
def test_mla_absorbed(n_head: int) -> None:
    check(absorbed(n_head, F16, tokens=4, cells=600, flash=True), [Segment(1, 2, 530), Segment(3, 560, 5)], 2)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("step", [0, 5, 8])
def test_mla_absorbed_stored_scores(step: int, transposed: bool) -> None:
    built = absorbed(20, F16, tokens=6, cells=300, flash=False, transposed=transposed, step=step)
    check(built, [Segment(1, 2, 130), Segment(5, 200, 77)], 2)


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("n_head", [1, 12])
def test_mla_expanded(n_head: int, flash: bool) -> None:
    check(expanded(n_head, F16, tokens=50, cells=300, flash=flash), [Segment(20, 7, 130), Segment(30, 170, 0)], 2)


@pytest.mark.parametrize("step", [1, 2, 3, 4, 6])
def test_steps_of_heads(step: int) -> None:
    """heads_per_step that does or does not divide the heads or their groups."""
    check(gqa(8, 2, 32, (F16, F16), tokens=7, cells=64, flash=False, step=step), [Segment(7, 3, 30)], 2)


integers_only = pytest.mark.skipif(not makes_integers(), reason="no products of 16-bit integers here")
SHORT = (F16, BF16, Q8_0, GGMLType.Q6_0, GGMLType.Q4_0)


@integers_only
@pytest.mark.parametrize("type_", [F16, Q8_0])
@pytest.mark.parametrize("n_kv", LENGTHS)
def test_prompts_in_pairs(n_kv: int, type_: GGMLType) -> None:
    """Whole prompts of odd and even length from position 0; a few rows have a kernel of their own."""
    built = gqa(6, 2, 64, (type_, type_), tokens=n_kv, cells=n_kv, flash=True)
    check(built, [Segment(n_kv)], 2, n_kv)
    assert has_kernel(built, "attention_pairs") == (n_kv >= 3)


@integers_only
@pytest.mark.parametrize("type_", some([F16, BF16, Q8_0], CACHES))
@pytest.mark.parametrize(
    ("n_head", "n_head_kv", "width"), [(2, 2, 16), (12, 4, 48), (16, 16, 64), (20, 4, 80), (14, 2, 128), (3, 3, 256)]
)
def test_head_shapes_in_pairs(n_head: int, n_head_kv: int, width: int, type_: GGMLType) -> None:
    if type_ == Q8_0 and width * n_head_kv % 32:
        width *= 2
    built = gqa(n_head, n_head_kv, width, (type_, type_), tokens=30, cells=400, flash=True)
    check(built, [Segment(11, 1, 17), Segment(1, 40, 0), Segment(18, 50, 300)], 2)
    assert has_kernel(built, "attention_pairs")


@integers_only
@pytest.mark.parametrize("sharpness", [0.01, 1, 30])
@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize(("n_head", "tokens"), [(12, 1), (3, 2)])
@pytest.mark.parametrize(
    ("type_", "unevenness", "most"),
    some([(F16, 1, 6), (BF16, 2, 0.5), (Q8_0, 3, 0.2)], [(F16, 1, 6), (Q8_0, 3, 0.2)], unpack=True),
)
def test_uneven_rows_as_integers(
    type_: GGMLType, unevenness: float, most: float, n_head: int, tokens: int, view: bool, sharpness: float,
    rng: np.random.Generator,
) -> None:  # fmt: skip
    """Integers round about as much as an f16 cache does: with blocks of very different size, rows of nothing, of one
    block, of one number; weights from flat to one alone."""
    shape: dict[str, Any] = {"tokens": tokens, "cells": 300, "flash": True}
    built = absorbed(n_head, type_, **shape) if view else gqa(n_head, 1, 96, (type_, type_), **shape)
    run = built.run.compile(built.node, 2)
    cached = {}
    for cache in built.stores:
        rows = rng.standard_normal((300 - tokens, cache.cols)) * np.exp(
            unevenness * rng.standard_normal((1, cache.cols // 32)).repeat(32)
        )
        rows[::7] = 0
        rows[1::7, 32:] = 0
        rows[2::7, :-1] = 0
        cached[cache] = rows / np.abs(rows).max()
        run.caches[cache][: 300 - tokens] = encode(cached[cache], type_)
    values = {x: rng.standard_normal((tokens, cols), dtype=np.float32) for x, cols in built.leaves.items()}
    for x in list(built.leaves)[: 2 if view else 1]:
        values[x] *= np.float32(sharpness * 100)
    segments = [Segment(tokens, 0, 300 - tokens)]
    out = run(segments, values)
    exact = expected(run, built.node, segments, values)
    for cache, leaf in built.stores.items():
        cached[cache] = np.vstack([cached[cache], values[leaf]])
    of_cache = expected(run, built.node, segments, values, cached=cached) - exact
    assert how_rounded(built) == "integers"
    assert np.abs(out - exact).max() < most * np.abs(of_cache).max()


@integers_only
@pytest.mark.parametrize("small_q", [False, True])
@pytest.mark.parametrize(("n_head", "tokens"), [(12, 1), (3, 2), (16, 20)])
@pytest.mark.parametrize(("type_", "most"), some([(F16, 4), (BF16, 0.5)], [(F16, 4)], unpack=True))
def test_rotated_keys_much_larger_than_the_latent_part(
    type_: GGMLType, most: float, n_head: int, tokens: int, small_q: bool, rng: np.random.Generator
) -> None:
    """Either part of an MLA row, and of Q, keeps the precision of a scale of its own."""
    built = absorbed(n_head, type_, tokens=tokens, cells=300, flash=True)
    run = built.run.compile(built.node, 2)
    (cache, leaf), (q, latent_q) = next(iter(built.stores.items())), list(built.leaves)[:2]
    values = {x: rng.standard_normal((tokens, cols), dtype=np.float32) for x, cols in built.leaves.items()}
    rows = rng.standard_normal((300 - tokens, 576))
    rows[:, :64] *= 500
    values[leaf][:, :64] *= np.float32(500)
    values[q if small_q else latent_q] *= np.float32(0.002 if small_q else 500)
    run.caches[cache][: 300 - tokens] = encode(rows, type_)
    segments = [Segment(tokens, 0, 300 - tokens)]
    out, exact = run(segments, values), expected(run, built.node, segments, values)
    held = {cache: np.vstack([rows, values[leaf]])}
    of_cache = expected(run, built.node, segments, values, cached=held) - exact
    assert how_rounded(built) == "integers"
    assert np.abs(out - exact).max() < most * np.abs(of_cache).max()


@integers_only
@pytest.mark.skipif("avx512bf16" not in isa.current().features, reason="no products of bfloat16 here")
@pytest.mark.parametrize("type_", [F16, BF16])
def test_sizes_of_rows(type_: GGMLType, rng: np.random.Generator) -> None:
    """Bounds of the sum of squares and the largest magnitude, at most 2 % too large; NaN of what is not finite."""
    columns = 96
    row_sizes = pair_sizes.make_row_sizes(type_.name.lower())

    @numba.njit
    def sizes(*args: int) -> None:
        row_sizes(*args)

    for n in (1, 4, 7, 16):
        rows = rng.standard_normal((n, columns)) * np.exp(rng.standard_normal((n, 1)) * 3)
        rows[0, 5:] = 0
        data = encode(rows, type_)
        exact = decode(data, type_)
        norms, tops = np.zeros(20, np.float32), np.zeros(20, np.float32)
        sizes(data.ctypes.data, data.strides[0], n, columns // 16, norms.ctypes.data, tops.ctypes.data)
        for found, want in ((norms, (exact**2).sum(1)), (tops, np.abs(exact).max(1))):
            assert (found[:n] >= want * (1 - 1e-6)).all()
            assert (found[:n] <= want * 1.02 + 2.0**-15).all()
        for bad in (np.inf, -np.inf, np.nan):
            rows[n - 1, 3] = bad
            data = encode(rows, type_)
            sizes(data.ctypes.data, data.strides[0], n, columns // 16, norms.ctypes.data, tops.ctypes.data)
            assert not np.isfinite(norms[n - 1])
            assert np.isfinite(norms[: n - 1]).all()


@integers_only
@pytest.mark.parametrize(("tokens", "type_"), some([(3, Q8_0), (2, Q8_0), (3, BF16)], [(2, Q8_0)], unpack=True))
def test_integers_need_no_bfloat16(tokens: int, type_: GGMLType, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs with AVX-512 but without avx512bf16."""
    here = isa.current()
    lesser = replace(here, features=here.features - {"avx512bf16"})
    monkeypatch.setattr(isa, "current", lambda: lesser)
    built = gqa(6, 2, 64, (type_, type_), tokens=tokens, cells=80, flash=True)
    check(built, [Segment(tokens, 1, 70)], 2)
    assert has_kernel(built, "attention_pairs" if tokens == 3 else "attention_few_pairs")


@integers_only
@pytest.mark.parametrize("type_", [F16, Q8_0])
@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("kind", [absorbed, expanded])
def test_mla_in_pairs(kind: Callable[..., Built], n_threads: int, type_: GGMLType) -> None:
    built = kind(12, type_, tokens=50, cells=600, flash=True)
    check(built, [Segment(21, 7, 130), Segment(29, 170, 300)], n_threads)
    assert has_kernel(built, "attention_pairs")


@integers_only
def test_only_short_caches_are_taken_in_pairs() -> None:
    """One cache of f32 keeps the whole node in f32."""
    for k in (F32, *SHORT):
        for v in (F32, *SHORT):
            built = gqa(4, 4, 64, (k, v), tokens=30, cells=64, flash=True)
            built.run.lower(built.node, 1)
            assert has_kernel(built, "attention_pairs") == (k in SHORT and v in SHORT), (k, v)


def test_large_scores() -> None:
    """Scores of thousands: the running maximum keeps everything finite."""
    built = gqa(2, 2, 64, (F32, F32), tokens=20, cells=400, flash=True)
    built.node.op = replace(built.node.op, scale=300.0)
    check(built, [Segment(20, 0, 380)], 2, tolerance=2e-3)


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("leaf", [0, 1, 2])
@pytest.mark.parametrize("type_", some([F16, BF16, Q8_0], CACHES))
def test_nan_is_not_hidden(type_: GGMLType, leaf: int, flash: bool, rng: np.random.Generator) -> None:
    """A NaN in a query or key reaches exactly the tokens that see it; one in a value at least those."""
    built = gqa(2, 2, 64, (type_, type_), tokens=40, cells=64, flash=flash)
    run = built.run.compile(built.node, 2)
    values = {x: rng.standard_normal((40, cols), dtype=np.float32) for x, cols in built.leaves.items()}
    values[list(built.leaves)[leaf]][25, 5] = np.nan
    bad = np.isnan(run([Segment(40)], values)).any(axis=1)
    assert bad[25] and bad[26:].all() == (leaf > 0)
    assert leaf == 2 or not bad[:25].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("leaf", [0, 1])
def test_nan_is_not_hidden_in_codes(leaf: int, bad: float, rng: np.random.Generator) -> None:
    """The same where scores are sums of integers; other heads stay as they are."""
    built = gqa(4, 2, 64, (Q8_0, Q8_0), tokens=1, cells=64, flash=True)
    run = built.run.compile(built.node, 2)
    run.caches[next(iter(built.stores))][:40] = encode(rng.standard_normal((40, 128)), Q8_0)
    run.caches[list(built.stores)[1]][:40] = encode(rng.standard_normal((40, 128)), Q8_0)
    values = {x: rng.standard_normal((1, cols), dtype=np.float32) for x, cols in built.leaves.items()}
    values[list(built.leaves)[leaf]][0, 5] = bad
    nan = np.isnan(run([Segment(1, 0, 40)], values)).reshape(4, 64).all(axis=1)
    assert nan.tolist() == [True, leaf == 1, False, False]


def test_scores_show_in_the_memory_report() -> None:
    small = gqa(8, 8, 64, (F16, F16), tokens=64, cells=512, flash=False, step=2)
    large = gqa(8, 8, 64, (F16, F16), tokens=64, cells=512, flash=False)
    sizes = [b.run.compile(b.node, 1).program.arena_bytes for b in (small, large)]
    assert sizes[1] - sizes[0] >= 6 * 64 * 512 * 4


def test_refused() -> None:
    """What no kernel can do is said, not computed wrongly."""
    with pytest.raises(UnsupportedError, match="multiples of 16"):
        built = gqa(4, 4, 40, (Q8_0, Q8_0), tokens=1, cells=8, flash=True)
        built.run.compile(built.node, 1)
    with pytest.raises(UnsupportedError, match="q4_K"):
        built = gqa(4, 4, 64, (GGMLType.Q4_K, F16), tokens=1, cells=8, flash=True)
        built.run.compile(built.node, 1)
