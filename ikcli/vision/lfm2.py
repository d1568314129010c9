"""LFM2-VL: SigLIP 2 over any grid, pixel unshuffle, an MLP; large images are tiles and a view of it all."""

from __future__ import annotations

from collections.abc import Sequence

from ikcli.graph import Graph, Node
from ikcli.models import HParams
from ikcli.vision.decode import Tile
from ikcli.vision.facts import Facts
from ikcli.vision.positions import blended, square_table, triangle
from ikcli.vision.sizes import Pixels, closest_grid, cut, resized, round_to_area
from ikcli.vision.tensors import Floats, Tensors
from ikcli.vision.tower import Grid, Limits, Tower

_LEAST, _MOST = 64, 256  # tokens of an image in one tile
_SIDE, _TILES, _TOLERANCE = 512, (2, 10), 2.0


class Lfm2Vl(Tower):
    """See the module."""

    resample = "bilinear"
    begin, end = "<|image_start|>", "<|image_end|>"

    def __init__(self, facts: Facts, tensors: Tensors, hp: HParams, limits: Limits) -> None:
        super().__init__(facts, tensors, hp, limits)
        self.extra_cols, self.merge = facts.n_embd, facts.integer("projector.scale_factor", 2, 1, 16)
        if _SIDE % self.unit:
            raise facts.fail(f"tiles of {_SIDE} pixels are not whole tokens of {self.unit} (patch_size x scale_factor)")

    @property
    def unit(self) -> int:
        """Return the pixels of a token's side."""
        return self.facts.patch * self.merge

    @property
    def _most(self) -> int:
        return self.limits.most or max(_MOST, self.limits.least)

    def fit(self, width: int, height: int) -> tuple[int, int]:
        least, area = min(self.limits.least or _LEAST, self._most), self.unit**2
        return round_to_area(width, height, self.unit, least * area, self._most * area)

    def pieces(self, rgb: Pixels) -> Sequence[str | Pixels | Tile]:
        height, width = rgb.shape[:2]
        rounded = [max(round(x / self.unit) * self.unit, self.facts.patch) for x in (width, height)]
        if rounded[0] * rounded[1] <= self._most * self.unit**2 * _TOLERANCE:
            return super().pieces(rgb)
        cols, rows = closest_grid(width, height, _SIDE, *_TILES)
        found: list[str | Pixels] = []
        text = self.begin
        for i, tiles in enumerate(cut(resized(rgb, cols * _SIDE, rows * _SIDE, self.resample), _SIDE), 1):
            for j, tile in enumerate(tiles, 1):
                found += [f"{text}<|img_row_{i}_col_{j}|>", tile]
                text = ""
        return [*found, "<|img_thumbnail|>", resized(rgb, *self.fit(width, height), self.resample), self.end]

    def most_tokens(self) -> int:
        return max(self._most, (_SIDE // self.unit) ** 2)

    def extra(self, grid: Grid) -> Floats:
        table = square_table(self.facts, self.tensors)
        side = len(table)
        return blended(table, triangle(side, grid.rows), triangle(side, grid.cols))

    def record(self, g: Graph) -> Node:
        f = self.facts
        x = self.embedded(g, self.patch_matrix())
        for il in range(f.n_layer):
            x = self.layer(g, x, il, "layer", f.act)
        x = g.merge_rows(self.norm(g, x, "v.post_ln", "layer"), self.merge**2, "unshuffled")
        x = self.norm(g, x, "mm.input_norm", "layer", 1e-5, optional=True)
        x = self.linear(g, x, "mm.1", self.tensors.n_rows("mm.1.weight"))
        return self.linear(g, g.activate(x, "gelu_erf", "mm_act"), "mm.2", self.hp.n_embd)
