"""The kernels' tests on a real GPU: with IK_TEST_GPU=1, `cuda_emulation` hands out this device and this run_kernel.

    IK_TEST_GPU=1 python -m pytest tests/test_cuda_*.py

One CudaDevice per process serves all tests, so that kernels are loaded once. Fresh memory is filled with NaN patterns.
Where the driver is the stand-in of fake_cuda.c, its launches are emulated: that is how this file itself is tested.
"""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.backends.cuda import driver
from ikcli.backends.cuda.device import ALIGNMENT, DeviceInfo, DeviceMemory, Launch, Pinned

why_none = driver.why_none


@functools.cache
def shared_device() -> tuple[driver.CudaDevice, Any]:
    """The GPU of this process."""
    device, launcher = driver.open_device(), None
    if hasattr(ctypes.CDLL("libcuda.so.1"), "fake_set_launcher"):
        from fake_cuda import Launcher

        launcher = Launcher()
    return device, launcher


class RealDevice:
    """A GPU with the extras of EmulatedDevice; closing it frees what it allocated."""

    def __init__(self, info: DeviceInfo | None = None, seed: int = 1, keep_history: bool = True) -> None:
        del info, seed
        self._device, self._launcher = shared_device()
        self._fill, self._keep = self._device.stream(), keep_history
        self._memory: list[DeviceMemory] = []
        self._pinned: list[Pinned] = []
        self._streams, self._events = [self._fill], []
        self.registered: dict[int, int] = {}
        self._recorded: list[Launch] | None = None
        self._graphs: dict[int, list[Launch]] = {}
        self.launches: Counter[str] = Counter()
        self.history: list[Launch] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def stream(self, urgent: bool = False) -> Any:
        self._streams.append(self._device.stream(urgent))
        return self._streams[-1]

    def free_stream(self, stream: Any) -> None:
        self._streams = [s for s in self._streams if s is not stream]
        self._device.free_stream(stream)

    def event(self, timing: bool = False) -> Any:
        self._events.append(self._device.event(timing))
        return self._events[-1]

    def free_event(self, event: Any) -> None:
        self._events = [e for e in self._events if e is not event]
        self._device.free_event(event)

    @property
    def events(self) -> list[Any]:
        """Events that were not freed."""
        return self._events

    @property
    def n_streams(self) -> int:
        """Streams that were not freed, without the one that fills memory."""
        return sum(s is not self._fill for s in self._streams)

    def alloc(self, n_bytes: int, owner: str) -> DeviceMemory:
        memory = self._device.alloc(n_bytes, owner)
        self._memory.append(memory)
        self._device.fill(self._fill, memory.address, 0xFF, max(n_bytes, ALIGNMENT))
        self._device.synchronize(self._fill)
        return memory

    def free(self, memory: DeviceMemory) -> None:
        self._memory.remove(memory)
        self._device.free(memory)

    def pinned(self, n_bytes: int, owner: str) -> Pinned:
        memory = self._device.pinned(n_bytes, owner)
        memory.array[:] = 0xFF
        self._pinned.append(memory)
        return memory

    def free_pinned(self, memory: Pinned) -> None:
        self._pinned.remove(memory)
        self._device.free_pinned(memory)

    def register(self, address: int, n_bytes: int) -> bool:
        done = self._device.register(address, n_bytes)
        if done:
            self.registered[address] = address + n_bytes
        return done

    def unregister(self, address: int) -> None:
        self._device.unregister(address)
        del self.registered[address]

    def memory(self) -> tuple[int, int]:
        return self._device.memory()

    def owners(self) -> dict[str, int]:
        table: dict[str, int] = {}
        for memory in self._memory:
            table[memory.owner] = table.get(memory.owner, 0) + memory.n_bytes
        return table

    def _count(self, launch: Launch) -> None:
        self.launches[launch.kernel] += 1
        if self._keep:
            self.history.append(launch)

    def launch(self, stream: Any, launch: Launch) -> None:
        if self._recorded is not None:
            self._recorded.append(launch)
        else:
            self._count(launch)
        self._device.launch(stream, launch)

    def capture(self, stream: Any, work: Callable[[], None]) -> Any:
        self._recorded = []
        try:
            graph = self._device.capture(stream, work)
            self._graphs[id(graph)] = self._recorded
        finally:
            self._recorded = None
        return graph

    def replay(self, stream: Any, graph: Any) -> None:
        for launch in self._graphs[id(graph)]:
            self._count(launch)
        self._device.replay(stream, graph)

    def synchronize(self, stream: Any = None) -> None:
        try:
            self._device.synchronize(stream)
        except Exception as e:
            if self._launcher is not None and self._launcher.failure is not None:
                raise self._launcher.failure from e
            raise

    def check(self) -> None:
        self.synchronize()

    def close(self) -> None:
        self.synchronize()
        for memory in list(self._memory):
            self.free(memory)
        for pinned in list(self._pinned):
            self.free_pinned(pinned)
        for event in self._events:
            self._device.free_event(event)
        for stream in self._streams:
            self._device.free_stream(stream)
        self._streams, self._events = [], []


def as_array(address: int, n_bytes: int) -> npt.NDArray[np.uint8]:
    """A copy of device memory."""
    device, _ = shared_device()
    stream, out = device.stream(), np.empty(n_bytes, np.uint8)
    device.synchronize()
    device.download(stream, out, address)
    device.synchronize(stream)
    device.free_stream(stream)
    return out


def run_kernel(
    name: str,
    grid: int | tuple[int, ...],
    block: int,
    *args: Any,
    shared: int = 0,
    seed: int = 1,
    source: Any = None,
    device: Any = None,
) -> None:
    """As cuda_emulation.run_kernel, for kernels of the package."""
    del seed, device
    assert source is None, "only packaged kernels run on a GPU"
    gpu = RealDevice()
    stream = gpu.stream()
    held: dict[int, tuple[DeviceMemory, npt.NDArray[Any]]] = {}
    flat: list[Any] = []
    for a in args:
        if isinstance(a, np.ndarray):
            if id(a) not in held:
                held[id(a)] = gpu.alloc(a.nbytes, name), a
                gpu.upload(stream, held[id(a)][0].address, np.ascontiguousarray(a))
                gpu.synchronize(stream)
            flat.append(held[id(a)][0].address)
        else:
            flat.append(a)
    sizes = (*(grid if isinstance(grid, tuple) else (grid,)), 1, 1)
    gpu.launch(stream, Launch(name, (sizes[0], sizes[1], sizes[2]), block, shared, tuple(flat)))
    for memory, a in held.values():
        if a.flags.writeable:
            out = np.empty(a.shape, a.dtype)
            gpu.download(stream, out, memory.address)
            gpu.synchronize(stream)
            a[...] = out
    gpu.close()
