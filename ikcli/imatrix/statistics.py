"""Views of importance matrices: a table per tensor, and how similar the inputs of layers are (-lsim).

Table columns: sum of mean squares, least, largest, mean, standard deviation; share of columns above 1e-5; entropy of
the normalised values in bits, and in percent of its maximum; share of columns whose z-score is above 1; cosine with the
same tensor of the previous block. Corresponds to `--show-statistics` and `--layer-similarity` of the imatrix tools.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ikcli.graph import Node
from ikcli.graph.ops_rows import RmsNorm
from ikcli.quant.imatrix_file import Imatrix

_ACTIVE = 1e-5
F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """Statistics of one entry; `cosine` is NaN in the first block that has the tensor."""

    name: str
    n: int
    total: float
    least: float
    largest: float
    mean: float
    deviation: float
    active: float
    entropy: float
    outliers: float
    cosine: float

    @property
    def relative_entropy(self) -> float:
        """Return the entropy relative to that of equal values, 0..1."""
        return self.entropy / np.log2(self.n) if self.n > 1 else 1.0


def statistics(imatrix: Imatrix) -> list[TensorStatistics]:
    """Return statistics of every entry, largest total first."""
    found = {name: entry.values.astype(np.float64) for name, entry in imatrix.entries.items()}
    rows = [_statistics(name, v, _before(name, found)) for name, v in found.items()]
    return sorted(rows, key=lambda r: (-r.total, r.name))


def _before(name: str, found: dict[str, F64]) -> F64 | None:
    m = re.match(r"blk\.(\d+)\.(.*)", name)
    if m is None:
        return None
    other = found.get(f"blk.{int(m[1]) - 1}.{m[2]}")
    return other if other is not None and other.size == found[name].size else None


def _statistics(name: str, v: F64, before: F64 | None) -> TensorStatistics:
    total, mean, deviation = float(v.sum()), float(v.mean()), float(v.std())
    p = v[v > 0] / total if total > 0 else v[:0]
    cosine = float("nan")
    if before is not None:
        norms = float(np.linalg.norm(v) * np.linalg.norm(before))
        cosine = float(v @ before) / norms if norms > 0 else 0.0
    return TensorStatistics(
        name,
        v.size,
        total,
        float(v.min()),
        float(v.max()),
        mean,
        deviation,
        float((v > _ACTIVE).mean()),
        float(-(p * np.log2(p)).sum()),
        float((np.abs(v - mean) > deviation).mean()),
        cosine,
    )


def statistics_lines(imatrix: Imatrix) -> list[str]:
    """Return the table as Markdown."""
    lines = [
        f"{len(imatrix.entries)} entries, {imatrix.n_chunks} chunks, data: {', '.join(imatrix.datasets) or 'unknown'}",
        "",
        "| tensor | n | sum | min | max | mean | stddev | active | entropy | of max | z > 1 | cosine |",
        "|:---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for s in statistics(imatrix):
        cosine = "" if np.isnan(s.cosine) else f"{s.cosine:.4f}"
        lines.append(
            f"| {s.name} | {s.n} | {s.total:.2f} | {s.least:.4f} | {s.largest:.4f} | {s.mean:.4f} | {s.deviation:.4f} "
            f"| {s.active:.1%} | {s.entropy:.2f} | {s.relative_entropy:.1%} | {s.outliers:.1%} | {cosine} |"
        )
    return lines


@dataclass(slots=True)
class LayerSimilarity:
    """Observer: mean cosine of the normed inputs before and after a layer, its attention and its feed-forward part."""

    sums: dict[tuple[str, int], tuple[float, int]] = field(default_factory=dict)
    _attn: npt.NDArray[np.float32] | None = None
    _ffn: npt.NDArray[np.float32] | None = None

    def __call__(self, node: Node, value: npt.NDArray[np.generic]) -> None:
        """Take the output of a node; only the norms that begin attention and feed-forward parts count."""
        kind, il = node.name.rpartition("-")[0], node.il
        if not isinstance(node.op, RmsNorm) or il < 0:
            return
        x = value.astype(np.float32)
        if kind == "attn_norm":
            if il > 0:
                self._add("layer", il - 1, self._attn, x)
                self._add("feed-forward", il - 1, self._ffn, x)
            self._attn = x
        elif kind == "ffn_norm":
            self._add("attention", il, self._attn, x)
            self._ffn = x

    def _add(self, kind: str, il: int, a: npt.NDArray[np.float32] | None, b: npt.NDArray[np.float32]) -> None:
        if a is None or a.shape != b.shape:
            return
        norms = np.linalg.norm(a, axis=1).astype(np.float64) * np.linalg.norm(b, axis=1)
        dots = (a * b).sum(axis=1, dtype=np.float64)
        cosines = np.divide(dots, norms, out=np.zeros_like(dots), where=norms > 0)
        total, n = self.sums.get((kind, il), (0.0, 0))
        self.sums[kind, il] = total + float(cosines.sum()), n + len(cosines)

    def means(self) -> dict[tuple[str, int], float]:
        """Return the mean cosine by (kind, layer)."""
        return {key: total / n for key, (total, n) in self.sums.items()}

    def lines(self) -> list[str]:
        """Return lines with the layers, those that change their input most first."""
        lines: list[str] = []
        means = self.means()
        for kind in ("layer", "attention", "feed-forward"):
            found = sorted((abs(m), il, m) for (k, il), m in means.items() if k == kind)
            lines += ["", f"======================== sorted {kind} importances"]
            lines += [f"{i:3d}: Layer {il:3d}, <cos_sim> = {m:g}" for i, (_, il, m) in enumerate(found)]
        return lines
