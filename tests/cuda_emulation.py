"""A CUDA device on the CPU: the kernel sources, compiled with g++ against kernels/emu.h and run block by block.

`EmulatedDevice` has the interface of the real one (ikcli/backends/cuda/device.py). Work is queued and runs only when a
stream or event is waited for, so that a host that reads too early reads poison. Every allocation ends at a page that
cannot be touched and starts as NaN patterns. `run_kernel` is the short way for tests of one kernel.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import re
import shutil
import subprocess
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from emulated_kernels import Entry, KernelError, compiler_missing, kernel, load

from ikcli.backends.cuda.device import ALIGNMENT, Argument, DeviceInfo, DeviceMemory, Launch, Pinned

needs_emulation = pytest.mark.skipif(compiler_missing() is not None, reason=str(compiler_missing()))


def _pack(entry: Entry, args: tuple[Argument, ...]) -> npt.NDArray[np.uint64]:
    if len(args) != len(entry.types):
        raise KernelError(f"{entry.name} takes {len(entry.types)} arguments ({entry.types}), got {len(args)}")
    words = np.zeros(max(len(args), 1), np.uint64)
    for i, (kind, value) in enumerate(zip(entry.types, args, strict=True)):
        wanted = {"q": int, "i": np.int32, "f": np.float32}[kind]
        if type(value) is not wanted:
            raise KernelError(f"argument {i} of {entry.name} must be {wanted.__name__}, got {type(value).__name__}")
        if kind == "q":
            words[i] = int(value) & (1 << 64) - 1
        else:
            words.view(np.uint32)[2 * i] = np.asarray(value).view(np.uint32)
    return words


def _message(entry: Entry) -> str:
    """What went wrong in the last launch, with the source line where it is known."""
    text = str(entry.library.ik_message().decode())
    at = re.search(r" \[\+0x[0-9a-f]+\]", text)
    if at and shutil.which("addr2line"):
        command = ["addr2line", "-e", str(entry.library._name), at[0][3:-1]]
        line = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        text = text.replace(at[0], f" ({Path(line).name})")
    return text


def launch_now(launch: Launch, seed: int = 1, entry: Entry | None = None, info: DeviceInfo | None = None) -> None:
    """Run a launch; raises KernelError for whatever the emulation finds."""
    entry = entry or kernel(launch.kernel)
    limit = info.shared_limit if info else 232448
    gx, gy, gz = launch.grid
    if not (0 < gx < 1 << 31 and 0 < gy < 65536 and 0 < gz < 65536):
        raise KernelError(f"{entry.name}: grid {launch.grid} is not possible")
    if launch.block % 32 or not 0 < launch.block <= entry.max_threads:
        raise KernelError(f"{entry.name}: {launch.block} threads; a multiple of 32 up to {entry.max_threads} is needed")
    if not 0 <= launch.shared <= limit:
        raise KernelError(f"{entry.name}: {launch.shared} bytes of shared memory, the device has {limit}")
    words, grid = _pack(entry, launch.args), np.array(launch.grid, np.uint32)
    failed = entry.library.ik_launch(
        entry.index, grid.ctypes.data, launch.block, launch.shared, words.ctypes.data, seed
    )
    if failed:
        raise KernelError(f"{entry.name}: {_message(entry)}")


# ---- device memory ------------------------------------------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_PAGE = mmap.PAGESIZE
_POISON = 0x7FFF  # NaN as f16, bf16 and (twice) f32


def as_array(address: int, n_bytes: int) -> npt.NDArray[np.uint8]:
    """Bytes at an address."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(address))


