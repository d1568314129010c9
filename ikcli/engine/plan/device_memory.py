"""Compute the memory that a planned run needs on each device."""

from __future__ import annotations

from dataclasses import dataclass

from ikcli.engine.pipeline.driver import STAGE
from ikcli.engine.plan.placement import CPU
from ikcli.engine.run.run_device import RESERVE_BYTES


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by device and part.

    `free` holds the bytes that each device can provide, where they are known. `n_ctx` is the context size of the cache.
    """

    parts: dict[str, dict[str, int]]
    n_ctx: int
    free: dict[str, int]

    def total(self, device: str) -> int:
        """Return all bytes on a device."""
        return sum(self.parts[device].values())

    def short(self, device: str, margin: int = 0) -> int:
        """Return the bytes that a device lacks: 0 if it has enough or if its memory is unknown.

        The margin of a GPU covers what it needs beside all parts, for kernels and captured graphs.
        """
        if device not in self.free:
            return 0
        if device != CPU and not device.startswith(STAGE):
            margin = max(margin, RESERVE_BYTES)
        return max(self.total(device) + margin - self.free[device], 0)

    def fits(self, margin: int = 0) -> bool:
        """Return whether every device has enough memory, and every GPU `margin` bytes more."""
        return not any(self.short(device, margin if device != CPU else 0) for device in self.parts)

    def gpus_fit(self, margin: int = 0) -> bool:
        """Return the same as `fits` for the GPUs alone."""
        return not any(self.short(device, margin) for device in self.parts if device != CPU)
