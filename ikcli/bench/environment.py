"""Describe what a measurement ran on: processor, memory, system, program versions, model file. Plain JSON values.

Reads /proc on Linux and the platform module elsewhere; None where the system does not tell.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ikcli
from ikcli.gguf.types import TYPES
from ikcli.hostinfo import physical_cores, visible_cpus

if TYPE_CHECKING:
    from ikcli.gguf.reader import GGUFFile

_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")
_PACKAGES = ("numpy", "numba", "llvmlite")


def describe(session: object) -> dict[str, Any]:
    """Return `hardware`, `software` and `model_file` (None for a session without a file)."""
    file = getattr(getattr(session, "model", None), "file", None)
    return {
        "hardware": hardware(),
        "software": software(),
        "model_file": None if file is None else model_file(file),
    }


def hardware() -> dict[str, Any]:
    """Return CPU name, cores usable by this process, the instruction set of the kernels, and bytes of memory."""
    from ikcli.native import isa

    return {
        "cpu": cpu_name(),
        "physical_cores": physical_cores(),
        "logical_cpus": len(visible_cpus()),
        "logical_cpus_installed": os.cpu_count(),
        "isa": isa.current().name,
        "isa_cpu": isa.current().cpu,
        "memory_bytes": memory_bytes(),
    }


def software() -> dict[str, str | None]:
    """Return the operating system and the versions of ik, Python and the packages that compute."""
    versions: dict[str, str | None] = {
        "os": platform.platform(),
        "ik": ikcli.__version__,
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def model_file(file: GGUFFile) -> dict[str, Any]:
    """Return name, architecture, bytes and weights of all tensors, and tensor counts by type in order of type ids."""
    counts = Counter(tensor.type for tensor in file.tensors.values())
    return {
        "file": file.paths[0].name,
        "parts": len(file.paths),
        "name": str(file.get("general.name", "")),
        "architecture": str(file.get("general.architecture", "")),
        "tensor_bytes": file.n_bytes,
        "n_params": file.n_elements,
        "types": {traits.name: counts[type_id] for type_id, traits in TYPES.items() if counts[type_id]},
    }


def cpu_name(path: Path = _CPUINFO) -> str | None:
    """Return the name that the processor reports."""
    try:
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip().lower() in ("model name", "cpu model") and value.strip():
                return " ".join(value.split())
    except OSError:
        pass
    return platform.processor() or platform.machine() or None


def memory_bytes(path: Path = _MEMINFO) -> int | None:
    """Return the bytes of installed memory."""
    try:
        for line in path.read_text().splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
