"""Recurrent layers on the CPU against the NumPy meaning of their ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kernel_harness import Harness
from kernel_harness import Segment as CpuSegment
from recurrent_cases import (
    N_SEQ,
    Case,
    Heads,
    Oracle,
    biased_conv_case,
    conv_case,
    delta_case,
    linear_case,
    linear_conv_case,
    mamba2_case,
    micro_batches,
    scan_case,
)
from test_cpu_ops import random, run_both, weight
from tiers import some

from ikcli.backends.cpu.lower import RULES
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.graph import Weight

Array = npt.NDArray[Any]
LENGTHS = ([1], [2, 1, 8], [9], [15, 1], [16, 3, 17], [31, 32, 33], [63, 64, 65], [1, 1, 1, 1], [5, 0, 130])


def compare(case: Case, lengths: Any, n_threads: int = 2, tolerance: float = 2e-5) -> None:
    """Micro-batch after micro-batch, results and states."""
    batches = micro_batches(lengths)
    most = max(sum(s.n_tokens for s in b) for b in batches)
    run, oracle = Harness(most, 8, RULES, n_seq=N_SEQ), Oracle(case)
    leaves = {name: run.input(name, cols) for name, cols in case.inputs.items()}
    run.compile(case.build(run.graph, leaves), n_threads,
                {name: np.ascontiguousarray(w).view(np.uint8) for name, w in case.weights.items()})  # fmt: skip
    (data,) = run.caches.values()
    rng = np.random.default_rng(3)
    for segments in batches:
        values = case.make(rng, sum(s.n_tokens for s in segments))
        given = [CpuSegment(s.n_tokens, 0, s.pos, seq=s.seq) for s in segments]
        found = run(given, {leaves[name]: x for name, x in values.items()})
        wanted = oracle(segments, {name: x.astype(np.float32) for name, x in values.items()})
        assert np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max(), segments
        for s in segments:
            state, kept = data[s.seq].view(np.float32), oracle.state(s.seq)
            assert np.abs(state - kept).max() <= tolerance * np.abs(kept).max(), segments


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize(
    ("n_head", "n_head_k", "dk", "dv"),
    some([(4, 2, 64, 64), (1, 1, 128, 128), (6, 3, 16, 48), (2, 2, 48, 32)], [(4, 2, 64, 64), (6, 3, 16, 48)], True),
)
def test_delta_net(n_head: int, n_head_k: int, dk: int, dv: int, by_column: bool) -> None:
    """Sizes around the edges of blocks and chunks, several sequences, states carried on."""
    compare(delta_case(Heads(n_head, n_head_k, dk, dv, by_column)), LENGTHS)


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("dk", some([32, 64], [64]))
def test_delta_net_with_tiled_heads(dk: int, n_threads: int) -> None:
    compare(delta_case(Heads(6, 2, dk, 64, tiled=True)), ([70, 3], [1, 80]), n_threads)


@pytest.mark.parametrize("size", some([32, 64], [64]))
def test_delta_net_where_nothing_is_left(size: int) -> None:
    """Decays down to exp(-400): no factor overflows, and what follows is not affected."""
    compare(delta_case(Heads(2, 2, size, size, by_column=True), strongest=6.0), ([200], [3], [40]))


def test_delta_net_gives_a_token_the_same_whatever_comes_with_it() -> None:
    same_in_pieces(delta_case(Heads(4, 2, 64, 64)))


def same_in_pieces(case: Case) -> None:
    """Eight tokens at once, and in two other ways."""
    results = []
    values = case.make(np.random.default_rng(5), 8)
    for pieces in ((8,), (1, 7), (1,) * 8):
        run = Harness(8, 8, RULES, n_seq=1)
        leaves = {name: run.input(name, cols) for name, cols in case.inputs.items()}
        weights = {name: np.ascontiguousarray(w).view(np.uint8) for name, w in case.weights.items()}
        run.compile(case.build(run.graph, leaves), 2, weights)
        found, at = [], 0
        for n in pieces:
            found.append(run([CpuSegment(n, 0, at)], {leaves[name]: x[at : at + n] for name, x in values.items()}))
            at += n
        results.append(np.concatenate(found))
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])


@pytest.mark.parametrize("widths", [(16,), (80, 16, 208), (256, 64)])
@pytest.mark.parametrize("taps", [2, 4, 5])
def test_short_conv(widths: tuple[int, ...], taps: int) -> None:
    compare(conv_case(widths, taps), LENGTHS[:6], n_threads=3)


def test_short_conv_with_a_bias() -> None:
    compare(biased_conv_case(80, 4), LENGTHS[:6], n_threads=3)


@pytest.mark.parametrize(("cols", "n_state", "n_threads"), [(16, 16, 2), (96, 16, 3), (32, 48, 1)])
def test_selective_scan(cols: int, n_state: int, n_threads: int) -> None:
    """Several sequences, states carried on, also such of which nothing is left."""
    compare(scan_case(cols, n_state), LENGTHS, n_threads)
    compare(scan_case(cols, n_state, strongest=7.0), ([40], [3], [20]), n_threads)


def test_selective_scan_gives_a_token_the_same_whatever_comes_with_it() -> None:
    same_in_pieces(scan_case(64, 16))


@pytest.mark.parametrize(
    ("n_head", "n_group", "width", "n_state", "n_threads"),
    some([(4, 2, 32, 32, 2), (3, 1, 64, 128, 3), (8, 8, 16, 16, 1), (6, 2, 80, 64, 2)], [(4, 2, 32, 32, 2)], True),
)
def test_mamba2_scan(n_head: int, n_group: int, width: int, n_state: int, n_threads: int) -> None:
    """Sizes around the edges of blocks and chunks, several sequences, states carried on, and such that are lost."""
    compare(mamba2_case(n_head, n_group, width, n_state), LENGTHS, n_threads)
    compare(mamba2_case(n_head, n_group, width, n_state, strongest=7.0), ([200], [3], [40]), n_threads)


@pytest.mark.parametrize(("n_head", "width", "n_threads"), some([(4, 32, 2), (3, 128, 3)], [(4, 32, 2)], True))
def test_linear_attention(n_head: int, width: int, n_threads: int) -> None:
    """Slopes from strong to nearly none, in chunks and token by token."""
    compare(linear_case(n_head, width), LENGTHS, n_threads)
    compare(linear_case(n_head, width, strongest=40.0), ([200], [3], [40]), n_threads)
    same_in_pieces(linear_case(n_head, width))


def test_mamba2_scan_gives_a_token_the_same_whatever_comes_with_it() -> None:
    same_in_pieces(mamba2_case(4, 2, 32, 32))


def test_states_decay_to_zero_and_not_to_denormals() -> None:
    """On these a CPU takes a hundred times as long; the thread itself goes on computing with them."""
    case, n = mamba2_case(4, 2, 32, 32), 16
    run = Harness(n, 8, RULES, n_seq=N_SEQ)
    leaves = {name: run.input(name, cols) for name, cols in case.inputs.items()}
    weights = {name: np.ascontiguousarray(w).view(np.uint8) for name, w in case.weights.items()}
    run.compile(case.build(run.graph, leaves), 1, weights)
    values = case.make(np.random.default_rng(3), n)
    least = []
    for step in range(24):
        run([CpuSegment(n, 0, n * step, seq=0)], {leaves[name]: x for name, x in values.items()})
        (data,) = run.caches.values()
        state = np.abs(data[0].view(np.float32))
        least.append(float(state[state > 0].min(initial=1.0)))
        values = {"xbc": np.zeros_like(values["xbc"]), "dt": np.full_like(values["dt"], -1.0)}
    assert least[0] > least[1] and min(least) >= np.finfo(np.float32).tiny
    assert np.float32(1e-30) * np.float32(1e-10) > 0


def test_short_conv_without_an_activation() -> None:
    compare(linear_conv_case(80, 3), LENGTHS[:6], n_threads=3)


def test_weights_of_a_convolution_have_to_be_f32() -> None:
    half = Weight("w", GGMLType.F16, (4, 16))
    with pytest.raises(UnsupportedError, match="w is f16; weights of short convolutions have to be f32"):
        run_both(lambda g, x: g.short_conv(g.state("s", 48), x, [half], "y"), [random(1, 16)], {"w": random(16, 4)})


@pytest.mark.parametrize("width", [1, 16, 40, 128])
def test_l2_norm(width: int) -> None:
    for cols, offset, used in ((width, 0, 0), (4 * width + 3, 3, 2 * width)):
        for size in (1.0, 1e-4, 1e15):
            x = random(5, cols) * np.float32(size)
            found, wanted = run_both(
                lambda g, n, o=offset, u=used: g.l2_norm(n[0], width, 1e-6, "y", offset=o, cols=u), [x], n_threads=3
            )
            np.testing.assert_allclose(found, wanted, rtol=3e-6)


@pytest.mark.parametrize("bound", [0.0, -5.0])
@pytest.mark.parametrize(("heads", "width"), [(1, 1), (4, 1), (32, 1), (35, 1), (3, 16), (2, 48), (3, 5)])
def test_decay(heads: int, width: int, bound: float) -> None:
    """From where softplus is tiny to where it is linear."""
    a = np.exp(random(heads)) * (np.sign(random(heads, seed=3)) if bound else -1)
    dt = random(heads * width, seed=2)
    for rows, size in ((1, 2.0), (7, 2.0), (7, 30.0)):
        x = random(rows, heads * width, seed=3) * np.float32(size)
        found, wanted = run_both(
            lambda g, n: g.decay(n[0], weight("dt", dt), weight("a", a), "y", bound=bound),
            [x], {"dt": dt, "a": a}, n_threads=3,
        )  # fmt: skip
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-35)
        np.testing.assert_allclose(1 - found, 1 - wanted, atol=2e-7)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("width", [7, 16, 64, 100])
def test_gated_norm(width: int, activation: str) -> None:
    w, x, gate = 1 + random(width), random(5, 3 * width), 5 * random(5, 3 * width, seed=2)
    found, wanted = run_both(
        lambda g, n: g.gated_norm(n[0], weight("w", w), n[1], 1e-6, "y", activation=activation),
        [x, gate], {"w": w}, n_threads=3,
    )  # fmt: skip
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
