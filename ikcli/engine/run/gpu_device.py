"""A GPU of a session, with its share of the weights and of the KV cache in device memory.

Weights are copied there straight from the file (`backends/cuda/transfer.py`). Cache cells are read and written in the
layout that they have in RAM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing

import numpy as np

from ikcli.backends.cuda import kv_layout, upload
from ikcli.backends.cuda.backend import CudaBackend, CudaProgram
from ikcli.backends.cuda.device import Device, DeviceMemory, OutOfMemory
from ikcli.backends.cuda.lower import GpuLaunch, GpuProgram, Ref
from ikcli.backends.cuda.transfer import Transfer
from ikcli.backends.step_block import StepBlock
from ikcli.engine.run.run_device import RESERVE_BYTES, Bytes, WeightSource
from ikcli.engine.run.timed_ops import TimedOp, work_of
from ikcli.graph import Cache, Node, Weight
from ikcli.log import progress as progress_bar

_ALIGN = 256


def weight_of(model: WeightSource, name: str) -> Weight:
    """Return a whole tensor of a model, as used."""
    spec = model.specs[name]
    return Weight(name, spec.type, tuple(spec.shape))


class GpuDevice(CudaBackend):
    """Run splits on a GPU; see the module."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._closed = False
        self._slabs: list[DeviceMemory] = []
        self._addresses: dict[str, int] = {}
        self._cells: dict[Cache, int] = {}

    @property
    def name(self) -> str:
        """Return the driver's name of the GPU."""
        return self.limits.name

    def prepare(self, programs: Sequence[CudaProgram], progress: object = None) -> None:
        """Load the kernels, which the driver compiles when it first sees them on a machine."""
        kernels = self.kernels(programs)
        with progress_bar("loading GPU kernels", len(kernels)) as advance:
            for name, shared in kernels.items():
                self.device.prepare({name: shared})
                advance(1)

    def check_memory(self, sizes: Mapping[str, int]) -> None:
        """Raise OutOfMemory, with a table of the memory needed, before anything is copied."""
        free, total = self.device.memory()
        wanted = {**sizes, "kernels and captured graphs": RESERVE_BYTES}
        if sum(sizes.values()) and sum(wanted.values()) > free:
            raise OutOfMemory(self.limits.name, "the run", sum(wanted.values()), free, total, wanted)

    # --- weights ----------------------------------------------------------------------------------------------------
    def weight_bytes(self, model: WeightSource, names: Sequence[str]) -> int:
        """Return the bytes of the weights on the device."""
        return sum(_aligned(upload.device_bytes(weight_of(model, name))) for name in names)

    def load_weights(self, model: WeightSource, names: Sequence[str], mmap: bool) -> Mapping[str, int]:
        """Copy the weights to the device, straight from the file where their layout is the same."""
        self.host_bytes = model.bytes_of
        total = self.weight_bytes(model, names)
        if not total:
            return {}
        slab = self.device.alloc(total, "weights")
        self._slabs.append(slab)
        addresses, at = {}, slab.address
        transfer = Transfer(self.device, [weight_of(model, name) for name in names])
        with progress_bar("copying to the GPU", total) as advance, closing(transfer):
            for name in names:
                w = weight_of(model, name)
                size = _aligned(upload.device_bytes(w))
                transfer.send(w, model.bytes_of(name), at)
                addresses[name] = at
                at += size
                advance(size)
        self._addresses |= addresses
        return addresses

    def update_weights(self, model: WeightSource, names: Sequence[str]) -> None:
        """Copy changed weights to the device again; meant for small ones."""
        arrays = []
        for name in names:
            if name in self._addresses:
                w = weight_of(model, name)
                arrays.append(np.empty(upload.device_bytes(w), np.uint8))
                upload.convert(model.bytes_of(name), w, arrays[-1])
                self.device.upload(self._stream, self._addresses[name], arrays[-1])
        self.device.synchronize(self._stream)

    # --- slots of experts ---------------------------------------------------------------------------------------------
    def make_slots(self, weights: Sequence[Weight]) -> dict[str, int]:
        """Allocate weights of slots, which stay empty, and return their addresses; raise OutOfMemory."""
        sizes = [_aligned(upload.device_bytes(w)) for w in weights]
        slab = self.device.alloc(sum(sizes), "expert cache")
        self._slabs.append(slab)
        starts = slab.address + np.cumsum([0, *sizes])
        return {w.name: int(start) for w, start in zip(weights, starts, strict=False)}

    @staticmethod
    def expert_bytes(w: Weight) -> int:
        """Return the bytes of one expert of a weight on the device."""
        return upload.device_bytes(w)

    def send_expert(self, w: Weight, e: int, n_expert: int, address: int) -> None:
        """Queue the copy of expert e of a weight; `w` has the shape of one expert."""
        assert self.host_bytes is not None
        self.send(w, self.host_bytes(w.name).reshape(n_expert, -1)[e], address)

    # --- cache ------------------------------------------------------------------------------------------------------
    def cache_bytes(self, cache: Cache, n_rows: int) -> int:
        """Return the bytes of a cache tensor on the device."""
        return kv_layout.cache_bytes(cache, n_rows)

    def make_caches(self, rows: Mapping[Cache, int]) -> Mapping[Cache, int]:
        """Make zeroed cache tensors in one allocation."""
        sizes = [_aligned(self.cache_bytes(c, n)) for c, n in rows.items()]
        if not rows:
            return {}
        slab = self.device.alloc(sum(sizes), "KV cache")
        self._slabs.append(slab)
        self.device.fill(self._stream, slab.address, 0, slab.n_bytes)
        starts = slab.address + np.cumsum([0, *sizes])
        self._cells = {c: int(start) for c, start in zip(rows, starts, strict=False)}
        return self._cells

    def read_cells(self, cache: Cache, n_rows: int, first: int, n: int) -> Bytes:
        """Return a copy of cells; see `RunDevice`."""
        pieces = [
            (np.empty((n, plane.row_bytes), np.uint8), self._cells[cache] + plane.offset + first * plane.row_bytes)
            for plane in kv_layout.planes(cache, n_rows)
        ]
        for array, address in pieces:
            if n:
                self.device.download(self._stream, array, address)
        self.device.synchronize(self._stream)
        return kv_layout.from_device(cache, [array for array, _ in pieces])

    def write_cells(self, cache: Cache, n_rows: int, first: int, rows: Bytes) -> None:
        """Replace cells; see `RunDevice`."""
        parts = kv_layout.to_device(cache, rows)
        for plane, array in zip(kv_layout.planes(cache, n_rows), parts, strict=True):
            if array.size:
                address = self._cells[cache] + plane.offset + first * plane.row_bytes
                self.device.upload(self._stream, address, array)
        self.device.synchronize(self._stream)

    def timed(
        self, program: CudaProgram, split: int, n_threads: int, state: StepBlock, show: bool
    ) -> Iterator[TimedOp]:
        """Run a split launch by launch, each between two events."""
        span, inner, device = program.spans[split], program.program, self.device
        before, after = device.event(timing=True), device.event(timing=True)
        try:
            self.take_in(program, span)
            for node, first, stop in inner.node_ops():
                if not span.first <= first < span.stop:
                    continue
                for i in range(first, stop):
                    self.load_for(program, span, i, i + 1)
                    for launch in inner.launches(self._counts, i, i + 1):
                        device.record(self._stream, before)
                        device.launch(self._stream, launch)
                        device.record(self._stream, after)
                        device.synchronize(self._stream)
                        n_bytes, n_ops = self._work(inner, inner.ops[i], state)
                        yield TimedOp(node, launch.kernel, device.elapsed(before, after) / 1e3, n_bytes, n_ops)
                if show and inner.has_output(node):
                    yield TimedOp(node, "shown", 0.0, 0, 0, self._value(inner, node, _rows(node, state)))
            self.give_out(program, span)
            device.record(self._stream, program.events[split])
        finally:
            device.free_event(before)
            device.free_event(after)

    def _work(self, program: GpuProgram, op: GpuLaunch, state: StepBlock) -> tuple[int, int]:
        """Return `work_of` for launches that read the weights."""
        names = {w.name for w in op.node.weights()}
        if not any(isinstance(arg, Ref) and arg.target in names for arg in op.args):
            return 0, 0
        return work_of(op.node, state, lambda plan: self._expert_rows(program, plan, state))

    def _expert_rows(self, program: GpuProgram, plan: Node, state: StepBlock) -> tuple[int, int]:
        pairs = self._value(program, plan, _rows(plan, state))
        experts = np.unique(pairs[:, 1].astype(np.int64))
        rows = int(np.count_nonzero(pairs[:, 1] != -1))
        return int(np.count_nonzero(experts != -1)), rows

    def close(self) -> None:
        """Free everything; later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        super().close()
        for slab in self._slabs:
            self.device.free(slab)
        self._slabs.clear()
        self.device.free_stream(self._stream)
        self.device.close()


def _rows(node: Node, state: StepBlock) -> int:
    return state.rows[node.rows.symbol] * node.rows.factor


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGN) * _ALIGN
