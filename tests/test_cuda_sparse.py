"""The indexer and sparse attention on the emulated device, against NumPy and against attention to all positions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cuda_sessions
import numpy as np
import pytest
import test_sparse_attention
from cuda_attention import LIMITS, SMALL, Run, Segment, decode, error, expected, fill
from cuda_emulation import needs_emulation
from cuda_sessions import Opener
from factories import tiny_model
from gguf_files import write_model

from ikcli.backends.cuda import attention_sparse
from ikcli.backends.cuda.lower import DeviceLimits
from ikcli.engine.run import gpus
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.engine.run.session import Session
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.graph import HeadSlice, Node, Rows
from ikcli.graph.ops_sparse import NONE
from ikcli.measure.kl_divergence import KlParams
from ikcli.measure.kl_divergence import run as run_kl
from ikcli.measure.kld_file import BaseReader
from ikcli.models import GraphConfig

pytestmark = needs_emulation
T = GGMLType


def index(run: Run, n_head: int, width: int, top_k: int, type_: T = T.F16) -> Node:
    """An indexer with queries, weights and keys of its own."""
    g = run.graph
    q, w, k = run.input("index_q", n_head * width), run.input("index_w", n_head), run.input("index_k", width)
    cache = g.cache("index", width, type_)
    g.kv_store(cache, k, "index_store")
    return g.index_top_k(HeadSlice(q, 0, width, width), w, cache, "chosen", n_head=n_head, top_k=top_k)


def latent(run: Run, n_head: int, chosen: Node | None, type_: T, widths: tuple[int, int] = (64, 512)) -> Node:
    """Absorbed attention, to chosen positions or to all."""
    g, (rope, rank) = run.graph, widths
    q, q2 = run.input("q", n_head * 2 * rope), run.input("q2", n_head * rank)
    row = run.input("kv", rope + rank)
    cache = g.cache("kv", rope + rank, type_)
    g.kv_store(cache, row, "store")
    parts = [HeadSlice(q, rope, rope, 2 * rope), HeadSlice(q2, 0, rank, rank)]
    k, v = [HeadSlice(cache, 0, rope + rank, 0)], HeadSlice(cache, rope, rank, 0)
    shape = {"n_head": n_head, "n_head_kv": 1, "scale": (rope + rank) ** -0.5}
    if chosen is None:
        return g.attention(parts, k, v, "kqv", flash=True, **shape)
    return g.sparse_attention(parts, k, v, chosen, "kqv", **shape)


def compute(
    run: Run, segments: Sequence[Segment], *results: Node, seed: int = 3
) -> tuple[dict[Node, np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    for cache in run.graph.caches.values():
        fill(run, cache, segments, rng)
    rows = {Rows.TOKENS: sum(s.n_tokens for s in segments)}
    values = {x: rng.standard_normal((rows[x.rows.symbol], x.cols)).astype(np.float32) for x in run.leaves}
    return values, run(segments, values, *results, seed=seed)


def wanted_cells(run: Run, node: Node, segments: Sequence[Segment], values: dict[Node, np.ndarray]) -> np.ndarray:
    """The choice, from scores in float64."""
    op, token = node.op, 0
    out = np.full((sum(s.n_tokens for s in segments), op.top_k), NONE)
    for s in segments:
        k = decode(run.caches[op.k][s.cell : s.cell + s.pos + s.n_tokens], op.k.type)
        for n in range(s.pos + 1, s.pos + s.n_tokens + 1):
            q = values[op.q.node][token].astype(np.float64).reshape(op.n_head, -1)
            scores = values[op.weights][token].astype(np.float64) @ np.maximum(q @ k[:n].T, 0)
            cells = np.sort(np.argsort(-scores, kind="stable")[: op.top_k])
            out[token, : len(cells)] = s.cell + cells
            token += 1
    return out


def masked(run: Run, node: Node, cells: np.ndarray, segments: Sequence[Segment], values: dict[Node, np.ndarray]
           ) -> np.ndarray:  # fmt: skip
    """Sparse attention of absorbed heads in float64."""
    op, out, token = node.op, [], 0
    rows = {p.source: values[p.source].astype(np.float64) for p in op.q}
    for _ in range(sum(s.n_tokens for s in segments)):
        own = cells[token][cells[token] != NONE]
        kv = decode(run.caches[op.k[0].source][own], op.k[0].source.type)
        for h in range(op.n_head):
            q = np.concatenate([rows[p.source][token, p.offset + h * p.head_stride :][: p.width] for p in op.q])
            x = kv @ q * op.scale
            p = np.exp(x - x.max())
            out.append(p / p.sum() @ kv[:, op.v.offset :][:, : op.v.width])
        token += 1
    return np.array(out).reshape(token, -1)


# --- the choice -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("heads", "width", "top_k", "type_", "segments"),
    [
        (64, 128, 48, T.F16, [Segment(3, 2, 297)]),
        (32, 128, 200, T.F16, [Segment(1, 5, 600)]),
        (4, 32, 7, T.F16, [Segment(20, 3, 0), Segment(2, 100, 30), Segment(1, 300, 4)]),
        (70, 64, 33, T.Q8_0, [Segment(2, 0, 90)]),
        (3, 16, 5, T.BF16, [Segment(18, 1, 40)]),
        (16, 32, 64, T.F32, [Segment(2, 1, 63)]),
    ],
)  # fmt: skip
def test_choice(heads: int, width: int, top_k: int, type_: T, segments: list[Segment]) -> None:
    """Within the rounding of keys to f16, scores of positions that are chosen otherwise are equal."""
    run = Run(24, 640)
    node = index(run, heads, width, top_k, type_)
    values, (found,) = compute(run, segments)
    cells, wanted = found.view(np.int32), wanted_cells(run, node, segments, values)
    assert (np.diff(np.where(cells == NONE, 1 << 30, cells), axis=1) >= 0).all()  # ascending, then none
    assert ((cells == NONE) == (wanted == NONE)).all()
    other = sum(len(np.setdiff1d(a, b)) for a, b in zip(cells, wanted, strict=True))
    assert other <= (0.01 * wanted.size if type_ in (T.Q8_0, T.F32) else 0)


def test_equal_scores_and_more_tokens_than_scores_have_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal scores the first positions are chosen; groups of 16 tokens follow each other."""
    monkeypatch.setattr(attention_sparse, "_SCORE_BYTES", 1)
    run, segments = Run(40, 1536), [Segment(37, 10, 1400)]
    node = index(run, 2, 16, 700)
    rng = np.random.default_rng(2)
    (cache,) = run.graph.caches.values()
    fill(run, cache, segments, rng)
    run.caches[cache].view(np.float16)[:] = 1
    values = {x: np.ones((37, x.cols), np.float32) for x in run.leaves}
    (found,) = run(segments, values)
    assert run.kernels() == ["index_scores", "index_choose"] * 3
    assert (found.view(np.int32) == 10 + np.arange(node.cols)).all()


