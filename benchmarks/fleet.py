"""What dividing work costs and gains: each command with 1, 2 and 4 workers of half a core each, and the cost of a task.

    python benchmarks/fleet.py [COMMAND...] [--workers 1,2,4] [--share 0.5] [--long 1] [--ray ADDRESS]

Workers are kept to their share of a core by stopping them when they have used it, so the ratios also hold on a machine
with few cores. One worker works in the process of the command, which is then kept to that share itself. `ratio` is of
the whole command, start and end included; `steady` of the units after the first ones, when all workers are at work.
A cost is the time that an empty task takes with a result of some size, which is kept in a journal.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ikcli.fleet.choose import executor
from ikcli.fleet.executor import Executor, LocalExecutor, ProcessExecutor
from ikcli.fleet.journal import Journal
from ikcli.fleet.units import map_units
from ikcli.settings.run import default_model, default_text

_TICK = 0.01  # seconds
_TICKS = os.sysconf("SC_CLK_TCK")
_SIZES = (100, 1 << 20, 16 << 20)
_COSTS = "costs"
_PRESETS = ("IQ3_K", "IQ2_KT", "IQ4_K", "Q4_K_S", "IQ2_K", "IQ3_KT", "IQ5_K", "Q3_K_M", "IQ4_KS", "IQ4_KT", "Q6_K")
_TYPES = "q4_K,iq2_k,iq3_k,iq4_k,iq5_k,iq6_k,iq4_ks,iq2_kt"


# --- commands ---------------------------------------------------------------------------------------------------------
def text(room: Path, n: int) -> str:
    """Write a file with n characters of the bundled text, repeated."""
    path, whole = room / f"text-{n}.txt", default_text().read_text("utf-8")
    path.write_text((whole * (1 + n // len(whole)))[:n], "utf-8")
    return str(path)


def perplexity(room: Path, long: float) -> list[str]:
    return ["perplexity", "-f", text(room, int(120_000 * long)), "-c", "512", "-b", "512"]


def divergence(room: Path, long: float) -> list[str]:
    words, base = ["perplexity", "-f", text(room, int(80_000 * long)), "-c", "512", "-b", "512"], room / "base.kld"
    if not base.exists():
        ik([*words, "--kl-divergence-base", str(base)])
    return [*words, "--kl-divergence-base", str(base), "--kl-divergence", "-ctk", "q8_0"]


def imatrix(room: Path, long: float) -> list[str]:
    return [
        "imatrix",
        "-f",
        text(room, int(120_000 * long)),
        "-c",
        "512",
        "-o",
        str(room / "i.gguf"),
        "-ofreq",
        "999999",
    ]


def quantize(room: Path, long: float) -> list[str]:
    lines = [f"{name}\n" for name in _PRESETS[: max(1, int(4 * long))]]
    (room / "list.txt").write_text("".join(lines))
    return ["quantize", "--allow-requantize", "--ignore-imatrix-rules", "--matrix", str(room / "list.txt"),
            str(default_model()), str(room / "out")]  # fmt: skip


def stats(room: Path, long: float) -> list[str]:
    return ["quantize-stats", "--rows", str(int(512 * long)), "--types", _TYPES]


def calibrate(room: Path, long: float) -> list[str]:
    words = ["quantize", "--target-bpw", "5", "--target-rows", "16", "--calibrate", text(room, 12_000)]
    words += ["--calibrate-chunks", str(max(1, int(4 * long))), "--calibrate-groups", "16", "--dry-run"]
    return [*words, "--allow-requantize", str(default_model()), str(room / "unused.gguf")]


def study(room: Path, long: float) -> list[str]:
    words = ["study", "-f", text(room, 12_000), "--types", "iq3_k,q4_0", "--precision", "0", "--by", "role"]
    return [*words, "--chunks", str(max(2, int(8 * long)))]


COMMANDS: dict[str, Callable[[Path, float], list[str]]] = {
    "perplexity": perplexity,
    "kl-divergence": divergence,
    "imatrix": imatrix,
    "quantize": quantize,
    "quantize-stats": stats,
    "calibrate": calibrate,
    "study": study,
}


def ik(words: Sequence[str]) -> None:
    """Run a command to its end, without limits."""
    subprocess.run([sys.executable, "-m", "ikcli", *words, "-t", "1"], check=True, capture_output=True)


# --- shares of a core -------------------------------------------------------------------------------------------------
def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process, all threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def workers_of(pid: int) -> list[int]:
    """Return the processes that a command has started; the resource tracker among them does next to nothing."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


@dataclass
class Governor:
    """Keeps processes to a share of a core, counted from when it first saw them."""

    share: float
    _since: dict[int, tuple[float, float]] = field(default_factory=dict)
    _stopped: set[int] = field(default_factory=set)

    def tick(self, pids: Sequence[int]) -> None:
        """Stop the processes that have used their share, and continue the others."""
        now = time.monotonic()
        for pid in pids:
            with suppress(OSError):  # it has just ended
                used = cpu_seconds(pid)
                since, before = self._since.setdefault(pid, (now, used))
                over = used - before > self.share * (now - since) + _TICK
                if over != (pid in self._stopped):
                    os.kill(pid, signal.SIGSTOP if over else signal.SIGCONT)
                    (self._stopped.add if over else self._stopped.discard)(pid)

    def release(self) -> None:
        """Continue all processes."""
        for pid in self._stopped:
            with suppress(OSError):
                os.kill(pid, signal.SIGCONT)
        self._stopped.clear()


