"""Kimi-VL and Kimi K2.5 (MoonViT): any grid, black margins up to whole tokens, bicubic positions, 2-D rotation."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from ikcli.graph import Graph, Node
from ikcli.models import HParams
from ikcli.vision.facts import Facts
from ikcli.vision.positions import blended, cubic, square_table
from ikcli.vision.sizes import Pixels, padded, resized
from ikcli.vision.tensors import Floats, Tensors
from ikcli.vision.tower import Grid, Limits, Tower

_MOST_SIDE = 512  # patches


class KimiVl(Tower):
    """Kimi-VL: columns and rows rotate pairs in turns."""

    begin, end = "<|media_start|>", "<|media_end|>"
    most_patches: ClassVar[int] = 4096
    in_turns: ClassVar[bool] = True

    def __init__(self, facts: Facts, tensors: Tensors, hp: HParams, limits: Limits) -> None:
        super().__init__(facts, tensors, hp, limits)
        self.extra_cols, self.merge = facts.n_embd, facts.integer("projector.scale_factor", 2, 1, 16)
        self.most = (
            facts.integer("image_max_pixels", self.most_patches * facts.patch**2, 1, facts.patch**2 << 16)
            // facts.patch**2
        )

    @property
    def unit(self) -> int:
        """Return the pixels of a token's side."""
        return self.facts.patch * self.merge

    def _inner(self, width: int, height: int) -> tuple[int, int]:
        """Return the size of the picture inside its margins; it is never enlarged."""
        patch, most = self.facts.patch, self.limits.most * self.merge**2 or self.most
        count = max(width // patch, 1) * max(height // patch, 1)
        longest = _MOST_SIDE * patch - (self.unit if self.in_turns else 0)
        scale = min(1.0, math.sqrt(most / count), longest / width, longest / height)
        if scale == 1:
            return width, height
        return max(int(width * scale), 1), max(int(height * scale), 1)

    def fit(self, width: int, height: int) -> tuple[int, int]:
        w, h = self._inner(width, height)
        return -(-w // self.unit) * self.unit, -(-h // self.unit) * self.unit

    def pieces(self, rgb: Pixels) -> list[str | Pixels]:
        size = rgb.shape[1], rgb.shape[0]
        small = resized(rgb, *self._inner(*size), self.resample)
        return [self.begin, padded(small, *self.fit(*size)), self.end]

    def most_tokens(self) -> int:
        return self.limits.most or max(self.most // self.merge**2, 1)

    def extra(self, grid: Grid) -> Floats:
        table = square_table(self.facts, self.tensors)
        side = len(table)
        return blended(table, cubic(side, grid.rows), cubic(side, grid.cols))

    def record(self, g: Graph) -> Node:
        f, n = self.facts, self.facts.head_dim // 4
        x = self.embedded(g, self.patch_matrix())
        freq = 10000.0 ** (-np.arange(n, dtype=np.float64) / n)
        if self.in_turns:
            rotate = self.rope_axes(g, np.repeat(freq, 2).tolist(), [2, 1] * n, neox=False)
        else:
            rotate = self.rope_axes(g, freq.tolist() * 2, [2] * n + [1] * n, neox=False)
        for il in range(f.n_layer):
            x = self.layer(g, x, il, "layer", "gelu", rotate)
        x = self.norm(g, self.norm(g, x, "v.post_ln", "layer"), "mm.input_norm", "layer", 1e-5)
        x = g.merge_rows(x, self.merge**2, "merged")
        x = self.linear(g, x, "mm.1", self.tensors.n_rows("mm.1.weight"))
        return self.linear(g, g.activate(x, "gelu_erf", "mm_act"), "mm.2", self.hp.n_embd)


class KimiK25(KimiVl):
    """Kimi K2.5: the converter puts the pairs of columns before those of rows."""

    begin, end = "<|media_begin|>", "<|media_end|>"
    most_patches = 16384
    in_turns = False
