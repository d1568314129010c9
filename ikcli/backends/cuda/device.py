"""The interface of a device: `driver.CudaDevice` on a GPU; the tests have an emulated and a recording one.

Addresses are plain integers. Copies, fills and launches are queued on a stream. They are done when the stream, or an
event recorded after them, is done; until then the host must not touch the arrays involved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ikcli.errors import IkError

ALIGNMENT = 256  # of every allocation

Stream: TypeAlias = Any  # opaque: made by Device.stream()
Event: TypeAlias = Any  # made by Device.event()
Graph: TypeAlias = Any  # made by Device.capture()
Argument: TypeAlias = int | np.int32 | np.float32


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: `block` threads (x only), `shared` bytes of dynamic shared memory.

    args: int for 64-bit integers and addresses, np.int32 and np.float32 for the others, as the kernel declares them.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: int
    shared: int
    args: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Facts that kernels and plans depend on; sizes in bytes."""

    index: int
    name: str
    cc: tuple[int, int]  # compute capability
    n_sm: int
    total_bytes: int
    shared_limit: int  # per block, after opting in
    l2_bytes: int
    driver: tuple[int, int]  # newest CUDA version the driver supports


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One allocation, counted for its owner ("weights", "KV cache", ...)."""

    address: int
    n_bytes: int
    owner: str


@dataclass(frozen=True, slots=True, eq=False)
class Pinned:
    """Host memory that the device copies from and to without staging."""

    array: npt.NDArray[np.uint8]
    address: int
    owner: str


class CudaError(IkError):
    """The GPU cannot be used, or failed."""


class DriverMissing(CudaError):
    """The NVIDIA driver, or the package to call it with, is missing."""


class NoDevice(CudaError):
    """The driver finds no GPU that this process may use."""


class DriverTooOld(CudaError):
    """The driver does not know the CUDA version that is needed."""


class DeviceTooOld(CudaError):
    """The GPU lacks what the kernels need."""


class LaunchFailed(CudaError):
    """A kernel failed; the message lists the launches before it."""


class NoGraphMemory(CudaError):
    """Memory ran out for one more captured graph; none of it was run."""


_HELP = {  # first word of an owner: what makes it smaller
    "weights": "fewer layers on the GPU (-ngl), or tensors elsewhere (-ot)",
    "KV": "a smaller context (-c) or cache type (-ctk, -ctv)",
    "compute": "a smaller micro-batch (-ub)",
    "attention": "a smaller attention buffer (-amb)",
}


class OutOfMemory(CudaError):
    """An allocation did not fit; the message lists the owners of the memory and ways to need less."""

    def __init__(self, name: str, owner: str, asked: int, free: int, total: int, owners: dict[str, int]) -> None:
        gib = 2.0**30
        self.asked, self.free, self.total, self.owners = asked, free, total, owners
        lines = [
            f"out of memory on {name}: {asked / gib:.2f} GiB wanted for {owner}, "
            f"{free / gib:.2f} of {total / gib:.2f} GiB are free"
        ]
        lines += [f"  {n / gib:8.2f} GiB {who}" for who, n in sorted(owners.items(), key=lambda x: -x[1])]
        others = total - free - sum(owners.values())
        if others > 0:
            lines.append(f"  {others / gib:8.2f} GiB other programs and the driver")
        help_of = [_HELP[w] for w in dict.fromkeys(who.split()[0] for who in [owner, *owners]) if w in _HELP]
        if help_of:
            lines.append("needing less: " + "; ".join(help_of))
        super().__init__("\n".join(lines))


class Device(Protocol):
    """One GPU."""

    @property
    def info(self) -> DeviceInfo: ...

    def alloc(self, n_bytes: int, owner: str) -> DeviceMemory:
        """Return uninitialised memory, aligned to 256 bytes; raise OutOfMemory."""

    def free(self, memory: DeviceMemory) -> None: ...

    def pinned(self, n_bytes: int, owner: str) -> Pinned: ...

    def free_pinned(self, memory: Pinned) -> None: ...

    def register(self, address: int, n_bytes: int) -> bool:
        """Let copies from these read-only whole pages of the host go without staging; return False if refused."""

    def unregister(self, address: int) -> None: ...

    def memory(self) -> tuple[int, int]:
        """Return free and total bytes of the device."""

    def owners(self) -> dict[str, int]:
        """Return the bytes allocated by owner."""

    def stream(self, urgent: bool = False) -> Stream:
        """Create a stream; blocks of an urgent one start before waiting blocks of other streams."""

    def free_stream(self, stream: Stream) -> None:
        """Free a stream, on which nothing may be queued afterwards."""

    def event(self, timing: bool = False) -> Event:
        """Create an event; `timing`: `elapsed` will be called on it."""

    def free_event(self, event: Event) -> None: ...

    def upload(self, stream: Stream, address: int, array: npt.NDArray[Any]) -> None:
        """Copy a C-contiguous array to the device."""

    def download(self, stream: Stream, array: npt.NDArray[Any], address: int) -> None:
        """Fill a C-contiguous array from the device; readable after the stream or a later event is done."""

    def copy(self, stream: Stream, target: int, source: int, n_bytes: int) -> None:
        """Copy within the device."""

    def fill(self, stream: Stream, address: int, value: int, n_bytes: int) -> None:
        """Set every byte to `value` (0..255)."""

    def launch(self, stream: Stream, launch: Launch) -> None: ...

    def record(self, stream: Stream, event: Event) -> None:
        """Record an event, which is done when everything queued so far is."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Make work queued on the stream from now on start after the event."""

    def done(self, event: Event) -> bool: ...

    def elapsed(self, start: Event, stop: Event) -> float:
        """Return the milliseconds between two events that are done."""

    def synchronize(self, stream: Stream | None = None) -> None:
        """Wait for a stream, or for everything; raise failures of queued work."""

    def capture(self, stream: Stream, work: Callable[[], None]) -> Graph:
        """Record what `work` queues on the stream, without running it. Memory used by it must outlive the graph.

        Raises NoGraphMemory when memory for it runs out.
        """

    def replay(self, stream: Stream, graph: Graph) -> None:
        """Queue a captured graph, or raise NoGraphMemory."""

    def free_graph(self, graph: Graph) -> None: ...

    def prepare(self, kernels: dict[str, int]) -> None:
        """Load kernels by name, each with the most dynamic shared memory of its launches."""

    def close(self) -> None:
        """Free everything."""
