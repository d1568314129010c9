"""Regroup rows: plain types to their row-interleaved twins and back, byte for byte.

R consecutive rows of a matrix become one group of the same size (8 bytes less per row header in Q8_KV_R8). Groups do
not depend on each other, so any range of whole groups can be repacked in any thread. Layouts are in `interleave`.
Corresponds to iqk_repack_tensor and to `llama-quantize --repack`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from ikcli.errors import FormatError, UnsupportedError
from ikcli.gguf.constants import FILE_TYPE_GUESSED, GGMLType
from ikcli.gguf.types import TYPES
from ikcli.quant.bitmoves import BitMoves, compile_moves, count_lanes
from ikcli.quant.formats import READ_BY_ROW, interleaved_type, row_size, tensor_size
from ikcli.quant.interleave import Layout, layout_of

Bytes = npt.NDArray[np.uint8]

_CHUNK_BYTES = 1 << 19  # of row groups at a time: intermediate results stay in the cache
_COMPILED_BYTES = 1 << 20  # from this size on, a compiled kernel is worth its loading

# `general.file_type` of a model after repacking; other numbers stay as they are.
REPACKED_FILE_TYPES: dict[int, int] = {
    **{2: 202, 7: 207, 8: 208, 10: 210, 11: 211, 12: 211, 13: 211, 14: 214, 15: 214, 16: 216, 17: 216, 18: 218},
    **{19: 219, 20: 220, 23: 223, 24: 224, 25: 225, 26: 226, 29: 229, 30: 230, 31: 231, 32: 232, 135: 335, 137: 337},
    **{138: 338, 139: 339, 140: 340, 141: 341, 145: 345, 149: 398, 150: 350},
}


def repacked_file_type(number: int) -> int:
    """Return the `general.file_type` after repacking a model of file type `number`; the guessed bit is kept."""
    guessed = number & FILE_TYPE_GUESSED
    return REPACKED_FILE_TYPES.get(number ^ guessed, number ^ guessed) | guessed


def repacked_type(type: GGMLType, *, lossy: bool = False) -> GGMLType | None:
    """Return the interleaved twin of a plain type, or None; F16 becomes BF16_R16 only if `lossy` is allowed."""
    if type == GGMLType.F16:
        return GGMLType.BF16_R16 if lossy else None
    return interleaved_type(type)


def can_repack(type: GGMLType, shape: tuple[int, ...], name: str = "", *, lossy: bool = False) -> bool:
    """Return whether a tensor of `shape` (ne0, ne1, ...) can be repacked.

    It needs a type with a twin, whole groups per matrix, and a name whose rows are not looked up one by one.
    """
    target = repacked_type(type, lossy=lossy)
    if target is None or name.endswith(READ_BY_ROW) or len(shape) < 2:
        return False
    return shape[1] % TYPES[target].rows == 0 and shape[0] % layout(target).n_elements == 0


def repack(
    data: npt.NDArray[np.uint8], type: GGMLType, shape: tuple[int, ...], *, lossy: bool = False
) -> tuple[Bytes, GGMLType]:
    """Return the regrouped bytes of a plain tensor of `shape` (ne0, ne1, ...), and their type.

    Raises UnsupportedError for a type without twin or rows that do not fill groups, FormatError for a wrong size.
    """
    target = repacked_type(type, lossy=lossy)
    if target is None:
        raise UnsupportedError(f"tensors of type {TYPES[type].name} have no row-interleaved form")
    if not can_repack(type, shape, lossy=lossy):
        rows = TYPES[target].rows
        raise UnsupportedError(
            f"a {TYPES[type].name} tensor of shape {list(shape)} cannot become {TYPES[target].name}: "
            f"its number of rows is not a multiple of {rows}"
        )
    rows_in = _as_rows(data, type, shape)
    if type == GGMLType.F16:
        rows_in = _truncated_to_bf16(rows_in)
    return repack_rows(rows_in, target, shape[0]).reshape(-1), target


def unrepack(data: npt.NDArray[np.uint8], type: GGMLType, shape: tuple[int, ...]) -> tuple[Bytes, GGMLType]:
    """Return the bytes of an interleaved tensor as its plain type, and that type; the inverse of `repack`.

    Raises UnsupportedError for types without a plain twin, FormatError if the size does not fit the shape.
    """
    base = TYPES[type].base
    if base is None:
        raise UnsupportedError(f"tensors of type {TYPES[type].name} have no plain form")
    return unrepack_rows(_as_rows(data, type, shape), type, shape[0]).reshape(-1), base


def layout(type: GGMLType) -> Layout:
    """Return the bit layout of an interleaved type."""
    return layout_of(_layout_text(type))


def _layout_text(type: GGMLType) -> str:
    t = TYPES[type]
    return f"{t.layout},{t.rows},{t.block_size},{t.type_size}"


def repack_rows(rows: npt.NDArray[np.uint8], type: GGMLType, ne0: int, *, compiled: bool | None = None) -> Bytes:
    """Repack rows of bytes of the plain twin, in whole groups, into (n_rows, row bytes of `type`).

    The rows of the result are equal shares of the groups. Raises FormatError if the rows do not fill groups.
    """
    base = _base(type)
    rows = rows.reshape(-1, row_size(base, ne0))
    out = np.empty((len(rows), row_size(type, ne0)), np.uint8)
    repack_into(out, rows, type, ne0, compiled=compiled)
    return out


def repack_into(
    out: Bytes, rows: npt.NDArray[np.uint8], type: GGMLType, ne0: int, *, compiled: bool | None = None
) -> None:
    """Do `repack_rows` into `out`.

    Large parts go through a compiled kernel, which releases the GIL; `compiled` asks for it where the rows are a small
    part of something large.
    """
    base = _base(type)
    if compiled is None:
        compiled = rows.nbytes >= _COMPILED_BYTES
    for part in _parts(rows, type, ne0):
        (_move_compiled if compiled else _move)(out[part], rows[part], type, base)


def iq2_bn_of_i2_s(data: Bytes, ne0: int) -> Bytes:
    """Return a tensor of I2_S as rows (n_rows, row size) of IQ2_BN with the same values, each with its scale."""
    codes = data[:-32].reshape(-1, 1, 32) >> np.array([6, 4, 2, 0], np.uint8)[:, None] & np.uint8(3)
    quarters = codes.reshape(-1, 4, 16) << np.array([0, 2, 4, 6], np.uint8)[:, None]  # of 64 columns each
    packed = np.bitwise_or.reduce(quarters, axis=1).reshape(-1, ne0 // 4)
    return np.concatenate([np.broadcast_to(data[-32:-28], (len(packed), 4)), packed], axis=1)


def bf16_of_f16(rows: Bytes) -> Bytes:
    """Round rows of f16 (a multiple of 16 values) to the nearest even bf16."""
    from ikcli.native.kernel_cache import KernelKey
    from ikcli.quant.encoders.native_call import run

    src = np.ascontiguousarray(rows)
    out = np.empty_like(src)
    run(KernelKey("ikcli.quant.repack_kernels", "make_bf16_of_f16"), src.ctypes.data, out.ctypes.data, src.nbytes // 2)
    return out


def _base(type: GGMLType) -> GGMLType:
    base = TYPES[type].base
    if base is None:
        raise UnsupportedError(f"tensors of type {TYPES[type].name} have no plain form")
    return base


def _move(out: Bytes, rows: Bytes, type: GGMLType, base: GGMLType) -> None:
    form, header = _form(type), TYPES[type].row_meta_size
    groups = out.reshape(-1, form.rows * out.shape[1])
    groups[:, : form.rows * header] = rows[:, :header].reshape(len(groups), form.rows * header)
    body = rows[:, TYPES[base].row_meta_size :]
    groups[:, form.rows * header :] = form.interleave(body).reshape(len(groups), -1)


def _move_compiled(out: Bytes, rows: Bytes, type: GGMLType, base: GGMLType) -> None:
    from ikcli.native.kernel_cache import KernelKey
    from ikcli.quant.encoders.native_call import run

    found, header = layout(type), TYPES[base].row_meta_size
    src = np.ascontiguousarray(rows)
    key = KernelKey("ikcli.quant.repack_kernels", "make_repack", (_layout_text(type),))
    n_units, n_groups = (src.shape[1] - header) // found.n_bytes, len(src) // found.rows
    kept = TYPES[type].row_meta_size
    run(key, src.ctypes.data, src.shape[1], header, out.ctypes.data, kept, n_units, n_groups)


def unrepack_rows(rows: npt.NDArray[np.uint8], type: GGMLType, ne0: int) -> Bytes:
    """Separate groups of an interleaved type, given as (n_rows, row bytes), into rows of the plain twin.

    Types without a plain twin give the fields of one row instead (see `interleave`).
    """
    rows = np.ascontiguousarray(rows).reshape(-1, row_size(type, ne0))
    form = _form(type)
    header = TYPES[type].row_meta_size
    base = TYPES[type].base
    new_header = header if base is None else TYPES[base].row_meta_size
    out = np.empty((len(rows), new_header + ne0 // form.n_elements * form.n_bytes), np.uint8)
    for part in _parts(rows, type, ne0):
        groups = rows[part].reshape(-1, form.rows * rows.shape[1])
        out[part, :header] = groups[:, : form.rows * header].reshape(len(groups) * form.rows, header)
        out[part, new_header:] = form.separate(groups[:, form.rows * header :])
    if new_header > header:  # Q8_KV: the sum of the codes follows the scale
        sums = out[:, new_header:].view(np.int8).sum(axis=1, dtype="<i4")
        out[:, header:new_header] = sums[:, None].view(np.uint8)
    return out


@dataclass(frozen=True, slots=True)
class _Form:
    """A layout with its moves compiled in both directions; meanwhile plain blocks sit at `lead` of `stride` bytes."""

    layout: Layout
    stride: int
    lead: int
    forward: BitMoves
    backward: BitMoves

    @property
    def rows(self) -> int:
        return self.layout.rows

    @property
    def n_elements(self) -> int:
        return self.layout.n_elements

    @property
    def n_bytes(self) -> int:
        return self.layout.n_bytes

    def interleave(self, body: Bytes) -> Bytes:
        """Turn the blocks of whole groups of rows, (n_rows, bytes), into units (n, R * n_bytes) in file order."""
        blocks = body.reshape(-1, self.rows, body.shape[1] // self.n_bytes, self.n_bytes)
        n_groups, _, n_units, _ = blocks.shape
        padded = np.empty((n_groups, n_units, self.rows, self.stride), np.uint8)
        inner = padded[..., self.lead : self.lead + self.n_bytes]
        inner[...] = blocks.transpose(0, 2, 1, 3)
        if self.layout.signs is not None:
            self.layout.signs.scramble(inner)
        return self.forward.apply(padded.reshape(n_groups * n_units, -1))

    def separate(self, units: Bytes) -> Bytes:
        """Turn the units of groups, (n_groups, bytes), into blocks of rows, (n_rows, bytes)."""
        n_units = units.shape[1] // (self.rows * self.n_bytes)
        dense = np.ascontiguousarray(units).reshape(len(units) * n_units, -1)
        padded = self.backward.apply(dense).reshape(len(units), n_units, self.rows, self.stride)
        inner = padded[..., self.lead : self.lead + self.n_bytes]
        if self.layout.signs is not None:
            self.layout.signs.unscramble(inner)
        return inner.transpose(0, 2, 1, 3).reshape(len(units) * self.rows, -1)


@cache
def _form(type: GGMLType) -> _Form:
    """Compile a type; the padding of the plain blocks is chosen so that most fields are aligned to four bytes."""
    found = layout(type)
    n_unit = found.rows * found.n_bytes

    def n_lanes(lead: int) -> int:
        unit, rows = found.moves(_stride(found, lead), lead)
        return count_lanes(unit, rows, n_unit)

    lead = max(range(4), key=n_lanes)
    stride = _stride(found, lead)
    unit, rows = found.moves(stride, lead)
    n_padded = found.rows * stride
    forward = compile_moves(unit, rows, n_unit, n_padded)
    return _Form(found, stride, lead, forward, compile_moves(rows, unit, n_padded, n_unit))


def _stride(found: Layout, lead: int) -> int:
    return (lead + found.n_bytes + 3) // 4 * 4


def _parts(rows: Bytes, type: GGMLType, ne0: int) -> list[slice]:
    """Return slices of whole groups of a size that suits the cache."""
    n = TYPES[type].rows
    if len(rows) % n or ne0 % layout(type).n_elements:
        raise FormatError(f"{TYPES[type].name} takes {n} rows at a time, not {len(rows)} rows of {ne0} elements")
    step = max(1, _CHUNK_BYTES // (n * rows.shape[1])) * n
    return [slice(i, i + step) for i in range(0, len(rows), step)]


def _as_rows(data: npt.NDArray[np.uint8], type: GGMLType, shape: tuple[int, ...]) -> Bytes:
    raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    if raw.size != tensor_size(type, shape):
        raise FormatError(f"a {TYPES[type].name} tensor of shape {list(shape)} has {raw.size} bytes of data")
    if TYPES[type].is_interleaved and (len(shape) < 2 or shape[1] % TYPES[type].rows):
        raise FormatError(f"a {TYPES[type].name} tensor of shape {list(shape)} does not consist of whole groups")
    return raw.reshape(-1, row_size(type, shape[0]))


def _truncated_to_bf16(rows: Bytes) -> Bytes:
    """Truncate F16 to BF16 without rounding, as the reference does on the way to BF16_R16."""
    bits = rows.view("<f2").astype(np.float32).view(np.uint32)
    return (bits >> 16).astype("<u2").view(np.uint8)
