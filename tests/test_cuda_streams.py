"""Streams of a residual, compressed attention and rows before all positions, on the emulated device.

Ops against NumPy; sessions of DeepSeek V4, Hy 4, openPangu, Qwen4-Exp and Kimi K3.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cuda_sessions
import numpy as np
import pytest
from cuda_attention import LIMITS, SMALL, Run, Segment, decode, expected, fill
from cuda_emulation import needs_emulation
from cuda_graphs import GraphRun
from deepseek4_model import tiny_deepseek4
from gguf_files import write_model
from openpangu_model import tiny_openpangu
from test_hy_v4 import INDEXER
from tiny_architectures import tiny

from ikcli.backends.cuda.lower import all_rules
from ikcli.backends.cuda.upload import device_row_bytes
from ikcli.engine.run import gpus
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.engine.run.session import Session
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.graph import Cache, HeadSlice, Node, Per, Weight, micro_batch
from ikcli.graph.ops_elements import Cut
from ikcli.graph.ops_pooled import Pool, PooledAttn, PooledCells, PooledStore
from ikcli.graph.ops_sparse import PrefixAttn
from ikcli.graph.ops_streams import (
    GatedStreams,
    ResidualAttn,
    StreamAdd,
    StreamLevel,
    StreamMatch,
    StreamMix,
    StreamPredict,
    StreamSum,
    StreamWeights,
)
from ikcli.models import GraphConfig

pytestmark = [needs_emulation, pytest.mark.slow("compiles attention to listed rows, and streams, for emulation")]
T = GGMLType
SEGMENTS = [Segment(9, cell=3, pos=40, window=-20), Segment(1, cell=300, pos=200, window=-160),
            Segment(2, cell=600, pos=62, window=40), Segment(2, pos=1, window=120)]  # fmt: skip


# --- streams ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("n", "cols"), [(4, 1028), (1, 16), (3, 30), (40, 64)])
@pytest.mark.parametrize("eps", [1e-6, 0.0])
def test_streams(n: int, cols: int, eps: float) -> None:
    rng = np.random.default_rng(n)
    size = n * (n + 2)
    base = rng.standard_normal(size).astype(np.float32)
    run = GraphRun(all_rules(), {"scale": np.float32([0.7, 1.2, 1.5]), "base": base, "head": base[:n]})
    x, out = run.input("x", _random(rng, 5, n * cols)), run.input("out", _random(rng, 5, cols))
    logits, few = run.input("logits", 3 * _random(rng, 5, size)), run.input("few", _random(rng, 5, n))
    g, scale = run.graph, run.weight("scale")
    weights = g.record(StreamWeights(logits, scale, run.weight("base"), n, 4, eps), "weights")
    head = g.record(StreamWeights(few, scale, run.weight("head"), n, 4, eps), "head_weights")
    nodes = [weights, head, g.record(StreamSum(x, weights, n), "sum"), g.record(StreamSum(x, head, n), "last"),
             g.record(StreamMix(x, out, weights, n), "mix")]  # fmt: skip
    for found, wanted in run(*nodes):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("n", "cols"), [(4, 1028), (1, 16), (3, 30)])
def test_streams_that_are_not_mixed(n: int, cols: int) -> None:
    rng = np.random.default_rng(n)
    base = rng.standard_normal(2 * n).astype(np.float32)
    run = GraphRun(all_rules(), {"scale": np.float32([0.7, 1.2]), "base": base})
    x, out = run.input("x", _random(rng, 5, n * cols)), run.input("out", _random(rng, 5, cols))
    logits, g = run.input("logits", 3 * _random(rng, 5, 2 * n)), run.graph
    made = StreamWeights(logits, run.weight("scale"), run.weight("base"), n, 0, 0.1, 1.7)
    weights = g.record(made, "weights")
    nodes = [weights, g.record(StreamSum(x, weights, n), "sum"), g.record(StreamMix(x, out, weights, n), "mix")]
    for found, wanted in run(*nodes):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("n", "cols"), [(4, 640), (2, 16), (3, 30)])
def test_gated_streams(n: int, cols: int) -> None:
    """Also where a key has nothing in common with its query."""
    rng = np.random.default_rng(n)
    run = GraphRun(all_rules())
    x, gate, out = (run.input(name, _random(rng, 5, size)) for name, size in
                    (("x", n * cols), ("gate", n * cols), ("out", cols)))  # fmt: skip
    logits, none = run.input("logits", 3 * _random(rng, 5, n)), run.input("none", np.zeros((5, n * cols), np.float32))
    g = run.graph
    ops = (GatedStreams(x, gate, n), StreamAdd(x, out, n, logits, scale=0.3), StreamMatch(x, gate, out, n),
           StreamMatch(none, gate, out, n))  # fmt: skip
    nodes = [g.record(op, f"{op.name}_{i}") for i, op in enumerate(ops)]
    for found, wanted in run(*nodes):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("n", "cols"), [(4, 1028), (2, 16), (3, 30), (4, 300)])
def test_predicted_streams(n: int, cols: int) -> None:
    rng = np.random.default_rng(n)
    run = GraphRun(all_rules())
    x, out = run.input("x", _random(rng, 5, n * cols)), run.input("out", _random(rng, 5, cols))
    pairs, shares = run.input("pairs", _random(rng, 5, n * n)), run.input("shares", _random(rng, 5, n))
    small = _random(rng, 5, n * cols)
    small[1:3, cols : 2 * cols] *= 1e-4
    small[2, :cols] = 0
    g, uneven = run.graph, run.input("uneven", small)
    nodes = [g.record(op, op.name) for op in (
        StreamPredict(x, pairs, n), StreamAdd(x, out, n, shares), StreamAdd(x, out, n, first=1),
        StreamLevel(uneven, n, 1e-5), Cut(x, 1.6), Cut(x, -0.4),
    )]  # fmt: skip
    for found, wanted in run(*nodes):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("n", "cols"), [(1, 64), (9, 1028), (3, 30), (40, 16)])
def test_attention_to_earlier_outputs(n: int, cols: int) -> None:
    rng = np.random.default_rng(n)
    run = GraphRun(all_rules(), {"w": _random(rng, cols)})
    kept, x = run.input("kept", _random(rng, 5, n * cols)), run.input("x", 3 * _random(rng, 5, cols))
    ((found, wanted),) = run(run.graph.record(ResidualAttn(kept, x, run.weight("w"), 1e-5), "y"))
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


def test_tables_of_earlier_positions() -> None:
    run = GraphRun(all_rules())
    ((found, wanted),) = run(run.graph.rope_table([1.0, 0.3], 1.0, "table", 3), n_tokens=5, pos=1)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


# --- compressed attention ---------------------------------------------------------------------------------------------
class Oracle:
    """What ops compute with, in float64: leaves, caches as the device left them, and values computed before."""

    dtype = np.float64

    def __init__(self, run: Run, segments: Sequence[Segment], values: dict[Node, np.ndarray]) -> None:
        self.run, self.values, start, found = run, values, 0, []
        for s in segments:
            found.append(micro_batch.Segment(start, s.n_tokens, s.cell, s.pos, window_cell=s.window))
            start += s.n_tokens
        pos = np.concatenate([np.arange(s.pos, s.n_kv) for s in found])
        none = np.zeros(0, np.int64)
        self.state = micro_batch.MicroBatch(np.zeros(start, np.int32), pos, none, none, tuple(found))

    def value(self, node: Node) -> np.ndarray:
        return self.values[node].astype(np.float64) if node.dtype == "f32" else self.values[node]

    def cached(self, cache: Cache) -> np.ndarray:
        return decode(self.run.caches[cache], cache.type)

    def weight(self, w: Weight) -> np.ndarray:
        data = self.run.weights[w].reshape(w.ne1, -1)[:, : w.ne0].astype(np.float64)
        return data if w.ne1 > 1 else data[0]


def _random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def _weight(run: Run, name: str, values: np.ndarray) -> Weight:
    """A float32 weight with rows as the device has them."""
    w = Weight(name, T.F32, values.shape[::-1])
    rows = np.atleast_2d(values)
    stored = np.full((len(rows), device_row_bytes(T.F32, w.ne0) // 4), np.nan, np.float32)
    stored[:, : w.ne0] = rows
    run.weights[w] = stored
    return w


class Pooled:
    """Attention to a window and to entries, which an indexer may choose; everything is stored first."""

    def __init__(self, ratio: int, *, parts: int = 1, width: int = 64, heads: int = 5, window: int = 16, top: int = 0,
                 type_: T = T.F16, per: Per = Per.WINDOW, tokens: int = 24, **more: Any) -> None:  # fmt: skip
        self.run = run = Run(tokens, 1024, window_cells=200, **more)
        g, rng = run.graph, np.random.default_rng(1)
        rows = g.cache("parts", 2 * width * parts, T.F32, per=per)
        g.kv_store(rows, new := run.input("new_parts", rows.cols), "store_parts")
        bias = _weight(run, "ape", _random(rng, ratio, width * parts))
        self.entry = g.record(Pool(new, rows, bias, width, ratio), "entry")
        pooled, recent = g.cache("entry", width, type_), g.cache("k", width, type_, per=per)
        g.record(PooledStore(pooled, self.entry, ratio), "store_entry")
        g.kv_store(recent, run.input("new_k", width), "store_k")
        q, chosen = run.input("q", heads * width), None
        if top:
            keys = g.cache("index", 32, T.F16)
            g.record(PooledStore(keys, run.input("new_index", 32), ratio), "store_index")
            heads_of = HeadSlice(run.input("qi", 4 * 32), 0, 32, 32)
            chosen = g.index_top_k(heads_of, run.input("wi", 4), keys, "top", n_head=4, top_k=top, ratio=ratio)
        most = top or 1024 // ratio
        self.cells = g.record(PooledCells(q, recent, chosen, window, ratio, most), "cells")
        sinks = _weight(run, "sinks", _random(rng, heads))
        self.node = g.record(
            PooledAttn(HeadSlice(q, 0, width, width), recent, pooled, self.cells, sinks, heads, 0.1, window, ratio),
            "kqv",
        )
        self.tables = [self.cells] if chosen is None else [chosen, self.cells]

    def __call__(self, segments: Sequence[Segment], seed: int = 3) -> tuple[dict[Node, np.ndarray], list[np.ndarray]]:
        """Leaves, then the values of `nodes`."""
        rng, run = np.random.default_rng(seed), self.run
        for cache in run.graph.caches.values():
            fill(run, cache, segments, rng)
        values = {x: _random(rng, sum(s.n_tokens for s in segments), x.cols) for x in run.leaves}
        found = run(segments, values, *self.nodes, seed=seed)
        return values, [
            x if node.dtype == "f32" else x.view(np.int32) for x, node in zip(found, self.nodes, strict=True)
        ]

    @property
    def nodes(self) -> list[Node]:
        return [self.entry, *self.tables, self.node]

    def check(self, segments: Sequence[Segment], tolerance: float = 5e-3) -> list[str]:
        values, found = self(segments)
        oracle = Oracle(self.run, segments, values)
        for node, value in zip(self.nodes, found, strict=True):
            wanted = node.op.compute(oracle)  # type: ignore[arg-type]
            if node.dtype == "f32":
                np.testing.assert_allclose(value, wanted, atol=1e-5 if node is self.entry else tolerance)
            else:
                np.testing.assert_array_equal(value, wanted)
            values[node] = value
        return self.run.kernels()


@pytest.mark.parametrize(
    "settings",
    [
        {"ratio": 8}, {"ratio": 4, "parts": 2}, {"ratio": 4, "parts": 2, "top": 6},
        {"ratio": 4, "parts": 2, "top": 6, "per": Per.CELL, "heads": 20, "width": 512, "window": 40},
        {"ratio": 8, "type_": T.Q8_0, "heads": 16}, {"ratio": 8, "type_": T.BF16}, {"ratio": 8, "type_": T.F32},
        {"ratio": 8, "type_": T.Q4_0, "width": 128}, {"ratio": 8, "type_": T.Q8_KV},
        {"ratio": 4, "limits": SMALL, "tokens": 100},
    ],
    ids=str,
)  # fmt: skip
def test_pooled_attention(settings: dict[str, Any]) -> None:
    kernels = Pooled(**settings).check(SEGMENTS, 2e-2 if settings.get("type_") is T.BF16 else 5e-3)
    assert f"attn_rows_{'any' if 'type_' in settings else 'f16'}" in kernels


def test_a_token_does_not_depend_on_its_batch() -> None:
    pooled = Pooled(4, parts=2, top=100, tokens=8, limits=LIMITS, batch_invariant=True)
    values, found = pooled([Segment(6, cell=5, pos=600, window=-500)])
    assert "attn_combine" in pooled.run.kernels()
    for i in range(6):
        rows = {x: v[i : i + 1] for x, v in values.items()}
        (alone,) = pooled.run([Segment(1, cell=5, pos=600 + i, window=-500)], rows, pooled.node)
        np.testing.assert_array_equal(alone[0], found[-1][i])


def test_what_has_no_kernel_is_refused() -> None:
    for width in (24, 1024):
        with pytest.raises(UnsupportedError, match=f"up to 576 columns, 512 of them values, .* not of {width}"):
            Pooled(8, width=width).check(SEGMENTS)


@pytest.mark.parametrize(("width", "window", "type_"), [(512, 19, T.F16), (48, 20, T.F16), (32, 20, T.Q8_0)])
@pytest.mark.parametrize("sinks", [False, True])
def test_windows_of_shared_rows(width: int, window: int, type_: T, sinks: bool) -> None:
    """Layers without entries: two of them share their lists."""
    run, rng, heads = Run(24, 1024, window_cells=200), np.random.default_rng(4), 18
    g, nodes = run.graph, []
    for g.il in range(2):
        cache = g.cache("k", width, type_, per=Per.WINDOW)
        g.kv_store(cache, run.input(f"new{g.il}", width), "store")
        row = HeadSlice(cache, 0, width, 0)
        q = HeadSlice(run.input(f"q{g.il}", heads * width), 0, width, width)
        nodes.append(g.attention(
            [q], [row], row, "kqv", n_head=heads, n_head_kv=1, scale=0.1, window=window, flash=True,
            sinks=_weight(run, f"sinks{g.il}", _random(rng, heads)) if sinks else None,
        ))  # fmt: skip
        fill(run, cache, SEGMENTS, rng)
    run.weights.update({w: x[0] for w, x in run.weights.items()})
    values = {x: _random(rng, sum(s.n_tokens for s in SEGMENTS), x.cols) for x in run.leaves}
    for node, found in zip(nodes, run(SEGMENTS, values, *nodes), strict=True):
        np.testing.assert_allclose(found, expected(run, node, SEGMENTS, values), atol=5e-3)
    assert [k for k in run.kernels() if k != "attn_combine"] == [
        "pooled_cells",
        *[f"attn_rows_{'f16' if type_ is T.F16 else 'any'}"] * 2,
    ]


# --- rows before all positions ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("latent", "rope", "n_sink", "window", "type_"),
    [(64, 16, 3, 20, T.F16), (512, 64, 40, 300, T.F16), (96, 32, 128, 20, T.Q8_0), (64, 32, 1, 300, T.F32)],
)
def test_rows_before_all_positions(latent: int, rope: int, n_sink: int, window: int, type_: T) -> None:
    run, rng, heads, width = Run(24, 1024, window_cells=200), np.random.default_rng(2), 18, latent + rope
    g = run.graph
    cache = g.cache("kv", width, type_, per=Per.WINDOW if window < 200 else Per.CELL)
    g.kv_store(cache, run.input("new", width), "store")
    q, q_latent = run.input("q", heads * (rope + 32)), run.input("q_latent", heads * latent)
    cells = g.record(PooledCells(q, cache, None, window, 1, 0), "cells")
    prefix = _weight(run, "sink_rows", _random(rng, n_sink, width))
    parts = HeadSlice(q, 32, rope, rope + 32), HeadSlice(q_latent, 0, latent, latent)
    node = g.record(
        PrefixAttn(parts, HeadSlice(cache, 0, width, 0), HeadSlice(cache, rope, latent, 0), prefix, cells, heads, 0.1),
        "o",
    )
    fill(run, cache, SEGMENTS, rng)
    values = {x: _random(rng, sum(s.n_tokens for s in SEGMENTS), x.cols) for x in run.leaves}
    table, found = run(SEGMENTS, values, cells, node)
    values[cells] = table.view(np.int32)
    wanted = node.op.compute(Oracle(run, SEGMENTS, values))  # type: ignore[arg-type]
    np.testing.assert_allclose(found, wanted, atol=5e-3)


# --- models -----------------------------------------------------------------------------------------------------------
def _errors(path: Path, cfg: GraphConfig, **changes: Any) -> np.ndarray:
    """Largest error of every row, in standard deviations: a prompt, then single tokens."""
    wanted = cuda_sessions.transcript(ReferenceSession(path, cfg), 70, 4)
    with Session.open(cuda_sessions.config(path, **changes)) as session:
        found = cuda_sessions.transcript(session, 70, 4)
    return np.abs(found - wanted).max(axis=1) / wanted.std()


@pytest.mark.parametrize(
    ("cfg", "changes"),
    [
        ({}, {}), ({}, {"n_gpu_layers": 2, "n_ubatch": 32, "n_batch": 32}), ({"index_top_k": 0}, {"dsa": False}),
        ({"type_k": T.Q8_0, "k_hadamard": True}, {"type_k": "q8_0", "k_hadamard": True}),
    ],
    ids=str,
)  # fmt: skip
def test_deepseek4(
    cfg: dict[str, Any], changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "open_devices", cuda_sessions.Opener())
    model = tiny_deepseek4(**({"expert_used_count": 8} if "type_k" in cfg else {}))  # codes double rounding errors
    error = _errors(write_model(model, tmp_path / "m.gguf"), GraphConfig(n_ctx=256, **cfg), **changes)
    # Experts and entries that tie up to rounding may be chosen differently.
    assert (error <= 0.05).mean() >= 0.9, np.sort(error)


@pytest.mark.parametrize(
    ("top_k", "changes", "kernel"),
    [(40, {"n_gpu_layers": 3}, "attn_rows_f16"), (40, {"type_k": "f32"}, "attn_any"),
     (0, {"dsa": False, "mla": 1}, "attn_rows_f16"), (0, {"dsa": False}, "attn_rows_f16")],
    ids=str,
)  # fmt: skip
def test_hy_v4(
    top_k: int, changes: dict[str, Any], kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chosen positions that layers share, and all positions, with sinks."""
    opener = cuda_sessions.Opener()
    monkeypatch.setattr(gpus, "open_devices", opener)
    path = write_model(tiny("hy_v4", **INDEXER | {"attention.indexer.top_k": 40}), tmp_path / "m.gguf")
    error = _errors(path, GraphConfig(n_ctx=256, index_top_k=top_k or 0), **changes)
    assert kernel in set().union(*(d.launches for d in opener.devices.values()))
    assert (error <= 0.05).mean() >= 0.85 and np.median(error) <= 0.02, np.sort(error)