def test_a_score_that_is_not_a_number_is_chosen() -> None:
    run, segments = Run(1, 256), [Segment(1, 0, 199)]
    index(run, 4, 32, 8)
    rng = np.random.default_rng(5)
    (cache,) = run.graph.caches.values()
    fill(run, cache, segments, rng)
    run.caches[cache].view(np.float16)[77, 3] = np.nan
    (found,) = run(segments, {x: rng.standard_normal((1, x.cols)).astype(np.float32) for x in run.leaves})
    assert 77 in found.view(np.int32)


def test_sizes_without_kernels() -> None:
    run = Run(1, 64)
    index(run, 2, 144, 8)
    with pytest.raises(UnsupportedError, match="a multiple of 16, not of 144; use -ngl 0, or --no-dsa"):
        run.program()


# --- attention --------------------------------------------------------------------------------------------------------
MORE_KERNELS = "compiles kernels of its own"
FEW_SMS = DeviceLimits((9, 0), 3, 232448, 233472, 1 << 20, "3 SMs")


@pytest.mark.slow(MORE_KERNELS)
@pytest.mark.parametrize(
    ("heads", "type_", "limits", "segments", "kernels"),
    [
        (16, T.F16, LIMITS, [Segment(2, 3, 199)], ["f16s_r16", "combine"]),
        (40, T.F16, FEW_SMS, [Segment(2, 3, 250), Segment(3, 300, 20)], ["f16s_r32"]),
        (5, T.F16, SMALL, [Segment(1, 3, 260)], ["f16_r16", "combine"]),
        (20, T.BF16, LIMITS, [Segment(1, 1, 150)], ["bf16_r32", "combine"]),
        (16, T.Q8_0, LIMITS, [Segment(1, 1, 150)], ["q8_r16", "combine"]),
        (24, T.Q8_0, FEW_SMS, [Segment(2, 1, 150)], ["q8_r32"]),
        (12, T.Q6_0, LIMITS, [Segment(1, 1, 150)], ["any_r16", "combine"]),
        (24, T.Q4_0, FEW_SMS, [Segment(2, 1, 150)], ["any_r32"]),
    ],
)  # fmt: skip
def test_absorbed(heads: int, type_: T, limits: DeviceLimits, segments: list[Segment], kernels: list[str]) -> None:
    run = Run(8, 640, limits)
    chosen = index(run, 4, 32, 100)
    node = latent(run, heads, chosen, type_)
    values, (cells, found) = compute(run, segments, chosen, node)
    assert [k.removeprefix("attn_").removeprefix("mla_sparse_") for k in run.kernels()[2:]] == kernels
    bound = 5e-3 if type_ == T.BF16 else 1e-3
    assert error(found, masked(run, node, cells.view(np.int32), segments, values)) < bound


