"""The graph: nodes, weights, KV-cache tensors and the recorder that model code talks to.

Model code is plain Python that reads like the architecture; every call records one node instead of computing.
Values are 2-D, row-major, contiguous float32 (i32 for routing tables). The number of rows is symbolic, so that one
recorded graph serves every batch up to the size it was planned for:

    Rows.TOKENS    rows of the micro-batch            Rows.OUTPUTS   rows whose logits were asked for
    Rows.KV        all cached positions of the sequences in the micro-batch, in segment order ("compact" rows)

times an integer factor (`n_expert_used` for rows sorted by expert). Op names are ggml's where ggml has the op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from ikcli.gguf.constants import GGMLType


class Rows(Enum):
    """What one row of a value stands for."""

    TOKENS = "n_tokens"
    OUTPUTS = "n_outputs"
    KV = "n_kv"


@dataclass(frozen=True, slots=True)
class RowSpec:
    """A symbolic number of rows: `symbol * factor`."""

    symbol: Rows
    factor: int = 1


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the model file (or derived from it): shape in GGUF order (ne0 = row length first).

    `row0`/`n_rows` select a range of rows of the 2-D matrix without copying.
    """

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    row0: int = 0
    n_rows: int = -1

    @property
    def ne0(self) -> int:
        return self.shape[0]

    @property
    def ne1(self) -> int:
        """Rows of one matrix."""
        full = self.shape[1] if len(self.shape) > 1 else 1
        return full if self.n_rows < 0 else self.n_rows

    @property
    def ne2(self) -> int:
        """Matrices (experts, heads)."""
        return self.shape[2] if len(self.shape) > 2 else 1

    def rows(self, row0: int, n_rows: int) -> Weight:
        """The matrix of rows row0 .. row0+n_rows-1."""
        return Weight(self.name, self.type, self.shape, self.row0 + row0, n_rows)


@dataclass(frozen=True, slots=True)
class Cache:
    """One layer's cache tensor: `n_cells` rows of `cols` elements of `type`; transposed: `cols` rows of `n_cells`."""

    kind: str  # "k", "v", "kv" (MLA: rope 64 | latent 512), "kv_t" (transposed latent)
    il: int
    cols: int
    type: GGMLType
    transposed: bool = False


@dataclass(eq=False, slots=True)
class Node:
    """One recorded operation and its output, `rows x cols` of `dtype`."""

    op: str
    name: str
    inputs: tuple[Node | Weight | Cache | None, ...]
    attrs: dict[str, Any]
    rows: RowSpec
    cols: int
    dtype: str = "f32"
    index: int = -1

    def __repr__(self) -> str:
        return f"{self.name} = {self.op}[{self.rows.symbol.value}*{self.rows.factor} x {self.cols}]"


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """Columns `offset + h*head_stride .. +width` of a row, for head h (head_stride 0: shared by all heads)."""

    source: Node | Cache
    offset: int
    width: int
    head_stride: int


