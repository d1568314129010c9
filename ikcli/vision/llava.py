"""LLaVA and MobileVLM: a CLIP or SigLIP tower up to a layer before the last, and one of four projectors.

An image is one square, with margins of the mean colour; in LLaVA-1.6 it is a view and tiles (`anyres`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ikcli.errors import UnsupportedError
from ikcli.graph import Graph, Node
from ikcli.models import HParams
from ikcli.vision.anyres import KEY, AnyRes
from ikcli.vision.decode import Tile
from ikcli.vision.facts import Facts
from ikcli.vision.sizes import Pixels, cut, resized, squared
from ikcli.vision.tensors import Floats, Tensors
from ikcli.vision.tower import Grid, Inputs, Limits, Tower


class LlavaTower(Tower):
    """What the projectors have in common."""

    checks_width = False  # the key is of the tower's training

    def __init__(self, facts: Facts, tensors: Tensors, hp: HParams, limits: Limits) -> None:
        super().__init__(facts, tensors, hp, limits)
        if np.size(facts.metadata.get(KEY, ())) and not isinstance(self, LlavaMlp):
            raise UnsupportedError(f"{facts.source}: images in grids ({KEY}) are those of LLaVA-1.6, whose type is mlp")
        self.extra_cols, self.side = facts.n_embd, facts.image_size // facts.patch
        self.has_class = "v.class_embd" in tensors
        self.layers = _feature_layers(facts)

    def fit(self, width: int, height: int) -> tuple[int, int]:
        return self.facts.image_size, self.facts.image_size

    def pieces(self, rgb: Pixels) -> Sequence[str | Pixels | Tile]:
        square = squared(rgb, self.facts.mean)
        return [self.begin, resized(square, *self.fit(0, 0), self.resample), self.end]

    def most_tokens(self) -> int:
        return self.n_tokens(Grid(self.side, self.side))

    def _positions(self) -> Floats:
        n = self.side * self.side + self.has_class
        return self.tensors.values("v.position_embd.weight", n, self.facts.n_embd)

    def extra(self, grid: Grid) -> Floats:
        return self._positions()[int(self.has_class) :]

    def inputs(self, rgb: Pixels) -> Inputs:
        found = super().inputs(rgb)
        return self.with_class(found, self._positions()[0]) if self.has_class else found

    def features(self, g: Graph) -> Node:
        """Record the tower; the result has the chosen layers of every patch side by side."""
        f = self.facts
        x = self.norm(g, self.embedded(g, self.patch_matrix()), "v.pre_ln", "layer", optional=True)
        found = []
        for il in range(max(self.layers)):
            if il in self.layers:
                found.append(x)
            x = self.layer(g, x, il, "layer", f.act)
        found.append(self.norm(g, x, "v.post_ln", "layer", optional=True))
        return g.merge_rows(g.concat(found, "features"), 1, "patches")

    def hidden(self, g: Graph, x: Node, name: str, act: str = "gelu_erf") -> Node:
        """Record a layer of the projector with its activation."""
        return g.activate(self.linear(g, x, name, self.tensors.n_rows(f"{name}.weight")), act, f"{name}.act")


def _feature_layers(facts: Facts) -> list[int]:
    found: list[Any] = np.ravel(facts.metadata.get("clip.vision.feature_layer", ())).tolist()
    if any(not isinstance(x, int) or not 0 <= x <= facts.n_layer for x in found):
        raise facts.fail(f"clip.vision.feature_layer holds {str(found)[:80]}; the tower has {facts.n_layer} layers")
    return sorted(set(found)) if any(found) else [facts.n_layer]


class LlavaMlp(LlavaTower):
    """One or two layers, or (Yi) two with norms behind them. LLaVA-1.6 has a canvas of tiles behind the image."""

    def __init__(self, facts: Facts, tensors: Tensors, hp: HParams, limits: Limits) -> None:
        super().__init__(facts, tensors, hp, limits)
        self.any_res = AnyRes.of(facts)
        self.newline = tensors.values("model.image_newline", hp.n_embd) if self.any_res else None

    def pieces(self, rgb: Pixels) -> Sequence[str | Pixels | Tile]:
        if self.any_res is None:
            return super().pieces(rgb)
        return [self.begin, *self.any_res.tiles(rgb, self.resample), self.end]

    def parts(self, rgb: Pixels) -> list[Pixels]:
        return [tile for row in cut(rgb, self.facts.image_size) for tile in row]

    def n_tokens(self, grid: Grid) -> int:
        return super().n_tokens(grid) if grid.shown is None else grid.shown[0] * (grid.shown[1] + 1)

    def most_tokens(self) -> int:
        found = super().most_tokens()
        return found if self.any_res is None else max(self.any_res.most_tokens(), found)

    def arrange(self, rows: Floats, grid: Grid) -> Floats:
        if self.any_res is None or self.newline is None or grid.shown is None:
            return rows
        return self.any_res.arrange(rows, (grid.rows, grid.cols), grid.shown, self.newline)

    def record(self, g: Graph) -> Node:
        x, n = self.features(g), self.hp.n_embd
        if "mm.3.weight" in self.tensors:
            x = self.norm(g, self.linear(g, x, "mm.0", self.tensors.n_rows("mm.0.weight")), "mm.1", "layer", 1e-5)
            x = self.linear(g, g.activate(x, "gelu_erf", "mm_act"), "mm.3", n)
            return self.norm(g, x, "mm.4", "layer", 1e-5)
        if "mm.2.weight" not in self.tensors:
            return self.linear(g, x, "mm.0", n)
        return self.linear(g, self.hidden(g, x, "mm.0"), "mm.2", n)


class MobileVlm2(LlavaTower):
    """MobileVLM V2: two layers, the mean of 2x2 patches, and a 3x3 convolution of every channel that is added."""

    def __init__(self, facts: Facts, tensors: Tensors, hp: HParams, limits: Limits) -> None:
        super().__init__(facts, tensors, hp, limits)
        if self.side % 2:
            raise facts.fail(f"a projector of MobileVLM halves the grid, which has {self.side} patches on a side")

    def n_tokens(self, grid: Grid) -> int:
        return grid.rows * grid.cols // 4

    def record(self, g: Graph) -> Node:
        return self.linear(g, self.hidden(g, self.features(g), "mm.model.mlp.0"), "mm.model.mlp.2", self.hp.n_embd)

    def arrange(self, rows: Floats, grid: Grid) -> Floats:
        n = rows.shape[1]
        x = np.asarray(rows.reshape(grid.rows // 2, 2, grid.cols // 2, 2, n).mean(axis=(1, 3)), np.float32)
        y = _by_channel(x, self.tensors.values("mm.model.peg.0.weight", n, 3, 3), 1)
        found = x + y + self.tensors.values("mm.model.peg.0.bias", n)
        return np.ascontiguousarray(found.reshape(-1, n), np.float32)


class MobileVlm(MobileVlm2):
    """MobileVLM: two layers and two inverted residuals, the second of which halves the grid."""

    def record(self, g: Graph) -> Node:
        return self.linear(g, self.hidden(g, self.features(g), "mm.model.mlp.1"), "mm.model.mlp.3", self.hp.n_embd)

    def arrange(self, rows: Floats, grid: Grid) -> Floats:
        x = rows.reshape(grid.rows, grid.cols, -1)
        x = x + self._residual(x, "mm.model.mb_block.1.block", 1)
        x = self._residual(x, "mm.model.mb_block.2.block", 2)
        return np.ascontiguousarray(x.reshape(-1, x.shape[-1]), np.float32)

    def _residual(self, x: Floats, name: str, stride: int) -> Floats:
        n, t = x.shape[-1], self.tensors
        x = self._normed(_by_channel(x, t.values(f"{name}.0.0.weight", n, 3, 3), stride), f"{name}.0.1")
        x = np.asarray(x * np.clip(x + 3, 0, 6) / 6, np.float32)
        k = t.n_rows(f"{name}.1.fc1.weight")
        mean = x.mean(axis=(0, 1))
        squeezed = t.values(f"{name}.1.fc1.weight", k, n) @ mean + t.values(f"{name}.1.fc1.bias", k)
        scale = t.values(f"{name}.1.fc2.weight", n, k) @ np.maximum(squeezed, 0) + t.values(f"{name}.1.fc2.bias", n)
        x = x * np.clip(scale / 6 + np.float32(0.5), 0, 1)
        return self._normed(x @ t.values(f"{name}.2.0.weight", n, n).T, f"{name}.2.1")

    def _normed(self, x: Floats, name: str) -> Floats:
        n = x.shape[-1]
        x = x - x.mean(axis=-1, keepdims=True)
        x = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(1e-6))
        return x * self.tensors.values(f"{name}.weight", n) + self.tensors.values(f"{name}.bias", n)


class JanusPro(LlavaTower):
    """Janus and Janus-Pro: the last layer, and a projector of any depth."""

    begin, end = "<begin_of_image>", "<end_of_image>"
    checks_width = True

    def pieces(self, rgb: Pixels) -> list[str | Pixels]:
        side, longest = self.facts.image_size, max(rgb.shape[:2])
        height, width = (max(round(x * (side / longest)), min(14, side)) for x in rgb.shape[:2])
        small = resized(rgb, width, height, self.resample)
        return [self.begin, squared(small, self.facts.mean), self.end]

    def record(self, g: Graph) -> Node:
        f = self.facts
        x = self.embedded(g, self.patch_matrix())
        for il in range(f.n_layer):
            x = self.layer(g, x, il, "layer", "gelu_erf")
        x = g.merge_rows(self.norm(g, x, "v.post_ln", "layer"), 1, "patches")
        last = 0
        while f"mm.{last + 1}.weight" in self.tensors:
            x, last = self.hidden(g, x, f"mm.{last}"), last + 1
        return self.linear(g, x, f"mm.{last}", self.hp.n_embd)


def _by_channel(x: Floats, kernel: Floats, stride: int) -> Floats:
    """Return the convolution (rows, columns, channels) of every channel with its own 3x3 kernel, with a zero border."""
    rows, cols, _ = x.shape
    wide = np.pad(x, ((1, 1), (1, 1), (0, 0)))
    parts = (wide[i : i + rows : stride, j : j + cols : stride] * kernel[:, i, j] for i in range(3) for j in range(3))
    return np.asarray(sum(parts), np.float32)
