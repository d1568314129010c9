"""Lower residuals of several streams, and attention to earlier outputs, for the GPU; see `kernels/layer_streams.cu`."""

from __future__ import annotations

import numpy as np

from ikcli.backends.cuda.activations import PER_BLOCK, THREADS, parts_of, row_grid
from ikcli.backends.cuda.lower import RULES, GpuLowering
from ikcli.backends.weight_checks import check_f32
from ikcli.graph import Node
from ikcli.graph.ops_streams import ResidualAttn, StreamMix, StreamSum, StreamWeights


@RULES.add(StreamWeights, "x scale base n n_iter eps")
def stream_weights(low: GpuLowering, node: Node, op: StreamWeights) -> None:
    """Lower the weights of the streams of a row, a warp per row."""
    for w in (op.scale, op.base):
        check_f32(w, "scales and biases of the weights of streams")
    low.emit("layer_stream_weights", row_grid(node.rows), 32, 4 * op.n * op.n, low.state, *low.row_args(node.rows),
             low.out(op.x), low.weight(op.scale), low.weight(op.base), low.out(node), np.int32(node.cols),
             np.int32(op.n), np.int32(op.n_iter), np.float32(op.eps))  # fmt: skip


@RULES.add(StreamSum, "x weights n")
def stream_sum(low: GpuLowering, node: Node, op: StreamSum) -> None:
    """Lower the weighted sum of the streams."""
    low.emit("layer_stream_sum", row_grid(node.rows, parts_of(node.cols, PER_BLOCK)), THREADS, 0, low.state,
             *low.row_args(node.rows), low.out(op.x), low.out(op.weights), np.int32(op.weights.cols), low.out(node),
             np.int32(node.cols), np.int32(op.n))  # fmt: skip


@RULES.add(StreamMix, "x out weights n")
def stream_mix(low: GpuLowering, node: Node, op: StreamMix) -> None:
    """Lower the streams mixed, plus their shares of what a layer returned."""
    cols = op.out.cols
    low.emit("layer_stream_mix", row_grid(node.rows, parts_of(cols, PER_BLOCK)), THREADS, 0, low.state,
             *low.row_args(node.rows), low.out(op.x), low.out(op.out), low.out(op.weights), low.out(node),
             np.int32(cols), np.int32(op.n))  # fmt: skip


@RULES.add(ResidualAttn, "kept x w eps")
def residual_attn(low: GpuLowering, node: Node, op: ResidualAttn) -> None:
    """Lower a row mixed with earlier ones, a block per row."""
    check_f32(op.w, "weights of the scores of earlier outputs")
    low.emit("layer_residual_attn", row_grid(node.rows), 512, 8 * (op.n_kept + 1), low.state,
             *low.row_args(node.rows), low.out(op.kept), low.out(op.x), low.weight(op.w), low.out(node),
             np.int32(node.cols), np.int32(op.n_kept), np.float32(op.eps))  # fmt: skip
