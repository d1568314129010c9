"""Quantized KV caches and the Hadamard rotation: stored rows, read rows, attention, perplexity of whole models."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from factories import tiny_deepseek2, tiny_model
from gguf_files import write_model
from kernel_harness import Harness, Segment
from leaves import leaf
from test_cpu_attention import Built, absorbed, expected, gqa, how_rounded

from ikcli.backends.cpu.lower_attention import RULES
from ikcli.backends.reference_kv import through_blocks
from ikcli.engine.plan.startup import prepare
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.engine.run.session import Session
from ikcli.errors import UnsupportedError, UsageError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES, row_n_bytes
from ikcli.graph import Cache, Graph, power_of_two_parts
from ikcli.graph.ops_rows import walsh
from ikcli.measure.perplexity import PerplexityParams
from ikcli.measure.perplexity import run as run_perplexity
from ikcli.measure.text import tokenize
from ikcli.models import GraphConfig
from ikcli.quant.decode import dequantize
from ikcli.settings.run import DATA_DIR, KV_TYPES, RunConfig

Array = npt.NDArray[Any]
T = GGMLType
QUANTIZED = [T.Q8_0, T.Q8_KV, T.Q6_0, T.Q5_1, T.Q5_0, T.Q4_1, T.Q4_0, T.IQ4_NL]
# Error of Gaussian rows relative to their size: what the best scales reach, and a few percent.
GAUSS_RMSE = {T.Q8_0: 0.0056, T.Q8_KV: 0.0085, T.Q6_0: 0.0205, T.Q5_1: 0.040, T.Q5_0: 0.0415, T.Q4_1: 0.0800,
              T.Q4_0: 0.0830, T.IQ4_NL: 0.0755}  # fmt: skip
MINIMUM = (T.Q5_1, T.Q4_1)


def names(types: list[GGMLType]) -> list[Any]:
    return [pytest.param(t, id=TYPES[t].name) for t in types]


def slow_but(fast: list[GGMLType]) -> list[Any]:
    """All quantized types; those not in `fast` belong to the slow run, since each compiles large kernels."""
    marks = {t: () if t in fast else pytest.mark.slow for t in QUANTIZED}
    return [pytest.param(t, id=TYPES[t].name, marks=marks[t]) for t in QUANTIZED]


def random_rows(rng: np.random.Generator, n: int, cols: int, type_: GGMLType) -> Array:
    """Bytes of n cache rows of valid blocks: any codes, scales around 0.02 of either sign."""
    size = TYPES[type_].type_size
    scale = (rng.uniform(0.01, 0.03, (n, cols // 32)) * rng.choice([-1, 1], (n, cols // 32))).astype(np.float16)
    rows = rng.integers(0, 256, (n, row_n_bytes(type_, cols)), dtype=np.uint8)
    if type_ == T.Q8_KV:
        rows[:, :4] = scale[:, :1].astype(np.float32).view(np.uint8)
        return rows
    blocks = rows.reshape(n, -1, size)
    blocks[..., :2] = scale[..., None].view(np.uint8)
    if type_ in MINIMUM:
        blocks[..., 2:4] = rng.uniform(-1, 1, scale.shape).astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(n, -1)


def values_of(rows: Array, type_: GGMLType, cols: int) -> Array:
    """Cache rows decoded as a tensor of weights would be."""
    return dequantize(np.ascontiguousarray(rows).reshape(-1), type_, (cols, len(rows))).reshape(len(rows), cols)


def stored(values: Array, type_: GGMLType) -> tuple[Array, Harness, Cache]:
    """Rows as the runtime stores them, in cells 3 and on of a cache."""
    run = Harness(len(values), len(values) + 8, RULES)
    run.graph.il = 0
    x = run.input("x", values.shape[1])
    cache = run.graph.cache("k", values.shape[1], type_)
    run.graph.kv_store(cache, x, "store")
    run.compile(run.graph.kv_rows(cache, 0, values.shape[1], "rows"), 2)
    back = run([Segment(len(values), 3)], {x: values})
    np.testing.assert_allclose(back, values_of(run.caches[cache][3 : 3 + len(values)], type_, values.shape[1]), 1e-6)
    return back, run, cache


# --- storing ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("type_", names(QUANTIZED))
def test_stored_rows(type_: GGMLType, rng: np.random.Generator) -> None:
    """The NumPy quantizer's values (but for near ties between two scales), and the error that the type can reach."""
    x = rng.standard_normal((40, 192), dtype=np.float32)
    x[20:] *= np.exp(rng.standard_normal((20, 192))).astype(np.float32) * 30
    back, run, cache = stored(x, type_)
    wanted = through_blocks(x, type_)
    blocks = (np.abs(back - wanted) > 1e-3 * np.abs(x).max(axis=1, keepdims=True)).reshape(-1, 32).any(axis=1)
    assert blocks.mean() < 0.02
    assert ((back - x) ** 2).sum() < 1.005 * ((wanted - x) ** 2).sum()
    error = np.sqrt(((back - x)[:20] ** 2).mean() / (x[:20] ** 2).mean())
    assert 0.5 * GAUSS_RMSE[type_] < error < GAUSS_RMSE[type_]
    if type_ == T.Q8_KV:
        rows = run.caches[cache][3:43]
        sums = rows[:, 8:].view(np.int8).sum(axis=1, dtype=np.int32)
        np.testing.assert_array_equal(np.ascontiguousarray(rows[:, 4:8]).view(np.int32)[:, 0], sums)


