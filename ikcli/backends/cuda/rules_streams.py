"""Lower residuals of several streams for the GPU.

Kernels of hyper-connections are in `kernels/layer_streams.cu`, those of AltUp, and of the cut of gates of the same
models, in `kernels/layer_altup.cu`.
"""

from __future__ import annotations

import numpy as np

from ikcli.backends.cuda.activations import PER_BLOCK, THREADS, parts_of, row_grid
from ikcli.backends.cuda.lower import RULES, GpuLowering
from ikcli.backends.cuda.merging import norm_threads
from ikcli.backends.weight_checks import check_f32
from ikcli.graph import Node
from ikcli.graph.ops_elements import Cut
from ikcli.graph.ops_streams import StreamAdd, StreamLevel, StreamMix, StreamPredict, StreamSum, StreamWeights


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


@RULES.add(StreamPredict, "x weights n")
def stream_predict(low: GpuLowering, node: Node, op: StreamPredict) -> None:
    """Lower the streams predicted from each other."""
    cols = node.cols // op.n
    low.emit("layer_stream_predict", row_grid(node.rows, parts_of(cols, THREADS)), THREADS, 0, low.state,
             *low.row_args(node.rows), low.out(op.x), low.out(op.weights), low.out(node), np.int32(cols),
             np.int32(op.n))  # fmt: skip


@RULES.add(StreamAdd, "x out n weights first")
def stream_add(low: GpuLowering, node: Node, op: StreamAdd) -> None:
    """Lower the sums of streams with their shares of a row."""
    cols = op.out.cols
    low.emit("layer_stream_add", row_grid(node.rows, parts_of(cols, THREADS)), THREADS, 0, low.state,
             *low.row_args(node.rows), low.out(op.x), low.out(op.out), 0 if op.weights is None else low.out(op.weights),
             low.out(node), np.int32(cols), np.int32(op.n), np.int32(op.first))  # fmt: skip


@RULES.add(StreamLevel, "x n least")
def stream_level(low: GpuLowering, node: Node, op: StreamLevel) -> None:
    """Lower the streams at the level of the first, a block per stream."""
    cols = node.cols // op.n
    low.emit("layer_stream_level", row_grid(node.rows, op.n), norm_threads(cols), 0, low.state,
             *low.row_args(node.rows), low.out(op.x), low.out(node), np.int32(cols), np.int32(op.n),
             np.float32(op.least))  # fmt: skip


@RULES.add(Cut, "x z")
def cut(low: GpuLowering, node: Node, op: Cut) -> None:
    """Lower the cut above the mean of rows, a block per row."""
    low.emit("layer_cut", row_grid(node.rows), norm_threads(node.cols), 0, low.state, *low.row_args(node.rows),
             low.out(op.x), low.out(node), np.int32(node.cols), np.float32(op.z))  # fmt: skip
