"""Lower graph nodes to kernel calls (attention is in `lower_attention.py`).

Numba is never imported here: the sizes that kernels and lowering must agree on are small functions of this module.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ikcli.backends.cpu.lower_media import RULES
from ikcli.backends.cpu.params_layers import (
    AddParams,
    AlibiParams,
    ClampParams,
    ConcatParams,
    CutParams,
    EmbedIdsParams,
    EmbedParams,
    EmbedPositionsParams,
    EmbedTypesParams,
    GateParams,
    GluParams,
    HostRowsParams,
    MapParams,
    NGramIdsParams,
    NormParams,
    PosScaleParams,
    RmsNormParams,
    RopeParams,
    RopeTableParams,
    ScaleParams,
    SoftCapParams,
    SwiGluParams,
)
from ikcli.backends.cpu.params_products import (
    AddIdParams,
    ByExpertParams,
    ConvertParams,
    Experts,
    GatherParams,
    GroupsParams,
    HashRouteParams,
    MoeSumParams,
    MulMatParams,
    Product,
    ResidentParams,
    RouteParams,
    ScaleIdParams,
    SortParams,
    UpGateParams,
    UpGluParams,
    ZeroDroppedParams,
)
from ikcli.backends.cpu.program import BATCH_INVARIANT_ROWS, N_NODES, NODE, CpuLowering, Ref
from ikcli.backends.cpu.tile_modes import (
    HALF_STEP,
    MOST_OF_TWO,
    MOST_TILES,
    PAIRS_BLOCK,
    PAIRS_PART,
    TILE_ROWS,
    few_rows,
    makes_integers,
    quantized_bytes,
    reads_two_rows,
    rounds_activations,
    tile_bytes,
    tiles_per_thread,
)
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.graph import HeadSlice, Node, RowSpec, Weight
from ikcli.graph.activations import Glu
from ikcli.graph.ops_alibi import Alibi
from ikcli.graph.ops_elements import Activate, Clamp, Cut, Gate, Norm, PosScale, Scale, SoftCap
from ikcli.graph.ops_experts import (
    GATINGS,
    AddId,
    ExpertProduct,
    HashRoute,
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
from ikcli.graph.ops_ngrams import EmbedIds, NGramIds
from ikcli.graph.ops_rows import (
    Add,
    Concat,
    ConcatHeads,
    Embed,
    EmbedTypes,
    GetRows,
    MulMat,
    MulMatHeads,
    RmsNorm,
    Rope,
    RopeTable,
    SwiGlu,
)
from ikcli.native.kernel_cache import KernelKey
from ikcli.quant.formats import row_size

FLOAT_TYPES = (GGMLType.F32, GGMLType.F16, GGMLType.BF16, GGMLType.BF16_R16)
ROW_SLACK = 512  # dots of a partial last step read past the end of an activation row
FLOAT_TILE_BYTES = 512 * 32 * 4


def stored_name(type_: GGMLType, tensor: str = "a tensor") -> str:
    """Return the kernels' name of a weight's type (`kernels/formats.py`), or raise UnsupportedError."""
    t = TYPES[type_]
    if t.cpu:
        numbers = (t.block_size, t.type_size, t.row_meta_size, t.rows)
        return ",".join([t.name, t.cpu, t.tile, *map(str, numbers), f"{t.matmul_scale:g}"])
    if type_ in FLOAT_TYPES:
        return t.name
    known = ", ".join(other.name for other in TYPES.values() if other.cpu or other.type in FLOAT_TYPES)
    raise UnsupportedError(f"{tensor} is {t.name}, which has no CPU kernel yet; use a file in {known}")


def activation_kind(type_: GGMLType) -> str:
    """Return the form in which the kernels of a weight type read activation rows (`kernels/activations.py`)."""
    if type_ in (GGMLType.BF16, GGMLType.BF16_R16) and rounds_activations():
        return "bf16"
    if type_ is GGMLType.F16 and makes_integers():
        return "i16"
    return "f32" if type_ in FLOAT_TYPES else "q8"


def products_of(type_: GGMLType) -> str:
    """Return the kind of products that the kernels of a weight type compute in prompts: one of `peaks.OPS`."""
    return activation_kind(type_).replace("q8", "i8")


def _kind_of_rows(low: CpuLowering, w: Weight, rows: RowSpec, exact: bool = False) -> str:
    """Return `activation_kind`, without integers for generation rows, which are always few."""
    kind = activation_kind(w.type)
    few = low.batch_invariant and low.rows(rows) <= BATCH_INVARIANT_ROWS
    return "f32" if kind == "i16" and (exact or few) else kind


def _few_rows(low: CpuLowering, type_: GGMLType) -> int:
    """Return the most activation rows for which a product reads weights without unpacking them."""
    return BATCH_INVARIANT_ROWS if low.batch_invariant else few_rows(type_ in FLOAT_TYPES)


def kind_row_bytes(kind: str, k: int) -> int:
    """Return the bytes of an activation row of k values."""
    if kind == "f32":
        return 4 * k
    if kind == "q8":
        return activation_row_bytes(k)
    whole = -(-k // PAIRS_BLOCK) * PAIRS_BLOCK
    lines = -(-2 * k // 64) if kind == "bf16" else 6 * whole // 64 + -(-k // PAIRS_PART)
    return 64 * (lines | 1)  # an odd number of cache lines, so that rows do not share sets


def activation_row_bytes(k: int) -> int:
    """Return the bytes of a quantized activation row (kernels/activations.py)."""
    twice = quantized_bytes(2 * k) if k == HALF_STEP and reads_two_rows() else 0
    return quantized_bytes(k) + twice


def plan_bytes(n_pairs: int, n_expert: int) -> int:
    """Return the bytes of a moe_sort plan (kernels/moe.py)."""
    return 8 * (2 + 2 * n_expert + 2 * n_pairs)


# --- rows and elements ------------------------------------------------------------------------------------------------
def _check_rows(w: Weight) -> None:
    """Raise UnsupportedError for a table whose rows cannot be looked up."""
    if TYPES[w.type].rows > 1:
        raise UnsupportedError(
            f"{w.name} is {TYPES[w.type].name}, whose rows are interleaved and cannot be looked up one by one; "
            "use a file that keeps it in a plain type"
        )


@RULES.add(Embed, "w by_position")
def _embed(low: CpuLowering, node: Node, op: Embed) -> None:
    w = op.w
    _check_rows(w)
    type_, data, row, out = stored_name(w.type, w.name), low.weight(w), row_size(w.type, w.ne0), low.out(node)
    if op.by_position:
        table = EmbedPositionsParams(w=data, row_bytes=row, cols=w.ne0, out=out, n_pos=w.ne1)
        low.emit(KernelKey("embed", "make_embed_positions", (type_,)), node.rows, table, row_bytes=16 * w.ne0)
    else:
        params = EmbedParams(w=data, row_bytes=row, cols=w.ne0, out=out)
        low.emit(KernelKey("embed", "make_embed", (type_,)), node.rows, params, row_bytes=16 * w.ne0)


@RULES.add(NGramIds, "state grams")
def _ngram_ids(low: CpuLowering, node: Node, op: NGramIds) -> None:
    grams = op.grams
    multipliers, sizes, offsets = map(low.constant, grams.tables())
    params = NGramIdsParams(states=Ref(op.state), before=grams.n_before, end=grams.end, multipliers=multipliers,
                            sizes=sizes, offsets=offsets, per_length=grams.per_length, out=low.out(node))  # fmt: skip
    low.emit(KernelKey("embed", "make_ngram_ids"), node.rows, params, row_bytes=8 * node.cols)


@RULES.add(EmbedIds, "w ids")
def _embed_ids(low: CpuLowering, node: Node, op: EmbedIds) -> None:
    w = op.w
    _check_rows(w)
    params = EmbedIdsParams(w=low.weight(w), row_bytes=row_size(w.type, w.ne0), cols=w.ne0, out=low.out(node),
                            ids=low.out(op.ids), per_row=op.ids.cols)  # fmt: skip
    key = KernelKey("embed", "make_embed_ids", (stored_name(w.type, w.name),))
    low.emit(key, node.rows, params, row_bytes=16 * node.cols)


@RULES.add(HostRows, "n_cols")
def _host_rows(low: CpuLowering, node: Node, op: HostRows) -> None:
    params = HostRowsParams(cols=op.n_cols, out=low.out(node))
    low.emit(KernelKey("embed", "make_host_rows"), node.rows, params, row_bytes=8 * op.n_cols)


@RULES.add(EmbedTypes, "w sep")
def _embed_types(low: CpuLowering, node: Node, op: EmbedTypes) -> None:
    w = op.w
    params = EmbedTypesParams(w=low.weight(w), row_bytes=row_size(w.type, w.ne0), cols=w.ne0, out=low.out(node),
                              sep=op.sep)  # fmt: skip
    key = KernelKey("embed", "make_embed_types", (stored_name(w.type, w.name),))
    low.emit(key, node.rows, params, row_bytes=16 * w.ne0)


@RULES.add(RmsNorm, "x w eps offset n_cols")
def _rms_norm(low: CpuLowering, node: Node, op: RmsNorm) -> None:
    params = RmsNormParams(x=low.out(op.x), stride=4 * op.x.cols, offset=4 * op.offset, w=low.weight(op.w),
                           out=low.out(node), cols=node.cols, width=op.width, eps=op.eps)  # fmt: skip
    low.emit(KernelKey("basic", "make_rms_norm"), node.rows, params, row_bytes=8 * node.cols)


@RULES.add(Add, "x y")
def _add(low: CpuLowering, node: Node, op: Add) -> None:
    is_row = isinstance(op.y, Weight)
    other = low.weight(op.y) if isinstance(op.y, Weight) else low.out(op.y)
    params = AddParams(x=low.out(op.x), y=other, out=low.out(node), cols=node.cols, y_is_row=int(is_row))
    low.emit(KernelKey("basic", "make_add"), node.rows, params, row_bytes=12 * node.cols)


@RULES.add(Scale, "x factor")
def _scale(low: CpuLowering, node: Node, op: Scale) -> None:
    params = ScaleParams(x=low.out(op.x), out=low.out(node), cols=node.cols, factor=op.factor)
    low.emit(KernelKey("elements", "make_scale"), node.rows, params, row_bytes=8 * node.cols)


@RULES.add(PosScale, "x scale length shift")
def _pos_scale(low: CpuLowering, node: Node, op: PosScale) -> None:
    params = PosScaleParams(x=low.out(op.x), out=low.out(node), cols=node.cols, scale=op.scale, length=op.length,
                            shift=op.shift)  # fmt: skip
    low.emit(KernelKey("elements", "make_pos_scale"), node.rows, params, row_bytes=8 * node.cols)


@RULES.add(SoftCap, "x cap")
def _softcap(low: CpuLowering, node: Node, op: SoftCap) -> None:
    params = SoftCapParams(x=low.out(op.x), out=low.out(node), cols=node.cols, cap=op.cap)
    low.emit(KernelKey("elements", "make_softcap"), node.rows, params, row_bytes=24 * node.cols)


@RULES.add(Gate, "x gate kind")
def _gate(low: CpuLowering, node: Node, op: Gate) -> None:
    params = GateParams(x=low.out(op.x), gate=low.out(op.gate), out=low.out(node), cols=node.cols,
                        gate_cols=op.gate.cols)  # fmt: skip
    low.emit(KernelKey("elements", "make_gate", (op.kind,)), node.rows, params, row_bytes=16 * node.cols)


@RULES.add(SwiGlu, "gate up act")
def _swiglu(low: CpuLowering, node: Node, op: SwiGlu) -> None:
    act, gate, up, out = op.act, low.out(op.gate), low.out(op.up), low.out(node)
    if act.plain:
        plain = SwiGluParams(gate=gate, up=up, out=out, cols=node.cols)
        low.emit(KernelKey("basic", "make_swiglu"), node.rows, plain, row_bytes=24 * node.cols)
    else:
        params = GluParams(gate=gate, up=up, out=out, cols=node.cols, limit=act.limit, alpha=act.alpha)
        low.emit(KernelKey("glu", "make_glu", _glu_args(act)), node.rows, params, row_bytes=24 * node.cols)


def _glu_args(act: Glu) -> tuple[str, int]:
    """Return the factory arguments of kernels that depend on the kind of gated activation."""
    return act.kind, int(act.limit > 0)


@RULES.add(Clamp, "x limit")
def _clamp(low: CpuLowering, node: Node, op: Clamp) -> None:
    params = ClampParams(x=low.out(op.x), out=low.out(node), cols=node.cols, limit=op.limit)
    low.emit(KernelKey("glu", "make_clamp"), node.rows, params, row_bytes=8 * node.cols)


@RULES.add(Cut, "x z")
def _cut(low: CpuLowering, node: Node, op: Cut) -> None:
    params = CutParams(x=low.out(op.x), out=low.out(node), cols=node.cols, z=op.z)
    low.emit(KernelKey("norms", "make_cut"), node.rows, params, row_bytes=16 * node.cols)


@RULES.add(Activate, "x kind")
def _activate(low: CpuLowering, node: Node, op: Activate) -> None:
    params = MapParams(x=low.out(op.x), out=low.out(node), cols=node.cols)
    low.emit(KernelKey("glu", "make_unary", (op.kind,)), node.rows, params, row_bytes=16 * node.cols)


@RULES.add(Norm, "x w b kind eps width")
def _norm(low: CpuLowering, node: Node, op: Norm) -> None:
    (w, w_period), (b, b_period) = ((0, 1) if w is None else (low.weight(w), w.ne0 * w.ne1) for w in (op.w, op.b))
    params = NormParams(x=low.out(op.x), w=w, w_period=w_period, b=b, b_period=b_period, out=low.out(node),
                        cols=node.cols, width=op.width, eps=op.eps)  # fmt: skip
    key = KernelKey("norms", "make_norm", (op.kind, int(op.w is not None), int(op.b is not None)))
    low.emit(key, node.rows, params, row_bytes=8 * node.cols)


@RULES.add(Concat, "parts")
def _concat(low: CpuLowering, node: Node, op: Concat) -> None:
    at = 0
    for part in op.parts:
        params = ConcatParams(src=low.out(part), src_stride=4 * part.cols, cols=part.cols, dst=low.out(node) + 4 * at,
                              dst_stride=4 * node.cols, heads=1, src_head=0, dst_head=0)  # fmt: skip
        low.emit(KernelKey("basic", "make_concat"), node.rows, params, row_bytes=8 * part.cols)
        at += part.cols


@RULES.add(ConcatHeads, "parts n_head")
def _concat_heads(low: CpuLowering, node: Node, op: ConcatHeads) -> None:
    n_head = op.n_head
    width = node.cols // n_head
    at = 0
    for part in op.parts:
        src = part.node
        params = ConcatParams(src=low.out(src) + 4 * part.offset, src_stride=4 * src.cols, cols=part.width,
                              dst=low.out(node) + 4 * at, dst_stride=4 * node.cols, heads=n_head,
                              src_head=4 * part.head_stride, dst_head=4 * width)  # fmt: skip
        low.emit(KernelKey("basic", "make_concat"), node.rows, params, row_bytes=8 * n_head * part.width)
        at += part.width


@RULES.add(GetRows, "x")
def _get_rows(low: CpuLowering, node: Node, op: GetRows) -> None:
    params = MapParams(x=low.out(op.x), out=low.out(node), cols=node.cols)
    low.emit(KernelKey("basic", "make_get_rows"), node.rows, params, row_bytes=8 * node.cols)


@RULES.add(RopeTable, "inv_freq mscale lag")
def _rope_table(low: CpuLowering, node: Node, op: RopeTable) -> None:
    freqs = np.asarray(op.inv_freq, dtype=np.float64)
    params = RopeTableParams(out=low.out(node), pairs=len(freqs), freqs=low.constant(freqs.tobytes()), mscale=op.mscale,
                             lag=op.lag)  # fmt: skip
    low.emit(KernelKey("basic", "make_rope_table"), node.rows, params, row_bytes=256 * len(freqs))


@RULES.add(Alibi, "width slopes")
def _alibi(low: CpuLowering, node: Node, op: Alibi) -> None:
    slopes = low.constant(np.asarray(op.slopes, np.float32).tobytes()) if op.slopes else 0
    params = AlibiParams(out=low.out(node), width=op.width, slopes=slopes, heads=max(len(op.slopes), 1))
    low.emit(KernelKey("elements", "make_alibi"), node.rows, params, row_bytes=16 * node.cols)


@RULES.add(Rope, "x table n_head head_dim offset neox")
def _rope(low: CpuLowering, node: Node, op: Rope) -> None:
    params = RopeParams(x=low.out(op.x), table=low.out(op.table), out=low.out(node), heads=op.n_head, dim=op.head_dim,
                        offset=op.offset, n_rot=op.n_rot, neox=int(op.neox))  # fmt: skip
    low.emit(KernelKey("basic", "make_rope"), node.rows, params, row_bytes=16 * node.cols)


# --- matrix products --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class InputRows:
    """Input rows of a matmul: address, bytes between rows, bytes between heads."""

    at: Ref
    stride: int
    head_stride: int


def _activations(low: CpuLowering, w: Weight, x: HeadSlice, heads: int, exact: bool = False) -> InputRows:
    """Return the input as the weight's kernel reads it: rows as they are, or converted once per input."""
    src = x.node
    kind = _kind_of_rows(low, w, src.rows, exact)
    if kind == "f32":
        return InputRows(low.out(src) + 4 * x.offset, 4 * src.cols, 4 * x.head_stride)
    row = kind_row_bytes(kind, x.width)

    def convert() -> Ref:
        out = low.buffer(low.rows(src.rows) * heads * row + ROW_SLACK)
        params = ConvertParams(x=low.out(src), stride=4 * src.cols, offset=4 * x.offset, heads=heads,
                               head_stride=4 * x.head_stride, k=x.width, out=out, out_stride=row)  # fmt: skip
        low.emit(KernelKey("activations", "make_convert", (kind,)), src.rows, params,
                 row_bytes=heads * (4 * x.width + row))  # fmt: skip
        return out

    at = low.shared((kind, src, x.offset, x.width, x.head_stride, heads), convert)
    return InputRows(at, heads * row, row)


