"""Operations of mixtures of experts: routing, grouping rows by expert, products, the weighted sum.

The table of `moe_sort` is (pair, expert) per sorted position, pair = row * n_used + slot, dropped slots last with
expert -1. `moe_route` holds float32 weights and the bits of int32 ids side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ikcli.gguf.constants import GGMLType
from ikcli.graph.activations import SILU, Glu, sigmoid
from ikcli.graph.core import Array, Node, Op, Place, Rows, RowSpec, Run, SameSize, Weight
from ikcli.graph.ops_rows import OneMatrix, Product, softmax

GATINGS = ("sigmoid", "softmax", "sparsemixer", "sqrtsoftplus")
SPARSE_MARGIN = 0.02  # twice the jitter that Phi-3.5-MoE was trained with


@dataclass(frozen=True, slots=True)
class MoeRoute(Op):
    """Choose experts: [rows, 2*n_used] = n_used weights (f32), then n_used ids (i32 bits; -1 = dropped by -ser).

    gating "softmax" or "sigmoid" gives probabilities, "sqrtsoftplus" the square root of ln(1 + exp(logit)) in their
    place; `bias` is added for the selection only. With gating "sparsemixer"
    experts are chosen by their logits (plus `bias`), and the weight of each is its softmax among those that were not
    chosen before it, without the ones that are more than `SPARSE_MARGIN` below it, in relation to the larger of both.
    With n_group > 1 only experts of the n_group_used groups with the largest sum of their two best scores are eligible.
    ser = (min experts, threshold): see `-ser`. Weights are normalised over the kept experts if `norm`, then multiplied
    by `scale`.
    """

    name = "moe_route"
    is_table = True

    logits: Node
    bias: Weight | None
    n_used: int
    gating: str
    norm: bool
    scale: float
    n_group: int = 1
    n_group_used: int = 1
    ser: tuple[int, float] | None = None

    @property
    def n_expert(self) -> int:
        """Return the number of experts to choose from."""
        return self.logits.cols

    @property
    def drops(self) -> bool:
        """Return whether ids can be -1."""
        return self.ser is not None

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.logits.rows, 2 * self.n_used

    def compute(self, run: Run) -> Array:
        logits = run.value(self.logits)
        if self.gating == "sparsemixer":
            return self._sparse(logits if self.bias is None else logits + run.weight(self.bias))
        probs = scores_of(logits, self.gating)
        selection = probs if self.bias is None else probs + run.weight(self.bias)
        if self.n_group > 1:
            selection = best_groups(selection, self.n_group, self.n_group_used)
        ids = np.argsort(-selection, axis=1, kind="stable")[:, : self.n_used]
        keep = np.ones(ids.shape, bool)
        if self.ser is not None and self.ser[0] > 0:
            fewest, threshold = self.ser
            p = np.take_along_axis(selection, ids, axis=1)
            keep[:, fewest:] = ~(p[:, fewest:] < threshold * p[:, :1])
        weights = np.where(keep, np.take_along_axis(probs, ids, axis=1), 0)
        if self.norm:
            weights = weights / weights.sum(axis=1, keepdims=True)
        return self._row(weights, ids, keep)

    def _sparse(self, logits: Array) -> Array:
        rest, every = logits.astype(np.float32), np.arange(len(logits))
        ids = np.argsort(-rest, axis=1, kind="stable")[:, : self.n_used]
        weights = np.empty(ids.shape, np.float32)
        for slot in range(self.n_used):
            top = rest[every, ids[:, slot]][:, None]
            with np.errstate(invalid="ignore"):  # infinite: chosen before
                near = ~((top - rest) / np.maximum(np.abs(logits), top) > SPARSE_MARGIN)
                weights[:, slot] = 1 / np.exp(np.where(near & (rest > -np.inf), rest - top, -np.inf)).sum(axis=1)
            rest[every, ids[:, slot]] = -np.inf
        return self._row(weights, ids, np.ones(ids.shape, bool))

    def _row(self, weights: Array, ids: Array, keep: Array) -> Array:
        bits = np.ascontiguousarray(np.where(keep, ids, -1), np.int32).view(np.float32)
        return np.concatenate([(weights * self.scale).astype(np.float32), bits], axis=1)


@dataclass(frozen=True, slots=True)
class HashRoute(Op):
    """A route to the experts that a table, (n_used, n_vocab) ids, gives for every token; otherwise as `MoeRoute`.

    Tokens come with the micro-batch, so the CPU computes this.
    """

    name = "hash_route"
    place = Place.HOST
    is_table = True
    drops = False

    logits: Node
    table: Weight
    gating: str
    norm: bool
    scale: float

    def __post_init__(self) -> None:
        if self.logits.rows != RowSpec(Rows.TOKENS):
            raise ValueError("experts are looked up for the tokens of a micro-batch")

    @property
    def n_used(self) -> int:
        """Return the number of experts of a token."""
        return self.table.ne0

    @property
    def n_expert(self) -> int:
        """Return the number of experts."""
        return self.logits.cols

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.logits.rows, 2 * self.n_used

    def compute(self, run: Run) -> Array:
        probs = scores_of(run.value(self.logits), self.gating)
        ids = run.weight(self.table).astype(np.int32)[run.state.tokens]
        weights = np.take_along_axis(probs, ids, axis=1)
        if self.norm:
            weights = weights / weights.sum(axis=1, keepdims=True)
        return np.concatenate([(weights * self.scale).astype(np.float32), ids.view(np.float32)], axis=1)


def scores_of(logits: Array, gating: str) -> Array:
    """Return what experts are weighed by."""
    if gating == "sqrtsoftplus":
        return np.asarray(np.sqrt(np.logaddexp(logits, 0)), logits.dtype)
    return softmax(logits) if gating == "softmax" else sigmoid(logits)


@dataclass(frozen=True, slots=True)
class MediaRoute(Op):
    """A route to one expert for the tokens that visual experts compute, or (`text`) for all others; the rest has id -1.

    Places come with the micro-batch, so the CPU computes this.
    """

    name = "media_route"
    place = Place.HOST
    light = True
    is_table = True
    n_used = 1
    n_expert = 1
    drops = True

    text: bool

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return RowSpec(Rows.TOKENS), 2

    def compute(self, run: Run) -> Array:
        ids = np.where(run.state.visual() == self.text, -1, 0).astype(np.int32)
        return np.stack([np.ones(len(ids), np.float32), ids.view(np.float32)], axis=1)


IN_SLOTS = "|slots"  # behind the name of a weight of experts: as many of its matrices as have slots on a GPU


def in_slots(w: Weight, n_slots: int) -> Weight:
    """Return the matrices of a weight of experts that are in slots on a GPU."""
    return replace(w, name=w.name + IN_SLOTS, shape=(*w.shape[:2], n_slots))


def slot_table(il: int, n_expert: int) -> Weight:
    """Return the table of a layer: the slot of every expert on a GPU, or -1 (i32)."""
    return Weight(f"blk.{il}.experts{IN_SLOTS}", GGMLType.I32, (n_expert,))


def slot_uses(il: int, n_expert: int) -> Weight:
    """Return the counters of a layer: how often every expert was chosen (i32)."""
    return Weight(f"blk.{il}.uses{IN_SLOTS}", GGMLType.I32, (n_expert,))


@dataclass(frozen=True, slots=True)
class MoeResident(Op):
    """The part of a route whose experts are in slots, with slots for ids; or the rest (`n_slots` 0). Others get id -1.

    The table (`slot_table`) is read when the op runs, so it may change between steps. With `uses` (`slot_uses`), all
    choices are counted there.
    """

    name = "moe_resident"
    place = Place.WEIGHT
    light = True
    ends_split = True
    is_table = True

    route: Node
    table: Weight
    n_slots: int
    uses: Weight | None = None

    @property
    def n_used(self) -> int:
        """Return the number of experts that were chosen per row."""
        return route_of(self.route).n_used

    @property
    def n_expert(self) -> int:
        """Return the number of experts to choose from."""
        return route_of(self.route).n_expert

    @property
    def drops(self) -> bool:
        """Return whether ids can be -1."""
        return True

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.route.rows, self.route.cols

    def compute(self, run: Run) -> Array:
        weights, ids = route_parts(run.value(self.route), self.n_used)
        slots = run.weight(self.table).reshape(-1)[: self.n_expert].astype(np.int32)
        slot = np.where(ids < 0, -1, slots[ids])
        found = slot if self.n_slots else np.where(slot < 0, ids, -1)
        return np.concatenate([weights, np.ascontiguousarray(found, np.int32).view(np.float32)], axis=1)


@dataclass(frozen=True, slots=True)
class MoeGroups(Op):
    """The route to the groups of `size` adjacent experts that the chosen experts belong to, with their weights."""

    name = "moe_groups"
    is_table = True

    route: Node
    size: int

    @property
    def n_used(self) -> int:
        """Return the number of groups per row, of which several may be the same."""
        return route_of(self.route).n_used

    @property
    def n_expert(self) -> int:
        """Return the number of groups."""
        return route_of(self.route).n_expert // self.size

    @property
    def drops(self) -> bool:
        """Return whether ids can be -1."""
        return route_of(self.route).drops

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.route.rows, self.route.cols

    def compute(self, run: Run) -> Array:
        weights, ids = route_parts(run.value(self.route), self.n_used)
        groups = np.where(ids < 0, -1, ids // self.size)
        return np.concatenate([weights, np.ascontiguousarray(groups, np.int32).view(np.float32)], axis=1)


AnyRoute = MoeRoute | HashRoute | MoeResident | MediaRoute | MoeGroups


@dataclass(frozen=True, slots=True)
class MoeSort(Op):
    """Group (row, slot) pairs by expert: the table that expert products take as `plan`."""

    name = "moe_sort"
    place = Place.EVERYWHERE
    light = True
    is_table = True
    dtype = "i32"

    route: Node
    n_expert: int

    @property
    def n_used(self) -> int:
        """Return the number of slots of a row."""
        return route_of(self.route).n_used

    @property
    def shape(self) -> tuple[RowSpec, int]:
        rows = self.route.rows
        return RowSpec(rows.symbol, rows.factor * self.n_used), 2

    def compute(self, run: Run) -> Array:
        _, ids = route_parts(run.value(self.route), self.n_used)
        flat = ids.reshape(-1)
        order = np.argsort(np.where(flat < 0, self.n_expert, flat), kind="stable")
        return np.stack([order, flat[order]], axis=1).astype(np.int32)


def route_of(route: Node) -> AnyRoute:
    """Return the op of a node that chooses experts."""
    assert isinstance(route.op, AnyRoute)
    return route.op


def sort_of(plan: Node) -> MoeSort:
    """Return the op of a node that groups rows by expert."""
    assert isinstance(plan.op, MoeSort)
    return plan.op


class Planned:
    """Base of ops on rows in the order of a plan."""

    __slots__ = ()
    plan: Node

    @property
    def sort(self) -> MoeSort:
        """Return the op that made the plan."""
        return sort_of(self.plan)


class ExpertProduct(Planned, Product):
    """A product of rows with the matrices of their experts, in the order of the plan; rows of dropped slots are 0."""

    __slots__ = ()
    by_expert = True
    sorted_in: bool  # the input has a row per sorted position already, not one per token

    @property
    def route(self) -> AnyRoute:
        """Return the op that chose the experts."""
        return route_of(self.sort.route)


@dataclass(frozen=True, slots=True)
class MulMatId(ExpertProduct, OneMatrix):
    """x @ w[expert].T for every sorted position: x is per token, or `sorted_in` [rows*n_used, ne0]."""

    name = "mul_mat_id"
    policy = "MUL_MAT_ID"

    w: Weight
    x: Node
    plan: Node
    sorted_in: bool

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.plan.rows, self.w.ne1

    def compute(self, run: Run) -> Array:
        w, x, plan = run.weight(self.w), run.value(self.x), run.value(self.plan)
        return by_expert(w, x if self.sorted_in else sorted_rows(x, plan), plan)


@dataclass(frozen=True, slots=True)
class MoeUpGate(ExpertProduct):
    """silu(x @ gate.T) * (x @ up.T), or what `act` says, per selected expert, in sorted order (`-fmoe`)."""

    name = "moe_up_gate"
    policy = "MOE_FUSED_UP_GATE"
    sorted_in = False

    up: Weight
    gate: Weight
    x: Node
    plan: Node
    act: Glu = SILU

    def __post_init__(self) -> None:
        if self.up.ne0 != self.x.cols or self.up.shape != self.gate.shape:
            raise ValueError(f"{self.up.name}: shapes of up, gate and input do not fit")

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.plan.rows, self.up.ne1

    @property
    def matrices(self) -> tuple[Weight, ...]:
        return self.up, self.gate

    @property
    def source(self) -> Node:
        return self.x

    def compute(self, run: Run) -> Array:
        up, gate, plan = run.weight(self.up), run.weight(self.gate), run.value(self.plan)
        x = sorted_rows(run.value(self.x), plan)
        return self.act(by_expert(gate, x, plan), by_expert(up, x, plan))


@dataclass(frozen=True, slots=True)
class AddId(Planned, SameSize):
    """Every sorted row plus the row of w (cols, n_expert) that is its expert's; dropped slots get none."""

    name = "add_id"

    x: Node
    w: Weight
    plan: Node

    def __post_init__(self) -> None:
        if self.w.ne0 != self.x.cols:
            raise ValueError(f"{self.w.name} has rows of {self.w.ne0}, what it is added to has {self.x.cols} columns")

    def compute(self, run: Run) -> Array:
        experts = run.value(self.plan)[:, 1:]
        rows = run.weight(self.w).reshape(-1, self.x.cols)[experts[:, 0]]
        return run.value(self.x) + np.where(experts < 0, 0, rows)


