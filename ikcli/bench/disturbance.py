"""Detect other activity of this machine during a measurement: busy or stolen processors, and the clock.

Reads /proc on Linux; on other systems nothing is known or reported.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_OTHERS, _STOLEN, _CLOCK = 0.05, 0.01, 0.05  # shares of all processors and of the clock that deserve a warning
_STEP_S = 0.25


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Average activity over a period; None where the system does not tell.

    Processors kept busy by other programs, processors taken by a hypervisor, clock in MHz of the fastest processor,
    load average at the end.
    """

    others: float | None = None
    stolen: float | None = None
    clock_mhz: float | None = None
    load: float | None = None


class Watch:
    """Watches while entered; `found` afterwards. Work of this process and its finished children does not count."""

    def __init__(self, proc: Path = _PROC) -> None:
        self.found = Disturbance()
        self._proc = proc
        self._clocks: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Watch:
        self._started, self._own, self._before = time.monotonic(), _own_seconds(), _stat(self._proc)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        seconds = max(time.monotonic() - self._started, 1e-3)
        after, own = _stat(self._proc), _own_seconds() - self._own
        others = stolen = None
        if self._before is not None and after is not None:
            others = max(0.0, (after[0] - self._before[0] - own) / seconds)
            stolen = (after[1] - self._before[1]) / seconds
        clock = statistics.fmean(self._clocks) if self._clocks else None
        self.found = Disturbance(others, stolen, clock, _load(self._proc))

    def _sample(self) -> None:
        while not self._stop.wait(_STEP_S):
            clock = clock_mhz(self._proc)
            if clock is not None:
                self._clocks.append(clock)


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _stat(proc: Path) -> tuple[float, float] | None:
    """Return the seconds that all processors together were busy, and stolen."""
    try:
        words = (proc / "stat").read_text().splitlines()[0].split()
        user, nice, system, _, _, irq, softirq, steal = (int(w) for w in words[1:9])
        tick = os.sysconf("SC_CLK_TCK")
    except (AttributeError, OSError, ValueError, IndexError):
        return None
    return (user + nice + system + irq + softirq) / tick, steal / tick


def _load(proc: Path) -> float | None:
    try:
        return float((proc / "loadavg").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def clock_mhz(proc: Path = _PROC) -> float | None:
    """Return the current clock of the fastest processor."""
    try:
        lines = (proc / "cpuinfo").read_text(errors="replace").splitlines()
        return max(float(line.partition(":")[2]) for line in lines if line.lower().startswith("cpu mhz"))
    except (OSError, ValueError):
        return None


def warnings_of(found: list[Disturbance], n_cpus: int) -> list[str]:
    """Return warnings about a series of measurements that should be alike."""
    out: list[str] = []
    others = [d.others for d in found if d.others is not None]
    if others and max(others) > max(_OTHERS * n_cpus, 0.1):
        busy = sum(o > max(_OTHERS * n_cpus, 0.1) for o in others)
        out.append(
            f"other programs kept up to {max(others):.1f} of {n_cpus} processors busy in {busy} of {len(found)} runs; "
            "stop them, or trust only large differences"
        )
    stolen = [d.stolen for d in found if d.stolen is not None]
    if stolen and max(stolen) > max(_STOLEN * n_cpus, 0.02):
        out.append(f"the hypervisor took up to {max(stolen):.2f} processors away: other guests disturb")
    clocks = [d.clock_mhz for d in found if d.clock_mhz]
    if clocks and max(clocks) > (1 + _CLOCK) * min(clocks):
        out.append(
            f"the clock changed between {min(clocks):.0f} and {max(clocks):.0f} MHz: "
            "fix the governor, let the machine cool"
        )
    return out