def _matmul(factory: str, w: Weight, *kinds: int | str) -> KernelKey:
    return KernelKey("matmul", factory, (stored_name(w.type, w.name), *kinds))


def _product(low: CpuLowering, node: Node, w: Weight, at: Ref, a: InputRows) -> Product:
    """Return the parameters common to all products with rows from `at` on.

    Raises UnsupportedError for a type without kernels or for cut groups.
    """
    stored_name(w.type, w.name)  # else an error
    t, rows = TYPES[w.type], TYPES[w.type].rows
    if w.row0 % rows or w.ne1 % rows:
        raise UnsupportedError(
            f"{w.name} is {t.name}, whose groups of {rows} rows would be cut; `ik repack --unrepack` the file"
        )
    if w.type in FLOAT_TYPES:
        size, count = FLOAT_TILE_BYTES, 1
    else:
        size, count = tile_bytes(t.tile, w.ne0), tiles_per_thread(t.tile, w.ne0)
    return Product(w=at, row_bytes=row_size(w.type, w.ne0), n_w=w.ne1, k=w.ne0, a=a.at, a_stride=a.stride,
                   out=low.out(node), out_stride=4 * node.cols, tiles=low.buffer(size * count * low.n_threads),
                   tile_bytes=size, n_tiles=count, few=_few_rows(low, w.type))  # fmt: skip


