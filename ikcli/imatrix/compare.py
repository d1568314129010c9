"""Compare two importance matrices (`ik imatrix --compare`): how much does the choice between them matter?

Per tensor, over the mean squares of all columns: their cosine, the largest ratio between corresponding columns, and the
length of the difference relative to the longer one. Weights matter only up to a factor, so the cosine tells most.
Experts without data in one of the files are counted and left out of the other values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ikcli.quant.imatrix_file import Imatrix, ImatrixEntry
from ikcli.quant.imatrix_lookup import count_experts, without_data

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MatrixComparison:
    """One tensor in both files; `n` columns were compared, `n_left_out` of `n_matrices` lack data in a file.

    `cosine` covers all columns, `least_cosine` the matrix (expert, head) that differs most; `ratio` >= 1 is infinite
    where a column is 0 in only one file. All are NaN where nothing could be compared.
    """

    name: str
    n: int
    n_matrices: int
    n_left_out: int
    cosine: float
    least_cosine: float
    ratio: float
    difference: float


@dataclass(frozen=True, slots=True)
class ComparedFiles:
    """Tensors in both files, worst first; names in only one of them; (name, values, values) where sizes differ."""

    tensors: list[MatrixComparison]
    only: tuple[list[str], list[str]]
    sizes: list[tuple[str, int, int]]


def compare(a: Imatrix, b: Imatrix) -> ComparedFiles:
    """Compare all entries of two matrices."""
    both = [name for name in a.entries if name in b.entries]
    sizes = [(n, a.entries[n].sums.size, b.entries[n].sums.size) for n in both]
    differing = [row for row in sizes if row[1] != row[2]]
    known = {name: size for name, size, _ in sizes}
    skipped = {name for name, _, _ in differing}
    found = [_compare(n, a.entries[n], b.entries[n], count_experts(n, known)) for n in both if n not in skipped]
    found.sort(key=lambda c: (c.cosine if not math.isnan(c.cosine) else -1.0, -c.difference, c.name))
    only = [n for n in a.entries if n not in b.entries], [n for n in b.entries if n not in a.entries]
    return ComparedFiles(found, only, differing)


def _compare(name: str, a: ImatrixEntry, b: ImatrixEntry, n_experts: int) -> MatrixComparison:
    known = max(len(a.counts), len(b.counts))
    n_mat = known if known > 1 else n_experts
    if not {len(a.counts), len(b.counts)} <= {1, n_mat}:
        n_mat = 1  # the files group matrices differently; the columns are the same
    rows: list[F64] = []
    absent = np.zeros(n_mat, bool)
    for entry in (a, b):
        rows.append(entry.values.astype(np.float64).reshape(n_mat, -1))
        if n_mat > 1:
            absent |= without_data(entry.sums, entry.counts, n_mat)
    x, y = (values[~absent] for values in rows)
    if not x.size:
        nan = math.nan
        return MatrixComparison(name, 0, n_mat, n_mat, nan, nan, nan, nan)
    longest = max(float(np.linalg.norm(x)), float(np.linalg.norm(y)))
    return MatrixComparison(
        name,
        x.size,
        n_mat,
        int(absent.sum()),
        float(_cosines(x.reshape(1, -1), y.reshape(1, -1))[0]),
        float(_cosines(x, y).min()),
        _largest_ratio(x, y),
        float(np.linalg.norm(x - y)) / longest if longest else 0.0,
    )


def _cosines(x: F64, y: F64) -> F64:
    """Return the cosine of each row: 1 for two rows of zeros, 0 if only one is zero."""
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    dots = (x * y).sum(axis=1)
    neither = ~x.any(axis=1) & ~y.any(axis=1)
    return np.where(neither, 1.0, np.divide(dots, norms, out=np.zeros_like(dots), where=norms > 0))


def _largest_ratio(x: F64, y: F64) -> float:
    large, small = np.maximum(x, y), np.minimum(x, y)
    if ((small == 0) & (large > 0)).any():
        return math.inf
    return float(np.divide(large, small, out=np.ones_like(large), where=small > 0).max())


def comparison_lines(a: Imatrix, b: Imatrix) -> list[str]:
    """Return a summary, a Markdown table, and what only one file has."""
    found = compare(a, b)
    lines = [
        f"{which}: {m.path}, {len(m.entries)} entries, {m.n_chunks} chunks, data: {', '.join(m.datasets) or 'unknown'}"
        for which, m in (("a", a), ("b", b))
    ]
    lines += ["", _summary(found)]
    if found.tensors:
        lines += [
            "",
            "| tensor | n | cosine | least of a matrix | largest ratio | difference | without data |",
            "|:---|---:|---:|---:|---:|---:|---:|",
            *(_row(c) for c in found.tensors),
        ]
    if found.sizes:
        lines += ["", "of different size, so from different models:"]
        lines += [f"  {name}: {n_a} values in a, {n_b} in b" for name, n_a, n_b in found.sizes]
    for which, names in zip("ab", found.only, strict=True):
        if names:
            lines += ["", f"only in {which}:", *(f"  {name}" for name in names)]
    return lines


def _summary(found: ComparedFiles) -> str:
    measured = [c for c in found.tensors if c.n]
    parts = [f"{len(found.tensors)} tensors in both"]
    if measured:
        mean = sum(c.cosine for c in measured) / len(measured)
        parts.append(f"cosine {mean:.4f} in the mean, {min(c.cosine for c in measured):.4f} at worst")
        parts.append(f"difference {sum(c.difference for c in measured) / len(measured):.2%} in the mean")
    left_out = sum(c.n_left_out for c in found.tensors)
    parts += [f"{left_out} experts without data left out"] if left_out else []
    parts += [f"{len(found.sizes)} of different size"] if found.sizes else []
    parts.append(f"only in a: {len(found.only[0])}, only in b: {len(found.only[1])}")
    return "; ".join(parts)


def _row(c: MatrixComparison) -> str:
    def text(value: float, form: str) -> str:
        return "" if math.isnan(value) else format(value, form)

    least = text(c.least_cosine, ".4f") if c.n_matrices > 1 else ""
    left_out = f"{c.n_left_out} of {c.n_matrices}" if c.n_left_out else ""
    return (
        f"| {c.name} | {c.n} | {text(c.cosine, '.4f')} | {least} | {text(c.ratio, '.3g')} "
        f"| {text(c.difference, '.2%')} | {left_out} |"
    )
