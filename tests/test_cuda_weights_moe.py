"""Products by expert of the CUDA backend, emulated: both kernels, fused and not, dropped slots."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cuda_emulation import needs_emulation
from cuda_weights import ProductRun, activations, check
from weight_bytes import fitting

from ikcli.backends.cuda.rules_matmul import FEW_PER_EXPERT, MV_ROWS
from ikcli.gguf.constants import GGMLType
from ikcli.graph import Node
from ikcli.graph.activations import Glu, silu
from ikcli.quant.formats import get_format

pytestmark = needs_emulation
Array = npt.NDArray[Any]
T = GGMLType
N_EXPERT, N_USED = 6, 2


def named(*types: T) -> list[Any]:
    return [pytest.param(t, id=get_format(t).name) for t in types]


def routed(run: ProductRun, n: int, ser: tuple[int, float] | None = None, skew: float = 1.0) -> tuple[Node, Node]:
    """A route of n tokens to N_USED of N_EXPERT experts, and its plan."""
    logits = activations(100, N_EXPERT, seed=11)[:n] + skew * np.arange(N_EXPERT, dtype=np.float32)
    route = run.graph.moe_route(run.input("logits", logits), None, "route", n_used=N_USED, gating="softmax", norm=True,
                                scale=1.0, ser=ser)  # fmt: skip
    return route, run.graph.moe_sort(route, N_EXPERT, "plan")


def sort_of(run: ProductRun, n: int) -> Array:
    """(pair, expert) per sorted row, by the reference."""
    plan = next(x for x in run.graph.nodes if x.op.name == "moe_sort")
    (table,) = run.reference([plan], n, (), 0)
    return table


def products(run: ProductRun, name: str, x: Array, table: Array, type_: T, found: Array, sorted_in: bool) -> None:
    """Every expert's rows against its own matrix; rows of dropped slots are zero."""
    few = len(table) <= MV_ROWS * N_USED or len(table) <= FEW_PER_EXPERT * N_EXPERT
    for e in range(-1, N_EXPERT):
        rows = np.flatnonzero(table[:, 1] == e)
        if e < 0:
            assert (found[rows] == 0).all()
        elif len(rows):
            source = rows if sorted_in else table[rows, 0] // N_USED
            check(found[rows], run.weights[name][e], x[source], type_, tf32=not few)


@pytest.mark.parametrize("type_", named(T.Q8_0, T.Q4_K, T.Q2_K, T.IQ2_XS, T.Q4_0_R8, T.F16))
@pytest.mark.parametrize("n", [1, 7, 90])
def test_mul_mat_id(type_: T, n: int) -> None:
    k, n_rows = 256, fitting(type_, 37)
    for sorted_in in (False, True):
        run = ProductRun()
        w = run.tensor("w", type_, (k, n_rows, N_EXPERT))
        _, plan = routed(run, n)
        x = run.input("x", activations(n, k))
        if sorted_in:  # rows that are in the order of the plan already: results of another product
            x = run.graph.mul_mat_id(run.tensor("first", T.F32, (k, k, N_EXPERT)), x, plan, "x sorted")
        y = run.graph.mul_mat_id(w, x, plan, "y", sorted_in=sorted_in)
        values, found = run.run(x, y)
        products(run, "w", values, sort_of(run, n), type_, found, sorted_in)


