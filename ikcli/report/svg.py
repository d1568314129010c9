"""Plots as SVG text for a page: lines and points with axes; the theme of the page sets the colours.

Classes: `s0` ... `s7` colour a series, `d0` ... `d3` dash it. Every point has a title that is shown on hover.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

COLORS, DASHES = 8, 4
_WIDTH, _HEIGHT = 620, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 14, 46
_DECADES = 30.0  # minimum ratio of the values for a logarithmic axis, where one is allowed


@dataclass(frozen=True, slots=True)
class Dot:
    """A point: `spread` is drawn as an error bar, `text` beside it, `title` on hover."""

    x: float
    y: float
    title: str
    spread: float = 0.0
    text: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of one colour (`index`), optionally joined by a line."""

    label: str
    dots: Sequence[Dot]
    index: int
    joined: bool = True
    kind: str = ""  # further classes


def series_class(index: int) -> str:
    """Return the classes of a series: eight colours, then the same ones dashed."""
    return f"s{index % COLORS} d{index // COLORS % DASHES}"


def nice_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers from at or below `low` to at or above `high`."""
    span = max(high - low, abs(high) * 1e-9, 1e-12)
    step = 10.0 ** math.floor(math.log10(span / most))
    step = next(step * m for m in (1, 2, 2.5, 5, 10, 20) if span / (step * m) <= most)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten, with 2 and 5 between them where they are few."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    parts = (1, 2, 5) if last - first <= 3 else (1,)
    ticks = [p * 10.0**e for e in range(first, last + 1) for p in parts if p * 10.0**e <= 10.0**last * 1.0001]
    least = max((t for t in ticks if t <= low * 1.0001), default=ticks[0])
    most = min((t for t in ticks if t >= high * 0.9999), default=ticks[-1])
    return [t for t in ticks if least <= t <= most]


def number(value: float) -> str:
    """Format a number briefly: `12.5k`, `0.003`, `1e-06`."""
    size = abs(value)
    if size >= 1e5 or (size >= 1e4 and value % 1000 == 0):
        return f"{value / 1000:g}k"
    return f"{value:.6g}" if size >= 1e-3 or value == 0 else f"{value:.0e}"


def plot(
    curves: Sequence[Curve], x_label: str, y_label: str, *, x_ticks: Sequence[float] = (), log: bool = False,
    zero: bool = True,
) -> str:  # fmt: skip
    """Return one plot; `log`: a logarithmic y axis if values range widely; `zero`: otherwise the axis begins at 0."""
    dots = [dot for curve in curves for dot in curve.dots]
    ys = [v for d in dots for v in (d.y - d.spread, d.y + d.spread)]
    log = log and min(d.y for d in dots) > 0 and max(d.y for d in dots) / min(d.y for d in dots) >= _DECADES
    if log:
        y_ticks = log_ticks(min(d.y for d in dots), max(d.y for d in dots))
    else:
        y_ticks = nice_ticks(min(0.0, *ys) if zero else min(ys), max(ys))
    xs = [d.x for d in dots]
    ticks = list(x_ticks) or nice_ticks(min(xs), max(xs))
    frame = _Frame(ticks[0], max(ticks[-1], *xs), y_ticks[0], y_ticks[-1], log)
    out = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(y_label)} over '
        f'{html.escape(x_label)}">'
    ]
    for t in y_ticks:
        y = frame.y(t)
        out.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number(t)}</text>')
    bottom = _HEIGHT - _BOTTOM
    out.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    for t in ticks:
        x = frame.x(t)
        out.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        out.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{number(t)}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    out.append(f'<text class="label" x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{html.escape(x_label)}</text>')
    out.append(
        f'<text class="label" transform="translate(14 {(_TOP + bottom) / 2}) rotate(-90)" text-anchor="middle">'
        f"{html.escape(y_label)}</text>"
    )
    placed: list[tuple[float, float, float]] = []
    for curve in curves:
        out += _curve(curve, frame, placed)
    out.append("</svg>")
    return "\n".join(out)


@dataclass(frozen=True, slots=True)
class _Frame:
    """Maps values to positions."""

    x0: float
    x1: float
    y0: float
    y1: float
    log: bool

    def x(self, value: float) -> float:
        span = self.x1 - self.x0 or 1.0
        return _LEFT + (value - self.x0) / span * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high, at = self.y0, self.y1, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(value)
        span = high - low or 1.0
        return _HEIGHT - _BOTTOM - (at - low) / span * (_HEIGHT - _BOTTOM - _TOP)


def _curve(curve: Curve, frame: _Frame, placed: list[tuple[float, float, float]]) -> list[str]:
    classes = f"series {series_class(curve.index)} {curve.kind}".strip()
    out = [f'<g class="{classes}" data-series="{html.escape(curve.label)}">']
    if curve.joined and len(curve.dots) > 1:
        points = " ".join(f"{frame.x(d.x):.1f},{frame.y(d.y):.1f}" for d in curve.dots)
        out.append(f'<polyline points="{points}"/>')
    for d in curve.dots:
        x, y = frame.x(d.x), frame.y(d.y)
        if d.spread > 0:
            low = d.y - d.spread
            ends = [frame.y(max(low, frame.y0) if frame.log else low), frame.y(d.y + d.spread)]
            out.append(f'<line class="spread" x1="{x:.1f}" x2="{x:.1f}" y1="{ends[0]:.1f}" y2="{ends[1]:.1f}"/>')
        out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{html.escape(d.title)}</title></circle>')
        if d.text:
            out.append(_text(d.text, x, y, placed))
    return [*out, "</g>"]


def _text(text: str, x: float, y: float, placed: list[tuple[float, float, float]]) -> str:
    """Place a name beside a point, where it does not cover another one."""
    width = 6.6 * len(text)
    right = x + 8 + width < _WIDTH
    left = x + 8 if right else x - 8 - width
    for dy in (4, -8, 16, -20, 28):
        at = y + dy
        if all(abs(at - oy) >= 12 or left > ox + ow or ox > left + width for ox, oy, ow in placed):
            break
    placed.append((left, at, width))
    return f'<text class="name" x="{left:.1f}" y="{at:.1f}">{html.escape(text)}</text>'
