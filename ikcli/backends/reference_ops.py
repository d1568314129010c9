"""Every graph op in NumPy: written for clarity, the oracle of the other backends.

An op takes the running executor and its node and returns the node's value, (rows, cols) in the executor's dtype.
The table of `moe_sort` is (pair, expert) per sorted position, pair = row * n_used + slot, dropped slots last with
expert -1. `moe_route` holds float32 weights and the bits of int32 ids side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ikcli.graph import Cache, HeadSlice, Node, Weight

if TYPE_CHECKING:
    from ikcli.backends.reference import Executor

Array = npt.NDArray[Any]
Op = Callable[["Executor", Node], Array]

OPS: dict[str, Op] = {}


def op(fn: Op) -> Op:
    """Register a function under its name without the leading underscore."""
    OPS[fn.__name__.removeprefix("_")] = fn
    return fn


# --- rows and matrices ------------------------------------------------------------------------------------------------
@op
def _embed(ex: Executor, node: Node) -> Array:
    return ex.weight(node.inputs[0])[ex.state.tokens]


@op
def _get_rows(ex: Executor, node: Node) -> Array:
    return ex.value(node.inputs[0])[ex.state.outputs]


@op
def _rms_norm(ex: Executor, node: Node) -> Array:
    a = node.attrs
    x = ex.value(node.inputs[0])[:, a["offset"] : a["offset"] + node.cols]
    groups = x.reshape(len(x), -1, a["width"])
    mean = np.mean(groups * groups, axis=-1, keepdims=True, dtype=np.float64)
    scale = (1.0 / np.sqrt(mean + a["eps"])).astype(ex.dtype)
    return (groups * scale * ex.weight(node.inputs[1])).reshape(len(x), -1)


@op
def _mul_mat(ex: Executor, node: Node) -> Array:
    return ex.value(node.inputs[1]) @ ex.weight(node.inputs[0]).T


@op
def _mul_mat_heads(ex: Executor, node: Node) -> Array:
    w = ex.weight(node.inputs[0])  # (n_head, ne1, ne0)
    x = heads(ex.value(node.inputs[1]), node.attrs["x"], len(w))
    return np.matmul(x.transpose(1, 0, 2), w.transpose(0, 2, 1)).transpose(1, 0, 2).reshape(len(x), -1)


@op
def _add(ex: Executor, node: Node) -> Array:
    y = node.inputs[1]
    return ex.value(node.inputs[0]) + (ex.weight(y) if isinstance(y, Weight) else ex.value(y))


@op
def _swiglu(ex: Executor, node: Node) -> Array:
    return silu(ex.value(node.inputs[0])) * ex.value(node.inputs[1])


@op
def _concat(ex: Executor, node: Node) -> Array:
    return np.concatenate([ex.value(x) for x in node.inputs], axis=1)


@op
def _concat_heads(ex: Executor, node: Node) -> Array:
    n_head = node.attrs["n_head"]
    parts = [heads(ex.value(p.source), p, n_head) for p in node.attrs["parts"]]
    return np.concatenate(parts, axis=2).reshape(len(parts[0]), -1)


def silu(x: Array) -> Array:
    """x * sigmoid(x), without overflow."""
    return x * sigmoid(x)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def heads(x: Array, part: HeadSlice, n_head: int) -> Array:
    """(rows, n_head, width): the columns of a head slice."""
    columns = part.offset + part.head_stride * np.arange(n_head)[:, None] + np.arange(part.width)
    return x[:, columns]


# --- positions and cache ----------------------------------------------------------------------------------------------
@op
def _rope_table(ex: Executor, node: Node) -> Array:
    theta = ex.state.pos.astype(np.float64)[:, None] * np.asarray(node.attrs["inv_freq"])
    table = np.stack([np.cos(theta), np.sin(theta)], axis=-1) * node.attrs["mscale"]
    return table.reshape(len(theta), -1).astype(ex.dtype)


@op
def _rope(ex: Executor, node: Node) -> Array:
    a = node.attrs
    x, table = ex.value(node.inputs[0]), ex.value(node.inputs[1])
    out = x.reshape(len(x), a["n_head"], a["head_dim"]).copy()
    part = out[:, :, a["offset"] : a["offset"] + a["n_rot"]]
    half = a["n_rot"] // 2
    first, second = (np.s_[..., :half], np.s_[..., half:]) if a["neox"] else (np.s_[..., 0::2], np.s_[..., 1::2])
    cos, sin = table[:, None, 0::2], table[:, None, 1::2]
    x0, x1 = part[first].copy(), part[second].copy()
    part[first] = x0 * cos - x1 * sin
    part[second] = x0 * sin + x1 * cos
    return out.reshape(len(x), -1)


@op
def _hadamard(ex: Executor, node: Node) -> Array:
    a, x = node.attrs, ex.value(node.inputs[0])
    out = x.reshape(len(x), a["n_head"], a["head_dim"]).copy()
    at = a["offset"]
    for size in a["blocks"]:
        part = np.s_[..., at : at + size]
        out[part] = out[part] @ walsh(size).astype(ex.dtype)
        at += size
    return out.reshape(len(x), -1)


def walsh(n: int) -> Array:
    """The orthonormal Walsh-Hadamard matrix of order n, a power of two."""
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]]) / np.sqrt(2)
    return h


@op
def _kv_store(ex: Executor, node: Node) -> Array:
    a, cache = node.attrs, node.inputs[0]
    assert isinstance(cache, Cache)
    x = ex.value(node.inputs[1])[:, a["offset"] : a["offset"] + a["cols"]]
    ex.caches.store(cache, ex.state.cells, x.astype(np.float32), a["cache_offset"])
    return np.zeros((len(x), 0), ex.dtype)


@op
def _kv_rows(ex: Executor, node: Node) -> Array:
    cache, offset = node.inputs[0], node.attrs["offset"]
    assert isinstance(cache, Cache)
    rows = ex.caches.rows(cache)
    cells = np.concatenate([np.arange(s.cell0, s.cell0 + s.n_kv) for s in ex.state.segments])
    return rows[cells, offset : offset + node.cols].astype(ex.dtype)


@op
def _attn(ex: Executor, node: Node) -> Array:
    a = node.attrs
    n_head, n_head_kv, v = a["n_head"], a["n_head_kv"], a["v"]
    out = np.empty((len(ex.state.tokens), n_head, v.width), ex.dtype)
    kv0 = 0
    for s in ex.state.segments:
        tokens = np.s_[s.token0 : s.token0 + s.n_tokens]
        hidden = np.arange(s.n_kv) > ex.state.pos[tokens, None]
        q = np.concatenate([heads(ex.value(p.source)[tokens], p, n_head) for p in a["q"]], axis=2)
        k = np.concatenate([heads(ex.kv_source(p.source, s, kv0), p, n_head_kv) for p in a["k"]], axis=2)
        values = heads(ex.kv_source(v.source, s, kv0), v, n_head_kv)
        for h in range(n_head):
            h_kv = h // (n_head // n_head_kv)
            scores = (q[:, h] @ k[:, h_kv].T) * ex.dtype(a["scale"])
            out[tokens, h] = softmax(np.where(hidden, -np.inf, scores)) @ values[:, h_kv]
        kv0 += s.n_kv
    return out.reshape(len(out), -1)


OPS["flash_attn"] = OPS["attn"]


def softmax(x: Array) -> Array:
    """Softmax of every row."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


