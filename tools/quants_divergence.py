"""The part of docs/quants.md that compares encoders: records of benchmarks/divergence.py, and their table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from quants_data import Record, bpw, rounded, table_types

from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES

MODES = {
    "imatrix": "importance matrix",
    "nothing": "nothing",
    "self": "second moments of random tokens",
    "covariance": "second moments",
}
_LABELS = {"judge-moe": "MoE", "judge-dense": "dense", "stories260K-d256.f32": "stories"}
_ALL_MODELS = ("imatrix", "self")  # modes that get a column per model; others only their mean
_SMALL, _TWO = 4.5, (2.0, 2.75)


def records_of(path: Path) -> list[Record]:
    """Return records for docs/quants.jsonl from a file of `benchmarks/divergence.py --json`."""
    names = {t.name: TYPES[t].name for t in GGMLType}
    out: list[Record] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        r = json.loads(line)
        head = {"kind": "divergence", "name": names[r["type"]], "model": _LABELS.get(r["model"], r["model"])}
        found: Record = head | {"mode": r["mode"], "kld": rounded(r["ours"]["kld"])}
        if r["ratio"] is not None:
            found |= {"ratio": rounded(r["ratio"], 4), "ratio_error": rounded(r["ratio_error"], 2)}
        out.append(found)
    return out


def _mean(ratios: Iterable[float]) -> float:
    logs = [math.log(r) for r in ratios]
    return math.exp(math.fsum(logs) / len(logs)) if logs else math.nan


def _cell(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.2f}"


def ratios(records: Sequence[Record]) -> dict[tuple[str, str, str], float]:
    """Return the ratio by type, mode and model, where both programs wrote a file."""
    return {(r["name"], r["mode"], r["model"]): r["ratio"] for r in records if "ratio" in r}


def columns(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return (mode, model) of every column; without model the mean over models."""
    models = sorted({r["model"] for r in records}, key=lambda m: (m != "demo", m != "stories", m))
    return [(mode, m) for mode in MODES for m in (*(models if mode in _ALL_MODELS else ()), "")]


def table_rows(records: Sequence[Record]) -> list[list[str]]:
    """Return a row per type, then geometric means over types up to 4.5 bits per weight, of 2-bit types and of all."""
    found, wanted = ratios(records), columns(records)
    types = [t for t in table_types() if any(name == TYPES[t].name for name, _, _ in found)]

    def values(some: Sequence[GGMLType], mode: str, model: str) -> list[float]:
        names = {TYPES[t].name for t in some}
        return [v for (n, k, m), v in found.items() if n in names and k == mode and model in ("", m)]

    rows = [
        [f"`{TYPES[t].name}`", f"{bpw(t):.3f}", *(_cell(_mean(values([t], *column))) for column in wanted)]
        for t in types
    ]
    for title, some in (
        ("**2-bit types**", [t for t in types if _TWO[0] <= bpw(t) < _TWO[1]]),
        (f"**up to {_SMALL:g}**", [t for t in types if bpw(t) <= _SMALL]),
        ("**all**", types),
    ):
        rows.append([title, "", *(_cell(_mean(values(some, *column))) for column in wanted)])
    return rows


def header(records: Sequence[Record]) -> list[str]:
    """Return the titles of the columns."""
    marks = {"imatrix": "", "nothing": " ⁰", "self": " ˢ", "covariance": " ᶜ"}
    return ["type", "bpw", *((model or "mean") + marks[mode] for mode, model in columns(records))]
