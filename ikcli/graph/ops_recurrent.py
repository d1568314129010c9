"""Operations of recurrent layers: short convolution, gated delta rule, selective scan, and what surrounds them.

States (`Graph.state`) carry a sequence from one micro-batch to the next. A sequence begins with zeros, whatever is
stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ikcli.graph.activations import sigmoid, silu
from ikcli.graph.core import Array, Cache, HeadSlice, Node, Op, Place, RowSpec, Run, SameSize, Weight
from ikcli.graph.micro_batch import Segment
from ikcli.graph.ops_rows import head_columns

STATE_BLOCK = 16  # adjacent columns (of v) in a state of the delta rule and of the selective scan


@dataclass(frozen=True, slots=True)
class ShortConv(Op):
    """silu of a causal convolution over the tokens of a sequence, each column separately; parts come side by side.

    With `linear` it is the convolution itself. Weights have (taps, columns) or (taps, 1, columns); the last tap is for
    the token itself. Each part may have a bias.
    The state holds the last taps - 1 rows of all parts, the oldest first.
    """

    name = "short_conv"
    stores = True

    state: Cache
    parts: tuple[Node, ...]
    weights: tuple[Weight, ...]
    biases: tuple[Weight, ...] = ()
    linear: bool = False

    def __post_init__(self) -> None:
        if self.biases and [b.ne0 for b in self.biases] != [x.cols for x in self.parts]:
            raise ValueError("every part needs a bias")
        for x, w in zip(self.parts, self.weights, strict=True):
            if columns_of(w) != x.cols or w.ne0 != self.n_taps:
                raise ValueError(f"{w.name} does not fit {x.cols} columns and {self.n_taps} taps")
        if self.state.cols != (self.n_taps - 1) * sum(x.cols for x in self.parts):
            raise ValueError("the state does not hold taps - 1 rows")

    @property
    def n_taps(self) -> int:
        return self.weights[0].ne0

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.parts[0].rows, sum(x.cols for x in self.parts)

    def compute(self, run: Run) -> Array:
        x = np.concatenate([run.value(part) for part in self.parts], axis=1)
        taps = np.concatenate([run.weight(w).reshape(-1, self.n_taps) for w in self.weights]).T
        bias = np.concatenate([run.weight(b) for b in self.biases]) if self.biases else run.dtype(0)
        states, out, before = run.cached(self.state), np.empty_like(x), self.n_taps - 1
        for s in run.state.segments:
            past = states[s.seq].reshape(before, -1) if s.pos else np.zeros((before, x.shape[1]), x.dtype)
            rows = np.concatenate([past.astype(x.dtype), x[s.start : s.start + s.n_tokens]])
            sums = sum(tap * rows[i : i + s.n_tokens] for i, tap in enumerate(taps))
            total = np.asarray(sums + bias)
            out[s.start : s.start + s.n_tokens] = total if self.linear else silu(total)
            states[s.seq] = rows[len(rows) - before :].reshape(-1)
        return out


def read_state(row: Array, shape: tuple[int, int, int], segment: Segment, dtype: npt.DTypeLike) -> Array:
    """Return a stored state as (heads, keys, columns): zeros where the sequence begins; see `in_blocks`."""
    if not segment.pos:
        return np.zeros(shape, dtype)
    heads, keys, columns = shape
    blocks = row.reshape(heads, columns // STATE_BLOCK, keys, STATE_BLOCK)
    return blocks.transpose(0, 2, 1, 3).reshape(shape).astype(dtype)


def in_blocks(state: Array) -> Array:
    """Return a state (heads, keys, columns) as it is stored: blocks of adjacent columns one after the other."""
    heads, keys, columns = state.shape
    return state.reshape(heads, keys, columns // STATE_BLOCK, STATE_BLOCK).transpose(0, 2, 1, 3).reshape(-1)


def columns_of(w: Weight) -> int:
    """Return the rows of a weight, whatever its dimensions."""
    return int(np.prod(w.shape[1:]))


@dataclass(frozen=True, slots=True)
class L2Norm(Op):
    """Columns [offset, offset + n_cols) of x in groups of `width`, each over sqrt(sum of squares + eps)."""

    name = "l2_norm"

    x: Node
    offset: int
    n_cols: int
    width: int
    eps: float

    def __post_init__(self) -> None:
        if self.n_cols % self.width or self.offset + self.n_cols > self.x.cols:
            raise ValueError(f"{self.n_cols} columns from {self.offset} on are no groups of {self.width}")

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.x.rows, self.n_cols

    def compute(self, run: Run) -> Array:
        x = run.value(self.x)[:, self.offset : self.offset + self.n_cols]
        groups = x.reshape(len(x), -1, self.width)
        total = np.sum(groups * groups, axis=-1, keepdims=True, dtype=np.float64)
        scale: Array = (1.0 / np.sqrt(total + self.eps)).astype(run.dtype)
        return (groups * scale).reshape(len(x), -1)


@dataclass(frozen=True, slots=True)
class Decay(SameSize):
    """The fraction of a state that remains after a token, 0..1: exp(a * softplus(x + dt)).

    `a` is negative, one number per head. With a negative lower bound (the "safe gate" of KDA) it is exp(bound *
    sigmoid(abs(a) * (x + dt))): files of Ling 3 have positive numbers, those of Kimi K3 negative ones.
    """

    name = "decay"
    place = Place.WEIGHT

    x: Node
    dt: Weight
    a: Weight
    bound: float = 0.0

    def __post_init__(self) -> None:
        if self.dt.ne0 != self.x.cols or self.x.cols % self.n_head:
            raise ValueError(f"{self.dt.name} or {self.a.name} does not fit {self.x.cols} columns")

    @property
    def n_head(self) -> int:
        return int(np.prod(self.a.shape))

    def compute(self, run: Run) -> Array:
        x = run.value(self.x) + run.weight(self.dt)
        a = np.repeat(run.weight(self.a).reshape(-1), self.x.cols // self.n_head)
        if self.bound:
            return np.asarray(np.exp(run.dtype(self.bound) * sigmoid(np.abs(a) * x)))
        return np.asarray(np.exp(a * (np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))))))


@dataclass(frozen=True, slots=True)
class DeltaNet(Op):
    """The gated delta rule: a head's state S (keys x values) forgets, corrects itself, and is read.

        S = decay * S;  S += k (sigmoid(beta) * (v - k S))';  y = scale * q S

    Decays are per head, or per head and column of k. `n_head` heads of v; those of q and k are fewer: head h uses
    h % n_head_k (tiled), or h // (n_head / n_head_k). Per head, the state holds blocks of 16 columns of v: all rows of
    the first block, then of the next.
    """

    name = "delta_net"
    stores = True

    state: Cache
    q: HeadSlice
    k: HeadSlice
    v: HeadSlice
    decay: Node
    beta: Node
    n_head: int
    n_head_k: int
    scale: float
    tiled: bool = False

    def __post_init__(self) -> None:
        dk, dv = self.k.width, self.v.width
        if self.q.width != dk or self.n_head % self.n_head_k or dk % 16 or dv % STATE_BLOCK:
            raise ValueError(f"{self.n_head} heads of {dk} and {dv} columns ({self.n_head_k} of keys) do not fit")
        if self.state.cols != self.n_head * dk * dv or self.beta.cols != self.n_head:
            raise ValueError("the state or beta is not for these heads")
        if self.decay.cols not in (self.n_head, self.n_head * dk):
            raise ValueError("decays are per head, or per head and column of k")

    @property
    def by_column(self) -> bool:
        """Return whether every column of k has its own decay."""
        return self.decay.cols > self.n_head

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.v.node.rows, self.n_head * self.v.width

    def compute(self, run: Run) -> Array:
        h, dk, dv = self.n_head, self.k.width, self.v.width
        heads = np.arange(h) % self.n_head_k if self.tiled else np.arange(h) // (h // self.n_head_k)
        q, k = (head_columns(run.value(p.node), p, self.n_head_k)[:, heads] for p in (self.q, self.k))
        v = head_columns(run.value(self.v.node), self.v, h)
        decay, beta = run.value(self.decay).reshape(len(v), h, -1, 1), sigmoid(run.value(self.beta))
        states, out = run.cached(self.state), np.empty_like(v)
        for segment in run.state.segments:
            s = read_state(states[segment.seq], (h, dk, dv), segment, v.dtype)
            for t in range(segment.start, segment.start + segment.n_tokens):
                s = s * decay[t]
                correction = beta[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], s))
                s = s + k[t][:, :, None] * correction[:, None, :]
                out[t] = np.einsum("hk,hkv->hv", q[t], s) * run.dtype(self.scale)
            states[segment.seq] = in_blocks(s)
        return out.reshape(len(out), -1)


@dataclass(frozen=True, slots=True)
class SelectiveScan(SameSize):
    """Mamba's scan: every column of x has `n_state` numbers h that decay, take in x, and are read.

        step = softplus(dt + dt_bias);  h = exp(step * a) * h + step * x * b;  y = h . c + d * x

    a (n_state, columns) is negative; b and c belong to the token and serve all columns. The state holds blocks of 16
    columns: n_state rows of the first block, then of the next.
    """

    name = "selective_scan"
    stores = True

    state: Cache
    x: Node
    dt: Node
    b: HeadSlice
    c: HeadSlice
    a: Weight
    d: Weight
    dt_bias: Weight

    def __post_init__(self) -> None:
        cols, n = self.x.cols, self.n_state
        if self.dt.cols != cols or self.a.ne1 != cols or self.d.ne0 != cols or self.dt_bias.ne0 != cols:
            raise ValueError(f"{self.a.name}, {self.d.name} or {self.dt_bias.name} does not fit {cols} columns")
        if cols % STATE_BLOCK or n % 16 or self.b.width != n or self.c.width != n or self.state.cols != cols * n:
            raise ValueError(f"{cols} columns with {n} numbers each do not fit")

    @property
    def n_state(self) -> int:
        return self.a.ne0

    def compute(self, run: Run) -> Array:
        x, n, cols = run.value(self.x), self.n_state, self.x.cols
        raw = run.value(self.dt) + run.weight(self.dt_bias)
        step = np.maximum(raw, 0) + np.log1p(np.exp(-np.abs(raw)))
        b, c = (head_columns(run.value(part.node), part, 1)[:, 0] for part in (self.b, self.c))
        a, d = run.weight(self.a).reshape(cols, n), run.weight(self.d)
        states, out = run.cached(self.state), np.empty_like(x)
        for segment in run.state.segments:
            h = np.zeros((cols, n), x.dtype)
            if segment.pos:
                h = states[segment.seq].reshape(-1, n, STATE_BLOCK).transpose(0, 2, 1).reshape(cols, n).astype(x.dtype)
            for t in range(segment.start, segment.start + segment.n_tokens):
                h = np.exp(step[t][:, None] * a) * h + (step[t] * x[t])[:, None] * b[t]
                out[t] = h @ c[t] + d * x[t]
            states[segment.seq] = h.reshape(-1, STATE_BLOCK, n).transpose(0, 2, 1).reshape(-1)
        return out


@dataclass(frozen=True, slots=True)
class Mamba2Scan(Op):
    """Mamba 2's scan: the state H (n_state x width) of every head decays as a whole, takes in x, and is read.

        step = softplus(dt + dt_bias);  H = exp(step * a) * H + b (step * x)';  y = c H + d * x

    a (negative), d and dt have one number per head; b and c belong to `n_group` groups of adjacent heads. Per head, the
    state holds blocks of 16 columns of x: n_state rows of the first block, then of the next.

    With `slopes`, one per head, this is linear attention to values x with keys b and queries c: steps are 1, a is the
    negative slope, d is 0, and there are no weights.
    """

    name = "mamba2_scan"
    stores = True

    state: Cache
    x: HeadSlice
    dt: Node | None
    b: HeadSlice
    c: HeadSlice
    a: Weight | None
    d: Weight | None
    dt_bias: Weight | None
    n_head: int
    n_group: int
    slopes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        n, width = self.n_state, self.x.width
        weights = [w for w in (self.a, self.d, self.dt_bias) if w is not None]
        if len(weights) != (0 if self.slopes else 3) or (self.dt is None) != bool(self.slopes):
            raise ValueError("a scan has steps and weights, or slopes in their place")
        if any(int(np.prod(w.shape)) != self.n_head for w in weights):
            raise ValueError(f"{', '.join(w.name for w in weights)}: not all of them fit {self.n_head} heads")
        n_steps = len(self.slopes) if self.dt is None else self.dt.cols
        if n_steps != self.n_head or self.c.width != n or self.n_head % self.n_group:
            raise ValueError(f"{self.n_head} heads do not fit steps, {self.n_group} groups, or b and c")
        if n % 16 or width % STATE_BLOCK or self.state.cols != self.n_head * n * width:
            raise ValueError(f"{self.n_head} heads of {width} columns with {n} numbers each do not fit")

    @property
    def n_state(self) -> int:
        return self.b.width

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.x.node.rows, self.n_head * self.x.width

    def compute(self, run: Run) -> Array:
        h, n, width = self.n_head, self.n_state, self.x.width
        x = head_columns(run.value(self.x.node), self.x, h)
        if self.dt is None or self.dt_bias is None or self.a is None or self.d is None:
            step, d = np.ones((len(x), h), x.dtype), np.zeros((h, 1), x.dtype)
            decay = np.exp(-step * np.asarray(self.slopes, x.dtype))
        else:
            raw = run.value(self.dt) + run.weight(self.dt_bias).reshape(-1)
            step = np.maximum(raw, 0) + np.log1p(np.exp(-np.abs(raw)))
            decay, d = np.exp(step * run.weight(self.a).reshape(-1)), run.weight(self.d).reshape(-1, 1)
        groups = np.arange(h) // (h // self.n_group)
        b, c = (head_columns(run.value(part.node), part, self.n_group)[:, groups] for part in (self.b, self.c))
        states, out = run.cached(self.state), np.empty_like(x)
        for segment in run.state.segments:
            s = read_state(states[segment.seq], (h, n, width), segment, x.dtype)
            for t in range(segment.start, segment.start + segment.n_tokens):
                s = decay[t][:, None, None] * s + b[t][:, :, None] * (step[t][:, None] * x[t])[:, None, :]
                out[t] = np.einsum("hn,hnw->hw", c[t], s) + d * x[t]
            states[segment.seq] = in_blocks(s)
        return out.reshape(len(out), -1)


@dataclass(frozen=True, slots=True)
class GatedNorm(SameSize):
    """RMS norm of x in groups of as many columns as w has, times `activation` ("silu", "sigmoid") of the gate."""

    name = "gated_norm"
    place = Place.WEIGHT

    x: Node
    w: Weight
    gate: Node
    eps: float
    activation: str

    def __post_init__(self) -> None:
        if self.x.cols % self.w.ne0 or self.x.cols != self.gate.cols:
            raise ValueError(f"{self.w.name} or the gate does not fit {self.x.cols} columns")
        if self.activation not in ("silu", "sigmoid"):
            raise ValueError(f"no activation {self.activation}")

    def compute(self, run: Run) -> Array:
        x, gate = run.value(self.x), run.value(self.gate)
        groups = x.reshape(len(x), -1, self.w.ne0)
        mean = np.mean(groups * groups, axis=-1, keepdims=True, dtype=np.float64)
        scale: Array = (1.0 / np.sqrt(mean + self.eps)).astype(run.dtype)
        normed = (groups * scale * run.weight(self.w)).reshape(x.shape)
        out: Array = normed * (silu(gate) if self.activation == "silu" else sigmoid(gate))
        return out