def test_kimi_k3_on_two_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers on the GPU attend to outputs of layers on the CPU."""
    monkeypatch.setattr(gpus, "open_devices", cuda_sessions.Opener())
    model = tiny("kimi-k3", expert_used_count=8)
    error = _errors(write_model(model, tmp_path / "m.gguf"), GraphConfig(n_ctx=256), n_gpu_layers=2)
    assert (error <= 0.05).mean() >= 0.9, np.sort(error)


@pytest.mark.parametrize(("top_k", "share", "changes"), [(80, 0.95, {"n_gpu_layers": 2}), (24, 0.8, {})])
def test_openpangu(
    top_k: int, share: float, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all experts in use: rounding of products changes which ones, and which positions, this model chooses."""
    monkeypatch.setattr(gpus, "open_devices", cuda_sessions.Opener())
    model = tiny_openpangu(expert_used_count=8, **{"attention.indexer.top_k": top_k})
    error = _errors(write_model(model, tmp_path / "m.gguf"), GraphConfig(n_ctx=256), **changes)
    assert (error <= 0.15).mean() >= share and np.median(error) <= 0.06, np.sort(error)


@pytest.mark.parametrize(
    ("cfg", "changes"),
    [({}, {}), ({}, {"n_gpu_layers": 2, "n_ubatch": 32, "n_batch": 32}), ({"index_top_k": 0}, {"dsa": False})],
    ids=str,
)  # fmt: skip
def test_qwen4exp(
    cfg: dict[str, Any], changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of n-grams stays in RAM, whatever their layer does."""
    monkeypatch.setattr(gpus, "open_devices", cuda_sessions.Opener())
    path = write_model(tiny("qwen4exp", expert_used_count=8), tmp_path / "m.gguf")
    error = _errors(path, GraphConfig(n_ctx=256, **cfg), **changes)
    assert (error <= 0.1).mean() >= 0.9, np.sort(error)
