"""Read the memory use of this process from the system, without third-party packages."""

from __future__ import annotations

import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def rss_hwm_mib() -> float | None:
    """Return the peak resident memory in MiB, None if the system does not tell."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024.0
    except OSError:
        pass
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024.0 * 1024.0 if sys.platform == "darwin" else 1024.0) if peak else None


def no_vram() -> float | None:
    """Return None: machines without a GPU have no VRAM to report."""
    return None
