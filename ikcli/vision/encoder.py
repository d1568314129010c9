"""Run a vision tower on the CPU: one program for all sizes of images, planned for the largest one so far."""

from __future__ import annotations

import numpy as np

from ikcli.backends.step_block import StepBlock
from ikcli.engine.run.cpu_device import CpuDevice, CpuSplits
from ikcli.engine.run.run_device import CPU
from ikcli.graph import Graph, Node, Rows
from ikcli.graph.micro_batch import AXES, MEDIA_AT, PLACE_WORDS, SEEN, Segment
from ikcli.graph.split import GraphSplit
from ikcli.log import progress
from ikcli.vision.tensors import Floats, Tensors
from ikcli.vision.tower import Inputs, Tower

_ROUND = 256  # rows


class Encoder:
    """Computes the rows of tokens from the inputs of a tower."""

    def __init__(self, tower: Tower, tensors: Tensors, n_threads: int) -> None:
        graph = Graph()
        self._result: Node = tower.record(graph)
        self._nodes, self._tensors, self._device = graph.nodes, tensors, CpuDevice(n_threads)
        self._n_threads, self._n_rows, self._n_outputs = n_threads, 0, 0
        self._program: CpuSplits
        self._block: StepBlock

    @property
    def cols(self) -> int:
        """Return the columns of a result."""
        return self._result.cols

    def plan(self, n_rows: int, n_outputs: int) -> CpuSplits:
        """Return the program for so many rows; nothing is allocated."""
        rows = {Rows.TOKENS: n_rows, Rows.OUTPUTS: n_outputs, Rows.KV: n_rows}
        return self._device.plan([GraphSplit(CPU, list(self._nodes))], rows, n_rows, False, result=self._result)

    def _make_room(self, inputs: Inputs) -> None:
        n = len(inputs.rows)
        if n <= self._n_rows and inputs.n_tokens <= self._n_outputs:
            return
        self._n_rows = max(-(-n // _ROUND) * _ROUND, self._n_rows)
        self._n_outputs = max(inputs.n_tokens, self._n_outputs, self._n_rows * inputs.n_tokens // n)
        self._program = self.plan(self._n_rows, self._n_outputs)
        with progress("compiling kernels", self._device.n_missing([self._program])) as advance:
            self._device.prepare([self._program], lambda done, total: advance(1))
        self._block = StepBlock(self._n_rows, self._n_rows, inputs.rows.shape[1])
        names = {w.name for node in self._nodes for w in node.weights()}
        self._device.bind([self._program], self._block, self._tensors.addresses(names), {}, [{}])

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
        self._device.begin(self._program, self._block)
        self._device.run(self._program, 0, self._n_threads)
        return self._device.result(self._program, self._result, inputs.n_tokens).copy()

    def close(self) -> None:
        """Stop the threads and free memory."""
        self._device.close()
        self._n_rows = self._n_outputs = 0
