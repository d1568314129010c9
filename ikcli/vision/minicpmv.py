"""MiniCPM-V 2.5 to 4.5 and MiniCPM-o 2.6: SigLIP over any grid, and a resampler with a fixed number of queries."""

from __future__ import annotations

import math

import numpy as np

from ikcli.graph import Graph, Node
from ikcli.models import HParams
from ikcli.vision.facts import Facts
from ikcli.vision.positions import bucketed, square_table
from ikcli.vision.sizes import Pixels, cut_grid, resized
from ikcli.vision.tensors import Floats, Tensors
from ikcli.vision.tower import Grid, Inputs, Limits, Tower

_HEAD, _TILES, _LARGEST, _VERSIONS = 128, 9, 2048, (2, 3, 4, 5, 6, 100045)


class SlicedTower(Tower):
    """Images as a view of the whole and, if they are larger than a view, slices in rows of about that area."""

    checks_width = False
    nested = False  # slices are in one <slice> together

    def __init__(self, facts: Facts, tensors: Tensors, hp: HParams, limits: Limits) -> None:
        super().__init__(facts, tensors, hp, limits)
        if facts.image_size > _LARGEST:
            raise facts.fail(
                f"clip.vision.image_size is {facts.image_size}; slices have at most {_LARGEST} pixels a side"
            )
        self.unit = facts.patch  # pixels of which sides are multiples
        self.extra_cols = facts.n_embd

    def _best(self, width: float, height: float, *, enlarge: bool) -> tuple[int, int]:
        side, unit = self.facts.image_size, self.unit
        if width * height > side * side or enlarge:
            aspect = width / height
            height = int(side / math.sqrt(aspect))
            width = int(height * aspect)
        w, h = (max(round(x / unit) * unit, unit) for x in (width, height))
        return w, h

    def _slices(self, width: int, height: int) -> tuple[int, int]:
        """Return columns and rows of slices; (1, 1) for an image that is not sliced."""
        n = min(math.ceil(width * height / self.facts.image_size**2), _TILES)
        best, found = math.inf, (1, 1)
        for count in (n - 1, n, n + 1) if n > 1 else ():
            for cols in range(1, count + 1):
                if not 1 < count <= _TILES or count % cols:
                    continue
                off = abs(math.log(width / height) - math.log(cols / (count // cols)))
                if off < best:
                    best, found = off, (cols, count // cols)
        return found

    def fit(self, width: int, height: int) -> tuple[int, int]:
        """Return the size of the view of the whole image."""
        return self._best(width, height, enlarge=width * height <= self.facts.image_size**2)

    def pieces(self, rgb: Pixels) -> list[str | Pixels]:
        height, width = rgb.shape[:2]
        found: list[str | Pixels] = ["<image>", resized(rgb, *self.fit(width, height), self.resample)]
        if width * height <= self.facts.image_size**2:
            return [*found, "</image>"]
        cols, rows = self._slices(width, height)
        w, h = (max(round(x / n) * n, n) / n for x, n in ((width, cols), (height, rows)))
        w, h = self._best(w, h, enlarge=True)
        open_, close = ("<image>", "</image>") if self.nested else ("<slice>", "</slice>")
        text = f"</image>{'<slice>' if self.nested else ''}"
        for slices in cut_grid(resized(rgb, w * cols, h * rows, self.resample), w, h):
            for tile in slices:
                found += [text + open_, tile]
                text = close
            text = f"{close}\n"
        return [*found, f"{close}{'</slice>' if self.nested else ''}"]

    def extra(self, grid: Grid) -> Floats:
        """Return the rows of the table of positions in which the places of patches fall."""
        table = square_table(self.facts, self.tensors)
        side = len(table)
        rows, cols = (bucketed(side, (np.arange(n) * (1 / n)).astype(np.float32)) for n in (grid.rows, grid.cols))
        return table[rows][:, cols].reshape(-1, self.facts.n_embd)


class MiniCpmV(SlicedTower):
    """See the module. The view of the whole image comes first, then its slices in rows."""

    def __init__(self, facts: Facts, tensors: Tensors, hp: HParams, limits: Limits) -> None:
        super().__init__(facts, tensors, hp, limits)
        version = facts.metadata.get("clip.minicpmv_version", 2)
        if not isinstance(version, int) or version not in _VERSIONS:
            raise facts.fail(f"clip.minicpmv_version is {version}; supported: {', '.join(map(str, _VERSIONS))}")
        self.nested = version == 2  # slices are in one <slice> together
        self.width, self.n_query = hp.n_embd, tensors.n_rows("resampler.query")
        if self.width % _HEAD:
            raise facts.fail(f"a resampler has heads of {_HEAD} columns; {self.width} are not a multiple")
        self.query = tensors.values("resampler.query", self.n_query, self.width)

    def most_tokens(self) -> int:
        return self.n_query

    def n_tokens(self, grid: Grid) -> int:
        return self.n_query

    def _waves(self, grid: Grid) -> Floats:
        """Return the positions that keys of the resampler get: sines and cosines of columns, then of rows."""
        n = self.width // 4
        omega = 1.0 / 10000 ** (np.arange(n, dtype=np.float32) / np.float32(n))
        row, col = np.divmod(np.arange(grid.rows * grid.cols), grid.cols)
        parts = [f(at[:, None] * omega) for at in (col, row) for f in (np.sin, np.cos)]
        return np.concatenate(parts, axis=1).astype(np.float32)

    def inputs(self, rgb: Pixels) -> Inputs:
        """Return rows of [pixels | positions | waves]; the graph has a result per patch."""
        found = super().inputs(rgb)
        waves = self._waves(self.grid(rgb.shape[1], rgb.shape[0]))
        return Inputs(np.concatenate([found.rows, waves], axis=1), found.at, None, found.n_tokens)

    def record(self, g: Graph) -> Node:
        """Record the tower, and keys and values of the resampler side by side."""
        f, n = self.facts, self.width
        x = self.embedded(g, self.patch_matrix())
        for il in range(f.n_layer):
            x = self.layer(g, x, il, "layer", f.act)
        x = self.norm(g, x, "v.post_ln", "layer")
        if "resampler.kv.weight" in self.tensors:
            x = self.linear(g, x, "resampler.kv", n)
        x = self.norm(g, x, "resampler.ln_kv", "layer")
        placed = g.add(x, g.media_rows(None, 3 * f.patch**2 + f.n_embd, n, "waves"), "resampler_placed")
        parts = [self.linear(g, y, f"resampler.attn.{name}", n) for name, y in (("k", placed), ("v", x))]
        return g.merge_rows(g.concat(parts, "resampler_kv"), 1, "resampler_out")

    def arrange(self, rows: Floats, grid: Grid) -> Floats:
        """Let the queries attend to all patches: few rows, which NumPy computes."""
        n, heads = self.width, self.width // _HEAD
        k, v = (rows[:, i * n : (i + 1) * n].reshape(-1, heads, _HEAD).transpose(1, 0, 2) for i in (0, 1))
        q = self._linear(self._normed(self.query, "resampler.ln_q"), "resampler.attn.q")
        scores = q.reshape(-1, heads, _HEAD).transpose(1, 0, 2) @ k.transpose(0, 2, 1) / np.float32(math.sqrt(_HEAD))
        scores = np.exp(scores - scores.max(axis=2, keepdims=True))
        seen = (scores @ v / scores.sum(axis=2, keepdims=True)).transpose(1, 0, 2).reshape(-1, n)
        out = self._normed(self._linear(seen, "resampler.attn.out"), "resampler.ln_post")
        return self._linear(out, "resampler.proj")

    def _linear(self, x: Floats, name: str) -> Floats:
        y = x @ self.tensors.values(f"{name}.weight", self.width, self.width).T
        return y + self.tensors.values(f"{name}.bias", self.width) if f"{name}.bias" in self.tensors else y

    def _normed(self, x: Floats, name: str) -> Floats:
        x = x - x.mean(axis=1, keepdims=True)
        x = x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + np.float32(self.facts.eps))
        return x * self.tensors.values(f"{name}.weight", self.width) + self.tensors.values(f"{name}.bias", self.width)