def _emit_mul_mat(low: CpuLowering, node: Node, w: Weight, x: HeadSlice, heads: int, exact: bool) -> None:
    row = row_size(w.type, w.ne0)
    exact = exact and activation_kind(w.type) == "i16"
    a = _activations(low, w, x, heads, exact)
    full_rows = w.shape[1] if len(w.shape) > 1 else 1
    params = MulMatParams(product=_product(low, node, w, low.weight(w, row), a), heads=heads, w_head=full_rows * row,
                          a_head=a.head_stride, out_head=4 * w.ne1)  # fmt: skip
    key = _matmul("make_mul_mat", w, "f32") if exact else _matmul("make_mul_mat", w)
    low.emit(key, node.rows, params, row_bytes=heads * w.ne1 * row)


@RULES.add(MulMat, "w x exact")
def _mul_mat(low: CpuLowering, node: Node, op: MulMat) -> None:
    _emit_mul_mat(low, node, op.w, HeadSlice(op.x, 0, op.x.cols, 0), 1, op.exact)


@RULES.add(MulMatHeads, "w x exact")
def _mul_mat_heads(low: CpuLowering, node: Node, op: MulMatHeads) -> None:
    _emit_mul_mat(low, node, op.w, op.x, op.w.ne2, op.exact)


# --- mixture of experts -----------------------------------------------------------------------------------------------
@RULES.add(
    MoeRoute, "logits bias n_used norm scale n_group n_group_used ser", gating=GATINGS
)  # fmt: skip
def _moe_route(low: CpuLowering, node: Node, op: MoeRoute) -> None:
    fewest, threshold = op.ser or (0, 0.0)
    scratch = 4 * (2 * op.n_expert + op.n_group)
    params = RouteParams(logits=low.out(op.logits), bias=low.weight(op.bias) if op.bias else 0, out=low.out(node),
                         n_expert=op.n_expert, n_used=op.n_used, gating=GATINGS.index(op.gating),
                         norm=int(op.norm), scale=op.scale, n_group=op.n_group, n_group_used=op.n_group_used,
                         fewest=max(fewest, 0), least=threshold, scratch=low.buffer(scratch * low.n_threads),
                         scratch_bytes=scratch)  # fmt: skip
    low.emit(KernelKey("moe", "make_route"), node.rows, params, row_bytes=16 * (2 + op.n_used) * op.n_expert)


