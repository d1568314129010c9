"""`ik version` and `--version`: what is installed; with -v also the environment it runs in."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

from ikcli.commands._help import version_line
from ikcli.config_tools import VersionConfig
from ikcli.hostinfo import physical_cores, visible_cpus

_PACKAGES = ("numpy", "numba", "llvmlite", "gguf", "tokenizers", "typer", "rich", "jinja2")


def run(config: VersionConfig) -> int:
    """Print the version."""
    print_version(config.verbose)
    return 0


def print_version(verbose: bool) -> None:
    """Print the version line, and with `verbose` Python, packages and CPU."""
    print(version_line())
    if not verbose:
        return
    print(f"python {sys.version.split()[0]} on {platform.system()} {platform.machine()}")
    print(f"cpu: {physical_cores()} physical cores, {len(visible_cpus())} logical CPUs visible")
    flags = cpu_flags()
    if flags:
        print(f"instruction sets: {' '.join(flags)}")
    for package in _PACKAGES:
        try:
            print(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            print(f"{package} not installed")


def cpu_flags(path: str = "/proc/cpuinfo") -> list[str]:
    """Instruction sets that matter for the kernels, as Linux names them; empty elsewhere."""
    wanted = ("f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "asimddp", "i8mm")
    try:
        with open(path, encoding="utf-8") as file:
            line = next((line for line in file if line.lower().startswith(("flags", "features"))), "")
    except OSError:
        return []
    present = set(line.partition(":")[2].split())
    return [flag for flag in wanted if flag in present]
