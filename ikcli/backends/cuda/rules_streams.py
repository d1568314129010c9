"""Lower residuals of several streams for the GPU, the n-grams that streams read, and attention to earlier outputs.

Kernels are in `kernels/layer_streams.cu`, those of AltUp, and of the cut of gates of the same models, in
`kernels/layer_altup.cu`.
"""

from __future__ import annotations

import math

import numpy as np

from ikcli.backends.cuda.activations import PER_BLOCK, THREADS, parts_of, row_grid
from ikcli.backends.cuda.lower import RULES, GpuLowering
from ikcli.backends.cuda.merging import norm_threads
from ikcli.backends.weight_checks import check_f32
from ikcli.errors import UnsupportedError
from ikcli.graph import Node
from ikcli.graph.ops_elements import Cut
from ikcli.graph.ops_ngrams import EmbedIds, NGramIds
from ikcli.graph.ops_streams import (
    GatedStreams,
    ResidualAttn,
    StreamAdd,
    StreamLevel,
    StreamMatch,
    StreamMix,
    StreamPredict,
    StreamSum,
    StreamWeights,
)


@RULES.add(StreamWeights, "x scale base n n_iter eps most")
def stream_weights(low: GpuLowering, node: Node, op: StreamWeights) -> None:
    """Lower the weights of the streams of a row, a warp per row."""
    for w in (op.scale, op.base):
        check_f32(w, "scales and biases of the weights of streams")
    low.emit("layer_stream_weights", row_grid(node.rows), 32, 4 * op.n * op.n, low.state, *low.row_args(node.rows),
             low.out(op.x), low.weight(op.scale), low.weight(op.base), low.out(node), np.int32(node.cols),
             np.int32(op.n), np.int32(op.n_iter), np.float32(op.eps), np.float32(op.most))  # fmt: skip


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
             *low.row_args(node.rows), low.out(op.x), low.out(op.out), low.out(op.weights),
             np.int32(op.weights.cols), low.out(node), np.int32(cols), np.int32(op.n))  # fmt: skip


@RULES.add(GatedStreams, "x gate n")
def gated_streams(low: GpuLowering, node: Node, op: GatedStreams) -> None:
    """Lower the mean of gated streams."""
    low.emit("layer_gated_streams", row_grid(node.rows, parts_of(node.cols, THREADS)), THREADS, 0, low.state,
             *low.row_args(node.rows), low.out(op.x), low.out(op.gate), low.out(node), np.int32(node.cols),
             np.int32(op.n))  # fmt: skip


@RULES.add(StreamMatch, "key query value n")
def stream_match(low: GpuLowering, node: Node, op: StreamMatch) -> None:
    """Lower a value for every stream, by how well keys fit queries: a block per stream of a row."""
    cols = op.value.cols
    low.emit("layer_stream_match", row_grid(node.rows, op.n), THREADS, 0, low.state, *low.row_args(node.rows),
             low.out(op.key), low.out(op.query), low.out(op.value), low.out(node), np.int32(cols), np.int32(op.n),
             np.float32(1 / math.sqrt(cols)))  # fmt: skip


@RULES.add(NGramIds, "state grams")
def ngram_ids(low: GpuLowering, node: Node, op: NGramIds) -> None:
    """Lower the rows of n-grams in a table, a block per segment."""
    grams = op.grams
    low.emit("layer_ngram_ids", lambda c: c.n_segments, 256, 0, low.state, low.cache(op.state),
             *map(low.constant, grams.tables()), low.out(node), np.int32(grams.n_before), np.int32(grams.end),
             np.int32(grams.per_length))  # fmt: skip


@RULES.add(EmbedIds, "w ids")
def embed_ids(low: GpuLowering, node: Node, op: EmbedIds) -> None:
    """Refuse tables of n-grams, which are far larger than the memory of a GPU."""
    raise UnsupportedError(f"{node.name}: tables of n-grams are read in RAM; leave {op.w.name} on the CPU")


@RULES.add(StreamPredict, "x weights n")
def stream_predict(low: GpuLowering, node: Node, op: StreamPredict) -> None:
    """Lower the streams predicted from each other."""
    cols = node.cols // op.n
    low.emit("layer_stream_predict", row_grid(node.rows, parts_of(cols, THREADS)), THREADS, 0, low.state,
             *low.row_args(node.rows), low.out(op.x), low.out(op.weights), low.out(node), np.int32(cols),
             np.int32(op.n))  # fmt: skip


@RULES.add(StreamAdd, "x out n weights first scale")
def stream_add(low: GpuLowering, node: Node, op: StreamAdd) -> None:
    """Lower the sums of streams with their shares of a row."""
    cols = op.out.cols
    low.emit("layer_stream_add", row_grid(node.rows, parts_of(cols, THREADS)), THREADS, 0, low.state,
             *low.row_args(node.rows), low.out(op.x), low.out(op.out), 0 if op.weights is None else low.out(op.weights),
             low.out(node), np.int32(cols), np.int32(op.n), np.int32(op.first),
             np.float32(op.scale))  # fmt: skip


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


@RULES.add(ResidualAttn, "kept x w eps")
def residual_attn(low: GpuLowering, node: Node, op: ResidualAttn) -> None:
    """Lower a row mixed with earlier ones, a block per row."""
    check_f32(op.w, "weights of the scores of earlier outputs")
    low.emit("layer_residual_attn", row_grid(node.rows), 512, 8 * (op.n_kept + 1), low.state,
             *low.row_args(node.rows), low.out(op.kept), low.out(op.x), low.weight(op.w), low.out(node),
             np.int32(node.cols), np.int32(op.n_kept), np.float32(op.eps))  # fmt: skip