@RULES.add(HashRoute, "logits table norm scale", gating=GATINGS)
def _hash_route(low: CpuLowering, node: Node, op: HashRoute) -> None:
    if op.table.type is not GGMLType.I32:
        raise UnsupportedError(f"{op.table.name} is {TYPES[op.table.type].name}; tables of experts have to be i32")
    scratch = 4 * op.n_expert
    params = HashRouteParams(logits=low.out(op.logits), table=low.weight(op.table), out=low.out(node),
                             n_expert=op.n_expert, n_used=op.n_used, gating=GATINGS.index(op.gating),
                             norm=int(op.norm), scale=op.scale, scratch=low.buffer(scratch * low.n_threads),
                             scratch_bytes=scratch)  # fmt: skip
    low.emit(KernelKey("moe", "make_hash_route"), node.rows, params, row_bytes=16 * op.n_expert)


@RULES.add(MoeGroups, "route size")
def _moe_groups(low: CpuLowering, node: Node, op: MoeGroups) -> None:
    params = GroupsParams(route=low.out(op.route), out=low.out(node), n_used=op.n_used, size=op.size)
    low.emit(KernelKey("moe", "make_groups"), node.rows, params, row_bytes=1)


@RULES.add(MoeResident, "route table n_slots uses")
def _moe_resident(low: CpuLowering, node: Node, op: MoeResident) -> None:
    uses = 0 if op.uses is None else low.weight(op.uses)
    params = ResidentParams(route=low.out(op.route), table=low.weight(op.table), uses=uses, out=low.out(node),
                            n_used=op.n_used)  # fmt: skip
    low.emit(KernelKey("moe", "make_resident", (op.n_slots > 0,)), node.rows, params, row_bytes=1)


