"""Lower recurrent layers: short convolution, norms, decays, the delta rule, the selective scan."""

from __future__ import annotations

import numpy as np

from ikcli.backends.cpu.lower_pooled import RULES
from ikcli.backends.cpu.params import Address
from ikcli.backends.cpu.params_layers import (
    CONV_BLOCK,
    DELTA_CHUNK,
    DecayParams,
    DeltaNetParams,
    GatedNormParams,
    HeadRows,
    L2NormParams,
    Mamba2ScanParams,
    SelectiveScanParams,
    ShortConvParams,
)
from ikcli.backends.cpu.program import CpuLowering, Ref
from ikcli.backends.weight_checks import check_f32
from ikcli.graph import HeadSlice, Node
from ikcli.graph.ops_recurrent import (
    STATE_BLOCK,
    Decay,
    DeltaNet,
    GatedNorm,
    L2Norm,
    Mamba2Scan,
    SelectiveScan,
    ShortConv,
)
from ikcli.native.kernel_cache import KernelKey


def delta_scratch_bytes(dk: int) -> int:
    """Return the bytes per thread of the delta rule's scratch (kernels/delta_net.py)."""
    rows, block = 64 * DELTA_CHUNK, 64 * dk
    return (
        2 * dk // 16 * rows + DELTA_CHUNK // 16 * (block + 2 * rows) + 4 * rows + 8 * dk + 4 * DELTA_CHUNK + 2 * 16 * 64
    )


@RULES.add(ShortConv, "state parts weights biases linear")
def _short_conv(low: CpuLowering, node: Node, op: ShortConv) -> None:
    scratch = 4 * CONV_BLOCK * op.n_taps
    taps = low.buffer(scratch * low.n_threads)
    at = 0
    for i, (x, w) in enumerate(zip(op.parts, op.weights, strict=True)):
        check_f32(w, "weights of short convolutions")
        bias = low.weight(op.biases[i]) if op.biases else 0
        params = ShortConvParams(x=low.out(x), x_stride=4 * x.cols, w=low.weight(w), bias=bias,
                                 out=low.out(node) + 4 * at, out_stride=4 * node.cols, cols=x.cols,
                                 states=Ref(op.state, 4 * at), state_bytes=4 * op.state.cols,
                                 row_bytes=4 * node.cols, taps=taps, taps_bytes=scratch)  # fmt: skip
        sizes = (op.n_taps, True) if op.linear else (op.n_taps,)
        low.emit(KernelKey("recurrent", "make_short_conv", sizes), node.rows, params,
                 row_bytes=8 * (op.n_taps + 1) * x.cols)  # fmt: skip
        at += x.cols


@RULES.add(L2Norm, "x offset n_cols width eps")
def _l2_norm(low: CpuLowering, node: Node, op: L2Norm) -> None:
    params = L2NormParams(x=low.out(op.x), stride=4 * op.x.cols, offset=4 * op.offset, out=low.out(node),
                          cols=node.cols, width=op.width, eps=op.eps)  # fmt: skip
    low.emit(KernelKey("recurrent", "make_l2_norm"), node.rows, params, row_bytes=8 * node.cols)


@RULES.add(Decay, "x dt a bound")
def _decay(low: CpuLowering, node: Node, op: Decay) -> None:
    params = DecayParams(x=low.out(op.x), dt=low.weight(op.dt), a=low.weight(op.a), out=low.out(node), cols=node.cols,
                         heads=op.n_head, bound=op.bound)  # fmt: skip
    low.emit(KernelKey("recurrent", "make_decay", (op.bound != 0,)), node.rows, params, row_bytes=64 * node.cols)


def _head_rows(low: CpuLowering, part: HeadSlice) -> HeadRows:
    return HeadRows(
        at=low.out(part.node) + 4 * part.offset, stride=4 * part.node.cols, head_stride=4 * part.head_stride
    )


