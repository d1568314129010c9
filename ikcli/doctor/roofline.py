"""Measure the rooflines of this machine in a few seconds: multiply-adds, memory bandwidth, also of nodes and GPUs."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from ikcli.backends.cpu.peaks import OPS, product_peak, read_peak
from ikcli.backends.cuda import driver
from ikcli.backends.cuda.device import CudaError, Device
from ikcli.bench.disturbance import Watch, warnings_of
from ikcli.doctor.machine import l3_bytes
from ikcli.engine.run.numa import read_nodes
from ikcli.hostinfo import available_memory, visible_cpus

_PRODUCT_RUNS, _READ_RUNS = 6, 3
_LEAST, _MOST = 128 << 20, 1 << 30
_GPU_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class GpuPeaks:
    """Bytes per second: reads plus writes of a copy within its memory, and transfers in over PCIe."""

    name: str
    memory: float
    pcie: float


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peaks per second: multiply-adds by kind of product, and bytes read from memory.

    Bytes read by one thread, by all threads, and by all threads of a node from its memory. `problems`: failed
    measurements.
    """

    threads: int
    products: dict[str, float]
    read_one: float
    read_all: float
    read_nodes: dict[int, float]
    gpus: tuple[GpuPeaks, ...] = ()
    problems: tuple[str, ...] = ()


def measure(threads: int) -> Peaks:
    """Measure everything with `threads` threads."""
    size = _buffer_bytes()
    with Watch() as watch:
        peaks = _processor_peaks(threads, size)
    gpus, problems = _gpus()
    disturbed = [f"these are too low: {text}" for text in warnings_of([watch.found], os.cpu_count() or 1)]
    return replace(peaks, gpus=gpus, problems=(*disturbed, *problems))


def _processor_peaks(threads: int, size: int) -> Peaks:
    products = {kind: product_peak(kind, threads, repeat=_PRODUCT_RUNS) for kind in OPS}
    one = read_peak(1, size, repeat=_READ_RUNS)
    everything = read_peak(threads, size, repeat=_READ_RUNS) if threads > 1 else one
    return Peaks(threads, products, one, max(one, everything), _per_node(size))


def _buffer_bytes() -> int:
    """Return a size that exceeds the caches and does not disturb other programs."""
    available = available_memory() or 1 << 33
    return max(min(4 * l3_bytes(), _MOST, available // 4), _LEAST)


def _per_node(size: int) -> dict[int, float]:
    visible = frozenset(visible_cpus())
    nodes = {number: cpus & visible for number, cpus in read_nodes().items() if cpus & visible}
    if len(nodes) < 2:
        return {}
    return {n: read_peak(len(cpus), size, [cpus] * len(cpus), repeat=_READ_RUNS) for n, cpus in nodes.items()}


def _gpus() -> tuple[tuple[GpuPeaks, ...], tuple[str, ...]]:
    try:
        infos = [info for info in driver.devices() if info.cc >= driver.MIN_CC]
    except CudaError:
        return (), ()  # the inventory tells why
    peaks: list[GpuPeaks] = []
    problems: list[str] = []
    for info in infos:
        name = f"CUDA{info.index}"
        try:
            device = driver.open_device(info.index)
            try:
                peaks.append(measure_gpu(name, device))
            finally:
                device.close()
        except CudaError as problem:
            problems.append(f"{name}: not measured: {problem}")
    return tuple(peaks), tuple(problems)


def measure_gpu(name: str, device: Device) -> GpuPeaks:
    """Time copies within a GPU's memory, and from pinned memory of the host."""
    free, _ = device.memory()
    n = min(_GPU_BYTES, free // 4) // 256 * 256
    source, target, host = device.alloc(n, "doctor"), device.alloc(n, "doctor"), device.pinned(n, "doctor")
    stream = device.stream()
    start, stop = device.event(timing=True), device.event(timing=True)
    try:
        best = {"copy": float("inf"), "upload": float("inf")}
        for _ in range(4):
            for what in best:
                device.record(stream, start)
                if what == "copy":
                    device.copy(stream, target.address, source.address, n)
                else:
                    device.upload(stream, target.address, host.array)
                device.record(stream, stop)
                device.synchronize(stream)
                best[what] = min(best[what], device.elapsed(start, stop) / 1e3)
        return GpuPeaks(name, 2 * n / max(best["copy"], 1e-9), n / max(best["upload"], 1e-9))
    finally:
        for event in (start, stop):
            device.free_event(event)
        device.free_stream(stream)
        device.free_pinned(host)
        for memory in (source, target):
            device.free(memory)
