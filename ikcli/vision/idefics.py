"""Idefics 3 and SmolVLM: SigLIP, pixel shuffle, one matrix; an image is a grid of square tiles and a view of it all."""

from __future__ import annotations

import math

import numpy as np

from ikcli.graph import Graph, Node
from ikcli.models import HParams
from ikcli.vision.facts import Facts
from ikcli.vision.positions import bucketed
from ikcli.vision.sizes import Pixels, cut, resized
from ikcli.vision.tensors import Floats, Tensors
from ikcli.vision.tower import Grid, Limits, Tower

_MOST_TILES = 64  # on a side
_LARGEST = 4096  # pixels of the longest edge, whatever the file says
_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"


class Idefics3(Tower):
    """See the module."""

    resample = "lanczos"

    def __init__(self, facts: Facts, tensors: Tensors, hp: HParams, limits: Limits) -> None:
        super().__init__(facts, tensors, hp, limits)
        self.extra_cols, self.merge = facts.n_embd, facts.integer("projector.scale_factor", 2, 1, 64)
        facts.check_merge(self.merge)
        self.longest = min(facts.integer("preproc_image_size", facts.image_size, 1, 1 << 16), _LARGEST)
        if self.longest > _MOST_TILES * facts.image_size:
            raise facts.fail(f"clip.vision.preproc_image_size {self.longest} is more than {_MOST_TILES} tiles of "
                             f"{facts.image_size} pixels")  # fmt: skip

    def fit(self, width: int, height: int) -> tuple[int, int]:
        return self.facts.image_size, self.facts.image_size

    def _canvas(self, width: int, height: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the size with the longest edge of the file, and that in whole tiles."""
        side, aspect = self.facts.image_size, width / height
        if width >= height:
            width, height = self.longest, int(self.longest / aspect)
            height = max(height + height % 2, 1)
        else:
            width, height = int(self.longest * aspect), self.longest
            width = max(width + width % 2, 1)
        aspect = width / height
        if width >= height:
            w = math.ceil(width / side) * side
            h = math.ceil(int(w / aspect) / side) * side
        else:
            h = math.ceil(height / side) * side
            w = math.ceil(int(h * aspect) / side) * side
        return (width, height), (max(w, side), max(h, side))

    def pieces(self, rgb: Pixels) -> list[str | Pixels]:
        side = self.facts.image_size
        first, canvas = self._canvas(rgb.shape[1], rgb.shape[0])
        whole = resized(resized(rgb, *first, self.resample), *canvas, self.resample)
        if canvas == (side, side):
            return [_AROUND + _WHOLE, whole, _AROUND]
        found: list[str | Pixels] = []
        text = ""
        for row, tiles in enumerate(cut(whole, side), 1):
            for col, tile in enumerate(tiles, 1):
                found += [f"{text}{_AROUND}<row_{row}_col_{col}>", tile]
                text = ""
            text = "\n"
        return [*found, f"\n\n{_AROUND}{_WHOLE}", resized(whole, side, side, self.resample), _AROUND]

    def most_tokens(self) -> int:
        return (self.facts.image_size // self.facts.patch // self.merge) ** 2

    def extra(self, grid: Grid) -> Floats:
        """Return the rows of the table in which the places of patches fall, as fractions of the image in float32."""
        side = self.facts.image_size // self.facts.patch
        table = self.tensors.values("v.position_embd.weight", side * side, self.facts.n_embd)
        rows, cols = (
            bucketed(side, np.arange(n, dtype=np.float32) * np.float32(1 / n)) for n in (grid.rows, grid.cols)
        )
        return table[(rows[:, None] * side + cols).reshape(-1)]

    def record(self, g: Graph) -> Node:
        f = self.facts
        x = self.embedded(g, self.patch_matrix())
        for il in range(f.n_layer):
            x = self.layer(g, x, il, "layer", f.act)
        x = g.merge_rows(self.norm(g, x, "v.post_ln", "layer"), self.merge**2, "shuffled")
        return self.linear(g, x, "mm.model.fc", self.hp.n_embd)
