"""Llama 4: class token, 2-D rotation, pixel shuffle, an MLP; an image is a grid of tiles and a view of it all."""

from __future__ import annotations

import numpy as np

from ikcli.graph import Graph, Node
from ikcli.models import HParams
from ikcli.vision.facts import Facts
from ikcli.vision.sizes import Pixels, cut, resized
from ikcli.vision.tensors import Floats, Tensors
from ikcli.vision.tower import Grid, Inputs, Limits, Tower

_MOST_TILES = 16


class Llama4(Tower):
    """See the module."""

    resample = "bilinear"

    def __init__(self, facts: Facts, tensors: Tensors, hp: HParams, limits: Limits) -> None:
        super().__init__(facts, tensors, hp, limits)
        self.extra_cols, self.merge = facts.n_embd, facts.integer("projector.scale_factor", 2, 1, 64)
        facts.check_merge(self.merge)

    def fit(self, width: int, height: int) -> tuple[int, int]:
        return self.facts.image_size, self.facts.image_size

    def most_tokens(self) -> int:
        return (self.facts.image_size // self.facts.patch // self.merge) ** 2

    def _canvas(self, width: int, height: int) -> tuple[int, int]:
        """Return columns and rows of tiles: those that the image fits with the least enlargement, or reduction."""
        side = np.float32(self.facts.image_size)
        shapes = [(n // rows, rows) for n in range(_MOST_TILES, 0, -1) for rows in range(1, n + 1) if n % rows == 0]
        scales = [min(cols * side / np.float32(width), rows * side / np.float32(height)) for cols, rows in shapes]
        larger = [x for x in scales if x >= 1]
        best = min(larger) if larger else max(scales)
        return min((s for s, x in zip(shapes, scales, strict=True) if x == best), key=lambda s: s[0] * s[1])

    def pieces(self, rgb: Pixels) -> list[str | Pixels]:
        side, (height, width) = self.facts.image_size, rgb.shape[:2]
        cols, rows = self._canvas(width, height)
        most_w, most_h = min(max(width, side), cols * side), min(max(height, side), rows * side)
        if most_w / width < most_h / height:
            w, h = most_w, min(int(height * (most_w / width)), most_h)
        else:
            w, h = min(int(width * (most_h / height)), most_w), most_h
        small = resized(rgb, max(w, 1), max(h, 1), self.resample)
        canvas = np.zeros((rows * side, cols * side, 3), np.uint8)
        canvas[: small.shape[0], : small.shape[1]] = small
        if rows * cols == 1:
            return ["<|image_start|><|image|>", canvas, "<|image_end|>"]
        found: list[str | Pixels] = []
        text = "<|image_start|>"
        for tiles in cut(canvas, side):
            for tile in tiles:
                found += [text, tile]
                text = "<|tile_x_separator|>"
            text = "<|tile_y_separator|>"
        return [*found, f"{text}<|image|>", resized(rgb, side, side, self.resample), "<|image_end|>"]

    def normalized(self, rgb: Pixels) -> Floats:
        """Return pixels as the processor has them, which computes in bfloat16."""
        mean, std = (np.asarray(x, np.float32) for x in (self.facts.mean, self.facts.std))
        scaled = _bfloat16(rgb.astype(np.float32) * np.float32(1 / 255))
        return _bfloat16(_bfloat16(scaled - _bfloat16(mean)) / _bfloat16(std))

    def _positions(self, grid: Grid) -> Floats:
        return self.tensors.values("v.position_embd.weight", grid.rows * grid.cols + 1, self.facts.n_embd)

    def extra(self, grid: Grid) -> Floats:
        return self._positions(grid)[:-1]

    def inputs(self, rgb: Pixels) -> Inputs:
        """Return the patches and, behind them, a row for the class token; rows and columns count from 1."""
        found = super().inputs(rgb)
        found = Inputs(found.rows, found.at + np.int32(1), None, found.n_tokens)
        return self.with_class(found, self._positions(self.grid(rgb.shape[1], rgb.shape[0]))[-1])

    def record(self, g: Graph) -> Node:
        f, n = self.facts, self.facts.head_dim // 4
        x = self.norm(g, self.embedded(g, self.patch_matrix()), "v.pre_ln", "layer")
        freq = (10000.0 ** (-np.arange(n, dtype=np.float64) / n)).tolist()
        rotate = self.rope_axes(g, freq * 2, [2] * n + [1] * n, neox=False)
        for il in range(f.n_layer):
            x = self.layer(g, x, il, "layer", "gelu_erf", rotate)
        x = g.merge_rows(self.norm(g, x, "v.post_ln", "layer"), self.merge**2, "shuffled")
        for i in (1, 2):
            name = f"mm.model.mlp.{i}"
            x = g.activate(self.linear(g, x, name, self.tensors.n_rows(f"{name}.weight")), "gelu_erf", f"mm_act_{i}")
        return self.linear(g, x, "mm.model.fc", self.hp.n_embd)


def _bfloat16(x: Floats) -> Floats:
    """Return numbers rounded to bfloat16."""
    bits = x.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)).view(
        np.float32
    )
