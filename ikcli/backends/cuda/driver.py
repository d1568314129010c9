"""Call NVIDIA GPUs through their driver (`cuda.bindings`): the only module that imports cuda.*, and only on demand.

Every failure is reported in one sentence: no package, no driver, no device, too old, out of memory with a table of
owners, a failed kernel with the launches before it. Kernels run asynchronously, so a failure shows at a later call;
IK_CUDA_SYNC=1 waits after every launch and blames the right one. CUDA_VISIBLE_DEVICES hides devices, as everywhere.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.backends.cuda.device import (
    ALIGNMENT,
    CudaError,
    Device,
    DeviceInfo,
    DeviceMemory,
    DeviceTooOld,
    DriverMissing,
    DriverTooOld,
    Event,
    Graph,
    Launch,
    LaunchFailed,
    NoDevice,
    NoGraphMemory,
    OutOfMemory,
    Pinned,
    Stream,
)
from ikcli.backends.cuda.modules import KernelFacts, Package

__all__ = ["CudaDevice", "Device", "Launch", "devices", "open_device", "why_none"]

MIN_CC = (8, 0)
_OLDEST = (12, 0)  # CUDA version of drivers that some supported version of cuda-bindings works with
_RING = 32  # launches remembered for the message of a failure
_MUCH_SHARED = 16 << 10  # bytes of dynamic shared memory from which a kernel gets all that an SM has
_OUT_OF_MEMORY, _NO_DEVICE, _NOT_READY = 2, 100, 600
_URGENT = -100  # the driver takes the highest priority that it has
_NO_KERNEL = {209: "no code for this GPU", 218: "invalid PTX", 222: "PTX newer than the driver"}
_STICKY = range(700, 722)  # the context is lost
_TYPES: dict[str, type] = {"q": int, "i": np.int32, "f": np.float32}
_PACK = {"q": "q", "i": "i4x", "f": "f4x"}
_current = threading.local()  # .device: the one this thread's context is of


@functools.cache
def _bindings() -> Any:
    """Return cuda.bindings.driver, initialised; raise DriverMissing, NoDevice or DriverTooOld."""
    try:
        from cuda.bindings import driver
    except ImportError as e:
        raise DriverMissing(f"the Python package cuda-python cannot be imported ({e}); install ik again") from e
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")  # nothing may be loaded while a graph is captured
    try:
        code = int(driver.cuInit(0)[0])
    except RuntimeError as e:  # cuda-pathfinder found no libcuda
        raise DriverMissing("no NVIDIA driver on this machine (libcuda is not installed)") from e
    if code == _NO_DEVICE:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = f"; CUDA_VISIBLE_DEVICES is set to '{visible}'" if visible is not None else ""
        raise NoDevice(f"the NVIDIA driver finds no GPU{hidden}")
    if code:
        raise DriverMissing(f"the NVIDIA driver does not start: {_error_text(driver, code)}")
    have, need = _driver_version(driver), _needed_version()
    if have < need:
        other = "" if have < _OLDEST else f", or: pip install 'cuda-python<{have[0] + 1}'"
        raise DriverTooOld(
            f"the NVIDIA driver supports CUDA {have[0]}.{have[1]}, the installed cuda-python needs "
            f"{need[0]}.{need[1]}: install a newer driver{other}"
        )
    return driver


def _needed_version() -> tuple[int, int]:
    from cuda.bindings import __version__

    return int(__version__.split(".")[0]), 0


def _driver_version(driver: Any) -> tuple[int, int]:
    code, version = driver.cuDriverGetVersion()
    return divmod(version // 10, 100) if not int(code) else (0, 0)


def _error_text(driver: Any, code: int) -> str:
    """Return name and description of a driver error."""
    try:
        result = driver.CUresult(code)
        name, text = driver.cuGetErrorName(result)[1], driver.cuGetErrorString(result)[1]
        return f"{text.decode()} ({name.decode()}, {code})"
    except (ValueError, AttributeError, RuntimeError):
        return f"error {code}"


def _info(driver: Any, index: int) -> DeviceInfo:
    handle = _ok(driver, driver.cuDeviceGet(index))
    attribute = driver.CUdevice_attribute

    def get(name: str) -> int:
        which = getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(_ok(driver, driver.cuDeviceGetAttribute(which, handle)))

    name = bytes(_ok(driver, driver.cuDeviceGetName(256, handle))).split(b"\0")[0].decode(errors="replace").strip()
    return DeviceInfo(
        index=index,
        name=name,
        cc=(get("COMPUTE_CAPABILITY_MAJOR"), get("COMPUTE_CAPABILITY_MINOR")),
        n_sm=get("MULTIPROCESSOR_COUNT"),
        total_bytes=int(_ok(driver, driver.cuDeviceTotalMem(handle))),
        shared_limit=get("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        l2_bytes=get("L2_CACHE_SIZE"),
        driver=_driver_version(driver),
    )


def _ok(driver: Any, result: tuple[Any, ...]) -> Any:
    """Return the value of a call that does not depend on queued work; raise CudaError."""
    code = int(result[0])
    if code:
        raise CudaError(f"the NVIDIA driver failed: {_error_text(driver, code)}")
    return result[1] if len(result) > 1 else None


def _launch_text(launch: Launch | str) -> str:
    if isinstance(launch, str):
        return launch
    args = [a.item() if isinstance(a, np.generic) else a for a in launch.args]
    return f"{launch.kernel} grid {launch.grid} block {launch.block} shared {launch.shared} args {args}"


def devices() -> list[DeviceInfo]:
    """Return all GPUs this process may use, including too old ones; raise DriverMissing, NoDevice, DriverTooOld."""
    driver = _bindings()
    found = [_info(driver, i) for i in range(int(_ok(driver, driver.cuDeviceGetCount())))]
    if not found:
        raise NoDevice("the NVIDIA driver finds no GPU")
    return found


def why_none() -> str | None:
    """Explain in one sentence why no GPU can be used; None if one can."""
    try:
        found = devices()
        if not any(d.cc >= MIN_CC for d in found):
            _check_cc(found[0])
    except CudaError as e:
        return str(e)
    return None


def _check_cc(info: DeviceInfo) -> None:
    if info.cc < MIN_CC:
        raise DeviceTooOld(
            f"{info.name} has compute capability {info.cc[0]}.{info.cc[1]}; {MIN_CC[0]}.{MIN_CC[1]} or newer is needed "
            "(Ampere, Ada, Hopper, Blackwell)"
        )


def open_device(index: int = 0) -> CudaDevice:
    """Return the GPU of that number; raise CudaError with the reason if it cannot be used."""
    found = devices()
    if not 0 <= index < len(found):
        raise NoDevice(f"there is no GPU {index}; the driver shows {len(found)}")
    _check_cc(found[index])
    return CudaDevice(_bindings(), found[index])


@dataclass(slots=True)
class _Kernel:
    """A loaded function with reused memory for its arguments, which the driver copies during the launch call."""

    handle: Any
    facts: KernelFacts
    shared: int
    types: tuple[type, ...]
    pack: struct.Struct
    words: Any = None
    pointers: Any = None
    address: int = 0

    @classmethod
    def of(cls, handle: Any, facts: KernelFacts) -> _Kernel:
        types = facts.types
        self = cls(
            handle, facts, 0, tuple(_TYPES[t] for t in types), struct.Struct("<" + "".join(_PACK[t] for t in types))
        )
        self.words = (ctypes.c_uint64 * max(len(types), 1))()
        start = ctypes.addressof(self.words)
        self.pointers = (ctypes.c_void_p * max(len(types), 1))(*(start + 8 * i for i in range(len(types))))
        self.address = ctypes.addressof(self.pointers)
        return self


@dataclass(slots=True)
class _State:
    """The resources to give back."""

    memory: dict[int, DeviceMemory] = field(default_factory=dict)
    pinned: dict[int, Pinned] = field(default_factory=dict)
    modules: dict[str, Any] = field(default_factory=dict)
    streams: list[Any] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    graphs: list[Any] = field(default_factory=list)


class CudaDevice:
    """One GPU (see device.Device). Any thread may call it, one at a time; memory and streams belong to it."""

    def __init__(self, driver: Any, info: DeviceInfo, package: Package | None = None) -> None:
        self._driver, self._info = driver, info
        self._package = package or Package.installed()
        self._sync = os.environ.get("IK_CUDA_SYNC", "") not in ("", "0")
        self._kernels: dict[str, _Kernel] = {}
        self._ring: deque[Launch | str] = deque(maxlen=_RING)
        self._recorded: list[Callable[[], None]] | None = None  # what is captured, where IK_CUDA_SYNC is set
        self._state = _State()
        self._lost = False
        self._device = _ok(driver, driver.cuDeviceGet(info.index))
        self._context = _ok(driver, driver.cuDevicePrimaryCtxRetain(self._device))
        self._enter()

    @property
    def info(self) -> DeviceInfo:
        return self._info

    # ---- calls and errors

    def _enter(self) -> None:
        """Make this thread use this GPU."""
        if getattr(_current, "device", None) is not self:
            _ok(self._driver, self._driver.cuCtxSetCurrent(self._context))
            _current.device = self

    def _call(self, function: Any, *args: Any) -> Any:
        """Return the result of a driver function; raise what its error means."""
        self._enter()
        try:
            result = function(*args)
        except RuntimeError as e:  # cuda-bindings: the driver lacks the function
            raise DriverTooOld(f"the NVIDIA driver is too old: {e}") from e
        code = int(result[0])
        if code:
            raise self._failure(code, function.__name__)
        return result[1] if len(result) > 1 else None

    def _queue(self, function: Any, *args: Any) -> None:
        """Call now, or keep for later: with IK_CUDA_SYNC a graph is a list of calls, so that each can be waited for."""
        if self._recorded is not None:
            self._recorded.append(functools.partial(self._call, function, *args))
        else:
            self._call(function, *args)

    def _failure(self, code: int, what: str) -> CudaError:
        text = _error_text(self._driver, code)
        if code == _OUT_OF_MEMORY and what.startswith("cuGraph"):
            return NoGraphMemory(f"{self._info.name}: no memory for a captured graph ({what})")
        if code in _NO_KERNEL:
            return DriverTooOld(f"the driver refuses the kernels, {_NO_KERNEL[code]}: {text}")
        if code not in _STICKY:
            return CudaError(f"{self._info.name}: {what} failed: {text}")
        self._lost = True
        hint = "" if self._sync else "; IK_CUDA_SYNC=1 shows which launch it was"
        lines = [f"a kernel failed on {self._info.name}: {text}{hint}; the last launches, newest first:"]
        lines += [f"  {_launch_text(x)}" for x in reversed(self._ring)]
        return LaunchFailed("\n".join(lines))

    # ---- memory

    def alloc(self, n_bytes: int, owner: str) -> DeviceMemory:
        self._enter()
        code, pointer = self._driver.cuMemAlloc(max(n_bytes, ALIGNMENT))
        if int(code) == _OUT_OF_MEMORY:
            free, total = self.memory()
            raise OutOfMemory(self._info.name, owner, n_bytes, free, total, self.owners())
        if int(code):
            raise self._failure(int(code), "cuMemAlloc")
        memory = DeviceMemory(int(pointer), n_bytes, owner)
        self._state.memory[memory.address] = memory
        return memory

    def free(self, memory: DeviceMemory) -> None:
        self._call(self._driver.cuMemFree, memory.address)
        del self._state.memory[memory.address]

    def pinned(self, n_bytes: int, owner: str) -> Pinned:
        self._enter()
        code, pointer = self._driver.cuMemHostAlloc(max(n_bytes, ALIGNMENT), self._driver.CU_MEMHOSTALLOC_PORTABLE)
        if int(code) == _OUT_OF_MEMORY:
            raise CudaError(f"the system refuses {n_bytes / 2**20:.0f} MiB of pinned memory for {owner} (ulimit -l?)")
        if int(code):
            raise self._failure(int(code), "cuMemHostAlloc")
        address = int(pointer)
        memory = Pinned(np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(address)), address, owner)
        self._state.pinned[address] = memory
        return memory

    def free_pinned(self, memory: Pinned) -> None:
        self._call(self._driver.cuMemFreeHost, memory.address)
        del self._state.pinned[memory.address]

    def register(self, address: int, n_bytes: int) -> bool:
        self._enter()
        flags = self._driver.CU_MEMHOSTREGISTER_PORTABLE | self._driver.CU_MEMHOSTREGISTER_READ_ONLY
        return not int(self._driver.cuMemHostRegister(address, n_bytes, flags)[0])

    def unregister(self, address: int) -> None:
        self._call(self._driver.cuMemHostUnregister, address)

    def memory(self) -> tuple[int, int]:
        self._enter()
        code, free, total = self._driver.cuMemGetInfo()
        if int(code):
            raise self._failure(int(code), "cuMemGetInfo")
        return int(free), int(total)

    def owners(self) -> dict[str, int]:
        table: dict[str, int] = {}
        for memory in self._state.memory.values():
            table[memory.owner] = table.get(memory.owner, 0) + memory.n_bytes
        return table

    # ---- streams and events

    def stream(self, urgent: bool = False) -> Stream:
        flag = int(self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        priority = _URGENT if urgent else 0
        self._state.streams.append(self._call(self._driver.cuStreamCreateWithPriority, flag, priority))
        return self._state.streams[-1]

    def free_stream(self, stream: Stream) -> None:
        self._call(self._driver.cuStreamDestroy, stream)
        self._state.streams = [s for s in self._state.streams if s is not stream]

    def event(self, timing: bool = False) -> Event:
        flags = self._driver.CUevent_flags
        flag = int(flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING)
        self._state.events.append(self._call(self._driver.cuEventCreate, flag))
        return self._state.events[-1]

    def free_event(self, event: Event) -> None:
        self._call(self._driver.cuEventDestroy, event)
        self._state.events = [e for e in self._state.events if e is not event]

    def record(self, stream: Stream, event: Event) -> None:
        self._queue(self._driver.cuEventRecord, event, stream)

    def wait(self, stream: Stream, event: Event) -> None:
        self._queue(self._driver.cuStreamWaitEvent, stream, event, 0)

    def done(self, event: Event) -> bool:
        self._enter()
        code = int(self._driver.cuEventQuery(event)[0])
        if code not in (0, _NOT_READY):
            raise self._failure(code, "cuEventQuery")
        return code == 0

    def elapsed(self, start: Event, stop: Event) -> float:
        return float(self._call(self._driver.cuEventElapsedTime, start, stop))

    def synchronize(self, stream: Stream | None = None) -> None:
        if stream is None:
            self._call(self._driver.cuCtxSynchronize)
        else:
            self._call(self._driver.cuStreamSynchronize, stream)

    # ---- copies

    def upload(self, stream: Stream, address: int, array: npt.NDArray[Any]) -> None:
        if not array.flags.c_contiguous:
            raise ValueError("upload of an array that is not contiguous")
        self._queue(self._driver.cuMemcpyHtoDAsync, address, array.ctypes.data, array.nbytes, stream)

    def download(self, stream: Stream, array: npt.NDArray[Any], address: int) -> None:
        if not array.flags.c_contiguous or not array.flags.writeable:
            raise ValueError("download into an array that is not contiguous and writeable")
        self._queue(self._driver.cuMemcpyDtoHAsync, array.ctypes.data, address, array.nbytes, stream)

    def copy(self, stream: Stream, target: int, source: int, n_bytes: int) -> None:
        self._queue(self._driver.cuMemcpyDtoDAsync, target, source, n_bytes, stream)

    def fill(self, stream: Stream, address: int, value: int, n_bytes: int) -> None:
        self._queue(self._driver.cuMemsetD8Async, address, value, n_bytes, stream)

    # ---- kernels

    def prepare(self, kernels: dict[str, int]) -> None:
        for name, shared in kernels.items():
            self._kernel(name, shared)

    def _kernel(self, name: str, shared: int) -> _Kernel:
        """Return the loaded kernel, opted in to that much dynamic shared memory."""
        kernel = self._kernels.get(name)
        if kernel is None:
            facts = self._package.kernel(name)
            module = self._state.modules.get(facts.file)
            if module is None:
                image = self._package.ptx(facts.file) + b"\0"
                module = self._call(self._driver.cuModuleLoadData, image)
                self._state.modules[facts.file] = module
            handle = self._call(self._driver.cuModuleGetFunction, module, name.encode())
            kernel = self._kernels[name] = _Kernel.of(handle, facts)
        if shared > kernel.shared:
            if shared + kernel.facts.static_shared > self._info.shared_limit:
                raise CudaError(
                    f"kernel {name} needs {shared + kernel.facts.static_shared} bytes of shared memory; "
                    f"{self._info.name} has {self._info.shared_limit}"
                )
            which = self._driver.CUfunction_attribute
            largest = which.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call(self._driver.cuFuncSetAttribute, kernel.handle, largest, shared)
            if shared >= _MUCH_SHARED:  # not L1: as many blocks per SM as registers allow
                carveout = which.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
                self._call(self._driver.cuFuncSetAttribute, kernel.handle, carveout, 100)
            kernel.shared = shared
        return kernel

    def launch(self, stream: Stream, launch: Launch) -> None:
        kernel = self._kernel(launch.kernel, launch.shared)
        if tuple(map(type, launch.args)) != kernel.types:
            got = ", ".join(type(a).__name__ for a in launch.args)
            want = ", ".join(t.__name__ for t in kernel.types)
            raise TypeError(f"kernel {launch.kernel} takes ({want}), got ({got})")
        if self._recorded is not None:
            self._recorded.append(functools.partial(self.launch, stream, launch))
            return
        kernel.pack.pack_into(kernel.words, 0, *launch.args)
        self._ring.append(launch)
        (x, y, z), shared = launch.grid, launch.shared
        call = self._driver.cuLaunchKernel
        self._call(call, kernel.handle, x, y, z, launch.block, 1, 1, shared, stream, kernel.address, 0)
        if self._sync:
            self.synchronize(stream)

    # ---- graphs

    def capture(self, stream: Stream, work: Callable[[], None]) -> Graph:
        if self._sync:
            calls: list[Callable[[], None]] = []
            self._recorded = calls
            try:
                work()
            finally:
                self._recorded = None
            return calls
        driver = self._driver
        self._call(driver.cuStreamBeginCapture, stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        try:
            work()
        except BaseException:
            code, graph = driver.cuStreamEndCapture(stream)
            if not int(code):
                driver.cuGraphDestroy(graph)
            raise
        graph = self._call(driver.cuStreamEndCapture, stream)
        try:
            executable = self._call(driver.cuGraphInstantiate, graph, 0)
        finally:
            driver.cuGraphDestroy(graph)
        self._state.graphs.append(executable)
        return executable

    def replay(self, stream: Stream, graph: Graph) -> None:
        if self._sync:
            for call in graph:
                call()
            return
        self._ring.append("a captured graph")
        self._call(self._driver.cuGraphLaunch, graph, stream)

    def free_graph(self, graph: Graph) -> None:
        if self._sync:
            return
        self._call(self._driver.cuGraphExecDestroy, graph)
        self._state.graphs = [g for g in self._state.graphs if g is not graph]

    # ---- end

    def close(self) -> None:
        driver, state = self._driver, self._state
        if not self._lost:  # after a failed kernel every call fails, and the process is about to end
            with suppress(CudaError):
                self.synchronize()
            self._quietly(driver.cuGraphExecDestroy, state.graphs)
            self._quietly(driver.cuEventDestroy, state.events)
            self._quietly(driver.cuStreamDestroy, state.streams)
            self._quietly(driver.cuMemFree, state.memory)
            self._quietly(driver.cuMemFreeHost, state.pinned)
            self._quietly(driver.cuModuleUnload, state.modules.values())
        self._state, self._kernels = _State(), {}
        if self._context is not None:
            _current.device = None
            driver.cuDevicePrimaryCtxRelease(self._device)
            self._context = None

    def _quietly(self, function: Any, things: Iterable[Any]) -> None:
        for thing in things:
            with suppress(CudaError):
                self._call(function, thing)
