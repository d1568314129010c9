"""CUDA kernels of expert routing, sorting and summing, emulated, against the NumPy reference ops."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cuda_emulation import needs_emulation
from cuda_graphs import GraphRun
from leaves import Custom

from ikcli.backends.cuda.layouts import TILES, PlanLayout, max_tiles
from ikcli.backends.cuda.lower import GpuLowering, Ref, all_rules
from ikcli.backends.cuda.rules_layers import FEW_TOKENS, MANY_EXPERTS, plan_layout, zero_dropped
from ikcli.errors import UnsupportedError
from ikcli.graph import Node, RowSpec
from ikcli.graph.ops_experts import route_parts

pytestmark = needs_emulation
Array = npt.NDArray[Any]


def random(*shape: int, seed: int = 1) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def graph(**weights: Array) -> GraphRun:
    return GraphRun(all_rules(), weights)


def routed(run: GraphRun, logits: Array, n_used: int, **options: Any) -> Node:
    """A moe_route node of these logits, biased if the graph has a weight b."""
    bias = run.weight("b") if "b" in run.weights else None
    chosen = {"gating": "softmax", "norm": True, "scale": 1.0} | options
    return run.graph.moe_route(run.input("logits", logits), bias, "route", n_used=n_used, **chosen)


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
    {"gating": "sqrtsoftplus", "norm": True, "scale": 1.5},
]
MODELS: dict[str, tuple[int, int, bool, dict[str, Any]]] = {
    "deepseek2-lite": (64, 6, False, {"gating": "softmax", "norm": False, "scale": 1.0}),
    "deepseek2": (160, 6, False, {"gating": "softmax", "norm": False, "scale": 16.0}),
    "deepseek3": (256, 8, True, {"gating": "sigmoid", "norm": True, "scale": 2.5, "n_group": 8, "n_group_used": 4}),
    "qwen3moe": (128, 8, False, {"gating": "softmax", "norm": True, "scale": 1.0}),
    "kimi": (384, 8, True, {"gating": "sigmoid", "norm": True, "scale": 2.827}),
    "phimoe": (16, 2, False, {"gating": "sparsemixer", "norm": False, "scale": 1.0}),
    "largest of few": (512, 10, False, {"gating": "softmax", "norm": True, "scale": 1.0}),
    "largest": (1023, 16, True, {"gating": "sigmoid", "norm": True, "scale": 2.5}),
}


def check_route(found: Array, wanted: Array, n_used: int, rtol: float = 2e-6) -> None:
    np.testing.assert_array_equal(route_parts(found, n_used)[1], route_parts(wanted, n_used)[1])
    np.testing.assert_allclose(route_parts(found, n_used)[0], route_parts(wanted, n_used)[0], rtol=rtol)


@pytest.mark.parametrize("options", ROUTES, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("biased", [False, True])
def test_moe_route(options: dict[str, Any], biased: bool) -> None:
    run = graph(**({"b": random(12)} if biased else {}))
    ((found, wanted),) = run(routed(run, 2 * random(40, 12), 4, **options))
    check_route(found, wanted, 4)
    if options.get("ser", (0,))[0] > 0:
        assert (route_parts(found, 4)[1] < 0).any()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rows", [1, 5, 21])
def test_route_and_sort_of_models(model: str, rows: int) -> None:
    """Both ways: one block for few rows, and two launches; many experts always take two."""
    n, n_used, biased, options = MODELS[model]
    run = graph(**({"b": random(n) / 10} if biased else {}))
    route = routed(run, 3 * random(rows, n), n_used, **options)
    plan = run.graph.moe_sort(route, n, "plan")
    (found, wanted), sorted_pairs = run(route, plan)
    check_route(found, wanted, n_used)
    np.testing.assert_array_equal(*sorted_pairs)
    names = [launch.kernel for launch in run.launched]
    route_kernel = f"layer_moe_route{'_wide' if n > MANY_EXPERTS else ''}"
    few = rows <= FEW_TOKENS and n <= MANY_EXPERTS
    assert names == (["layer_moe_route_sort"] if few else [route_kernel, "layer_moe_sort"])


@pytest.mark.parametrize("rows", [1, 40])
def test_groups_of_experts(rows: int) -> None:
    run = graph()
    route = routed(run, 2 * random(rows, 12), 4, ser=(1, 0.8))
    plan = run.graph.moe_sort(route, 12, "plan")
    groups = run.graph.moe_groups(route, 3, "groups")
    (found, wanted), *_ = run(groups, plan)
    check_route(found, wanted, 4)
    assert route_parts(wanted, 4)[1].max() <= 3


@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
def test_ties_go_to_the_first_expert(gating: str) -> None:
    logits = np.zeros((4, 70), np.float32)
    logits[1, 44:47] = 1
    logits[2] = np.repeat(np.float32([2, 1, 2]), [3, 60, 7])
    logits[3, ::2] = -0.0
    run = graph()
    ((found, wanted),) = run(routed(run, logits, 4, gating=gating))
    ids = route_parts(found, 4)[1]
    np.testing.assert_array_equal(ids, [[0, 1, 2, 3], [44, 45, 46, 0], [0, 1, 2, 63], [0, 1, 2, 3]])
    np.testing.assert_array_equal(ids, route_parts(wanted, 4)[1])


def test_ties_with_coarse_logits() -> None:
    """Few distinct values: every choice is a tie, of experts and of groups."""
    logits = np.random.default_rng(5).integers(-1, 2, (50, 64)).astype(np.float32)
    for options in ({}, {"n_group": 8, "n_group_used": 3}, {"n_group": 32, "n_group_used": 5}, {"ser": (3, 1.0)}):
        run = graph(b=np.repeat(np.float32([0, 0.5]), 32))
        ((found, wanted),) = run(routed(run, logits, 6, gating="sigmoid", **options))
        check_route(found, wanted, 6)


@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
def test_router_at_the_extremes(gating: str) -> None:
    """Huge logits are ordinary; NaN shows in the weights, and no expert is chosen twice."""
    logits = random(5, 40)
    logits[0] *= 1e4
    logits[1, 2] = np.nan
    logits[2] = np.nan
    logits[4, 7] = -np.inf
    run = graph()
    found, _ = run(routed(run, logits, 3, gating=gating))[0]
    weights, ids = route_parts(found, 3)
    assert np.isfinite(weights[[0, 3, 4]]).all()
    assert np.isnan(weights[1]).any() and np.isnan(weights[2]).all()
    for row in ids:
        assert len(set(row)) == 3 and row.min() >= 0 and row.max() < 40


def test_fewer_eligible_experts_than_slots() -> None:
    """Slots without an expert are dropped ones."""
    run = graph()
    route = routed(run, random(3, 8), 4, gating="sigmoid", norm=False, n_group=4, n_group_used=1)
    plan = run.graph.moe_sort(route, 8, "plan")
    found, sorted_pairs = run.run(route, plan)
    weights, ids = route_parts(found, 4)
    assert (ids[:, :2] >= 0).all() and (ids[:, 2:] == -1).all() and not weights[:, 2:].any()
    assert (sorted_pairs[:6, 1] >= 0).all() and (sorted_pairs[6:, 1] == -1).all()


# --- plans ------------------------------------------------------------------------------------------------------------
def route_rows(ids: Array) -> Array:
    """A route with these ids; its weights do not matter."""
    bits = np.ascontiguousarray(ids, np.int32).view(np.float32)
    return np.concatenate([random(*ids.shape), bits], axis=1)


def sort_run(ids: Array, n_expert: int, seed: int = 1) -> tuple[Array, dict[str, Array]]:
    """(value of the moe_sort node, the plan's sections) for routed ids."""
    n, n_used = ids.shape
    run = graph()
    route = run.route(route_rows(ids), n_used)
    plan = run.graph.moe_sort(route, n_expert, "plan")
    at: list[PlanLayout] = []

    def dump(low: GpuLowering) -> list[tuple[Ref, int]]:
        at.append(plan_layout(low, plan))
        return [(low.out(plan), at[0].n_bytes)]

    (value,) = run.run(plan, extra=dump, seed=seed)
    words = run.dumped[0].view(np.int32)
    layout = at[0]
    counts = words[layout.counts // 4 :][:4]
    tiles = [words[layout.tiles(i) // 4 :][: 4 * counts[1 + i]].reshape(-1, 4) for i in range(2)]
    return value, {
        "position": words[layout.position // 4 :][: n * n_used],
        "offsets": words[layout.offsets // 4 :][: n_expert + 1],
        "counts": counts,
        "few": tiles[0],
        "many": tiles[1],
    }


def check_plan(ids: Array, n_expert: int, seed: int = 1) -> None:
    value, plan = sort_run(ids, n_expert, seed)
    flat = ids.reshape(-1)
    order = np.argsort(np.where(flat < 0, n_expert, flat), kind="stable")
    np.testing.assert_array_equal(value, np.stack([order, flat[order]], axis=1))
    kept = int((flat >= 0).sum())
    position = np.full(len(flat), -1)
    position[order[:kept]] = np.arange(kept)
    np.testing.assert_array_equal(plan["position"], position)
    counts = np.bincount(flat[flat >= 0], minlength=n_expert)
    first = np.concatenate([[0], np.cumsum(counts)])
    np.testing.assert_array_equal(plan["offsets"], first)
    for which, name in enumerate(("few", "many")):
        rows = TILES[which]
        wanted = [
            (e, first[e] + i, min(rows, counts[e] - i), 0) for e in range(n_expert) for i in range(0, counts[e], rows)
        ]
        np.testing.assert_array_equal(plan[name], np.reshape(wanted, (-1, 4)))
        assert len(wanted) == plan["counts"][1 + which] <= max_tiles(len(flat), n_expert, which)
    assert plan["counts"][0] == kept and plan["counts"][3] == 0


def choices(n: int, n_expert: int, n_used: int, *, dropped: float = 0.0, skew: float = 0.0, seed: int = 1) -> Array:
    """Different experts per row, some slots dropped; skew prefers the first experts."""
    rng = np.random.default_rng([seed, n, n_expert])
    scores = rng.random((n, n_expert)) + skew * np.linspace(1, 0, n_expert)
    ids = np.argsort(-scores, axis=1)[:, :n_used].astype(np.int32)
    ids[rng.random(ids.shape) < dropped] = -1
    return ids


@pytest.mark.parametrize(
    ("n", "n_expert", "n_used"),
    [(1, 64, 6), (3, 8, 2), (33, 256, 8), (130, 64, 6), (700, 128, 8), (200, 512, 10), (300, 896, 16), (40, 1023, 16)],
)
@pytest.mark.parametrize("dropped", [0.0, 0.3, 1.0])
def test_moe_sort(n: int, n_expert: int, n_used: int, dropped: float) -> None:
    check_plan(choices(n, n_expert, n_used, dropped=dropped), n_expert)


def test_moe_sort_of_many_rows() -> None:
    """A full prompt batch, evenly and with nearly everything at the same experts."""
    for skew in (0.0, 3.0):
        check_plan(choices(4096, 64, 6, skew=skew, dropped=0.01), 64)


@pytest.mark.parametrize("seed", range(4))
def test_moe_sort_does_not_depend_on_the_order_of_threads(seed: int) -> None:
    check_plan(choices(300, 32, 4, skew=1.0), 32, seed + 10)


def test_moe_sort_without_rows() -> None:
    check_plan(np.zeros((0, 4), np.int32), 16)


def test_routing_that_is_too_large() -> None:
    for n, n_used in ((1024, 4), (64, 33)):
        run = graph()
        with pytest.raises(UnsupportedError, match="more than the GPU kernels take"):
            run(routed(run, random(2, n), n_used))


# --- sums -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cols", [1, 37, 64, 2048])
@pytest.mark.parametrize("dropped", [0.0, 0.4])
@pytest.mark.parametrize("n", [1, 9])
def test_moe_sum(n: int, dropped: float, cols: int) -> None:
    """Rows in sorted order come back weighted and in token order; what lies in dropped rows is not looked at."""
    ids = choices(n, 16, 3, dropped=dropped)
    run = graph()
    route = run.route(route_rows(ids), 3)
    plan = run.graph.moe_sort(route, 16, "plan")
    y = random(3 * n, cols)
    y[3 * n - int((ids < 0).sum()) :] = np.nan
    node = run.input("y", y)
    node.rows = RowSpec(node.rows.symbol, 3)
    ((found, wanted),) = run(run.graph.moe_sum(node, route, plan, "sum"), n_tokens=n)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ser", [None, (1, 0.5)])
def test_rows_of_dropped_slots_become_zero(ser: tuple[int, float] | None) -> None:
    """The expert product's rows behind the sorted ones, and only those."""
    run = graph()
    route = routed(run, 2 * random(7, 8), 3, ser=ser)
    plan = run.graph.moe_sort(route, 8, "plan")
    result = run.input("result", random(21, 33))
    result.rows = RowSpec(result.rows.symbol, 3)
    run.rules = run.rules.replaced({Custom: lambda low, node, op: zero_dropped(low, result, plan)})
    run.graph.record(Custom(result, 0), "zeroed")
    before = run.values[result].copy()
    after, pairs = run.run(result, plan, n_tokens=7)
    kept = int((pairs[:, 1] >= 0).sum())
    np.testing.assert_array_equal(after[:kept], before[:kept])
    assert not after[kept:].any() and (kept < 21) == (ser is not None)


@pytest.mark.parametrize(("n_pairs", "n_expert"), [(1, 1), (7, 3), (32768, 256), (600, 512)])
def test_plan_sections_do_not_overlap(n_pairs: int, n_expert: int) -> None:
    at = PlanLayout(n_pairs, n_expert)
    sections = [
        (at.order, (n_pairs, 2)), (at.position, (n_pairs,)), (at.offsets, (n_expert + 1,)), (at.counts, (4,)),
        (at.tiles(0), (max_tiles(n_pairs, n_expert, 0), 4)), (at.tiles(1), (max_tiles(n_pairs, n_expert, 1), 4)),
        (at.n_bytes, (0,)),
    ]  # fmt: skip
    for (start, shape), (following, _) in pairwise(sections):
        assert start % 16 == 0 and start + 4 * np.prod(shape) <= following


@pytest.mark.parametrize("which", range(len(TILES)))
def test_tiles_of_experts_are_enough(which: int) -> None:
    """Most tiles come where as many experts as possible have one row beyond full tiles."""
    for n_expert in (1, 2, 4, 8, 9, 64, 65):
        for n_pairs in range(1, 300):
            some = min(n_expert, n_pairs)
            most = some + (n_pairs - some) // TILES[which]
            assert most <= max_tiles(n_pairs, n_expert, which) <= most + n_expert // TILES[which] + 1