@RULES.add(MoeSort, "route n_expert")
def _moe_sort(low: CpuLowering, node: Node, op: MoeSort) -> None:
    out = low.out(node, plan_bytes(low.rows(node.rows), op.n_expert))
    params = SortParams(route=low.out(op.route), plan=out, n_expert=op.n_expert, n_used=op.n_used)
    low.emit(KernelKey("moe", "make_sort"), op.route.rows, params, row_bytes=1)


def _sorted_activations(low: CpuLowering, w: Weight, op: ExpertProduct) -> InputRows:
    """Return the input rows in expert order."""
    x, plan, n_expert, n_used = op.source, op.plan, op.sort.n_expert, op.sort.n_used
    kind = _kind_of_rows(low, w, x.rows)
    if op.sorted_in:
        return _activations(low, w, HeadSlice(x, 0, x.cols, 0), 1)
    row = kind_row_bytes(kind, x.cols)

    def gather() -> Ref:
        out = low.buffer(low.rows(plan.rows) * row + ROW_SLACK)
        order = low.out(plan) + 8 * (2 + 2 * n_expert)
        params = GatherParams(x=low.out(x), stride=4 * x.cols, order=order, n_used=n_used, k=x.cols, out=out,
                              out_stride=row, n_sorted=low.out(plan))  # fmt: skip
        low.emit(KernelKey("activations", "make_gather", (kind,)), x.rows, params,
                 row_bytes=n_used * (4 * x.cols + row))  # fmt: skip
        return out

    return InputRows(low.shared(("sorted", kind, x, plan), gather), row, 0)


