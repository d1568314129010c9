"""Error table of storage types on the tensors of a model (`ik quantize-stats`).

One row per tensor and type, then one per type over all tensors: bits per weight, RMSE, error relative to the RMS of the
values, the same weighted by an importance matrix, largest error, and how the encoder uses scales and codes. Rows are
read in pieces, so memory does not depend on the model. Corresponds to examples/quantize-stats of llama.cpp.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ikcli.errors import NonFiniteError, UsageError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import GGUFFile, TensorInfo
from ikcli.gguf.types import TYPES
from ikcli.quant.decode import decodable_types, dequantize
from ikcli.quant.encoders import available_types, quantize_rows
from ikcli.quant.formats import row_size, tensor_size
from ikcli.quant.imatrix_file import Imatrix
from ikcli.quant.measure import BLOCK_ROWS, Errors, Floats, RowSample, errors_of
from ikcli.rules import compile_pattern
from ikcli.study.code_use import CodeUse, as_json, bars, count_codes, folded

T = GGMLType
_PIECE_ELEMENTS = 1 << 22
_NAMED = 4


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
    """Errors of `type` on a tensor, or over all (`tensor` empty); `bpw` of the whole tensors, row headers included.

    `n_rows` of the tensors were measured in `n_measured_rows`; `use` is None for types without integer codes.
    """

    tensor: str
    type: str
    bpw: float
    n_elements: int
    n_rows: int
    n_measured_rows: int
    errors: Errors
    has_weights: bool
    use: CodeUse | None


def all_types() -> tuple[GGMLType, ...]:
    """Return the plain types that can be written and read, by size."""
    found = [TYPES[t] for t in available_types() & decodable_types() - {T.F32}]  # which is exact
    plain = (t for t in found if t.rows == 1 and t.kind != "ternary")  # which is for ternary weights only
    return tuple(t.type for t in sorted(plain, key=lambda t: (t.bpw, t.name)))


def measured_tensors(file: GGUFFile, params: StatsParams) -> list[TensorInfo]:
    """Return the matrices that may be quantized and that the options select; UsageError if there are none."""
    for option, patterns in (("--include", params.include), ("--exclude", params.exclude)):
        for pattern in patterns:
            compile_pattern(pattern, option, pattern)
    found = [
        t
        for t in file.tensors.values()
        if len(t.shape) > 1 and t.name.endswith("weight") and t.type in decodable_types()
        if "ffn_gate_inp" not in t.name or params.include  # routers are not quantized
        if not params.include or any(re.search(p, t.name) for p in params.include)
        if not any(re.search(p, t.name) for p in params.exclude)
    ]
    if not found:
        raise UsageError(f"{file.paths[0]}: --include and --exclude leave no matrix to measure")
    return found


def fits(type: GGMLType, shape: tuple[int, ...]) -> bool:
    """Return whether the type can store this shape: rows of whole blocks, in whole groups."""
    return shape[0] % TYPES[type].block_size == 0 and shape[1] % _group(type) == 0


def _group(type: GGMLType) -> int:
    """Return the number of rows encoded together; a regrouped type is measured as its plain one."""
    return 1 if TYPES[type].base is not None else TYPES[type].rows


def notes(tensors: Sequence[TensorInfo], params: StatsParams) -> list[str]:
    """Return notes for the reader of the table: sampling, and tensors that a type does not fit."""
    sampled = [t for t in tensors if params.rows and math.prod(t.shape[1:]) > params.rows]
    lines: list[str] = []
    if sampled:
        lines.append(
            f"{len(sampled)} of {len(tensors)} tensors are sampled: about {params.rows} rows of each, in runs of "
            f"{BLOCK_ROWS} spread evenly; --rows 0 measures all rows"
        )
    for type in params.types:
        misfits = [t for t in tensors if not fits(type, t.shape)]
        if misfits:
            shown = ", ".join(f"{t.name} {list(t.shape)}" for t in misfits[:_NAMED])
            more = f" and {len(misfits) - _NAMED} more" if len(misfits) > _NAMED else ""
            instead = TYPES[type].fallback
            then = f"; quantize stores {TYPES[instead].name} there" if instead is not None else ""
            lines.append(f"{TYPES[type].name} does not fit the rows of {shown}{more}{then}")
    return lines


def row_runs(shape: tuple[int, ...], n_rows: int, seed: int = 0) -> list[tuple[int, int, int]]:
    """Return runs (matrix, first row, end row) of adjacent rows: all, or about `n_rows` spread over all matrices.

    Rows count over the whole tensor. A run starts at a multiple of 16 of its matrix and has at most 16 rows; where all
    rows are taken, it has as many as make a piece.
    """
    ne1, total = shape[1], math.prod(shape[1:])
    step = max(1, _PIECE_ELEMENTS // shape[0] // BLOCK_ROWS) * BLOCK_ROWS
    everything = not n_rows or n_rows >= total
    length = step if everything else BLOCK_ROWS
    runs = [
        (m, m * ne1 + r, m * ne1 + min(r + length, ne1)) for m in range(total // ne1) for r in range(0, ne1, length)
    ]
    wanted = -(-n_rows // BLOCK_ROWS)
    if everything or wanted >= len(runs):
        return runs
    # one run from each of `wanted` equal parts, so that all blocks, heads and experts are sampled
    edges = np.linspace(0, len(runs), wanted + 1)
    shift = np.random.default_rng(seed).random(wanted)
    picked = np.floor(edges[:-1] + shift * np.diff(edges)).astype(int)
    return [runs[i] for i in sorted(set(picked.tolist()))]


def pieces(file: GGUFFile, t: TensorInfo, weights: Floats | None, n_rows: int = 0) -> Iterator[RowSample]:
    """Yield the rows of `row_runs`, decoded run by run; NonFiniteError names tensor and row."""
    data, ne0 = file.data(t.name), t.shape[0]
    whole = dequantize(data, t.type, t.shape).reshape(-1, ne0) if t.type == T.I2_S else None
    for m, first, stop in row_runs(t.shape, n_rows):
        if whole is not None:
            values = whole[first:stop]
        else:
            size = row_size(t.type, ne0)
            values = dequantize(data[first * size : stop * size], t.type, (ne0, stop - first)).reshape(-1, ne0)
            file.release(t.name, first * size, stop * size)
        finite = np.isfinite(values).all(axis=1)
        if not finite.all():
            bad = first + int(np.argmin(finite))
            raise NonFiniteError(
                f"{file.paths[t.file_index]}: tensor {t.name} holds NaN or Inf in row {bad}; leave it out with "
                f"--exclude '{re.escape(t.name)}'"
            )
        row = None if weights is None else np.ascontiguousarray(weights[m % len(weights)], np.float32)
        yield RowSample(m, np.ascontiguousarray(values, np.float32), row)


def measure_piece(piece: RowSample, type: GGMLType) -> tuple[Errors, CodeUse | None]:
    """Return the errors of one piece encoded as `type`, and the counts of its codes."""
    plain = TYPES[type].base or type
    encoded = quantize_rows(piece.values, plain, piece.weights)
    return errors_of(piece, encoded, plain), count_codes(encoded, plain, piece.values.shape[1])


def measure_model(file: GGUFFile, params: StatsParams, imatrix: Imatrix | None = None) -> Iterator[StatsRow]:
    """Yield rows per tensor and type in file order as they are ready, then the sums over all tensors of each type."""
    done: list[StatsRow] = []
    with ThreadPoolExecutor(max(1, params.n_threads)) as pool:
        for t in measured_tensors(file, params):
            weights = imatrix.weights(t.name, t.shape) if imatrix is not None else None
            for row in _measure_tensor(pool, file, t, params, weights):
                done.append(row)
                yield row
    yield from totals(done, params)


def totals(rows: Sequence[StatsRow], params: StatsParams) -> Iterator[StatsRow]:
    """Yield the sums over all tensors of each type."""
    for type in params.types:
        mine = [row for row in rows if row.type == TYPES[type].name]
        if mine:
            yield _total(mine)


def _measure_tensor(
    pool: ThreadPoolExecutor, file: GGUFFile, t: TensorInfo, params: StatsParams, weights: Floats | None
) -> list[StatsRow]:
    """Return one row for every type that fits; types are encoded in parallel."""
    types = [type for type in params.types if fits(type, t.shape)]
    sums: dict[GGMLType, tuple[Errors, CodeUse | None]] = {}
    n_measured = 0
    for piece in pieces(file, t, weights, params.rows):
        n_measured += len(piece.values)
        found = pool.map(lambda type, piece=piece: measure_piece(piece, type), types)
        for type, (errors, use) in zip(types, found, strict=True):
            if type in sums:
                before = sums[type]
                errors, use = before[0] + errors, added(before[1], use)
            sums[type] = errors, use
    return [stats_row(t, type, n_measured, *found, weights is not None) for type, found in sums.items()]


def stats_row(
    t: TensorInfo, type: GGMLType, n_measured: int, errors: Errors, use: CodeUse | None, has_weights: bool
) -> StatsRow:
    """Return the row of a tensor and a type."""
    bpw = 8 * tensor_size(type, t.shape) / t.n_elements
    n_rows = math.prod(t.shape[1:])
    return StatsRow(t.name, TYPES[type].name, bpw, t.n_elements, n_rows, n_measured, errors, has_weights, use)


def added(a: CodeUse | None, b: CodeUse | None) -> CodeUse | None:
    return a + b if a is not None and b is not None else a or b


def _total(rows: Sequence[StatsRow]) -> StatsRow:
    n_elements = sum(r.n_elements for r in rows)
    total, use = Errors(), None
    for r in rows:
        total, use = total + r.errors, added(use, r.use)
    return StatsRow(
        "",
        rows[0].type,
        sum(r.bpw * r.n_elements for r in rows) / n_elements,
        n_elements,
        sum(r.n_rows for r in rows),
        sum(r.n_measured_rows for r in rows),
        total,
        any(r.has_weights for r in rows),
        use,
    )


HEADER = (
    "| tensor | type | bpw | RMSE | relative | weighted | max error | rows | scales 0..max | zero | at end | codes "
    "| entropy |",
    "|:---|:---|---:|---:|---:|---:|---:|---:|:---|---:|---:|:---|---:|",
)
LEGEND = (
    "relative: RMSE over the RMS of the values; weighted: the same with the importance matrix.",
    "rows: how many were measured, of how many.",
    "scales: sub-blocks by the size of their integer multiplier, in eighths of its range; empty without multipliers.",
    "zero: sub-blocks whose multiplier is zero; at end: whose multiplier is the least or the largest there is.",
    "codes: how often codes occur, in their order, in at most 16 bars; empty for grids and trellises.",
    "entropy: bits of information in a code, of those it takes; a code is one weight, or a group of 2, 4 or 8. "
    "Empty if fewer than 8 codes per possible one were measured.",
)


def markdown_line(row: StatsRow) -> str:
    """Return one line of the Markdown table; `weighted` is empty without importance weights."""
    e, use = row.errors, row.use
    weighted = f"{e.weighted:.4%}" if row.has_weights else ""
    rows = f"{row.n_measured_rows}/{row.n_rows}" if row.n_measured_rows < row.n_rows else f"{row.n_rows}"
    cells = [row.tensor or "all", row.type, f"{row.bpw:.3f}", f"{e.rmse:.6g}", f"{e.relative:.4%}", weighted]
    cells += [f"{e.largest:.6g}", rows, *_use_cells(use)]
    return "| " + " | ".join(cells) + " |"


def _use_cells(use: CodeUse | None) -> list[str]:
    if use is None:
        return [""] * 5
    sizes = use.magnitudes()
    return [
        bars(sizes) if sizes is not None else "",
        _percent(use.zero),
        _percent(use.top),
        bars(folded(use.codes, 16)) if use.space.group == 1 else "",
        f"{use.entropy:.2f}/{use.code_bits:.0f}" if use.entropy is not None else "",
    ]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.2%}" if share else "0"


def json_line(row: StatsRow) -> str:
    """Return one JSON object; `tensor` is null in the rows over all tensors. `use` holds the full counts."""
    e = row.errors
    return json.dumps(
        {
            "tensor": row.tensor or None,
            "type": row.type,
            "bpw": round(row.bpw, 4),
            "n_elements": row.n_elements,
            "n_measured": e.n,
            "n_rows": row.n_rows,
            "n_measured_rows": row.n_measured_rows,
            "rmse": e.rmse,
            "relative": e.relative,
            "weighted": e.weighted if row.has_weights else None,
            "max_error": e.largest,
            "use": as_json(row.use) if row.use is not None else None,
        }
    )
