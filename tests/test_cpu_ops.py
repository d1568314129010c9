"""Basic graph ops on the CPU backend against the NumPy reference ops, at odd widths, with NaN in spare memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kernel_harness import Harness, Segment
from tiers import some
from weight_bytes import ALL_TYPES, fitting, stored

from ikcli.backends.cpu.lower import RULES
from ikcli.backends.reference import CacheStore, ReferenceExecutor
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.graph import Graph, HeadSlice, Node, Weight, micro_batch
from ikcli.graph.activations import GATED, UNARY, Glu
from ikcli.graph.micro_batch import MicroBatch
from ikcli.graph.ops_alibi import Alibi
from ikcli.graph.ops_elements import Cut
from ikcli.graph.ops_streams import ResidualAttn, StreamAdd, StreamLevel, StreamPredict
from ikcli.quant.decode import dequantize
from ikcli.quant.formats import get_format

Array = npt.NDArray[Any]
Build = Callable[[Graph, list[Node]], Node]


def run_both(
    build: Build,
    inputs: Sequence[Array],
    weights: dict[str, Array] | None = None,
    *,
    types: dict[str, GGMLType] | None = None,
    tokens: Sequence[int] = (),
    outputs: Sequence[int] = (),
    pos: int = 0,
    n_threads: int = 2,
) -> tuple[Array, Array]:
    """(CPU, reference) values of the node that `build` makes from leaves; weights are float32 rows or stored bytes."""
    weights, types = weights or {}, types or {}
    n = len(inputs[0]) if inputs else len(tokens)
    run = Harness(n, 8, RULES)
    leaves = [run.input(f"x{i}", x.shape[1]) for i, x in enumerate(inputs)]
    result = build(run.graph, leaves)
    run.compile(result, n_threads, {k: np.ascontiguousarray(w).view(np.uint8).reshape(-1) for k, w in weights.items()})
    values = dict(zip(leaves, inputs, strict=True))
    found = run([Segment(n, 0, pos)], values, outputs, tokens)

    def load(name: str) -> Array:
        w = run.graph.weights[name]
        return dequantize(np.ascontiguousarray(weights[name]), types.get(name, GGMLType.F32), w.shape)

    ex = ReferenceExecutor(load, CacheStore(8))
    ex.state = MicroBatch(
        np.array(tokens or [0] * n, np.int32), np.arange(pos, pos + n, dtype=np.int32), np.arange(n),
        np.array(outputs, np.int64), (micro_batch.Segment(0, n, 0, pos),),
    )  # fmt: skip
    with np.errstate(all="ignore"):
        for node in run.graph.nodes:
            ex._values[node.index] = values[node] if node in values else node.op.compute(ex)
    return found, ex._values[result.index]


def random(*shape: int, seed: int = 1) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def weight(name: str, values: Array, type_: GGMLType = GGMLType.F32) -> Weight:
    return Weight(name, type_, values.shape[::-1])


WIDTHS = (1, 15, 16, 17, 33, 64, 100)


# --- rows and elements ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("type_", ALL_TYPES)
def test_embed(type_: GGMLType) -> None:
    k, n_vocab = max(64, get_format(type_).block_size), fitting(type_, 50)
    data = stored(type_, n_vocab, k)
    tokens = [0, n_vocab - 1, 7, 7, 23]
    w = Weight("w", type_, (k, n_vocab))
    if get_format(type_).rows > 1:
        with pytest.raises(UnsupportedError, match="rows are interleaved"):
            run_both(lambda g, x: g.embed(w), [], {"w": data}, types={"w": type_}, tokens=tokens)
        return
    found, wanted = run_both(lambda g, x: g.embed(w), [], {"w": data}, types={"w": type_}, tokens=tokens)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(width: int) -> None:
    """Whole rows, groups of columns (heads), part of a row."""
    w = 1 + random(width)
    for cols, offset, used in ((width, 0, 0), (3 * width, 0, 0), (4 * width + 5, 5, 2 * width), (2 * width, width, 0)):
        for size in (1.0, 1e-8, 1e15):
            x = random(5, cols) * np.float32(size)
            found, wanted = run_both(
                lambda g, n, o=offset, u=used: g.rms_norm(n[0], weight("w", w), 1e-6, "y", offset=o, cols=u),
                [x], {"w": w},
            )  # fmt: skip
            np.testing.assert_allclose(found, wanted, rtol=3e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_cut(width: int) -> None:
    for z in (1.6, -0.3):
        found, wanted = run_both(lambda g, n, z=z: g.record(Cut(n[0], z), "y"), [3 + 2 * random(5, width)])
        np.testing.assert_allclose(found, wanted, atol=3e-6)
    x = random(3, width)
    x[1, -1] = np.nan
    found, _ = run_both(lambda g, n: g.record(Cut(n[0], 0.5), "y"), [x])
    assert np.isnan(found[1]).all() and np.isfinite(found[[0, 2]]).all()


@pytest.mark.parametrize(("n", "cols"), [(4, 64), (2, 16), (3, 112)])
def test_predicted_streams(n: int, cols: int) -> None:
    x, out, pairs, shares = random(5, n * cols), random(5, cols, seed=2), random(5, n * n), random(5, n, seed=3)
    x[1:3, cols : 2 * cols] *= np.float32(1e-4)  # less than what a stream is brought up from
    x[2, :cols] = 0
    for build, inputs in (
        (lambda g, v: g.record(StreamPredict(v[0], v[1], n), "y"), [x, pairs]),
        (lambda g, v: g.record(StreamAdd(v[0], v[1], n, v[2]), "y"), [x, out, shares]),
        (lambda g, v: g.record(StreamAdd(v[0], v[1], n, first=1), "y"), [x, out]),
        (lambda g, v: g.record(StreamLevel(v[0], n, 1e-5), "y"), [x]),
    ):
        found, wanted = run_both(build, inputs)
        np.testing.assert_allclose(found, wanted, rtol=3e-6, atol=3e-6)


def test_rms_norm_of_zeros_and_nan() -> None:
    w, x = np.ones(20, np.float32), random(3, 20)
    x[0], x[1, 17] = 0, np.nan
    found, _ = run_both(lambda g, n: g.rms_norm(n[0], weight("w", w), 1e-6, "y"), [x], {"w": w})
    assert not found[0].any() and np.isnan(found[1]).all() and np.isfinite(found[2]).all()


@pytest.mark.parametrize("shift", [0, 1])
def test_pos_scale(shift: int) -> None:
    """Rows at positions 5 to 24."""
    x = random(20, 33)
    found, wanted = run_both(lambda g, n: g.pos_scale(n[0], 0.3, 8, "y", shift=shift), [x], n_threads=3, pos=5)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert np.array_equal(wanted[: 3 - shift], x[: 3 - shift]) and (wanted[3 - shift :] != x[3 - shift :]).all()


@pytest.mark.parametrize("cols", WIDTHS)
def test_scale_and_gate(cols: int) -> None:
    x = random(5, cols)
    found, wanted = run_both(lambda g, n: g.scale(n[0], 0.3, "y"), [x], n_threads=3)
    np.testing.assert_array_equal(found, wanted)
    for parts in {1, cols, max(p for p in (1, 2, 3, 4, 5) if cols % p == 0)}:
        gate = 20 * random(5, parts, seed=2)
        for kind in ("sigmoid", "softplus"):
            found, wanted = run_both(lambda g, n, k=kind: g.gate(n[0], n[1], "y", k), [x, gate], n_threads=3)
            np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("cols", WIDTHS)
def test_softcap(cols: int) -> None:
    """Far beyond the cap too; NaN stays NaN, and a cap of 0 is none."""
    x = 40 * random(5, cols)
    x[1] *= 1e6
    found, wanted = run_both(lambda g, n: g.softcap(n[0], 30.0, "y"), [x], n_threads=3)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-5)
    assert np.isnan(run_both(lambda g, n: g.softcap(n[0], 30.0, "y"), [x * np.float32(np.nan)])[0]).all()
    graph = Graph()
    node = graph.embed(weight("e", random(3, 8)))
    assert graph.softcap(node, 0.0, "y") is node


@pytest.mark.parametrize("cols", WIDTHS)
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_add_and_swiglu(rows: int, cols: int) -> None:
    a, b, bias = random(rows, cols), random(rows, cols, seed=2), random(cols)
    for build, weights in (
        (lambda g, n: g.add(n[0], n[1], "y"), {}),
        (lambda g, n: g.add(g.add(n[0], weight("b", bias), "z"), n[1], "y"), {"b": bias}),
    ):
        found, wanted = run_both(build, [a, b], weights, n_threads=3)
        np.testing.assert_array_equal(found, wanted)
    found, wanted = run_both(lambda g, n: g.swiglu(n[0], n[1], "y"), [5 * a, b], n_threads=3)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_swiglu_at_the_extremes() -> None:
    """Vector and scalar part alike: no overflow; what cannot be a number is none."""
    gate = np.tile(np.array([-1e30, -1000, -88, -87, -1e-30, 0, 1e-30, 88, 1000, 1e30], np.float32), 5)[None, :39]
    found, wanted = run_both(lambda g, n: g.swiglu(n[0], n[1], "y"), [gate, np.ones_like(gate)])
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    for bad in (np.nan, -np.inf):
        x = np.full((1, 21), bad, np.float32)
        found, _ = run_both(lambda g, n: g.swiglu(n[0], n[1], "y"), [x, np.ones_like(x)])
        assert not np.isfinite(found).any()


GLUS = [Glu(kind) for kind in GATED] + [Glu("silu", 0.8), Glu("gelu", 0.5), Glu("swiglu_oai", 1.2, 1.5)]
GLUS.append(Glu("silu_of_capped", 0.8))
GLUS.append(Glu("situ", 0.8, 1.5))


@pytest.mark.parametrize("cols", [7, 64, 100])
@pytest.mark.parametrize("act", GLUS, ids=lambda a: f"{a.kind}-{a.limit}")
def test_activations(act: Glu, cols: int) -> None:
    a, b = 3 * random(5, cols), random(5, cols, seed=2)
    found, wanted = run_both(lambda g, n: g.swiglu(n[0], n[1], "y", act), [a, b], n_threads=3)
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-7)
    if act.limit:
        assert np.abs(wanted - Glu(act.kind, 0.0, act.alpha)(a, b)).max() > 0.1
    if act.kind in UNARY:
        found, wanted = run_both(lambda g, n: g.activate(n[0], act.kind, "y"), [a], n_threads=3)
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("act", GLUS, ids=lambda a: f"{a.kind}-{a.limit}")
def test_activations_at_the_extremes(act: Glu) -> None:
    gate = np.tile(np.array([-1e15, -1000, -88, -87, -1e-30, 0, 1e-30, 88, 1000, 1e15], np.float32), 5)[None, :39]
    found, wanted = run_both(lambda g, n: g.swiglu(n[0], n[1], "y", act), [gate, np.ones_like(gate)])
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    x, one = np.full((1, 21), np.nan, np.float32), np.ones((1, 21), np.float32)
    for pair in ([x, one], [one, x]):
        found, _ = run_both(lambda g, n: g.swiglu(n[0], n[1], "y", act), pair)
        assert np.isnan(found).all()


@pytest.mark.parametrize("cols", [7, 64])
def test_clamp(cols: int) -> None:
    x = random(5, cols)
    found, wanted = run_both(lambda g, n: g.clamp(n[0], 0.5, "y"), [x], n_threads=3)
    np.testing.assert_array_equal(found, wanted)
    assert found.max() == 0.5 and found.min() == -0.5
    assert np.isnan(run_both(lambda g, n: g.clamp(n[0], 0.5, "y"), [np.full((1, 21), np.nan, np.float32)])[0]).all()


@pytest.mark.parametrize("type_", [GGMLType.F32, GGMLType.Q8_0])
def test_embedded_positions(type_: GGMLType) -> None:
    """Rows from 5 on, whatever the tokens are; nothing beyond the last one."""
    data, w = stored(type_, 9, 64), Weight("w", type_, (64, 9))
    found, wanted = run_both(
        lambda g, x: g.embed(w, by_position=True), [], {"w": data}, types={"w": type_}, tokens=[3, 3, 0, 1, 2], pos=5
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found[:4], dequantize(data, type_, (64, 9))[5:9], rtol=1e-6, atol=1e-6)
    assert np.isnan(found[4]).all()


@pytest.mark.parametrize("width", [32, 48])
@pytest.mark.parametrize("pos", [0, 120, 50000])
def test_alibi(width: int, pos: int) -> None:
    """Products of its queries and keys are slopes times positions, also after keys were rounded."""
    few, many = (0.5, 0.25, 0.3), random(5, 1)
    keys, wanted = run_both(lambda g, n: g.record(Alibi(width), "k"), [many], pos=pos, n_threads=3)
    np.testing.assert_array_equal(keys, wanted)
    queries, wanted = run_both(lambda g, n: g.record(Alibi(width, few), "q"), [many], pos=pos, n_threads=3)
    np.testing.assert_allclose(queries, wanted, rtol=1e-6)
    assert np.array_equal(keys, np.rint(keys)) and keys.max() == 127 and keys.min() == 0
    products = queries.reshape(5, 3, width).astype(np.float64) @ keys[0]
    np.testing.assert_allclose(products, np.tile(np.array(few, np.float32) * pos, (5, 1)), rtol=1e-6)


def test_gelu_is_the_tanh_form() -> None:
    x = random(1, 50).astype(np.float64)
    wanted = x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    np.testing.assert_allclose(UNARY["gelu"](x), wanted, rtol=1e-12)


@pytest.mark.parametrize("kind", ["layer", "rms", "l2"])
@pytest.mark.parametrize("width", WIDTHS)
def test_norm(kind: str, width: int) -> None:
    """Whole rows and groups of columns; weights and biases of a group, of a row, or none; far from 0 and near it."""
    for groups in (1, 3):
        w, b, one = 1 + random(groups, width), random(groups * width), 1 + random(width)
        for offset in (0.0, 50.0):
            x = random(5, groups * width) + np.float32(offset)
            for weights in ({}, {"w": w}, {"w": w, "b": b}, {"w": one}, {"b": b}):
                found, wanted = run_both(
                    lambda g, n, names=weights: g.norm(
                        n[0], weight("w", names["w"]) if "w" in names else None, 1e-5, "y", kind=kind, width=width,
                        b=weight("b", names["b"]) if "b" in names else None,
                    ),
                    [x], weights,
                )  # fmt: skip
                np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-6 + offset * 1e-6)


def test_norm_of_zeros_and_nan() -> None:
    x = random(3, 20)
    x[0], x[1, 17] = 0, np.nan
    for kind in ("layer", "rms", "l2"):
        found, _ = run_both(lambda g, n, k=kind: g.norm(n[0], None, 1e-6, "y", kind=k), [x])
        assert not found[0].any() and np.isnan(found[1]).all() and np.isfinite(found[2]).all()


def test_concat() -> None:
    parts = [random(4, n) for n in (3, 16, 33)]
    found, wanted = run_both(lambda g, n: g.concat(n, "y"), parts)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(found, np.concatenate(parts, axis=1))


def test_concat_heads() -> None:
    """Per head: a strided slice, then columns that all heads share."""
    a, b = random(4, 4 * 21 + 3), random(4, 40)

    def build(g: Graph, n: list[Node]) -> Node:
        return g.concat_heads([HeadSlice(n[0], 3, 13, 21), HeadSlice(n[1], 5, 18, 0)], 4, "y")

    found, wanted = run_both(build, [a, b])
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("outputs", [[], [0], [4], [1, 3, 4], [0, 1, 2, 3, 4]])
def test_get_rows(outputs: list[int]) -> None:
    x = random(5, 19)
    found, _ = run_both(lambda g, n: g.select_outputs(n[0], "y"), [x], outputs=outputs)
    np.testing.assert_array_equal(found, x[outputs])


# --- positions --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("pos", [0, 4000, 163837, pytest.param(1 << 24, marks=pytest.mark.slow)])
def test_rope_table(pos: int) -> None:
    """Angles in double precision: large positions lose nothing."""
    freqs = 10000.0 ** (-np.arange(9) / 9)
    found, wanted = run_both(lambda g, n: g.rope_table(freqs, 1.25), [random(3, 1)], pos=pos)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-7)
    angle = (pos + 2) * freqs
    np.testing.assert_allclose(found[2, 1::2], 1.25 * np.sin(angle), rtol=0, atol=3e-7)


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize(
    ("n_head", "dim", "offset", "n_rot"), [(1, 8, 0, 8), (3, 20, 0, 12), (2, 21, 5, 16), (4, 96, 64, 32)]
)
def test_rope(neox: bool, n_head: int, dim: int, offset: int, n_rot: int) -> None:
    def build(g: Graph, n: list[Node]) -> Node:
        table = g.rope_table([0.5**i for i in range(n_rot // 2)], 1.0)
        return g.rope(n[0], table, n_head, dim, "y", offset=offset, neox=neox)

    x = random(5, n_head * dim)
    found, wanted = run_both(build, [x], pos=11)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
    heads, kept = found.reshape(5, n_head, dim), x.reshape(5, n_head, dim)
    np.testing.assert_array_equal(heads[:, :, :offset], kept[:, :, :offset])
    np.testing.assert_array_equal(heads[:, :, offset + n_rot :], kept[:, :, offset + n_rot :])


# --- experts ----------------------------------------------------------------------------------------------------------
ROUTES: list[dict[str, Any]] = [
    {"gating": "softmax", "norm": False, "scale": 1.0},
    {"gating": "softmax", "norm": True, "scale": 2.5},
    {"gating": "sigmoid", "norm": True, "scale": 1.5},
    {"gating": "sigmoid", "norm": False, "scale": 1.0, "n_group": 4, "n_group_used": 2},
    {"gating": "softmax", "norm": True, "scale": 1.0, "n_group": 3, "n_group_used": 1},
    {"gating": "softmax", "norm": True, "scale": 1.0, "ser": (1, 0.8)},
    {"gating": "sigmoid", "norm": False, "scale": 1.0, "ser": (2, 0.99), "n_group": 2, "n_group_used": 2},
    {"gating": "softmax", "norm": False, "scale": 1.0, "ser": (0, 0.5)},
    {"gating": "sparsemixer", "norm": False, "scale": 1.0},
]


def parts(route: Array, n_used: int) -> tuple[Array, Array]:
    return route[:, :n_used], np.ascontiguousarray(route[:, n_used:]).view(np.int32)


@pytest.mark.parametrize("options", ROUTES, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("biased", [False, True])
def test_moe_route(options: dict[str, Any], biased: bool) -> None:
    logits, bias = 2 * random(40, 12), random(12)
    b = weight("b", bias) if biased else None
    found, wanted = run_both(
        lambda g, n: g.moe_route(n[0], b, "y", n_used=4, **options),
        [logits],
        {"b": bias} if biased else {},
        n_threads=3,
    )
    np.testing.assert_array_equal(parts(found, 4)[1], parts(wanted, 4)[1])
    np.testing.assert_allclose(parts(found, 4)[0], parts(wanted, 4)[0], rtol=2e-6)
    if options.get("ser", (0,))[0] > 0:
        assert (parts(found, 4)[1] < 0).any()


def test_groups_of_experts() -> None:
    """With the weights of the experts; dropped ones stay dropped."""

    def groups(g: Graph, n: Sequence[Node]) -> Node:
        route = g.moe_route(n[0], None, "route", n_used=4, gating="softmax", norm=True, scale=1.0, ser=(1, 0.8))
        return g.moe_groups(route, 3, "y")

    found, wanted = run_both(groups, [2 * random(40, 12)], n_threads=3)
    np.testing.assert_array_equal(parts(found, 4)[1], parts(wanted, 4)[1])
    np.testing.assert_allclose(parts(found, 4)[0], parts(wanted, 4)[0], rtol=2e-6)
    assert parts(wanted, 4)[1].min() == -1 and parts(wanted, 4)[1].max() == 3


def test_experts_near_the_best_one_share_its_weight() -> None:
    """With sparsemixer: within 2 % of the larger logit, among those that were not chosen before."""
    logits = np.float32([[1, 0.985, 0.9, -5], [3, 1, 0.99, 0.985], [-1, -1.01, -1.5, -2], [2, 2, 2, 2]])
    found, wanted = run_both(
        lambda g, n: g.moe_route(n[0], None, "y", n_used=2, gating="sparsemixer", norm=False, scale=1.0), [logits]
    )
    np.testing.assert_array_equal(parts(found, 2)[1], [[0, 1], [0, 1], [0, 1], [0, 1]])
    e = np.exp
    by_hand = [[1 / (1 + e(-0.015)), 1], [1, 1 / (1 + e(-0.01) + e(-0.015))], [1 / (1 + e(-0.01)), 1], [1 / 4, 1 / 3]]
    np.testing.assert_allclose(parts(wanted, 2)[0], by_hand, rtol=1e-5)
    np.testing.assert_allclose(parts(found, 2)[0], parts(wanted, 2)[0], rtol=2e-6)


@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
def test_ties_go_to_the_first_expert(gating: str) -> None:
    logits = np.zeros((3, 9), np.float32)
    logits[1, 4:7] = 1
    logits[2] = np.repeat(np.float32([2, 1, 2]), 3)
    found, wanted = run_both(
        lambda g, n: g.moe_route(n[0], None, "y", n_used=4, gating=gating, norm=True, scale=1.0), [logits]
    )
    np.testing.assert_array_equal(parts(found, 4)[1], [[0, 1, 2, 3], [4, 5, 6, 0], [0, 1, 2, 6]])
    np.testing.assert_array_equal(parts(found, 4)[1], parts(wanted, 4)[1])


@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
def test_router_at_the_extremes(gating: str) -> None:
    """Huge logits are ordinary; NaN shows in the weights, and no expert is chosen twice."""
    logits = random(4, 8)
    logits[0] *= 1e4
    logits[1, 2] = np.nan
    logits[2] = np.nan
    found, _ = run_both(
        lambda g, n: g.moe_route(n[0], None, "y", n_used=3, gating=gating, norm=True, scale=1.0), [logits]
    )
    weights, ids = parts(found, 3)
    assert np.isfinite(weights[[0, 3]]).all()
    assert np.isnan(weights[1]).any() and np.isnan(weights[2]).all()
    for row in ids:
        assert len(set(row)) == 3 and row.min() >= 0 and row.max() < 8


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("ser", [None, (1, 0.9)])
@pytest.mark.parametrize("cols", [1, 16, 37])
def test_moe_sum(ser: tuple[int, float] | None, cols: int, weighted: bool) -> None:
    """Sorted rows, made here by one expert matrix per expert, come back weighted and in token order."""
    w = random(5, cols, 8)

    def build(g: Graph, n: list[Node]) -> Node:
        route = g.moe_route(n[1], None, "route", n_used=2, gating="softmax", norm=True, scale=1.5, ser=ser)
        plan = g.moe_sort(route, 5, "plan")
        return g.moe_sum(g.mul_mat_id(weight("w", w), n[0], plan, "y"), route, plan, "sum", weighted=weighted)

    for n in (1, 9):
        found, wanted = run_both(build, [random(n, 8), random(n, 5, seed=3)], {"w": w})
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ser", [None, (1, 0.9)])
@pytest.mark.parametrize("cols", [1, 16, 37])
def test_scale_id(ser: tuple[int, float] | None, cols: int) -> None:
    """By a number per expert, then by the weights of the route."""
    w, s = random(5, cols, 8), random(5)

    def build(g: Graph, n: list[Node]) -> Node:
        route = g.moe_route(n[1], None, "route", n_used=2, gating="softmax", norm=True, scale=1.5, ser=ser)
        plan = g.moe_sort(route, 5, "plan")
        y = g.scale_id(g.mul_mat_id(weight("w", w), n[0], plan, "y"), weight("s", s), plan, "scaled")
        return g.scale_id(y, route, plan, "weighted")

    for n in (1, 9):
        found, wanted = run_both(build, [random(n, 8), random(n, 5, seed=3)], {"w": w, "s": s}, n_threads=3)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ser", [None, (1, 0.9)])
@pytest.mark.parametrize("cols", [1, 16, 37])
def test_add_id(ser: tuple[int, float] | None, cols: int) -> None:
    """A bias per expert; dropped slots get none."""
    w, b = random(5, cols, 8), random(5, cols)

    def build(g: Graph, n: list[Node]) -> Node:
        route = g.moe_route(n[1], None, "route", n_used=2, gating="softmax", norm=True, scale=1.0, ser=ser)
        plan = g.moe_sort(route, 5, "plan")
        y = g.mul_mat_id(weight("w", w), n[0], plan, "y")
        return g.add_id(y, weight("b", b), plan, "biased")

    for n in (1, 9):
        found, wanted = run_both(build, [random(n, 8), random(n, 5, seed=3)], {"w": w, "b": b}, n_threads=3)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


# Each compiles a product of its own; by default one without and one with a limit.
@pytest.mark.parametrize(
    "act", some(GLUS[1:], [Glu("gelu"), Glu("swiglu_oai", 1.2, 1.5)]), ids=lambda a: f"{a.kind}-{a.limit}"
)
def test_moe_up_gate_of_other_activations(act: Glu) -> None:
    up, gate = random(5, 37, 32), random(5, 37, 32, seed=2)

    def build(g: Graph, n: list[Node]) -> Node:
        route = g.moe_route(n[1], None, "route", n_used=2, gating="softmax", norm=True, scale=1.0)
        plan = g.moe_sort(route, 5, "plan")
        return g.moe_up_gate(weight("up", up), weight("gate", gate), n[0], plan, "y", act)

    for n in (1, 40):
        found, wanted = run_both(build, [random(n, 32) / 4, random(n, 5, seed=3)], {"up": up, "gate": gate})
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("n", "cols"), [(1, 16), (9, 112), (40, 64)])
def test_attention_to_earlier_outputs(n: int, cols: int) -> None:
    w = 2 * random(cols)
    zeros = np.zeros((1, n * cols), np.float32)
    for kept, x in ((random(5, n * cols, seed=2), 3 * random(5, cols, seed=3)), (zeros, random(1, cols))):
        found, wanted = run_both(
            lambda g, v: g.record(ResidualAttn(v[0], v[1], weight("w", w), 1e-5), "y"), [kept, x], {"w": w}, n_threads=3
        )
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
