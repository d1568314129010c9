"""Attention nodes, caches in NumPy and an oracle in float64, for tests of the CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from kernel_harness import Harness, Segment

from ikcli.backends.cpu.lower_attention import RULES
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.graph import Cache, HeadSlice, Node, Per, Rows
from ikcli.graph.ops_attention import Attention
from ikcli.native import isa
from ikcli.quant.decode import dequantize

F32, F16, BF16 = GGMLType.F32, GGMLType.F16, GGMLType.BF16
Q8_0, Q4_0 = GGMLType.Q8_0, GGMLType.Q4_0


# --- cache types in NumPy --------------------------------------------------------------------------------------------
def encode(x: np.ndarray, type_: GGMLType) -> np.ndarray:
    """Rows of float32 as bytes of a cache type."""
    rows = x.shape[0]
    if type_ == F32:
        return x.astype(np.float32).view(np.uint8).reshape(rows, -1)
    if type_ == F16:
        return x.astype(np.float16).view(np.uint8).reshape(rows, -1)
    if type_ == BF16:
        bits = x.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.uint8).reshape(rows, -1)
    blocks = x.astype(np.float32).reshape(rows, -1, 32)
    if type_ == Q4_0:
        scale = blocks.max(axis=2, keepdims=True, initial=1e-9) / np.float32(-8)
        codes = np.clip(np.rint(blocks / scale) + 8, 0, 15).astype(np.uint8)
        data = np.concatenate([scale.astype(np.float16).view(np.uint8), codes[..., :16] | codes[..., 16:] << 4], axis=2)
        return np.ascontiguousarray(data).reshape(rows, -1)
    top = np.abs(blocks).max(axis=2, keepdims=True)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    out = np.empty((*blocks.shape[:2], 34), dtype=np.uint8)
    out[..., :2] = (top / np.float32(127)).astype(np.float16).view(np.uint8).reshape(*blocks.shape[:2], 2)
    out[..., 2:] = np.rint(blocks * inverse).astype(np.int8).view(np.uint8)
    return out.reshape(rows, -1)


def decode(data: np.ndarray, type_: GGMLType) -> np.ndarray:
    """Bytes of cache rows as float64."""
    rows = data.shape[0]
    if type_ == F32:
        return data.view(np.float32).astype(np.float64)
    if type_ == F16:
        return data.view(np.float16).astype(np.float64)
    if type_ == BF16:
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    traits = TYPES[type_]
    cols = (data.shape[1] - traits.row_meta_size) // traits.type_size * traits.block_size
    values = dequantize(np.ascontiguousarray(data).reshape(-1), type_, (cols, rows))
    return values.astype(np.float64).reshape(rows, cols)


# --- oracle ----------------------------------------------------------------------------------------------------------
def head_columns(x: np.ndarray, part: HeadSlice, head: int) -> np.ndarray:
    at = part.offset + head * part.head_stride
    return x[:, at : at + part.width]


def to_codes(x: np.ndarray) -> np.ndarray:
    """Rows rounded to 15 bits with one scale: the factor of a q8_0 cache. In float32, for the sake of ties."""
    x = x.astype(np.float32)
    top = np.abs(x).max(axis=1, keepdims=True)
    codes = np.rint(x * (np.float32(127 * 128) / top))
    return codes.astype(np.float64) * (top / np.float32(127 * 128))


def expected(
    run: Harness, node: Node, segments: Sequence[Segment], values: dict[Node, np.ndarray], *, codes: bool = False,
    cached: dict[Cache, np.ndarray] | None = None,
) -> np.ndarray:  # fmt: skip
    """The attention node in float64, from the leaves and what the caches hold, or `cached` instead.

    `codes`: with Q rounded as for q8_0 caches.
    """
    op = node.op
    assert isinstance(op, Attention)
    n_head, group, scale = op.n_head, op.group, np.float32(op.scale)
    out, token, kv_row = [], 0, 0
    for s in segments:
        pos, end = s.pos + np.arange(s.n_tokens)[:, None], s.pos + s.n_tokens
        at = np.arange(op.first_seen(s.pos), end)
        first_seen = np.array([[op.first_seen(int(p))] for p in pos[:, 0]])

        def rows(part: HeadSlice, s: Segment = s, at: np.ndarray = at, kv_row: int = kv_row) -> np.ndarray:
            if isinstance(part.source, Node):
                return values[part.source][kv_row + at].astype(np.float64)
            if cached is not None:
                return cached[part.source][s.cell + at]
            data, first = run.caches[part.source], s.cell_in(part.source)
            if part.source.transposed:
                return decode(data, part.source.type).T[s.cell + at]
            return decode(data[first + at], part.source.type)

        heads = []
        for h in range(n_head):
            q = np.hstack([head_columns(values[p.source][token : token + s.n_tokens], p, h) for p in op.q])
            q = to_codes(q * scale) if codes else q.astype(np.float64) * np.float64(scale)
            k = np.hstack([head_columns(rows(p), p, h // group) for p in op.k])
            scores = q @ k.T
            if op.softcap:
                scores = op.softcap * np.tanh(scores / op.softcap)
            if op.slopes:
                scores -= np.float64(np.float32(op.slopes[h])) * np.abs(at - pos)
            if op.biases:
                most = len(op.biases[h]) // 2
                scores += np.asarray(op.biases[h])[np.clip(at - pos, -most, most) + most]
            later = at >= pos + (op.window or np.inf) if op.both else at > pos
            scores[later | (at < first_seen)] = -np.inf
            if op.sinks is not None:
                sink = np.full((len(scores), 1), run.weights[op.sinks.name][h], np.float64)
                scores = np.hstack([scores, sink])
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            heads.append(p[:, : len(at)] @ head_columns(rows(op.v), op.v, h // group))
        out.append(np.hstack(heads))
        token, kv_row = token + s.n_tokens, kv_row + end
    return np.vstack(out)


# --- graphs ----------------------------------------------------------------------------------------------------------
@dataclass
class Built:
    """A graph with one attention node: leaves and their columns, and the columns to store into each cache."""

    run: Harness
    node: Node
    leaves: dict[Node, int]
    stores: dict[Cache, Node] = field(default_factory=dict)


def gqa(n_head: int, n_head_kv: int, width: int, types: tuple[GGMLType, GGMLType], *, tokens: int, cells: int,
        flash: bool, v_width: int = 0, step: int = 0, per: Per = Per.CELL, **settings: Any) -> Built:  # fmt: skip
    """Separate K and V caches, both written by kv_store; `settings` of the node."""
    run = Harness(tokens, cells, RULES)
    g, dv = run.graph, v_width or width
    g.il = 0
    q, k, v = run.input("q", n_head * width), run.input("k", n_head_kv * width), run.input("v", n_head_kv * dv)
    kc, vc = g.cache("k", k.cols, types[0], per=per), g.cache("v", v.cols, types[1], per=per)
    g.kv_store(kc, k, "k_store")
    g.kv_store(vc, v, "v_store")
    node = g.attention([HeadSlice(q, 0, width, width)], [HeadSlice(kc, 0, width, width)], HeadSlice(vc, 0, dv, dv),
                       "kqv", n_head=n_head, n_head_kv=n_head_kv, scale=width**-0.5, flash=flash,
                       heads_per_step=step, **settings)  # fmt: skip
    return Built(run, node, {x: x.cols for x in (q, k, v)}, {kc: k, vc: v})


def absorbed(n_head: int, type_: GGMLType, *, tokens: int, cells: int, flash: bool, transposed: bool = False,
             step: int = 0, **settings: Any) -> Built:  # fmt: skip
    """MLA 576/512: V is a view of the K row, or a transposed cache of its own."""
    run = Harness(tokens, cells, RULES)
    g = run.graph
    g.il = 0
    q, latent_q, row = run.input("q", n_head * 192), run.input("q2", n_head * 512), run.input("kv", 576)
    cache = g.cache("kv", 576, type_)
    g.kv_store(cache, row, "store")
    v, stores = HeadSlice(cache, 64, 512, 0), {cache: row}
    if transposed:
        vt = g.cache("kv_t", 512, F16, transposed=True)
        g.kv_store(vt, row, "store_t", offset=64)
        v, stores = HeadSlice(vt, 0, 512, 0), {cache: row, vt: row}
    node = g.attention([HeadSlice(q, 128, 64, 192), HeadSlice(latent_q, 0, 512, 512)], [HeadSlice(cache, 0, 576, 0)],
                       v, "kqv", n_head=n_head, n_head_kv=1, scale=192**-0.5, flash=flash,
                       heads_per_step=step, **settings)  # fmt: skip
    return Built(run, node, {x: x.cols for x in (q, latent_q, row)}, stores)


def expanded(n_head: int, type_: GGMLType, *, tokens: int, cells: int, flash: bool, **settings: Any) -> Built:
    """MLA 192/128: rotated keys from the cache, the rest from compact rows."""
    run = Harness(tokens, cells, RULES)
    g = run.graph
    g.il = 0
    q, row, kv = run.input("q", n_head * 192), run.input("kv", 576), run.input("x", n_head * 256, Rows.KV)
    cache = g.cache("kv", 576, type_)
    g.kv_store(cache, row, "store")
    node = g.attention(
        [HeadSlice(q, 128, 64, 192), HeadSlice(q, 0, 128, 192)],
        [HeadSlice(cache, 0, 64, 0), HeadSlice(kv, 0, 128, 256)], HeadSlice(kv, 128, 128, 256),
        "kqv", n_head=n_head, n_head_kv=n_head, scale=192**-0.5, flash=flash, **settings)  # fmt: skip
    return Built(run, node, {x: x.cols for x in (q, row, kv)}, {cache: row})


def whole_texts(n_head: int, n_head_kv: int, width: int, *, tokens: int, v_width: int = 0, **settings: Any) -> Built:
    """Both directions, without a cache: keys and values of the micro-batch."""
    run, dv = Harness(tokens, tokens, RULES), v_width or width
    run.graph.il = 0
    q, k, v = run.input("q", n_head * width), run.input("k", n_head_kv * width), run.input("v", n_head_kv * dv)
    node = run.graph.attention(
        [HeadSlice(q, 0, width, width)], [HeadSlice(k, 0, width, width)], HeadSlice(v, 0, dv, dv), "kqv",
        n_head=n_head, n_head_kv=n_head_kv, scale=width**-0.5, flash=True, both=True, **settings)  # fmt: skip
    return Built(run, node, {x: x.cols for x in (q, k, v)})


def has_kernel(built: Built, module: str) -> bool:
    return module in {key.module for key in built.run.program.kernels}


def random_sinks(op: Attention, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Weights of a node: sinks from negligible to those that take nearly all."""
    return {} if op.sinks is None else {op.sinks.name: rng.uniform(-8, 8, op.n_head).astype(np.float32)}


