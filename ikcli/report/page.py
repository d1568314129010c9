"""One HTML page of all results: plots, sortable tables, what everything ran on, and what could not be read.

The page is self-contained: style, script and plots are inline, and nothing is loaded from elsewhere.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ikcli.bench.sweep_plot import Point, group, ticks
from ikcli.report.results import BenchRow, Compared, Quality, Result, Results, SpeedRun, TypeErrors
from ikcli.report.svg import Curve, Dot, plot, series_class

_GIB = 2**30
_TELLING = ("program", "machine", "settings", "threads", "model")
_MANY_DOTS, _MANY_ROWS, _LONG = 40, 24, 60


def page(results: Results, title: str) -> str:
    """Return the page as text."""
    sweeps = [s for s in results.speeds if s.table.kind == "sweep"]
    batched = [s for s in results.speeds if s.table.kind == "batched"]
    sections = [
        ("speed over context depth", _sweeps(sweeps) if sweeps else ""),
        ("speed of several sequences", _batched(batched) if batched else ""),
        ("speed of single tests", _bench(results.bench) if results.bench else ""),
        ("sides measured in turns", _compared(results.compared) if results.compared else ""),
        ("quality", _quality(results.qualities) if results.qualities else ""),
        ("errors of types", _types(results.types) if results.types else ""),
        ("what it ran on", _environments(results)),
        ("lines that could not be read", _problems(results) if results.problems else ""),
    ]
    shown = [(name, body) for name, body in sections if body]
    links = "".join(f'<a href="#{_anchor(name)}">{name}</a>' for name, _ in shown)
    body = "\n".join(f'<section id="{_anchor(name)}"><h2>{name}</h2>\n{text}\n</section>' for name, text in shown)
    n_sources = len({r.source for r in results.all()} | {p.source for p in results.problems})
    n = len(results.all())
    facts = f"{n} result{'s' * (n != 1)} from {n_sources} file{'s' * (n_sources != 1)}"
    if results.problems:
        count = len(results.problems)
        facts += f', <a href="#{_anchor(sections[-1][0])}">{count} line{"s" * (count != 1)} not read</a>'
    template = (resources.files("ikcli") / "data" / "report.html").read_text(encoding="utf-8")
    for mark, value in (("TITLE", _e(title)), ("FACTS", facts), ("LINKS", links), ("BODY", body)):
        template = template.replace(f"<!--{mark}-->", value)
    return template


def distinct_names(results: Sequence[Result], key: Callable[[Any], object] = lambda result: None) -> list[str]:
    """Return the labels; what tells results of one label and `key` apart is added, unless the user named them."""
    names = [r.label for r in results]
    groups: dict[tuple[str, object], list[int]] = {}
    for i, r in enumerate(results):
        if not r.named:
            groups.setdefault((r.label, key(r)), []).append(i)
    extra: dict[int, list[str]] = {}
    for members in groups.values():
        for fact in _TELLING:
            values = [results[i].environment.facts.get(fact, "") for i in members]
            if len(set(values)) > 1:
                for i, value in zip(members, values, strict=True):
                    extra.setdefault(i, []).extend([value] if value else [])
        seen: dict[str, list[int]] = {}
        for i in members:
            seen.setdefault(", ".join(extra.get(i, [])), []).append(i)
        for same in seen.values():
            sources = {results[i].source for i in same}
            for n, i in enumerate(same, 1):
                if len(same) > 1:
                    extra.setdefault(i, []).append(
                        Path(results[i].source).stem if len(sources) == len(same) else f"#{n}"
                    )
    return [f"{name} ({', '.join(extra[i])})" if extra.get(i) else name for i, name in enumerate(names)]


# -- speeds


def _sweeps(runs: Sequence[SpeedRun]) -> str:
    series = group((name, run.table.rows) for name, run in zip(distinct_names(runs), runs, strict=True))
    deepest = max((p.n_kv for s in series for points in (s.pp, s.tg) for p in points), default=0)
    figures = []
    for phase, title in (("pp", "prompt"), ("tg", "generation")):
        curves = [
            Curve(s.label, [_depth_dot(s.label, p) for p in getattr(s, phase)], i)
            for i, s in enumerate(series)
            if getattr(s, phase)
        ]
        if curves:
            x_ticks = [float(t) for t in ticks(deepest)[:: 2 if deepest else 1]]
            figures.append(_figure(title, plot(curves, "tokens in the cache", "tokens/s", x_ticks=x_ticks), curves))
    depths = sorted({p.n_kv for s in series for points in (s.pp, s.tg) for p in points})
    rows: list[list[Any]] = []
    for s in series:
        pp, tg = ({p.n_kv: p for p in points} for points in (s.pp, s.tg))
        for depth in depths:
            if depth in pp or depth in tg:
                rows.append([s.label, depth, *(_mean(points.get(depth)) for points in (pp, tg)),
                             max(p.n for p in (pp.get(depth), tg.get(depth)) if p is not None)])  # fmt: skip
    header = ("run", "N_KV", "PP tokens/s", "TG tokens/s", "runs")
    return _figures(figures) + _table(header, rows, folded=len(rows) > _MANY_ROWS)


def _depth_dot(label: str, p: Point) -> Dot:
    spread = f" ± {p.std:.2f} ({p.n} runs)" if p.n > 1 else ""
    return Dot(p.n_kv, p.mean, f"{label}\nN_KV {p.n_kv}: {p.mean:.2f} tokens/s{spread}", p.std)


def _mean(p: Point | None) -> float | str:
    return "" if p is None else round(p.mean, 2)


def _batched(runs: Sequence[SpeedRun]) -> str:
    names = distinct_names(runs)
    rows: list[list[Any]] = [
        [name, r.pp, r.tg, r.n_seq, r.n_kv, r.speed_pp, r.speed_tg, r.speed]
        for name, run in zip(names, runs, strict=True)
        for r in run.table.rows
    ]
    sizes = {(row[1], row[2]) for row in rows}
    figures = []
    for column, title in ((5, "prompts of all sequences"), (6, "generation of all sequences"), (7, "both together")):
        curves: list[Curve] = []
        for name in dict.fromkeys(names):
            for pp, tg in sorted(sizes):
                dots = [
                    Dot(r[3], r[column], f"{name}\nPP {pp}, TG {tg}, {r[3]} sequences: {r[column]:.2f} tokens/s")
                    for r in sorted(rows, key=lambda row: row[3])
                    if (r[0], r[1], r[2]) == (name, pp, tg) and r[column] is not None
                ]
                label = f"{name}, PP {pp} TG {tg}" if len(sizes) > 1 else name
                if dots:
                    curves.append(Curve(label, dots, len(curves)))
        if curves:
            counts = sorted({float(d.x) for c in curves for d in c.dots})
            spread = counts if len(counts) <= 10 and counts[-1] <= 16 else ()
            figures.append(_figure(title, plot(curves, "sequences", "tokens/s", x_ticks=spread), curves))
    header = ("run", "PP", "TG", "B", "N_KV", "PP tokens/s", "TG tokens/s", "all tokens/s")
    return _figures(figures) + _table(header, rows, folded=len(rows) > _MANY_ROWS)


def _bench(rows: Sequence[BenchRow]) -> str:
    names = distinct_names(rows, key=lambda row: row.test)
    order = {name: i for i, name in enumerate(dict.fromkeys(names))}
    blocks: list[str] = []
    for test in dict.fromkeys(r.test for r in rows):
        members = [(name, r) for name, r in zip(names, rows, strict=True) if r.test == test]
        most = max(r.speed for _, r in members) or 1.0
        bars = "".join(
            f'<div class="bar {series_class(order[name])}" data-series="{_e(name)}" '
            f'title="{_e(_bench_title(name, r))}">'
            f'<span class="what">{_e(name)}</span><span class="track"><i style="width:{100 * r.speed / most:.1f}%"></i>'
            f"</span><b>{_speed(r)}</b></div>"
            for name, r in members
        )
        blocks.append(
            f'<figure><figcaption class="as-is">{_e(test)} <small>tokens/s</small></figcaption>'
            f'<div class="bars">{bars}</div></figure>'
        )
    best = {test: max(r.speed for r in rows if r.test == test) or 1.0 for test in {r.test for r in rows}}
    table = [
        [name, r.test, round(r.speed, 2), round(r.deviation, 2), round(r.speed / best[r.test], 3),
         r.environment.facts.get("threads", ""), r.settings, r.environment.facts.get("program", "")]
        for name, r in zip(names, rows, strict=True)
    ]  # fmt: skip
    header = ("run", "test", "tokens/s", "±", "of the best", "threads", "settings", "program")
    return _figures(blocks) + _table(header, table)


def _compared(found: Sequence[Compared]) -> str:
    """Draw intervals around 1, and list the numbers."""
    highs = [c.high if c.high is not None else c.ratio for c in found]
    low, high = min(0.98, *(c.low or c.ratio for c in found)), max(1.02, *highs)
    low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)

    def place(value: float) -> float:
        return 100 * (min(max(value, low), high) - low) / (high - low)

    lines: list[str] = []
    for i, c in enumerate(found):
        ends = (place(c.low), place(c.high if c.high is not None else high))
        bounds = "" if c.high is None else f" <small>{c.low:.3f} to {c.high:.3f}</small>"
        name = f"{c.label}: {c.test}, {c.side} / {c.base}"
        lines.append(
            f'<div class="bar {series_class(i)}" title="{_e(chr(10).join(c.commands))}"><span class="what">{_e(name)}'
            f'</span><span class="track range"><u style="left:{place(1.0):.1f}%"></u>'
            f'<i style="left:{ends[0]:.1f}%;width:{ends[1] - ends[0]:.1f}%"></i>'
            f'<s style="left:{place(c.ratio):.1f}%"></s></span><b>{c.ratio:.3f}{bounds}</b></div>'
        )
    title, bars = "ratio of speeds, 95 % interval", "".join(lines)
    figure = f'<figure><figcaption>{title}</figcaption><div class="bars">{bars}</div></figure>'
    rows = [
        [c.label, c.test, c.side, c.base, round(c.ratio, 4), round(c.low, 4),
         "" if c.high is None else round(c.high, 4), c.n_rounds, c.warnings, " | ".join(c.commands)]
        for c in found
    ]  # fmt: skip
    header = ("model", "test", "side", "over", "ratio", "from", "to", "rounds", "warnings", "commands")
    return f'<div class="wide">{figure}</div>\n' + _table(header, rows)


def _speed(r: BenchRow) -> str:
    return f"{r.speed:.2f}" + (f" <small>± {r.deviation:.2f}</small>" if r.deviation else "")


def _bench_title(name: str, r: BenchRow) -> str:
    facts = [f"{k}: {v}" for k, v in r.environment.facts.items() if v]
    return "\n".join([f"{name}, {r.test}: {r.speed:.2f} ± {r.deviation:.2f} tokens/s", *facts])


# -- quality


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return indices of points that no other beats in both numbers (smaller is better), ordered by the first number."""
    best = float("inf")
    out: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: points[i]):
        if points[i][1] < best:
            best = points[i][1]
            out.append(i)
    return out


