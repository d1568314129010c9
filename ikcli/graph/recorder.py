"""The recorder that model code calls: every method records one node instead of computing.

Model code is plain Python that reads like the architecture. The methods check their arguments as the op records do
(`ops_*.py`), which also define each op.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.graph.activations import SILU, Glu
from ikcli.graph.core import Cache, HeadSlice, Node, Op, Per, Rows, Weight, power_of_two_parts
from ikcli.graph.ops_attention import Attn, FlashAttn, KvRows, KvStore
from ikcli.graph.ops_elements import Activate, Clamp, Gate, Norm, PosScale, Scale, SoftCap
from ikcli.graph.ops_experts import (
    AddId,
    HashRoute,
    MediaRoute,
    MoeGroups,
    MoeResident,
    MoeRoute,
    MoeSort,
    MoeSum,
    MoeUpGate,
    MulMatId,
    ScaleId,
)
from ikcli.graph.ops_host import HostRows
from ikcli.graph.ops_media import AxisRopeTable, MeanRows, MediaRows, MergeRows
from ikcli.graph.ops_recurrent import Decay, DeltaNet, GatedNorm, L2Norm, Mamba2Scan, SelectiveScan, ShortConv
from ikcli.graph.ops_rows import (
    Add,
    Concat,
    ConcatHeads,
    Embed,
    EmbedTypes,
    GetRows,
    Hadamard,
    MulMat,
    MulMatHeads,
    RmsNorm,
    Rope,
    RopeTable,
    SwiGlu,
)
from ikcli.graph.ops_sparse import IndexTopBlocks, IndexTopK, SparseAttn


@dataclass(frozen=True, slots=True)
class LowRank:
    """The term b @ scale @ a that an adapter adds to a matrix w: a (ne0, rank), scale (rank, rank), b (rank, ne1)."""

    a: Weight
    scale: Weight
    b: Weight


@dataclass(slots=True)
class Graph:
    """Recorder of one graph. Node names carry the layer (`ffn_out-3`); `nodes` is in execution order.

    `factors`: what products with the weights of these names are multiplied by, for experts a number each. `low_rank`:
    terms added to these products. `directions`: vectors added to the outputs of these layers. `exact`: products and
    attention are recorded as exact, until the first choice of experts. A value rounded before that choice may change it
    where it is close to a tie, and with it everything that follows.

    `wants_states`: model code also sets `states`, the last states of tokens as heads that predict further tokens read
    them: of all tokens, or of the output rows alone (`Rows.OUTPUTS`), which makes a difference for prompts only.

    `outputs_of`: layers whose outputs are wanted, with their nodes once these are recorded.

    `loop`: how often the layers have been recorded before, where they run several times. Each time they have caches of
    their own.

    `n_deep`: first layers whose outputs get further rows of images; -1: no images at all.
    """

    nodes: list[Node] = field(default_factory=list)
    caches: dict[tuple[str, int], Cache] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)
    il: int = -1  # current layer, appended to node names
    loop: int = 0
    factors: Mapping[str, float | Weight] = field(default_factory=dict)
    low_rank: Mapping[str, Sequence[LowRank]] = field(default_factory=dict)
    directions: Mapping[int, Weight] = field(default_factory=dict)
    exact: bool = False
    n_deep: int = -1
    wants_states: Rows | None = None
    states: Node | None = None
    outputs_of: dict[int, Node | None] = field(default_factory=dict)

    def record(self, op: Op, name: str) -> Node:
        """Record an op, also one of another package, and return its node."""
        node = Node(op, name if self.il < 0 else f"{name}-{self.il}", self.il, len(self.nodes))
        for w in node.weights():
            if w.name in self.factors and not isinstance(op, MulMat | MulMatId):
                raise UnsupportedError(
                    f"tensor '{w.name}' has a factor beside it, which {op.name} does not apply; convert the checkpoint "
                    "with `ik convert`, which multiplies such factors into the values"
                )
            self.weights[w.name] = replace(w, row0=0, n_rows=-1)  # the whole tensor
        self.nodes.append(node)
        return node

    def until(self, last: Node) -> Graph:
        """Return the graph up to a node, with the weights and caches that it needs."""
        nodes = self.nodes[: last.index + 1]
        found = Graph(nodes, low_rank=self.low_rank, directions=self.directions)
        found.weights = {w.name: self.weights[w.name] for node in nodes for w in node.weights()}
        found.caches = {(c.kind, c.il): c for node in nodes for c in node.caches()}
        return found

    def cache(
        self, kind: str, cols: int, type_: GGMLType, transposed: bool = False, per: Per = Per.CELL, il: int = -1
    ) -> Cache:
        """Return the cache tensor `kind` of the current layer, or of layer `il`."""
        il = self.il if il < 0 else il
        kind = f"{kind}.{self.loop}" if self.loop else kind
        return self.caches.setdefault((kind, il), Cache(kind, il, cols, type_, transposed, per))

    def state(self, kind: str, cols: int) -> Cache:
        """Return the state `kind` of the current layer: a float32 row of `cols` columns per sequence."""
        c = Cache(kind, self.il, cols, GGMLType.F32, per=Per.SEQUENCE)
        return self.caches.setdefault((kind, self.il), c)

    # --- rows ---------------------------------------------------------------------------------------------------------
    def embed(self, w: Weight, name: str = "inp_embd", *, by_position: bool = False) -> Node:
        """Look up rows of an embedding for the micro-batch's tokens, or for their positions."""
        return self.record(Embed(w, by_position), name)

    def host_rows(self, n_cols: int, name: str) -> Node:
        """Take a row per token from memory of the caller; see `HostRows`."""
        return self.record(HostRows(n_cols), name)

    def embed_types(self, w: Weight, sep: int, name: str = "type_embd") -> Node:
        """Look up rows of an embedding for the parts of texts that tokens are in; see `EmbedTypes`."""
        return self.record(EmbedTypes(w, sep), name)

    def rms_norm(self, x: Node, w: Weight, eps: float, name: str, *, offset: int = 0, cols: int = 0) -> Node:
        """Apply RMS norm to columns [offset, offset+cols) in groups of w.ne0 (cols 0: the rest of the row)."""
        return self.record(RmsNorm(x, w, eps, offset, cols or x.cols - offset), name)

    def mul_mat(self, w: Weight, x: Node, name: str) -> Node:
        """Compute x @ w.T, [rows, ne0] -> [rows, ne1], times the factor beside w, plus what adapters add to w."""
        parts, factor = self.low_rank.get(w.name, ()), self.factors.get(w.name, 1.0)
        assert isinstance(factor, float)
        out = self.record(MulMat(w, x, self.exact), name if not parts and factor == 1 else f"{name}_base")
        out = self.scale(out, factor, f"{name}_scaled" if parts else name)
        for i, part in enumerate(parts):
            low = self.record(MulMat(part.a, x, self.exact), f"{name}_lora_a{i}")
            low = self.record(MulMat(part.scale, low, self.exact), f"{name}_lora_scaled{i}")
            b = part.b if w.n_rows < 0 else part.b.rows(w.row0, w.n_rows)
            low = self.record(MulMat(b, low, self.exact), f"{name}_lora_b{i}")
            out = self.record(Add(out, low), name if part is parts[-1] else f"{name}_lora{i}")
        return out

    def mul_mat_heads(self, w: Weight, x: HeadSlice, name: str) -> Node:
        """Compute x[:, h] @ w[h].T per head h, w (ne0 = x.width, ne1, n_head) -> [rows, n_head*ne1]."""
        return self.record(MulMatHeads(w, x, self.exact), name)

    def add(self, x: Node, y: Node | Weight, name: str) -> Node:
        """Add element-wise; a weight (bias) is added to every row."""
        return self.record(Add(x, y), name)

    def layer_out(self, x: Node) -> Node:
        """Mark the output of a layer; add the direction of a control vector and the rows of images for this layer."""
        direction = self.directions.get(self.il)
        x = x if direction is None else self.record(Add(x, direction), "l_out_steered")
        if 0 <= self.il < self.n_deep:
            x = self.add(x, self.media_rows(None, (1 + self.il) * x.cols, x.cols, "deepstack"), "l_out_deep")
        if self.il in self.outputs_of:
            self.outputs_of[self.il] = x
        return x

    def with_media(self, x: Node) -> Node:
        """Replace the rows of images in x, the input of the first layer."""
        return self.media_rows(x, 0, x.cols, "inp_media") if self.n_deep >= 0 else x

    def swiglu(self, gate: Node, up: Node, name: str, act: Glu = SILU) -> Node:
        """Compute silu(gate) * up, or the function that `act` names."""
        return self.record(SwiGlu(gate, up, act), name)

    def activate(self, x: Node, kind: str, name: str) -> Node:
        """Apply an activation to every element: a name of `activations.UNARY`."""
        return self.record(Activate(x, kind), name)

    def norm(
        self,
        x: Node,
        w: Weight | None,
        eps: float,
        name: str,
        *,
        b: Weight | None = None,
        kind: str = "layer",
        width: int = 0,
    ) -> Node:
        """Norm groups of `width` columns (0: whole rows), with or without weights; see `Norm`."""
        return self.record(Norm(x, w, b, kind, eps, width or x.cols), name)

    def scale(self, x: Node, factor: float, name: str) -> Node:
        """Multiply x by a number; return x itself if it is 1."""
        return x if factor == 1 else self.record(Scale(x, factor), name)

    def clamp(self, x: Node, limit: float, name: str) -> Node:
        """Clamp x to -limit..limit; return x itself if the limit is 0."""
        return self.record(Clamp(x, limit), name) if limit else x

    def pos_scale(self, x: Node, scale: float, length: int, name: str, *, shift: int = 0) -> Node:
        """Multiply x by a factor that grows with the position; see `PosScale`."""
        return self.record(PosScale(x, scale, length, shift), name)

    def gate(self, x: Node, gate: Node, name: str, kind: str = "sigmoid") -> Node:
        """Multiply x by sigmoid(gate), softplus(gate) or the gate, whose columns each cover an equal part of a row."""
        return self.record(Gate(x, gate, kind), name)

    def softcap(self, x: Node, cap: float, name: str) -> Node:
        """Compute cap * tanh(x / cap); return x itself if the cap is 0."""
        return self.record(SoftCap(x, cap), name) if cap else x

    def concat(self, parts: Sequence[Node], name: str) -> Node:
        """Concatenate the columns of the parts."""
        return parts[0] if len(parts) == 1 else self.record(Concat(tuple(parts)), name)

    def concat_heads(self, parts: Sequence[HeadSlice], n_head: int, name: str) -> Node:
        """Concatenate the parts per head: [rows, n_head * sum(part widths)]. Sources are nodes of equal rows."""
        return self.record(ConcatHeads(tuple(parts), n_head), name)

    def select_outputs(self, x: Node, name: str) -> Node:
        """Select the rows of x (one per token) whose logits were requested."""
        return self.record(GetRows(x), name)

    # --- heads and cache ----------------------------------------------------------------------------------------------
    def rope_table(self, inv_freq: Sequence[float], mscale: float, name: str = "rope_table", lag: int = 0) -> Node:
        """Compute cos, sin (interleaved per pair) of position * inv_freq, times mscale: [n_tokens, 2*len(inv_freq)]."""
        return self.record(RopeTable(tuple(float(f) for f in inv_freq), mscale, lag), name)

    def rope(
        self, x: Node, table: Node, n_head: int, head_dim: int, name: str, *, offset: int = 0, neox: bool = False
    ) -> Node:
        """Rotate `table.cols` columns of every head, starting at `offset`; see `Rope`."""
        return self.record(Rope(x, table, n_head, head_dim, offset, neox), name)

    def hadamard(
        self, x: Node, n_head: int, head_dim: int, name: str, *, offset: int = 0, blocks: Sequence[int] = ()
    ) -> Node:
        """Apply the Walsh-Hadamard transform to every head, in blocks of powers of two.

        The blocks start at column `offset` of a head. Without blocks the rest of the head is divided into the largest
        powers of two that fit: 192 = 128 + 64.
        """
        sizes = tuple(blocks) or power_of_two_parts(head_dim - offset)
        return self.record(Hadamard(x, n_head, head_dim, offset, sizes), name)

    def kv_store(
        self, cache: Cache, x: Node, name: str, *, offset: int = 0, cols: int = 0, cache_offset: int = 0
    ) -> Node:
        """Write columns [offset, offset+cols) of x into the cells of the micro-batch (all rows for transposed caches).

        `cache_offset` is the first column written inside the cache row. The node has no output of its own (cols 0).
        """
        return self.record(KvStore(cache, x, offset, cols or x.cols - offset, cache_offset), name)

    def kv_rows(self, cache: Cache, offset: int, cols: int, name: str) -> Node:
        """Read cached columns of every position of the micro-batch's sequences, as float32: [n_kv, cols]."""
        return self.record(KvRows(cache, offset, cols), name)

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
        window: int = 0,
        chunk: int = 0,
        sinks: Weight | None = None,
        softcap: float = 0.0,
        wide: bool = False,
        both: bool = False,
        slopes: tuple[float, ...] = (),
        ranged: bool = False,
        half: bool = False,
        biases: tuple[tuple[float, ...], ...] = (),
        cross: bool = False,
    ) -> Node:
        """Attend within each sequence: [rows, n_head*v.width]; see `Attention`.

        flash=False materialises K*Q, `heads_per_step` heads at a time (0 = all).
        """
        wide = wide or self.exact
        settings = (tuple(q), tuple(k), v, n_head, n_head_kv, scale, window, chunk, sinks, softcap, wide, both, slopes,
                    ranged, half, biases, cross)  # fmt: skip
        return self.record(FlashAttn(*settings) if flash else Attn(*settings, heads_per_step), name)

    def index_top_k(
        self, q: HeadSlice, weights: Node | None, k: Cache, name: str, *, n_head: int, top_k: int, ratio: int = 1
    ) -> Node:
        """Choose the positions that each query attends to: [rows, top_k]; see `IndexTopK`."""
        return self.record(IndexTopK(q, weights, k, n_head, top_k, ratio), name)

    def index_top_blocks(
        self, q: HeadSlice, k: Cache, name: str, *, n_head: int, top_k: int, block: int, local: int
    ) -> Node:
        """Choose the blocks that each query attends to: [rows, n_head*top_k*block]; see `IndexTopBlocks`."""
        return self.record(IndexTopBlocks(q, k, n_head, top_k, block, local), name)

    def sparse_attention(
        self,
        q: Sequence[HeadSlice],
        k: Sequence[HeadSlice],
        v: HeadSlice,
        selected: Node,
        name: str,
        *,
        n_head: int,
        n_head_kv: int,
        scale: float,
        lists: int = 1,
        block: int = 1,
        rest: bool = False,
        sinks: Weight | None = None,
    ) -> Node:
        """Attend to the selected positions: [rows, n_head*v.width]; see `SparseAttn`."""
        parts = (tuple(q), tuple(k), v, n_head, n_head_kv, scale)
        op = SparseAttn(*parts, sinks=sinks, selected=selected, lists=lists, block=block, rest=rest)
        return self.record(op, name)

    # --- images -------------------------------------------------------------------------------------------------------
    def media_rows(self, x: Node | None, offset: int, n_cols: int, name: str) -> Node:
        """Take columns of the rows that came with the micro-batch; see `MediaRows`."""
        return self.record(MediaRows(x, offset, n_cols), name)

    def axis_rope_table(
        self, inv_freq: Sequence[float], axes: Sequence[int], mscale: float = 1.0, name: str = "rope_table"
    ) -> Node:
        """Compute cos and sin of positions with three axes; see `AxisRopeTable`."""
        return self.record(AxisRopeTable(tuple(inv_freq), tuple(axes), mscale), name)

    def merge_rows(self, x: Node, n: int, name: str) -> Node:
        """Put n adjacent rows side by side: [n_outputs, n*cols]."""
        return self.record(MergeRows(x, n), name)

    def mean_rows(self, x: Node, n: int, name: str) -> Node:
        """Average n adjacent rows: [n_outputs, cols]."""
        return self.record(MeanRows(x, n), name)

    # --- mixture of experts -------------------------------------------------------------------------------------------
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
        """Choose experts: [rows, 2*n_used]; see `MoeRoute`."""
        self.exact = False
        return self.record(MoeRoute(logits, bias, n_used, gating, norm, scale, n_group, n_group_used, ser), name)

    def hash_route(self, logits: Node, table: Weight, name: str, *, gating: str, norm: bool, scale: float) -> Node:
        """Look experts up by token: [rows, 2*n_used]; see `HashRoute`."""
        return self.record(HashRoute(logits, table, gating, norm, scale), name)

    def moe_groups(self, route: Node, size: int, name: str) -> Node:
        """Return the route to groups of adjacent experts; see `MoeGroups`."""
        return self.record(MoeGroups(route, size), name)

    def moe_resident(self, route: Node, table: Weight, n_slots: int, name: str, uses: Weight | None = None) -> Node:
        """Return the part of a route whose experts are in slots, or the rest (`n_slots` 0); see `MoeResident`."""
        return self.record(MoeResident(route, table, n_slots, uses), name)

    def media_route(self, text: bool, name: str) -> Node:
        """Return the route of tokens that visual experts compute, or of all others (`text`); see `MediaRoute`."""
        return self.record(MediaRoute(text), name)

    def moe_sort(self, route: Node, n_expert: int, name: str) -> Node:
        """Group (row, slot) pairs by expert: the table that the expert ops below take as `plan`."""
        return self.record(MoeSort(route, n_expert), name)

    def mul_mat_id(self, w: Weight, x: Node, plan: Node, name: str, *, sorted_in: bool = False) -> Node:
        """Multiply rows by their experts, in sorted order: x is [rows, ne0], or `sorted_in` [rows*n_used, ne0]."""
        parts, factors = self.low_rank.get(w.name, ()), self.factors.get(w.name)
        out = self.record(MulMatId(w, x, plan, sorted_in), name if not parts and factors is None else f"{name}_base")
        if factors is not None:
            assert isinstance(factors, Weight)
            out = self.scale_id(out, factors, plan, f"{name}_scaled" if parts else name)
        for i, part in enumerate(parts):
            low = self.record(MulMatId(part.a, x, plan, sorted_in), f"{name}_lora_a{i}")
            low = self.record(MulMat(part.scale, low), f"{name}_lora_scaled{i}")
            low = self.record(MulMatId(part.b, low, plan, True), f"{name}_lora_b{i}")
            out = self.record(Add(out, low), name if part is parts[-1] else f"{name}_lora{i}")
        return out

    def moe_up_gate(self, up: Weight, gate: Weight, x: Node, plan: Node, name: str, act: Glu = SILU) -> Node:
        """Compute silu(x @ gate.T) * (x @ up.T), or `act`, per selected expert, in sorted order (`-fmoe`)."""
        if {up.name, gate.name} & (self.low_rank.keys() | self.factors.keys()):
            up_x = self.mul_mat_id(up, x, plan, f"{name}_up")
            return self.swiglu(self.mul_mat_id(gate, x, plan, f"{name}_gate"), up_x, name, act)
        return self.record(MoeUpGate(up, gate, x, plan, act), name)

    def add_id(self, x: Node, w: Weight, plan: Node, name: str) -> Node:
        """Add to every sorted row the row of w that is its expert's."""
        return self.record(AddId(x, w, plan), name)

    def scale_id(self, x: Node, by: Weight | Node, plan: Node, name: str) -> Node:
        """Multiply every sorted row by a number of its expert, or by the weight that its route gives it."""
        return self.record(ScaleId(x, by, plan), name)

    def moe_sum(self, y: Node, route: Node, plan: Node, name: str, *, weighted: bool = True) -> Node:
        """Sum the selected experts' rows, weighted, back in token order: [rows, y.cols]. Dropped slots add zero."""
        return self.record(MoeSum(y, route, plan, weighted), name)

    # --- recurrent layers ---------------------------------------------------------------------------------------------
    def short_conv(
        self,
        state: Cache,
        parts: Sequence[Node],
        weights: Sequence[Weight],
        name: str,
        *,
        biases: Sequence[Weight] = (),
        linear: bool = False,
    ) -> Node:
        """Apply silu (unless `linear`) to a causal convolution of a few taps, each column separately.

        Parts come side by side.
        """
        return self.record(ShortConv(state, tuple(parts), tuple(weights), tuple(biases), linear), name)

    def l2_norm(self, x: Node, width: int, eps: float, name: str, *, offset: int = 0, cols: int = 0) -> Node:
        """Divide groups of `width` columns of [offset, offset+cols) by their length (cols 0: the rest)."""
        return self.record(L2Norm(x, offset, cols or x.cols - offset, width, eps), name)

    def decay(self, x: Node, dt: Weight, a: Weight, name: str, *, bound: float = 0.0) -> Node:
        """Compute the fraction of a state that remains after a token; see `Decay`."""
        return self.record(Decay(x, dt, a, bound), name)

    def delta_net(
        self,
        state: Cache,
        q: HeadSlice,
        k: HeadSlice,
        v: HeadSlice,
        decay: Node,
        beta: Node,
        name: str,
        *,
        n_head: int,
        n_head_k: int,
        scale: float,
        tiled: bool = False,
    ) -> Node:
        """Apply the gated delta rule: [rows, n_head*v.width]; see `DeltaNet`."""
        return self.record(DeltaNet(state, q, k, v, decay, beta, n_head, n_head_k, scale, tiled), name)

    def selective_scan(
        self,
        state: Cache,
        x: Node,
        dt: Node,
        b: HeadSlice,
        c: HeadSlice,
        name: str,
        *,
        a: Weight,
        d: Weight,
        dt_bias: Weight,
    ) -> Node:
        """Apply Mamba's scan: [rows, x.cols]; see `SelectiveScan`."""
        return self.record(SelectiveScan(state, x, dt, b, c, a, d, dt_bias), name)

    def mamba2_scan(
        self,
        state: Cache,
        x: HeadSlice,
        dt: Node,
        b: HeadSlice,
        c: HeadSlice,
        name: str,
        *,
        a: Weight,
        d: Weight,
        dt_bias: Weight,
        n_head: int,
        n_group: int,
    ) -> Node:
        """Apply Mamba 2's scan: [rows, n_head*x.width]; see `Mamba2Scan`."""
        return self.record(Mamba2Scan(state, x, dt, b, c, a, d, dt_bias, n_head, n_group), name)

    def linear_attention(
        self, state: Cache, q: HeadSlice, k: HeadSlice, v: HeadSlice, name: str, *, slopes: Sequence[float]
    ) -> Node:
        """Attend without a soft-max, with weights that fall by a slope per head: [rows, len(slopes)*v.width].

        It is Mamba 2's scan; see `Mamba2Scan`.
        """
        n_head = len(slopes)
        return self.record(Mamba2Scan(state, v, None, k, q, None, None, None, n_head, n_head, tuple(slopes)), name)

    def gated_norm(self, x: Node, w: Weight, gate: Node, eps: float, name: str, *, activation: str = "silu") -> Node:
        """Apply RMS norm in groups of w.ne0 columns, times silu (or sigmoid) of the gate."""
        return self.record(GatedNorm(x, w, gate, eps, activation), name)