def check(built: Built, segments: Sequence[Segment], n_threads: int, seed: int = 0, tolerance: float = 4e-6) -> None:
    """Cached positions that are seen get random rows, all else in the caches stays NaN; compare with the oracle."""
    rng = np.random.default_rng(seed)
    op = built.node.op
    assert isinstance(op, Attention)
    run = built.run.compile(built.node, n_threads, random_sinks(op, rng))
    for cache in built.stores:
        data = run.caches[cache]
        data[:] = 0xFF
        for s in segments:
            if cache.transposed:
                wide = data.view(np.uint16)
                x = rng.standard_normal((cache.cols, s.pos)).astype(np.float16)
                wide[:, s.cell : s.cell + s.pos] = x.view(np.uint16)
            elif kept := s.pos - op.first_seen(s.pos):
                end = s.cell_in(cache) + s.pos
                data[end - kept : end] = encode(rng.standard_normal((kept, cache.cols)), cache.type)
    n = {Rows.TOKENS: sum(s.n_tokens for s in segments), Rows.KV: sum(s.pos + s.n_tokens for s in segments)}
    values = {x: rng.standard_normal((n[x.rows.symbol], cols), dtype=np.float32) for x, cols in built.leaves.items()}
    out = run(segments, values)
    again = run(segments, values)
    np.testing.assert_array_equal(out, again)
    rounding = how_rounded(built)
    want = expected(run, built.node, segments, values, codes=rounding == "codes")
    error = out - want
    if rounding == "integers":
        coarse = Q8_0 in {cache.type for cache in built.stores}
        assert np.abs(error).max() < (1e-3 if coarse else 6e-4) * np.abs(want).max()
        assert np.sqrt(np.mean(error**2)) < (1e-3 if coarse else 4e-4) * np.sqrt(np.mean(want**2))
        return
    assert (np.abs(error) < tolerance * np.abs(want).max()).all()
    if rounding:
        exact = expected(run, built.node, segments, values)
        assert np.abs(out - exact).max() < 3e-4 * np.abs(exact).max()


def how_rounded(built: Built) -> str:
    """What a node rounds beyond f32, depending on the machine: "codes" (Q, to 15 bits) or, in an order of its own,
    "integers" (Q, K, V and weights)."""
    kernels = {key.module for key in built.run.program.kernels}
    if kernels & {"attention_pairs", "attention_few_pairs"}:
        return "integers"
    source = built.node.op.k[0].source
    q8_0 = isinstance(source, Cache) and source.type == Q8_0
    in_codes = isa.current().name == "avx512" or isa.current().is_arm64
    return "codes" if q8_0 and "attention_stream" in kernels and in_codes else ""