def _quality(found: Sequence[Quality]) -> str:
    names = distinct_names(found, key=lambda q: "Mean KLD" in q.values)
    unit_name, unit = _unit(found)
    marked: dict[int, list[str]] = {}
    figures = []
    for key, title in (("Mean KLD", "mean KL divergence"), ("PPL", "perplexity")):
        members = [i for i, q in enumerate(found) if key in q.values and q.environment.model_bytes]
        if len(members) < 2:
            continue
        points = [((found[i].environment.model_bytes or 0) / unit, found[i].values[key][0]) for i in members]
        front = [members[k] for k in pareto(points)]
        for i in front:
            marked.setdefault(i, []).append(key.removeprefix("Mean "))
        figures.append(_front_figure(title, f"model size in {unit_name}", [
            (i, names[i], size, found[i].values[key]) for i, (size, _) in zip(members, points, strict=True)
        ], front, log=key == "Mean KLD"))  # fmt: skip
    columns = ["PPL", "PPL of the base", "PPL ratio", "Mean KLD", "Median KLD", "99.9% KLD", "Maximum KLD", "RMS Δp",
               "Same top p"]  # fmt: skip
    columns = [c for c in columns if any(c in q.values for q in found)]
    rows = [
        [name, "" if q.environment.model_bytes is None else round(q.environment.model_bytes / unit, 3),
         " and ".join(marked.get(i, [])), *(_with_error(q.values.get(c)) for c in columns),
         q.n_chunks or "", q.n_ctx or ""]
        for i, (name, q) in enumerate(zip(names, found, strict=True))
    ]  # fmt: skip
    missing = sum(q.environment.model_bytes is None for q in found)
    note = f"<p>{missing} without a size are not in the plots; --size LABEL=SIZE gives it.</p>" if missing else ""
    return _figures(figures) + note + _table(("model", unit_name, "on the front of", *columns, "chunks", "n_ctx"), rows)


