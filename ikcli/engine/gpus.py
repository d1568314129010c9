"""The GPUs of a session: which are opened, where tensors go, and the runner that follows from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ikcli.backends.cuda import upload
from ikcli.backends.cuda.device import CudaError, Device, DriverMissing, NoDevice, Pinned
from ikcli.backends.cuda.transfer import is_plain
from ikcli.config import RunConfig
from ikcli.engine.cpu_device import CpuDevice
from ikcli.engine.model import Model
from ikcli.engine.placement import Placement, offload_threshold, place
from ikcli.engine.run_device import CPU, Bytes, RunDevice
from ikcli.engine.runner import Offload, Runner
from ikcli.graph import Node, Rows, Weight
from ikcli.graph.ops_experts import MoeUpGate, MulMatId
from ikcli.graph.ops_rows import MulMat, MulMatHeads
from ikcli.graph.split import Places
from ikcli.log import warn

_POLICIES = {op.policy: op.by_expert for op in (MulMat, MulMatHeads, MulMatId, MoeUpGate)}
OUTPUT, EMBEDDING = "output.weight", "token_embd.weight"
_NODES = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/proc/driver/nvidia/version"))
"""One of them is there where there is a driver (the second in WSL)."""


def driver_present() -> bool:
    """Whether the kernel has a GPU driver; nothing is loaded to find out."""
    return any(path.exists() for path in _NODES)


def wanted(config: RunConfig) -> bool:
    """Whether a GPU would be used if there is one."""
    return config.n_gpu_layers != 0 or any(not rule.strip().endswith(f"={CPU}") for rule in config.override_tensor)


def _asked(config: RunConfig) -> bool:
    """Whether the user wrote an option that is about GPUs."""
    rules = any(not rule.strip().endswith(f"={CPU}") for rule in config.override_tensor)
    return bool(config.n_gpu_layers or rules or config.device or config.tensor_split)


def open_devices(config: RunConfig) -> dict[str, Device]:
    """The GPUs of this machine that the settings allow, by name, opened; empty without any.

    Nobody who did not ask for a GPU hears why there is none.
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


def make_runner(config: RunConfig, model: Model, n_threads: int, cpus: Sequence[frozenset[int]] | None) -> Runner:
    """What the session computes with. With `-rtr`, tensors for GPUs are not repacked."""
    cpu = CpuDevice(n_threads, cpus)
    devices = open_devices(config) if wanted(config) else {}
    if not devices:
        return Runner(cpu)
    placement = place_model(config, model, devices)
    model.keep_plain([name for name, buffer in placement.buffer_of.items() if buffer != CPU])
    used = {*placement.buffer_of.values(), *placement.cache}
    others: dict[str, RunDevice] = {name: _part(device) for name, device in devices.items() if name in used}
    for name in devices.keys() - used:
        devices[name].close()
    if not others:
        return Runner(cpu)
    runner = Runner(cpu, others, places_of(placement), offload_of(config, model, placement))
    runner.allocate = _PinnedMemory(devices[next(iter(others))])
    return runner


class _PinnedMemory:
    """Hand-over memory: one piece at a time, the last one is given back first."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last: Pinned | None = None

    def __call__(self, n_bytes: int) -> Bytes:
        if self._last is not None:
            self._device.free_pinned(self._last)
        self._last = self._device.pinned(n_bytes, "hand-over")
        return self._last.array


def _part(device: Device) -> RunDevice:
    from ikcli.engine.gpu_device import GpuDevice

    return GpuDevice(device)


def place_model(config: RunConfig, model: Model, devices: Mapping[str, Device]) -> Placement:
    """Where every tensor goes, derived ones included."""
    free = [device.memory()[0] for device in devices.values()]
    return place(list(model.specs), model.hp.n_layer, config, list(devices), free, sources=model.derived_from())


def offload_of(config: RunConfig, model: Model, placement: Placement) -> Offload | None:
    """From how many tokens on products with weights of blocks in RAM are computed on a GPU (`-op`)."""
    hp, allowed = model.hp, dict.fromkeys(_POLICIES, True)
    for name, on in config.offload_policy:
        allowed |= dict.fromkeys(allowed, on) if name == "ALL" else {name: on}
    dense = config.offload_min_batch
    by_expert = math.ceil(offload_threshold(dense, hp.n_expert, hp.n_expert_used))
    least = {name: by_expert if experts else dense for name, experts in _POLICIES.items() if allowed[name]}
    first = placement.devices[0]

    def device(node: Node, w: Weight, n_tokens: int) -> str | None:
        if n_tokens < least.get(node.op.policy, n_tokens + 1) or node.rows.symbol is Rows.OUTPUTS or not _streamable(w):
            return None
        home = placement.home[node.il] if node.il >= 0 else CPU
        return first if home == CPU else home

    return Offload(tuple(sorted({*least.values()} - {0, 1})), device) if least else None


def _streamable(w: Weight) -> bool:
    """Whether rows of this type are rearranged on the device: on the CPU that would take longer than the product."""
    return w.type in upload.FORMATS and is_plain(w)


def places_of(placement: Placement) -> Places:
    """Devices of nodes. A model without an output matrix multiplies with its embeddings where the output would be."""
    places = placement.places()
    output = placement.split.output

    def weight(node: Node, w: Weight) -> str:
        if w.name == EMBEDDING and isinstance(node.op, MulMat):
            return CPU if output < 0 else placement.devices[output]
        return places.weight(node, w)

    return replace(places, weight=weight)
