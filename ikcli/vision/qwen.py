"""Qwen 2 VL, Qwen 2.5 VL, EXAONE 4.5, Qwen 3 VL: patches of two equal frames, 2-D rotation, tokens of 2x2 patches."""

from __future__ import annotations

import numpy as np

from ikcli.graph import Graph, Node, Weight
from ikcli.models import HParams
from ikcli.vision.facts import Facts
from ikcli.vision.positions import square_table
from ikcli.vision.sizes import round_to_area
from ikcli.vision.tensors import Floats, Tensors
from ikcli.vision.tower import Grid, Indices, Ints, Limits, Tower

_LEAST, _MOST = 8, 4096  # tokens, where the command line does not say
_WINDOW = 112  # pixels


class QwenTower(Tower):
    """What the three have in common."""

    begin, end = "<|vision_start|>", "<|vision_end|>"
    sections = True

    def __init__(self, facts: Facts, tensors: Tensors, hp: HParams, limits: Limits) -> None:
        super().__init__(facts, tensors, hp, limits)
        self.merge = facts.integer("spatial_merge_size", 2, 1, 16)
        self.least, self.most = _LEAST * self.unit**2, _MOST * self.unit**2  # pixels

    def pixel_limits(self, least: int, most: int) -> tuple[int, int]:
        """Return the fewest and most pixels of an image that the file says, or these defaults."""
        limit = self.unit**2 << 16
        least = self.facts.integer("image_min_pixels", least, 1, limit)
        return least, max(self.facts.integer("image_max_pixels", most, 1, limit), least, self.unit**2)

    @property
    def unit(self) -> int:
        """Return the pixels of a token's side."""
        return self.facts.patch * self.merge

    def fit(self, width: int, height: int) -> tuple[int, int]:
        area = self.unit**2
        most = self.limits.most * area or max(self.most, self.limits.least * area)
        return round_to_area(width, height, self.unit, min(self.limits.least * area or self.least, most), most)

    def most_tokens(self) -> int:
        return self.limits.most or max(self.most // self.unit**2, self.limits.least)

    def patch_matrix(self) -> Weight:
        """Return the sum of the convolutions of both frames, which are equal for an image."""
        f, t = self.facts, self.tensors
        shape = (f.n_embd, 3, f.patch, f.patch)
        both = t.values("v.patch_embd.weight", *shape)
        if "v.patch_embd.weight.1" in t:
            both = both + t.values("v.patch_embd.weight.1", *shape)
        return t.made("v.patch_embd.sum", both.reshape(f.n_embd, -1))

    def merged(self, g: Graph, x: Node) -> Node:
        """Record the projector: patches of a token side by side, two layers."""
        cur = g.merge_rows(x, self.merge**2, "merged")
        n = self.tensors.n_rows("mm.0.weight")
        cur = g.activate(self.linear(g, cur, "mm.0", n), "gelu_erf", "mm_act")
        return self.linear(g, cur, "mm.2", self.hp.n_embd)


class Qwen2Vl(QwenTower):
    """Qwen 2 VL: layer norms, quick GELU, attention over all patches."""

    def record(self, g: Graph) -> Node:
        f = self.facts
        x, rotate = self.embedded(g, self.patch_matrix()), self.rope_2d(g, 10000.0)
        for il in range(f.n_layer):
            x = self.layer(g, x, il, "layer", f.act, rotate)
        return self.merged(g, self.norm(g, x, "v.post_ln", "layer"))


class Qwen25Vl(QwenTower):
    """Qwen 2.5 VL: RMS norms, SiLU with gates, attention in windows in most layers."""

    def __init__(self, facts: Facts, tensors: Tensors, hp: HParams, limits: Limits) -> None:
        super().__init__(facts, tensors, hp, limits)
        self.every = facts.integer("n_wa_pattern", 0, 0, 512)
        self.side = max(facts.integer("window_size", _WINDOW, 1, 1 << 14) // self.unit, 1)  # tokens of a window's side

    def _windows(self, grid: Grid) -> tuple[Indices, Indices]:
        """Return the tokens in the order of windows, and how many each window has."""
        rows, cols = grid.tokens
        row, col = np.divmod(np.arange(rows * cols), cols)
        window = row // self.side * -(-cols // self.side) + col // self.side
        return np.argsort(window, kind="stable"), np.unique(window, return_counts=True)[1]

    def order(self, grid: Grid) -> Indices:
        n = self.merge**2
        found: Indices = grid.order().reshape(-1, n)[self._windows(grid)[0]].reshape(-1) if self.every else grid.order()
        return found

    def ranges(self, grid: Grid) -> Ints | None:
        if not self.every:
            return None
        counts = self._windows(grid)[1] * self.merge**2
        end = np.repeat(np.cumsum(counts), counts)
        return np.stack([end - np.repeat(counts, counts), end], axis=1).astype(np.int32)

    def arrange(self, rows: Floats, grid: Grid) -> Floats:
        if not self.every:
            return rows
        out = np.empty_like(rows)
        out[self._windows(grid)[0]] = rows
        return out

    def record(self, g: Graph) -> Node:
        f = self.facts
        x, rotate = self.embedded(g, self.patch_matrix()), self.rope_2d(g, 10000.0)
        for il in range(f.n_layer):
            windowed = bool(self.every) and (il + 1) % self.every != 0
            x = self.layer(g, x, il, "rms", f.act, rotate, windowed=windowed)
        return self.merged(g, self.norm(g, x, "v.post_ln", "rms"))


class Exaone45(Qwen25Vl):
    """EXAONE 4.5: as Qwen 2.5 VL with fewer heads of keys and values; positions without sections."""

    begin, end = "<vision>", "</vision>"
    sections = False

    def __init__(self, facts: Facts, tensors: Tensors, hp: HParams, limits: Limits) -> None:
        super().__init__(facts, tensors, hp, limits)
        self.least, self.most = self.pixel_limits(self.least, self.most)
        self.n_head_kv = facts.integer("attention.head_count_kv", facts.n_head, 1, facts.n_head)
        if facts.n_head % self.n_head_kv:
            raise facts.fail(
                f"clip.vision.attention.head_count_kv {self.n_head_kv} does not divide {facts.n_head} heads"
            )


class Qwen3Vl(QwenTower):
    """Qwen 3 VL: layer norms, learned positions interpolated to the grid, rows for deeper layers of the text model."""

    def __init__(self, facts: Facts, tensors: Tensors, hp: HParams, limits: Limits) -> None:
        super().__init__(facts, tensors, hp, limits)
        self.extra_cols = facts.n_embd
        flags = np.ravel(facts.metadata.get("clip.vision.is_deepstack_layers", ()))
        self.deep = [il for il, used in enumerate(flags[: facts.n_layer].tolist()) if used]
        self.n_deep = len(self.deep)

    def extra(self, grid: Grid) -> Floats:
        """Return the table of positions, interpolated between corners that stay where they are."""
        n, square = self.facts.n_embd, square_table(self.facts, self.tensors)
        side = len(square)
        (r0, r1, dr), (c0, c1, dc) = (_between(side, k) for k in (grid.rows, grid.cols))
        top = square[r0][:, c0] * (1 - dc)[None, :, None] + square[r0][:, c1] * dc[None, :, None]
        low = square[r1][:, c0] * (1 - dc)[None, :, None] + square[r1][:, c1] * dc[None, :, None]
        return np.asarray(top * (1 - dr)[:, None, None] + low * dr[:, None, None], np.float32).reshape(-1, n)

    def record(self, g: Graph) -> Node:
        f, deep = self.facts, []
        x, rotate = self.embedded(g, self.patch_matrix()), self.rope_2d(g, 10000.0)
        for il in range(f.n_layer):
            x = self.layer(g, x, il, "layer", f.act, rotate)
            if il in self.deep:
                deep.append(self._deep(g, x, f"v.deepstack.{il}"))
        out = self.merged(g, self.norm(g, x, "v.post_ln", "layer"))
        return g.concat([out, *deep], "embeddings") if deep else out

    def _deep(self, g: Graph, x: Node, name: str) -> Node:
        cur = self.norm(g, g.merge_rows(x, self.merge**2, f"{name}.merged"), f"{name}.norm", "layer")
        cur = self.linear(g, cur, f"{name}.fc1", self.tensors.n_rows(f"{name}.fc1.weight"))
        return self.linear(g, g.activate(cur, "gelu_erf", f"{name}.act"), f"{name}.fc2", self.hp.n_embd)


def _between(side: int, n: int) -> tuple[Indices, Indices, Floats]:
    """Return for n points from corner to corner the entries around each, and the part of the second."""
    at = np.linspace(0, side - 1, n, dtype=np.float32)
    low = at.astype(np.int64)
    return low, np.minimum(low + 1, side - 1), at - low.astype(np.float32)