# --- mixture of experts -----------------------------------------------------------------------------------------------
@op
def _moe_route(ex: Executor, node: Node) -> Array:
    a, logits = node.attrs, ex.value(node.inputs[0])
    probs = softmax(logits) if a["gating"] == "softmax" else sigmoid(logits)
    selection = probs if node.inputs[1] is None else probs + ex.weight(node.inputs[1])
    if a["n_group"] > 1:
        selection = best_groups(selection, a["n_group"], a["n_group_used"])
    ids = np.argsort(-selection, axis=1, kind="stable")[:, : a["n_used"]]
    keep = np.ones(ids.shape, bool)
    if a["ser"] is not None and a["ser"][0] > 0:
        fewest, threshold = a["ser"]
        p = np.take_along_axis(selection, ids, axis=1)
        keep[:, fewest:] = ~(p[:, fewest:] < threshold * p[:, :1])
    weights = np.where(keep, np.take_along_axis(probs, ids, axis=1), 0)
    if a["norm"]:
        weights = weights / weights.sum(axis=1, keepdims=True)
    bits = np.ascontiguousarray(np.where(keep, ids, -1), np.int32).view(np.float32)
    return np.concatenate([(weights * a["scale"]).astype(np.float32), bits], axis=1)


def best_groups(selection: Array, n_group: int, n_group_used: int) -> Array:
    """Selection scores with -inf outside the groups whose two best scores have the largest sums."""
    grouped = selection.reshape(len(selection), n_group, -1)
    score = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
    chosen = np.argsort(-score, axis=1, kind="stable")[:, :n_group_used]
    allowed = np.zeros(score.shape, bool)
    np.put_along_axis(allowed, chosen, True, axis=1)
    return np.where(allowed[:, :, None], grouped, -np.inf).reshape(selection.shape)


