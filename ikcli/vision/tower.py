"""A vision tower: what all types share. A type says how images are resized, and records layers and projector.

Rows of the graph are patches in the tower's order; its result has a row per token. Position embeddings that depend on
the grid arrive beside the pixels, so every input row is [pixels of a patch | position embedding].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ikcli.graph import Graph, HeadSlice, Node, Weight
from ikcli.graph.activations import Glu
from ikcli.models import HParams
from ikcli.vision.decode import Tile
from ikcli.vision.facts import Facts
from ikcli.vision.sizes import Pixels, resized
from ikcli.vision.tensors import Floats, Tensors

Ints = npt.NDArray[np.int32]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Limits:
    """The fewest and most tokens of an image; 0: as the model's processor does."""

    least: int = 0
    most: int = 0


@dataclass(frozen=True, slots=True)
class Grid:
    """Patches of an image: rows and columns, and how many of each make a token. `shown`: see `Tile`."""

    rows: int
    cols: int
    merge: int = 1
    shown: tuple[int, int] | None = None

    @property
    def tokens(self) -> tuple[int, int]:
        """Return rows and columns of tokens."""
        return self.rows // self.merge, self.cols // self.merge

    @property
    def n_tokens(self) -> int:
        return self.tokens[0] * self.tokens[1]

    def order(self) -> Indices:
        """Return the patches with those of a token side by side, as indices row by row."""
        (rows, cols), m = self.tokens, self.merge
        index = np.arange(self.rows * self.cols).reshape(self.rows, self.cols)[: rows * m, : cols * m]
        return index.reshape(rows, m, cols, m).transpose(0, 2, 1, 3).reshape(-1)


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """Inputs of a run: rows (n, columns), (row, column) of each, the ranges (first, end) of rows that each sees, and
    the number of tokens that come out.
    """

    rows: Floats
    at: Ints
    ranges: Ints | None
    n_tokens: int


