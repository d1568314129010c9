"""The CPUs of this process and their instruction sets: physical cores in its affinity mask and quota, never SMT.

Reads /sys/devices/system/cpu/*/topology and the cgroup files of Linux. On Apple processors only the performance cores
count. Elsewhere it falls back to the logical count. On Linux efficiency cores count: work goes to cores as they get
free, so slow ones take less of it.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from itertools import pairwise
from pathlib import Path

_CPU_ROOT = Path("/sys/devices/system/cpu")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_SLOW = 0.8  # of the capacity of the fastest core
_MEMINFO = Path("/proc/meminfo")


def visible_cpus() -> set[int]:
    """Return the logical CPUs in the affinity mask of this process."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def cgroup_limit(root: Path = _CGROUP_ROOT) -> int | None:
    """Return the CPUs of the cgroup quota, rounded up, or None without a limit (v2 `cpu.max`, v1 `cpu.cfs_*`)."""
    try:
        quota, period = (root / "cpu.max").read_text().split()[:2]
    except (OSError, ValueError):
        try:
            quota = (root / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None
    return max(1, math.ceil(int(quota) / int(period)))


def count_physical(cpus: set[int], root: Path = _CPU_ROOT) -> int:
    """Return the number of distinct (package, core) pairs among the logical `cpus`."""
    cores: set[tuple[str, str]] = set()
    for cpu in cpus:
        topology = root / f"cpu{cpu}" / "topology"
        try:
            package = (topology / "physical_package_id").read_text().strip()
            cores.add((package, (topology / "core_id").read_text().strip()))
        except OSError:
            return len(cpus)
    return len(cores)


def efficiency_cpus(cpus: set[int], root: Path = _CPU_ROOT) -> set[int]:
    """Return those of the logical CPUs that belong to slower cores of a mixed processor; empty if all are alike.

    Linux lists the efficiency cores of Intel processors in `cpu_atom` and gives the cores of ARM processors a capacity.
    """
    slow: set[int] = set()
    for name in ("cpu_atom", "cpu_lowpower"):
        try:
            slow |= cpus & parse_cpulist((root.parents[1] / name / "cpus").read_text())
        except (OSError, IndexError, ValueError):
            continue
    if slow:
        return slow if slow != cpus else set()
    capacity = {}
    for cpu in cpus:
        try:
            capacity[cpu] = int((root / f"cpu{cpu}" / "cpu_capacity").read_text())
        except (OSError, ValueError):
            return set()
    return {cpu for cpu, n in capacity.items() if n < _SLOW * max(capacity.values())}


def parse_cpulist(text: str) -> frozenset[int]:
    """Parse a CPU list such as `0-3,8,10-11`; raise ValueError for anything else."""
    cpus: set[int] = set()
    for piece in filter(None, text.strip().split(",")):
        first, dash, last = piece.partition("-")
        cpus.update(range(int(first), int(last if dash else first) + 1))
    return frozenset(cpus)


def performance_count(cpus: set[int], root: Path = _CPU_ROOT) -> int:
    """Return the number of cores that are not efficiency cores."""
    return count_physical(cpus - efficiency_cpus(cpus, root), root)


def shares(n: int, cpus: set[int] | None = None, root: Path = _CPU_ROOT) -> list[frozenset[int]]:
    """Divide the CPUs of this process between n others: whole cores, neighbours together.

    If there are fewer cores than processes, none of them gets a share.
    """
    cores: dict[tuple[int, int], set[int]] = {}
    for cpu in visible_cpus() if cpus is None else cpus:
        topology = root / f"cpu{cpu}" / "topology"
        try:
            place = tuple(int((topology / name).read_text()) for name in ("physical_package_id", "core_id"))
        except (OSError, ValueError):
            place = (0, cpu)
        cores.setdefault((place[0], place[1]), set()).add(cpu)
    ordered = [cores[place] for place in sorted(cores)]
    if len(ordered) < n:
        return [frozenset()] * n
    bounds = [i * len(ordered) // n for i in range(n + 1)]
    return [frozenset().union(*ordered[low:high]) for low, high in pairwise(bounds)]


def sysctl(name: str) -> int | None:
    """Return a number that macOS reports under this name, or None."""
    if sys.platform != "darwin":
        return None
    import ctypes

    value, size = ctypes.c_int64(), ctypes.c_size_t(8)
    by_name = ctypes.CDLL(None).sysctlbyname
    failed = by_name(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return None if failed else value.value


def first_level_bytes(root: Path = _CPU_ROOT) -> int | None:
    """Return the size of the first data cache of a core, or None if the system does not report it."""
    if sys.platform == "darwin":
        return sysctl("hw.perflevel0.l1dcachesize") or sysctl("hw.l1dcachesize")
    for cache in root.glob("cpu0/cache/index*"):
        try:
            level, kind, size = ((cache / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        if (level, kind) == ("1", "Data") and size.endswith("K"):
            return int(size[:-1]) << 10
    return None


def performance_cores() -> int | None:
    """Return the fast cores of an Apple processor, or None on others.

    Efficiency cores would hold up the others where all work in step, and macOS gives threads no place of their own.
    """
    return sysctl("hw.perflevel0.logicalcpu") or None


@functools.cache
def physical_cores() -> int:
    """Return the physical cores that this process can use, at least 1: the default of `-t`."""
    cores = performance_cores() or count_physical(visible_cpus())
    limit = cgroup_limit()
    return max(1, min(cores, limit) if limit is not None else cores)


def cpu_flags(path: str = "/proc/cpuinfo") -> list[str]:
    """Return the instruction sets that matter for the kernels, by their Linux names; empty elsewhere."""
    wanted = ("f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "asimddp", "i8mm")
    try:
        with open(path, encoding="utf-8") as file:
            line = next((line for line in file if line.lower().startswith(("flags", "features"))), "")
    except OSError:
        return []
    present = set(line.partition(":")[2].split())
    return [flag for flag in wanted if flag in present]


def cgroup_memory_room(root: Path = _CGROUP_ROOT, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Return the bytes that the cgroups of this process may still use, or None without a limit (v2 and v1).

    The page cache of the cgroup counts as free, because it gives way.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    rooms = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        names = ("memory.max", "memory.current", "inactive_file", "active_file")
        folder = root / path.lstrip("/")
        if controllers == "memory":
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
            folder = root / "memory" / path.lstrip("/")
        elif controllers:
            continue
        top = root / "memory" if controllers else root
        for place in (folder, *(p for p in folder.parents if p == top or top in p.parents)):
            room = _room(place, *names)
            if room is not None:
                rooms.append(room)
    return min(rooms, default=None)


def _room(folder: Path, limit_name: str, used_name: str, *cached: str) -> int | None:
    try:
        limit, used = ((folder / name).read_text().strip() for name in (limit_name, used_name))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if not limit.isdigit() or int(limit) > 1 << 60:
        return None
    return max(int(limit) - int(used) + sum(int(stat.get(name, 0)) for name in cached), 0)


def available_memory(path: Path = _MEMINFO) -> int | None:
    """Return the bytes of RAM available to new programs, or None where the system does not report them.

    The limit of a cgroup (a container, a service) counts.
    """
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
            room = cgroup_memory_room() if path == _MEMINFO else None
            return free if room is None else min(free, room)
    return None