def poison(array: npt.NDArray[Any]) -> None:
    """Fill with NaN patterns."""
    flat = array.reshape(-1).view(np.uint8)
    flat[: len(flat) // 2 * 2].view(np.uint16)[:] = _POISON
    flat[len(flat) // 2 * 2 :] = 0xFF


class GuardedMemory:
    """Host memory that ends (up to the rest of 256 bytes) at a page nobody may touch, and starts after one."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        used = -(-max(n_bytes, 1) // ALIGNMENT) * ALIGNMENT
        self._inner = -(-used // _PAGE) * _PAGE
        self._base = _libc.mmap(None, self._inner + 2 * _PAGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if self._base in (None, ctypes.c_void_p(-1).value):
            raise MemoryError
        _libc.mprotect(self._base + _PAGE, self._inner, mmap.PROT_READ | mmap.PROT_WRITE)
        self.address = self._base + _PAGE + self._inner - used
        poison(as_array(self._base + _PAGE, self._inner))

    def check(self, owner: str) -> None:
        """Raise if bytes around the allocation were written."""
        start, stop = self._base + _PAGE, self._base + _PAGE + self._inner
        head, tail = (
            as_array(start, self.address - start),
            as_array(self.address + self.n_bytes, stop - self.address - self.n_bytes),
        )
        odd = self.n_bytes & 1
        if (head.view(np.uint16) != _POISON).any() or (tail[odd:].view(np.uint16) != _POISON).any():
            raise KernelError(f"memory around an allocation of {self.n_bytes} bytes for {owner} was written")

    def release(self) -> None:
        _libc.munmap(self._base, self._inner + 2 * _PAGE)


class _Queue:
    """Stream: work in order, done when flushed."""

    def __init__(self) -> None:
        self.work: deque[Callable[[], None]] = deque()
        self.running = False

    def flush(self) -> None:
        if self.running:
            raise KernelError("streams wait for each other in a circle")
        self.running = True
        try:
            while self.work:
                self.work.popleft()()
        finally:
            self.running = False


class _Event:
    def __init__(self) -> None:
        self.stream: _Queue | None = None
        self.ticket = self.fired = 0

    def finish(self) -> None:
        ticket = self.ticket
        while self.fired < ticket and self.stream is not None:
            self.stream.work.popleft()()


@dataclass
class _Graph:
    work: list[Callable[[], None]] = field(default_factory=list)


H200 = DeviceInfo(0, "emulated H200", (9, 0), 132, 8 << 30, 232448, 60 << 20, (13, 0))
RTX4090 = DeviceInfo(0, "emulated RTX 4090", (8, 9), 128, 8 << 30, 101376, 72 << 20, (13, 0))


class EmulatedDevice:
    """A device whose memory is this process's; `launches` counts by kernel, `history` keeps every Launch run."""

    def __init__(self, info: DeviceInfo = H200, seed: int = 1, keep_history: bool = True) -> None:
        self._info, self._seed, self._keep = info, seed, keep_history
        self._memory: dict[int, tuple[GuardedMemory, DeviceMemory]] = {}
        self._pinned: dict[int, tuple[GuardedMemory, Pinned]] = {}
        self._streams: list[_Queue] = []
        self.events: list[_Event] = []  # that were not freed
        self.registered: dict[int, int] = {}  # host memory: start -> end
        self._capturing: tuple[_Queue, _Graph] | None = None
        self.launches: Counter[str] = Counter()
        self.history: list[Launch] = []

    @property
    def info(self) -> DeviceInfo:
        return self._info

    def alloc(self, n_bytes: int, owner: str) -> DeviceMemory:
        self._check_not_capturing("allocate")
        memory = GuardedMemory(n_bytes)
        result = DeviceMemory(memory.address, n_bytes, owner)
        self._memory[result.address] = memory, result
        return result

    def free(self, memory: DeviceMemory) -> None:
        self.synchronize()
        guarded, _ = self._memory.pop(memory.address)
        try:
            guarded.check(memory.owner)
        finally:
            guarded.release()

    def pinned(self, n_bytes: int, owner: str) -> Pinned:
        memory = GuardedMemory(n_bytes)
        result = Pinned(as_array(memory.address, n_bytes), memory.address, owner)
        self._pinned[memory.address] = memory, result
        return result

    def free_pinned(self, memory: Pinned) -> None:
        self.synchronize()
        guarded, _ = self._pinned.pop(memory.address)
        guarded.release()

    def register(self, address: int, n_bytes: int) -> bool:
        if address % _PAGE or n_bytes % _PAGE or not n_bytes:
            raise KernelError(f"{n_bytes} bytes at {address:#x} are not whole pages")
        if any(address < end and start < address + n_bytes for start, end in self.registered.items()):
            raise KernelError("host memory is registered twice")
        self.registered[address] = address + n_bytes
        return True

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def memory(self) -> tuple[int, int]:
        return self._info.total_bytes - sum(self.owners().values()), self._info.total_bytes

    def owners(self) -> dict[str, int]:
        table: dict[str, int] = {}
        for _, memory in self._memory.values():
            table[memory.owner] = table.get(memory.owner, 0) + memory.n_bytes
        return table

    def stream(self, urgent: bool = False) -> _Queue:
        del urgent
        self._streams.append(_Queue())
        return self._streams[-1]

    def free_stream(self, stream: _Queue) -> None:
        stream.flush()
        self._streams.remove(stream)

    def event(self, timing: bool = False) -> _Event:
        del timing
        self.events.append(_Event())
        return self.events[-1]

    def free_event(self, event: _Event) -> None:
        self.events.remove(event)

    @property
    def n_streams(self) -> int:
        """Streams that were not freed."""
        return len(self._streams)

    def _range(self, address: int, n_bytes: int) -> npt.NDArray[np.uint8]:
        """Device bytes; raises unless they lie inside one allocation."""
        for start, (_, memory) in self._memory.items():
            if start <= address and address + n_bytes <= start + memory.n_bytes:
                return as_array(address, n_bytes)
        raise KernelError(f"{n_bytes} bytes at {address:#x} are not inside an allocation")

    def _queue(self, stream: _Queue, work: Callable[[], None]) -> None:
        if self._capturing is not None and self._capturing[0] is stream:
            self._capturing[1].work.append(work)
        else:
            stream.work.append(work)

    def _check_not_capturing(self, what: str) -> None:
        if self._capturing is not None:
            raise KernelError(f"cannot {what} while a graph is captured")

    def _host_bytes(self, array: npt.NDArray[Any], usable: bool, otherwise: str) -> npt.NDArray[np.uint8]:
        at, end = array.ctypes.data, array.ctypes.data + array.nbytes
        if not usable:
            raise KernelError(otherwise)
        if any(start < end and at < stop and (at < start or stop < end) for start, stop in self.registered.items()):
            raise KernelError(
                f"drivers refuse to copy host memory that is pinned in part: {array.nbytes} bytes at {at:#x}"
            )
        return array.reshape(-1).view(np.uint8)

    def upload(self, stream: _Queue, address: int, array: npt.NDArray[Any]) -> None:
        source = self._host_bytes(array, array.flags.c_contiguous, "upload of an array that is not contiguous")
        self._queue(stream, functools.partial(np.copyto, self._range(address, len(source)), source))

    def download(self, stream: _Queue, array: npt.NDArray[Any], address: int) -> None:
        usable = array.flags.c_contiguous and array.flags.writeable
        target = self._host_bytes(array, usable, "download into an array that is not contiguous and writeable")
        source = self._range(address, len(target))
        if self._capturing is None:
            poison(target)
        self._queue(stream, lambda: np.copyto(target, source))

    def copy(self, stream: _Queue, target: int, source: int, n_bytes: int) -> None:
        self._queue(stream, functools.partial(np.copyto, self._range(target, n_bytes), self._range(source, n_bytes)))

    def fill(self, stream: _Queue, address: int, value: int, n_bytes: int) -> None:
        self._queue(stream, functools.partial(self._range(address, n_bytes).fill, value))

    def launch(self, stream: _Queue, launch: Launch) -> None:
        entry = kernel(launch.kernel)
        _pack(entry, launch.args)  # errors belong to the caller, not to the next synchronisation
        self._queue(stream, lambda: self._run(launch, entry))

    def _run(self, launch: Launch, entry: Entry) -> None:
        self.launches[launch.kernel] += 1
        if self._keep:
            self.history.append(launch)
        self._seed += 1
        launch_now(launch, self._seed, entry, self._info)

    def record(self, stream: _Queue, event: _Event) -> None:
        event.stream = stream
        event.ticket += 1
        ticket = event.ticket

        def fire() -> None:
            event.fired = max(event.fired, ticket)

        self._queue(stream, fire)

    def wait(self, stream: _Queue, event: _Event) -> None:
        ticket, source = event.ticket, event.stream

        def block() -> None:
            while source is not None and event.fired < ticket:
                source.work.popleft()()

        if source is not stream:
            self._queue(stream, block)

    def done(self, event: _Event) -> bool:
        """As a busy device would: the first question makes the work happen, so that loops end."""
        self._check_not_capturing("ask for an event")
        event.finish()
        return True

    def elapsed(self, start: _Event, stop: _Event) -> float:
        del start, stop
        return 1.0

    def synchronize(self, stream: _Queue | None = None) -> None:
        self._check_not_capturing("synchronise")
        for queue in [stream] if stream is not None else self._streams:
            queue.flush()

    def capture(self, stream: _Queue, work: Callable[[], None]) -> _Graph:
        self._check_not_capturing("capture")
        graph = _Graph()
        self._capturing = stream, graph
        try:
            work()
        finally:
            self._capturing = None
        return graph

    def replay(self, stream: _Queue, graph: _Graph) -> None:
        stream.work.extend(graph.work)

    def free_graph(self, graph: _Graph) -> None:
        graph.work.clear()

    def prepare(self, kernels: dict[str, int]) -> None:
        for name, shared in kernels.items():
            kernel(name)
            if shared > self._info.shared_limit:
                raise KernelError(f"{name}: {shared} bytes of shared memory, the device has {self._info.shared_limit}")

    def check(self) -> None:
        """Finish all work and look at the margins of every allocation."""
        self.synchronize()
        for guarded, memory in self._memory.values():
            guarded.check(memory.owner)

    def close(self) -> None:
        self.check()
        for guarded, _ in [*self._memory.values(), *self._pinned.values()]:
            guarded.release()
        self._memory, self._pinned = {}, {}


def run_kernel(
    name: str,
    grid: int | tuple[int, ...],
    block: int,
    *args: npt.NDArray[Any] | Argument,
    shared: int = 0,
    seed: int = 1,
    source: str | Path | None = None,
    device: DeviceInfo = H200,
) -> None:
    """Run one kernel on NumPy arrays, in place.

    Arrays are copied into guarded memory of exactly their size and back (the same array given twice shares memory).
    `source`: a .cu file elsewhere, for instance in a test's temporary folder.
    """
    entry = load(source)[name] if source is not None else kernel(name)
    sizes = grid if isinstance(grid, tuple) else (grid,)
    gx, gy, gz = (*sizes, 1, 1)[:3]
    held: dict[int, tuple[GuardedMemory, npt.NDArray[Any]]] = {}
    flat: list[Argument] = []
    try:
        for a in args:
            if not isinstance(a, np.ndarray):
                flat.append(a)
                continue
            if id(a) not in held:
                memory = GuardedMemory(a.nbytes)
                held[id(a)] = memory, a
                as_array(memory.address, a.nbytes)[:] = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
            flat.append(held[id(a)][0].address)
        launch_now(Launch(name, (gx, gy, gz), block, shared, tuple(flat)), seed, entry, device)
        for memory, a in held.values():
            memory.check(name)
            if a.flags.writeable:
                a[...] = as_array(memory.address, a.nbytes).view(a.dtype).reshape(a.shape)
    finally:
        for memory, _ in held.values():
            memory.release()


ON_GPU = os.environ.get("IK_TEST_GPU", "") not in ("", "0")
emulation_only = pytest.mark.skipif(ON_GPU, reason="about the emulation")
if ON_GPU:  # the same tests on a GPU
    import cuda_real

    EmulatedDevice, run_kernel = cuda_real.RealDevice, cuda_real.run_kernel  # type: ignore[assignment, misc]
    as_array = cuda_real.as_array
    needs_emulation = pytest.mark.skipif(cuda_real.why_none() is not None, reason=str(cuda_real.why_none()))