def _unit(found: Sequence[Result]) -> tuple[str, int]:
    """Return GiB, or MiB where all models are small."""
    return (
        ("GiB", _GIB)
        if max((r.environment.model_bytes or 0 for r in found), default=0) >= _GIB
        else ("MiB", _GIB >> 10)
    )


def _front_figure(
    title: str, x_label: str, members: Sequence[tuple[int, str, float, tuple[float, float | None]]],
    front: Sequence[int], log: bool,
) -> str:  # fmt: skip
    """Draw points with their names, and a line through the Pareto front."""
    dots = {
        i: Dot(x, y, f"{name}\n{x:.3f}: {y:.6g}" + (f" ± {error:.3g}" if error else ""), error or 0.0,
               name if len(members) <= _MANY_DOTS else "")
        for i, name, x, (y, error) in members
    }  # fmt: skip
    curves = [
        Curve("Pareto front", [dots[i] for i in front], 0, True, "front"),
        Curve("others", [dots[i] for i in dots if i not in front], 1, False, "rest"),
    ]
    curves = [c for c in curves if c.dots]
    return _figure(title, plot(curves, x_label, title, log=log, zero=False), curves)


def _with_error(pair: tuple[float, float | None] | None) -> Any:
    if pair is None:
        return ""
    return pair[0] if pair[1] is None else (pair[0], f"{pair[0]:g} ± {pair[1]:g}")


