"""Records of benchmarks/divergence.py: the measurements per type, their Markdown rows, and their summary."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

HEADER = (
    "| model | type | bpw | with | KLD ik | KLD reference | ratio | PPL ik | PPL reference "
    "| same top % ik | same top % reference | note |\n|---|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---|"
)
SUMMARY_HEADER = "| model | with | up to 4.5 bpw | 2-bit types | all | worst type |\n|---|---|---:|---:|---:|---|"


# Inputs of the quantizers: an importance matrix, nothing, or ik second moments of the text, or of random tokens
# beside the importance matrix (the other program has the importance matrix then).
MODES = IMATRIX, NOTHING, COVARIANCE, SELF = "imatrix", "nothing", "covariance", "self"


@dataclass(frozen=True, slots=True)
class Side:
    """One program's file: means with standard errors, perplexity, and the seconds that quantizing took."""

    kld: float
    kld_error: float
    ppl: float
    same_top: float
    same_top_error: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Record:
    """A type on a model; without `reference` the other program refused. `ratio`: ours / reference, below 1 is better.

    `base` (perplexity of the unquantized model), `n_ctx` and `chunks` describe the evaluation; `options` are those of
    `ik quantize`.
    """

    model: str
    type: str
    bpw: float
    mode: str
    base: float
    n_ctx: int
    chunks: int
    options: str
    ours: Side
    reference: Side | None
    ratio: float | None
    ratio_error: float | None
    note: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        """Return the key of the record, which is unique."""
        return (self.model, self.type, self.mode, f"{self.base:.5g}", self.n_ctx, self.chunks, self.options)


def read(path: Path | None) -> list[Record]:
    """Read the records of a JSON lines file; return none if the file does not exist."""
    if path is None or not path.is_file():
        return []
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [
        Record(**r | {"ours": Side(**r["ours"]), "reference": Side(**r["reference"]) if r["reference"] else None})
        for r in found
    ]


def line(record: Record) -> str:
    """Return the record as a line of JSON."""
    return json.dumps(asdict(record), ensure_ascii=False) + "\n"


def _kld(side: Side | None) -> str:
    return f"{side.kld:.6f} ± {side.kld_error:.6f}" if side else ""


def _same(side: Side | None) -> str:
    return f"{100 * side.same_top:.2f} ± {100 * side.same_top_error:.2f}" if side else ""


def row(r: Record) -> str:
    """Return the record as a row of the table."""
    ratio = "" if r.ratio is None else f"{r.ratio:.4f} ± {r.ratio_error:.4f}"
    cells = [r.model, r.type, f"{r.bpw:.2f}", r.mode, _kld(r.ours), _kld(r.reference), ratio]
    cells += [f"{s.ppl:.4f}" if s else "" for s in (r.ours, r.reference)]
    return "| " + " | ".join([*cells, _same(r.ours), _same(r.reference), r.note]) + " |"


def ratio_of_means(ours: Sequence[float], reference: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """Return mean(ours) / mean(reference) over the same positions, with its standard error.

    None if a mean is not positive. The error is that of paired values: difficulties that both have at a position
    cancel.
    """
    n = len(ours)
    a, b = math.fsum(ours) / n, math.fsum(reference) / n
    if a <= 0 or b <= 0 or n < 2:
        return None, None
    spread = math.fsum((x / a - y / b) ** 2 for x, y in zip(ours, reference, strict=True)) / (n - 1)
    return a / b, a / b * math.sqrt(spread / n)


def geometric_mean(records: Iterable[Record]) -> tuple[float, float, int]:
    """Return the geometric mean of the ratios, its standard error due to the evaluated text, and their number."""
    pairs = [(math.log(r.ratio), (r.ratio_error or 0.0) / r.ratio) for r in records if r.ratio]
    if not pairs:
        return math.nan, math.nan, 0
    mean = math.exp(math.fsum(p[0] for p in pairs) / len(pairs))
    return mean, mean * math.sqrt(math.fsum(p[1] ** 2 for p in pairs)) / len(pairs), len(pairs)


def _cell(records: Iterable[Record]) -> str:
    mean, error, n = geometric_mean(records)
    return f"{mean:.4f} ± {error:.4f} ({n})" if n else ""


def _summary_row(model: str, mode: str, records: Sequence[Record]) -> str:
    small = _cell(r for r in records if r.bpw <= 4.5)
    two = _cell(r for r in records if 2.0 <= r.bpw < 2.75)
    worst = max((r for r in records if r.ratio), key=lambda r: r.ratio or 0.0, default=None)
    name = f"{worst.type} {worst.ratio:.4f}" if worst else ""
    return f"| {model} | {mode} | {small} | {two} | {_cell(records)} | {name} |"


def summary(records: Sequence[Record]) -> list[str]:
    """Return rows with the geometric means (number of types) per model and over all, for each mode."""
    rows = []
    models = list(dict.fromkeys(r.model for r in records))
    for model in [*models, *(["all"] if len(models) > 1 else [])]:
        mine = [r for r in records if model in (r.model, "all")]
        for mode in MODES:
            if found := [r for r in mine if r.mode == mode]:
                rows.append(_summary_row(model, mode, found))
    return rows
