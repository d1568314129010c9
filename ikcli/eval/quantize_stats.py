"""Error table of storage types on the tensors of a model (`ik quantize-stats`).

One row per tensor and type, then one per type over all tensors: bits per weight, RMSE, error relative to the RMS of
the values, the same weighted by an importance matrix, largest error. Answers to examples/quantize-stats of llama.cpp.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ikcli.errors import NonFiniteError, UsageError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import GGUFFile, TensorInfo
from ikcli.quant.decode import decodable_types
from ikcli.quant.encoders import available_types
from ikcli.quant.formats import FORMATS, tensor_size
from ikcli.quant.imatrix_file import Imatrix
from ikcli.quant.measure import Errors, fits, measure, sample_tensor
from ikcli.rules import compile_pattern

T = GGMLType
_UNMEASURED = (T.F32, T.IQ1_BN, T.IQ2_BN)  # exact, and types for ternary weights only


@dataclass(frozen=True, slots=True)
class StatsParams:
    """`rows` per tensor (0 = all); tensors whose name matches `include` (if any) and not `exclude`."""

    types: tuple[GGMLType, ...]
    rows: int = 256
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    n_threads: int = 1


@dataclass(frozen=True, slots=True)
class StatsRow:
    """Errors of `type` on a tensor, or over all (`tensor` empty); `bpw` of the whole tensors, row headers included."""

    tensor: str
    type: str
    bpw: float
    n_elements: int
    errors: Errors
    has_weights: bool


def all_types() -> tuple[GGMLType, ...]:
    """Plain types that can be written and read, by size."""
    found = [t for t in available_types() & decodable_types() if t not in _UNMEASURED and FORMATS[t].base is None]
    return tuple(sorted((t for t in found if FORMATS[t].rows == 1), key=lambda t: (FORMATS[t].bpw, FORMATS[t].name)))


def measured_tensors(file: GGUFFile, params: StatsParams) -> list[TensorInfo]:
    """Matrices that may be quantized and that the options select; UsageError if none is left."""
    for option, patterns in (("--include-layer", params.include), ("--exclude-layer", params.exclude)):
        for pattern in patterns:
            compile_pattern(pattern, option, pattern)
    found = [
        t
        for t in file.tensors.values()
        if len(t.shape) > 1 and t.name.endswith("weight") and t.type in decodable_types()
        if not params.include or any(re.search(p, t.name) for p in params.include)
        if not any(re.search(p, t.name) for p in params.exclude)
    ]
    if not found:
        raise UsageError(f"{file.paths[0]}: --include-layer and --exclude-layer leave no matrix to measure")
    return found


def measure_model(file: GGUFFile, params: StatsParams, imatrix: Imatrix | None = None) -> Iterator[StatsRow]:
    """Rows per tensor and type in file order as they are ready, then the sums over all tensors of each type."""
    sums: dict[GGMLType, list[StatsRow]] = {t: [] for t in params.types}
    sizes: dict[GGMLType, int] = dict.fromkeys(params.types, 0)
    with ThreadPoolExecutor(max(1, params.n_threads)) as pool:
        for t in measured_tensors(file, params):
            weights = imatrix.weights(t.name, t.shape) if imatrix is not None else None
            sample = sample_tensor(file, t, weights, params.rows)
            types = [type for type in params.types if fits(type, t.shape)]
            try:
                found = list(pool.map(lambda type, sample=sample: measure(sample, type), types))
            except NonFiniteError:
                raise NonFiniteError(f"tensor {t.name} holds NaN or Inf") from None
            file.release(t.name, 0, t.n_bytes)
            for type, errors in zip(types, found, strict=True):
                n_bytes = tensor_size(type, t.shape)
                row = StatsRow(
                    t.name, FORMATS[type].name, 8 * n_bytes / t.n_elements, t.n_elements, errors, weights is not None
                )
                sums[type].append(row)
                sizes[type] += n_bytes
                yield row
    for type, rows in sums.items():
        if rows:
            yield _total(type, rows, sizes[type])


def _total(type: GGMLType, rows: Sequence[StatsRow], n_bytes: int) -> StatsRow:
    n_elements = sum(r.n_elements for r in rows)
    total = Errors()
    for r in rows:
        total += r.errors
    return StatsRow(
        "", FORMATS[type].name, 8 * n_bytes / n_elements, n_elements, total, any(r.has_weights for r in rows)
    )


HEADER = (
    "| tensor | type | bpw | RMSE | relative | weighted | max error |",
    "|:---|:---|---:|---:|---:|---:|---:|",
)


def markdown_line(row: StatsRow) -> str:
    """One line of the Markdown table; `weighted` is empty without importance weights."""
    e = row.errors
    weighted = f"{e.weighted:.4%}" if row.has_weights else ""
    name = row.tensor or "all"
    return f"| {name} | {row.type} | {row.bpw:.3f} | {e.rmse:.6g} | {e.relative:.4%} | {weighted} | {e.largest:.6g} |"


def json_line(row: StatsRow) -> str:
    """One JSON object; `tensor` is null in the rows over all tensors."""
    e = row.errors
    return json.dumps(
        {
            "tensor": row.tensor or None,
            "type": row.type,
            "bpw": round(row.bpw, 4),
            "n_elements": row.n_elements,
            "n_measured": e.n,
            "rmse": e.rmse,
            "relative": e.relative,
            "weighted": e.weighted if row.has_weights else None,
            "max_error": e.largest,
        }
    )
