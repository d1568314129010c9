"""Scan tensor bytes for NaN and Inf: every value of the float types, every stored scale of the others.

In a quantized block only scales can be non-finite, so a scan reads a few bytes per block, in chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ikcli.errors import FormatError, NonFiniteError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import GGUFFile, TensorInfo
from ikcli.gguf.types import TYPES, TensorType
from ikcli.quant.formats import row_size

_CHUNK_BYTES = 8 << 20
_T = GGMLType


class NonFinite(NamedTuple):
    """A tensor with NaN or Inf and the index of the first element that it affects."""

    name: str
    element: int


def block_scale_offsets(type: GGMLType) -> tuple[int, ...]:
    """Return the byte offsets of the f16 scales in a block of a plain type (d, then m or dmin); empty without any."""
    return TYPES[type].scales if TYPES[type].rows == 1 else ()


def check_tensors(file: GGUFFile, names: Iterable[str] | None = None) -> Iterator[NonFinite]:
    """Yield the tensors that hold NaN or Inf with the first affected element; types without float fields pass."""
    for name in file.tensors if names is None else names:
        t = file.tensors.get(name)
        if t is None:
            raise FormatError(f"{file.paths[0]}: no tensor named {name}")
        index = first_non_finite(file.data(name), t)
        if index is not None:
            yield NonFinite(name, index)


def check_finite(file: GGUFFile, names: Iterable[str]) -> None:
    """Raise NonFiniteError that names the given tensors, among those of the file, which hold NaN or Inf."""
    bad = list(check_tensors(file, sorted(n for n in names if n in file.tensors)))
    if bad:
        where = ", ".join(f"{b.name} (element {b.element})" for b in bad[:5])
        raise NonFiniteError(f"{file.paths[0]}: {len(bad)} tensors hold NaN or Inf: {where}")


def first_non_finite(data: npt.NDArray[np.uint8], t: TensorInfo) -> int | None:
    """Return the index of the first element whose value or scale is NaN or Inf, or None."""
    fmt = TYPES[t.type]
    base = fmt.base or fmt.type
    if base in (_T.F32, _T.F16, _T.BF16, _T.F64):
        bad_float = _first_bad_float(data, base)
        return _deinterleaved(bad_float, fmt, t.shape[0]) if bad_float is not None and fmt.rows > 1 else bad_float
    if t.type == _T.I2_S:
        scale = data[-32:-28].view("<f4")
        return None if np.isfinite(scale[0]) else 0
    n_bytes = row_size(t.type, t.shape[0]) * fmt.rows
    step = max(1, _CHUNK_BYTES // n_bytes)
    groups = data.reshape(-1, n_bytes)
    for i in range(0, len(groups), step):
        bad = _bad_groups(groups[i : i + step], fmt)
        if bad is not None:
            return (i + bad[0]) * fmt.rows * t.shape[0] + bad[1]
    return None


def _first_bad_float(data: npt.NDArray[np.uint8], base: GGMLType) -> int | None:
    """Return the index of the first NaN or Inf, told by the exponent bits alone, or None.

    An unaligned offset needs a copy; hence the chunks.
    """
    code, mask = {
        _T.F32: ("<u4", 0x7F800000),
        _T.F16: ("<u2", 0x7C00),
        _T.BF16: ("<u2", 0x7F80),
        _T.F64: ("<u8", 0x7FF0000000000000),
    }[base]
    itemsize = np.dtype(code).itemsize
    for i in range(0, len(data), _CHUNK_BYTES):
        bits = data[i : i + _CHUNK_BYTES].view(code)
        bad = (bits & bits.dtype.type(mask)) == mask
        if bad.any():
            return i // itemsize + int(bad.argmax())
    return None


def _deinterleaved(stored: int, fmt: TensorType, ne0: int) -> int:
    """Return the element index of a stored value of bf16_r16, where pairs of columns of R rows follow each other."""
    group, rest = divmod(stored, fmt.rows * ne0)
    pair, rest = divmod(rest, 2 * fmt.rows)
    row, column = rest // 2, 2 * pair + rest % 2
    return (group * fmt.rows + row) * ne0 + column


def _bad_groups(groups: npt.NDArray[np.uint8], fmt: TensorType) -> tuple[int, int] | None:
    """Return (group, element inside the group) of the first bad scale among groups of `fmt.rows` rows."""
    header = fmt.row_meta_size * fmt.rows
    if header:
        bad = ~np.isfinite(_row_scales(groups[:, :header], fmt))
        if bad.any():
            group, row = divmod(int(bad.argmax()), fmt.rows)
            n_blocks = (groups.shape[1] - header) // (fmt.type_size * fmt.rows)
            return group, row * n_blocks * fmt.block_size
    n_blocks = (groups.shape[1] - header) // (fmt.type_size * fmt.rows)
    blocks = groups[:, header:].reshape(len(groups), n_blocks, fmt.type_size * fmt.rows)
    scales = _block_scales(blocks, fmt)
    if scales is None:
        return None
    bad = ~np.isfinite(scales)  # (group, block, field, row)
    if not bad.any():
        return None
    per_element = bad.any(axis=2).transpose(0, 2, 1).reshape(len(groups), -1)  # (group, row * block)
    group, first = divmod(int(per_element.argmax()), per_element.shape[1])
    return group, first * fmt.block_size


def _row_scales(header: npt.NDArray[np.uint8], fmt: TensorType) -> npt.NDArray[np.floating]:
    """Read the scales (groups, rows) at the start of row headers: f16 in a header of 2 bytes, f32 otherwise."""
    headers = np.ascontiguousarray(header).reshape(-1, fmt.row_meta_size)
    if fmt.row_meta_size == 2:
        return headers.view("<f2").reshape(-1)
    return np.ascontiguousarray(headers[:, :4]).view("<f4").reshape(-1)


def _block_scales(blocks: npt.NDArray[np.uint8], fmt: TensorType) -> npt.NDArray[np.floating] | None:
    """Return scales as (groups, blocks, fields, rows), or None if blocks hold none; an exponent of 255 is NaN."""
    if fmt.type == _T.IQ1_M:
        nibbles = np.ascontiguousarray(blocks[..., 48:56]).view("<u2") >> 12
        bits = (nibbles << np.array([0, 4, 8, 12], np.uint16)).sum(axis=-1, dtype=np.uint16)
        return bits.view(np.float16)[..., None, None]
    if _T.MXFP4 in (fmt.type, fmt.base):
        return np.where(blocks[..., None, : fmt.rows] == 255, np.nan, 1.0)
    n_fields = len(TYPES[fmt.plain].scales)
    if not n_fields:
        return None
    if fmt.rows > 1:  # these fields are first, one per row
        raw = np.ascontiguousarray(blocks[..., : 2 * fmt.rows * n_fields])
        return raw.view("<f2").reshape(*blocks.shape[:2], n_fields, fmt.rows)
    fields = [np.ascontiguousarray(blocks[..., o : o + 2]).view("<f2") for o in fmt.scales]
    return np.stack(fields, axis=2)
