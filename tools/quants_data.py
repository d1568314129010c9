"""Records behind docs/quants.md, one JSON object per line of docs/quants.jsonl, and the names that the page lists.

`about` (part quality or speed): the setting of the measurements. `quality`: one type or preset, with or without
importance matrix. `speed`: one type on one model, next to F16 in the same run; `level`: the instruction set, unless it
is that of most records. `encode`: speed of the encoder of a plain type. `divergence`: KL divergence of one type on one
model over that of the reference's file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ikcli.gguf.constants import FILE_TYPES, GGMLType
from ikcli.gguf.types import TYPES
from ikcli.quant.decode import decodable_types
from ikcli.quant.encoders import available_types
from ikcli.quant.formats import interleaved_type, tensor_size
from ikcli.study.quantize_stats import all_types

Record = dict[str, Any]
T = GGMLType
DOCS = Path(__file__).resolve().parents[1] / "docs"
DATA, PAGE = DOCS / "quants.jsonl", DOCS / "quants.md"
_KEYS = ("kind", "part", "name", "preset", "imatrix", "model", "mode", "level")
_BPW_SHAPE = (4096, 4096)
MODEL_NAMES = {"demo": "demo model", "random": "larger model"}


def bpw(type: GGMLType) -> float:
    """Return bits per weight in rows of 4096, headers of rows included."""
    return 8 * tensor_size(type, _BPW_SHAPE) / (_BPW_SHAPE[0] * _BPW_SHAPE[1])


UNMEASURED = {GGMLType.NVFP4}  # written for files of llama.cpp; not on the page


def table_types() -> list[GGMLType]:
    """Return types with values of their own, by size: plain ones and those that exist only interleaved."""
    own = [t for t in available_types() & decodable_types() if TYPES[t].stand_in is not None]
    return sorted({*all_types(), *own} - UNMEASURED, key=lambda t: (bpw(t), TYPES[t].name.lower()))


def twin(type: GGMLType) -> GGMLType | None:
    """Return the interleaved type with the same values."""
    found = interleaved_type(type)
    return found if found is not None and found in available_types() else None


def speed_types() -> list[GGMLType]:
    """Return all types whose speed is measured, interleaved forms after their plain ones."""
    return [t for plain in table_types() for t in (plain, twin(plain)) if t is not None]


def presets() -> dict[str, int]:
    """Return names and numbers of the file types that may mix types."""
    found = [f for f in FILE_TYPES.values() if f.names and TYPES[f.type].rows == 1 and TYPES[f.type].kind == "codes"]
    # of names for one number the last is the full one, as in Q4_K and Q4_K_M
    return {f.names[-1]: f.number for f in found if f.type in all_types()}


def read_records(path: Path = DATA) -> list[Record]:
    """Read all records; return none if the file does not exist."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def record_key(record: Record) -> tuple[str, ...]:
    """Return the key of a record: a later one with the same key replaces it."""
    return tuple(str(record.get(key, "")) for key in _KEYS)


def merged(records: Iterable[Record], new: Iterable[Record]) -> list[Record]:
    """Return records by key, later ones winning, in a fixed order."""
    by_key = {record_key(r): r for r in [*records, *new]}
    return [by_key[key] for key in sorted(by_key)]


def write_records(records: Iterable[Record], path: Path = DATA) -> None:
    """Replace the file in one step, so that a stopped run loses nothing."""
    text = "".join(json.dumps(r, ensure_ascii=False, sort_keys=True) + "\n" for r in records)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def rounded(value: float, digits: int = 5) -> float:
    """Round to significant digits, so that the file stays readable."""
    return float(f"{value:.{digits}g}")
