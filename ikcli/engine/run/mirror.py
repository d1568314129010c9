"""`--numa mirror`: a copy of the weights on every NUMA node, which the node's threads read.

Threads take work wherever they run, so a single copy is read from other nodes most of the time. With a copy per node,
every read of a weight is local, for as many times the memory. The first copy is what the model loaded, on the node of
the first thread; programs are bound with the addresses of all of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ikcli.engine.run import numa
from ikcli.engine.run.weight_memory import divided
from ikcli.errors import IkError, UsageError
from ikcli.hostinfo import available_memory
from ikcli.log import log

if TYPE_CHECKING:
    from ikcli.engine.run.model import Model
    from ikcli.settings.run import RunConfig

Bytes = npt.NDArray[np.uint8]
_PIECE = 8 << 20
_MIB = 1 << 20


class Mirror:
    """The copies of weights beside those of the model; none without CPUs of threads.

    `nodes`: which copy each thread reads, counted from the model's own (0).
    """

    def __init__(self, cpus: Sequence[frozenset[int]] = ()) -> None:
        self._cpus, self.nodes = cpus, numa.copy_of_threads(cpus) if cpus else []
        self.n_copies = max(self.nodes, default=0) + 1
        self._source: Mapping[str, int] = {}
        self._copies: list[dict[str, Bytes]] = []

    def check_room(self, n_bytes: int) -> None:
        """Raise IkError if the system lacks memory for `n_bytes`, the size of all copies."""
        room = available_memory() if self.n_copies > 1 else None
        if room is not None and n_bytes > room:
            raise IkError(
                f"--numa mirror: {self.n_copies} copies of the weights take {n_bytes / _MIB:.0f} MiB, "
                f"{room / _MIB:.0f} MiB are available; --numa distribute --no-mmap keeps one"
            )

    def make(self, model: Model, addresses: Mapping[str, int]) -> None:
        """Copy loaded weights to the other nodes, by the threads of those nodes."""
        if self.n_copies == 1:
            return
        self._source, self._copies = addresses, []
        sizes = {name: model.n_bytes([name]) for name in addresses}
        for copy in range(1, self.n_copies):
            own = [cpus for cpus, node in zip(self._cpus, self.nodes, strict=True) if node == copy]
            made = divided(sizes, model.pages, own)
            self._copies.append(made)
            _fill(made, addresses, own)
        n_threads = [self.nodes.count(copy) for copy in range(self.n_copies)]
        log(
            f"numa: {self.n_copies} copies of {sum(sizes.values()) / _MIB:.0f} MiB of weights, one per node, read by "
            f"{', '.join(map(str, n_threads))} threads of it"
        )

    def addresses(self) -> list[dict[str, int]]:
        """Return the addresses of the weights of every copy but the first."""
        return [{name: int(data.ctypes.data) for name, data in made.items()} for made in self._copies]

    def update(self, names: Sequence[str]) -> None:
        """Take over weights that changed in the first copy."""
        for made in self._copies:
            for name in made.keys() & {*names}:
                ctypes.memmove(made[name].ctypes.data, self._source[name], made[name].nbytes)


def mirror_of(config: RunConfig, n_threads: int, elsewhere: str) -> Mirror:
    """Return the copies that a run makes, none without `--numa mirror`.

    `elsewhere`: where some weights are if not all are in RAM. Raises UsageError where there can be no copies.
    """
    if config.numa != "mirror":
        return Mirror()
    if elsewhere:
        raise UsageError(
            f"--numa mirror copies weights in RAM and cannot be used with {elsewhere}; use --numa distribute"
        )
    cpus, _ = numa.plan_threads(config, n_threads)
    return Mirror(cpus or ())


def _fill(made: Mapping[str, Bytes], addresses: Mapping[str, int], cpus: Sequence[frozenset[int]]) -> None:
    """Copy from `addresses`, in pieces, by a thread per entry of `cpus`."""
    pieces = [(name, at) for name, data in made.items() for at in range(0, data.nbytes, _PIECE)]

    def work(ith: int) -> None:
        for name, at in pieces[ith :: len(cpus)]:
            n_bytes = min(_PIECE, made[name].nbytes - at)
            ctypes.memmove(made[name].ctypes.data + at, addresses[name] + at, n_bytes)

    numa.on_each(cpus, work)
