"""Measure the rooflines of this machine in a few seconds: multiply-adds, memory bandwidth, also of nodes and GPUs.

Bandwidth is a median over seconds, since a burst of some reads can be twice as fast, and is measured for each kind of
memory that weights may be in: anonymous small and huge pages, and a mapped file.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ikcli.backends.cpu.peaks import OPS, product_peak, read_rates
from ikcli.backends.cuda import driver
from ikcli.backends.cuda.device import CudaError, Device
from ikcli.bench.disturbance import Watch, warnings_of
from ikcli.doctor.machine import l3_bytes
from ikcli.engine.run.numa import read_nodes
from ikcli.engine.run.system_memory import thp_state
from ikcli.engine.run.weight_memory import HUGE, Pages, reserve
from ikcli.hostinfo import available_memory, performance_count, visible_cpus

_PRODUCT_S, _READ_S = 0.15, 1.0  # of each kind of products, and of reading all kinds of memory with all threads
_CURVE_S = 0.15  # of reading with each number of threads
_ROUNDS = 3  # in which kinds of memory take turns
_LEAST, _MOST = 128 << 20, 1 << 30
_TOUCH_S = 1.0  # in which the pages of a file must come from the page cache
_GPU_BYTES = 256 << 20

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GpuPeaks:
    """Bytes per second: reads plus writes of a copy within its memory, and transfers in over PCIe."""

    name: str
    memory: float
    pcie: float


@dataclass(frozen=True, slots=True)
class ReadRates:
    """Bytes per second read by one thread and by all, as medians of seconds of reading, and the fastest pass of all."""

    one: float
    all: float
    fastest: float


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peaks per second: multiply-adds by kind of product, and bytes read from memory.

    Bytes read by one thread, by all threads, and by all threads of a node from its memory; `pages`: by kind of memory,
    of which the fastest are `read_one` and `read_all`; `by_threads`: bytes by the number of threads. `disturbed`: other
    programs were busy. `problems`: failed measurements.
    """

    threads: int
    products: dict[str, float]
    read_one: float
    read_all: float
    read_nodes: dict[int, float]
    gpus: tuple[GpuPeaks, ...] = ()
    problems: tuple[str, ...] = ()
    pages: Mapping[str, ReadRates] = field(default_factory=dict)
    by_threads: Mapping[int, float] = field(default_factory=dict)
    disturbed: bool = False


def measure(threads: int, file: Path | None = None, seconds: float = _READ_S) -> Peaks:
    """Measure everything with `threads` threads; `file` is one whose mapped pages are read, too."""
    with Watch() as watch:
        peaks = _processor_peaks(threads, file, seconds)
    gpus, problems = _gpus()
    disturbed = [f"these are too low: {text}" for text in warnings_of([watch.found], os.cpu_count() or 1)]
    return replace(peaks, gpus=gpus, problems=(*disturbed, *problems), disturbed=bool(disturbed))


def _processor_peaks(threads: int, file: Path | None, seconds: float) -> Peaks:
    products = {kind: product_peak(kind, threads, repeat=6, seconds=_PRODUCT_S) for kind in OPS}
    size = buffer_bytes()
    pages = read_pages(_kinds(size, file), threads, seconds)
    one, everything = (max(getattr(rates, name) for rates in pages.values()) for name in ("one", "all"))
    by_threads = {1: one, threads: everything} | _curve(size, threads)
    return Peaks(threads, products, one, everything, _per_node(size), pages=pages, by_threads=by_threads)


def _kinds(size: int, file: Path | None) -> dict[str, Bytes]:
    """Return memory of each kind that weights may be in; the anonymous ones are not filled."""
    kinds = {f"{mmap.PAGESIZE >> 10} KiB pages": reserve(size, Pages(huge=False))}
    if thp_state() in ("always", "madvise"):
        kinds[f"{HUGE >> 20} MiB pages"] = reserve(size, Pages())
    mapped = _mapped(file, size) if file is not None else None
    if mapped is not None:
        kinds["mapped file"] = mapped
    return kinds


def _mapped(path: Path, size: int) -> Bytes | None:
    """Map the beginning of a file; None if it is small, or not in the page cache."""
    if path.stat().st_size < _LEAST:
        return None
    with path.open("rb") as f:
        data = np.frombuffer(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)[:size]
    end, done, piece = time.perf_counter() + _TOUCH_S, 0, 1 << 24
    while done < len(data) and time.perf_counter() < end:
        data[done : done + piece : mmap.PAGESIZE].max()
        done += piece
    return data[:done] if done >= _LEAST else None


def read_pages(kinds: Mapping[str, Bytes], threads: int, seconds: float) -> dict[str, ReadRates]:
    """Read kinds of memory in turns: each about `seconds` with all threads and, if these are several, half with one."""
    rates: dict[tuple[str, int], list[float]] = {(name, n): [] for name in kinds for n in {1, threads}}
    for i in range(_ROUNDS):
        for name, data in kinds.items():
            for n in sorted({1, threads}, reverse=True):  # all threads fill it
                fill = i == 0 and n == threads and data.flags.writeable
                part = seconds / _ROUNDS / (1 if n == threads else 2)
                rates[name, n] += read_rates(data, n, fill=fill, repeat=1, seconds=part)
    return {
        name: ReadRates(
            statistics.median(rates[name, 1]), statistics.median(rates[name, threads]), max(rates[name, threads])
        )
        for name in kinds
    }


def buffer_bytes() -> int:
    """Return a size that exceeds the caches and does not disturb other programs."""
    available = available_memory() or 1 << 33
    return max(min(4 * l3_bytes(), _MOST, available // 8), _LEAST)


def _curve(size: int, threads: int) -> dict[int, float]:
    """Return bytes per second by threads between one and all: powers of two, fast cores, and most cores."""
    counts = {2**i for i in range(1, 9)} | {performance_count(visible_cpus()), 3 * threads // 4}
    between = sorted(n for n in counts if 1 < n < threads)
    if not between:
        return {}
    data = reserve(size, Pages())
    counts_in_turns = [*between, threads]  # all of them again, in the same memory and moments
    rates: dict[int, list[float]] = {n: [] for n in counts_in_turns}
    for i in range(_ROUNDS):
        for n in reversed(counts_in_turns):
            rates[n] += read_rates(data, n, fill=i == 0 and n == threads, repeat=1, seconds=_CURVE_S / _ROUNDS)
    return {n: statistics.median(found) for n, found in rates.items()}


def _per_node(size: int) -> dict[int, float]:
    visible = frozenset(visible_cpus())
    nodes = {number: cpus & visible for number, cpus in read_nodes().items() if cpus & visible}
    if len(nodes) < 2:
        return {}
    found = {}
    for n, cpus in nodes.items():
        data = reserve(size, Pages())
        found[n] = statistics.median(read_rates(data, len(cpus), cpus=[cpus] * len(cpus), seconds=_READ_S / 3))
    return found


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
