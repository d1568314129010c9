"""The default of `-t`: all cores, unless `ik doctor` measured that fewer threads read memory faster.

Generation reads all weights for every token. On some machines the last threads (second threads of cores, efficiency
cores, cores behind a saturated memory controller) slow the others down. `ik doctor` measures bandwidth over threads and
keeps it in the user's cache folder; prompts, which compute, use all cores anyway.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ikcli.files import written_whole
from ikcli.hostinfo import visible_cpus

NEARLY = 0.97  # of the fastest: measurements differ by as much


def best_threads(curve: Mapping[int, float]) -> int:
    """Return the most threads that read nearly as fast as any number of them."""
    return max(n for n, rate in curve.items() if rate >= NEARLY * max(curve.values()))


def curve_file() -> Path:
    """Return the file that keeps what was measured, by the CPUs that a process may use."""
    from ikcli.native.kernel_cache import cache_root

    return cache_root().parent / "threads.json"


def remember(curve: Mapping[int, float], path: Path | None = None) -> bool:
    """Keep bytes per second by number of threads for runs on these CPUs; return whether the file could be written."""
    path = path or curve_file()
    kept = _read(path) | {_here(): {str(n): rate for n, rate in curve.items()}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as temporary:
            temporary.write_text(json.dumps(kept, indent=1))
    except OSError:
        return False
    return True


def remembered(path: Path | None = None) -> dict[int, float]:
    """Return the curve measured on the CPUs of this process; empty if there is none."""
    found = _read(path or curve_file()).get(_here(), {})
    try:
        return {int(n): float(rate) for n, rate in found.items() if float(rate) > 0 and int(n) > 0}
    except (AttributeError, TypeError, ValueError):
        return {}


def _read(path: Path) -> dict[str, dict[str, float]]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _here() -> str:
    return ",".join(map(str, sorted(visible_cpus())))
