"""InternVL: InternViT with a class token and learned positions, pixel shuffle, an MLP."""

from __future__ import annotations

from ikcli.graph import Graph, Node
from ikcli.models import HParams
from ikcli.vision.facts import Facts
from ikcli.vision.sizes import Pixels, closest_grid, cut, resized
from ikcli.vision.tensors import Floats, Tensors
from ikcli.vision.tower import Grid, Inputs, Limits, Tower


class InternVl(Tower):
    """See the module. Where the file says how many, an image is tiles and a view of it all, otherwise one tile."""

    begin, end = "<img>", "</img>"

    def __init__(self, facts: Facts, tensors: Tensors, hp: HParams, limits: Limits) -> None:
        super().__init__(facts, tensors, hp, limits)
        self.extra_cols, self.merge = facts.n_embd, facts.integer("projector.scale_factor", 2, 1, 16)
        facts.check_merge(self.merge)
        self.most_tiles = facts.integer("preproc_max_tiles", 1, 1, 256)
        self.least_tiles = facts.integer("preproc_min_tiles", 1, 1, self.most_tiles)

    def fit(self, width: int, height: int) -> tuple[int, int]:
        return self.facts.image_size, self.facts.image_size

    def pieces(self, rgb: Pixels) -> list[str | Pixels]:
        side = self.facts.image_size
        cols, rows = closest_grid(rgb.shape[1], rgb.shape[0], side, self.least_tiles, self.most_tiles)
        whole = resized(rgb, cols * side, rows * side, self.resample)
        tiles = [tile for row in cut(whole, side) for tile in row]
        if len(tiles) > 1:
            tiles.append(resized(rgb, side, side, self.resample))
        return [self.begin, *tiles, self.end]

    def most_tokens(self) -> int:
        return (self.facts.image_size // self.facts.patch // self.merge) ** 2

    def _positions(self, grid: Grid) -> Floats:
        return self.tensors.values("v.position_embd.weight", grid.rows * grid.cols + 1, self.facts.n_embd)

    def extra(self, grid: Grid) -> Floats:
        return self._positions(grid)[1:]

    def inputs(self, rgb: Pixels) -> Inputs:
        """Return the patches and, behind them, a row for the class token."""
        return self.with_class(super().inputs(rgb), self._positions(self.grid(rgb.shape[1], rgb.shape[0]))[0])

    def record(self, g: Graph) -> Node:
        f = self.facts
        x, kind = self.embedded(g, self.patch_matrix()), "layer" if "v.blk.0.ln1.bias" in self.tensors else "rms"
        for il in range(f.n_layer):
            x = self.layer(g, x, il, kind, "gelu_erf", qk_norm="all")
        x = self.norm(g, x, "v.post_ln", kind, optional=True)
        x = self.norm(g, g.merge_rows(x, self.merge**2, "shuffled"), "mm.model.mlp.0", "layer", 1e-5)
        x = self.linear(g, x, "mm.model.mlp.1", self.tensors.n_rows("mm.model.mlp.1.weight"))
        return self.linear(g, g.activate(x, "gelu_erf", "mm_act"), "mm.model.mlp.3", self.hp.n_embd)
