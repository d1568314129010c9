"""Lower ops on rows that come with the micro-batch, and those that join adjacent rows."""

from __future__ import annotations

import numpy as np

from ikcli.backends.cpu.lower_recurrent import RULES
from ikcli.backends.cpu.params_layers import (
    AxisRopeTableParams,
    ConcatParams,
    MeanRowsParams,
    MediaRouteParams,
    MediaRowsParams,
)
from ikcli.backends.cpu.program import CpuLowering
from ikcli.graph import Node
from ikcli.graph.ops_experts import MediaRoute
from ikcli.graph.ops_media import AxisRopeTable, MeanRows, MediaRows, MergeRows
from ikcli.native.kernel_cache import KernelKey


@RULES.add(MediaRows, "x offset n_cols")
def _media_rows(low: CpuLowering, node: Node, op: MediaRows) -> None:
    x = 0 if op.x is None else low.out(op.x)
    params = MediaRowsParams(x=x, out=low.out(node), cols=op.n_cols, offset=op.offset)
    low.emit(KernelKey("media", "make_media_rows", (int(op.x is not None),)), node.rows, params,
             row_bytes=8 * node.cols)  # fmt: skip


@RULES.add(MediaRoute, "text")
def _media_route(low: CpuLowering, node: Node, op: MediaRoute) -> None:
    params = MediaRouteParams(out=low.out(node), text=int(op.text))
    low.emit(KernelKey("media", "make_media_route"), node.rows, params, row_bytes=1)


@RULES.add(AxisRopeTable, "inv_freq axes mscale")
def _axis_rope_table(low: CpuLowering, node: Node, op: AxisRopeTable) -> None:
    freqs, axes = np.asarray(op.inv_freq, np.float64), np.asarray(op.axes, np.int64)
    params = AxisRopeTableParams(out=low.out(node), pairs=len(freqs), freqs=low.constant(freqs.tobytes()),
                                 mscale=op.mscale, lag=0, axes=low.constant(axes.tobytes()))  # fmt: skip
    low.emit(KernelKey("media", "make_axis_rope_table"), node.rows, params, row_bytes=256 * len(freqs))


@RULES.add(MergeRows, "x n")
def _merge_rows(low: CpuLowering, node: Node, op: MergeRows) -> None:
    params = ConcatParams(src=low.out(op.x), src_stride=4 * node.cols, cols=node.cols, dst=low.out(node),
                          dst_stride=4 * node.cols, heads=1, src_head=0, dst_head=0)  # fmt: skip
    low.emit(KernelKey("basic", "make_concat"), node.rows, params, row_bytes=8 * node.cols)


@RULES.add(MeanRows, "x n")
def _mean_rows(low: CpuLowering, node: Node, op: MeanRows) -> None:
    params = MeanRowsParams(x=low.out(op.x), out=low.out(node), cols=node.cols, n=op.n)
    low.emit(KernelKey("media", "make_mean_rows"), node.rows, params, row_bytes=4 * (op.n + 1) * node.cols)
