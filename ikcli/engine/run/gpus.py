"""The GPUs of this machine: find them, choose those that the settings want, and open them for a session."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ikcli.backends.cuda.device import CudaError, Device, DriverMissing, NoDevice, Pinned
from ikcli.engine.plan.placement import CPU
from ikcli.engine.run.run_device import Bytes, RunDevice
from ikcli.engine.run.runner import Runner
from ikcli.log import warn
from ikcli.settings.run import RunConfig

_NODES = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/proc/driver/nvidia/version"))
"""One of these exists if there is a driver (the second in WSL)."""


def driver_present() -> bool:
    """Return whether the kernel has a GPU driver, without loading anything."""
    return any(path.exists() for path in _NODES)


def wanted(config: RunConfig) -> bool:
    """Return whether a GPU would be used if there is one."""
    return config.n_gpu_layers != 0 or any(not rule.strip().endswith(f"={CPU}") for rule in config.override_tensor)


def _asked(config: RunConfig) -> bool:
    """Return whether the user gave an option about GPUs."""
    rules = any(not rule.strip().endswith(f"={CPU}") for rule in config.override_tensor)
    return bool(config.n_gpu_layers or rules or config.device or config.tensor_split)


def open_devices(config: RunConfig) -> dict[str, Device]:
    """Open the GPUs of this machine that the settings allow; return them by name, or nothing if there are none.

    Only a user who asked for a GPU is told why there is none.
    """
    if not _asked(config) and not driver_present():
        return {}
    from ikcli.backends.cuda import driver

    try:
        found = driver.devices()
        names = {f"CUDA{info.index}": info for info in found if info.cc >= driver.MIN_CC}
        if not names:
            raise NoDevice(str(driver.why_none()))
        return {n: driver.open_device(i.index) for n, i in names.items() if not config.device or n in config.device}
    except (DriverMissing, NoDevice):
        return {}
    except CudaError as error:
        if _asked(config):
            warn(f"no GPU is used: {error}")
        return {}


def hand_over(runner: Runner, devices: Mapping[str, Device]) -> None:
    """Close the GPUs that a runner does not use, and let the others pass values through pinned memory."""
    for name, device in devices.items():
        if name not in runner.parts:
            device.close()
    first = next((device for name, device in devices.items() if name in runner.parts), None)
    if first is not None:
        runner.allocate = _PinnedMemory(first)


class _PinnedMemory:
    """Allocates hand-over memory: one piece at a time; a new piece frees the last one."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last: Pinned | None = None

    def __call__(self, n_bytes: int) -> Bytes:
        if self._last is not None:
            self._device.free_pinned(self._last)
        self._last = self._device.pinned(n_bytes, "hand-over")
        return self._last.array


def run_device(device: Device) -> RunDevice:
    """Return a GPU in the form that the runner uses."""
    from ikcli.engine.run.gpu_device import GpuDevice

    return GpuDevice(device)