@pytest.mark.parametrize(("type_", "widths"), [(T.F16, (8, 24)), (T.Q8_0, (32, 64)), (T.F32, (64, 512))])
def test_other_shapes(type_: T, widths: tuple[int, int]) -> None:
    run, segments = Run(8, 400), [Segment(3, 5, 120), Segment(1, 200, 60)]
    chosen = index(run, 4, 32, 50)
    node = latent(run, 3, chosen, type_, widths)
    values, (cells, found) = compute(run, segments, chosen, node)
    assert run.kernels()[-1] == "attn_any"
    assert error(found, masked(run, node, cells.view(np.int32), segments, values)) < 1e-5


@pytest.mark.slow(MORE_KERNELS)
@pytest.mark.parametrize("type_", [T.F16, T.Q8_0])
def test_all_positions_are_dense_attention(type_: T) -> None:
    """Where as many may be chosen as there are."""
    segments = [Segment(3, 5, 120), Segment(1, 200, 60)]
    run = Run(4, 300)
    node = latent(run, 16, index(run, 4, 32, 140), type_)
    values, (found,) = compute(run, segments, node)
    dense = Run(4, 300)
    other = latent(dense, 16, None, type_)
    dense.caches.update({c: run.caches[c] for c in dense.graph.caches.values()})
    same = {x: next(v for y, v in values.items() if y.name == x.name) for x in dense.leaves}
    assert error(found, expected(dense, other, segments, same)) < 1e-3
    assert error(found, dense(segments, same)[0]) < 5e-4


@pytest.mark.slow(MORE_KERNELS)
def test_a_token_has_the_same_bits_beside_others() -> None:
    found = []
    for segments in ([Segment(1, 3, 299)], [Segment(1, 3, 299), Segment(2, 310, 150)]):
        run = Run(4, 640, FEW_SMS, batch_invariant=True)
        node = latent(run, 16, index(run, 4, 32, 100), T.F16)
        rng = np.random.default_rng(1)
        for cache in run.graph.caches.values():
            fill(run, cache, segments, rng)
            rows = np.random.default_rng(cache.cols).standard_normal((640, cache.cols)).astype(np.float16)
            run.caches[cache][:] = rows.view(np.uint8)
        values = {x: np.random.default_rng(x.cols).standard_normal((3, x.cols)).astype(np.float32) for x in run.leaves}
        n = sum(s.n_tokens for s in segments)
        found.append(run(segments, {x: v[:n] for x, v in values.items()}, node)[0][0])
    assert np.array_equal(*found)


# --- sessions ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, of which the second uses the choice of the first."""
    keys = test_sparse_attention.keys(top_k=20)
    model = tiny_model("glm-dsa", optional=("kv_b.weight", "exp_probs_b.bias"), **keys)
    return write_model(model, tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.mark.parametrize(
    "changes",
    [
        {"n_gpu_layers": 2},
        *(pytest.param(x, marks=pytest.mark.slow("further settings of the same"))
          for x in ({}, {"mla": 0}, {"tensor_split": (1.0, 2.0)}, {"dsa": False})),
    ],
    ids=str,
)  # fmt: skip
def test_models(path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, then single tokens; layers that share a choice on different devices."""
    opener = Opener()
    monkeypatch.setattr(gpus, "open_devices", opener)
    f32, ids, chooses = GGMLType.F32, cuda_sessions.tokens(34), changes.get("dsa", True)
    cfg = GraphConfig(n_ctx=256, type_k=f32, type_v=f32, type_index=f32, index_top_k=-1 if chooses else 0)
    wanted = ReferenceSession(path, cfg).decode(Batch.single(ids, logits="all"))
    with Session.open(cuda_sessions.config(path, **changes)) as session:
        found = [np.array(session.decode(Batch.single(ids[:31], logits="all")))]
        found += [np.array(session.decode(Batch.single(ids[i : i + 1], i))) for i in range(31, 34)]
        kernels = set().union(*(d.launches for d in opener.devices.values()))
    assert ("index_choose" in kernels) == chooses
    error = np.abs(np.concatenate(found) - wanted).max(axis=1) / wanted.std()
    assert (error < 0.02).mean() > 0.85 and (error[:20] < 0.02).all()  # scores near a tie may fall the other way


@pytest.mark.slow("two chunks of 256 tokens on the emulated device")
def test_golden_log_probabilities(shared_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of torch: 48 of up to 256 positions."""
    monkeypatch.setattr(gpus, "open_devices", Opener())
    folder, name = shared_dir / "golden" / "arch", "glm-dsa-sparse"
    bounds = json.loads((folder / "expected.json").read_text())[name]["bounds"]["f16"]
    base = BaseReader(folder / f"{name}.kld")
    settings = {"command": "perplexity", "n_ctx": base.n_ctx, "n_batch": base.n_ctx}
    with Session.open(cuda_sessions.config(folder / f"{name}.gguf", **settings)) as session:
        kld = run_kl(session, base, KlParams(n_batch=base.n_ctx)).positions.kld
    assert np.median(kld) <= bounds["median"] and np.quantile(kld, 0.99) <= bounds["p99"]