@RULES.add(DeltaNet, "state q k v decay beta n_head n_head_k scale tiled")
def _delta_net(low: CpuLowering, node: Node, op: DeltaNet) -> None:
    scratch = delta_scratch_bytes(op.k.width)
    params = DeltaNetParams(states=Ref(op.state), state_bytes=4 * op.state.cols, q=_head_rows(low, op.q),
                            k=_head_rows(low, op.k), v=_head_rows(low, op.v), decay=low.out(op.decay),
                            beta=low.out(op.beta), out=low.out(node), heads=op.n_head, k_heads=op.n_head_k,
                            scale=op.scale, tiled=int(op.tiled), scratch=low.buffer(scratch * low.n_threads),
                            scratch_bytes=scratch)  # fmt: skip
    low.emit(KernelKey("delta_net", "make_delta_net", (op.k.width, op.v.width, op.by_column)), node.rows, params)


@RULES.add(SelectiveScan, "state x dt b c a d dt_bias")
def _selective_scan(low: CpuLowering, node: Node, op: SelectiveScan) -> None:
    check_f32(op.a, "decays of a selective scan")
    scratch = 4 * STATE_BLOCK * op.n_state
    b, c = (low.out(part.node) + 4 * part.offset for part in (op.b, op.c))
    params = SelectiveScanParams(states=Ref(op.state), state_bytes=4 * op.state.cols, n_state=op.n_state,
                                 x=low.out(op.x), dt=low.out(op.dt), b=b, b_stride=4 * op.b.node.cols, c=c,
                                 c_stride=4 * op.c.node.cols, a=low.weight(op.a), d=low.weight(op.d),
                                 dt_bias=low.weight(op.dt_bias), out=low.out(node), cols=node.cols,
                                 scratch=low.buffer(scratch * low.n_threads), scratch_bytes=scratch)  # fmt: skip
    low.emit(KernelKey("selective_scan", "make_selective_scan"), node.rows, params)


def mamba2_scratch_bytes(n_state: int) -> int:
    """Return the bytes per thread of the scratch of Mamba 2's scan (kernels/mamba2_scan.py)."""
    return 8 * DELTA_CHUNK * n_state + 2 * 4 * DELTA_CHUNK * DELTA_CHUNK + 6 * 64 * DELTA_CHUNK + 4 * 4 * DELTA_CHUNK


@RULES.add(Mamba2Scan, "state x dt b c a d dt_bias n_head n_group slopes")
def _mamba2_scan(low: CpuLowering, node: Node, op: Mamba2Scan) -> None:
    for w in (op.a, op.d, op.dt_bias):
        if w is not None:
            check_f32(w, "decays and factors of a scan")
    scratch = mamba2_scratch_bytes(op.n_state)
    dt: Address = 0
    dt_bias: Address = 0
    if op.dt is None or op.a is None or op.d is None or op.dt_bias is None:
        a, d = low.constant((-np.asarray(op.slopes, np.float32)).tobytes()), low.constant(bytes(4 * op.n_head))
    else:
        dt, a, d, dt_bias = low.out(op.dt), low.weight(op.a), low.weight(op.d), low.weight(op.dt_bias)
    params = Mamba2ScanParams(states=Ref(op.state), state_bytes=4 * op.state.cols, x=_head_rows(low, op.x),
                              b=_head_rows(low, op.b), c=_head_rows(low, op.c), dt=dt, a=a, d=d, dt_bias=dt_bias,
                              out=low.out(node), heads=op.n_head, groups=op.n_group,
                              scratch=low.buffer(scratch * low.n_threads), scratch_bytes=scratch)  # fmt: skip
    low.emit(KernelKey("mamba2_scan", "make_mamba2_scan", (op.n_state, op.x.width)), node.rows, params)


@RULES.add(GatedNorm, "x w gate eps activation")
def _gated_norm(low: CpuLowering, node: Node, op: GatedNorm) -> None:
    params = GatedNormParams(x=low.out(op.x), w=low.weight(op.w), gate=low.out(op.gate), out=low.out(node),
                             cols=node.cols, width=op.w.ne0, eps=op.eps)  # fmt: skip
    low.emit(KernelKey("recurrent", "make_gated_norm", (op.activation,)), node.rows, params,
             row_bytes=24 * node.cols)  # fmt: skip
