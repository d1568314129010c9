"""Plot sweep-bench runs: tokens per second over the depth of the cache (N_KV), with panels for prompts and generation.

Rows of the same label and depth are averaged and drawn with their standard deviation. Matplotlib is an optional
dependency, imported when something is drawn; its Agg canvas needs no display.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ikcli.bench.sweep_read import SpeedRow
from ikcli.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_TICKS = 16
DEFAULT_PREFIX = "performance_comparison"
SUFFIXES = (".png", ".svg", ".pdf")
_PHASES = {"pp": "PP: prompt tokens per second", "tg": "TG: generated tokens per second"}
_STYLES = ("-", "--", ":", "-.")
_COLORS = 10


@dataclass(frozen=True, slots=True)
class Point:
    """Mean and standard deviation in tokens per second of `n` measurements at one depth."""

    n_kv: int
    mean: float
    std: float
    n: int


@dataclass(frozen=True, slots=True)
class Series:
    """The two curves of one label, by depth."""

    label: str
    pp: tuple[Point, ...]
    tg: tuple[Point, ...]


def group(runs: Iterable[tuple[str, Sequence[SpeedRow]]]) -> list[Series]:
    """Return one series per label in order of appearance; runs with the same label are merged."""
    rows: dict[str, list[SpeedRow]] = {}
    for label, found in runs:
        rows.setdefault(label, []).extend(found)
    return [
        Series(
            label,
            _points((row.n_kv, row.speed_pp) for row in members),
            _points((row.n_kv, row.speed_tg) for row in members),
        )
        for label, members in rows.items()
    ]


def _points(values: Iterable[tuple[int, float | None]]) -> tuple[Point, ...]:
    by_depth: dict[int, list[float]] = {}
    for n_kv, value in values:
        if value is not None:
            by_depth.setdefault(n_kv, []).append(value)
    return tuple(
        Point(n_kv, statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else 0.0, len(found))
        for n_kv, found in sorted(by_depth.items())
    )


def ticks(deepest: int) -> list[int]:
    """Return at most MAX_TICKS multiples of a power of two, from 0 on, that cover the depths."""
    step = 1
    while deepest // step >= MAX_TICKS:
        step *= 2
    return list(range(0, deepest + 1, step))


def check_output(path: Path) -> None:
    """Raise before anything is measured if `path` cannot become a plot: wrong suffix, missing folder or library."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{path}: a plot needs a file name that ends in .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: the folder {path.parent} does not exist")
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError('plots need matplotlib, which is not installed: pip install "ikcli[plot]"')


def new_figure(path: Path, width: float, height: float) -> Figure:
    """Return an empty figure, in inches, that can be saved to `path`; see `check_output` for what is raised."""
    check_output(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw(series: Sequence[Series], path: Path, phases: Sequence[str] = ("pp", "tg")) -> None:
    """Write one figure with a panel per phase ("pp", "tg"); see `check_output` for what is raised."""
    figure = new_figure(path, 10, 1.2 + 4.2 * len(phases))
    panels = figure.subplots(len(phases), 1, sharex=True, squeeze=False)[:, 0]
    for axes, phase in zip(panels, phases, strict=True):
        _panel(axes, series, phase)
    panels[-1].set_xlabel("N_KV: tokens in the cache")
    deepest = max((p.n_kv for s in series for points in (s.pp, s.tg) for p in points), default=0)
    panels[-1].set_xticks(ticks(deepest))
    handles, labels = panels[0].get_legend_handles_labels()
    longest = max((len(label) for label in labels), default=1)
    columns = max(1, min(4, 110 // (longest + 10), len(labels)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    figure.savefig(path, dpi=120)


def draw_pair(series: Sequence[Series], prefix: str) -> tuple[Path, Path]:
    """Write PREFIX_pp.png and PREFIX_tg.png and return the two paths."""
    paths = Path(f"{prefix}_pp.png"), Path(f"{prefix}_tg.png")
    for path, phase in zip(paths, ("pp", "tg"), strict=True):
        draw(series, path, (phase,))
    return paths


def _panel(axes: Axes, series: Sequence[Series], phase: str) -> None:
    for index, each in enumerate(series):
        points: tuple[Point, ...] = getattr(each, phase)
        look: dict[str, Any] = {
            "color": f"C{index % _COLORS}",
            "linestyle": _STYLES[index // _COLORS % len(_STYLES)],
            "marker": "o",
            "markersize": 3.5,
            "capsize": 3,
        }
        # A label that begins with "_" would be left out of the legend, "$" would be read as a formula.
        label = each.label.replace("$", r"\$")
        label = f" {label}" if label.startswith("_") else label
        spread = [p.std for p in points] if any(p.std for p in points) else None
        axes.errorbar([p.n_kv for p in points], [p.mean for p in points], yerr=spread, label=label, **look)
    axes.set_ylabel("tokens/s")
    axes.set_title(_PHASES[phase])
    axes.set_ylim(bottom=0)
    axes.grid(True, alpha=0.3)
