"""The memory a run can use: GPUs and RAM of this machine, or those that `--device-spec` describes.

`free` is the memory available to the buffers of the run. `CONTEXT_BYTES` are subtracted for a described GPU: the
driver's context and our kernels take them. A real GPU reports its free memory once the context exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ikcli.backends.cuda.device import CudaError, DeviceInfo
from ikcli.backends.cuda.device import Device as CudaDevice
from ikcli.hostinfo import available_memory
from ikcli.settings.records import DeviceSpec
from ikcli.settings.run import RunConfig

CONTEXT_BYTES = 512 * 2**20
"""CUDA context, loaded kernels and their local memory. An estimate: drivers take 300 to 600 MiB."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Speeds per second (None: not described): operations of products, bytes over the bus or from RAM."""

    ops: float | None = None
    bandwidth: float | None = None


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """A GPU: its name `CUDA<i>`, and its total and free bytes.

    `info` belongs to a real GPU; a described GPU may have a compute capability. `rates`: what its description says of
    its speed.
    """

    name: str
    total: int
    free: int
    capability: tuple[int, int] | None = None
    info: DeviceInfo | None = None
    rates: Rates = Rates()


@dataclass(frozen=True, slots=True)
class Machine:
    """The GPUs in order and the RAM available to programs (None where the system does not report it)."""

    gpus: tuple[GpuFacts, ...] = ()
    ram: int | None = None
    described: bool = False
    cpu_rates: Rates = Rates()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(gpu.name for gpu in self.gpus)

    @property
    def free(self) -> tuple[int, ...]:
        return tuple(gpu.free for gpu in self.gpus)


def find_machine(config: RunConfig, *, exact: bool) -> Machine:
    """Return the machine to plan for: the one that `--device-spec` describes, else this one.

    `exact`: ask every GPU for its free memory, which opens it. Otherwise all of its memory counts as free.
    """
    if config.device_spec:
        return described_machine(config.device_spec, available_memory())
    from ikcli.engine.run import gpus

    if not gpus.wanted(config):
        return Machine((), available_memory())
    return Machine(_opened(config) if exact else _listed(config), available_memory())


def _opened(config: RunConfig) -> tuple[GpuFacts, ...]:
    from ikcli.engine.run import gpus

    devices = gpus.open_devices(config)
    found = opened_gpus(devices)
    for device in devices.values():
        device.close()
    return found


def opened_gpus(devices: Mapping[str, CudaDevice]) -> tuple[GpuFacts, ...]:
    """Return the memory that opened GPUs report."""
    found = []
    for name, device in devices.items():
        free, total = device.memory()
        found.append(GpuFacts(name, total, free, device.info.cc, device.info))
    return tuple(found)


def _listed(config: RunConfig) -> tuple[GpuFacts, ...]:
    from ikcli.backends.cuda import driver
    from ikcli.engine.run import gpus

    if not gpus.driver_present():
        return ()
    try:
        infos = [info for info in driver.devices() if info.cc >= driver.MIN_CC]
    except CudaError:
        return ()
    found = [GpuFacts(f"CUDA{i.index}", i.total_bytes, i.total_bytes, i.cc, i) for i in infos]
    return tuple(device for device in found if not config.device or device.name in config.device)


def described_machine(specs: tuple[DeviceSpec, ...], ram: int | None) -> Machine:
    """Return the machine that a `--device-spec` describes; `ram` applies if the spec names no host memory."""
    gpus = [spec for spec in specs if spec.kind == "cuda"]
    host = next((spec for spec in specs if spec.kind == "cpu"), DeviceSpec("cpu", ram or 0))
    devices = tuple(
        GpuFacts(f"CUDA{i}", spec.n_bytes, max(spec.n_bytes - CONTEXT_BYTES, 0), spec.capability, rates=_rates(spec))
        for i, spec in enumerate(gpus)
    )
    return Machine(devices, host.n_bytes or ram, True, _rates(host))


def _rates(spec: DeviceSpec) -> Rates:
    return Rates(spec.ops, spec.bandwidth)
