"""dots.ocr: RMS norms, gated SiLU, 2-D rotation over any grid, tokens of 2x2 patches, positions without sections."""

from __future__ import annotations

from ikcli.graph import Graph, Node, Weight
from ikcli.models import HParams
from ikcli.vision.facts import Facts
from ikcli.vision.qwen import QwenTower
from ikcli.vision.tensors import Tensors
from ikcli.vision.tower import Limits, Tower

_LEAST, _MOST = 4, 14400  # tokens


class DotsOcr(QwenTower):
    """See the module."""

    begin, end = "<|img|>", "<|endofimg|>"
    sections = False

    def __init__(self, facts: Facts, tensors: Tensors, hp: HParams, limits: Limits) -> None:
        super().__init__(facts, tensors, hp, limits)
        self.merge = facts.integer("projector.scale_factor", 2, 1, 16)
        self.least, self.most = self.pixel_limits(_LEAST * self.unit**2, _MOST * self.unit**2)

    def patch_matrix(self) -> Weight:
        return Tower.patch_matrix(self)

    def record(self, g: Graph) -> Node:
        f = self.facts
        x, rotate = self.norm(g, self.embedded(g, self.patch_matrix()), "v.pre_ln", "rms"), self.rope_2d(g, 10000.0)
        for il in range(f.n_layer):
            x = self.layer(g, x, il, "rms", f.act, rotate)
        last = "v.post_ln" if "v.post_ln.weight" in self.tensors else "mm.post_norm"
        x = self.norm(
            g, x, last, "rms", optional=True
        )  # the last layers of the tower can be left out, then it has none
        return self.merged(g, self.norm(g, x, "mm.input_norm", "layer", 1e-6))
