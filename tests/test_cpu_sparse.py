"""Sparse attention on the CPU: chosen positions exactly as in NumPy, ties included, and attention to them in float64.

Index queries, keys and weights are small multiples of powers of two, so that all sums of scores are exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from attention_cases import decode, encode
from kernel_harness import Harness, Segment

from ikcli.backends.cpu.lower_sparse import RULES
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.graph import HeadSlice, Node
from ikcli.graph.ops_sparse import EntryPositions

F16 = GGMLType.F16
RANK, ROPE = 64, 32


class Model:
    """An indexer of `n_index` heads, and absorbed attention of `n_head` heads to what it chooses."""

    def __init__(self, n_index: int, n_head: int, top_k: int, *, tokens: int, cells: int, type_: GGMLType = F16,
                 invariant: bool = False, seed: int = 1) -> None:  # fmt: skip
        self.run = run = Harness(tokens, cells, RULES, invariant)
        self.n_index, self.n_head, self.top_k, self.width = n_index, n_head, top_k, 32
        g = run.graph
        g.il = 0
        self.q_index, self.weights = run.input("qi", n_index * self.width), run.input("w", n_index)
        self.q, self.q_latent = run.input("q", n_head * ROPE), run.input("ql", n_head * RANK)
        self.k_index, self.kv = g.cache("index", self.width, F16), g.cache("kv", ROPE + RANK, type_)
        index = HeadSlice(self.q_index, 0, self.width, self.width)
        self.chosen = g.index_top_k(index, self.weights, self.k_index, "top_k", n_head=n_index, top_k=top_k)
        self.node = g.sparse_attention(
            [HeadSlice(self.q, 0, ROPE, ROPE), HeadSlice(self.q_latent, 0, RANK, RANK)],
            [HeadSlice(self.kv, 0, ROPE + RANK, 0)], HeadSlice(self.kv, ROPE, RANK, 0), self.chosen, "kqv",
            n_head=n_head, n_head_kv=1, scale=0.3,
        )  # fmt: skip
        rng = self.rng = np.random.default_rng(seed)
        run.caches[self.k_index] = encode(rng.integers(-2, 3, (cells, self.width)).astype(np.float32), F16)
        run.caches[self.kv] = encode(rng.standard_normal((cells, ROPE + RANK)).astype(np.float32), type_)

    def values(self, n: int) -> dict[Node, np.ndarray]:
        rng = self.rng
        return {
            self.q_index: rng.integers(-2, 3, (n, self.q_index.cols)).astype(np.float32),
            self.weights: rng.integers(-4, 9, (n, self.n_index)).astype(np.float32) / 4,
            self.q: rng.standard_normal((n, self.q.cols)).astype(np.float32),
            self.q_latent: rng.standard_normal((n, self.q_latent.cols)).astype(np.float32),
        }

    def wanted_cells(self, segments: Sequence[Segment], values: dict[Node, np.ndarray]) -> np.ndarray:
        keys, out, token = decode(self.run.caches[self.k_index], F16), [], 0
        for s in segments:
            for i in range(s.n_tokens):
                n = s.pos + i + 1
                q = values[self.q_index][token].reshape(self.n_index, -1).astype(np.float64)
                scores = values[self.weights][token] @ np.maximum(q @ keys[s.cell : s.cell + n].T, 0)
                best = np.sort(np.argsort(-scores, kind="stable")[: self.top_k]) + s.cell
                out.append(np.pad(best, (0, self.top_k - len(best)), constant_values=-1))
                token += 1
        return np.array(out)

    def wanted(self, cells: np.ndarray, values: dict[Node, np.ndarray]) -> np.ndarray:
        rows = decode(self.run.caches[self.kv], self.kv.type)
        out = np.empty((len(cells), self.n_head, RANK))
        for t, chosen in enumerate(cells):
            k = rows[chosen[chosen >= 0]]
            q = np.hstack([values[x][t].reshape(self.n_head, -1) for x in (self.q, self.q_latent)])
            scores = 0.3 * q.astype(np.float64) @ k.T
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[t] = p / p.sum(axis=1, keepdims=True) @ k[:, ROPE:]
        return out.reshape(len(cells), -1)

    def check(self, segments: Sequence[Segment], n_threads: int = 2) -> np.ndarray:
        values = self.values(sum(s.n_tokens for s in segments))
        cells = self.wanted_cells(segments, values)
        self.run.compile(self.chosen, n_threads)
        found = self.run(segments, values)
        np.testing.assert_array_equal(found.view(np.int32) if found.dtype != np.int32 else found, cells)
        self.run.compile(self.node, n_threads)
        out = self.run(segments, values)
        np.testing.assert_allclose(out, self.wanted(cells, values), atol=2e-3)
        return out


@pytest.mark.parametrize("n_threads", [1, 2, 3])
@pytest.mark.parametrize("top_k", [1, 16, 48, 100])
def test_prompts(top_k: int, n_threads: int) -> None:
    """Shorter than the choice, at its border, and longer."""
    Model(16, 4, top_k, tokens=64, cells=512).check([Segment(60, cell=3), Segment(1, cell=100, pos=47)], n_threads)
    Model(16, 4, top_k, tokens=64, cells=512).check([Segment(20, cell=7, pos=300)], n_threads)


@pytest.mark.parametrize("n_index", [1, 8, 24, 32])
def test_heads_that_fill_vectors_and_others(n_index: int) -> None:
    Model(n_index, 5, 32, tokens=16, cells=256).check([Segment(11, cell=2, pos=90)])


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_few_tokens_share_the_threads(tokens: int) -> None:
    """Positions in several spans, and a choice that is split between threads."""
    model = Model(32, 16, 600, tokens=8, cells=4096, invariant=True)
    model.check([Segment(tokens, cell=5, pos=2900)], 3)


def test_a_token_does_not_depend_on_its_batch() -> None:
    model = Model(16, 8, 64, tokens=8, cells=2048, invariant=True)
    values = model.values(8)
    model.run.compile(model.node, 2)
    together = model.run([Segment(8, cell=0, pos=1200)], values)
    for i in range(8):
        alone = model.run([Segment(1, cell=0, pos=1200 + i)], {x: v[i : i + 1] for x, v in values.items()})
        np.testing.assert_array_equal(alone[0], together[i])


@pytest.mark.parametrize("type_", [GGMLType.F32, GGMLType.Q8_0], ids=lambda t: t.name)
def test_cache_types(type_: GGMLType) -> None:
    Model(8, 4, 32, tokens=16, cells=256, type_=type_).check([Segment(9, pos=100)])


def test_what_has_no_kernel_is_refused() -> None:
    run = Harness(4, 64, RULES)
    run.graph.il = 0
    q, w = run.input("q", 2 * 48), run.input("w", 2)
    cache = run.graph.cache("index", 48, GGMLType.Q5_K)
    chosen = run.graph.index_top_k(HeadSlice(q, 0, 48, 48), w, cache, "top_k", n_head=2, top_k=4)
    with pytest.raises(UnsupportedError, match="no KV cache of type"):
        run.lower(chosen, 1)
    with pytest.raises(ValueError, match="a weight per head"):
        run.graph.index_top_k(HeadSlice(q, 0, 48, 48), w, cache, "top_k", n_head=3, top_k=4)


class Entries:
    """An indexer of entries, whose heads count alike, and attention of heads of two kinds to the positions of these."""

    def __init__(self, top_k: int, ratio: int, *, tokens: int, cells: int, invariant: bool = False) -> None:
        self.run = run = Harness(tokens, cells, RULES, invariant)
        self.top_k, self.ratio, g, d = top_k, ratio, run.graph, 32
        g.il = 0
        self.q_index, self.q = run.input("qi", 4 * d), run.input("q", 6 * d)
        self.k_index = g.cache("index", d, F16)
        self.k, self.v = g.cache("k", 2 * d, F16), g.cache("v", 2 * d, F16)
        index = HeadSlice(self.q_index, 0, d, d)
        chosen = g.index_top_k(index, None, self.k_index, "top", n_head=4, top_k=top_k, ratio=ratio)
        self.cells = g.record(EntryPositions(chosen, ratio), "cells")
        keys, values = HeadSlice(self.k, 0, d, d), HeadSlice(self.v, 0, d, d)
        self.node = g.sparse_attention(
            [HeadSlice(self.q, 0, d, d)], [keys], values, self.cells, "kqv", n_head=6, n_head_kv=2, scale=0.3,
            block=ratio, rest=True,
        )  # fmt: skip
        rng = self.rng = np.random.default_rng(1)
        run.caches[self.k_index] = encode(rng.integers(-2, 3, (cells, d)).astype(np.float32), F16)
        for cache in (self.k, self.v):
            run.caches[cache] = encode(rng.standard_normal((cells, 2 * d)).astype(np.float32), F16)

    def check(self, segments: Sequence[Segment], n_threads: int = 2) -> None:
        n, token = sum(s.n_tokens for s in segments), 0
        values = {
            self.q_index: self.rng.integers(-2, 3, (n, self.q_index.cols)).astype(np.float32),
            self.q: self.rng.standard_normal((n, self.q.cols)).astype(np.float32),
        }
        cells = np.full((n, (self.top_k + 1) * self.ratio - 1), -1)
        wanted = np.empty((n, 6, 32))
        keys, k, v = (decode(self.run.caches[c], F16).astype(np.float64) for c in (self.k_index, self.k, self.v))
        for s in segments:
            for seen in range(s.pos + 1, s.pos + s.n_tokens + 1):
                entries = np.arange(seen // self.ratio)
                last = keys[s.cell + self.ratio * (entries + 1) - 1]
                scores = np.maximum(values[self.q_index][token].reshape(4, -1) @ last.T, 0).sum(axis=0)
                best = np.sort(np.argsort(-scores, kind="stable")[: self.top_k])
                own = (best[:, None] * self.ratio + np.arange(self.ratio)).ravel()
                own = s.cell + np.concatenate([own, np.arange(len(entries) * self.ratio, seen)])
                cells[token, : len(own)] = own
                for h in range(6):
                    part = slice(32 * (h // 3), 32 * (h // 3) + 32)
                    x = 0.3 * k[own, part] @ values[self.q][token, 32 * h : 32 * h + 32].astype(np.float64)
                    p = np.exp(x - x.max())
                    wanted[token, h] = p / p.sum() @ v[own, part]
                token += 1
        found = self.run.compile(self.cells, n_threads)(segments, values)
        np.testing.assert_array_equal(found.view(np.int32) if found.dtype != np.int32 else found, cells)
        found = self.run.compile(self.node, n_threads)(segments, values)
        np.testing.assert_allclose(found, wanted.reshape(n, -1), atol=2e-3)


@pytest.mark.slow("compiles attention to listed positions of two caches")
@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize(("top_k", "ratio"), [(1, 4), (6, 4), (5, 3), (40, 2)])
def test_positions_of_entries(top_k: int, ratio: int, n_threads: int) -> None:
    """Fewer than may be chosen, as many, and more; with and without positions behind the last entry."""
    Entries(top_k, ratio, tokens=64, cells=512).check([Segment(60, cell=3), Segment(1, cell=100, pos=47)], n_threads)
    Entries(top_k, ratio, tokens=8, cells=512).check([Segment(5, cell=7, pos=300)], n_threads)


@pytest.mark.slow("compiles attention to listed positions of two caches")
def test_lists_of_entries_that_threads_share() -> None:
    Entries(200, 4, tokens=8, cells=4096, invariant=True).check([Segment(5, cell=5, pos=2900)], 3)


class Blocks:
    """An indexer of blocks, with a head for every KV head, and attention of `n_head` heads to what each chooses."""

    def __init__(self, n_kv: int, n_head: int, top_k: int, block: int, local: int, *, tokens: int, cells: int,
                 invariant: bool = False) -> None:  # fmt: skip
        self.run = run = Harness(tokens, cells, RULES, invariant)
        self.n_kv, self.n_head, self.top_k, self.block, self.local = n_kv, n_head, top_k, block, local
        g, d = run.graph, 32
        g.il = 0
        self.q_index, self.q = run.input("qi", n_kv * d), run.input("q", n_head * d)
        self.k_index = g.cache("index", d, F16)
        self.k, self.v = g.cache("k", n_kv * d, F16), g.cache("v", n_kv * d, F16)
        self.chosen = g.index_top_blocks(
            HeadSlice(self.q_index, 0, d, d), self.k_index, "top", n_head=n_kv, top_k=top_k, block=block, local=local
        )
        self.node = g.sparse_attention(
            [HeadSlice(self.q, 0, d, d)], [HeadSlice(self.k, 0, d, d)], HeadSlice(self.v, 0, d, d), self.chosen, "kqv",
            n_head=n_head, n_head_kv=n_kv, scale=0.3, lists=n_kv, block=block,
        )  # fmt: skip
        self.rng = rng = np.random.default_rng(2)
        run.caches[self.k_index] = encode(rng.integers(-2, 3, (cells, d)).astype(np.float32), F16)
        for cache in (self.k, self.v):
            run.caches[cache] = encode(rng.standard_normal((cells, n_kv * d)).astype(np.float32), F16)

    def values(self, n: int) -> dict[Node, np.ndarray]:
        return {
            self.q_index: self.rng.integers(-2, 3, (n, self.q_index.cols)).astype(np.float32),
            self.q: self.rng.standard_normal((n, self.q.cols)).astype(np.float32),
        }

    def chosen_positions(self, q: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return what a head of a query that sees all of `keys` chooses, position by position."""
        n = len(keys)
        own, best = (n - 1) // self.block, list[tuple[float, int]]()
        for b in range(own + 1):
            score = max(float(q @ keys[i]) for i in range(b * self.block, min(n, (b + 1) * self.block)))
            best.append((-np.inf if b > own - self.local else -score, b))
        blocks = {b for _, b in sorted(best)[: self.top_k]}
        return np.array([i for i in range(n) if i // self.block in blocks])

    def check(self, segments: Sequence[Segment], n_threads: int) -> None:
        values, d, token = self.values(sum(s.n_tokens for s in segments)), 32, 0
        index, k, v = (decode(self.run.caches[c], F16) for c in (self.k_index, self.k, self.v))
        cells, out = [], []
        for s in segments:
            for n in range(s.pos + 1, s.pos + s.n_tokens + 1):
                lists = []
                for h in range(self.n_kv):
                    q = values[self.q_index][token].reshape(self.n_kv, d)[h]
                    at = self.chosen_positions(q, index[s.cell : s.cell + n]) + s.cell
                    lists.append(np.pad(at, (0, self.top_k * self.block - len(at)), constant_values=-1))
                    heads = values[self.q][token].reshape(self.n_kv, -1, d)[h].astype(np.float64)
                    p = np.exp(0.3 * heads @ k[at, h * d : (h + 1) * d].T)
                    out.append(p / p.sum(axis=1, keepdims=True) @ v[at, h * d : (h + 1) * d])
                cells.append(np.concatenate(lists))
                token += 1
        self.run.compile(self.chosen, n_threads)
        found = self.run(segments, values)
        np.testing.assert_array_equal(found.view(np.int32) if found.dtype != np.int32 else found, cells)
        self.run.compile(self.node, n_threads)
        wanted = np.concatenate(out).reshape(token, -1)
        np.testing.assert_allclose(self.run(segments, values), wanted, atol=2e-3)


@pytest.mark.slow("compiles the kernels of an indexer of blocks")
def test_blocks() -> None:
    """Prompts shorter than the choice, at its border and longer, several sequences, blocks of one tile and of more."""
    for n_kv, n_head, block, local in ((1, 3, 8, 1), (2, 8, 16, 2), (4, 4, 100, 1)):
        for top_k in (2, 3):
            model = Blocks(n_kv, n_head, top_k, block, local, tokens=64, cells=2048)
            edge = top_k * block
            model.check([Segment(41, cell=3), Segment(1, cell=1000, pos=edge - 1)], 2)
            model.check([Segment(20, cell=7, pos=edge - 5), Segment(3, cell=1100, pos=800)], 3)
            model.check([Segment(1, cell=5, pos=1700)], 3)


@pytest.mark.slow("compiles the kernels of an indexer of blocks")
def test_blocks_of_a_token_do_not_depend_on_its_batch() -> None:
    model = Blocks(2, 8, 4, 32, 1, tokens=8, cells=2048, invariant=True)
    values = model.values(8)
    model.run.compile(model.node, 2)
    together = model.run([Segment(8, cell=0, pos=1200)], values)
    for i in range(8):
        alone = model.run([Segment(1, cell=0, pos=1200 + i)], {x: v[i : i + 1] for x, v in values.items()})
        np.testing.assert_array_equal(alone[0], together[i])
