"""CUDA kernels of norms, elements, heads and activation rows, emulated, against the NumPy reference ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cuda_emulation import needs_emulation
from cuda_graphs import GraphRun

from ikcli.backends.cuda.layouts import half_row_bytes, q8_row_bytes
from ikcli.backends.cuda.lower import Counts, GpuLowering, Ref, all_rules
from ikcli.backends.cuda.rules_layers import FEW_TOKENS, activations
from ikcli.errors import UnsupportedError
from ikcli.graph import HeadSlice, Node, Rows
from ikcli.graph.activations import GATED, UNARY, Glu
from ikcli.graph.ops_alibi import Alibi

pytestmark = needs_emulation
Array = npt.NDArray[Any]


def random(*shape: int, seed: int = 1) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def graph(**weights: Array) -> GraphRun:
    return GraphRun(all_rules(), weights)


WIDTHS = (1, 17, 32, 100, 516)
MODEL_WIDTHS = (896, 2048, 5120, 7168)  # qwen2, deepseek2-lite and qwen3moe, qwen3, deepseek2


# --- norms ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("width", (*WIDTHS, *MODEL_WIDTHS))
def test_rms_norm_of_rows(width: int) -> None:
    """Whole rows and part of a row, at sizes whose squares leave the range of small floats."""
    w = 1 + random(width)
    for cols, offset in ((width, 0), (width + 64, 0), (width + 5, 5)):
        for size in (1.0, 1e15) if width < 600 else (1.0,):
            run = graph(w=w)
            x = run.input("x", random(3, cols) * np.float32(size))
            y = run.graph.rms_norm(x, run.weight("w"), 1e-6, "y", offset=offset, cols=width)
            ((found, wanted),) = run(y)
            np.testing.assert_allclose(found, wanted, rtol=2e-6)


@pytest.mark.parametrize(("heads", "width"), [(32, 128), (4, 64), (5, 20), (3, 33), (2, 1), (16, 256)])
def test_rms_norm_of_heads(heads: int, width: int) -> None:
    run = graph(w=1 + random(width))
    x = run.input("x", random(3, heads * width + 7))
    whole = run.graph.rms_norm(x, run.weight("w"), 1e-6, "y", cols=heads * width)
    shifted = run.graph.rms_norm(x, run.weight("w"), 1e-6, "z", offset=7, cols=heads * width)
    for found, wanted in run(whole, shifted):
        np.testing.assert_allclose(found, wanted, rtol=2e-6)


@pytest.mark.parametrize("heads", [1, 4])
def test_rms_norm_of_zeros_and_nan(heads: int) -> None:
    x = random(3, 20 * heads)
    x[0], x[1, 17] = 0, np.nan
    run = graph(w=np.ones(20, np.float32))
    node = run.input("x", x)
    ((found, _),) = run(run.graph.rms_norm(node, run.weight("w"), 1e-6, "y"))
    assert not found[0].any() and np.isnan(found[1, :20]).all() and np.isfinite(found[2]).all()


# --- rows and elements ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cols", (*WIDTHS, 2048, 10944))
@pytest.mark.parametrize("rows", [1, 7])
def test_add_and_swiglu(rows: int, cols: int) -> None:
    run = graph(b=random(cols))
    x, y = run.input("x", 3 * random(rows, cols)), run.input("y", random(rows, cols, seed=2))
    biased = run.graph.add(x, run.weight("b"), "biased")
    both = run.graph.add(biased, y, "both")
    activated = run.graph.swiglu(x, y, "activated")
    added, summed, silu = run(biased, both, activated)
    np.testing.assert_array_equal(*added)
    np.testing.assert_array_equal(*summed)
    np.testing.assert_allclose(*silu, rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("cols", (*WIDTHS, 2048))
def test_scale_and_gate(cols: int) -> None:
    run = graph()
    x = run.input("x", random(5, cols))
    parts = max(p for p in (1, 2, 3, 4, 5) if cols % p == 0)
    gates = [run.input(f"g{n}", 20 * random(5, n, seed=2)) for n in (1, parts, cols)]
    kinds = ("sigmoid", "softplus", "product")
    nodes = [run.graph.gate(x, g, f"{k}{i}", k) for i, g in enumerate(gates) for k in kinds]
    results = run(run.graph.scale(x, 0.3, "s"), *nodes)
    np.testing.assert_array_equal(*results[0])
    for found, wanted in results[1:]:
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("cols", WIDTHS)
def test_softcap(cols: int) -> None:
    run = graph()
    x = 40 * random(5, cols)
    x[1] *= 1e6
    ((found, wanted),) = run(run.graph.softcap(run.input("x", x), 30.0, "y"))
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("cols", [39, 40])
def test_swiglu_at_the_extremes(cols: int) -> None:
    """No overflow; what cannot be a number is none."""
    gate = np.tile(np.array([-1e30, -1000, -88, -87, -1e-30, 0, 1e-30, 88, 1000, 1e30], np.float32), 4)[None, :cols]
    for x in (gate, np.full((1, cols), np.nan, np.float32), np.full((1, cols), -np.inf, np.float32)):
        run = graph()
        a, b = run.input("x", x), run.input("y", np.ones_like(x))
        ((found, wanted),) = run(run.graph.swiglu(a, b, "z"))
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cols", [39, 64])
@pytest.mark.parametrize(
    "act",
    [Glu(kind) for kind in GATED]
    + [Glu("silu", 0.8), Glu("swiglu_oai", 1.2, 1.5), Glu("silu_of_capped", 0.8), Glu("situ", 0.8, 1.5)],
)
def test_activations(act: Glu, cols: int) -> None:
    run = graph()
    x, y = run.input("x", 3 * random(3, cols)), run.input("y", random(3, cols, seed=2))
    huge = run.input("h", np.tile(np.float32([-1e15, -1000, -88, 0, 88, 1000]), (3, cols))[:, :cols])
    nodes = [run.graph.swiglu(x, y, "a", act), run.graph.swiglu(huge, y, "b", act)]
    nodes += [run.graph.activate(x, act.kind, "c")] if act.kind in UNARY else []
    nodes += [run.graph.clamp(x, act.limit, "d")] if act.limit else []
    for found, wanted in run(*nodes):
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["layer", "rms", "l2", "none"])
@pytest.mark.parametrize(("groups", "width"), [(1, 1), (1, 100), (3, 33), (4, 64), (1, 2048)])
def test_norm(kind: str, groups: int, width: int) -> None:
    """Weights and biases of a group, of a row, or none."""
    shape = (groups, width) if width % 4 == 0 else (groups * width,)  # rows of a matrix are padded on the device
    run = graph(w=1 + random(*shape), b=random(groups * width), one=1 + random(width))
    x = run.input("x", random(3, groups * width) + 3)
    pairs = [(None, None), ("w", None), ("w", "b"), ("one", "b"), (None, "one")]
    nodes = [
        run.graph.norm(x, run.weight(w) if w else None, 1e-5, f"y{i}", kind=kind, width=width,
                       b=run.weight(b) if b else None)
        for i, (w, b) in enumerate(pairs)
    ]  # fmt: skip
    for found, wanted in run(*nodes):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("widths", [(64, 512), (3, 16, 33), (8, 4, 12, 20, 4)])
def test_concat(widths: tuple[int, ...]) -> None:
    run = graph()
    parts = [run.input(f"x{i}", random(4, n)) for i, n in enumerate(widths)]
    ((found, wanted),) = run(run.graph.concat(parts, "y"))
    np.testing.assert_array_equal(found, wanted)


def test_concat_heads() -> None:
    """Per head: strided slices and columns that all heads share; the latent row; keys of expanded DeepSeek heads."""
    run = graph()
    a, b, c = run.input("a", random(4, 4 * 21 + 3)), run.input("b", random(4, 40)), run.input("c", random(4, 576))
    kv = run.input("kv", random(4, 16 * 256))
    odd = run.graph.concat_heads([HeadSlice(a, 3, 13, 21), HeadSlice(b, 5, 18, 0)], 4, "odd")
    single = run.graph.concat_heads([HeadSlice(a, 8, 13, 21)], 3, "single")
    latent = run.graph.concat_heads([HeadSlice(c, 512, 64, 0), HeadSlice(c, 0, 512, 0)], 1, "latent")
    keys = run.graph.concat_heads([HeadSlice(kv, 0, 128, 256), HeadSlice(c, 512, 64, 0)], 16, "keys")
    for found, wanted in run(odd, single, latent, keys):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("cols", [19, 2048])
@pytest.mark.parametrize("outputs", [[], [0], [4], [1, 3, 4], [0, 1, 2, 3, 4]])
def test_get_rows(outputs: list[int], cols: int) -> None:
    run = graph()
    x = run.input("x", random(5, cols))
    ((found, wanted),) = run(run.graph.select_outputs(x, "y"), outputs=outputs)
    np.testing.assert_array_equal(found, wanted)
    assert found.shape == (len(outputs), cols)


def test_no_rows() -> None:
    """A micro-batch without rows (of outputs, say) launches nothing that touches memory."""
    run = graph(w=random(64))
    x = run.input("x", random(3, 64))
    y = run.graph.select_outputs(x, "y")
    y = run.graph.add(run.graph.rms_norm(y, run.weight("w"), 1e-6, "z"), y, "s")
    y = run.graph.hadamard(run.graph.swiglu(y, y, "a"), 2, 32, "h")
    (found,) = run.run(y)
    assert found.shape == (0, 64)


# --- heads ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("pos", [0, 4000, 163837, 1 << 24])
def test_rope_table(pos: int) -> None:
    """Angles in double precision: large positions lose nothing."""
    run = graph()
    run.input("x", random(3, 1))
    freqs = 10000.0 ** (-np.arange(33) / 33)
    ((found, wanted),) = run(run.graph.rope_table(freqs, 1.25), pos=pos)
    np.testing.assert_allclose(found, wanted, rtol=3e-7, atol=1e-12)


@pytest.mark.parametrize("pos", [0, 50000])
def test_alibi(pos: int) -> None:
    run = graph()
    run.input("x", random(3, 1))
    nodes = [run.graph.record(Alibi(48), "k"), run.graph.record(Alibi(48, (0.5, 0.3)), "q")]
    for found, wanted in run(*nodes, pos=pos):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize(
    ("n_head", "dim", "offset", "n_rot"),
    [(1, 8, 0, 8), (3, 20, 0, 12), (2, 21, 5, 16), (16, 192, 128, 64), (1, 576, 512, 64), (32, 128, 0, 128)],
)
def test_rope(neox: bool, n_head: int, dim: int, offset: int, n_rot: int) -> None:
    run = graph()
    x = run.input("x", random(3, n_head * dim))
    table = run.graph.rope_table([0.5**i for i in range(n_rot // 2)], 1.0)
    ((found, wanted),) = run(run.graph.rope(x, table, n_head, dim, "y", offset=offset, neox=neox), pos=11)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
    heads, kept = found.reshape(3, n_head, dim), run.values[x].reshape(3, n_head, dim)
    np.testing.assert_array_equal(heads[:, :, :offset], kept[:, :, :offset])
    np.testing.assert_array_equal(heads[:, :, offset + n_rot :], kept[:, :, offset + n_rot :])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("n_head", "n_head_kv", "dim", "n_rot"), [(8, 2, 128, 128), (3, 1, 20, 12), (5, 5, 64, 32)])
def test_queries_and_keys(n_head: int, n_head_kv: int, dim: int, n_rot: int, normed: bool, biased: bool) -> None:
    """Bias, norm and rotation of both, one launch unless keys have one head: its norm is one of rows."""
    heads = {"q": n_head, "k": n_head_kv}
    run = graph(w=1 + random(dim), **{f"{name}_bias": random(n * dim) for name, n in heads.items()})
    table = run.graph.rope_table([0.5**i for i in range(n_rot // 2)], 1.0)
    nodes = []
    for name, n in heads.items():
        x = run.input(name, random(3, n * dim))
        if biased:
            x = run.graph.add(x, run.weight(f"{name}_bias"), f"{name}_biased")
        if normed:
            x = run.graph.rms_norm(x, run.weight("w"), 1e-6, f"{name}_normed")
        nodes += [x, run.graph.rope(x, table, n, dim, name, neox=True)]
    for found, wanted in run(*nodes, pos=7):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=2e-6)
    merged = not (normed and n_head_kv == 1)
    assert (len(run.launched) == 2) == merged


@pytest.mark.parametrize(
    ("n_head", "dim", "offset", "blocks"),
    [(16, 192, 0, ()), (1, 576, 0, (64, 512)), (3, 100, 3, ()), (2, 24, 5, (1, 2, 4, 8)), (4, 192, 128, ()),
     (5, 64, 0, ()), (2, 256, 0, ()), (1, 4096, 0, ())],
)  # fmt: skip
def test_hadamard(n_head: int, dim: int, offset: int, blocks: tuple[int, ...]) -> None:
    run = graph()
    x = run.input("x", random(3, n_head * dim))
    once = run.graph.hadamard(x, n_head, dim, "once", offset=offset, blocks=blocks)
    twice = run.graph.hadamard(once, n_head, dim, "twice", offset=offset, blocks=blocks)
    (found, wanted), (back, _) = run(once, twice)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-6)
    np.testing.assert_allclose(back, run.values[x], rtol=0, atol=3e-6)


def test_hadamard_too_large() -> None:
    run = graph()
    x = run.input("x", random(1, 16384))
    with pytest.raises(UnsupportedError, match="too large"):
        run(run.graph.hadamard(x, 1, 16384, "y"))


def test_heads_of_cached_rows() -> None:
    """Rows.KV: as many rows as positions are cached."""
    run = graph()
    x = run.input("x", random(9, 512), Rows.KV)
    ((found, wanted),) = run(run.graph.hadamard(x, 1, 512, "y"))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-6)


# --- activation rows --------------------------------------------------------------------------------------------------
def quantized(x: Array) -> Array:
    """Rows of q8 as layouts.py has them, without padding."""
    blocks = x.reshape(len(x), -1, 32)
    amax = np.abs(blocks).max(axis=2)
    with np.errstate(divide="ignore"):
        inverse = np.where(amax > 1e-36, np.float32(127) / amax, np.float32(0))
    codes = np.rint(blocks * inverse[:, :, None])
    d = amax / np.float32(127)
    halves = codes.reshape(len(x), -1, 2, 16).sum(axis=3)
    parts = (codes.astype(np.int8), d, d * halves.sum(axis=2), halves.astype(np.int16))
    return np.concatenate([np.ascontiguousarray(p).reshape(len(x), -1).view(np.uint8) for p in parts], axis=1)


def half(x: Array, kind: str) -> Array:
    """Rows of 16-bit values, padded."""
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % 8)))
    if kind == "f16":
        return x.astype(np.float16).view(np.uint8)
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).view(np.uint8)


def converted(run: GraphRun, x: HeadSlice, heads: int, kind: str, n_rows: int) -> tuple[Array, Array]:
    """The rows that `activations` makes, as bytes, and the values they were made from."""
    node = x.source
    assert isinstance(node, Node)

    def convert(low: GpuLowering) -> list[tuple[Ref, int]]:
        low.begin(node)
        made = activations(low, x, heads, kind)
        return [(made.at, n_rows * made.row_bytes)]

    (values,) = run.run(node, extra=convert)
    return run.dumped[0].reshape(n_rows * heads, -1), values


@pytest.mark.parametrize("k", [32, 96, 2048])
def test_quantized_rows(k: int) -> None:
    x = random(4, k) * np.exp(3 * random(4, k, seed=2))
    x[1] = 0
    x[2, :32] *= np.float32(1e-37)
    run = graph()
    node = run.input("x", x.astype(np.float32))
    found, _ = converted(run, HeadSlice(node, 0, k, 0), 1, "q8", 4)
    assert found.shape[1] == q8_row_bytes(k) and found.shape[1] % 16 == 0
    wanted = quantized(run.values[node])
    np.testing.assert_array_equal(found[:, : wanted.shape[1]], wanted)
    assert [launch.kernel for launch in run.launched] == ["layer_to_q8"]


def test_quantized_rows_say_what_they_cannot_hold() -> None:
    x = random(2, 96)
    x[0, 40], x[1, 70] = np.nan, np.inf
    run = graph()
    node = run.input("x", x)
    found, _ = converted(run, HeadSlice(node, 0, 96, 0), 1, "q8", 2)
    scales = np.ascontiguousarray(found[:, 96:108]).view(np.float32)
    np.testing.assert_array_equal(np.isnan(scales), [[False, True, False], [False, False, True]])


@pytest.mark.parametrize("kind", ["q8", "bf16", "f16"])
def test_rows_of_heads(kind: str) -> None:
    """Parts of heads: the nope columns of queries, one row per head."""
    run = graph()
    node = run.input("x", random(3, 5 * 96 + 3))
    found, values = converted(run, HeadSlice(node, 3, 64, 96), 5, kind, 3)
    slices = np.stack([values[:, 3 + 96 * h : 67 + 96 * h] for h in range(5)], axis=1).reshape(15, 64)
    wanted = quantized(slices) if kind == "q8" else half(slices, kind)
    np.testing.assert_array_equal(found[:, : wanted.shape[1]], wanted)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("k", [1, 30, 64, 1000])
def test_half_rows(kind: str, k: int) -> None:
    x = random(3, k)
    x[1] *= np.float32(1e-6)
    run = graph()
    node = run.input("x", x)
    found, _ = converted(run, HeadSlice(node, 0, k, 0), 1, kind, 3)
    assert found.shape[1] == half_row_bytes(k)
    np.testing.assert_array_equal(found, half(x, kind))


@pytest.mark.parametrize("kind", ["q8", "bf16"])
@pytest.mark.parametrize("cols", [64, 2048, 10944])
@pytest.mark.parametrize("producer", ["rms_norm", "swiglu", "gelu"])
def test_producers_write_activation_rows(kind: str, cols: int, producer: str) -> None:
    """A norm's and a swiglu's rows are converted by the launch that makes them."""
    run = graph(w=random(cols))
    x, y = run.input("x", random(3, cols)), run.input("y", random(3, cols, seed=2))
    make = {
        "rms_norm": lambda g: g.rms_norm(x, run.weight("w"), 1e-6, "z"),
        "swiglu": lambda g: g.swiglu(x, y, "z"),
        "gelu": lambda g: g.activate(x, "gelu", "z"),
    }
    made = make[producer](run.graph)
    found, values = converted(run, HeadSlice(made, 0, cols, 0), 1, kind, 3)
    assert len(run.launched) == 1
    wanted = quantized(values) if kind == "q8" else half(values, kind)
    np.testing.assert_array_equal(found[:, : wanted.shape[1]], wanted)


def test_rows_are_made_when_a_reader_runs() -> None:
    """Two products, one of them for few rows only: rows are shared, and made where any reader runs."""
    run = graph()
    node = run.input("x", random(2, 64))
    low = run.lowering(40, 1)
    low.begin(node)
    whole = HeadSlice(node, 0, 64, 0)
    first = activations(low, whole, 1, "q8", lambda c: c.n_tokens <= FEW_TOKENS)
    few, many = Counts(4, 1, 4), Counts(40, 1, 40)
    assert len(low.ops) == 1 and low.ops[0].when is not None
    assert low.ops[0].when(few) and not low.ops[0].when(many)
    assert activations(low, whole, 1, "q8", lambda c: c.n_tokens > 30) == first
    assert len(low.ops) == 1 and low.ops[0].when(many) and not low.ops[0].when(Counts(20, 1, 20))
    activations(low, whole, 1, "q8")
    assert low.ops[0].when(Counts(20, 1, 20))


def test_rows_that_cannot_be_quantized() -> None:
    run = graph()
    node = run.input("x", random(2, 40))
    low = run.lowering(2, 1)
    with pytest.raises(UnsupportedError, match="blocks of 32"):
        activations(low, HeadSlice(node, 0, 40, 0), 1, "q8")
