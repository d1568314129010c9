"""Lowering of recurrent layers: short convolution, norms, decays, the delta rule."""

from __future__ import annotations

from ikcli.backends.cpu.lower_attention import RULES
from ikcli.backends.cpu.program import CpuLowering, Ref, f32_bits
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.graph import Node
from ikcli.graph.ops_recurrent import Decay, DeltaNet, GatedNorm, L2Norm, ShortConv
from ikcli.native.kernel_cache import KernelKey

_CONV_BLOCK = 64  # kernels/recurrent.py
_CHUNK = 32  # kernels/delta_net.py


def delta_scratch_bytes(dk: int) -> int:
    """Bytes per thread of the delta rule's scratch (kernels/delta_net.py)."""
    rows, block = 64 * _CHUNK, 64 * dk
    return 2 * dk // 16 * rows + _CHUNK // 16 * (block + 2 * rows) + 2 * rows + 8 * dk + 4 * _CHUNK + 2 * 16 * 64


@RULES.add(ShortConv, "state parts weights")
def _short_conv(low: CpuLowering, node: Node, op: ShortConv) -> None:
    scratch = 4 * _CONV_BLOCK * op.n_taps
    taps = low.buffer(scratch * low.n_threads)
    at = 0
    for x, w in zip(op.parts, op.weights, strict=True):
        if w.type is not GGMLType.F32:
            raise UnsupportedError(f"{w.name} is {TYPES[w.type].name}; weights of short convolutions have to be f32")
        low.emit(KernelKey("recurrent", "make_short_conv", (op.n_taps,)), node.rows, low.out(x), 4 * x.cols,
                 low.weight(w), low.out(node) + 4 * at, 4 * node.cols, x.cols, Ref(op.state, 4 * at), 4 * op.state.cols,
                 4 * node.cols, taps, scratch, row_bytes=8 * (op.n_taps + 1) * x.cols)  # fmt: skip
        at += x.cols


@RULES.add(L2Norm, "x offset n_cols width eps")
def _l2_norm(low: CpuLowering, node: Node, op: L2Norm) -> None:
    low.emit(KernelKey("recurrent", "make_l2_norm"), node.rows, low.out(op.x), 4 * op.x.cols, 4 * op.offset,
             low.out(node), node.cols, op.width, f32_bits(op.eps), row_bytes=8 * node.cols)  # fmt: skip


@RULES.add(Decay, "x dt a bound")
def _decay(low: CpuLowering, node: Node, op: Decay) -> None:
    low.emit(KernelKey("recurrent", "make_decay", (op.bound != 0,)), node.rows, low.out(op.x), low.weight(op.dt),
             low.weight(op.a), low.out(node), node.cols, op.n_head, f32_bits(op.bound),
             row_bytes=64 * node.cols)  # fmt: skip


@RULES.add(DeltaNet, "state q k v decay beta n_head n_head_k scale tiled")
def _delta_net(low: CpuLowering, node: Node, op: DeltaNet) -> None:
    scratch = delta_scratch_bytes(op.k.width)
    slices = [w for part in (op.q, op.k, op.v)
              for w in (low.out(part.node) + 4 * part.offset, 4 * part.node.cols, 4 * part.head_stride)]  # fmt: skip
    low.emit(KernelKey("delta_net", "make_delta_net", (op.k.width, op.v.width, op.by_column)), node.rows, Ref(op.state),
             4 * op.state.cols, *slices, low.out(op.decay), low.out(op.beta), low.out(node), op.n_head, op.n_head_k,
             f32_bits(op.scale), int(op.tiled), low.buffer(scratch * low.n_threads), scratch)  # fmt: skip


@RULES.add(GatedNorm, "x w gate eps activation")
def _gated_norm(low: CpuLowering, node: Node, op: GatedNorm) -> None:
    low.emit(KernelKey("recurrent", "make_gated_norm", (op.activation,)), node.rows, low.out(op.x), low.weight(op.w),
             low.out(op.gate), low.out(node), node.cols, op.w.ne0, f32_bits(op.eps),
             row_bytes=24 * node.cols)  # fmt: skip
