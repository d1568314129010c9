"""The KV cache on the emulated device: stored codes are the CPU's, rows come back, layouts and sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cuda_attention import Run, Segment, random_rows
from cuda_emulation import needs_emulation

from ikcli.backends.cuda.attention_parts import PART_LEAST, Shape, SplitPlan, count_tiles
from ikcli.backends.cuda.kv_layout import KERNEL_TYPES, cache_bytes, from_device, planes, to_device
from ikcli.backends.cuda.lower import Counts, DeviceLimits, GpuLowering
from ikcli.backends.reference_kv import through_blocks
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES, row_n_bytes
from ikcli.graph import Cache, HeadSlice, Rows
from ikcli.graph.ops_attention import FlashAttn
from ikcli.quant.decode import dequantize

T = GGMLType
QUANTIZED = [t for t in KERNEL_TYPES if t not in (T.F32, T.F16, T.BF16)]
ALL = [pytest.param(t, id=TYPES[t].name) for t in KERNEL_TYPES]


def rows_to_store(n: int, cols: int) -> np.ndarray:
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((n, cols)) * rng.uniform(0.01, 30, (n, 1))).astype(np.float32)
    x[1, :32], x[2:3, 32:64], x[3:4] = 0, 7.5, 0
    return x


@needs_emulation
@pytest.mark.parametrize("type_", ALL)
def test_store_and_rows(type_: T) -> None:
    n, cols, other = 6, 192, 4
    run = Run(8, 24)
    g = run.graph
    x, cache = run.input("x", cols + other), g.cache("k", cols, type_)
    g.kv_store(cache, x, "store", offset=other)
    g.kv_rows(cache, 64, 80, "rows")
    run.caches[cache] = np.full((24, row_n_bytes(type_, cols)), 0xFF, np.uint8)
    values = np.hstack([np.full((n, other), np.nan), rows_to_store(n, cols)]).astype(np.float32)
    segments = [Segment(4, 2, 0), Segment(2, 12, 0)]
    (found,) = run(segments, {x: values})
    stored = np.vstack([run.caches[cache][2:6], run.caches[cache][12:14]])
    wanted = values[:, other:]
    if type_ in QUANTIZED:
        wanted = through_blocks(wanted, type_)
    elif type_ == T.F16:
        wanted = wanted.astype(np.float16).astype(np.float32)
    elif type_ == T.BF16:
        bits = wanted.view(np.uint32).astype(np.uint64)
        wanted = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    decoded = dequantize(np.ascontiguousarray(stored).reshape(-1), type_, (cols, n)).reshape(n, cols)
    assert np.array_equal(decoded, wanted)
    assert np.array_equal(found, wanted[:, 64:144])
    assert (np.delete(run.caches[cache], [2, 3, 4, 5, 12, 13], axis=0) == 0xFF).all()


@needs_emulation
def test_columns_of_a_row_are_stored_apart() -> None:
    run = Run(2, 8)
    g = run.graph
    x, cache = run.input("x", 64), g.cache("k", 128, T.Q5_0)
    g.kv_store(cache, x, "low")
    g.kv_store(cache, x, "high", cache_offset=64)
    out = g.kv_rows(cache, 0, 128, "rows")
    run.caches[cache] = np.full((8, row_n_bytes(T.Q5_0, 128)), 0xFF, np.uint8)
    values = rows_to_store(2, 64)
    (found,) = run([Segment(2, 3)], {x: values}, out)
    assert np.array_equal(found, np.hstack([through_blocks(values, T.Q5_0)] * 2))


@needs_emulation
@pytest.mark.parametrize("type_", [T.F32, T.F16, T.BF16])
def test_transposed_store(type_: T) -> None:
    run = Run(4, 8)
    g = run.graph
    x, cache = run.input("x", 32), g.cache("kv_t", 32, type_, transposed=True)
    g.kv_store(cache, x, "store")
    out = g.kv_rows(cache, 0, 32, "rows")
    run.caches[cache] = np.full((32, row_n_bytes(type_, 8)), 0xFF, np.uint8)
    values = np.random.default_rng(0).integers(-100, 100, (3, 32)).astype(np.float32)
    (found,) = run([Segment(2, 1), Segment(1, 5)], {x: values}, out)
    assert np.array_equal(found, values)


@needs_emulation
@pytest.mark.parametrize("type_", [t for t in KERNEL_TYPES if t not in (T.F32, T.F16)])
def test_nan_is_seen(type_: T) -> None:
    run = Run(2, 4)
    g = run.graph
    x, cache = run.input("x", 64), g.cache("k", 64, type_)
    g.kv_store(cache, x, "store")
    out = g.kv_rows(cache, 0, 64, "rows")
    run.caches[cache] = np.zeros((4, row_n_bytes(type_, 64)), np.uint8)
    for bad in (np.nan, np.inf):
        values = rows_to_store(2, 64)
        values[1, 40] = bad
        (found,) = run([Segment(2)], {x: values}, out)
        assert np.isfinite(found[0]).all() and not np.isfinite(found[1]).all()


@pytest.mark.parametrize("type_", ALL)
@pytest.mark.parametrize("transposed", [False, True])
def test_layout_round_trip(type_: T, transposed: bool) -> None:
    if transposed and type_ in QUANTIZED:
        pytest.skip("never transposed")
    cache = Cache("kv_t" if transposed else "k", 0, 96, type_, transposed)
    rng = np.random.default_rng(1)
    shape = (96, row_n_bytes(type_, 10)) if transposed else (10, row_n_bytes(type_, 96))
    rows = rng.integers(0, 256, shape, dtype=np.uint8)
    parts = to_device(cache, rows)
    found = planes(cache, 10)
    assert [p.row_bytes for p in found] == [x.shape[1] for x in parts]
    assert sum(x.size for x in parts) == rows.size == cache_bytes(cache, 10)
    at = 0
    for p in found:
        assert p.offset == at
        at += 10 * p.row_bytes
    assert at == cache_bytes(cache, 10)
    assert np.array_equal(from_device(cache, parts), rows)


def test_random_rows_decode() -> None:
    """The rows that other tests fill caches with are ordinary numbers."""
    for type_ in KERNEL_TYPES:
        rows = random_rows(np.random.default_rng(0), 8, 128, type_)
        values = dequantize(np.ascontiguousarray(rows).reshape(-1), type_, (128, 8))
        assert np.isfinite(values).all() and 0.3 < values.std() < 3


# --- the number of blocks and parts -----------------------------------------------------------------------------------
@pytest.mark.parametrize("view", [{}, {"window": 1}, {"window": 100}, {"window": 1024}, {"chunk": 512}])
@pytest.mark.parametrize("n_sm", [1, 2, 5, 132])
def test_fixed_parts_are_enough(n_sm: int, view: dict[str, int]) -> None:
    """The parts of any token, whose bounds are multiples of its part size, are no more than blocks are launched for."""
    run = Run(8, 5000, DeviceLimits((9, 0), n_sm, 232448, 233472, 1 << 20, "some SMs"), batch_invariant=True)
    q, cache = run.input("q", 4 * 64), run.graph.cache("k", 64, T.F16)
    head = HeadSlice(cache, 0, 64, 64)
    node = run.graph.attention([HeadSlice(q, 0, 64, 64)], [head], head, "kqv", n_head=4, n_head_kv=1, scale=1.0,
                               flash=True, **view)  # fmt: skip
    assert isinstance(node.op, FlashAttn)
    low = GpuLowering({Rows.TOKENS: 8, Rows.OUTPUTS: 1, Rows.KV: 5000}, 5000, run.limits, 0, True)
    shape = Shape(16, 64, 3)
    plan = SplitPlan.of(low, node.op, lambda c: shape)
    # near multiples of a size, windows of eight tokens touch a part more at either end
    for pos in (0, 63, 64, 700, *(at + d for at in range(128, 4992, 128) for d in (-1, 0, 5))):
        counts = Counts(1, 1, pos + 1, 1, pos + 1).bucket(low.max_rows)
        n, fixed = plan.parts(counts, shape), plan.fixed(counts)
        seen = min([pos + 1, *view.values()])
        size = 64 * max(PART_LEAST, math.ceil(math.ceil(seen / 64) / fixed))
        first = node.op.first_seen(pos)
        assert n == 1 or n >= pos // size - max(first - 7, 0) // size + 1
        assert n <= fixed + 2


def test_tiles_are_enough() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        group, rows = int(rng.integers(1, 130)), int(rng.choice([16, 32, 64, 128]))
        tokens = rng.integers(1, 20, rng.integers(1, 9))
        exact = sum(math.ceil(int(t) * group / rows) for t in tokens)
        counts = Counts(int(tokens.sum()), 1, 100, len(tokens), 100)
        assert exact <= count_tiles(counts, group, rows) <= exact + len(tokens) - 1
        in_two = sum(math.ceil(n * group / rows) for t in tokens for n in (int(t) // 3, int(t) - int(t) // 3))
        assert in_two <= count_tiles(counts, group, rows, 2)
        assert counts[Rows.TOKENS] == tokens.sum()