@pytest.mark.parametrize("type_", names(QUANTIZED))
def test_special_rows(type_: GGMLType) -> None:
    """Zeros, constants, one value among zeros, the two signs, tiny and large values."""
    x = np.zeros((8, 64), dtype=np.float32)
    x[1] = 2.5
    x[2] = -2.5
    x[3, 37] = 7.0
    x[4, 5] = -7.0
    x[5] = np.linspace(-1, 1, 64)
    x[6] = 1e-30
    x[7] = np.linspace(-3000, 3000, 64)
    back, _, _ = stored(x, type_)
    np.testing.assert_allclose(back, through_blocks(x, type_), rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(back[0], 0)
    near_zero = 7 / 127 if type_ == T.IQ4_NL else 2e-3  # iq4_nl has no zero
    np.testing.assert_allclose(back[1:5], x[1:5], rtol=1e-3, atol=1.01 * near_zero)
    assert (np.abs(back[[5, 7]] - x[[5, 7]]).max(axis=1) < [0.08, 240]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("type_", names(QUANTIZED))
def test_bad_values_stay_visible(type_: GGMLType, bad: float) -> None:
    run = Harness(1, 4, RULES)
    run.graph.il = 0
    x = run.input("x", 64)
    cache = run.graph.cache("k", 64, type_)
    run.graph.kv_store(cache, x, "store")
    run.compile(run.graph.kv_rows(cache, 0, 64, "rows"), 1)
    values = np.ones((1, 64), dtype=np.float32)
    values[0, 45] = bad
    assert not np.isfinite(run([Segment(1)], {x: values})).all()


# --- reading ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("first", "n"), [(0, 96), (16, 48), (48, 16)])
@pytest.mark.parametrize("type_", names(QUANTIZED))
def test_read_rows(type_: GGMLType, first: int, n: int, rng: np.random.Generator) -> None:
    """Every code of a type, halves of blocks included."""
    run = Harness(1, 64, RULES)
    run.graph.il = 0
    x = run.input("x", 96)
    cache = run.graph.cache("k", 96, type_)
    run.graph.kv_store(cache, x, "store")
    run.compile(run.graph.kv_rows(cache, first, n, "rows"), 1)
    run.caches[cache][:60] = random_rows(rng, 60, 96, type_)
    out = run([Segment(1, 0, 59)], {x: np.ones((1, 96), dtype=np.float32)})
    wanted = values_of(run.caches[cache][:60], type_, 96)[:, first : first + n]
    np.testing.assert_allclose(out, wanted, rtol=2e-6, atol=1e-7)


def check(built: Built, segments: list[Segment], rng: np.random.Generator) -> None:
    """Attention over random cached rows and freshly stored ones, against float64 on what the cache holds."""
    run = built.run.compile(built.node, 2)
    for cache in built.stores:
        run.caches[cache][:] = 0xFF
        for s in segments:
            if s.pos:
                run.caches[cache][s.cell : s.cell + s.pos] = random_rows(rng, s.pos, cache.cols, cache.type)
    n = sum(s.n_tokens for s in segments)
    values = {x: rng.standard_normal((n, cols), dtype=np.float32) for x, cols in built.leaves.items()}
    out = run(segments, values)
    rounding = how_rounded(built)
    wanted = expected(run, built.node, segments, values, codes=rounding == "codes")
    assert np.abs(out - wanted).max() < (1e-3 if rounding == "integers" else 1e-5) * np.abs(wanted).max()


@pytest.mark.parametrize("mode", ["few", "many", "scores"])
@pytest.mark.parametrize("type_", slow_but([T.Q4_0]))
def test_attention(type_: GGMLType, mode: str, rng: np.random.Generator) -> None:
    tokens = 1 if mode == "few" else 40
    built = gqa(4, 2, 64, (type_, type_), tokens=tokens, cells=200, flash=mode != "scores")
    check(built, [Segment(tokens, 3, 117)], rng)


@pytest.mark.parametrize("width", [16, 48, 80, 96, 192])
def test_heads_that_end_inside_a_block(width: int, rng: np.random.Generator) -> None:
    check(gqa(4, 2, width, (T.Q4_0, T.Q4_0), tokens=20, cells=100, flash=True), [Segment(20, 5, 61)], rng)


@pytest.mark.parametrize("type_", slow_but([]))
def test_latent_rows(type_: GGMLType, rng: np.random.Generator) -> None:
    check(absorbed(12, type_, tokens=4, cells=200, flash=True), [Segment(4, 2, 130)], rng)


def test_refused(tmp_path: Path) -> None:
    """Shapes and modes without a kernel end in one sentence with the way out."""
    with pytest.raises(UnsupportedError, match=r"K cache of type q4_0 .* multiples of 16; use -ctk f16"):
        built = gqa(4, 4, 40, (T.Q4_0, T.F16), tokens=1, cells=8, flash=True)
        built.run.compile(built.node, 1)
    with pytest.raises(UnsupportedError, match=r"V cache of type q5_1 .* multiples of 32, not 48; use -ctv f16"):
        built = gqa(3, 3, 16, (T.F16, T.Q5_1), tokens=1, cells=8, flash=True)
        built.run.compile(built.node, 1)
    path = write_model(tiny_deepseek2(), tmp_path / "m.gguf")
    with pytest.raises(UsageError, match=r"-ctv q4_0 with -mla 1"):
        prepare(RunConfig(model=path, mla=1, flash_attn=False, type_v="q4_0"))


def test_half_a_row_of_one_scale_is_refused() -> None:
    run = Harness(1, 4, RULES)
    run.graph.il = 0
    x = run.input("x", 64)
    cache = run.graph.cache("k", 64, T.Q8_KV)
    run.graph.kv_store(cache, x, "store", cols=32)
    with pytest.raises(UnsupportedError, match="at once"):
        run.compile(run.graph.kv_rows(cache, 0, 64, "rows"), 1)


# --- rotation --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("n_head", "dim", "offset", "blocks"),
    [(3, 64, 0, ()), (2, 32, 0, ()), (5, 8, 0, ()), (1, 16, 0, ()), (2, 80, 0, ()), (4, 192, 0, ()), (2, 41, 0, ()),
     (1, 576, 0, (64, 512)), (3, 192, 128, ()), (2, 50, 10, (32, 4))],
)  # fmt: skip
def test_hadamard(n_head: int, dim: int, offset: int, blocks: tuple[int, ...], rng: np.random.Generator) -> None:
    """The matrix product it stands for; applied twice it changes nothing."""
    run = Harness(7, 8, RULES)
    x = run.input("x", n_head * dim)
    once = run.graph.hadamard(x, n_head, dim, "h", offset=offset, blocks=blocks)
    run.compile(once, 2)
    values = rng.standard_normal((7, n_head * dim), dtype=np.float32)
    out = run([Segment(7)], {x: values})
    matrix, at = np.eye(dim), offset
    for size in once.op.blocks:
        matrix[at : at + size, at : at + size] = walsh(size)
        at += size
    wanted = values.reshape(7, n_head, dim) @ matrix
    np.testing.assert_allclose(out, wanted.reshape(7, -1), atol=3e-6)
    np.testing.assert_allclose(matrix @ matrix, np.eye(dim), atol=1e-12)


def test_power_of_two_parts() -> None:
    assert power_of_two_parts(192) == (128, 64)
    assert power_of_two_parts(41) == (32, 8, 1)
    x = leaf(Graph(), "x", 64)
    with pytest.raises(ValueError, match="do not fit"):
        Graph().hadamard(x, 2, 32, "h", blocks=(24,))


def transcript(session: Any, n: int = 150) -> Array:
    ids = np.random.default_rng(5).integers(0, 96, n + 2).astype(np.int32)
    rows = [np.array(session.decode(Batch.single(ids[:n], logits="all")))]
    return np.concatenate([*rows, *(np.array(session.decode(Batch.single(ids[i : i + 1], i))) for i in (n, n + 1))])


@pytest.mark.parametrize(
    ("model", "changes"),
    [("qwen3", {}), ("llama", {"flash_attn": False})]
    + [("deepseek2", {"mla": mla, "flash_attn": fa}) for mla in range(4) for fa in (True, False)],
)
def test_rotation_changes_nothing_by_itself(tmp_path: Path, model: str, changes: dict[str, Any]) -> None:
    """With a float32 cache all logits stay the same, prompts and generation, every attention mode."""
    path = write_model(tiny_deepseek2() if model == "deepseek2" else tiny_model(model), tmp_path / "m.gguf")
    settings: dict[str, Any] = {
        "n_ctx": 256,
        "n_threads": 1,
        "n_threads_batch": 1,
        "warmup": False,
        "type_k": "f32",
        "type_v": "f32",
    }
    c = RunConfig(model=path, command="bench", **(settings | changes))
    found = []
    for on in (False, True):
        with Session.open(replace(c, k_hadamard=on, v_hadamard=on)) as session:
            found.append(transcript(session))
    assert np.abs(found[1] - found[0]).max() < 2e-3 * found[0].std()
    assert not np.array_equal(found[0], found[1])


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("model", ["qwen3", "deepseek2"])
def test_same_as_numpy(tmp_path: Path, model: str, rotate: bool) -> None:
    """A q4_0 cache gives the NumPy session's logits up to the rare code that rounds the other way."""
    path = write_model(tiny_deepseek2() if model == "deepseek2" else tiny_model(model), tmp_path / "m.gguf")
    c = RunConfig(model=path, command="bench", n_ctx=256, n_threads=1, n_threads_batch=1, warmup=False, type_k="q4_0",
                  type_v="q4_0", k_hadamard=rotate, v_hadamard=rotate)  # fmt: skip
    with Session.open(c) as session:
        found = transcript(session)
    cfg = GraphConfig(type_k=T.Q4_0, type_v=T.Q4_0, n_ctx=256, k_hadamard=rotate, v_hadamard=rotate)
    wanted = transcript(ReferenceSession(path, cfg))
    exact = transcript(ReferenceSession(path, replace(cfg, type_k=T.F32, type_v=T.F32)))
    loss = np.sqrt(((wanted - exact) ** 2).mean())
    assert np.sqrt(((found - wanted) ** 2).mean()) < 0.5 * loss
    assert np.sqrt(((found - exact) ** 2).mean()) < 1.2 * loss


# --- whole models ----------------------------------------------------------------------------------------------------
def perplexity(model: Path, text: Path, chunks: int, **changes: Any) -> float:
    c = RunConfig(model=model, command="perplexity", n_ctx=512, n_threads=2, n_threads_batch=2, warmup=False, **changes)
    with closing(Session.open(c, n_ctx=512)) as session:
        tokens = tokenize(session, text.read_text(encoding="utf-8"))
        return run_perplexity(session, tokens, PerplexityParams(n_batch=512, chunks=chunks)).ppl


@pytest.fixture(scope="module")
def demo() -> tuple[Path, Path, float]:
    """The bundled model, its text, and the perplexity of one chunk with an f16 cache."""
    model, text = DATA_DIR / "demo.gguf", DATA_DIR / "demo.txt"
    return model, text, perplexity(model, text, 1)


@pytest.mark.parametrize("type_", slow_but([T.Q4_0]))
def test_demo_model(demo: tuple[Path, Path, float], type_: GGMLType) -> None:
    model, text, wanted = demo
    found = perplexity(model, text, 1, type_k=TYPES[type_].name)
    assert found == pytest.approx(wanted, rel=0.03 if TYPES[type_].type_size < 22 else 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("type_", names(QUANTIZED))
def test_story_model(shared_dir: Path, type_: GGMLType) -> None:
    """Heads of 32 columns of which one or two hold nearly all of K: types of few levels need the rotation."""
    golden, name = shared_dir / "golden", TYPES[type_].name
    model, text = golden / "models" / "stories260K-d256.f32.gguf", golden / "tinystories.txt"
    loss = {mode: perplexity(model, text, 8, **changes) / 4.2048 - 1 for mode, changes in {
        "k": {"type_k": name}, "plain": {"type_k": name, "k_hadamard": False}, "v": {"type_v": name},
        "rotated v": {"type_v": name, "v_hadamard": True},
    }.items()}  # fmt: skip
    bits = TYPES[type_].type_size / 4
    assert abs(loss["v"]) < 0.005 and abs(loss["rotated v"]) < 0.005
    assert loss["k"] < (0.002 if bits >= 8 else 0.006 if bits > 6 else 0.02 if bits > 5 else 0.15)
    assert bits >= 8 or loss["k"] < 0.4 * loss["plain"]


def test_rotation_of_k_is_the_default_for_few_bits() -> None:
    """On below 8 bits, off from there on, and as the user says."""
    cases = {("f16", None): False, ("q8_0", None): False, ("q8_KV", None): False, ("q6_0", None): True,
             ("q4_0", None): True, ("q4_0", False): False, ("f16", True): True}  # fmt: skip
    for (name, asked), wanted in cases.items():
        session = Session.plan(RunConfig(model=DATA_DIR / "demo.gguf", type_k=name, k_hadamard=asked, n_ctx=256))
        assert session.graph_config.k_hadamard == wanted
        assert any(n.op.name == "hadamard" for g, _ in session.graphs.values() for n in g.nodes) == wanted


@pytest.mark.parametrize("name", KV_TYPES)
def test_memory_report_is_the_memory(name: str) -> None:
    """The size logged is that of the allocated rows, headers of rows included; every cell is a row of 576 here."""
    session = Session.plan(RunConfig(model=DATA_DIR / "demo.gguf", type_k=name, n_ctx=256))
    row = row_n_bytes(next(iter(session.cache_bytes())).type, 576)
    assert list(session.cache_bytes().values()) == [256 * row] * session.model.hp.n_layer