@pytest.mark.parametrize("type_", named(T.Q8_0, T.Q5_K, T.IQ3_S, T.F16))
@pytest.mark.parametrize("n", [1, 6, 80])
def test_moe_up_gate(type_: T, n: int) -> None:
    """The same rounding as two products, then silu(gate) * up."""
    k, n_rows = 256, 41
    run = ProductRun()
    up, gate = (run.tensor(name, type_, (k, n_rows, N_EXPERT), seed) for seed, name in enumerate(("up", "gate")))
    _, plan = routed(run, n)
    x = run.input("x", activations(n, k))
    a, b = run.graph.mul_mat_id(up, x, plan, "a"), run.graph.mul_mat_id(gate, x, plan, "b")
    y = run.graph.moe_up_gate(up, gate, x, plan, "y")
    found_a, found_b, found = run.run(a, b, y)
    products(run, "up", run.values[x], sort_of(run, n), type_, found_a, False)
    products(run, "gate", run.values[x], sort_of(run, n), type_, found_b, False)
    np.testing.assert_allclose(found, silu(found_b.astype(np.float64)) * found_a, rtol=2e-5, atol=1e-12)


@pytest.mark.parametrize("act", [Glu("gelu"), Glu("swiglu_oai", 0.7)])
@pytest.mark.parametrize("n", [1, 80])
def test_moe_up_gate_of_other_activations(act: Glu, n: int) -> None:
    run = ProductRun()
    up, gate = (run.tensor(name, T.Q8_0, (256, 41, N_EXPERT), seed) for seed, name in enumerate(("up", "gate")))
    _, plan = routed(run, n)
    x = run.input("x", activations(n, 256))
    a, b = run.graph.mul_mat_id(up, x, plan, "a"), run.graph.mul_mat_id(gate, x, plan, "b")
    found_a, found_b, found = run.run(a, b, run.graph.moe_up_gate(up, gate, x, plan, "y", act))
    np.testing.assert_allclose(found, act(found_b.astype(np.float64), found_a), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(("act", "gate_type"), [(Glu("gelu"), T.Q8_0), (Glu("swiglu_oai", 0.7), T.Q8_0),
                                               (Glu(), T.Q4_0)])  # fmt: skip
@pytest.mark.parametrize("n", [1, 80])
def test_product_of_an_activation_of_its_own(act: Glu, gate_type: T, n: int) -> None:
    """Whatever writes the activation also writes the rows that the next product reads."""
    run = ProductRun()
    up, gate = run.tensor("up", T.Q8_0, (64, 64, N_EXPERT)), run.tensor("gate", gate_type, (64, 64, N_EXPERT), 2)
    down = run.tensor("down", T.Q8_0, (64, 41, N_EXPERT), 3)
    _, plan = routed(run, n)
    y = run.graph.moe_up_gate(up, gate, run.input("x", activations(n, 64)), plan, "y", act)
    values, found = run.run(y, run.graph.mul_mat_id(down, y, plan, "down", sorted_in=True))
    products(run, "down", values, sort_of(run, n), T.Q8_0, found, True)


@pytest.mark.parametrize("n", [1, 80])
def test_add_id(n: int) -> None:
    """Dropped slots get no bias."""
    run = ProductRun()
    w, b = run.tensor("w", T.F32, (64, 37, N_EXPERT)), run.tensor("b", T.F32, (37, N_EXPERT))
    _, plan = routed(run, n, ser=(1, 0.9))
    y = run.graph.mul_mat_id(w, run.input("x", activations(n, 64)), plan, "y")
    product, found = run.run(y, run.graph.add_id(y, b, plan, "biased"))
    experts = sort_of(run, n)[:, 1]
    biases = run.weights["b"].reshape(N_EXPERT, 37)
    np.testing.assert_allclose(found, product + np.where(experts[:, None] < 0, 0, biases[experts]), rtol=1e-6)


@pytest.mark.parametrize("n", [1, 80])
def test_scale_id(n: int) -> None:
    """By numbers of experts and by weights of the route; a sum without weights. Dropped slots stay as they are."""
    run = ProductRun()
    w, s = run.tensor("w", T.F32, (64, 37, N_EXPERT)), run.tensor("s", T.F32, (N_EXPERT,))
    route, plan = routed(run, n, ser=(1, 0.9))
    y = run.graph.mul_mat_id(w, run.input("x", activations(n, 64)), plan, "y")
    scaled = run.graph.scale_id(y, s, plan, "scaled")
    weighted = run.graph.scale_id(y, route, plan, "weighted")
    product, by_expert, by_route, slots = run.run(y, scaled, weighted, route)
    pairs, experts = sort_of(run, n).T
    factors = run.weights["s"].reshape(-1)[experts]
    np.testing.assert_allclose(by_expert, product * np.where(experts < 0, 1, factors)[:, None], rtol=1e-6)
    weights = slots[:, :N_USED].reshape(-1)[pairs]
    np.testing.assert_allclose(by_route, product * np.where(experts < 0, 1, weights)[:, None], rtol=1e-6)
    (summed,) = run.run(run.graph.moe_sum(weighted, route, plan, "sum", weighted=False))
    (wanted,) = run.run(run.graph.moe_sum(y, route, plan, "sum2"))
    np.testing.assert_allclose(summed, wanted, rtol=1e-5, atol=1e-6)


def test_up_and_gate_of_different_types() -> None:
    for n in (3, 70):
        run = ProductRun()
        up, gate = run.tensor("up", T.Q4_K, (256, 40, N_EXPERT)), run.tensor("gate", T.F16, (256, 40, N_EXPERT), 2)
        _, plan = routed(run, n)
        x = run.input("x", activations(n, 256))
        a, b = run.graph.mul_mat_id(up, x, plan, "a"), run.graph.mul_mat_id(gate, x, plan, "b")
        found_a, found_b, found = run.run(a, b, run.graph.moe_up_gate(up, gate, x, plan, "y"))
        np.testing.assert_allclose(found, silu(found_b.astype(np.float64)) * found_a, rtol=2e-5, atol=1e-12)


@pytest.mark.parametrize("n", [2, 60])
def test_dropped_slots_are_zero(n: int) -> None:
    run = ProductRun()
    w = run.tensor("w", T.Q8_0, (64, 9, N_EXPERT))
    _, plan = routed(run, n, ser=(1, 0.9))
    x = run.input("x", activations(n, 64))
    found, fused = run.run(run.graph.mul_mat_id(w, x, plan, "y"), run.graph.moe_up_gate(w, w, x, plan, "z"))
    table = sort_of(run, n)
    assert (table[:, 1] < 0).any()
    products(run, "w", run.values[x], table, T.Q8_0, found, False)
    assert (fused[table[:, 1] < 0] == 0).all()


@pytest.mark.parametrize("n", range(1, 10))
def test_every_number_of_rows_of_an_expert(n: int) -> None:
    """All tokens choose the same two experts, matrices have an odd number of rows."""
    run = ProductRun()
    w = run.tensor("w", T.Q4_0, (96, 33, N_EXPERT))
    _, plan = routed(run, n, skew=50.0)
    x = run.input("x", activations(n, 96))
    (found,) = run.run(run.graph.mul_mat_id(w, x, plan, "y"))
    table = sort_of(run, n)
    assert set(table[:, 1]) == {4, 5}
    products(run, "w", run.values[x], table, T.Q4_0, found, False)


def test_results_of_a_token_do_not_depend_on_the_others() -> None:
    """Up to 8 tokens, to the last bit."""
    x = activations(MV_ROWS, 256)
    alone: dict[int, Array] = {}
    for n in range(1, MV_ROWS + 1):
        run = ProductRun(batch_invariant=True)
        up, gate = run.tensor("up", T.Q6_K, (256, 21, N_EXPERT)), run.tensor("gate", T.Q6_K, (256, 21, N_EXPERT), 2)
        _, plan = routed(run, n)
        y = run.graph.moe_up_gate(up, gate, run.input("x", x[:n]), plan, "y")
        (found,) = run.run(y, seed=n)
        for row, (pair, _) in zip(found, sort_of(run, n), strict=True):
            np.testing.assert_array_equal(row, alone.setdefault(int(pair), row))
    assert len(alone) == MV_ROWS * N_USED
