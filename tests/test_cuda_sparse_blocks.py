"""The indexer of blocks and attention to the blocks that each KV head chose, on the emulated device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cuda_sessions
import numpy as np
import pytest
from cuda_attention import LIMITS, SMALL, Run, Segment, decode, fill
from cuda_emulation import needs_emulation
from factories import tiny_model
from gguf_files import write_model
from test_sparse_attention import m3_keys

from ikcli.backends.cuda import attention_sparse
from ikcli.engine.run import gpus
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.engine.run.session import Session
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.graph import HeadSlice, Node
from ikcli.graph.ops_sparse import NONE
from ikcli.models import GraphConfig

pytestmark = [needs_emulation, pytest.mark.slow("compiles attention to blocks for emulation")]
T = GGMLType


class Blocks:
    """An indexer with a head for every KV head, and attention of `n_head` heads to what each of them chooses."""

    def __init__(self, n_kv: int, n_head: int, top_k: int, block: int, local: int = 1, *, type_: T = T.F16,
                 type_v: T | None = None, width: int = 128, index: int = 32, tokens: int = 24, cells: int = 1024,
                 **more: Any) -> None:  # fmt: skip
        self.run = run = Run(tokens, cells, **more)
        self.n_kv, self.n_head, self.top_k, self.block, self.local = n_kv, n_head, top_k, block, local
        self.width, self.index, g = width, index, run.graph
        self.q_index, self.q = run.input("qi", n_kv * index), run.input("q", n_head * width)
        self.k_index = g.cache("index", index, T.F16)
        self.k, self.v = g.cache("k", n_kv * width, type_), g.cache("v", n_kv * width, type_v or type_)
        for cache in (self.k_index, self.k, self.v):
            g.kv_store(cache, run.input(f"new_{cache.kind}", cache.cols), f"store_{cache.kind}")
        self.chosen = g.index_top_blocks(
            HeadSlice(self.q_index, 0, index, index), self.k_index, "top", n_head=n_kv, top_k=top_k, block=block,
            local=local,
        )  # fmt: skip
        self.node = g.sparse_attention(
            [HeadSlice(self.q, 0, width, width)], [HeadSlice(self.k, 0, width, width)],
            HeadSlice(self.v, 0, width, width), self.chosen, "kqv", n_head=n_head, n_head_kv=n_kv, scale=0.1,
            lists=n_kv, block=block,
        )  # fmt: skip

    def __call__(self, segments: Sequence[Segment], seed: int = 3) -> tuple[dict[Node, np.ndarray], np.ndarray, Any]:
        """Leaves, the choice (tokens, lists, cells), attention."""
        rng, n = np.random.default_rng(seed), sum(s.n_tokens for s in segments)
        for cache in self.run.graph.caches.values():
            fill(self.run, cache, segments, rng)
        values = {x: rng.standard_normal((n, x.cols)).astype(np.float32) for x in self.run.leaves}
        chosen, found = self.run(segments, values, self.chosen, self.node, seed=seed)
        return values, chosen.view(np.int32).reshape(n, self.n_kv, -1), found

    def wanted_cells(self, segments: Sequence[Segment], values: dict[Node, np.ndarray]) -> np.ndarray:
        out = np.full((sum(s.n_tokens for s in segments), self.n_kv, self.top_k * self.block), NONE)
        keys, token = decode(self.run.caches[self.k_index], T.F16), 0
        for s in segments:
            for n in range(s.pos + 1, s.pos + s.n_tokens + 1):
                for h, q in enumerate(values[self.q_index][token].astype(np.float64).reshape(self.n_kv, -1)):
                    starts = np.arange(0, n, self.block)
                    best = np.maximum.reduceat(keys[s.cell : s.cell + n].astype(np.float64) @ q, starts)
                    best[-self.local :] = np.inf
                    blocks = np.sort(np.argsort(-best, kind="stable")[: self.top_k])
                    at = (starts[blocks, None] + np.arange(self.block)).ravel()
                    at = at[at < n] + s.cell
                    out[token, h, : len(at)] = at
                token += 1
        return out

    def attended(self, cells: np.ndarray, values: dict[Node, np.ndarray]) -> np.ndarray:
        """Attention to these cells in float64."""
        k, v = (decode(self.run.caches[c], c.type).astype(np.float64).reshape(-1, self.n_kv, self.width)
                for c in (self.k, self.v))  # fmt: skip
        out = []
        for token, q in enumerate(values[self.q].astype(np.float64).reshape(len(cells), self.n_kv, -1, self.width)):
            for h in range(self.n_kv):
                at = cells[token, h][cells[token, h] != NONE]
                p = np.exp(0.1 * q[h] @ k[at, h].T)
                out.append(p / p.sum(axis=1, keepdims=True) @ v[at, h])
        return np.concatenate(out).reshape(len(cells), -1)

    def check(self, segments: Sequence[Segment], tolerance: float = 4e-3) -> list[str]:
        values, cells, found = self(segments)
        np.testing.assert_array_equal(cells, self.wanted_cells(segments, values))
        np.testing.assert_allclose(found, self.attended(cells, values), atol=tolerance)
        return self.run.kernels()


SEGMENTS = [Segment(9, cell=3, pos=40), Segment(1, cell=300, pos=200), Segment(2, cell=600, pos=62), Segment(1, pos=1)]


@pytest.mark.parametrize(
    ("n_kv", "n_head", "top_k", "block", "local"),
    [(2, 8, 2, 32, 1), (1, 20, 3, 16, 2), (4, 8, 1, 64, 1), (3, 3, 4, 16, 1)],
)
def test_blocks(n_kv: int, n_head: int, top_k: int, block: int, local: int) -> None:
    kernels = Blocks(n_kv, n_head, top_k, block, local).check(SEGMENTS)
    assert kernels[:3] == ["index_block_scores", "index_choose_blocks", "attn_blocks_128_f16"]


@pytest.mark.parametrize(
    ("type_", "type_v", "kind"),
    [(T.BF16, None, "bf16"), (T.Q8_0, None, "q8"), (T.Q8_0, T.Q4_0, "any"), (T.F32, None, "any")],
)
def test_cache_types(type_: T, type_v: T | None, kind: str) -> None:
    kernels = Blocks(2, 4, 3, 16, type_=type_, type_v=type_v).check(SEGMENTS, 3e-2 if kind == "bf16" else 8e-3)
    assert f"attn_blocks_128_{kind}" in kernels


@pytest.mark.parametrize(("width", "block"), [(64, 16), (128, 8), (32, 10)])
def test_other_shapes(width: int, block: int) -> None:
    """Heads of another width, and blocks that warps cannot take 16 positions of."""
    assert "attn_any" in Blocks(2, 6, 3, block, width=width, index=48).check(SEGMENTS)


def test_groups_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than scores have room for, and a small GPU."""
    monkeypatch.setattr(attention_sparse, "_SCORE_BYTES", 1)
    kernels = Blocks(2, 2, 3, 16, tokens=40, limits=SMALL).check([Segment(37, cell=10, pos=90)])
    assert kernels[:6] == ["index_block_scores", "index_choose_blocks"] * 3


