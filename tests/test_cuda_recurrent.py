"""CUDA kernels of recurrent layers, emulated, against the NumPy meaning of their ops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cuda_emulation import EmulatedDevice, needs_emulation
from cuda_graphs import LIMITS, GraphRun, download, keep
from leaves import Leaf, leaf
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

from ikcli.backends.cuda import rules_recurrent
from ikcli.backends.cuda.lower import Counts, GpuLowering, GpuProgram, all_rules, lower
from ikcli.errors import UnsupportedError
from ikcli.graph import Graph, Node, Rows
from ikcli.graph.micro_batch import Segment

pytestmark = needs_emulation
Array = npt.NDArray[Any]
LENGTHS = ([1], [2, 1, 8], [33], [31, 1], [32, 3, 17], [1, 1, 1, 1], [5, 0, 65])
CHUNKS = ([64], [70, 3, 130], [1, 200], [63, 65])  # a delta net goes by chunks of 64


class Device:
    """One graph, its states in (emulated) device memory."""

    def __init__(self, case: Case, most: int) -> None:
        self.case, self.graph = case, Graph()
        self.leaves = {name: leaf(self.graph, name, cols) for name, cols in case.inputs.items()}
        self.result = case.build(self.graph, self.leaves)
        rows = {Rows.TOKENS: most, Rows.OUTPUTS: 1, Rows.KV: most}
        rules = all_rules().replaced({Leaf: keep})
        given = [self.result, *self.leaves.values()]
        self.program: GpuProgram = lower(self.graph.nodes, given, GpuLowering(rows, most, LIMITS), rules)
        self.device = EmulatedDevice(seed=1)
        self.stream = self.device.stream()
        (self.cache,) = self.graph.caches.values()
        self.states = self.device.alloc(4 * N_SEQ * self.cache.cols, "states").address
        self.arena = self.device.alloc(self.program.arena_bytes, "arena").address
        self.weights = {name: self.upload(_device_rows(w)) for name, w in case.weights.items()}
        data = self.program.constants.items()
        self.constants = {buffer: self.upload(np.frombuffer(x, np.uint8)) for buffer, x in data}

    def upload(self, data: Array) -> int:
        memory = self.device.alloc(max(data.nbytes, 1), "data")
        self.device.upload(self.stream, memory.address, np.ascontiguousarray(data))
        return memory.address

    def __call__(self, segments: list[Segment], values: dict[str, Array]) -> Array:
        n = sum(s.n_tokens for s in segments)
        table = np.array([[s.start, s.n_tokens, 0, s.pos, 0, s.n_kv] for s in segments])
        words = np.zeros(16, np.int64)
        words[:4] = n, 0, n, len(segments)
        words[8], words[10] = self.upload(table), self.upload(np.array([s.seq for s in segments]))
        states = {self.cache: self.states}
        self.program.bind(self.upload(words), self.arena, self.constants, self.weights, states)
        for name, node in self.leaves.items():
            self.device.upload(self.stream, self.program.node_address(node), values[name].astype(np.float32))
        counts = Counts(n, 0, n, len(segments), n).bucket(self.program.lowering.max_rows)
        for launch in self.program.launches(counts):
            self.device.launch(self.stream, launch)
        found = download(self.device, self.stream, self.program, self.result, n)
        self.device.synchronize(self.stream)
        return found

    def state(self, seq: int) -> Array:
        kept = np.empty(self.cache.cols, np.float32)
        self.device.download(self.stream, kept, self.states + 4 * self.cache.cols * seq)
        self.device.synchronize(self.stream)
        return kept


def _device_rows(w: Array) -> Array:
    """Rows of f32 as they are on a device: padded to 16 bytes."""
    return np.pad(w, ((0, 0), (0, -w.shape[1] % 4)))


def compare(case: Case, lengths: Any = LENGTHS, tolerance: float = 1e-5) -> None:
    batches = micro_batches(lengths)
    run, oracle = Device(case, max(sum(s.n_tokens for s in b) for b in batches) + 3), Oracle(case)
    rng = np.random.default_rng(3)
    try:
        for segments in batches:
            values = {
                name: x.astype(np.float32) for name, x in case.make(rng, sum(s.n_tokens for s in segments)).items()
            }
            found, wanted = run(segments, values), oracle(segments, values)
            assert np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max(), segments
            for s in segments:
                assert np.abs(run.state(s.seq) - oracle.state(s.seq)).max() <= tolerance * np.abs(wanted).max(), (
                    segments
                )
    finally:
        run.device.close()


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize(
    ("n_head", "n_head_k", "dk", "dv", "tiled"),
    [(4, 2, 64, 64, True), (1, 1, 128, 128, False), (6, 3, 16, 48, False), (2, 2, 144, 16, False)],
)
def test_delta_net(n_head: int, n_head_k: int, dk: int, dv: int, tiled: bool, by_column: bool) -> None:
    compare(delta_case(Heads(n_head, n_head_k, dk, dv, by_column, tiled)), (*LENGTHS, *CHUNKS))


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("scan", range(len(rules_recurrent.SCANS)))
def test_delta_net_in_turns(scan: int, by_column: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More chunks than there is memory for at once; decays that leave nothing; all sizes of shared memory."""
    monkeypatch.setattr(rules_recurrent, "SCANS", rules_recurrent.SCANS[scan:])
    compare(delta_case(Heads(2, 1, 32, 48, by_column), strongest=6.0), ([20, 3], [150, 700, 1, 300]), 2e-5)


