"""Windows, chunks, sinks and soft caps of the attention kernels, against float64 NumPy.

Cached positions that no query of a micro-batch sees are NaN, in caches of windows they do not exist.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numba
import numpy as np
import pytest
from attention_cases import (
    BF16,
    F16,
    F32,
    Q4_0,
    Q8_0,
    Built,
    absorbed,
    check,
    encode,
    expanded,
    gqa,
    has_kernel,
    random_sinks,
)
from kernel_harness import Harness, Segment
from tiers import SAME_CACHES, some

from ikcli.backends.cpu.lower_attention import RULES
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.graph import Per, Weight
from ikcli.graph.ops_attention import Attention
from ikcli.native.simd import tanh, vec

PAIRS_OF_TYPES = [(F16, F16), (F32, F32), (BF16, BF16), (Q8_0, Q8_0), (Q4_0, F16)]


def sinks(n_head: int) -> Weight:
    return Weight("attn_sinks", F32, (n_head,))


def asked(letters: str, n_head: int, window: int = 40) -> dict[str, Any]:
    """Settings of a node: w a window, k chunks of as many positions, s sinks, c a soft cap that bends scores."""
    of = {"w": {"window": window}, "k": {"chunk": window}, "s": {"sinks": sinks(n_head)}, "c": {"softcap": 2.0}}
    return {name: value for letter in letters for name, value in of[letter].items()}


LETTERS = ["w", "k", "s", "c", "wsc"]
# All of them with one type, all at once with the others: kernels take long to compile.
CASES = some([*((x, (F16, F16)) for x in LETTERS), ("wsc", (F32, F32)), ("wsc", (Q8_0, Q8_0))],
             [(x, (F16, F16)) for x in ("w", "k", "wsc")], unpack=True)  # fmt: skip


# --- functions -------------------------------------------------------------------------------------------------------
def test_tanh() -> None:
    """A few units in the last place over all magnitudes; the sign of small numbers; NaN of NaN."""
    vtanh, load, store = tanh.vtanh, vec.load_f32x16, vec.store_f32x16

    @numba.njit
    def run(x: int, y: int, n: int) -> None:
        for i in range(0, 4 * n, 64):
            store(y + i, vtanh(load(x + i)))

    size = np.concatenate([10.0 ** np.linspace(-30, 30, 4001), np.linspace(0.5, 10, 4095)]).astype(np.float32)
    x = np.concatenate([size, -size]).astype(np.float32)
    x = np.concatenate([x, np.zeros(-len(x) % 16, np.float32)])
    y = np.empty_like(x)
    run(x.ctypes.data, y.ctypes.data, len(x))
    want = np.tanh(x.astype(np.float64))
    assert (np.abs(y - want) <= 3e-7 * np.abs(want)).all()
    x[3], x[5] = np.nan, -np.nan
    run(x.ctypes.data, y.ctypes.data, len(x))
    assert np.isnan(y[[3, 5]]).all() and np.isfinite(np.delete(y, [3, 5])).all()


# --- prompts ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize(("letters", "types"), CASES)
def test_prompts(letters: str, types: tuple[GGMLType, GGMLType], flash: bool) -> None:
    """Several segments, before and behind the ends of windows and chunks."""
    built = gqa(6, 2, 64, types, tokens=130, cells=700, flash=flash, **asked(letters, 6))
    check(built, [Segment(70, 3), Segment(40, 200, 300), Segment(1, 560, 39), Segment(19, 610, 35)], 2)


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("types", some(PAIRS_OF_TYPES, SAME_CACHES), ids=lambda t: "-".join(x.name for x in t))
def test_cache_types(types: tuple[GGMLType, GGMLType], flash: bool) -> None:
    """A cache of windows that keeps only what is seen."""
    built = gqa(4, 2, 64, types, tokens=40, cells=90, flash=flash, per=Per.WINDOW, **asked("wsc", 4))
    check(built, [Segment(40, 0, 300, -255)], 2)


@pytest.mark.parametrize(
    ("flash", "type_"), some([(True, F16), (True, F32), (False, F16)], [(True, F16), (False, F16)], unpack=True)
)
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 33, 127, 128, 129, 200, 1000])
def test_sizes_of_windows(window: int, flash: bool, type_: GGMLType) -> None:
    """Smaller and larger than tiles, blocks of tokens and the prompt."""
    built = gqa(4, 2, 32, (type_, type_), tokens=150, cells=600, flash=flash, window=window)
    check(built, [Segment(150, 9, 260)], 2, window)


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("type_", [F16])
@pytest.mark.parametrize("pos", [0, 60, 63, 64, 65, 127, 128])
def test_ends_of_chunks(pos: int, type_: GGMLType, flash: bool) -> None:
    """Tokens on both sides of a chunk's end in one task; what is before the chunk of the first is not read."""
    built = gqa(4, 2, 32, (type_, type_), tokens=70, cells=300, flash=flash, chunk=64)
    check(built, [Segment(69, 9, pos), Segment(1, 220, 64)], 2, pos)