class Tower:
    """Base of the types; see the module. `hp`: the text model."""

    begin: ClassVar[str] = ""
    end: ClassVar[str] = ""
    resample: ClassVar[str] = "bicubic"
    merge: int = 1
    sections: ClassVar[bool | None] = False  # positions have sections (M-RoPE); None: those of images are plain ones
    framed: ClassVar[bool] = False  # see `Media`
    checks_width: ClassVar[bool] = True  # clip.vision.projection_dim is that of the text model

    def __init__(self, facts: Facts, tensors: Tensors, hp: HParams, limits: Limits) -> None:
        self.facts, self.tensors, self.hp, self.limits = facts, tensors, hp, limits
        self.extra_cols = 0  # of position embeddings beside the pixels
        self.n_deep = 0
        self.n_head_kv = facts.n_head
        self.n_ff = facts.n_ff

    # --- what a type defines ------------------------------------------------------------------------------------------
    def fit(self, width: int, height: int) -> tuple[int, int]:
        """Return the size to which an image is resized."""
        raise NotImplementedError

    def record(self, g: Graph) -> Node:
        """Record the graph; the result has a row per token, with the rows for deeper layers behind the embedding."""
        raise NotImplementedError

    def stages(self) -> list[tuple[Callable[[Graph], Node], int]]:
        """Return what is recorded and run one after the other; a later one reads the result of the one before.

        Beside each is the number of its rows that become one row of the next.
        """
        return [(self.record, 0)]

    def extra(self, grid: Grid) -> Floats | None:
        """Return the position embeddings of all patches row by row, or None."""
        return None

    def both(self) -> bool:
        """Return whether tokens of an image see each other in both directions in the text model."""
        return False

    def most_tokens(self) -> int:
        """Return the most tokens of an image."""
        raise NotImplementedError

    def pieces(self, rgb: Pixels) -> Sequence[str | Pixels | Tile]:
        """Return what an image becomes in a text: tiles at the size that the tower reads, and the texts around them.

        Special tokens in the texts are to be read as such.
        """
        size = self.fit(rgb.shape[1], rgb.shape[0])
        return [self.begin, resized(rgb, *size, self.resample), self.end]

    # --- shared -------------------------------------------------------------------------------------------------------
    def grid(self, width: int, height: int) -> Grid:
        """Return the grid of a resized image."""
        return Grid(height // self.facts.patch, width // self.facts.patch, self.merge)

    def n_tokens(self, grid: Grid) -> int:
        """Return the tokens of an image, those of row breaks included."""
        return grid.n_tokens

    def normalized(self, rgb: Pixels) -> Floats:
        """Return pixels as the tower reads them: (height, width, 3)."""
        mean, std = (np.asarray(x, np.float32) for x in (self.facts.mean, self.facts.std))
        return (rgb.astype(np.float32) / np.float32(255) - mean) / std

    def inputs(self, rgb: Pixels) -> Inputs:
        """Return the input rows of a resized image."""
        grid = self.grid(rgb.shape[1], rgb.shape[0])
        rows, order = patches(self.normalized(rgb), self.facts.patch), self.order(grid)
        extra = self.extra(grid)
        if extra is not None:
            rows = np.concatenate([rows, extra], axis=1)
        at = np.stack(np.divmod(order, grid.cols), axis=1).astype(np.int32)
        return Inputs(np.ascontiguousarray(rows[order]), at, self.ranges(grid), grid.n_tokens)

    def with_class(self, found: Inputs, position: Floats) -> Inputs:
        """Add a row behind the patches for the class token, whose pixels are black, at the origin."""
        n, f = found.rows.shape[1] - self.facts.n_embd, self.facts
        row = np.zeros((1, found.rows.shape[1]), np.float32)
        row[0, n:] = self.tensors.values("v.class_embd", f.n_embd) + position
        if "v.patch_embd.bias" in self.tensors:  # the graph adds it to every row
            row[0, n:] -= self.tensors.values("v.patch_embd.bias", f.n_embd)
        at = np.concatenate([found.at, np.zeros((1, 2), np.int32)])
        return Inputs(np.concatenate([found.rows, row]), at, None, found.n_tokens)

    def order(self, grid: Grid) -> Indices:
        """Return the patches in the order of the tower, as indices row by row."""
        return grid.order()

    def ranges(self, grid: Grid) -> Ints | None:
        """Return the rows that each row sees in layers with windows: (n, 2), first and end."""
        return None

    def parts(self, rgb: Pixels) -> list[Pixels]:
        """Return the parts of a tile that are computed one by one."""
        return [rgb]

    def arrange(self, rows: Floats, grid: Grid) -> Floats:
        """Return the rows of tokens in the order of the text."""
        return rows

    # --- recording ----------------------------------------------------------------------------------------------------
    def embedded(self, g: Graph, w: Weight, bias: str = "v.patch_embd.bias", *, placed: bool = True) -> Node:
        """Record the patch embedding, with the bias if the file has one, plus what `extra` returned if `placed`."""
        n_pixels = 3 * self.facts.patch**2
        x = g.mul_mat(w, g.media_rows(None, 0, n_pixels, "inp_raw"), "patch_embd")
        b = self.tensors.vector_or_none(bias, self.facts.n_embd)
        x = x if b is None else g.add(x, b, "patch_bias")
        return self.placed(g, x) if placed else x

    def placed(self, g: Graph, x: Node) -> Node:
        """Record the addition of what `extra` returned."""
        if not self.extra_cols:
            return x
        rows = g.media_rows(None, 3 * self.facts.patch**2, self.extra_cols, "pos_embd")
        return g.add(x, rows, "pos_added")

    def patch_matrix(self) -> Weight:
        """Return the patch convolution as a matrix."""
        return self.tensors.matrix("v.patch_embd.weight", 3 * self.facts.patch**2, self.facts.n_embd)

    def linear(self, g: Graph, x: Node, name: str, n_out: int, label: str = "") -> Node:
        """Record a product with `name`.weight, and the bias if the file has one."""
        label = label or name
        y = g.mul_mat(self.tensors.matrix(f"{name}.weight", x.cols, n_out), x, label)
        b = self.tensors.vector_or_none(f"{name}.bias", n_out)
        return y if b is None else g.add(y, b, f"{label}_b")

    def norm(self, g: Graph, x: Node, name: str, kind: str, eps: float = 0.0, *, optional: bool = False) -> Node:
        """Record the norm `name`; x itself if it is `optional` and the file has none."""
        if optional and f"{name}.weight" not in self.tensors:
            return x
        eps = eps or self.facts.eps
        w = self.tensors.vector(f"{name}.weight", x.cols)
        if kind == "rms":
            return g.rms_norm(x, w, eps, name)
        return g.norm(x, w, eps, name, b=self.tensors.vector_or_none(f"{name}.bias", x.cols))

    def downsampled(self, g: Graph, x: Node, name: str, n_out: int) -> Node:
        """Record a convolution over the patches of a token, whose columns the file has by channel, then by patch."""
        n, k = x.cols, self.merge**2
        matrix = self.tensors.values(f"{name}.weight").reshape(-1)
        if matrix.size != n_out * k * n:
            raise self.facts.fail(f"tensor '{name}.weight' has {matrix.size} numbers, not {n_out} x {k} x {n}")
        by_patch = matrix.reshape(n_out, n, k).transpose(0, 2, 1).reshape(n_out, k * n)
        y = g.mul_mat(self.tensors.made(f"{name}.by_patch", by_patch, like=f"{name}.weight"),
                      g.merge_rows(x, k, f"{name}.merged"), name)  # fmt: skip
        b = self.tensors.vector_or_none(f"{name}.bias", n_out)
        return y if b is None else g.add(y, b, f"{name}_b")

    def feed_forward(self, g: Graph, x: Node, il: int, act: str) -> Node:
        """Record the feed-forward part of layer il: gated where the file has a gate.

        Old converters call the first matrix ffn_down and the second ffn_up.
        """
        name, n_ff, (first, last) = f"v.blk.{il}", self.n_ff, ("ffn_up", "ffn_down")
        if self.tensors.n_cols(f"{name}.ffn_down.weight") == self.facts.n_embd != n_ff:
            first, last = last, first
        up = self.linear(g, x, f"{name}.{first}", n_ff)
        if f"{name}.ffn_gate.weight" in self.tensors:
            gate = self.linear(g, x, f"{name}.ffn_gate", n_ff)
            cur = g.swiglu(gate, up, f"{name}.ffn_act", Glu(act))
        else:
            cur = g.activate(up, act, f"{name}.ffn_act")
        return self.linear(g, cur, f"{name}.{last}", self.facts.n_embd)

    def attention(
        self,
        g: Graph,
        x: Node,
        il: int,
        rotate: Callable[[Node], Node] = lambda x: x,
        *,
        windowed: bool = False,
        qk_norm: str = "",
        v_norm: bool = False,
        scale: float = 0.0,
        name: str = "",
    ) -> Node:
        """Record attention of layer il, or `name`, over all rows, or `windowed` over the ranges of rows."""
        f, name = self.facts, name or f"v.blk.{il}"
        q, k, v = self._projected(g, x, name)
        if qk_norm:
            q, k = (self.head_norm(g, y, f"{name}.attn_{which}_norm", qk_norm) for y, which in ((q, "q"), (k, "k")))
        if v_norm:
            v = g.norm(v, None, f.eps, f"{name}.v_normed", kind="rms", width=f.head_dim)
        q, k = rotate(q), rotate(k)
        d = f.head_dim
        parts = [HeadSlice(y, 0, d, d) for y in (q, k, v)]
        cur = g.attention(parts[:1], parts[1:2], parts[2], f"{name}.kqv", n_head=f.n_head, n_head_kv=self.n_head_kv,
                          scale=scale or 1 / math.sqrt(d), flash=True, window=1 if windowed else 0,
                          both=not windowed, ranged=windowed, half=True)  # fmt: skip
        return self.linear(g, cur, f"{name}.attn_out", f.n_embd)

    def _projected(self, g: Graph, x: Node, name: str) -> tuple[Node, Node, Node]:
        n, n_kv = self.facts.n_embd, self.n_head_kv * self.facts.head_dim
        if f"{name}.attn_qkv.weight" not in self.tensors:
            q, k, v = (self.linear(g, x, f"{name}.attn_{which}", n if which == "q" else n_kv) for which in "qkv")
            return q, k, v
        whole = self.linear(g, x, f"{name}.attn_qkv", n + 2 * n_kv)
        q, k, v = (
            g.concat_heads([HeadSlice(whole, first, cols, cols)], 1, f"{name}.{which}")
            for which, first, cols in (("q", 0, n), ("k", n, n_kv), ("v", n + n_kv, n_kv))
        )
        return q, k, v

    def head_norm(self, g: Graph, x: Node, name: str, kind: str) -> Node:
        """Record the norm of heads `name`; x itself if the file has none."""
        if f"{name}.weight" not in self.tensors:
            return x
        n = self.facts.head_dim if kind == "rms" else self.facts.n_embd
        w = self.tensors.vector(f"{name}.weight", n)
        return g.rms_norm(x, w, self.facts.eps, name)

    def scaled(self, g: Graph, x: Node, name: str) -> Node:
        """Multiply by the layer scale `name`, if the file has one."""
        if f"{name}.weight" not in self.tensors:
            return x
        return g.norm(x, self.tensors.vector(f"{name}.weight", x.cols), 0.0, name, kind="none")

    def layer(
        self, g: Graph, x: Node, il: int, kind: str, act: str, rotate: Callable[[Node], Node] = lambda x: x, *,
        windowed: bool = False, qk_norm: str = "",
    ) -> Node:  # fmt: skip
        """Record a pre-norm layer."""
        name = f"v.blk.{il}"
        cur = self.attention(g, self.norm(g, x, f"{name}.ln1", kind), il, rotate, windowed=windowed, qk_norm=qk_norm)
        x = g.add(self.scaled(g, cur, f"{name}.ls1"), x, f"{name}.attn_sum")
        cur = self.feed_forward(g, self.norm(g, x, f"{name}.ln2", kind), il, act)
        return g.add(self.scaled(g, cur, f"{name}.ls2"), x, f"{name}.out")

    def rope_2d(self, g: Graph, theta: float, *, alternate: bool = False, neox: bool = True) -> Callable[[Node], Node]:
        """Return a rotation of the first half of pairs by the row and of the second by the column.

        `alternate`: the two halves take the frequencies in turns instead of both having the same.
        """
        d = self.facts.head_dim
        if alternate:
            freq = theta ** (-np.arange(0, d, 2, dtype=np.float64) / d)
            rows, cols = freq[0::2], freq[1::2]
        else:
            rows = cols = theta ** (-np.arange(0, d // 2, 2, dtype=np.float64) / (d // 2))
        return self.rope_axes(g, [*rows.tolist(), *cols.tolist()], [1] * len(rows) + [2] * len(cols), neox=neox)

    def rope_axes(self, g: Graph, freq: list[float], axes: list[int], *, neox: bool) -> Callable[[Node], Node]:
        """Return a rotation of every pair by its frequency times the row (axis 1) or the column (axis 2)."""
        d = self.facts.head_dim
        if d % 4:
            raise self.facts.fail(f"heads of {d} columns cannot be rotated in two dimensions")
        table = g.axis_rope_table(freq, axes)
        return lambda x: g.rope(x, table, x.cols // d, d, "rotated", neox=neox)


def patches(pixels: Floats, size: int) -> Floats:
    """Return the patches row by row, each as channel, row, column."""
    rows, cols = pixels.shape[0] // size, pixels.shape[1] // size
    cut = pixels[: rows * size, : cols * size].reshape(rows, size, cols, size, 3)
    return cut.transpose(0, 2, 4, 1, 3).reshape(rows * cols, -1)