def route_parts(route: Array, n_used: int) -> tuple[Array, Array]:
    """Weights and ids, (rows, n_used) each."""
    return route[:, :n_used], np.ascontiguousarray(route[:, n_used:]).view(np.int32)


@op
def _moe_sort(ex: Executor, node: Node) -> Array:
    _, ids = route_parts(ex.value(node.inputs[0]), node.attrs["n_used"])
    flat = ids.reshape(-1)
    order = np.argsort(np.where(flat < 0, node.attrs["n_expert"], flat), kind="stable")
    return np.stack([order, flat[order]], axis=1).astype(np.int32)


@op
def _mul_mat_id(ex: Executor, node: Node) -> Array:
    w, x, plan = ex.weight(node.inputs[0]), ex.value(node.inputs[1]), ex.value(node.inputs[2])
    return by_expert(w, x if node.attrs["sorted_in"] else sorted_rows(x, plan), plan)


@op
def _moe_up_gate(ex: Executor, node: Node) -> Array:
    up, gate = ex.weight(node.inputs[0]), ex.weight(node.inputs[1])
    x, plan = ex.value(node.inputs[2]), ex.value(node.inputs[3])
    x = sorted_rows(x, plan)
    return silu(by_expert(gate, x, plan)) * by_expert(up, x, plan)


@op
def _moe_sum(ex: Executor, node: Node) -> Array:
    y, route, plan = (ex.value(x) for x in node.inputs)
    weights, ids = route_parts(route, route.shape[1] // 2)
    slots = np.empty_like(y)
    slots[plan[:, 0]] = y
    slots = slots.reshape(*ids.shape, -1)
    kept = np.where(ids[..., None] < 0, 0, slots * weights[..., None].astype(y.dtype))
    return kept.sum(axis=1)


def sorted_rows(x: Array, plan: Array) -> Array:
    """Rows of x in the order of the plan."""
    return x[plan[:, 0] // (len(plan) // len(x))]


def by_expert(w: Array, x: Array, plan: Array) -> Array:
    """Every sorted row times the matrix of its expert; zero for dropped slots."""
    out = np.zeros((len(x), w.shape[1]), x.dtype)
    for e in np.unique(plan[:, 1]):
        if e >= 0:
            rows = plan[:, 1] == e
            out[rows] = x[rows] @ w[e].T
    return out
