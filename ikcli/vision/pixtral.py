"""Pixtral (Mistral Small 3.1, Ministral 3): 2-D rotation over any grid, merged patches, a row-break embedding."""

from __future__ import annotations

import numpy as np

from ikcli.graph import Graph, Node
from ikcli.models import HParams
from ikcli.vision.facts import Facts
from ikcli.vision.sizes import round_up
from ikcli.vision.tensors import Floats, Tensors
from ikcli.vision.tower import Grid, Limits, Tower


class Pixtral(Tower):
    """See the module."""

    end = "[IMG_END]"

    def __init__(self, facts: Facts, tensors: Tensors, hp: HParams, limits: Limits) -> None:
        super().__init__(facts, tensors, hp, limits)
        self.merge = facts.integer("spatial_merge_size", 1, 1, 16)
        self.breaks = "v.token_embd.img_break" in tensors

    def fit(self, width: int, height: int) -> tuple[int, int]:
        unit = self.facts.patch * self.merge
        size = round_up(width, height, unit, self.facts.image_size)
        longest = self.facts.image_size
        while self.limits.most and self._count(size) > self.limits.most and longest > unit:
            longest = max(longest * 15 // 16, unit)
            size = round_up(width, height, unit, longest)
        return size

    def _count(self, size: tuple[int, int]) -> int:
        return self.n_tokens(self.grid(*size))

    def most_tokens(self) -> int:
        side = -(-self.facts.image_size // (self.facts.patch * self.merge))
        return self.limits.most or side * (side + self.breaks)

    def n_tokens(self, grid: Grid) -> int:
        rows, cols = grid.tokens
        return rows * cols + (rows - 1) * self.breaks

    def arrange(self, rows: Floats, grid: Grid) -> Floats:
        """Put the row-break embedding behind every row but the last."""
        if not self.breaks:
            return rows
        n, (n_rows, n_cols) = self.hp.n_embd, grid.tokens
        row = self.tensors.values("v.token_embd.img_break", n)
        whole = np.concatenate([rows.reshape(n_rows, n_cols, n), np.broadcast_to(row, (n_rows, 1, n))], axis=1)
        return np.ascontiguousarray(whole.reshape(-1, n)[:-1])

    def record(self, g: Graph) -> Node:
        f = self.facts
        x = self.norm(g, self.embedded(g, self.patch_matrix()), "v.pre_ln", "rms")
        # Converters permute rows of Q and K, so that pairs are adjacent.
        rotate = self.rope_2d(g, 10000.0, alternate=True, neox=False)
        for il in range(f.n_layer):
            x = self.layer(g, x, il, "rms", f.act, rotate)
        x = self.norm(g, x, "mm.input_norm", "rms", optional=True)
        if "mm.patch_merger.weight" in self.tensors:
            x = self.downsampled(g, x, "mm.patch_merger", f.n_embd)
        x = self.linear(g, x, "mm.1", self.tensors.n_rows("mm.1.weight"))
        return self.linear(g, g.activate(x, "gelu_erf", "mm_act"), "mm.2", self.hp.n_embd)


class LightOnOcr(Pixtral):
    """LightOnOCR: no row breaks, other tokens around an image."""

    begin, end = "<|im_start|>", "<|im_end|>"
