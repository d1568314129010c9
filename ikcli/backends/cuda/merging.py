"""Merge launches: an earlier launch waits until a later node can be computed with it.

A launch may wait if it belongs to the same split, is unconditional, and nothing has read its result yet. A merged
launch still stores every node's value. Kernels: `kernels/layer_norm.cu`, `kernels/layer_heads.cu`.

    norm     rms_norm of a sum, of a sum of sums, of sums whose first addend is the weighted sum of experts
    heads    rotation of heads, after their biases and norms, for queries and keys together
    latent   DeepSeek's cached row (normed latent, rotated key, both side by side) and rotated queries
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ikcli.backends.cuda.activations import format_args, makes_formats, parts_of, producer, row_grid
from ikcli.backends.cuda.lower import Arg, GpuLaunch, GpuLowering, Grid, Ref
from ikcli.backends.cuda.parameters import HEADS, ROTATION, ROWS
from ikcli.graph import Node, RowSpec
from ikcli.graph.ops_experts import MoeSum
from ikcli.graph.ops_rows import Add, ConcatHeads, RmsNorm, Rope


def waiting(low: GpuLowering, node: Node, *kernels: str) -> int:
    """Return the index of the launch of one of `kernels` that computes `node`; -1 without one.

    The launch must still be free to move to the end.
    """
    at = producer(low, node, low.turn_start)
    if at < 0:
        return -1
    op = low.ops[at]
    if op.kernel not in kernels or op.when is not None or makes_formats(op):
        return -1
    made = {low.out(n).target for n in (op.node, *op.also)}
    for later in low.ops[at + 1 :]:
        if any(isinstance(arg, Ref) and arg.target in made for arg in later.args):
            return -1
    return at


def take(low: GpuLowering, at: int) -> GpuLaunch:
    """Remove a waiting launch."""
    return low.ops.pop(at)


def put(low: GpuLowering, kernel: str, grid: Grid, block: int, nodes: list[Node], args: tuple[Arg, ...]) -> None:
    """Append a launch that computes several nodes."""
    low.ops.append(GpuLaunch(kernel, grid, block, 0, args, nodes[0], None, tuple(nodes[1:])))


def _number(arg: Arg) -> float:
    """Return the value of a word that is a plain number."""
    assert isinstance(arg, (int, np.int32, np.float32))
    return float(arg)


# --- norms ------------------------------------------------------------------------------------------------------------
def norm_threads(width: int) -> int:
    """Return the threads for one row, enough for the row of a single token to take few steps."""
    return 128 if width <= 512 else 256 if width <= 1024 else 512


def _sum(low: GpuLowering, node: Node) -> int:
    """Return the index of the waiting launch of an `add` of two values; else -1."""
    if not isinstance(node.op, Add) or not isinstance(node.op.y, Node):
        return -1
    return waiting(low, node, "layer_add")


def merged_norm(low: GpuLowering, node: Node, op: RmsNorm) -> bool:
    """Lower an rms_norm of whole rows of x together with the sums that make x; return False if it does not apply."""
    x, w = op.x, op.w
    if op.offset or op.width != x.cols or node.cols != x.cols or _sum(low, x) < 0:
        return False
    take(low, _sum(low, x))
    first, second = x.nodes()
    if _sum(low, first) < 0 <= _sum(low, second):
        first, second = second, first
    nodes, third = [x, node], None
    if _sum(low, first) >= 0:
        take(low, _sum(low, first))
        nodes.insert(0, first)
        third = second
        first, second = first.nodes()
    if _experts(low, first) < 0 <= _experts(low, second):
        first, second = second, first
    at = _experts(low, first)
    rest: tuple[Arg, ...] = (
        low.out(second), low.out(nodes[0]), low.out(third) if third else 0, low.out(x) if third else 0, low.weight(w),
        low.out(node), np.int32(x.cols), np.float32(op.eps), *format_args(),
    )  # fmt: skip
    if at < 0:
        source: tuple[Arg, ...] = low.out(first), first.cols
    else:
        source = take(low, at).named("y route position out n_used")
        nodes.insert(0, first)
    put(low, "layer_norm_rows" if at < 0 else "layer_norm_experts", row_grid(node.rows), norm_threads(x.cols), nodes,
        (low.state, *low.row_args(node.rows), *source, *rest))  # fmt: skip
    return True


def _experts(low: GpuLowering, node: Node) -> int:
    return waiting(low, node, "layer_moe_sum") if isinstance(node.op, MoeSum) and node.op.weighted else -1


# --- heads ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Heads:
    """A value whose heads are rotated, possibly after a bias and a norm."""

    x: Ref
    x_cols: int
    heads: int
    out: Arg
    b: Arg = 0
    biased: Arg = 0
    w: Arg = 0
    normed: Arg = 0
    eps: float = 0.0

    def args(self) -> tuple[Arg, ...]:
        """Return HEADS of layer_heads and layer_latent."""
        return (self.x, self.x_cols, self.b, self.biased, self.w, self.normed, self.out, np.int32(self.heads),
                np.float32(self.eps))  # fmt: skip


def _no_heads(any_ref: Ref) -> Heads:
    return Heads(any_ref, 0, 0, 0)


def _heads_grid(spec: RowSpec, per_row: int) -> Grid:
    return lambda c: parts_of(c.rows(spec) * per_row, 4)


def merged_heads(low: GpuLowering, node: Node, op: Rope) -> None:
    """Lower a rope node with the norm of its heads, and with another rope of the same kind (queries and keys)."""
    x, dim, nodes = op.x, op.head_dim, [node]
    mine = Heads(low.out(x), x.cols, op.n_head, low.out(node))
    at = waiting(low, x, "layer_norm_groups")
    if at >= 0 and isinstance(x.op, RmsNorm) and x.op.width == dim:
        source, cols, w, eps = take(low, at).named("x x_cols w eps")
        assert isinstance(source, Ref)
        mine = replace(mine, x=source, x_cols=int(_number(cols)), w=w, normed=low.out(x), eps=_number(eps))
        nodes.insert(0, x)
        x = x.op.x
    at = waiting(low, x, "layer_add")
    if at >= 0 and low.ops[at].arg("y_cols") == 0 and mine.x == low.out(x):
        source, bias = take(low, at).named("x y")
        assert isinstance(source, Ref)
        mine = replace(mine, x=source, x_cols=x.cols, b=bias, biased=low.out(x))
        nodes.insert(0, x)
    rotation = (low.state, *low.row_args(node.rows), low.out(op.table), np.int32(dim), np.int32(op.offset),
                np.int32(op.n_rot), np.int32(op.neox))  # fmt: skip
    args, per_row = mine.args() + _no_heads(mine.x).args(), mine.heads
    other = _unpaired(low, rotation)
    if other >= 0:
        first = take(low, other)
        args = first.named(HEADS) + mine.args()
        nodes = [first.node, *first.also, *nodes]
        per_row += int(_number(first.arg("heads")))
    put(low, "layer_heads", _heads_grid(node.rows, per_row), 128, nodes, rotation + args)


def _unpaired(low: GpuLowering, rotation: tuple[Arg, ...]) -> int:
    """Return the index of the last layer_heads launch if another value can join it; else -1.

    It must handle one value only, in the same way, and still wait.
    """
    for i in range(len(low.ops) - 1, low.turn_start - 1, -1):
        op = low.ops[i]
        if op.kernel == "layer_heads":
            alike = _is_alone(op) and op.named(ROTATION) == rotation
            return i if alike and waiting(low, op.node, "layer_heads") == i else -1
    return -1


def _is_alone(op: GpuLaunch) -> bool:
    """Return whether a layer_heads launch handles one value only."""
    return _number(op.arg("heads2")) == 0


def merged_latent(low: GpuLowering, node: Node, op: ConcatHeads) -> bool:
    """Lower the concatenation of rotated key and normed latent of one row; return False for any other node."""
    if op.n_head != 1 or len(op.parts) != 2:
        return False
    rotated, latent = (p.node for p in op.parts)
    rope, rms = rotated.op, latent.op
    if not isinstance(rope, Rope) or not isinstance(rms, RmsNorm):
        return False
    kv, rank, n_rot = rms.x, latent.cols, rope.n_rot
    if kv is not rope.x or kv.cols != rank + n_rot:
        return False
    shape = (rope.n_head, rope.offset, rms.offset, rms.width)
    slices = [(p.offset, p.width) for p in op.parts]
    if shape != (1, rank, 0, rank) or slices != [(rank, n_rot), (0, rank)]:
        return False
    key, norm = waiting(low, rotated, "layer_heads"), waiting(low, latent, "layer_norm_rows")
    if key < 0 or norm < 0 or not _is_alone(low.ops[key]) or low.ops[norm].arg("y") != 0:
        return False
    eps = low.ops[norm].arg("eps")
    for at in sorted((key, norm), reverse=True):
        take(low, at)
    _put_latent(low, node, rotated, latent, rope, rms, eps)
    return True


def _put_latent(low: GpuLowering, node: Node, rotated: Node, latent: Node, rope: Rope, rms: RmsNorm, eps: Arg) -> None:
    """Emit the launch of `merged_latent`, with queries that wait for their rotation."""
    kv = rope.x
    same = (low.state, *low.row_args(node.rows), low.out(rope.table))
    rotation: tuple[Arg, ...] = np.int32(rope.n_rot), np.int32(rope.neox)
    nodes = [latent, rotated, node]
    dims: tuple[Arg, ...] = np.int32(0), np.int32(0)
    queries, heads = _no_heads(low.out(kv)).args(), 0
    at = next((i for i in range(len(low.ops) - 1, low.turn_start - 1, -1) if low.ops[i].kernel == "layer_heads"), -1)
    if at >= 0:
        op = low.ops[at]
        like = op.named(f"{ROWS} table") == same and op.named("n_rot neox") == rotation and _is_alone(op)
        if like and waiting(low, op.node, "layer_heads") == at:
            take(low, at)
            nodes = [op.node, *op.also, *nodes]
            dims, queries = op.named("dim offset"), op.named(HEADS)
            heads = int(_number(op.arg("heads")))
    put(low, "layer_latent", _heads_grid(node.rows, heads + 1), 128, nodes,
        (*same, *dims, *rotation, *queries, low.out(kv), low.weight(rms.w), eps, np.int32(latent.cols), low.out(latent),
         low.out(rotated), low.out(node), *format_args()))  # fmt: skip