def _by_expert(low: CpuLowering, node: Node, op: ExpertProduct, w: Weight) -> tuple[Product, Experts]:
    """Return the parameters of a product by expert."""
    product = _product(low, node, w, _experts(low, w), _sorted_activations(low, w, op))
    return product, Experts(n_expert=w.ne2, offsets=low.out(op.plan) + 8, node=Ref(NODE), n_nodes=Ref(N_NODES))


def _experts(low: CpuLowering, w: Weight) -> Ref:
    """Return the table of the addresses of a weight's matrices."""
    return low.experts(w, row_size(w.type, w.ne0) * w.ne1)


def _emit_by_expert(low: CpuLowering, node: Node, op: ExpertProduct, key: KernelKey, params: ByExpertParams) -> None:
    low.emit(key, node.rows, params)
    if op.route.drops:
        zeros = ZeroDroppedParams(out=low.out(node), cols=node.cols, plan=low.out(op.plan), n_used=op.sort.n_used)
        low.emit(KernelKey("moe", "make_zero_dropped"), op.sort.route.rows, zeros)


@RULES.add(MulMatId, "w x plan sorted_in")
def _mul_mat_id(low: CpuLowering, node: Node, op: MulMatId) -> None:
    product, experts = _by_expert(low, node, op, op.w)
    params = ByExpertParams(product=product, experts=experts)
    _emit_by_expert(low, node, op, _matmul("make_mul_mat_id", op.w), params)


