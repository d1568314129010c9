"""Facts that decide how fast a model runs here: processors, memory, limits, pages, clocks, kernel cache.

They are read from files of Linux; None where a system does not tell. Nothing is measured here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ikcli.bench.environment import cpu_name, memory_bytes
from ikcli.engine.run.numa import read_nodes
from ikcli.engine.run.system_memory import memlock_limit, thp_state
from ikcli.hostinfo import (
    cgroup_limit,
    count_physical,
    efficiency_cpus,
    parse_cpulist,
    physical_cores,
    visible_cpus,
)

_FEATURES = ("f16c", "fma", "avx2", "avxvnni", "avx512f", "avx512vnni", "avx512vbmi", "avx512bf16", "gfni", "amx-int8",
             "neon", "dotprod", "i8mm", "bf16")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Processor:
    """The processor; `kernels` tells which instructions are used for what.

    Counts: logical CPUs of the machine, those this process may use, physical cores among them, efficiency cores among
    these, and the limit of a cgroup.
    """

    name: str | None
    target: str
    features: tuple[str, ...]
    kernels: tuple[tuple[str, str], ...]
    installed: int
    visible: int
    physical: int
    quota: int | None
    threads: int
    governors: tuple[str, ...]
    driver: str | None
    efficiency: int = 0

    @property
    def smt(self) -> bool:
        return self.visible > self.physical


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A NUMA node: its CPUs that this process may use, and bytes of its memory."""

    number: int
    cpus: int
    memory: int | None


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Bytes; `limit` is that of a cgroup, `locked` how much may be locked (-1: no limit)."""

    total: int | None
    available: int | None
    limit: int | None
    locked: int
    swap_used: int | None
    huge_pages: str
    nodes: tuple[NumaNode, ...]
    balancing: bool | None


@dataclass(frozen=True, slots=True)
class KernelCache:
    """Compiled kernels: those of this target, and files of others (other processors, versions or sources)."""

    path: str
    writable: bool
    n_files: int
    n_bytes: int
    stale_folders: int
    stale_bytes: int
    free: int | None


@dataclass(frozen=True, slots=True)
class Roots:
    """Where the system exposes its state."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")

    @property
    def cgroup(self) -> Path:
        return self.sys / "fs/cgroup"


def processor(roots: Roots | None = None) -> Processor:
    """Return name, instructions and their use, numbers of cores, and clock policy."""
    from ikcli.native import isa

    roots = roots or Roots()
    target, visible = isa.current(), visible_cpus()
    cpu_root = roots.sys / "devices/system/cpu"
    governors, driver = _governors(cpu_root, visible)
    return Processor(
        name=cpu_name(roots.proc / "cpuinfo"),
        target=target.name,
        features=tuple(f for f in _FEATURES if f in target.features),
        kernels=tuple(kernel_choice(target.name, target.features)),
        installed=os.cpu_count() or 1,
        visible=len(visible),
        physical=count_physical(visible, cpu_root),
        quota=cgroup_limit(roots.cgroup),
        threads=physical_cores(),
        governors=governors,
        driver=driver,
        efficiency=count_physical(efficiency_cpus(visible, cpu_root), cpu_root),
    )


def kernel_choice(target: str, features: frozenset[str]) -> list[tuple[str, str]]:
    """Return (operation, instructions) for the matrix products, which take most of the time."""
    if {"avx512vnni"} <= features:
        integers = "AVX-512 VNNI, 64 bytes at a time"
    elif "avxvnni" in features:
        integers = "AVX-VNNI, 32 bytes at a time"
    elif "avx2" in features:
        integers = "AVX2 without VNNI: several instructions per product"
    elif "i8mm" in features:
        integers = "NEON with matrix products (i8mm), 2 x 2 x 8 bytes at a time"
    elif "dotprod" in features:
        integers = "NEON with dot products, 16 bytes at a time"
    elif "neon" in features:
        integers = "NEON without dot products: several instructions per product"
    else:
        integers = "no vector instructions that kernels know: slow"
    floats = "AVX-512" if target == "avx512" else "AVX2 and FMA" if "fma" in features else target
    floats = "NEON" if "neon" in features else floats
    widened = f"widened to float32 ({floats})"
    bf16 = "AVX-512 BF16" if "avx512bf16" in features else widened
    bf16 = "NEON with products of bfloat16" if "bf16" in features else bf16
    f16 = f"16-bit integers in prompts, else {widened}" if "avx2" in features else widened
    return [("quantized weights", integers), ("bf16 weights", bf16), ("f16 weights", f16), ("f32 weights", floats)]


