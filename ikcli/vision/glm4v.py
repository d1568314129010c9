"""GLM-4.1V, 4.5V, 4.6V and GLM-OCR: patches of two equal frames, RMS norms, 2-D rotation, a gated projector, M-RoPE."""

from __future__ import annotations

from ikcli.graph import Graph, Node
from ikcli.graph.activations import Glu
from ikcli.models import HParams
from ikcli.vision.facts import Facts
from ikcli.vision.positions import blended, cubic, square_table
from ikcli.vision.qwen import QwenTower
from ikcli.vision.tensors import Floats, Tensors
from ikcli.vision.tower import Grid, Limits

_LEAST, _MOST = 8, 6144  # tokens


class Glm4v(QwenTower):
    """See the module."""

    begin, end = "<|begin_of_image|>", "<|end_of_image|>"

    def __init__(self, facts: Facts, tensors: Tensors, hp: HParams, limits: Limits) -> None:
        super().__init__(facts, tensors, hp, limits)
        self.extra_cols = facts.n_embd if "v.position_embd.weight" in tensors else 0
        self.n_ff = tensors.n_rows("v.blk.0.ffn_up.weight")  # the file's key is of the projector's layers
        self.least, self.most = self.pixel_limits(_LEAST * self.unit**2, _MOST * self.unit**2)

    def fit(self, width: int, height: int) -> tuple[int, int]:
        if min(width, height) < self.unit:
            scale = max(self.unit / height, self.unit / width)
            width, height = int(width * scale), int(height * scale)
        return super().fit(width, height)

    def extra(self, grid: Grid) -> Floats | None:
        if not self.extra_cols:
            return None
        table = square_table(self.facts, self.tensors)
        side = len(table)
        return blended(table, cubic(side, grid.rows), cubic(side, grid.cols))

    def record(self, g: Graph) -> Node:
        f = self.facts
        x = self.embedded(g, self.patch_matrix(), placed=False)
        x = self.placed(g, self.norm(g, x, "v.norm_embd", "rms", optional=True))
        rotate = self.rope_2d(g, 10000.0)
        for il in range(f.n_layer):
            x = self.layer(g, x, il, "rms", f.act, rotate, qk_norm="rms")
        n = self.tensors.n_rows("mm.patch_merger.weight")
        x = self.downsampled(g, self.norm(g, x, "v.post_ln", "rms"), "mm.patch_merger", n)
        x = self.linear(g, x, "mm.model.fc", n)
        x = g.activate(self.norm(g, x, "mm.post_norm", "layer", 1e-5), "gelu_erf", "mm_act")
        n_ff = self.tensors.n_rows("mm.up.weight")
        up, gate = self.linear(g, x, "mm.up", n_ff), self.linear(g, x, "mm.gate", n_ff)
        return self.linear(g, g.swiglu(gate, up, "mm_gated", Glu("silu")), "mm.down", self.hp.n_embd)
