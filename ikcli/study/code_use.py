"""Count how an encoder uses a format: codes, multipliers and minimums of sub-blocks, exponents of float scales.

Signs of a poor fit: multipliers crowded near zero (a few outliers set the scale of whole super-blocks), sub-blocks with
multiplier zero, multipliers at the end of their range, codes that hardly occur, f16 scales in the subnormal range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.quant.code_fields import CodeSpace, Fields, code_space, read_fields
from ikcli.quant.decode import row_scales
from ikcli.quant.decoders.iquants import words_at
from ikcli.quant.decoders.legacy import f16_at
from ikcli.quant.formats import row_size
from ikcli.quant.validate import block_scale_offsets

Counts = npt.NDArray[np.int64]
MOST_COUNTS = 2048  # longer tables of codes are reported in bins
_LEAST_PER_CODE = 8  # with fewer samples per code the entropy is underestimated
_EXPONENTS = (-150, 128)
_F16_SUBNORMAL = np.float32(2.0**-14)
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class CodeUse:
    """Counts of one type: codes (n_codes,), multipliers and minimums from their least value on, sub-blocks shifted.

    `exponents` counts the float scales by floor(log2) from -150 on; zero and f16 subnormal scales are counted
    separately.
    """

    space: CodeSpace
    codes: Counts
    multipliers: Counts | None
    minimums: Counts | None
    shifted: int
    n_choices: int
    exponents: Counts
    zero_scales: int
    subnormal_scales: int

    def __add__(self, other: CodeUse) -> CodeUse:
        return CodeUse(
            self.space,
            self.codes + other.codes,
            _sum(self.multipliers, other.multipliers),
            _sum(self.minimums, other.minimums),
            self.shifted + other.shifted,
            self.n_choices + other.n_choices,
            self.exponents + other.exponents,
            self.zero_scales + other.zero_scales,
            self.subnormal_scales + other.subnormal_scales,
        )

    @property
    def entropy(self) -> float | None:
        """The information in bits of one stored code; None if too few codes were seen."""
        n = int(self.codes.sum())
        if n < _LEAST_PER_CODE * self.space.n_codes:
            return None
        p = self.codes[self.codes > 0] / n
        return float(-(p * np.log2(p)).sum()) + 0.0

    @property
    def code_bits(self) -> float:
        """The bits of one code if all were equally frequent."""
        return float(np.log2(self.space.n_codes))

    @property
    def unused(self) -> int:
        """The number of codes that never occur."""
        return int((self.codes == 0).sum())

    @property
    def zero(self) -> float | None:
        """The share of sub-blocks with multiplier zero; None if the type has no integer multipliers or none of zero."""
        if self.multipliers is None or self.space.multipliers is None:
            return None
        low, high = self.space.multipliers
        return _share(self.multipliers[-low], self.multipliers) if low <= 0 <= high else None

    @property
    def top(self) -> float | None:
        """The share of sub-blocks whose multiplier is at an end of its range (zero does not count as one)."""
        if self.multipliers is None or self.space.multipliers is None:
            return None
        low, _ = self.space.multipliers
        at_end = self.multipliers[-1] + (self.multipliers[0] if low < 0 else 0)
        return _share(at_end, self.multipliers)

    @property
    def negative(self) -> float | None:
        """The share of sub-blocks with a negative multiplier; None where there are none."""
        if self.multipliers is None or self.space.multipliers is None or self.space.multipliers[0] >= 0:
            return None
        return _share(self.multipliers[: -self.space.multipliers[0]].sum(), self.multipliers)

    def magnitudes(self, n_bins: int = 8) -> Counts | None:
        """Count sub-blocks by |multiplier| in equal parts of 0..largest; None without multipliers."""
        if self.multipliers is None or self.space.multipliers is None:
            return None
        low, high = self.space.multipliers
        size = np.abs(np.arange(low, high + 1))
        return np.bincount(
            np.minimum(size * n_bins // size.max(), n_bins - 1), weights=self.multipliers, minlength=n_bins
        ).astype(np.int64)


def _sum(a: Counts | None, b: Counts | None) -> Counts | None:
    return a if b is None else b if a is None else a + b


def _share(part: Any, counts: Counts) -> float:
    n = int(counts.sum())
    return float(part) / n if n else 0.0


def count_codes(encoded: npt.NDArray[np.uint8], type: GGMLType, ne0: int) -> CodeUse | None:
    """Count over encoded rows of `ne0` elements; None for types without `code_space`."""
    space, fmt = code_space(type), TYPES[type]
    if space is None:
        return None
    rows = encoded.reshape(-1, row_size(type, ne0))
    blocks = np.ascontiguousarray(rows[:, fmt.row_meta_size :]).reshape(-1, fmt.type_size)
    found: Fields = read_fields(blocks, type)
    exponents, zero, subnormal = _count_scales(rows, blocks, type)
    return CodeUse(
        space,
        np.bincount(found.codes.reshape(-1), minlength=space.n_codes),
        _histogram(found.multipliers, space.multipliers),
        _histogram(found.minimums, space.minimums),
        int(found.shifts.sum()) if found.shifts is not None else 0,
        found.shifts.size if found.shifts is not None else 0,
        exponents,
        zero,
        subnormal,
    )


def _histogram(values: npt.NDArray[Any] | None, span: tuple[int, int] | None) -> Counts | None:
    if values is None or span is None:
        return None
    return np.bincount(values.reshape(-1).astype(np.int64) - span[0], minlength=span[1] - span[0] + 1)


def _count_scales(
    rows: npt.NDArray[np.uint8], blocks: npt.NDArray[np.uint8], type: GGMLType
) -> tuple[Counts, int, int]:
    """Count float scales by exponent, zero scales, and scales that f16 holds with fewer than 11 bits."""
    fmt, offsets = TYPES[type], block_scale_offsets(type)
    if type == GGMLType.MXFP4:
        counts = np.bincount(blocks[:, 0], minlength=256)
        out = np.zeros(_EXPONENTS[1] - _EXPONENTS[0], np.int64)
        out[-128 - _EXPONENTS[0] :][:256] = counts
        return out, 0, 0
    is_f16 = fmt.row_meta_size == 2 or not fmt.row_meta_size
    if fmt.row_meta_size:
        scales = row_scales(rows, fmt.row_meta_size)
    elif type == GGMLType.IQ1_M:
        parts = words_at(blocks, 48, 56, "<u2") >> 12
        scales = (parts << np.array([0, 4, 8, 12], np.uint16)).sum(axis=1, dtype=np.uint16).view(np.float16)
        scales = scales.astype(np.float32)
    else:
        scales = f16_at(blocks, offsets[0]).reshape(-1)
    size = np.abs(scales)
    nonzero = size[size > 0]
    exponents = np.frexp(nonzero)[1].astype(np.int64) - 1
    counts = np.bincount(exponents - _EXPONENTS[0], minlength=_EXPONENTS[1] - _EXPONENTS[0])
    subnormal = int((nonzero < _F16_SUBNORMAL).sum()) if is_f16 else 0
    return counts, int(size.size - nonzero.size), subnormal


def bars(counts: npt.NDArray[Any]) -> str:
    """Return one character per count, relative to the largest; a dot for zero."""
    top = float(counts.max(initial=0))
    if top == 0:
        return "·" * len(counts)
    heights = np.ceil(counts / top * len(_BARS)).astype(int)
    return "".join(_BARS[h - 1] if h else "·" for h in heights)


def folded(counts: Counts, n_bins: int) -> Counts:
    """Sum equal runs of neighbours into at most n_bins bins."""
    per = -(-len(counts) // n_bins)
    padded = np.zeros(-(-len(counts) // per) * per, np.int64)
    padded[: len(counts)] = counts
    return padded.reshape(-1, per).sum(axis=1)


def as_json(use: CodeUse) -> dict[str, Any]:
    """Return all counts; codes are summed in bins of `per_count` where a type has more than 2048."""
    codes = folded(use.codes, MOST_COUNTS)
    out: dict[str, Any] = {
        "codes": {
            "n_codes": use.space.n_codes,
            "weights_per_code": use.space.group,
            "entropy": use.entropy,
            "max_entropy": use.code_bits,
            "unused": use.unused,
            "per_count": use.space.n_codes // len(codes),
            "counts": codes.tolist(),
        }
    }
    if use.multipliers is not None and use.space.multipliers is not None:
        out["multipliers"] = {
            "least": use.space.multipliers[0],
            "zero": use.zero,
            "at_end": use.top,
            "negative": use.negative,
            "counts": use.multipliers.tolist(),
        }
    if use.minimums is not None and use.space.minimums is not None:
        out["minimums"] = {"least": use.space.minimums[0], "counts": use.minimums.tolist()}
    if use.n_choices:
        out["shifted_tables"] = use.shifted / use.n_choices
    present = np.flatnonzero(use.exponents)
    out["float_scales"] = {
        "exponents": {str(int(i) + _EXPONENTS[0]): int(use.exponents[i]) for i in present},
        "zero": use.zero_scales,
        "subnormal": use.subnormal_scales,
    }
    return out