def test_window_and_chunk_together() -> None:
    built = gqa(4, 2, 32, (F16, F16), tokens=70, cells=300, flash=True, chunk=64, window=20)
    check(built, [Segment(70, 9, 100)], 2)


@pytest.mark.parametrize("tokens", [1, 2, 7, 33])
@pytest.mark.parametrize(
    ("n_head", "type_"), [*((n, F16) for n in (1, 2, 3, 5, 8, 12, 16)), pytest.param(12, F32, marks=pytest.mark.slow)]
)
def test_groups_of_heads(n_head: int, tokens: int, type_: GGMLType) -> None:
    """Sinks belong to query heads, whatever the task."""
    built = gqa(2 * n_head, 2, 32, (type_, type_), tokens=tokens, cells=600, flash=True, **asked("wsc", 2 * n_head, 90))
    check(built, [Segment(tokens, 9, 400)], 2)


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("step", [0, 1, 3, 4])
def test_steps_of_heads(step: int, flash: bool) -> None:
    built = gqa(8, 2, 32, (F16, F16), tokens=7, cells=64, flash=flash, step=step, **asked("wsc", 8, 16))
    check(built, [Segment(7, 3, 30)], 2)


@pytest.mark.parametrize(("build", "tokens"), [(absorbed, 1), (absorbed, 30), (expanded, 30)])
def test_parts_of_rows(build: Any, tokens: int) -> None:
    """Keys of two parts, values inside of keys, compact rows."""
    built = build(4, F16, tokens=tokens, cells=300, flash=True, **asked("wsc", 4))
    check(built, [Segment(tokens, 7, 200)], 2)


# --- generation ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n_threads", [1, 2, 3])
@pytest.mark.parametrize(("letters", "types"), CASES)
def test_one_token(letters: str, types: tuple[GGMLType, GGMLType], n_threads: int) -> None:
    """Split into parts or not: a sink takes part once, and parts count from the first position seen."""
    for window, pos in ((1, 500), (300, 1000), (300, 7)):
        built = gqa(16, 2, 64, types, tokens=1, cells=1100, flash=True, **asked(letters, 16, window))
        check(built, [Segment(1, 40, pos)], n_threads, pos)
        assert has_kernel(built, "attention_stream")


@pytest.mark.parametrize("letters", ["k", "wsc"])
@pytest.mark.parametrize(
    ("n_head", "types"),
    some([(12, (F16, F16)), (12, (Q8_0, Q8_0)), (4, (Q4_0, Q4_0))], [(12, (F16, F16))], unpack=True),
)
def test_one_token_otherwise(n_head: int, types: tuple[GGMLType, GGMLType], letters: str) -> None:
    """Kernels for groups and types that are not streamed."""
    built = gqa(n_head, 1, 64, types, tokens=1, cells=1100, flash=True, **asked(letters, n_head, 300))
    check(built, [Segment(1, 40, 1000)], 2)
    assert not has_kernel(built, "attention_stream")


@pytest.mark.parametrize("type_", some([F16, Q8_0], [F16]))
def test_a_step_of_sequences_with_windows_of_cells(type_: GGMLType) -> None:
    built = gqa(16, 2, 64, (type_, type_), tokens=3, cells=400, flash=True, per=Per.WINDOW, **asked("wsc", 16, 128))
    built.run.batch_invariant = True
    check(built, [Segment(1, 0, 1000, -870), Segment(1, 0, 5, 140), Segment(1, 0, 128, 270)], 2)


@pytest.mark.parametrize(
    ("n_head", "n_head_kv", "type_"),
    some([(16, 4, Q8_0), (12, 1, Q8_0), (16, 1, F16), (16, 2, F16)], [(16, 1, F16), (16, 2, F16)], unpack=True),
)
def test_other_sequences_change_no_bits(n_head: int, n_head_kv: int, type_: GGMLType, rng: np.random.Generator) -> None:
    """A token of an independent program alone and next to others."""
    settings = asked("wsc", n_head, 150)
    built = gqa(n_head, n_head_kv, 64, (type_, type_), tokens=3, cells=900, flash=True, **settings)
    built.run.batch_invariant = True
    assert isinstance(built.node.op, Attention)
    run = built.run.compile(built.node, 2, random_sinks(built.node.op, rng))
    for cache in built.stores:
        run.caches[cache][:] = encode(rng.standard_normal((900, cache.cols)), cache.type)
    segments = [Segment(1, 0, 62), Segment(1, 100, 300), Segment(1, 500, 333)]
    values = {x: rng.standard_normal((3, cols), dtype=np.float32) for x, cols in built.leaves.items()}
    out = run(segments, values)
    for i, segment in enumerate(segments):
        alone = run([segment], {x: rows[i : i + 1] for x, rows in values.items()})
        np.testing.assert_array_equal(alone[0], out[i])


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("type_", some([F16, Q8_0], [F16]))
def test_depth_changes_no_bits(tokens: int, type_: GGMLType, rng: np.random.Generator) -> None:
    """Behind its window a sequence may be as long as it likes: the same rows, the same work."""
    built = gqa(
        16, 2, 64, (type_, type_), tokens=tokens, cells=600, flash=True, per=Per.WINDOW, **asked("wsc", 16, 128)
    )
    assert isinstance(built.node.op, Attention)
    run = built.run.compile(built.node, 2, random_sinks(built.node.op, rng))
    for cache in built.stores:
        run.caches[cache][:] = encode(rng.standard_normal((600, cache.cols)), cache.type)
    values = {x: rng.standard_normal((tokens, cols), dtype=np.float32) for x, cols in built.leaves.items()}
    near, far = (run([Segment(tokens, 0, pos, 300 - pos)], values) for pos in (200, 100_000))
    np.testing.assert_array_equal(near, far)