@pytest.mark.parametrize("by_column", [False, True])
def test_values_of_any_size_in_chunks(by_column: bool) -> None:
    """What depends on values is scaled before products of 16-bit numbers."""
    case = delta_case(Heads(1, 1, 64, 64, by_column))
    for factor in (1e-30, 1e20):

        def make(rng: np.random.Generator, n: int, factor: float = factor) -> dict[str, Array]:
            values = dict(case.make(rng, n))
            values["qkv"][:, 128:] *= factor
            return values

        compare(replace(case, make=make), ([10], [130]))


@pytest.mark.parametrize("by_column", [False, True])
def test_keys_that_are_alike_in_chunks(by_column: bool) -> None:
    """Hardly any decay, and every token replaces what the one before wrote: the inverse is far from diagonal."""
    case = delta_case(Heads(1, 1, 64, 32, by_column))

    def make(rng: np.random.Generator, n: int) -> dict[str, Array]:
        values = dict(case.make(rng, n))
        keys = rng.standard_normal((1, 64)) + 0.1 * rng.standard_normal((n, 64))
        values["qkv"][:, 64:128] = keys / np.linalg.norm(keys, axis=1, keepdims=True)
        return values | {"beta": np.full((n, 1), 9.0), "decay": np.full_like(values["decay"], 1 - 1e-4)}

    compare(replace(case, make=make), ([200], [100]))


@pytest.mark.parametrize("widths", [(16,), (80, 16, 208), (256, 64)])
@pytest.mark.parametrize("taps", [2, 4, 5])
def test_short_conv(widths: tuple[int, ...], taps: int) -> None:
    compare(conv_case(widths, taps))


def test_short_conv_with_a_bias() -> None:
    compare(biased_conv_case(80, 4))


def test_short_conv_without_activation() -> None:
    compare(linear_conv_case(80, 3))


@pytest.mark.slow("compiles a file of GPU kernels for the emulation")
@pytest.mark.parametrize(
    ("n_head", "n_group", "width", "n_state"),
    [(4, 2, 16, 16), (2, 1, 64, 128), (3, 1, 48, 80), (2, 2, 80, 256)],
)
def test_mamba2_scan(n_head: int, n_group: int, width: int, n_state: int) -> None:
    compare(mamba2_case(n_head, n_group, width, n_state), (*LENGTHS, *CHUNKS))


@pytest.mark.slow("compiles a file of GPU kernels for the emulation")
def test_mamba2_scan_of_numbers_of_any_size() -> None:
    """Decays that leave nothing, or everything, and values that f16 cannot hold."""
    compare(mamba2_case(2, 1, 32, 32, strongest=7.0), ([150], [3], [64, 20]))
    case = mamba2_case(1, 1, 64, 32)
    for factor in (1e-30, 1e20):

        def make(rng: np.random.Generator, n: int, factor: float = factor) -> dict[str, Array]:
            values = dict(case.make(rng, n))
            values["xbc"][:, :32] *= factor
            return values

        compare(replace(case, make=make), ([10], [130]))


@pytest.mark.slow("compiles a file of GPU kernels for the emulation")
@pytest.mark.parametrize(("n_head", "width"), [(4, 16), (2, 128), (3, 80)])
def test_linear_attention(n_head: int, width: int) -> None:
    compare(linear_case(n_head, width), (*LENGTHS, *CHUNKS))
    compare(linear_case(n_head, width, strongest=40.0), ([150], [3], [64, 20]))


@pytest.mark.parametrize("cols", [16, 208])
def test_selective_scan(cols: int) -> None:
    compare(scan_case(cols, 16))
    compare(scan_case(cols, 16, strongest=7.0), ([40], [3], [20]))


def test_what_is_too_large_is_refused() -> None:
    with pytest.raises(
        UnsupportedError, match="takes a state of 16 numbers per column, not 32; run this model without"
    ):
        Device(scan_case(16, 32), 4)
    with pytest.raises(UnsupportedError, match="keys of 272 columns are wider than the GPU kernels take"):
        Device(delta_case(Heads(1, 1, 272, 16)), 4)
    with pytest.raises(UnsupportedError, match="a state of 272 rows is longer than the GPU kernels take"):
        Device(mamba2_case(2, 1, 16, 272), 4)
    with pytest.raises(UnsupportedError, match="17 taps are more than the GPU kernel takes"):
        Device(conv_case((16,), 17), 4)


def random(*shape: int, seed: int = 1) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("width", [1, 16, 40, 128])
def test_norms(width: int) -> None:
    run = GraphRun(all_rules(), {"w": 1 + random(width)})
    x, gate = run.input("x", random(5, 4 * width + 3)), run.input("gate", 5 * random(5, 2 * width, seed=2))
    normed = run.graph.l2_norm(x, width, 1e-6, "normed", offset=3, cols=2 * width)
    gated = [run.graph.gated_norm(normed, run.weight("w"), gate, 1e-6, a, activation=a) for a in ("silu", "sigmoid")]
    for found, wanted in run(normed, *gated):
        np.testing.assert_allclose(found, wanted, rtol=3e-6, atol=1e-7)


@pytest.mark.parametrize("bound", [0.0, -5.0])
@pytest.mark.parametrize(("heads", "width"), [(1, 1), (35, 1), (3, 16), (3, 500)])
def test_decay(heads: int, width: int, bound: float) -> None:
    a = np.exp(random(heads)) * (np.sign(random(heads, seed=3)) if bound else -1)
    run = GraphRun(all_rules(), {"dt": random(heads * width, seed=2), "a": a})
    x = run.input("x", 10 * random(5, heads * width, seed=3))
    y: Node = run.graph.decay(x, run.weight("dt"), run.weight("a"), "y", bound=bound)
    ((found, wanted),) = run(y)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-35)
