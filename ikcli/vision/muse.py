"""Muse Glimmer: windows in most layers, 2-D rotation, positions from a table, channels of 2x2 patches side by side."""

from __future__ import annotations

import itertools
import math

import numpy as np

from ikcli.graph import Graph, Node, Weight
from ikcli.models import HParams
from ikcli.vision.facts import Facts
from ikcli.vision.positions import blended, square_table
from ikcli.vision.qwen import Qwen25Vl
from ikcli.vision.tensors import Floats, Tensors
from ikcli.vision.tower import Grid, Limits, Tower

_MOST, _EVERY = 4096, 4  # tokens, layers


class MuseGlimmer(Qwen25Vl):
    """See the module. A window has as many patches on a side as the table of positions."""

    begin, end = "<|image_start|>", "<|image_end|>"
    resample = "lanczos"
    sections = False

    def __init__(self, facts: Facts, tensors: Tensors, hp: HParams, limits: Limits) -> None:
        super().__init__(facts, tensors, hp, limits)
        self.extra_cols, self.every = facts.n_embd, _EVERY
        side = len(square_table(facts, tensors))
        if side % self.merge:
            raise facts.fail(f"windows of {side} patches are not whole tokens of {self.merge} x {self.merge} patches")
        self.side = side // self.merge

    def fit(self, width: int, height: int) -> tuple[int, int]:
        """Return the size in tokens whose aspect is closest; of equally close ones, the one transformers takes."""
        rows, cols, most, aspect = height / self.unit, width / self.unit, self.most_tokens(), height / width
        if rows * cols > most:
            ratio = cols / rows
            rows = math.sqrt(most / ratio)
            cols = rows * ratio
        # the order of a set decides between equal ones
        found = list(set(itertools.product((math.floor(rows), math.ceil(rows)), (math.floor(cols), math.ceil(cols)))))
        found = [(r, c) for r, c in found if r >= 1 and c >= 1 and r * c <= most]
        r, c = min(found or [(max(1, round(rows)), max(1, round(cols)))], key=lambda n: abs(n[0] / n[1] - aspect))
        return c * self.unit, r * self.unit

    def most_tokens(self) -> int:
        return self.limits.most or _MOST

    def patch_matrix(self) -> Weight:
        return Tower.patch_matrix(self)

    def extra(self, grid: Grid) -> Floats:
        """Return the positions of a grid on its side, column by column, as the model was trained with."""
        table = square_table(self.facts, self.tensors)
        side = len(table)
        return blended(table, _faded(side, grid.cols), _faded(side, grid.rows))

    def record(self, g: Graph) -> Node:
        f, n = self.facts, self.facts.head_dim // 4
        x = self.norm(g, self.embedded(g, self.patch_matrix()), "v.pre_ln", "layer")
        freq = [10000.0 ** (-i / n) for i in range(n)]
        rotate = self.rope_axes(g, freq * 2, [2] * n + [1] * n, neox=False)
        for il in range(f.n_layer):
            windowed = (il + 1) % self.every != 0 and il != f.n_layer - 1
            x = self.layer(g, x, il, "layer", "gelu_erf", rotate, windowed=windowed)
        x = self.downsampled(g, self.norm(g, x, "v.post_ln", "layer"), "mm.0", self.tensors.n_rows("mm.0.weight"))
        x = self.linear(g, g.activate(x, "gelu_erf", "mm_act"), "mm.1", self.tensors.n_rows("mm.1.weight"))
        return self.linear(g, g.activate(x, "gelu_erf", "mm_act_1"), "mm.2", self.hp.n_embd)


def _faded(side: int, n: int) -> Floats:
    """Return the weights (n, side) of bilinear interpolation between pixel centres, with zeros around the table."""
    at = (np.arange(n, dtype=np.float64) + 0.5) * side / n - 0.5
    return np.asarray(np.clip(1 - np.abs(np.arange(side) - at[:, None]), 0, None), np.float32)
