"""Repeat passes over the same micro-batches with some weights changed, computing only from the first change on.

At the beginning of layers, a recorded pass keeps the values in work memory that later ops read: the residual stream and
little else. A repeated pass starts from them. Its results are the same bits as those of a whole pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ikcli.backends.cpu.program import CpuProgram
from ikcli.backends.step_block import StepBlock
from ikcli.engine.run.cpu_device import CpuDevice
from ikcli.engine.run.run_device import CPU, Bytes
from ikcli.engine.run.runner import DividedProgram, Runner


@dataclass(slots=True)
class _Kept:
    """The values that a run of a program left at each kept cut: places in the arena and their bytes."""

    program: CpuProgram
    cuts: list[tuple[int, list[tuple[int, int]]]]
    values: list[list[Bytes]] = field(default_factory=list)


class ReplayRunner(Runner):
    """A runner on the CPU that can record a pass and repeat it.

    `limit`: bytes to keep for all runs together.
    """

    def __init__(self, n_threads: int, limit: int) -> None:
        super().__init__(CpuDevice(n_threads))
        self._limit = limit
        self._kept: list[_Kept] = []
        self._known_cuts: dict[int, list[tuple[int, list[tuple[int, int]]]]] = {}  # cuts by program
        self._recording = 0
        self._at = 0
        self._changed: frozenset[str] = frozenset()
        self._first: dict[int, int] = {}
        self._bound: tuple[Sequence[DividedProgram], StepBlock] | None = None
        self.n_ops = [0, 0]  # ops that were computed, and those of whole passes

    @property
    def n_bytes(self) -> int:
        """Return the bytes kept."""
        return sum(v.nbytes for kept in self._kept for values in kept.values for v in values)

    def record(self, n_runs: int) -> None:
        """Keep values in the next so many runs."""
        self._kept, self._known_cuts, self._recording, self._at = [], {}, n_runs, 0

    def change(self, addresses: Mapping[str, int]) -> None:
        """Begin a pass in which these weights have new addresses, and all others those of the recorded one."""
        assert self._bound is not None
        programs, state = self._bound
        own = self._weights[CPU]
        self._changed, self._first = frozenset(addresses), {}
        self._weights[CPU] = {**own, **addresses}
        super().bind(programs, state)
        self._weights[CPU] = own
        self._at = 0

    def bind(self, programs: Sequence[DividedProgram], state: StepBlock) -> None:
        """Bind programs as any runner does."""
        self._bound = programs, state
        super().bind(programs, state)

    def run(self, program: DividedProgram, n_threads: int, state: StepBlock) -> None:
        """Execute a program: all of it while recording, else from the last kept cut before a changed weight."""
        whole = program.parts[CPU].program
        if self._at < self._recording and len(self._kept) == self._at:
            self._kept.append(self._record(whole, n_threads))
        else:
            self._repeat(whole, n_threads)
        self._at += 1

    def _record(self, program: CpuProgram, n_threads: int) -> _Kept:
        if id(program) not in self._known_cuts:
            self._known_cuts[id(program)] = self._cuts(program)
        kept, done = _Kept(program, self._known_cuts[id(program)]), 0
        for cut, places in kept.cuts:
            self.cpu.run_ops(program, done, cut, n_threads)
            kept.values.append([self.cpu.arena[at : at + size].copy() for at, size in places])
            done = cut
        self.cpu.run_ops(program, done, len(program.ops), n_threads)
        return kept

    def _repeat(self, program: CpuProgram, n_threads: int) -> None:
        if id(program) not in self._first:
            self._first[id(program)] = program.first_use(self._changed)
        first, start = self._first[id(program)], 0
        kept = self._kept[self._at] if self._at < len(self._kept) else None
        if kept is not None and kept.program is program:
            for (cut, places), values in zip(kept.cuts, kept.values, strict=True):
                if start < cut <= first:
                    start, found = cut, (places, values)
            if start:
                for (at, size), value in zip(*found, strict=True):
                    self.cpu.arena[at : at + size] = value
        self.n_ops[0] += len(program.ops) - start
        self.n_ops[1] += len(program.ops)
        self.cpu.run_ops(program, start, len(program.ops), n_threads)

    def _cuts(self, program: CpuProgram) -> list[tuple[int, list[tuple[int, int]]]]:
        """Return the layer starts at which to keep values.

        There are as many as the limit allows, evenly spaced, the last one first.
        """
        layers = [op.node.il for op in program.ops]
        starts = [i for i in range(1, len(layers)) if layers[i] != layers[i - 1]]
        places = zip(starts, program.carried(starts), strict=True)
        carried = [(cut, found) for cut, found in places if found is not None]
        total = sum(n for _, found in carried for _, n in found) * self._recording
        if not total or self._limit <= 0:
            return []
        every = -(-total // self._limit)
        return carried[::-1][::every][::-1] if every <= len(carried) else []
