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
        self._graph = Graph()
        self._graph.il = _LAYER
        self._result: Node = tower.record(self._graph)
        self._tensors, self.runner = tensors, runner
        self._n_rows, self._n_outputs, self._loaded = 0, 0, False
        self._program: DividedProgram
        self._block: StepBlock

    @property
    def cols(self) -> int:
        """Return the columns of a result."""
        return self._result.cols

    def plan(self, n_rows: int, n_outputs: int) -> DividedProgram:
        """Return the program for so many rows; nothing is allocated."""
        return self.runner.plan(self._graph, self._result, n_rows, n_outputs, n_rows)

    def memory(self, n_rows: int, n_outputs: int) -> dict[str, dict[str, int]]:
        """Return the bytes for so many rows by device and part: weights, KV (none) and compute."""
        return self.runner.memory([self.plan(n_rows, n_outputs)], self._tensors)

    def load(self) -> None:
        """Copy the weights to the GPU, if there is one; raise OutOfMemory if it lacks the memory."""
        self.runner.load([self.plan(_ROUND, _ROUND)], self._tensors, mmap=True)
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
        self._program = self.plan(n_rows, n_outputs)
        with progress("compiling kernels", self.runner.n_missing([self._program])) as advance:
            self.runner.prepare([self._program], lambda done, total: advance(1))
        self._block = StepBlock(n_rows, n_rows, inputs.rows.shape[1])
        self.runner.bind([self._program], self._block)
        self._n_rows, self._n_outputs = n_rows, n_outputs

    def run(self, inputs: Inputs) -> Floats:
        """Return the rows of the tokens of an image, (n, columns)."""
        self._make_room(inputs)
        n = len(inputs.rows)
        places = np.zeros((n, PLACE_WORDS), np.int32)
        places[:, MEDIA_AT] = inputs.rows.shape[1] * np.arange(n)
        places[:, AXES + 1 : AXES + 3] = inputs.at
        places[:, SEEN : SEEN + 2] = (0, n) if inputs.ranges is None else inputs.ranges
        zeros, outputs = np.zeros(n, np.int32), np.arange(inputs.n_tokens)
        self._block.set(zeros, np.arange(n, dtype=np.int32), outputs, [Segment(0, n, 0, 0)])
        self._block.set_media(places, [inputs.rows])
        self.runner.run(self._program, self.runner.cpu.n_threads, self._block)
        return self.runner.result(self._program, inputs.n_tokens).copy()

    def close(self) -> None:
        """Stop the threads and free memory."""
        self.runner.close()
        self._n_rows = self._n_outputs = 0
        self._loaded = False
