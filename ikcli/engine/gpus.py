"""The GPUs of a session: which are opened, where tensors go, and the backend that follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ikcli.backends.cpu.backend import CpuBackend
from ikcli.backends.cuda.device import CudaError, Device, DriverMissing, NoDevice
from ikcli.config import RunConfig
from ikcli.engine.hybrid import HybridBackend
from ikcli.engine.model import Model
from ikcli.engine.parts import CPU, CpuOnly, Part
from ikcli.engine.placement import Placement, place
from ikcli.graph import Node, Weight
from ikcli.graph.split import Places
from ikcli.log import warn

OUTPUT, EMBEDDING = "output.weight", "token_embd.weight"
_NODES = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/proc/driver/nvidia/version"))
"""One of them is there where there is a driver (the second in WSL)."""


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
    if not _asked(config) and not any(path.exists() for path in _NODES):
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


def make_backend(
    config: RunConfig, model: Model, n_threads: int, cpus: Sequence[frozenset[int]] | None
) -> CpuOnly | HybridBackend:
    """What the session computes with. With `-rtr`, tensors for GPUs are not repacked."""
    cpu = CpuBackend(n_threads, cpus)
    devices = open_devices(config) if wanted(config) else {}
    if not devices:
        return CpuOnly(cpu)
    placement = place_model(config, model, devices)
    model.keep_plain([name for name, buffer in placement.buffer_of.items() if buffer != CPU])
    used = {*placement.buffer_of.values(), *placement.cache}
    others: dict[str, Part] = {name: _part(device) for name, device in devices.items() if name in used}
    for name in devices.keys() - used:
        devices[name].close()
    return HybridBackend(cpu, others, places_of(placement)) if others else CpuOnly(cpu)


def _part(device: Device) -> Part:
    from ikcli.engine.gpu_part import GpuPart

    return GpuPart(device)


def place_model(config: RunConfig, model: Model, devices: Mapping[str, Device]) -> Placement:
    """Where every tensor goes, derived ones included."""
    free = [device.memory()[0] for device in devices.values()]
    return place(list(model.specs), model.hp.n_layer, config, list(devices), free, sources=model.derived_from())


def places_of(placement: Placement) -> Places:
    """Devices of nodes. A model without an output matrix multiplies with its embeddings where the output would be."""
    places = placement.places()
    output = placement.split.output

    def weight(node: Node, w: Weight) -> str:
        if w.name == EMBEDDING and node.op == "mul_mat":
            return CPU if output < 0 else placement.devices[output]
        return places.weight(node, w)

    return replace(places, weight=weight)
