"""MiniMax-M3: patches of two equal frames, rotation of thirds of heads by time, row and column, two projectors in turn.

llama.cpp and ik_llama.cpp have files of their own: the names of the projectors differ, and so does the order of the
columns of queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable

from ikcli.graph import Graph, Node
from ikcli.models import HParams
from ikcli.vision.facts import Facts
from ikcli.vision.qwen import QwenTower
from ikcli.vision.tensors import Tensors
from ikcli.vision.tower import Limits

_LEAST, _MOST = 4 * 28 * 28, 451584  # pixels
_ROW, _COL = 1, 2


class MiniMaxM3Vl(QwenTower):
    """A file of ik_llama.cpp: columns of heads as in the checkpoint, halves of all three axes side by side."""

    begin, end = "]<]start of image[>[", "]<]end of image[>["
    sections = False
    layers: tuple[str, ...] = ("mm.0", "mm.2", "mm.4", "mm.6")

    def __init__(self, facts: Facts, tensors: Tensors, hp: HParams, limits: Limits) -> None:
        super().__init__(facts, tensors, hp, limits)
        self.least, self.most = self.pixel_limits(_LEAST, _MOST)
        n = facts.head_dim // 3 // 2  # pairs of an axis; that of time is 0 and rotates nothing
        if not n:
            raise facts.fail(f"heads of {facts.head_dim} columns cannot be rotated in three dimensions")
        self.freq = [10000.0 ** (-i / n) for i in range(n)]

    def rotation(self, g: Graph) -> Callable[[Node], Node]:
        """Return the rotation of queries and keys."""
        n, d = len(self.freq), self.facts.head_dim
        table = g.axis_rope_table(self.freq * 3, [0] * n + [_ROW] * n + [_COL] * n)
        return lambda x: g.rope(x, table, self.facts.n_head, d, "rotated", neox=True)

    def record(self, g: Graph) -> Node:
        f, (first, second, third, last) = self.facts, self.layers
        x = self.norm(g, self.embedded(g, self.patch_matrix()), "v.pre_ln", "layer")
        rotate = self.rotation(g)
        for il in range(f.n_layer):
            x = self.layer(g, x, il, "layer", "gelu_erf", rotate)
        x = self._gelu_mlp(g, x, first, second)
        return self._gelu_mlp(g, g.merge_rows(x, self.merge**2, "merged"), third, last)

    def _gelu_mlp(self, g: Graph, x: Node, first: str, last: str) -> Node:
        x = g.activate(self.linear(g, x, first, self.tensors.n_rows(f"{first}.weight")), "gelu_erf", f"{first}.act")
        return self.linear(g, x, last, self.hp.n_embd)


class MiniMaxM3(MiniMaxM3Vl):
    """A file of llama.cpp: the columns of heads are those of time, of rows, of columns, and the rest."""

    layers = ("mm.1", "mm.2", "mm.merger.fc1", "mm.merger.fc2")

    def rotation(self, g: Graph) -> Callable[[Node], Node]:
        n, (heads, d) = len(self.freq), (self.facts.n_head, self.facts.head_dim)
        tables = [(axis, g.axis_rope_table(self.freq, [axis] * n, name=f"rope_table_{axis}")) for axis in (_ROW, _COL)]

        def rotate(x: Node) -> Node:
            for axis, table in tables:
                x = g.rope(x, table, heads, d, f"rotated_{axis}", offset=2 * n * axis, neox=True)
            return x

        return rotate
