"""Results of measurements as `ik report` uses them, independent of the program and format they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ikcli.bench.sweep_read import SpeedTable


@dataclass(frozen=True, slots=True)
class RunEnvironment:
    """The environment of a result, as far as its source names it; `facts` are for readers (machine, program, ...)."""

    facts: Mapping[str, str] = field(default_factory=dict)
    model_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """The fields common to all results: name in plots and tables, where it was found, what it ran on.

    `named`: the user gave the name, so that results of one name are measurements of one thing.
    """

    label: str
    source: str
    line: int
    environment: RunEnvironment
    named: bool


@dataclass(frozen=True, slots=True)
class SpeedRun(Result):
    """A table of sweep-bench or batched-bench."""

    table: SpeedTable


@dataclass(frozen=True, slots=True)
class BenchRow(Result):
    """One test of bench: mean and deviation in tokens per second."""

    test: str
    speed: float
    deviation: float
    settings: str = ""


@dataclass(frozen=True, slots=True)
class Compared(Result):
    """A result of `ik bench --compare`: the speed of a side relative to another, with its 95 % interval."""

    test: str
    side: str
    base: str
    ratio: float
    low: float
    high: float | None
    n_rounds: int
    commands: tuple[str, str]
    warnings: str


@dataclass(frozen=True, slots=True)
class Quality(Result):
    """A perplexity, or the statistics of a KL divergence: name -> (value, error or None)."""

    values: Mapping[str, tuple[float, float | None]]
    n_chunks: int | None = None
    n_ctx: int | None = None


@dataclass(frozen=True, slots=True)
class TypeErrors(Result):
    """The error of a type on a tensor, or on all of them (`tensor` empty); `relative` is RMSE over RMS."""

    type: str
    tensor: str
    bpw: float | None
    rmse: float
    relative: float | None
    largest: float | None


@dataclass(frozen=True, slots=True)
class Problem:
    """A line that looks like a result and cannot be parsed."""

    source: str
    line: int
    text: str
    reason: str


@dataclass(slots=True)
class Results:
    """Everything found, in the order of the sources."""

    speeds: list[SpeedRun] = field(default_factory=list)
    bench: list[BenchRow] = field(default_factory=list)
    compared: list[Compared] = field(default_factory=list)
    qualities: list[Quality] = field(default_factory=list)
    types: list[TypeErrors] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def all(self) -> list[Result]:
        """Return all results of all kinds."""
        return [*self.speeds, *self.bench, *self.compared, *self.qualities, *self.types]