# --- what is not hidden, and what is refused -------------------------------------------------------------------------
@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("letters", some(["w", "c", "wsc"], ["w", "wsc"]))
def test_nan_reaches_those_that_see_it(letters: str, flash: bool, rng: np.random.Generator) -> None:
    """A NaN in a key reaches the tokens whose windows hold it, and no other."""
    built = gqa(2, 2, 64, (F16, F16), tokens=40, cells=64, flash=flash, **asked(letters, 2, 8))
    assert isinstance(built.node.op, Attention)
    run = built.run.compile(built.node, 2, random_sinks(built.node.op, rng))
    values = {x: rng.standard_normal((40, cols), dtype=np.float32) for x, cols in built.leaves.items()}
    values[list(built.leaves)[1]][20, 5] = np.nan
    bad = np.isnan(run([Segment(40)], values)).any(axis=1)
    assert not bad[:20].any() and bad[20:28].all() and bad[28:].all() == ("w" not in letters)


@pytest.mark.parametrize("letters", some(["s", "wsc"], ["wsc"]))
def test_a_sink_that_is_not_a_number_is_not_hidden(letters: str, rng: np.random.Generator) -> None:
    built = gqa(4, 2, 64, (F16, F16), tokens=1, cells=64, flash=True, **asked(letters, 4))
    run = built.run.compile(built.node, 2, {"attn_sinks": np.array([0, np.nan, 1, 2], np.float32)})
    values = {x: rng.standard_normal((1, cols), dtype=np.float32) for x, cols in built.leaves.items()}
    assert np.isnan(run([Segment(1)], values)).reshape(4, 64).all(axis=1).tolist() == [False, True, False, False]


def test_large_sinks_and_scores(rng: np.random.Generator) -> None:
    """Sinks far above and far below all scores."""
    built = gqa(2, 2, 64, (F32, F32), tokens=20, cells=400, flash=True, **asked("s", 2))
    built.node.op = replace(built.node.op, scale=30.0)
    run = built.run.compile(built.node, 2, {"attn_sinks": np.array([1e6, -1e6], np.float32)})
    values = {x: rng.standard_normal((20, cols), dtype=np.float32) for x, cols in built.leaves.items()}
    out = run([Segment(20)], values)
    assert np.abs(out[:, :64]).max() < 1e-30
    plain = gqa(2, 2, 64, (F32, F32), tokens=20, cells=400, flash=True)
    plain.node.op = replace(plain.node.op, scale=30.0)
    plain.run.compile(plain.node, 2)
    by_name = {leaf.name: x for leaf, x in values.items()}
    want = plain.run([Segment(20)], {leaf: by_name[leaf.name] for leaf in plain.leaves})
    np.testing.assert_allclose(out[:, 64:], want[:, 64:], rtol=1e-5, atol=1e-6)


def refusal(built: Built) -> str:
    with pytest.raises(UnsupportedError) as error:
        built.run.compile(built.node, 1)
    return str(error.value)


def test_refused() -> None:
    """What no kernel can do is said, not computed wrongly."""
    half = Weight("blk.0.attn_sinks.weight", F16, (4,))
    assert "f32" in refusal(gqa(4, 4, 64, (F16, F16), tokens=1, cells=8, flash=True, sinks=half))
    run = Harness(4, 8, RULES)
    run.graph.il = 0
    x = run.input("x", 64)
    cache = run.graph.cache("k", 64, F16, per=Per.WINDOW)
    run.graph.kv_store(cache, x, "store")
    assert "attention only" in refusal(Built(run, run.graph.kv_rows(cache, 0, 64, "rows"), {}))
    run = Harness(4, 8, RULES)
    run.graph.il = 0
    run.graph.kv_store(run.graph.cache("v", 64, F16, True, Per.WINDOW), run.input("x", 64), "store")
    assert "transposed" in refusal(Built(run, run.graph.nodes[-1], {}))