@dataclass(frozen=True)
class Measured:
    """A run: seconds, units, and units per second once all workers had one done."""

    n_workers: int
    seconds: float
    n_units: int
    rate: float


def measure(words: Sequence[str], n_workers: int, share: float, room: Path) -> Measured:
    """Run a command by workers with a share of a core each."""
    journal = room / "run.jsonl"
    for path in room.glob("run.jsonl*"):
        path.unlink()
    option = "-o" if words[0] == "study" else "--journal"
    kept = Path(f"{journal}.calibrate") if "--calibrate" in words else journal
    governor, started = Governor(share), time.monotonic()
    whole = [
        sys.executable,
        "-m",
        "ikcli",
        *words,
        "-t",
        str(n_workers),
        "--workers",
        str(n_workers),
        option,
        str(journal),
    ]
    seen: list[tuple[float, int]] = []
    with subprocess.Popen(whole, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as command:
        try:
            while command.poll() is None:
                with suppress(OSError):
                    governor.tick([command.pid] if n_workers == 1 else workers_of(command.pid))
                done = max(0, kept.read_bytes().count(b"\n") - 1) if kept.exists() else 0
                if not seen or done != seen[-1][1]:
                    seen.append((time.monotonic(), done))
                time.sleep(_TICK)
        finally:
            governor.release()
        assert command.stderr is not None
        problem = command.stderr.read().decode(errors="replace")
    if command.returncode:
        raise SystemExit(f"{' '.join(words)}\n{problem}")
    first = next(((t, n) for t, n in seen if n >= n_workers), seen[-1])
    last = seen[-1]
    rate = (last[1] - first[1]) / (last[0] - first[0]) if last[0] > first[0] else 0.0
    return Measured(n_workers, time.monotonic() - started, last[1], rate)


# --- cost of a task ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Empty:
    """Workers that return some bytes at once."""

    size: int

    def __call__(self) -> Empty:
        return self

    def do(self, unit: int) -> dict[str, Any]:
        return {"data": bytes(self.size)}

    def close(self) -> None:
        """Do nothing: no resource is held."""


def cost(work: Executor, size: int, n: int, room: Path) -> float:
    """Return the seconds per task, without the start of workers."""
    path = room / "cost.jsonl"
    units = [(str(i), i) for i in range(n + work.n_workers)]
    with Journal(path, {"kind": "cost"}) as journal, _removed(path):
        found = map_units(Empty(size), units, journal, work, ahead=4 * work.n_workers)
        for _ in range(work.n_workers):
            next(found)
        started = time.perf_counter()
        for _ in found:
            pass
        return (time.perf_counter() - started) / n


@contextmanager
def _removed(path: Path) -> Iterator[None]:
    try:
        yield
    finally:
        for left in (path, path.with_name(path.name + ".data")):
            left.unlink(missing_ok=True)


def main() -> None:
    """Measure and print two Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = f"of {', '.join(COMMANDS)}, or {_COSTS} alone; default all"
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help=known)
    parser.add_argument("--workers", default="1,2,4", help="how many")
    parser.add_argument("--share", type=float, default=0.5, help="of a core for each worker")
    parser.add_argument(
        "--long", type=float, default=1.0, help="work in each command; 1: a minute or so for one worker"
    )
    parser.add_argument("--ray", help="cost of a task on Ray too: local, auto or an address")
    parser.add_argument("--tasks", type=int, default=50, help="tasks for each cost; 0: no costs")
    args = parser.parse_args()
    unknown = [name for name in args.commands if name not in {*COMMANDS, _COSTS}]
    if unknown:
        parser.error(f"{unknown[0]}: unknown command")
    with tempfile.TemporaryDirectory() as name:
        room = Path(name)
        commands = [command for command in args.commands or COMMANDS if command != _COSTS]
        if commands:
            print("| command | workers | units | seconds | ratio | steady |\n|:---|---:|---:|---:|---:|---:|")
        for command in commands:
            words = COMMANDS[command](room, args.long)
            base: Measured | None = None
            for n in (int(n) for n in args.workers.split(",")):
                found = measure(words, n, args.share, room)
                base = base or found
                steady = f"{found.rate / base.rate:.2f}" if base.rate and found.rate else ""
                ratio = base.seconds / found.seconds
                print(
                    f"| {command} | {n} | {found.n_units} | {found.seconds:.1f} | {ratio:.2f} | {steady} |", flush=True
                )
        if args.tasks:
            _print_costs(room, args.tasks, args.ray)


def _print_costs(room: Path, n: int, ray: str | None) -> None:
    works: dict[str, Executor] = {"here": LocalExecutor()}
    works |= {"1 process": ProcessExecutor(1), "2 processes": ProcessExecutor(2)}
    if ray:
        works["Ray, 2 workers"] = executor(2, ray, 1)
    titles = " | ".join(f"{size} bytes" if size < 1 << 20 else f"{size >> 20} MiB" for size in _SIZES)
    print(f"\n| cost of a task | {titles} |\n|:---|{'---:|' * len(_SIZES)}")
    for title, work in works.items():
        costs = (f"{1e3 * cost(work, size, n, room):.2f} ms" for size in _SIZES)
        print(f"| {title} | {' | '.join(costs)} |", flush=True)


if __name__ == "__main__":
    main()
