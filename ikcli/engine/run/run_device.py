"""The interface of a device to the runner, and the layout of cache tensors in RAM."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ikcli.backends.step_block import StepBlock
from ikcli.engine.run.timed_ops import TimedOp
from ikcli.errors import NonFiniteError
from ikcli.gguf.types import TYPES, row_n_bytes
from ikcli.graph import Cache, Node, Rows
from ikcli.graph.split import GraphSplit
from ikcli.models.tensors import TensorLike

Bytes = npt.NDArray[np.uint8]
Beside = Mapping[str, Mapping[str, int]]
"""Bytes by device and part of what the run needs beside the model: its projector."""
Observer = Callable[[Node, npt.NDArray[np.generic]], None]
CPU = "CPU"
RESERVE_BYTES = 256 << 20
"""Bytes left free on a GPU beside those planned: kernel code, and the graphs that a backend keeps at most (an
estimate).
"""


class WeightSource(Protocol):
    """The tensors of a model or projector as graphs use them (`Model`, `Tensors` of a projector)."""

    @property
    def specs(self) -> Mapping[str, TensorLike]:
        """Return types and shapes by name."""

    def bytes_of(self, name: str) -> Bytes:
        """Return the bytes of a tensor."""

    def n_bytes(self, names: Iterable[str]) -> int:
        """Return the bytes of these tensors."""

    def load(self, names: Iterable[str], *, mmap: bool) -> dict[str, int]:
        """Return the addresses of these tensors in RAM."""


class RunDevice(Protocol):
    """A device as `Runner` uses it. Splits are numbered per device."""

    @property
    def name(self) -> str:
        """Return the product name."""

    asynchronous: bool  # `run` returns before the split is done
    in_place: bool  # ops read hand-over memory themselves; it is not copied at the start of a split

    def prepare(self, programs: Sequence[Any], progress: Callable[[int, int], None] | None = None) -> None:
        """Load the kernels; call `progress` for those that a CPU has to compile."""

    def check_memory(self, sizes: Mapping[str, int]) -> None:
        """Raise OutOfMemory if the device lacks the bytes that its parts (weights, KV, compute) need."""

    def load_weights(self, model: WeightSource, names: Sequence[str], mmap: bool) -> Mapping[str, int]:
        """Make the weights addressable for the device and return their addresses."""

    def update_weights(self, model: WeightSource, names: Sequence[str]) -> None:
        """Take over loaded weights that the model changed in RAM."""

    def weight_bytes(self, model: WeightSource, names: Sequence[str]) -> int:
        """Return the bytes of these weights on the device."""

    def cache_bytes(self, cache: Cache, n_rows: int) -> int:
        """Return the bytes of a cache tensor on the device."""

    def make_caches(self, rows: Mapping[Cache, int]) -> Mapping[Cache, int]:
        """Make zeroed cache tensors with this many rows."""

    def read_cells(self, cache: Cache, n_rows: int, first: int, n: int) -> Bytes:
        """Return cells first..first+n-1 of a cache tensor in the layout of the CPU; they are only to be read.

        Shape: (n, row bytes), or (columns, bytes of n elements) of a transposed tensor.
        """

    def write_cells(self, cache: Cache, n_rows: int, first: int, rows: Bytes) -> None:
        """Replace cells, given as `read_cells` returns them."""

    def compute_bytes(self, programs: Sequence[Any]) -> int:
        """Return the work memory of programs on the device."""

    def plan(
        self,
        splits: Sequence[GraphSplit],
        rows: Mapping[Rows, int],
        n_cells: int,
        batch_invariant: bool,
        streamed: Collection[str] = (),
        window_cells: int = 0,
    ) -> Any:
        """Lower the splits to a program.

        `streamed`: weights in RAM that are copied to the device in every step. `window_cells`: cells of caches of
        windows.
        """

    def bind(
        self,
        programs: Sequence[Any],
        state: StepBlock,
        weights: Mapping[str, int],
        caches: Mapping[Cache, int],
        handover: Sequence[Mapping[Node, Bytes]],
    ) -> None: ...

    def begin(self, program: Any, state: StepBlock) -> None: ...

    def run(self, program: Any, split: int, n_threads: int) -> None: ...

    def wait(self, program: Any, split: int) -> None: ...

    def finish(self) -> None: ...

    def values(
        self, program: Any, split: int, n_threads: int, state: StepBlock
    ) -> Iterator[tuple[Node, npt.NDArray[np.generic]]]: ...

    def timed(self, program: Any, split: int, n_threads: int, state: StepBlock, show: bool) -> Iterator[TimedOp]: ...

    def close(self) -> None: ...


def cache_bytes(cache: Cache, n_rows: int) -> int:
    """Return the bytes of a cache tensor in the CPU's layout."""
    row = row_n_bytes(cache.type, n_rows if cache.transposed else cache.cols)
    return row * (cache.cols if cache.transposed else n_rows)


def cells_view(cache: Cache, data: Bytes, n_rows: int, first: int, n: int) -> Bytes:
    """Return cells first..first+n-1 of a cache tensor in the CPU's layout as a view; see `RunDevice.read_cells`."""
    if cache.transposed:
        size = TYPES[cache.type].type_size
        return data.reshape(cache.cols, -1)[:, first * size : (first + n) * size]
    return data.reshape(n_rows, -1)[first : first + n]


def look_for_non_finite(source: str) -> Observer:
    """Return an observer that raises NonFiniteError at the first value that is not finite."""

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