def _governors(root: Path, cpus: set[int]) -> tuple[tuple[str, ...], str | None]:
    found: set[str] = set()
    driver = None
    for cpu in sorted(cpus):
        folder = root / f"cpu{cpu}" / "cpufreq"
        try:
            found.add((folder / "scaling_governor").read_text().strip())
            driver = (folder / "scaling_driver").read_text().strip()
        except OSError:
            continue
    return tuple(sorted(found)), driver


def memory(roots: Roots | None = None) -> MachineMemory:
    """Return the size of RAM and swap, the limits on it, its page sizes and its NUMA nodes."""
    roots = roots or Roots()
    info = _meminfo(roots.proc / "meminfo")
    limit = _cgroup_memory(roots.cgroup)
    total = memory_bytes(roots.proc / "meminfo")
    swap = info.get("SwapTotal"), info.get("SwapFree")
    return MachineMemory(
        total=total,
        available=info.get("MemAvailable"),
        limit=limit if limit is not None and (total is None or limit < total) else None,
        locked=memlock_limit(),
        swap_used=swap[0] - swap[1] if swap[0] is not None and swap[1] is not None else None,
        huge_pages=thp_state(roots.sys / "kernel/mm/transparent_hugepage/enabled"),
        nodes=tuple(_nodes(roots.sys / "devices/system/node")),
        balancing=_balancing(roots.proc / "sys/kernel/numa_balancing"),
    )


def _nodes(root: Path) -> list[NumaNode]:
    visible = visible_cpus()
    out: list[NumaNode] = []
    for number, cpus in read_nodes(root).items():
        info = _meminfo(root / f"node{number}" / "meminfo", skip=2)
        out.append(NumaNode(number, len(cpus & visible), info.get("MemTotal")))
    return out


def _meminfo(path: Path, skip: int = 0) -> Mapping[str, int]:
    """Return bytes by name; lines of nodes begin with `Node 0`."""
    out: dict[str, int] = {}
    try:
        for line in path.read_text().splitlines():
            words = line.split()[skip:]
            if len(words) >= 2 and words[1].isdigit():
                out[words[0].rstrip(":")] = int(words[1]) * (1024 if words[2:] == ["kB"] else 1)
    except OSError:
        pass
    return out


def _cgroup_memory(root: Path) -> int | None:
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (root / name).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None


def _balancing(path: Path) -> bool | None:
    try:
        return path.read_text().strip() not in ("", "0")
    except OSError:
        return None


def kernel_cache() -> KernelCache:
    """Return where compiled kernels are kept, and what is there."""
    from ikcli.native.kernel_cache import cache_dir, cache_root

    here, root = cache_dir(), cache_root()
    files, n_bytes = _contents(here)
    others = [_contents(folder) for folder in (root.iterdir() if root.is_dir() else ()) if folder != here]
    stale = [n for count, n in others if count]
    existing = next((p for p in (here, *here.parents) if p.is_dir()), here)
    try:
        free: int | None = shutil.disk_usage(existing).free
    except OSError:
        free = None
    return KernelCache(str(here), os.access(existing, os.W_OK), files, n_bytes, len(stale), sum(stale), free)


def _contents(folder: Path) -> tuple[int, int]:
    """Return the number of kernels and their bytes on disk; hard links of one file count once."""
    sizes: dict[tuple[int, int], int] = {}
    try:
        for entry in os.scandir(folder):
            if entry.name.endswith(".kernel") and entry.is_file(follow_symlinks=False):
                stat = entry.stat(follow_symlinks=False)
                sizes[stat.st_dev, stat.st_ino] = stat.st_size
    except OSError:
        pass
    return len(sizes), sum(sizes.values())


def l3_bytes(root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return the bytes of all last-level caches together, 0 where the system does not tell."""
    seen: dict[frozenset[int], int] = {}
    for cpu in visible_cpus():
        folder = root / f"cpu{cpu}" / "cache" / "index3"
        try:
            size = (folder / "size").read_text().strip()
            shared = parse_cpulist((folder / "shared_cpu_list").read_text())
            seen[shared] = int(size.rstrip("KM")) * {"K": 2**10, "M": 2**20}.get(size[-1:], 1)
        except (OSError, ValueError):
            continue
    return sum(seen.values())
