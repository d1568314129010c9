"""Parameters of kernels of rows, elements and recurrent layers (see `params.py`). Strides and offsets are in bytes."""

from __future__ import annotations

from ikcli.backends.cpu.params import F32, F64, Address, Params, Record, Words

CONV_BLOCK = 64  # columns of a short convolution at a time
DELTA_CHUNK = 32  # tokens of the delta rule at a time


class EmbedParams(Params):
    w: Address
    row_bytes: int
    cols: int
    out: Address


class HostRowsParams(Params):
    cols: int
    out: Address


class EmbedTypesParams(Params):
    w: Address
    row_bytes: int
    cols: int
    out: Address
    sep: int  # token; -1: none


class EmbedIdsParams(EmbedParams):
    ids: Address  # i32
    per_row: int  # ids of a row


class NGramIdsParams(Params):
    states: Address
    before: int  # tokens of a state
    end: int  # the token
    multipliers: Address  # i64 of every token of the longest n-gram, its own first
    sizes: Address  # i64
    offsets: Address
    per_length: int  # rows of n-grams of one length
    out: Address


class EmbedPositionsParams(EmbedParams):
    n_pos: int  # rows of w


class MapParams(Params):
    """Parameters of a map over rows or values."""

    x: Address
    out: Address
    cols: int


class ScaleParams(MapParams):
    factor: F32


class SoftCapParams(MapParams):
    cap: F32


class ClampParams(MapParams):
    limit: F32


class PosScaleParams(MapParams):
    scale: F64
    length: int
    shift: int


class GateParams(Params):
    x: Address
    gate: Address
    out: Address
    cols: int
    gate_cols: int


class SwiGluParams(Params):
    gate: Address
    up: Address
    out: Address
    cols: int


class GluParams(SwiGluParams):
    limit: F32
    alpha: F32


class AddParams(Params):
    x: Address
    y: Address
    out: Address
    cols: int
    y_is_row: int  # 1: y is one row, added to every row


class RmsNormParams(Params):
    x: Address
    stride: int
    offset: int
    w: Address
    out: Address
    cols: int
    width: int
    eps: F32


class NormParams(Params):
    x: Address
    w: Address
    w_period: int  # in columns
    b: Address
    b_period: int
    out: Address
    cols: int
    width: int
    eps: F32


class ConcatParams(Params):
    src: Address
    src_stride: int
    cols: int  # of a head
    dst: Address
    dst_stride: int
    heads: int
    src_head: int  # bytes between heads
    dst_head: int


class RopeTableParams(Params):
    out: Address
    pairs: int
    freqs: Address  # f64[pairs]
    mscale: F32
    lag: int  # subtracted from positions


class RopeParams(Params):
    x: Address
    table: Address
    out: Address
    heads: int
    dim: int
    offset: int  # in columns
    n_rot: int
    neox: int


class AlibiParams(Params):
    out: Address
    width: int
    slopes: Address  # 0: keys
    heads: int


class HadamardParams(Params):
    x: Address
    out: Address
    heads: int
    dim: int
    offset: int  # in columns
    n_blocks: int
    sizes: Words


# --- recurrent layers -------------------------------------------------------------------------------------------------
class ShortConvParams(Params):
    x: Address
    x_stride: int
    w: Address
    bias: Address  # 0: none
    out: Address
    out_stride: int
    cols: int
    states: Address
    state_bytes: int  # of a sequence
    row_bytes: int  # of a row of a state
    taps: Address
    taps_bytes: int  # of a thread


class SelectiveScanParams(Params):
    states: Address
    state_bytes: int  # of a sequence
    n_state: int
    x: Address
    dt: Address
    b: Address
    b_stride: int
    c: Address
    c_stride: int
    a: Address
    d: Address
    dt_bias: Address
    out: Address
    cols: int
    scratch: Address
    scratch_bytes: int  # of a thread


class L2NormParams(Params):
    x: Address
    stride: int
    offset: int
    out: Address
    cols: int
    width: int
    eps: F32


class DecayParams(Params):
    x: Address
    dt: Address
    a: Address
    out: Address
    cols: int
    heads: int
    bound: F32


class GatedNormParams(Params):
    x: Address
    w: Address
    gate: Address
    out: Address
    cols: int
    width: int
    eps: F32


class HeadRows(Record):
    """Columns of heads, in rows."""

    at: Address
    stride: int
    head_stride: int


class DeltaNetParams(Params):
    states: Address
    state_bytes: int  # of a sequence
    q: HeadRows
    k: HeadRows
    v: HeadRows
    decay: Address
    beta: Address
    out: Address
    heads: int
    k_heads: int
    scale: F32
    tiled: int
    scratch: Address
    scratch_bytes: int  # of a thread


class MediaRowsParams(MapParams):
    offset: int  # first column of the rows that came with the micro-batch


class MediaRouteParams(Params):
    out: Address
    text: int


class AxisRopeTableParams(RopeTableParams):
    axes: Address  # i64[pairs]


class MeanRowsParams(MapParams):
    n: int  # rows of x per row


class Mamba2ScanParams(Params):
    states: Address
    state_bytes: int  # of a sequence
    x: HeadRows
    b: HeadRows
    c: HeadRows
    dt: Address  # 0: every step is 1
    a: Address
    d: Address
    dt_bias: Address
    out: Address
    heads: int
    groups: int
    scratch: Address
    scratch_bytes: int  # of a thread


class StreamWeightsParams(Params):
    x: Address
    out: Address
    cols: int
    scale: Address
    base: Address
    n: int
    n_iter: int
    eps: F32
    most: F32  # of a stream's share of what a layer returns


class CutParams(MapParams):
    z: F32


class StreamLevelParams(MapParams):
    n: int
    least: F32


class StreamAddParams(MapParams):
    """Parameters of sums of streams with what is added to them; `cols`: of a stream."""

    added: Address
    weights: Address  # 0: none
    n: int
    first: int  # stream that something is added to
    scale: F32  # of weights in a sigmoid; 0: they are shares less 1


class StreamParams(Params):
    """Parameters of the sum of streams, and of their mixture with what a layer returned or with each other."""

    x: Address
    added: Address  # what a layer returned
    weights: Address
    weight_cols: int
    out: Address
    n: int
    cols: int  # of a stream


class GatedStreamsParams(Params):
    x: Address
    gate: Address
    out: Address
    n: int
    cols: int  # of a stream
    factor: F32


class StreamMatchParams(Params):
    key: Address
    query: Address
    value: Address
    out: Address
    n: int
    cols: int  # of a stream
    scale: F32


class ResidualParams(Params):
    """Parameters of the attention to earlier outputs."""

    kept: Address
    x: Address
    w: Address
    out: Address
    n: int  # rows that are kept
    cols: int
    eps: F32
    scratch: Address
    scratch_bytes: int  # of a thread
