"""CogVLM: norms behind attention and feed-forward part, a gated projector, tokens that begin and end an image."""

from __future__ import annotations

import numpy as np

from ikcli.graph import Graph, Node
from ikcli.models import HParams
from ikcli.vision.facts import Facts
from ikcli.vision.sizes import Pixels
from ikcli.vision.tensors import Floats, Tensors
from ikcli.vision.tower import Grid, Inputs, Limits, Tower


class CogVlm(Tower):
    """See the module. An image is stretched to one square; the class token has the first position."""

    framed = True

    def __init__(self, facts: Facts, tensors: Tensors, hp: HParams, limits: Limits) -> None:
        super().__init__(facts, tensors, hp, limits)
        self.extra_cols, self.side = facts.n_embd, facts.image_size // facts.patch
        self.frame = [tensors.values(name, hp.n_embd) for name in ("v.boi", "v.eoi")]

    def fit(self, width: int, height: int) -> tuple[int, int]:
        return self.facts.image_size, self.facts.image_size

    def n_tokens(self, grid: Grid) -> int:
        return grid.n_tokens + 2

    def most_tokens(self) -> int:
        return self.side**2 + 2

    def _positions(self) -> Floats:
        return self.tensors.values("v.position_embd.weight", self.side**2 + 1, self.facts.n_embd)

    def extra(self, grid: Grid) -> Floats:
        return self._positions()[1:]

    def inputs(self, rgb: Pixels) -> Inputs:
        return self.with_class(super().inputs(rgb), self._positions()[0])

    def record(self, g: Graph) -> Node:
        f, n = self.facts, self.hp.n_embd
        x = self.embedded(g, self.patch_matrix())
        for il in range(f.n_layer):
            name = f"v.blk.{il}"
            x = g.add(self.norm(g, self.attention(g, x, il), f"{name}.ln1", "layer"), x, f"{name}.attn_sum")
            cur = self.feed_forward(g, x, il, "gelu_erf")
            x = g.add(self.norm(g, cur, f"{name}.ln2", "layer"), x, f"{name}.out")
        x = self.linear(g, g.merge_rows(x, 1, "patches"), "mm.model.fc", n)
        x = g.activate(self.norm(g, x, "mm.post_fc_norm", "layer", 1e-5), "gelu_erf", "mm_act")
        n_ff = self.tensors.n_rows("mm.up.weight")
        gate, up = self.linear(g, x, "mm.gate", n_ff), self.linear(g, x, "mm.up", n_ff)
        return self.linear(g, g.swiglu(gate, up, "mm_gated"), "mm.down", n)

    def arrange(self, rows: Floats, grid: Grid) -> Floats:
        begin, end = self.frame
        return np.concatenate([begin[None], rows, end[None]])