@dataclass(slots=True)
class Graph:
    """Recorder. Node names carry the layer (`ffn_out-3`); `nodes` is in execution order."""

    nodes: list[Node] = field(default_factory=list)
    caches: dict[tuple[str, int], Cache] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)
    il: int = -1  # current layer, appended to node names

    # --- recording ------------------------------------------------------------------------------------------------
    def _node(
        self,
        op: str,
        name: str,
        inputs: Sequence[Node | Weight | Cache | None],
        rows: RowSpec,
        cols: int,
        dtype: str = "f32",
        /,
        **attrs: Any,
    ) -> Node:
        for x in inputs:
            if isinstance(x, Weight):
                self.weights[x.name] = replace(x, row0=0, n_rows=-1)  # the whole tensor
        full_name = name if self.il < 0 else f"{name}-{self.il}"
        node = Node(op, full_name, tuple(inputs), attrs, rows, cols, dtype, len(self.nodes))
        self.nodes.append(node)
        return node

    def cache(self, kind: str, cols: int, type_: GGMLType, transposed: bool = False) -> Cache:
        """The cache tensor `kind` of the current layer."""
        c = Cache(kind, self.il, cols, type_, transposed)
        return self.caches.setdefault((kind, self.il), c)

    # --- ops ------------------------------------------------------------------------------------------------------
    def embed(self, w: Weight, name: str = "inp_embd") -> Node:
        """Rows of the token embedding for the micro-batch's tokens."""
        return self._node("embed", name, [w], RowSpec(Rows.TOKENS), w.ne0)

    def rms_norm(self, x: Node, w: Weight, eps: float, name: str, *, offset: int = 0, cols: int = 0) -> Node:
        """RMS norm of columns [offset, offset+cols) in groups of w.ne0 columns (cols 0 = to the end of the row)."""
        cols = cols or x.cols - offset
        if cols % w.ne0:
            raise ValueError(f"{name}: {cols} columns are not a multiple of the norm width {w.ne0}")
        return self._node("rms_norm", name, [x, w], x.rows, cols, eps=eps, offset=offset, width=w.ne0)

    def mul_mat(self, w: Weight, x: Node, name: str) -> Node:
        """x @ w.T: [rows, ne0] -> [rows, ne1]."""
        if w.ne0 != x.cols:
            raise ValueError(f"{name}: {w.name} has rows of {w.ne0}, its input has {x.cols} columns")
        return self._node("mul_mat", name, [w, x], x.rows, w.ne1)

    def mul_mat_heads(self, w: Weight, x: HeadSlice, name: str) -> Node:
        """Per head h: x[:, h] @ w[h].T with w (ne0 = x.width, ne1, n_head) -> [rows, n_head*ne1]."""
        assert isinstance(x.source, Node) and w.ne0 == x.width
        return self._node("mul_mat_heads", name, [w, x.source], x.source.rows, w.ne1 * w.ne2, x=x)

    def add(self, x: Node, y: Node | Weight, name: str) -> Node:
        """Element-wise sum; a weight (bias) is added to every row."""
        return self._node("add", name, [x, y], x.rows, x.cols)

    def swiglu(self, gate: Node, up: Node, name: str) -> Node:
        """silu(gate) * up."""
        return self._node("swiglu", name, [gate, up], gate.rows, gate.cols)

    def concat(self, parts: Sequence[Node], name: str) -> Node:
        """Columns of the parts side by side."""
        if len(parts) == 1:
            return parts[0]
        return self._node("concat", name, list(parts), parts[0].rows, sum(p.cols for p in parts))

    def concat_heads(self, parts: Sequence[HeadSlice], n_head: int, name: str) -> Node:
        """Per head, the parts side by side: [rows, n_head * sum(part widths)]. Sources are nodes of equal rows."""
        sources = [p.source for p in parts]
        rows = next(s.rows for s in sources if isinstance(s, Node))
        return self._node("concat_heads", name, sources, rows, n_head * sum(p.width for p in parts),
                          parts=tuple(parts), n_head=n_head)  # fmt: skip

    def select_outputs(self, x: Node, name: str) -> Node:
        """The rows of x (one per token) whose logits were asked for."""
        return self._node("get_rows", name, [x], RowSpec(Rows.OUTPUTS, x.rows.factor), x.cols)

    def rope_table(self, inv_freq: Sequence[float], mscale: float, name: str = "rope_table") -> Node:
        """cos, sin (interleaved per pair) of position * inv_freq, times mscale: [n_tokens, 2*len(inv_freq)]."""
        freqs = tuple(float(f) for f in inv_freq)
        return self._node("rope_table", name, [], RowSpec(Rows.TOKENS), 2 * len(freqs), inv_freq=freqs, mscale=mscale)

    def rope(
        self, x: Node, table: Node, n_head: int, head_dim: int, name: str, *, offset: int = 0, neox: bool = False
    ) -> Node:
        """Rotate `table.cols` columns of every head, starting at `offset`; the other columns are copied.

        Pairs are (2i, 2i+1), or (i, i + n_rot/2) for neox.
        """
        assert x.cols == n_head * head_dim
        return self._node("rope", name, [x, table], x.rows, x.cols, n_head=n_head, head_dim=head_dim, offset=offset,
                          n_rot=table.cols, neox=neox)  # fmt: skip

    def hadamard(
        self, x: Node, n_head: int, head_dim: int, name: str, *, offset: int = 0, blocks: Sequence[int] = ()
    ) -> Node:
        """Orthonormal Walsh-Hadamard transform of every head, its own inverse, in blocks of powers of two.

        The blocks start at column `offset` of a head; other columns are copied. Without blocks the rest of the head is
        divided into the largest powers of two that fit: 192 = 128 + 64.
        """
        sizes = tuple(blocks) or power_of_two_parts(head_dim - offset)
        if x.cols != n_head * head_dim or offset + sum(sizes) > head_dim or any(b < 1 or b & (b - 1) for b in sizes):
            raise ValueError(f"{name}: blocks {sizes} from column {offset} do not fit heads of {head_dim}")
        return self._node("hadamard", name, [x], x.rows, x.cols, n_head=n_head, head_dim=head_dim, offset=offset,
                          blocks=sizes)  # fmt: skip

    def kv_store(
        self, cache: Cache, x: Node, name: str, *, offset: int = 0, cols: int = 0, cache_offset: int = 0
    ) -> Node:
        """Write columns [offset, offset+cols) of x into the cells of the micro-batch (all rows for transposed caches).

        `cache_offset` is the first column written inside the cache row. The node has no output of its own (cols 0).
        """
        return self._node("kv_store", name, [cache, x], x.rows, 0, offset=offset, cols=cols or x.cols - offset,
                          cache_offset=cache_offset)  # fmt: skip

    def kv_rows(self, cache: Cache, offset: int, cols: int, name: str) -> Node:
        """Cached columns of every position of the micro-batch's sequences, as float32: [n_kv, cols]."""
        return self._node("kv_rows", name, [cache], RowSpec(Rows.KV), cols, offset=offset)

    def attention(
        self,
        q: Sequence[HeadSlice],
        k: Sequence[HeadSlice],
        v: HeadSlice,
        name: str,
        *,
        n_head: int,
        n_head_kv: int,
        scale: float,
        flash: bool,
        heads_per_step: int = 0,
    ) -> Node:
        """Causal attention within each sequence: [rows, n_head*v.width].

        Query head h uses key/value head h // (n_head // n_head_kv). The parts of q and of k are concatenated in order
        and must have equal widths in total. Sources that are caches are read at the sequence's cells, sources that are
        nodes with Rows.KV at compact rows. flash=False materialises K*Q, `heads_per_step` heads at a time (0 = all).
        """
        assert sum(p.width for p in q) == sum(p.width for p in k)
        sources = [p.source for p in (*q, *k, v)]
        rows = next(s.rows for s in sources if isinstance(s, Node) and s is q[0].source)
        return self._node("flash_attn" if flash else "attn", name, sources, rows, n_head * v.width, q=tuple(q),
                          k=tuple(k), v=v, n_head=n_head, n_head_kv=n_head_kv, scale=scale,
                          heads_per_step=heads_per_step)  # fmt: skip

    # --- mixture of experts ---------------------------------------------------------------------------------------
    def moe_route(
        self,
        logits: Node,
        bias: Weight | None,
        name: str,
        *,
        n_used: int,
        gating: str,
        norm: bool,
        scale: float,
        n_group: int = 1,
        n_group_used: int = 1,
        ser: tuple[int, float] | None = None,
    ) -> Node:
        """Choose experts: [rows, 2*n_used] = n_used weights (f32), then n_used ids (i32 bits; -1 = dropped by -ser).

        gating "softmax" or "sigmoid" gives probabilities; `bias` is added for the selection only. With n_group > 1 only
        experts of the n_group_used groups with the largest sum of their two best scores are eligible. ser = (min
        experts, threshold): see `-ser`. Weights are normalised over the kept experts if `norm`, then times `scale`.
        """
        return self._node("moe_route", name, [logits, bias], logits.rows, 2 * n_used, n_used=n_used, gating=gating,
                          norm=norm, scale=scale, n_group=n_group, n_group_used=n_group_used, ser=ser,
                          n_expert=logits.cols)  # fmt: skip

    def moe_sort(self, route: Node, n_expert: int, name: str) -> Node:
        """Group (row, slot) pairs by expert: the table that the expert ops below take as `plan`."""
        n_used = route.attrs["n_used"]
        rows = RowSpec(route.rows.symbol, route.rows.factor * n_used)
        return self._node("moe_sort", name, [route], rows, 2, "i32", n_used=n_used, n_expert=n_expert)

    def mul_mat_id(self, w: Weight, x: Node, plan: Node, name: str, *, sorted_in: bool = False) -> Node:
        """Expert matmul in sorted order: x is per token [rows, ne0], or `sorted_in` already [rows*n_used, ne0].

        Rows of dropped slots are zero.
        """
        assert w.ne0 == x.cols
        return self._node("mul_mat_id", name, [w, x, plan], plan.rows, w.ne1, sorted_in=sorted_in)

    def moe_up_gate(self, up: Weight, gate: Weight, x: Node, plan: Node, name: str) -> Node:
        """silu(x @ gate.T) * (x @ up.T) per selected expert, in sorted order (`-fmoe`)."""
        assert up.ne0 == gate.ne0 == x.cols and up.shape == gate.shape
        return self._node("moe_up_gate", name, [up, gate, x, plan], plan.rows, up.ne1)

    def moe_sum(self, y: Node, route: Node, plan: Node, name: str) -> Node:
        """Weighted sum of the selected experts' rows, back in token order: [rows, y.cols]. Dropped slots add zero."""
        return self._node("moe_sum", name, [y, route, plan], route.rows, y.cols)


def power_of_two_parts(n: int) -> tuple[int, ...]:
    """n as a sum of distinct powers of two, largest first."""
    return tuple(1 << i for i in reversed(range(n.bit_length())) if n >> i & 1)
