"""Matrix products of the CPU backend, dense, by head and by expert, against float64 NumPy, with NaN in spare memory.

Integer kernels round activations to int8 per 32 values. The oracle rounds in the same way and is then held to float32
accuracy; a second check without the rounding bounds what the rounding costs. Where f16 becomes 16-bit integers, the
norms of blocks of columns bound it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kernel_harness import Harness, Segment
from weight_bytes import ALL_TYPES, OF_EXPERTS, QUANTIZED, fitting, good_blocks, params, stored

from ikcli.backends.cpu.lower import FLOAT_TYPES, RULES, activation_kind
from ikcli.backends.cpu.program import BATCH_INVARIANT_ROWS
from ikcli.backends.cpu.tile_modes import PAIRS_BLOCK, few_rows, makes_integers
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.graph import Graph, HeadSlice, Node, Rows, RowSpec, Weight
from ikcli.graph.ops_rows import MulMat
from ikcli.quant.decode import dequantize
from ikcli.quant.formats import get_format, row_size

Array = npt.NDArray[Any]
N_TOKENS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 16, 17, 33)
N_ROWS = (1, 5, 17, 40)


def k_of(type_: GGMLType) -> tuple[int, ...]:
    """Row lengths to try."""
    if type_ in FLOAT_TYPES:
        return 32, 34 if get_format(type_).is_interleaved else 33, 320, 1408
    block = get_format(type_).block_size
    return tuple(k for k in (32, 64, 128, 256, 320, 1280, 1408) if k % block == 0)


# --- weights ----------------------------------------------------------------------------------------------------------
def make_weight(name: str, type_: GGMLType, shape: tuple[int, ...], seed: int = 1) -> tuple[Weight, Array, Array]:
    """(weight, bytes, float64 values (matrices, rows, k)); the bytes end where an unreadable NaN pattern begins."""
    n_rows, k = int(np.prod(shape[1:])), shape[0]
    data = stored(type_, n_rows, k, seed)
    assert data.size == n_rows * row_size(type_, k)
    guarded = np.full(data.size + 4096, 0xFF, np.uint8)
    guarded[: data.size] = data
    values = dequantize(data, type_, shape).astype(np.float64) * TYPES[type_].matmul_scale
    return Weight(name, type_, shape), guarded, values.reshape(-1, shape[1], k)


# --- oracle -----------------------------------------------------------------------------------------------------------
def rounded(x: Array) -> Array:
    """float32 activations as the integer kernels see them."""
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, 32)
    top = np.abs(blocks).max(axis=-1, keepdims=True)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    scale = (top / np.float32(127)).astype(np.float64)
    return (np.rint(blocks * inverse).astype(np.float64) * scale).reshape(x.shape)


def seen(x: Array, type_: GGMLType) -> Array:
    """Activations as a kernel of this weight type sees them, in float64."""
    if activation_kind(type_) == "bf16":
        bits = x.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    return x.astype(np.float64) if type_ in FLOAT_TYPES else rounded(x)


def rounding(w: Array, x: Array, type_: GGMLType, few: int | None = None) -> Array | float:
    """What 16-bit integers instead of f16 may cost: errors of half a code in blocks whose norm is 32700 or more."""
    if activation_kind(type_) != "i16" or len(x) <= (few_rows(True) if few is None else few):
        return 0.0
    pad = [(0, 0), (0, -x.shape[1] % PAIRS_BLOCK)]
    norms = [np.linalg.norm(np.pad(v, pad).reshape(len(v), -1, PAIRS_BLOCK), axis=2) for v in (x, w)]
    return np.asarray(math.sqrt(PAIRS_BLOCK) * 1.01 / 32700 * norms[0] @ norms[1].T)


def check(found: Array, w: Array, x: Array, type_: GGMLType, *, loss: bool = True, few: int | None = None) -> None:
    """found = x @ w.T up to float32 rounding of the sum, and up to 1.5 % without the rounding of x."""
    a = seen(x, type_)
    assert found.shape == (len(x), len(w))
    limit = rounding(w, a, type_, few) + 1e-30
    limit = limit + 1e-5 * (np.abs(a) @ np.abs(w).T)  # codes are biased by 128, which costs a few bits,
    if type_ in (GGMLType.IQ1_BN, GGMLType.IQ2_BN, GGMLType.IQ2_BN_R4):  # and more in ternary rows with many zeros
        limit += 1.2e-5 * np.abs(a).sum(axis=1, keepdims=True) * np.abs(w).max(axis=1)
    error = np.abs(found - a @ w.T)
    assert (error <= limit).all(), f"{(error / limit).max()} times the limit"
    if loss:
        x = x.astype(np.float64)
        assert np.mean((found - x @ w.T) ** 2) <= 0.015**2 * np.mean(np.square(x) @ np.square(w).T)


def activations(rows: int, cols: int, seed: int = 3) -> Array:
    return np.random.default_rng([seed, rows, cols]).standard_normal((rows, cols)).astype(np.float32)


def dense(w: Weight, data: Array, n_threads: int, max_tokens: int = 33) -> tuple[Harness, Node]:
    run = Harness(max_tokens, 64, RULES)
    x = run.input("x", w.ne0)
    run.compile(run.graph.mul_mat(w, x, "y"), n_threads, {w.name: data})
    return run, x


# --- dense ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("type_", ALL_TYPES)
def test_mul_mat(type_: GGMLType) -> None:
    for k in k_of(type_):
        for n_rows in sorted({fitting(type_, n) for n in N_ROWS}):
            w, data, values = make_weight("w", type_, (k, n_rows))
            run, x = dense(w, data, n_threads=2 if n_rows > 5 else 1)
            for n in N_TOKENS:
                a = activations(n, k)
                check(run([Segment(n)], {x: a}), values[0], a, type_, loss=n_rows * n > 30)


def test_a_type_that_no_kernel_knows() -> None:
    run = Harness(4, 64, RULES)
    product = run.graph.mul_mat(Weight("odd", GGMLType.I16, (64, 8)), run.input("x", 64), "y")
    with pytest.raises(UnsupportedError, match="odd is i16, which has no CPU kernel"):
        run.compile(product, 1, {"odd": np.zeros(1024, np.uint8)})


@pytest.mark.parametrize("k", [33, 1408])
def test_exact_products_of_f16(k: int) -> None:
    """No 16-bit integers; and the input is shared with a product that makes such of it."""
    w, data, values = make_weight("w", GGMLType.F16, (k, 40))
    run = Harness(33, 64, RULES)
    x = run.input("x", k)
    rounds, exact = run.graph.record(MulMat(w, x), "rounds"), run.graph.record(MulMat(w, x, exact=True), "exact")
    run.compile(run.graph.concat([rounds, exact], "both"), 2, {"w": data})
    for n in (1, 4, 5, 17, 33):
        a = activations(n, k)
        both = run([Segment(n)], {x: a})
        check(both[:, :40], values[0], a, GGMLType.F16)
        wide = a.astype(np.float64)
        assert (np.abs(both[:, 40:] - wide @ values[0].T) <= 1e-6 * np.abs(wide) @ np.abs(values[0]).T).all()


@pytest.mark.parametrize("type_", ALL_TYPES)
def test_few_rows_together_are_each_row_alone(type_: GGMLType) -> None:
    """Programs for generation: to the last bit, for every number of rows up to the promised one."""
    for k in k_of(type_)[1::2]:
        w, data, values = make_weight("w", type_, (k, fitting(type_, 43)))  # the last of them not side by side
        run = Harness(BATCH_INVARIANT_ROWS, 64, RULES, batch_invariant=True)
        x = run.input("x", k)
        run.compile(run.graph.mul_mat(w, x, "y"), 1, {w.name: data})
        a = activations(BATCH_INVARIANT_ROWS, k)
        alone = np.concatenate([run([Segment(1)], {x: a[i : i + 1]}) for i in range(len(a))])
        check(alone, values[0], a, type_, few=BATCH_INVARIANT_ROWS)
        for n in range(2, len(a) + 1):
            np.testing.assert_array_equal(run([Segment(n)], {x: a[:n]}), alone[:n])


@pytest.mark.parametrize("type_", ALL_TYPES)
def test_threads_do_not_change_a_bit(type_: GGMLType) -> None:
    """250 rows are blocks of three tiles for one thread, of one tile for more."""
    w, data, _ = make_weight("w", type_, (k_of(type_)[-1], fitting(type_, 250)))
    runs = [dense(w, data, n) for n in (1, 2, 3)]
    for n in (1, 3, 4, 7, 33):
        a = activations(n, w.ne0)
        results = [run([Segment(n)], {x: a}) for run, x in runs]
        np.testing.assert_array_equal(results[0], results[1])
        np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.parametrize("type_", ALL_TYPES)
def test_rows_of_a_weight(type_: GGMLType) -> None:
    """A range of rows is used in place."""
    w, data, values = make_weight("w", type_, (256, fitting(type_, 60)))
    rows = get_format(type_).rows
    for row0, n_rows in ((0, 7), (13, 32), (59, 1), (28, 32)) if rows == 1 else ((0, 16), (rows, 32), (3 * rows, rows)):
        run, x = dense(w.rows(row0, n_rows), data, 2)
        for n in (2, 9):
            a = activations(n, 256)
            check(run([Segment(n)], {x: a}), values[0, row0 : row0 + n_rows], a, type_)


@pytest.mark.parametrize("type_", ALL_TYPES)
def test_mul_mat_heads(type_: GGMLType) -> None:
    """Per-head matrices; the heads are slices of wider rows."""
    k, n_head, n_rows = k_of(type_)[0], 3, fitting(type_, 21)
    if k % 32 == 0:
        w, data, values = make_weight("w", type_, (k, n_rows, n_head))
        offset, stride = 16, k + 48
        run = Harness(17, 64, RULES)
        x = run.input("x", offset + n_head * stride)
        run.compile(run.graph.mul_mat_heads(w, HeadSlice(x, offset, k, stride), "y"), 2, {"w": data})
        for n in (1, 3, 4, 17):
            a = activations(n, x.cols)
            found = run([Segment(n)], {x: a}).reshape(n, n_head, n_rows)
            for h in range(n_head):
                at = offset + h * stride
                check(found[:, h], values[h], a[:, at : at + k], type_)


@pytest.mark.parametrize("type_", ALL_TYPES)
def test_one_input_for_several_weights(type_: GGMLType) -> None:
    """q, k, v share the rounded input; a later node must not have overwritten it."""
    w, data, values = make_weight("w", type_, (256, fitting(type_, 40)))
    v, more, other = make_weight("v", type_, (256, fitting(type_, 40)), seed=2)
    run = Harness(8, 64, RULES)
    x = run.input("x", 256)
    first = run.graph.mul_mat(w, x, "first")
    second = run.graph.mul_mat(v, x, "second")
    run.compile(run.graph.add(first, second, "sum"), 2, {"w": data, "v": more})
    a = activations(8, 256)
    both = np.concatenate([values[0], other[0]], axis=1)
    check(run([Segment(8)], {x: a}), both, np.concatenate([a, a], axis=1), type_)


@pytest.mark.parametrize("type_", ALL_TYPES)
@pytest.mark.parametrize("n", [2, 9])
def test_huge_activations(type_: GGMLType, n: int) -> None:
    """Sums of blocks far beyond the half-precision range stay exact."""
    w, data, values = make_weight("w", type_, (256, fitting(type_, 40)))
    run, x = dense(w, data, 2)
    for size in (1e4, 1e7, 1e30):
        a = (np.abs(activations(n, 256)) * np.float32(size)).astype(np.float32)
        assert a.reshape(n, -1, 32).sum(axis=-1).min() > 65504
        check(run([Segment(n)], {x: a}), values[0], a, type_)


@pytest.mark.parametrize("type_", ALL_TYPES)
@pytest.mark.parametrize("n", [2, 9])
def test_zero_and_tiny_activations(type_: GGMLType, n: int) -> None:
    w, data, values = make_weight("w", type_, (256, fitting(type_, 40)))
    run, x = dense(w, data, 2)
    a = np.zeros((n, 256), np.float32)
    assert not run([Segment(n)], {x: a}).any()
    a[:, 32:64] = activations(n, 32)  # one block among zero blocks
    check(run([Segment(n)], {x: a}), values[0], a, type_, loss=False)
    for size in (1e-45, 1e-41, 1e-37):
        found = run([Segment(n)], {x: np.full((n, 256), size, np.float32)})
        assert np.isfinite(found).all() and np.abs(found).max() <= 256 * 5 * size


@pytest.mark.parametrize("type_", ALL_TYPES)
@pytest.mark.parametrize("n", [1, 9])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_activations_show(type_: GGMLType, n: int, bad: float) -> None:
    """One bad value in a row spoils that row and no other: it must never look like an ordinary number."""
    w, data, values = make_weight("w", type_, (256, fitting(type_, 40)))
    run, x = dense(w, data, 2)
    a = activations(n, 256)
    a[n // 2, 77] = bad
    found = run([Segment(n)], {x: a})
    assert not np.isfinite(found[n // 2]).any()
    good = np.arange(n) != n // 2
    if good.any():
        check(found[good], values[0], a[good], type_, few=0)  # the bad row counted as well


@pytest.mark.parametrize(
    "type_", params([t for t in QUANTIZED if not (get_format(t).row_meta_size or get_format(t).is_interleaved)])
)
@pytest.mark.parametrize("n", [1, 9])
def test_extreme_codes(type_: GGMLType, n: int) -> None:
    """The largest codes with the largest activations: no 8- or 16-bit intermediate result may saturate."""
    pool = good_blocks(type_)
    fmt = get_format(type_)
    values = dequantize(pool, type_, (fmt.block_size, len(pool)))
    order = np.argsort(np.abs(values).sum(axis=1) / np.abs(values).max(axis=1))
    block, value = pool[order[-1]], values[order[-1]].astype(np.float64)
    k = fmt.block_size * 8
    data = np.ascontiguousarray(np.tile(block, 8 * 20))
    run, x = dense(Weight("w", type_, (k, 20)), data, 1)
    a = np.tile(np.where(np.tile(value, 8) > 0, 1.0, -1.0).astype(np.float32), (n, 1))
    check(run([Segment(n)], {x: a}), np.tile(value, (20, 8)), a, type_, loss=False)


@pytest.mark.parametrize("type_", [GGMLType.Q3_K, GGMLType.Q3_K_R4])
def test_a_code_times_its_scale_does_not_fit_a_signed_byte(type_: GGMLType) -> None:
    """Codes of -4 and scales of -32: their product is 128, where tiles hold such products."""
    rows = 4 if type_ is GGMLType.Q3_K_R4 else 1
    block = np.zeros((rows, 110), np.uint8)
    block.reshape(-1)[slice(0, 8) if rows == 4 else slice(108, 110)] = np.full(rows, 0.5, "<f2").view(np.uint8)
    data = np.tile(block.reshape(-1), 2 * 20 // rows)
    run, x = dense(Weight("w", type_, (512, 20)), data, 1)
    a = activations(9, 512)
    check(run([Segment(9)], {x: a}), np.full((20, 512), 64.0), a, type_, loss=False)


@pytest.mark.skipif(not makes_integers(), reason="this CPU multiplies f16 in float32")
@pytest.mark.parametrize("unevenness", [0.0, 0.5, 1.0])
def test_integers_round_less_than_f16(unevenness: float) -> None:
    """f16 weights with many rows, whose columns differ in size: the error of activations rounded to f16, or less."""
    k, n = 1408, 64
    w, data, values = make_weight("w", GGMLType.F16, (k, 96))
    run, x = dense(w, data, 2, max_tokens=n)
    a = activations(n, k) * np.exp(unevenness * np.random.default_rng(5).standard_normal(k)).astype(np.float32)
    exact = a.astype(np.float64) @ values[0].T
    error, of_f16 = (
        v.astype(np.float64) - exact for v in (run([Segment(n)], {x: a}), a.astype(np.float16) @ values[0].T)
    )
    assert 0 < np.square(error).mean() <= np.square(of_f16).mean()


@pytest.mark.skipif(not makes_integers(), reason="this CPU multiplies f16 in float32")
@pytest.mark.parametrize("size", [1e-3, 1, 1e3])
@pytest.mark.parametrize("in_weights", [True, False])
def test_one_number_outweighs_its_block(in_weights: bool, size: float) -> None:
    """The largest number of a block, not only its norm, has to fit 16 bits."""
    k, n, rng = 3 * PAIRS_BLOCK + 32, 40, np.random.default_rng(3)
    w, a = rng.standard_normal((50, k)), rng.standard_normal((n, k)).astype(np.float32)
    outweighed = w if in_weights else a
    outweighed[:, 7::PAIRS_BLOCK] *= 1000
    w = (w * size / np.abs(w).max()).astype(np.float16)
    run, x = dense(Weight("w", GGMLType.F16, (k, 50)), w.view(np.uint8), 1, max_tokens=n)
    check(run([Segment(n)], {x: a}), w.astype(np.float64), a, GGMLType.F16)


# --- experts ----------------------------------------------------------------------------------------------------------
N_EXPERT = 6


def chosen(logits: Array, n_used: int, ser: tuple[int, float] | None) -> tuple[Array, Array]:
    """Softmax routing: (weights, ids), -1 for dropped slots."""
    p = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    ids = np.argsort(-p, axis=1, kind="stable")[:, :n_used]
    weights = np.take_along_axis(p, ids, axis=1)
    if ser is not None:
        drop = weights < ser[1] * weights[:, :1]
        drop[:, : ser[0]] = False
        ids, weights = np.where(drop, -1, ids), np.where(drop, 0, weights)
    return weights, ids


def order_of(ids: Array) -> Array:
    """Pairs (row * n_used + slot) grouped by expert, dropped ones last."""
    flat = ids.reshape(-1)
    return np.argsort(np.where(flat < 0, N_EXPERT, flat), kind="stable")


def routing_logits(kind: str, n: int) -> Array:
    """Distinct values; "one": everything prefers expert 4; "few": experts 0 and 5 get no token."""
    logits = np.random.default_rng(n).standard_normal((n, N_EXPERT)).astype(np.float32)
    if kind == "one":
        logits[:, 4] += 50
    if kind == "few":
        logits[:, [0, 5]] -= 50
    return logits


def experts(
    type_: GGMLType, k: int, n_rows: int, n_used: int, ser: tuple[int, float] | None, n_threads: int, most: int = 0
) -> Any:
    """Harnesses for mul_mat_id and moe_up_gate over the same weights: (run, leaf, logits) each, values of both.

    `most`: tokens of a program for generation.
    """
    up, up_data, up_values = make_weight("up", type_, (k, n_rows, N_EXPERT))
    gate, gate_data, gate_values = make_weight("gate", type_, (k, n_rows, N_EXPERT), seed=2)
    made = []
    for fused in (False, True):
        run = Harness(most or 17, 64, RULES, batch_invariant=most > 0)
        x, logits = run.input("x", k), run.input("logits", N_EXPERT)
        plan = routed(run.graph, logits, n_used, ser)
        g = run.graph
        y = g.moe_up_gate(up, gate, x, plan, "y") if fused else g.mul_mat_id(up, x, plan, "y")
        run.compile(y, n_threads, {"up": up_data, "gate": gate_data})
        made.append((run, x, logits))
    return made, up_values, gate_values


def routed(g: Graph, logits: Node, n_used: int, ser: tuple[int, float] | None) -> Node:
    route = g.moe_route(logits, None, "route", n_used=n_used, gating="softmax", norm=False, scale=1.0, ser=ser)
    return g.moe_sort(route, N_EXPERT, "plan")


@pytest.mark.parametrize("type_", OF_EXPERTS)
@pytest.mark.parametrize("ser", [None, (1, 0.7)])
def test_experts(type_: GGMLType, ser: tuple[int, float] | None) -> None:
    k, n_rows, n_used = k_of(type_)[0], fitting(type_, 40), 3
    made, up, gate = experts(type_, k, n_rows, n_used, ser, 2)
    for kind in ("any", "one", "few"):
        for n in (1, 2, 5, 17):
            logits = routing_logits(kind, n)
            expert = check_experts(type_, made, (up, gate), logits, activations(n, k), n_used, ser)
            assert ser is None or kind == "any" or (expert < 0).any()


def check_experts(
    type_: GGMLType, made: Any, values: tuple[Array, Array], logits: Array, a: Array, n_used: int,
    ser: tuple[int, float] | None,
) -> Array:  # fmt: skip
    """Run both harnesses of `experts` and compare; return the expert of every row."""
    up, gate = values
    _, ids = chosen(logits, n_used, ser)
    order = order_of(ids)
    expert, rows = ids.reshape(-1)[order], order // n_used
    plain, fused = (run([Segment(len(a))], {x: a, node: logits}) for run, x, node in made)
    for e in np.unique(expert[expert >= 0]):
        mine = expert == e
        check(plain[mine], up[e], a[rows[mine]], type_, loss=False)
        check_up_gate(fused[mine], up[e], gate[e], seen(a[rows[mine]], type_), type_)
    assert not plain[expert < 0].any() and not fused[expert < 0].any()
    return expert


@pytest.mark.parametrize("type_", [GGMLType.Q8_0, GGMLType.Q4_K_R4, GGMLType.F16])
@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_experts_with_many_rows(type_: GGMLType, n_threads: int) -> None:
    """Gate and up matrices are streamed in long runs, beside an expert whose tokens are too many for that."""
    k, n_rows, n = 256, 400, 17
    made, *values = experts(type_, k, n_rows, 1, None, n_threads)
    logits = routing_logits("any", n)
    logits[range(n), [4] * 12 + [0, 1, 2, 3, 5]] += 50
    expert = check_experts(type_, made, (values[0], values[1]), logits, activations(n, k), 1, None)
    assert (expert == 4).sum() > few_rows(type_ in FLOAT_TYPES) > n / len(np.unique(expert))


def check_up_gate(found: Array, up: Array, gate: Array, a: Array, type_: GGMLType) -> None:
    g, u = a @ gate.T, a @ up.T
    wanted = g / (1 + np.exp(-g)) * u
    of_gate, of_up = (1e-5 * (np.abs(a) @ np.abs(w).T) + rounding(w, a, type_) for w in (gate, up))
    limit = of_gate * (1.1 + np.abs(u)) + of_up * (1 + np.abs(g))
    assert (np.abs(found - wanted) <= limit + 1e-5 * np.abs(wanted)).all()


@pytest.mark.parametrize("type_", OF_EXPERTS)
def test_few_rows_of_an_expert_are_each_row_alone(type_: GGMLType) -> None:
    """Programs for generation: to the last bit, whether tokens share all experts ("one" of three) or some."""
    k, n_used, most = k_of(type_)[0], 3, BATCH_INVARIANT_ROWS
    made, _, _ = experts(type_, k, fitting(type_, 40), n_used, None, 1, most=most)
    for run, x, node in made:
        for kind in ("any", "one"):
            logits, a = routing_logits(kind, most), activations(most, k)
            _, ids = chosen(logits, n_used, None)
            alone = {}
            for t in range(most):
                _, mine = chosen(logits[t : t + 1], n_used, None)
                found = run([Segment(1)], {x: a[t : t + 1], node: logits[t : t + 1]})
                alone |= {(t, mine.reshape(-1)[slot]): row for slot, row in zip(order_of(mine), found, strict=True)}
            for n in (2, 3, most):
                order = order_of(ids[:n])
                found = run([Segment(n)], {x: a[:n], node: logits[:n]})
                for slot, row in zip(order, found, strict=True):
                    np.testing.assert_array_equal(row, alone[slot // n_used, ids[:n].reshape(-1)[slot]])


@pytest.mark.parametrize("type_", [GGMLType.F16, GGMLType.Q4_K, GGMLType.Q8_0], ids=lambda t: t.name)
def test_experts_do_not_depend_on_threads(type_: GGMLType) -> None:
    made = [experts(type_, 256, 70, 2, None, n)[0] for n in (1, 2, 3)]
    for n in (1, 17):
        logits, a = routing_logits("any", n), activations(n, 256)
        results = [[run([Segment(n)], {x: a, node: logits}) for run, x, node in m] for m in made]
        for other in results[1:]:
            np.testing.assert_array_equal(results[0], other)


@pytest.mark.parametrize("type_", OF_EXPERTS)
@pytest.mark.parametrize("ser", [None, (1, 0.9)])
def test_experts_to_token_order(type_: GGMLType, ser: tuple[int, float] | None) -> None:
    """up, down, weighted sum: rows find their way back, dropped slots add nothing."""
    k = max(64, k_of(type_)[0])
    up, up_data, up_values = make_weight("up", type_, (k, k, N_EXPERT))
    down, down_data, down_values = make_weight("down", type_, (k, fitting(type_, 37), N_EXPERT), seed=2)
    run = Harness(17, 64, RULES)
    x, logits = run.input("x", k), run.input("logits", N_EXPERT)
    g = run.graph
    plan = routed(g, logits, 3, ser)
    route = plan.inputs[0]
    assert isinstance(route, Node)
    y = g.mul_mat_id(down, g.mul_mat_id(up, x, plan, "up_x"), plan, "down_x", sorted_in=True)
    run.compile(g.moe_sum(y, route, plan, "sum"), 2, {"up": up_data, "down": down_data})
    for n in (1, 4, 17):
        values, a = routing_logits("any", n), activations(n, k)
        weights, ids = chosen(values, 3, ser)
        inner = np.einsum("tk,epk->tep", seen(a, type_), up_values)
        outer = np.einsum("tep,eqp->teq", seen(inner.astype(np.float32), type_), down_values)
        wanted = np.einsum("tsq,ts->tq", np.take_along_axis(outer, np.maximum(ids, 0)[..., None], axis=1), weights)
        found = run([Segment(n)], {x: a, logits: values})
        # The inner result is rounded again; a tie may fall either way, which costs at most one step of one value.
        assert np.abs(found - wanted).max() <= 2e-3 * np.abs(wanted).max()


def test_sorted_input_of_one_expert_per_token() -> None:
    """`sorted_in`: row i of the input is the i-th sorted row."""
    w, data, values = make_weight("w", GGMLType.Q8_0, (64, 40, N_EXPERT))
    run = Harness(9, 64, RULES)
    x, logits = run.input("x", 64), run.input("logits", N_EXPERT)
    plan = routed(run.graph, logits, 1, None)
    assert plan.rows == RowSpec(Rows.TOKENS, 1)
    run.compile(run.graph.mul_mat_id(w, x, plan, "y", sorted_in=True), 2, {"w": data})
    route, a = routing_logits("any", 9), activations(9, 64)
    expert = np.sort(chosen(route, 1, None)[1].reshape(-1))
    found = run([Segment(9)], {x: a, logits: route})
    for i in range(9):
        check(found[i : i + 1], values[expert[i]], a[i : i + 1], GGMLType.Q8_0, loss=False)
