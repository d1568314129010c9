"""`ik version` and `--version`: print the version; with -v also the environment it runs in."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

from ikcli.cli.help import version_line
from ikcli.hostinfo import cpu_flags, physical_cores, visible_cpus
from ikcli.settings.tools import VersionConfig

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
