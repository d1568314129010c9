"""Values that the caller provides with the micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from ikcli.graph.core import Array, Op, Place, Rows, RowSpec, Run


@dataclass(frozen=True, slots=True)
class HostRows(Op):
    """A float32 row of `n_cols` columns per token, from memory of the caller; other devices receive it from the CPU."""

    name = "host_rows"
    place = Place.HOST
    light = True

    n_cols: int

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return RowSpec(Rows.TOKENS), self.n_cols

    def compute(self, run: Run) -> Array:
        assert run.state.given is not None
        return run.state.given.astype(run.dtype)
