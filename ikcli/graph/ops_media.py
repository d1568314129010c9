"""Operations on rows that come with the micro-batch: pixels of a vision tower, embeddings of an image in a text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ikcli.graph.core import Array, Node, Op, Place, Rows, RowSpec, Run


@dataclass(frozen=True, slots=True)
class MediaRows(Op):
    """Columns [offset, offset + n_cols) of the rows that came with the micro-batch; tokens without one keep row x.

    Without x they have zeros. The rows are in RAM, so the CPU computes this.
    """

    name = "media_rows"
    place = Place.HOST
    light = True

    x: Node | None
    offset: int
    n_cols: int

    def __post_init__(self) -> None:
        if self.x is not None and self.x.cols != self.n_cols:
            raise ValueError(f"{self.x.cols} columns cannot be replaced by {self.n_cols}")

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return RowSpec(Rows.TOKENS), self.n_cols

    def compute(self, run: Run) -> Array:
        index = run.state.media_index()
        out: Array = np.zeros((len(index), self.n_cols), run.dtype)
        if self.x is not None:
            out[:] = run.value(self.x)
        given = index >= 0
        if given.any():
            assert run.state.media is not None
            out[given] = run.state.media[index[given], self.offset : self.offset + self.n_cols]
        return out


@dataclass(frozen=True, slots=True)
class AxisRopeTable(Op):
    """cos, sin (interleaved per pair) of position * inv_freq, where every pair has its own axis of the position.

    Axes are 0 (time), 1 (row) and 2 (column): [n_tokens, 2*len(inv_freq)].
    """

    name = "axis_rope_table"
    place = Place.HOST
    light = True

    inv_freq: tuple[float, ...]
    axes: tuple[int, ...]
    mscale: float

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.inv_freq):
            raise ValueError(f"{len(self.axes)} axes for {len(self.inv_freq)} pairs")

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return RowSpec(Rows.TOKENS), 2 * len(self.inv_freq)

    def compute(self, run: Run) -> Array:
        theta = run.state.axis_positions()[:, list(self.axes)].astype(np.float64) * np.asarray(self.inv_freq)
        table = np.stack([np.cos(theta), np.sin(theta)], axis=-1) * self.mscale
        return table.reshape(len(theta), -1).astype(run.dtype)


@dataclass(frozen=True, slots=True)
class MergeRows(Op):
    """As many rows as there are outputs, each made of n adjacent rows of x side by side."""

    name = "merge_rows"
    light = True

    x: Node
    n: int

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return RowSpec(Rows.OUTPUTS), self.n * self.x.cols

    def compute(self, run: Run) -> Array:
        n_outputs = len(run.state.outputs)
        return run.value(self.x)[: n_outputs * self.n].reshape(n_outputs, -1)


@dataclass(frozen=True, slots=True)
class MeanRows(Op):
    """As many rows as there are outputs, each the mean of n adjacent rows of x."""

    name = "mean_rows"

    x: Node
    n: int

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return RowSpec(Rows.OUTPUTS), self.x.cols

    def compute(self, run: Run) -> Array:
        n_outputs = len(run.state.outputs)
        mean: Array = run.value(self.x)[: n_outputs * self.n].reshape(n_outputs, self.n, -1).mean(axis=1)
        return mean
