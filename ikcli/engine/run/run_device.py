"""A device as the runner uses it, and the layout of cache tensors in RAM."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ikcli.backends.step_block import StepBlock
from ikcli.engine.run.model import Model
from ikcli.engine.run.timed_ops import TimedOp
from ikcli.errors import NonFiniteError
from ikcli.gguf.types import TYPES, row_n_bytes
from ikcli.graph import Cache, Node, Rows
from ikcli.graph.split import Turn

Bytes = npt.NDArray[np.uint8]
Observer = Callable[[Node, npt.NDArray[np.generic]], None]
CPU = "CPU"
RESERVE_BYTES = 256 << 20
"""Left free on a GPU beside what is planned: code of kernels, the graphs that a backend keeps at most (an estimate)."""


class RunDevice(Protocol):
    """A device as `Runner` uses it. Turns are numbered per device."""

    @property
    def name(self) -> str:
        """The product."""

    asynchronous: bool  # `run` returns before the turn is done
    in_place: bool  # hand-over memory is read by the ops themselves, not copied at the start of a turn

    def prepare(self, programs: Sequence[Any], progress: Callable[[int, int], None] | None = None) -> None:
        """Load the kernels; `progress` is told of those that a CPU has to compile."""

    def check_memory(self, sizes: Mapping[str, int]) -> None:
        """Raise if the device has not as many bytes as its parts (weights, KV, compute) need."""

    def load_weights(self, model: Model, names: Sequence[str], mmap: bool) -> Mapping[str, int]:
        """Make the weights addressable for the device."""

    def update_weights(self, model: Model, names: Sequence[str]) -> None:
        """Take over loaded weights that the model changed in RAM."""

    def weight_bytes(self, model: Model, names: Sequence[str]) -> int:
        """Bytes they take there."""

    def cache_bytes(self, cache: Cache, n_rows: int) -> int:
        """Bytes of a cache tensor on the device."""

    def make_caches(self, rows: Mapping[Cache, int]) -> Mapping[Cache, int]:
        """Zeroed cache tensors of so many rows."""

    def read_cells(self, cache: Cache, n_rows: int, first: int, n: int) -> Bytes:
        """Cells first..first+n-1 of a cache tensor in the layout of the CPU: (n, row bytes), or (columns, bytes of n
        elements) of a transposed one. Only to be read."""

    def write_cells(self, cache: Cache, n_rows: int, first: int, rows: Bytes) -> None:
        """Replace cells, given as `read_cells` returns them."""

    def compute_bytes(self, programs: Sequence[Any]) -> int:
        """Work memory of programs on the device."""

    def plan(
        self,
        turns: Sequence[Turn],
        rows: Mapping[Rows, int],
        n_cells: int,
        independent: bool,
        streamed: Collection[str] = (),
        window_cells: int = 0,
    ) -> Any:
        """Lower the turns. `streamed`: weights in RAM that are copied to the device in every step; `window_cells`:
        cells of caches of windows."""

    def bind(
        self,
        programs: Sequence[Any],
        state: StepBlock,
        weights: Mapping[str, int],
        caches: Mapping[Cache, int],
        handover: Sequence[Mapping[Node, Bytes]],
    ) -> None: ...

    def begin(self, program: Any, state: StepBlock) -> None: ...

    def run(self, program: Any, turn: int, n_threads: int) -> None: ...

    def wait(self, program: Any, turn: int) -> None: ...

    def finish(self) -> None: ...

    def values(
        self, program: Any, turn: int, n_threads: int, state: StepBlock
    ) -> Iterator[tuple[Node, npt.NDArray[np.generic]]]: ...

    def timed(self, program: Any, turn: int, n_threads: int, state: StepBlock, show: bool) -> Iterator[TimedOp]: ...

    def close(self) -> None: ...


def cache_bytes(cache: Cache, n_rows: int) -> int:
    """Bytes of a cache tensor in the CPU's layout."""
    row = row_n_bytes(cache.type, n_rows if cache.transposed else cache.cols)
    return row * (cache.cols if cache.transposed else n_rows)


def cells_view(cache: Cache, data: Bytes, n_rows: int, first: int, n: int) -> Bytes:
    """Cells first..first+n-1 inside a cache tensor in the CPU's layout, as a view; see `RunDevice.read_cells`."""
    if cache.transposed:
        size = TYPES[cache.type].type_size
        return data.reshape(cache.cols, -1)[:, first * size : (first + n) * size]
    return data.reshape(n_rows, -1)[first : first + n]


def look_for_non_finite(source: str) -> Observer:
    """An observer that raises NonFiniteError at the first value that is not finite."""

    def look(node: Node, value: npt.NDArray[np.generic]) -> None:
        if node.op.is_table or np.isfinite(value).all():
            return
        weights = [w.name for w in node.weights()]
        with_ = f" with {', '.join(weights)}" if weights else ""
        raise NonFiniteError(
            f"{source}: {node.name} ({node.op.name}{with_}) gives NaN or Inf; "
            "--check-tensors tells whether the file holds such values"
        )

    return look
