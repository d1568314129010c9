"""GLM-Edge-V: SigLIP over one square with black margins, a gated projector of 2x2 patches between two further rows."""

from __future__ import annotations

import numpy as np

from ikcli.graph import Graph, Node
from ikcli.models import HParams
from ikcli.vision.facts import Facts
from ikcli.vision.sizes import Pixels, padded, resized
from ikcli.vision.tensors import Floats, Tensors
from ikcli.vision.tower import Grid, Limits, Tower


class GlmEdge(Tower):
    """See the module."""

    resample = "bilinear"
    merge = 2
    checks_width = False  # the key is of the tower's training

    def __init__(self, facts: Facts, tensors: Tensors, hp: HParams, limits: Limits) -> None:
        super().__init__(facts, tensors, hp, limits)
        self.extra_cols, self.side = facts.n_embd, facts.image_size // facts.patch
        if self.side % self.merge:
            raise facts.fail(f"a projector of GLM-Edge halves the grid, which has {self.side} patches on a side")
        self.frame = [tensors.values(name, hp.n_embd) for name in ("adapter.boi", "adapter.eoi")]

    def fit(self, width: int, height: int) -> tuple[int, int]:
        return self.facts.image_size, self.facts.image_size

    def pieces(self, rgb: Pixels) -> list[str | Pixels]:
        side, (height, width) = self.facts.image_size, rgb.shape[:2]
        if width > height:
            w, h = side, max(int(height * (side / width)), 1)
        else:
            w, h = max(int(width * (side / height)), 1), side
        return [padded(resized(rgb, w, h, self.resample), side, side)]

    def n_tokens(self, grid: Grid) -> int:
        return grid.n_tokens + 2

    def most_tokens(self) -> int:
        return (self.side // self.merge) ** 2 + 2

    def extra(self, grid: Grid) -> Floats:
        return self.tensors.values("v.position_embd.weight", self.side**2, self.facts.n_embd)

    def record(self, g: Graph) -> Node:
        f, n = self.facts, self.hp.n_embd
        x = self.embedded(g, self.patch_matrix())
        for il in range(f.n_layer):
            x = self.layer(g, x, il, "layer", f.act)
        x = self.downsampled(g, self.norm(g, x, "v.post_ln", "layer", optional=True), "adapter.conv", n)
        x = self.linear(g, x, "adapter.linear.linear", n)
        x = g.activate(self.norm(g, x, "adapter.linear.norm1", "layer", 1e-5), "gelu_erf", "mm_act")
        n_ff = self.tensors.n_rows("adapter.linear.gate.weight")
        gate, up = (self.linear(g, x, f"adapter.linear.{name}", n_ff) for name in ("gate", "dense_h_to_4h"))
        return self.linear(g, g.swiglu(gate, up, "mm_gated"), "adapter.linear.dense_4h_to_h", n)

    def arrange(self, rows: Floats, grid: Grid) -> Floats:
        begin, end = self.frame
        return np.concatenate([begin[None], rows, end[None]])
