"""Plan the splits of a GPU without the GPU: planning needs only its attributes."""

from __future__ import annotations

from typing import Any, cast

from ikcli.backends.cuda.device import Device as CudaDevice
from ikcli.backends.cuda.device import DeviceInfo
from ikcli.engine.plan.devices import GpuFacts
from ikcli.engine.run.gpu_device import GpuDevice

DEFAULT_CAPABILITY = (8, 9)
_KIB, _MIB = 2**10, 2**20

# Compute capability -> (multiprocessors, shared memory of a block, L2 cache) of its largest common card.
_CARDS = {
    (8, 0): (108, 163 * _KIB, 40 * _MIB),
    (8, 6): (84, 99 * _KIB, 6 * _MIB),
    (8, 9): (128, 99 * _KIB, 72 * _MIB),
    (9, 0): (132, 227 * _KIB, 50 * _MIB),
    (10, 0): (148, 227 * _KIB, 126 * _MIB),
    (12, 0): (170, 99 * _KIB, 96 * _MIB),
}


class _PaperDevice:
    """A device of which only the attributes are known, which is enough for planning."""

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info

    def stream(self, urgent: bool = False) -> Any:
        return None


def described_info(gpu: GpuFacts) -> DeviceInfo:
    """Return the attributes of a described GPU: those of the newest known card up to its compute capability."""
    cc = gpu.capability or DEFAULT_CAPABILITY
    n_sm, shared, l2 = _CARDS[max((known for known in _CARDS if known <= cc), default=min(_CARDS))]
    return DeviceInfo(int(gpu.name.removeprefix("CUDA")), gpu.name, cc, n_sm, gpu.total, shared, l2, (13, 0))


def planning_device(gpu: GpuFacts) -> GpuDevice:
    """Return the GPU of a session that can plan but not run."""
    return GpuDevice(cast(CudaDevice, _PaperDevice(gpu.info or described_info(gpu))))
