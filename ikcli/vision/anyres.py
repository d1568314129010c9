"""Images of LLaVA-1.6: a view of the whole image, and a canvas of tiles whose rows of patches end in a row break."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ikcli.vision.decode import Tile
from ikcli.vision.facts import Facts
from ikcli.vision.sizes import Pixels, resized
from ikcli.vision.tensors import Floats

_MOST_CANVASES, _MOST_TILES = 64, 36
KEY = "clip.vision.image_grid_pinpoints"


@dataclass(frozen=True, slots=True)
class AnyRes:
    """The canvases (width, height) of a file, `image_size` of a tile, and the patches on its side."""

    canvases: tuple[tuple[int, int], ...]
    image_size: int
    side: int

    @classmethod
    def of(cls, facts: Facts) -> Self | None:
        """Read the canvases, pairs of height and width; None for a file without them. Raise FormatError for others."""
        found: list[Any] = np.ravel(facts.metadata.get(KEY, ())).tolist()
        if not found:
            return None
        size, merge = facts.image_size, facts.metadata.get("clip.vision.mm_patch_merge_type", "spatial_unpad")
        if not isinstance(merge, str) or merge != "spatial_unpad":
            raise facts.fail(f"clip.vision.mm_patch_merge_type is {str(merge)[:40]}; only spatial_unpad is read")
        if len(found) % 2 or len(found) > 2 * _MOST_CANVASES or any(type(x) is not int for x in found):
            raise facts.fail(f"{KEY} must hold at most {_MOST_CANVASES} pairs of whole numbers")
        pairs = tuple((int(w), int(h)) for h, w in zip(found[::2], found[1::2], strict=True))
        for w, h in pairs:
            if min(w, h) < size or w % size or h % size or w * h > _MOST_TILES * size**2:
                raise facts.fail(f"{KEY} holds {w} x {h}; sizes are 1 to {_MOST_TILES} tiles of {size} pixels")
        return cls(pairs, size, size // facts.patch)

    def _canvas(self, width: int, height: int) -> tuple[int, int]:
        """Return the canvas on which an image keeps most of its pixels, and wastes the fewest."""

        def rank(canvas: tuple[int, int]) -> tuple[int, int]:
            scale = min(canvas[0] / width, canvas[1] / height)
            used = min(int(width * scale) * int(height * scale), width * height)
            return used, used - canvas[0] * canvas[1]

        return max(self.canvases, key=rank)

    def tiles(self, rgb: Pixels, resample: str) -> tuple[Pixels, Tile]:
        """Return the view of an image, and its canvas, where it is in the middle of black margins."""
        height, width = rgb.shape[:2]
        canvas = w, h = self._canvas(width, height)
        if w / width < h / height:
            h = min(math.ceil(height * (w / width)), h)
        else:
            w = min(math.ceil(width * (h / height)), w)
        x, y = (canvas[0] - w) // 2, (canvas[1] - h) // 2
        whole = np.zeros((canvas[1], canvas[0], 3), np.uint8)
        whole[y : y + h, x : x + w] = resized(rgb, w, h, resample)
        view = resized(rgb, self.image_size, self.image_size, resample)
        return view, Tile(whole, Tile.of(whole).digest, self._shown(canvas, width, height))

    def _shown(self, canvas: tuple[int, int], width: int, height: int) -> tuple[int, int]:
        """Return the rows and columns of patches that are left without the margins, which are equal on both sides."""
        cols, rows = (n // self.image_size * self.side for n in canvas)
        if width / height > cols / rows:
            return rows - (rows - int(round(height * (cols / width), 7))) // 2 * 2, cols
        return rows, cols - (cols - int(round(width * (rows / height), 7))) // 2 * 2

    def arrange(self, rows: Floats, shape: tuple[int, int], shown: tuple[int, int], newline: Floats) -> Floats:
        """Return the rows of a canvas, tile by tile, in the order of the text; `shape`: its rows and columns."""
        n, side, (height, width) = rows.shape[1], self.side, shape
        grid = rows.reshape(height // side, width // side, side, side, n).transpose(0, 2, 1, 3, 4)
        grid = grid.reshape(height, width, n)
        y, x = (height - shown[0]) // 2, (width - shown[1]) // 2
        grid = grid[y : y + shown[0], x : x + shown[1]]
        ends = np.broadcast_to(newline, (shown[0], 1, n))
        return np.ascontiguousarray(np.concatenate([grid, ends], axis=1).reshape(-1, n))

    def most_tokens(self) -> int:
        """Return the most tokens of a canvas."""
        sides = ((w // self.image_size * self.side, h // self.image_size * self.side) for w, h in self.canvases)
        return max((cols + 1) * rows for cols, rows in sides)
