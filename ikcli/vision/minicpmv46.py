"""MiniCPM-V 4.6: SigLIP over any grid, whose patches are joined 2x2 between two layers and once more at the end."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ikcli.graph import Graph, Node
from ikcli.models import HParams
from ikcli.vision.facts import Facts
from ikcli.vision.minicpmv import SlicedTower
from ikcli.vision.tensors import Tensors
from ikcli.vision.tower import Grid, Indices, Ints, Limits

_ASPECTS = 200
_WINDOW = 4  # patches


class MiniCpmV46(SlicedTower):
    """See the module. Files for four times as many tokens lack the join between layers."""

    sections = None
    checks_width = True

    def __init__(self, facts: Facts, tensors: Tensors, hp: HParams, limits: Limits) -> None:
        super().__init__(facts, tensors, hp, limits)
        self.merge = facts.integer("projector.scale_factor", 4, 2, 4)
        if self.merge == 3:
            raise facts.fail("clip.vision.projector.scale_factor is 3; it must be 2 or 4")
        self.unit = facts.patch * self.merge
        layers = np.ravel(facts.metadata.get("clip.vision.wa_layer_indexes", ())).tolist()
        if self.merge == 4 and not (len(layers) == 1 and type(layers[0]) is int and 0 <= layers[0] < facts.n_layer):
            raise facts.fail("clip.vision.wa_layer_indexes must hold the number of a layer")
        self.n_before = layers[0] + 1 if self.merge == 4 else 0

    def most_tokens(self) -> int:
        return max(self.n_tokens(self.grid(*self.fit(100 * n, 100))) for n in range(1, _ASPECTS + 1))

    def n_tokens(self, grid: Grid) -> int:
        return grid.n_tokens

    def order(self, grid: Grid) -> Indices:
        """Return the patches of a token side by side, and of these those of a window of 2x2 (4: and its windows)."""
        if self.merge == 2:
            return grid.order()
        rows, cols = grid.tokens
        index = np.arange(grid.rows * grid.cols).reshape(rows, 2, 2, cols, 2, 2)
        return index.transpose(0, 3, 1, 4, 2, 5).reshape(-1)

    def ranges(self, grid: Grid) -> Ints | None:
        first = np.arange(grid.rows * grid.cols, dtype=np.int32) // _WINDOW * _WINDOW
        return np.stack([first, first + _WINDOW], axis=1)

    def stages(self) -> list[tuple[Callable[[Graph], Node], int]]:
        return [(self._joined, _WINDOW), (self._rest, 0)] if self.merge == 4 else [(self._whole, 0)]

    def _layers(self, g: Graph, x: Node, first: int, end: int) -> Node:
        for il in range(first, end):
            x = self.layer(g, x, il, "layer", self.facts.act)
        return x

    def _joined(self, g: Graph) -> Node:
        """Record the first layers, attention in windows, and what makes one row of a window."""
        name = "v.vit_merger"
        x = self._layers(g, self.embedded(g, self.patch_matrix()), 0, self.n_before)
        cur = self.attention(g, self.norm(g, x, f"{name}.ln1", "layer"), 0, windowed=True, name=name)
        x = g.add(cur, x, f"{name}.attn_sum")
        cur = self.norm(g, g.merge_rows(x, _WINDOW, f"{name}.merged"), f"{name}.ds_ln", "layer")
        cur = self.linear(g, cur, f"{name}.ds_ffn_up", self.tensors.n_rows(f"{name}.ds_ffn_up.weight"))
        cur = self.linear(g, g.activate(cur, "gelu", f"{name}.act"), f"{name}.ds_ffn_down", x.cols)
        return g.add(cur, g.mean_rows(x, _WINDOW, f"{name}.mean"), f"{name}.out")

    def _rest(self, g: Graph) -> Node:
        x = g.media_rows(None, 0, self.facts.n_embd, "joined")
        return self._projected_rows(g, self._layers(g, x, self.n_before, self.facts.n_layer))

    def _whole(self, g: Graph) -> Node:
        return self._projected_rows(g, self._layers(g, self.embedded(g, self.patch_matrix()), 0, self.facts.n_layer))

    def _projected_rows(self, g: Graph, x: Node) -> Node:
        x = g.merge_rows(self.norm(g, x, "v.post_ln", "layer"), _WINDOW, "merged")
        x = self.linear(g, self.norm(g, x, "mm.input_norm", "layer", 1e-6), "mm.up", x.cols)
        return self.linear(g, g.activate(x, "gelu_erf", "mm_act"), "mm.down", self.hp.n_embd)