@dataclass(frozen=True, slots=True)
class ScaleId(Planned, SameSize):
    """Every sorted row times a number: `by` is a weight with a number per expert, or the route that chose the experts.

    Rows of dropped slots stay as they are.
    """

    name = "scale_id"
    place = Place.FIRST_INPUT

    x: Node
    by: Weight | Node
    plan: Node

    def compute(self, run: Run) -> Array:
        x, plan = run.value(self.x), run.value(self.plan)
        pairs, experts = plan[:, 0], plan[:, 1]
        if isinstance(self.by, Weight):
            factors = run.weight(self.by).reshape(-1)[experts]
        else:
            factors = route_parts(run.value(self.by), self.sort.n_used)[0].reshape(-1)[pairs]
        return x * np.where(experts < 0, 1, factors).astype(x.dtype)[:, None]


@dataclass(frozen=True, slots=True)
class MoeSum(Planned, Op):
    """Weighted sum of the selected experts' rows, back in token order: [rows, y.cols]. Dropped slots add zero.

    Without `weighted`, all weights are 1.
    """

    name = "moe_sum"
    place = Place.FIRST_INPUT

    y: Node
    route: Node
    plan: Node
    weighted: bool = True

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.route.rows, self.y.cols

    def compute(self, run: Run) -> Array:
        y, route, plan = run.value(self.y), run.value(self.route), run.value(self.plan)
        weights, ids = route_parts(route, route.shape[1] // 2)
        slots = np.empty_like(y)
        slots[plan[:, 0]] = y
        slots = slots.reshape(*ids.shape, -1)
        factors = weights[..., None].astype(y.dtype) if self.weighted else y.dtype.type(1)
        kept = np.where(ids[..., None] < 0, 0, slots * factors)
        return kept.sum(axis=1)


# --- arithmetic -------------------------------------------------------------------------------------------------------
def best_groups(selection: Array, n_group: int, n_group_used: int) -> Array:
    """Return selection scores with -inf outside the groups whose two best scores have the largest sums."""
    grouped = selection.reshape(len(selection), n_group, -1)
    score = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
    chosen = np.argsort(-score, axis=1, kind="stable")[:, :n_group_used]
    allowed = np.zeros(score.shape, bool)
    np.put_along_axis(allowed, chosen, True, axis=1)
    return np.where(allowed[:, :, None], grouped, -np.inf).reshape(selection.shape)


def route_parts(route: Array, n_used: int) -> tuple[Array, Array]:
    """Return weights and ids, (rows, n_used) each."""
    return route[:, :n_used], np.ascontiguousarray(route[:, n_used:]).view(np.int32)


def sorted_rows(x: Array, plan: Array) -> Array:
    """Return the rows of x in the order of the plan."""
    return x[plan[:, 0] // (len(plan) // len(x))]


def by_expert(w: Array, x: Array, plan: Array) -> Array:
    """Multiply every sorted row by the matrix of its expert; dropped slots give zero."""
    out = np.zeros((len(x), w.shape[1]), x.dtype)
    for e in np.unique(plan[:, 1]):
        if e >= 0:
            rows = plan[:, 1] == e
            out[rows] = x[rows] @ w[e].T
    return out