@RULES.add(MoeUpGate, "up gate x plan act")
def _moe_up_gate(low: CpuLowering, node: Node, op: MoeUpGate) -> None:
    act, (product, experts) = op.act, _by_expert(low, node, op, op.up)
    size = 4 * max(low.rows(op.x.rows) * MOST_TILES * TILE_ROWS, _few_rows(low, op.up.type) * MOST_OF_TWO)
    gate, scratch = _experts(low, op.gate), low.buffer(size * low.n_threads)
    if act.plain:
        key = _matmul("make_up_gate", op.up)
        params = UpGateParams(product=product, experts=experts, gate=gate, scratch=scratch, scratch_bytes=size)
    else:
        key = _matmul("make_up_glu", op.up, *_glu_args(act))
        params = UpGluParams(product=product, experts=experts, gate=gate, scratch=scratch, scratch_bytes=size,
                             limit=act.limit, alpha=act.alpha)  # fmt: skip
    _emit_by_expert(low, node, op, key, params)


@RULES.add(AddId, "x w plan")
def _add_id(low: CpuLowering, node: Node, op: AddId) -> None:
    params = AddIdParams(x=low.out(op.x), w=low.weight(op.w), out=low.out(node), cols=node.cols, plan=low.out(op.plan),
                         n_expert=op.sort.n_expert, n_used=op.sort.n_used)  # fmt: skip
    low.emit(KernelKey("moe", "make_add_id"), op.sort.route.rows, params,
             row_bytes=12 * op.sort.n_used * node.cols)  # fmt: skip


@RULES.add(ScaleId, "x by plan")
def _scale_id(low: CpuLowering, node: Node, op: ScaleId) -> None:
    by = low.weight(op.by) if isinstance(op.by, Weight) else low.out(op.by)
    params = ScaleIdParams(x=low.out(op.x), by=by, out=low.out(node), cols=node.cols, plan=low.out(op.plan),
                           n_expert=op.sort.n_expert, n_used=op.sort.n_used)  # fmt: skip
    low.emit(KernelKey("moe", "make_scale_id", (isinstance(op.by, Node),)), op.sort.route.rows, params,
             row_bytes=8 * op.sort.n_used * node.cols)  # fmt: skip


@RULES.add(MoeSum, "y route plan weighted")
def _moe_sum(low: CpuLowering, node: Node, op: MoeSum) -> None:
    params = MoeSumParams(y=low.out(op.y), route=low.out(op.route), plan=low.out(op.plan), cols=node.cols,
                          n_used=op.sort.n_used, n_expert=op.sort.n_expert, out=low.out(node))  # fmt: skip
    low.emit(KernelKey("moe", "make_sum", (op.weighted,)), node.rows, params,
             row_bytes=4 * (op.sort.n_used + 1) * node.cols)  # fmt: skip