def test_a_token_does_not_depend_on_its_batch() -> None:
    blocks = Blocks(2, 8, 8, 32, tokens=8, limits=LIMITS, batch_invariant=True)
    values, _, together = blocks([Segment(6, cell=5, pos=600)])
    assert "attn_combine" in blocks.run.kernels()
    for i in range(6):
        rows = {x: v[i : i + 1] for x, v in values.items()}
        (alone,) = blocks.run([Segment(1, cell=5, pos=600 + i)], rows, blocks.node)
        np.testing.assert_array_equal(alone[0], together[i])


def test_what_has_no_kernel_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="up to 128 columns, a multiple of 16, not of 24"):
        Blocks(2, 2, 3, 16, index=24).check(SEGMENTS)
    with pytest.raises(UnsupportedError, match="blocks of 1 positions are too many"):
        Blocks(2, 2, 3, 1, cells=1 << 17).check(SEGMENTS)


@pytest.mark.parametrize("changes", [{}, {"n_gpu_layers": 2}, {"type_k": "q8_0", "type_v": "q8_0"}], ids=str)
def test_models(changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt beyond what is chosen, then single tokens, of a MiniMax-M3 with heads of 128 columns."""
    monkeypatch.setattr(gpus, "open_devices", cuda_sessions.Opener())
    keys = m3_keys(top_k=2) | {"attention.key_length": 128, "attention.value_length": 128}
    path = write_model(tiny_model("minimax-m3", **keys), tmp_path / "m3.gguf")
    wanted, dense = (
        cuda_sessions.transcript(ReferenceSession(path, GraphConfig(n_ctx=256, index_top_k=k)), 70) for k in (-1, 0)
    )
    with Session.open(cuda_sessions.config(path, **changes)) as session:
        found = cuda_sessions.transcript(session, 70)
    limit = 0.3 if changes.get("type_k") else 0.05
    error = np.abs(found - wanted).max(axis=1) / wanted.std()
    # Experts and blocks that tie up to rounding may be chosen differently.
    assert (error <= limit).mean() >= 0.9, np.sort(error)
    assert (np.abs(dense - wanted).max(axis=1) / wanted.std())[-20:].min() > limit
