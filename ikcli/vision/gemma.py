"""Gemma 3 (SigLIP, pooled to a fixed number of tokens) and Gemma 4 (any grid, 2-D rotation, sandwich norms)."""

from __future__ import annotations

import math

import numpy as np

from ikcli.graph import Graph, Node
from ikcli.models import HParams
from ikcli.vision.facts import Facts
from ikcli.vision.sizes import Pixels, fill_area
from ikcli.vision.tensors import Floats, Tensors
from ikcli.vision.tower import Grid, Limits, Tower

_POOL3, _POOL4, _TOKENS4 = 4, 3, 280


class Gemma3(Tower):
    """SigLIP with average pooling; tokens of an image see each other in both directions."""

    begin, end = "<start_of_image>", "<end_of_image>"
    resample = "bilinear"

    def __init__(self, facts: Facts, tensors: Tensors, hp: HParams, limits: Limits) -> None:
        super().__init__(facts, tensors, hp, limits)
        self.extra_cols, self.merge = facts.n_embd, facts.integer("projector.scale_factor", _POOL3, 1, 64)

    def fit(self, width: int, height: int) -> tuple[int, int]:
        return self.facts.image_size, self.facts.image_size

    def most_tokens(self) -> int:
        return (self.facts.image_size // self.facts.patch // self.merge) ** 2

    def both(self) -> bool:
        return True

    def extra(self, grid: Grid) -> Floats:
        return self.tensors.values("v.position_embd.weight", grid.rows * grid.cols, self.facts.n_embd)

    def record(self, g: Graph) -> Node:
        f = self.facts
        x = self.embedded(g, self.patch_matrix())
        for il in range(f.n_layer):
            x = self.layer(g, x, il, "layer", "gelu")
        x = g.mean_rows(self.norm(g, x, "v.post_ln", "layer"), self.merge**2, "pooled")
        x = self.norm(g, x, "mm.soft_emb_norm", "rms")
        name = "mm.input_projection.weight"  # the file has it transposed
        matrix = self.tensors.values(name, f.n_embd, self.hp.n_embd).T
        return g.mul_mat(self.tensors.made("mm.input_projection.t", matrix, like=name), x, "mm_projected")


class Gemma4(Tower):
    """Gemma 4: positions of rows and columns are added and rotated by; heads and values are normed."""

    begin, end = "<|image>", "<image|>"

    def __init__(self, facts: Facts, tensors: Tensors, hp: HParams, limits: Limits) -> None:
        super().__init__(facts, tensors, hp, limits)
        self.extra_cols, self.merge = facts.n_embd, facts.integer("projector.scale_factor", _POOL4, 1, 64)

    def fit(self, width: int, height: int) -> tuple[int, int]:
        unit = self.facts.patch * self.merge
        return fill_area(width, height, unit, self.most_tokens() * unit**2)

    def most_tokens(self) -> int:
        return self.limits.most or _TOKENS4

    def both(self) -> bool:
        """Models with embeddings per layer attend causally."""
        return not self.hp.n_embd_per_layer

    def normalized(self, rgb: Pixels) -> Floats:
        return 2 * super().normalized(rgb) - 1

    def extra(self, grid: Grid) -> Floats:
        f = self.facts
        table = self.tensors.values("v.position_embd.weight")
        if table.size % (2 * f.n_embd):
            raise f.fail(
                f"v.position_embd.weight has {table.size} numbers, which are not two tables of width {f.n_embd}"
            )
        table = table.reshape(2, -1, f.n_embd)
        if max(grid.rows, grid.cols) > table.shape[1]:
            raise f.fail(f"v.position_embd.weight has {table.shape[1]} positions, the image {grid.rows} x {grid.cols}")
        sums = table[0][None, : grid.cols] + table[1][: grid.rows, None]
        return np.asarray(sums.reshape(-1, f.n_embd), np.float32)

    def record(self, g: Graph) -> Node:
        f = self.facts
        x, d = self.embedded(g, self.patch_matrix()), f.head_dim
        freq = (100.0 ** (-np.arange(0, d // 2, 2, dtype=np.float64) / (d // 2))).tolist()
        cols, rows = (g.axis_rope_table(freq, [axis] * len(freq), name=f"rope_{axis}") for axis in (2, 1))

        def rotate(y: Node) -> Node:
            y = g.rope(y, cols, f.n_head, d, "rotated_x", neox=True)
            return g.rope(y, rows, f.n_head, d, "rotated", offset=d // 2, neox=True)

        for il in range(f.n_layer):
            name = f"v.blk.{il}"
            cur = self.norm(g, x, f"{name}.ln1", "rms")
            cur = self.attention(g, cur, il, rotate, qk_norm="rms", v_norm=True, scale=1.0)
            x = g.add(self.norm(g, cur, f"{name}.attn_post_norm", "rms"), x, f"{name}.attn_sum")
            cur = self.feed_forward(g, self.norm(g, x, f"{name}.ln2", "rms"), il, "gelu")
            x = g.add(self.norm(g, cur, f"{name}.ffn_post_norm", "rms"), x, f"{name}.out")
        x = g.scale(g.mean_rows(x, self.merge**2, "pooled"), math.sqrt(f.n_embd), "pool_scaled")
        if "v.std_bias" in self.tensors:
            bias = self.tensors.made("v.std_bias.negative", -self.tensors.values("v.std_bias", f.n_embd))
            x = g.norm(g.add(x, bias, "std_shifted"), self.tensors.vector("v.std_scale", f.n_embd), 0.0, "std_scaled",
                       kind="none")  # fmt: skip
        x = g.norm(x, None, f.eps, "mm_normed", kind="rms")
        return self.linear(g, x, "mm.input_projection", self.hp.n_embd)
