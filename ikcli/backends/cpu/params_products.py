"""Parameters of kernels of matrix products and experts (see `params.py`). Strides are in bytes."""

from __future__ import annotations

from ikcli.backends.cpu.params import F32, Address, Params, Record


class ConvertParams(Params):
    """Parameters of the conversion of head columns to the rows that a weight's kernel reads."""

    x: Address
    stride: int
    offset: int  # bytes
    heads: int
    head_stride: int
    k: int
    out: Address
    out_stride: int


class GatherParams(Params):
    """Parameters of the same conversion for rows in expert order."""

    x: Address
    stride: int
    order: Address
    n_used: int
    k: int
    out: Address
    out_stride: int
    n_sorted: Address  # of their number


class Product(Record):
    """Rows of a matrix with rows of activations."""

    w: Address
    row_bytes: int
    n_w: int  # rows
    k: int
    a: Address
    a_stride: int
    out: Address
    out_stride: int
    tiles: Address  # for unpacked rows
    tile_bytes: int
    n_tiles: int  # of a thread
    few: int  # activation rows, up to which none are unpacked


class MulMatParams(Params):
    """Dense and per-head products. Output row t, head h, weight row r: out + t * out_stride + h * out_head + 4 * r."""

    product: Product
    heads: int
    w_head: int  # bytes between heads
    a_head: int
    out_head: int


class Experts(Record):
    """Activation rows offsets[e] .. offsets[e + 1] - 1 belong to expert e."""

    n_expert: int
    offsets: Address  # i64[n_expert + 1]
    # Numbers; node i has experts n_expert * i // n_nodes to n_expert * (i + 1) // n_nodes.
    node: Address  # of the thread
    n_nodes: Address  # 1: experts have no nodes


class ByExpertParams(Params):
    product: Product  # n_w: rows of an expert; w: table of the addresses of their matrices (`expert_table`)
    experts: Experts


class UpGateParams(ByExpertParams):
    gate: Address  # a table, too
    scratch: Address
    scratch_bytes: int  # of a thread


class UpGluParams(UpGateParams):
    limit: F32
    alpha: F32


# --- mixture of experts -----------------------------------------------------------------------------------------------
class RouteParams(Params):
    logits: Address
    bias: Address  # 0: none
    out: Address
    n_expert: int
    n_used: int
    gating: int  # its place in GATINGS
    norm: int
    scale: F32
    n_group: int
    n_group_used: int
    fewest: int  # smart expert reduction: 0 = off
    least: F32  # ... its threshold
    scratch: Address
    scratch_bytes: int  # of a thread


class HashRouteParams(Params):
    logits: Address
    table: Address  # i32[n_vocab][n_used]
    out: Address
    n_expert: int
    n_used: int
    gating: int
    norm: int
    scale: F32
    scratch: Address
    scratch_bytes: int  # of a thread


class SortParams(Params):
    route: Address
    plan: Address
    n_expert: int
    n_used: int


class GroupsParams(Params):
    route: Address
    out: Address
    n_used: int
    size: int


class ResidentParams(Params):
    route: Address
    table: Address
    uses: Address
    out: Address
    n_used: int


class ZeroDroppedParams(Params):
    out: Address
    cols: int
    plan: Address
    n_used: int


class AddIdParams(Params):
    x: Address
    w: Address
    out: Address
    cols: int
    plan: Address
    n_expert: int
    n_used: int


class ScaleIdParams(Params):
    x: Address
    by: Address  # numbers by expert, or a route
    out: Address
    cols: int
    plan: Address
    n_expert: int
    n_used: int


class MoeSumParams(Params):
    y: Address
    route: Address
    plan: Address
    cols: int
    n_used: int
    n_expert: int
    out: Address
