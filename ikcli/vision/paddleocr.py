"""PaddleOCR-VL: SigLIP over any grid, bilinear positions, 2-D rotation, tokens of 2x2 patches, M-RoPE."""

from __future__ import annotations

from ikcli.graph import Graph, Node, Weight
from ikcli.models import HParams
from ikcli.vision.facts import Facts
from ikcli.vision.positions import blended, linear, square_table
from ikcli.vision.qwen import QwenTower
from ikcli.vision.tensors import Floats, Tensors
from ikcli.vision.tower import Grid, Limits, Tower

_LEAST, _MOST = 384 * 384, 1536 * 1536  # pixels


class PaddleOcr(QwenTower):
    """See the module."""

    begin, end = "<|IMAGE_START|>", "<|IMAGE_END|>"

    def __init__(self, facts: Facts, tensors: Tensors, hp: HParams, limits: Limits) -> None:
        super().__init__(facts, tensors, hp, limits)
        self.extra_cols, self.merge = facts.n_embd, facts.integer("projector.scale_factor", 2, 1, 16)
        self.least, self.most = self.pixel_limits(_LEAST, _MOST)

    def fit(self, width: int, height: int) -> tuple[int, int]:
        if height < self.unit:
            width, height = round(width * self.unit / height), self.unit
        if width < self.unit:
            width, height = self.unit, round(height * self.unit / width)
        return super().fit(width, height)

    def extra(self, grid: Grid) -> Floats:
        table = square_table(self.facts, self.tensors)
        side = len(table)
        return blended(table, linear(side, grid.rows), linear(side, grid.cols))

    def patch_matrix(self) -> Weight:
        return Tower.patch_matrix(self)

    def record(self, g: Graph) -> Node:
        f = self.facts
        x, rotate = self.embedded(g, self.patch_matrix()), self.rope_2d(g, 10000.0)
        for il in range(f.n_layer):
            x = self.layer(g, x, il, "layer", f.act, rotate)
        x = self.norm(g, self.norm(g, x, "v.post_ln", "layer"), "mm.input_norm", "layer", 1e-5)
        x = g.merge_rows(x, self.merge**2, "merged")
        x = self.linear(g, x, "mm.1", self.tensors.n_rows("mm.1.weight"))
        return self.linear(g, g.activate(x, "gelu_erf", "mm_act"), "mm.2", self.hp.n_embd)