def _types(found: Sequence[TypeErrors]) -> str:
    figures = []
    totals = [t for t in found if not t.tensor] or found
    names = [f"{t.type}" if len({r.label for r in totals}) == 1 else f"{t.type}, {t.label}" for t in totals]
    members = [
        (i, names[i], t.bpw, (t.relative, None))
        for i, t in enumerate(totals)
        if t.bpw is not None and t.relative is not None
    ]
    if len(members) > 1:
        front = [members[k][0] for k in pareto([(bpw, pair[0]) for _, _, bpw, pair in members])]
        figures.append(_front_figure("error relative to the weights", "bits per weight", members, front, log=True))
    header = ("model", "tensor", "type", "bpw", "relative error", "RMSE", "largest error")
    rows = [[t.label, t.tensor or "all", t.type, t.bpw, t.relative, t.rmse, t.largest] for t in found]
    return _figures(figures) + _table(header, rows, folded=len(rows) > _MANY_ROWS)


# -- the rest


def _environments(results: Results) -> str:
    rows: dict[tuple[Any, ...], int] = {}
    keys = ("machine", "program", "model", "parameters", "threads", "backend", "settings", "context", "date")
    unit_name, unit = _unit(results.all())
    used = [k for k in keys if any(r.environment.facts.get(k) for r in results.all())]
    for r in results.all():
        size = r.environment.model_bytes
        row = (r.label, r.source, *(r.environment.facts.get(k, "") for k in used if k != "date"),
               "" if size is None else round(size / unit, 3))  # fmt: skip
        rows.setdefault(row, r.line)
    columns = [k for k in used if k != "date"]
    table = [[*row[:2], line, *row[2:]] for row, line in rows.items()]
    return _table(("result", "file", "line", *columns, unit_name), table)


def _problems(results: Results) -> str:
    rows = [[p.source, p.line, p.reason, p.text] for p in results.problems]
    return _table(("file", "line", "what is wrong", "text"), rows)


def _figure(title: str, svg: str, curves: Sequence[Curve]) -> str:
    legend = "".join(
        f'<span class="key {series_class(c.index)} {c.kind}" data-series="{_e(c.label)}"><svg viewBox="0 0 22 8">'
        f'<line x1="0" x2="22" y1="4" y2="4"/><circle cx="11" cy="4" r="3"/></svg>{_e(c.label)}</span>'
        for c in curves
    )
    return f'<figure><figcaption>{_e(title)}</figcaption>{svg}<div class="legend">{legend}</div></figure>'


def _figures(figures: Sequence[str]) -> str:
    return f'<div class="figures">{"".join(figures)}</div>\n' if figures else ""


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]], folded: bool = False) -> str:
    """Return a sortable table; a cell is text, a number, or (number to sort by, text)."""
    numeric = [any(_is_number(row[i]) for row in rows) for i in range(len(header))]
    head = "".join(
        f'<th{" class=num" if n else ""} aria-sort="none"><button type="button">{_e(name)}</button></th>'
        for name, n in zip(header, numeric, strict=True)
    )
    body = "\n".join(
        "<tr>" + "".join(_cell(cell, n) for cell, n in zip(row, numeric, strict=True)) + "</tr>" for row in rows
    )
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
    return f"<details><summary>{len(rows)} rows</summary>{table}</details>" if folded else table


def _is_number(cell: Any) -> bool:
    return isinstance(cell, int | float | tuple)


def _cell(cell: Any, numeric: bool) -> str:
    sort, text = cell if isinstance(cell, tuple) else (cell, "" if cell is None else _plain(cell))
    value = f' data-v="{sort}"' if isinstance(sort, int | float) else ""
    kind = " class=num" if numeric else " class=long" if len(text) > _LONG else ""
    return f"<td{kind}{value}>{_e(text)}</td>"


def _plain(cell: Any) -> str:
    return (
        f"{cell:.6g}"
        if isinstance(cell, float) and abs(cell) < 1000
        else f"{cell:.2f}"
        if isinstance(cell, float)
        else str(cell)
    )


def _anchor(name: str) -> str:
    return name.replace(" ", "-")


def _e(text: str) -> str:
    return html.escape(text, quote=True)
