"""Compare programs or settings in interleaved rounds until their speed ratio is known well enough.

Every round runs each side once, in a random order that the next round reverses. Sides are compared within a round, so
slow changes of the machine cancel out. The result is the mean of the logarithms of these ratios, with a Student's t
interval.
"""

from __future__ import annotations

import math
import os
import random
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ikcli.bench.disturbance import Disturbance, Watch
from ikcli.errors import IkError, UsageError
from ikcli.report.read import read_output
from ikcli.report.results import Results

LEAST_ROUNDS = 3  # rounds before an interval is trusted
_NAME = re.compile(r"([\w.+-]+)=(?=\S)")
# two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: a name and the whole command."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SideRun:
    """One run of a side: tokens per second by test, and other activity of the machine."""

    side: Side
    speeds: dict[str, float]
    disturbance: Disturbance


@dataclass(frozen=True, slots=True)
class Ratio:
    """The speed of a side relative to the first one in a test: geometric mean, 95 % interval, and all speeds."""

    test: str
    side: str
    base: str
    ratio: float
    low: float
    high: float
    speeds: tuple[float, ...]
    base_speeds: tuple[float, ...]

    @property
    def precision(self) -> float:
        """Half of the interval, relative to the ratio."""
        return (self.high - self.low) / 2 / self.ratio if math.isfinite(self.high) else math.inf


@dataclass(slots=True)
class BenchComparison:
    """The sides and all complete rounds."""

    sides: Sequence[Side]
    rounds: list[dict[str, SideRun]] = field(default_factory=list)

    def ratios(self) -> list[Ratio]:
        """Return the ratio of every side except the first in every test that all sides have."""
        base, *others = self.sides
        out: list[Ratio] = []
        for test in self.tests():
            base_speeds = [r[base.name].speeds[test] for r in self.rounds]
            for side in others:
                speeds = [r[side.name].speeds[test] for r in self.rounds]
                logs = [math.log(x / y) for x, y in zip(speeds, base_speeds, strict=True)]
                mean, half = interval(logs)
                out.append(
                    Ratio(test, side.name, base.name, math.exp(mean), math.exp(mean - half) if half < 700 else 0.0,
                          math.exp(mean + half) if half < 700 else math.inf, tuple(speeds), tuple(base_speeds))
                )  # fmt: skip
        return out

    def tests(self) -> list[str]:
        """Return the tests of all runs, in the order of the first one."""
        runs = [run.speeds for r in self.rounds for run in r.values()]
        return [test for test in (runs[0] if runs else {}) if all(test in speeds for speeds in runs)]

    def left_out(self) -> list[str]:
        """Return the tests that only some runs have."""
        known = set(self.tests())
        runs = [run.speeds for r in self.rounds for run in r.values()]
        return list(dict.fromkeys(test for speeds in runs for test in speeds if test not in known))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half of its 95 % interval; infinite for a single value."""
    mean = statistics.fmean(values)
    n = len(values)
    if n < 2:
        return mean, math.inf
    df = n - 1
    t = _T95[df - 1] if df <= len(_T95) else 1.96 + 2.4 / df
    return mean, t * statistics.stdev(values) / math.sqrt(n)


def parse_sides(texts: Sequence[str], common: Sequence[str]) -> list[Side]:
    """Parse `[NAME=]OPTIONS` of this program's bench, or `[NAME=]COMMAND`; both get the common options.

    If there is one side, the common options alone are the other, first one.
    """
    sides = [_side(text, common) for text in (["", *texts] if len(texts) == 1 else texts)]
    names = [side.name for side in sides]
    doubled = [name for name in names if names.count(name) > 1]
    if doubled:
        raise UsageError(f'--compare: two sides are called "{doubled[0]}"; name them: --compare NAME=...')
    return sides


def _side(text: str, common: Sequence[str]) -> Side:
    found = _NAME.match(text)
    body = text[found.end() :] if found else text
    try:
        words = shlex.split(body)
    except ValueError as problem:
        raise UsageError(f'--compare: "{text}" cannot be split into words: {problem}') from None
    name = found[1] if found else body.strip() or "as given"
    if not words or words[0].startswith("-"):
        words = ["ik", "bench", *words]
    program = Path(words[0]).name
    if program == "ik":
        started = [sys.executable, "-m", "ikcli"] if words[0] == "ik" else [_program(words[0], text)]
        if len(words) < 2:
            raise UsageError(f'--compare: "{text}" names no command of ik, for example: ik bench')
        forms = ["-o", "json"] if words[1] == "bench" else []
        return Side(name, (*started, words[1], *common, *words[2:], *forms))
    forms = ["-o", "json"] if program.removesuffix(".exe") == "llama-bench" else []
    return Side(name, (_program(words[0], text), *common, *words[1:], *forms))


def _program(word: str, text: str) -> str:
    found = shutil.which(word)
    if found is None:
        raise UsageError(f'--compare: "{text}": program {word} was not found')
    return found


def run_side(side: Side) -> SideRun:
    """Run a side once; IkError with the end of its output if it fails or prints no speed."""
    with Watch() as watch:
        try:
            done = subprocess.run(side.command, capture_output=True, text=True, errors="replace", check=False)
        except OSError as problem:
            raise IkError(f"{shlex.join(side.command)}: cannot be started ({problem.strerror or problem})") from None
    for text in (done.stdout, done.stderr):
        speeds = speeds_of(read_output(text, side.name))
        if speeds and done.returncode == 0:
            return SideRun(side, speeds, watch.found)
    tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
    what = "printed no speed" if done.returncode == 0 else f"ended with exit code {done.returncode}"
    raise IkError(f'side "{side.name}" {what}: {shlex.join(side.command)}\n{tail}')


def speeds_of(results: Results) -> dict[str, float]:
    """Return tokens per second by test: tests of bench by name, of sweep-bench and batched-bench by row."""
    out = {row.test: row.speed for row in results.bench}
    for run in results.speeds:
        for r in run.table.rows:
            where = f"{r.n_kv}" if run.table.kind == "sweep" else f"{r.pp}+{r.tg}x{r.n_seq}"
            for phase, speed in (("pp", r.speed_pp), ("tg", r.speed_tg)):
                if speed:
                    out[f"{phase}@{where}"] = speed
    return {test: speed for test, speed in out.items() if speed > 0}


def compare(
    sides: Sequence[Side], rounds: int, precision: float, *, warmup: bool = True, seed: int | None = None,
    run: Callable[[Side], SideRun] = run_side,
) -> Iterator[BenchComparison]:  # fmt: skip
    """Yield the comparison after every round, until all intervals are narrow enough or after `rounds`."""
    rng = random.Random(seed)
    found = BenchComparison(sides)
    for side in sides if warmup else ():
        run(side)
    order = list(sides)
    for index in range(rounds):
        if index % 2 == 0:
            rng.shuffle(order)
        else:
            order.reverse()
        done = {side.name: run(side) for side in order}
        found.rounds.append({side.name: done[side.name] for side in sides})
        if not found.tests():
            raise IkError(f"the sides have no test in common: {'; '.join(_tests(r) for r in done.values())}")
        yield found
        if len(found.rounds) >= LEAST_ROUNDS and all(r.precision <= precision for r in found.ratios()):
            return


def _tests(run: SideRun) -> str:
    return f"{run.side.name} has {', '.join(run.speeds)}"


def n_cpus() -> int:
    """Return the number of processors of the machine, as counted by /proc/stat."""
    return os.cpu_count() or 1
