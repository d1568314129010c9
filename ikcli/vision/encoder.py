"""Run a vision tower on the CPU or a GPU: one program for all sizes of images, planned for the largest so far."""

from __future__ import annotations

import numpy as np

from ikcli.backends.step_block import StepBlock
from ikcli.engine.run.cpu_device import CpuDevice
from ikcli.engine.run.run_device import CPU, RunDevice
from ikcli.engine.run.runner import DividedProgram, Runner
from ikcli.graph import Graph, Node
from ikcli.graph.micro_batch import AXES, MEDIA_AT, PLACE_WORDS, SEEN, Segment
from ikcli.graph.split import NodePlaces
from ikcli.log import progress
from ikcli.vision.tensors import Floats, Tensors
from ikcli.vision.tower import Inputs, Tower

_ROUND = 256  # rows
_LAYER = 0  # of all nodes: what is outside of layers is computed on the CPU


def tower_runner(n_threads: int, gpu: tuple[str, RunDevice] | None = None) -> Runner:
    """Return a runner that computes a tower on a GPU, given by name; without one, on the CPU."""
    if gpu is None:
        return Runner(CpuDevice(n_threads))
    name, device = gpu
    places = NodePlaces(lambda node, w: name, lambda il: name, lambda il: CPU if il < _LAYER else name)
    return Runner(CpuDevice(n_threads), {name: device}, places)


class Encoder:
    """Computes the rows of tokens from the inputs of a tower."""

    def __init__(self, tower: Tower, tensors: Tensors, runner: Runner) -> None:
        self._stages: list[tuple[Graph, Node, int]] = []
        for record, join in tower.stages():
            graph = Graph()
            graph.il = _LAYER
            self._stages.append((graph, record(graph), join))
        self._tensors, self.runner = tensors, runner
        self._n_rows, self._n_outputs, self._loaded = 0, 0, False
        self._programs: list[DividedProgram]
        self._block: StepBlock

    def plan(self, n_rows: int, n_outputs: int) -> list[DividedProgram]:
        """Return the programs for so many rows; nothing is allocated."""
        found, n = [], n_rows
        for graph, result, join in self._stages:
            out = n // join if join else n_outputs
            found.append(self.runner.plan(graph, result, n, out, n_rows))
            n = out
        return found

    def memory(self, n_rows: int, n_outputs: int) -> dict[str, dict[str, int]]:
        """Return the bytes for so many rows by device and part: weights, KV (none) and compute."""
        return self.runner.memory(self.plan(n_rows, n_outputs), self._tensors)

    def load(self) -> None:
        """Copy the weights to the GPU, if there is one; raise OutOfMemory if it lacks the memory."""
        self.runner.load(self.plan(_ROUND, _ROUND), self._tensors, mmap=True)
        self._loaded = True

    def _make_room(self, inputs: Inputs) -> None:
        n = len(inputs.rows)
        if n <= self._n_rows and inputs.n_tokens <= self._n_outputs:
            return
        if not self._loaded:
            self.load()
        n_rows = max(-(-n // _ROUND) * _ROUND, self._n_rows)
        n_outputs = max(inputs.n_tokens, self._n_outputs, n_rows * inputs.n_tokens // n)
        self._n_rows = self._n_outputs = 0  # nothing is bound if this fails
        self._programs = self.plan(n_rows, n_outputs)
        with progress("compiling kernels", self.runner.n_missing(self._programs)) as advance:
            self.runner.prepare(self._programs, lambda done, total: advance(1))
        cols = max(inputs.rows.shape[1], *(result.cols for _, result, _ in self._stages))
        self._block = StepBlock(n_rows, n_rows, cols)
        self.runner.bind(self._programs, self._block)
        self._n_rows, self._n_outputs = n_rows, n_outputs

    def run(self, inputs: Inputs) -> Floats:
        """Return the rows of the tokens of an image, (n, columns)."""
        self._make_room(inputs)
        rows = inputs.rows
        for program, (_, _, join) in zip(self._programs, self._stages, strict=True):
            n, first = len(rows), rows is inputs.rows
            places = np.zeros((n, PLACE_WORDS), np.int32)
            places[:, MEDIA_AT] = self._block.media_cols * np.arange(n)
            if first:
                places[:, AXES + 1 : AXES + 3] = inputs.at
            places[:, SEEN : SEEN + 2] = (0, n) if inputs.ranges is None or not first else inputs.ranges
            n_outputs = n // join if join else inputs.n_tokens
            zeros, outputs = np.zeros(n, np.int32), np.arange(n_outputs)
            self._block.set(zeros, np.arange(n, dtype=np.int32), outputs, [Segment(0, n, 0, 0)])
            self._block.set_media(places, [rows])
            self.runner.run(program, self.runner.cpu.n_threads, self._block)
            rows = self.runner.result(program, n_outputs).copy()
        return rows

    def close(self) -> None:
        """Stop the threads and free memory."""
        self.runner.close()
        self._n_rows = self._n_outputs = 0
        self._loaded = False
