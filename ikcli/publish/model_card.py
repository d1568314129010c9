"""README.md of a published folder: front matter for the hub, a table of the quants, a plot, and sources."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ikcli import __version__
from ikcli.log import shown_size
from ikcli.report.page import pareto
from ikcli.report.svg import Curve, Dot, plot

if TYPE_CHECKING:
    from ikcli.publish.records import Published, PublishedQuant

_GIB = 2**30
_STYLE = """<style>text { font: 11.5px system-ui, sans-serif; fill: #4a5563; } .name { fill: #1b2430; }
.grid { stroke: #dfe3e8; } .axis { stroke: #5c6775; } .spread, polyline { stroke: #0b62c4; fill: none; }
circle { fill: #0b62c4; }</style><rect width="100%" height="100%" fill="#ffffff"/>"""


def quality_plot(quants: Sequence[PublishedQuant]) -> str:
    """Return the SVG of KL divergence (else perplexity) over size; empty for fewer than two results."""
    for key, title in (("Mean KLD", "mean KL divergence"), ("PPL", "perplexity")):
        found = sorted((q for q in quants if key in q.quality), key=lambda q: q.n_bytes)
        if len(found) < 2:
            continue
        unit, size = ("GiB", _GIB) if max(q.n_bytes for q in found) >= _GIB else ("MiB", 2**20)
        dots = [
            Dot(q.n_bytes / size, q.quality[key][0], f"{q.label}: {q.quality[key][0]:.6g}", q.quality[key][1] or 0.0,
                q.label)
            for q in found
        ]  # fmt: skip
        front = pareto([(d.x, d.y) for d in dots])
        curves = [
            Curve("Pareto front", [dots[i] for i in front], 0),
            Curve("others", [d for i, d in enumerate(dots) if i not in front], 1, False),
        ]
        svg = plot([c for c in curves if c.dots], f"size in {unit}", title, log=key == "Mean KLD", zero=False)
        return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(">", ">" + _STYLE, 1)
    return ""


def card(made: Published, plot_file: str = "") -> str:
    """Return the whole text."""
    lines = [*_front_matter(made), "", f"# {made.name}, GGUF", ""]
    if made.base_model:
        lines += [f"Quants of [{made.base_model}](https://huggingface.co/{made.base_model}).", ""]
    lines += _table(made)
    if plot_file:
        lines += ["", f"![quality over size]({plot_file})"]
    lines += ["", "Digests of all files are in `SHA256SUMS` (`sha256sum -c SHA256SUMS`)."]
    if any(len(q.paths) > 1 for q in made.quants):
        lines.append("Of a split model all parts are needed; programs are given the first one.")
    lines += ["", "## How they were made", ""]
    lines += [f"* Written by `ik` {__version__} (Python {platform.python_version()}, NumPy {np.__version__})."]
    lines += [f"* Source: `{name}`, SHA-256 `{digest}`." for name, digest in made.sources]
    if made.imatrix:
        lines.append(f"* Importance matrix: [{made.imatrix}]({made.imatrix}).")
    lines.append("* `recipes/` has the type of every tensor: `ik quantize --custom-q @RECIPE ...`")
    for note in made.notes:
        fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", note))])
        lines += ["", fence, note, fence]
    return "\n".join(lines) + "\n"


def _front_matter(made: Published) -> list[str]:
    lines = ["---"]
    if made.base_model:
        lines += [f"base_model: {_scalar(made.base_model)}", "base_model_relation: quantized"]
    if made.license:
        lines.append(f"license: {_scalar(made.license)}")
    if made.languages:
        lines += ["language:", *(f"- {_scalar(text)}" for text in made.languages)]
    lines += ["tags:", *(f"- {_scalar(text)}" for text in dict.fromkeys(("gguf", *made.tags)))]
    return [*lines, "---"]


def _scalar(text: str) -> str:
    """Return a YAML string; JSON's form of it is one."""
    return json.dumps(text, ensure_ascii=False)


def _table(made: Published) -> list[str]:
    columns = [c for c in ("PPL", "Mean KLD") if any(c in q.quality for q in made.quants)]
    lines = [
        "| " + " | ".join(["file", "type", "size", "BPW", *columns, "recipe"]) + " |",
        "|:---|:---|---:|---:|" + "---:|" * len(columns) + ":---|",
    ]
    for q in sorted(made.quants, key=lambda q: -q.n_bytes):
        name = q.paths[0].rsplit("/", 1)[-1]
        more = f" and {len(q.paths) - 1} more" if len(q.paths) > 1 else ""
        size = shown_size(q.n_bytes, least=2**20)
        cells = [f"[{name}]({q.paths[0]}){more}", q.type, size, f"{q.bpw:.2f}"]
        cells += [_with_error(q.quality.get(c)) for c in columns] + [f"[types]({q.recipe})"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _with_error(pair: tuple[float, float | None] | None) -> str:
    if pair is None:
        return ""
    return " ± ".join(_number(value) for value in pair if value is not None)


def _number(value: float) -> str:
    """Format with six digits, never with an exponent where a KL divergence is small."""
    return f"{value:.6g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.6f}"
