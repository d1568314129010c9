"""Describe the rows of a tensor on the device, where neighbouring lanes read neighbouring bytes.

A row becomes planes: one field of all its blocks after the other, planes and rows 16-byte aligned (a few bytes per row
more than in the file). Row-interleaved types are separated, so the device only has plain types. Scales of a row come
last. The order of fields is the one that `load` of the format in `kernels/weights_*.cuh` expects. The device rearranges
rows itself (`kernels/upload_rows.cu`, `transfer.py`); `convert` does the same on the CPU. Also here: the tables that
kernels of grid types read, and the name under which kernels know a type.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.graph import Weight
from ikcli.quant.bitmoves import byte_terms
from ikcli.quant.formats import get_format, row_size
from ikcli.quant.repack import layout, unrepack_rows
from ikcli.quant.tables import grid

Bytes = npt.NDArray[np.uint8]
T = GGMLType

_CHUNK_BYTES = 1 << 24  # of a tensor at a time: bounds temporaries


@dataclass(frozen=True, slots=True)
class DeviceRowFormat:
    """Rows of blocks of `columns` columns and `n_bytes` bytes after a header; `planes`: (offset, bytes) in a block.

    `scale`: bytes of the row's scale that are kept from the start of the header; 0: none.
    """

    name: str  # of the kernels: mv_<name>, mm_<name>, embed_<name>
    columns: int
    n_bytes: int
    planes: tuple[tuple[int, int], ...]
    header: int = 0
    scale: int = 0
    tile: str = ""  # backends/cpu/tile_modes.py; empty for floats

    def row_bytes(self, k: int) -> int:
        """Return the bytes of a row of k columns on the device."""
        blocks = k // self.columns
        return sum(_aligned(blocks * size) for _, size in self.planes) + _aligned(self.scale)


def _aligned(n: int) -> int:
    return -(-n // 16) * 16


@cache
def _format(type_: GGMLType) -> DeviceRowFormat | None:
    """Return the format of a type that needs no separation, or None without kernels."""
    t = TYPES[type_]
    if not t.cuda:
        return None
    scale = min(t.row_meta_size, 4)
    return DeviceRowFormat(t.cuda_name or t.name, t.block_size, t.type_size, t.cuda, t.row_meta_size, scale, t.tile)


def has_kernels(type_: GGMLType) -> bool:
    """Return whether a GPU multiplies with rows of a stored type."""
    base = get_format(type_).base
    return _format(base if base is not None else type_) is not None


def device_type(type_: GGMLType, name: str = "a tensor") -> GGMLType:
    """Return the type that rows of a stored type have on the device; raise UnsupportedError that names the tensor."""
    base = get_format(type_).base
    found = base if base is not None else type_
    if _format(found) is None:
        known = ", ".join(t.name for t in TYPES.values() if t.cuda)
        raise UnsupportedError(f"{name} is {get_format(type_).name}, which has no CUDA kernel; use a file in {known}")
    return found


def device_format(type_: GGMLType, name: str = "a tensor") -> DeviceRowFormat:
    """Return the device format of rows of a stored type."""
    found = _format(device_type(type_, name))
    assert found is not None
    return found


def is_float(type_: GGMLType) -> bool:
    """Return whether products of this type take float activations."""
    return TYPES[device_type(type_)].kind == "float"


def device_row_bytes(type_: GGMLType, k: int) -> int:
    """Return the bytes of a row of k columns on the device."""
    return device_format(type_).row_bytes(k)


def device_bytes(w: Weight) -> int:
    """Return the bytes of a whole tensor on the device."""
    n_rows = int(np.prod(w.shape[1:], dtype=np.int64)) if len(w.shape) > 1 else 1
    return n_rows * device_format(w.type, w.name).row_bytes(w.shape[0])


@dataclass(frozen=True, slots=True)
class GroupMoves:
    """How the bytes of a group of `rows` interleaved rows become those of plain rows (see `kernels/upload_rows.cu`).

    `terms`: (most terms of a byte, rows * unit) words; unit: bytes of a row in a unit.
    """

    terms: npt.NDArray[np.uint32]
    rows: int
    unit: int


_FLIPPED = 128  # is added to the codes of Q8_K_R16


@cache
def group_moves(type_: GGMLType) -> GroupMoves:
    """Return the moves of an interleaved type."""
    found = layout(type_)
    stored, plain = found.moves()
    if found.signs is not None:  # the inverse of SignCodes.scramble: every bit is XORed with the stored one below
        block = np.zeros((1, found.n_bytes), np.uint8)
        words = block[:, found.signs.start : found.signs.stop].view(found.signs.dtype)
        words[:, found.signs.step - 1 :: found.signs.step] = found.signs.mask(1)
        bits = np.flatnonzero(np.unpackbits(block[0], bitorder="little"))
        bits = (bits + 8 * found.n_bytes * np.arange(found.rows)[:, None]).reshape(-1)
        source = dict(zip(plain.tolist(), stored.tolist(), strict=True))
        stored = np.concatenate([stored, [source[bit - 1] for bit in bits.tolist()]])
        plain = np.concatenate([plain, bits])
    n_bytes = found.rows * found.n_bytes
    words_of = [
        [byte | (shift + 8) << 16 | mask << 24 for byte, shift, mask in terms]
        for terms in byte_terms(plain, stored, n_bytes)
    ]
    if type_ == T.Q8_K_R16:
        for i, column in enumerate(words_of):
            column += [_FLIPPED << 24] * (i % found.n_bytes >= 2)
    terms = np.zeros((max(map(len, words_of)), n_bytes), np.uint32)
    for i, column in enumerate(words_of):
        terms[: len(column), i] = column
    return GroupMoves(terms, found.rows, found.n_bytes)


def convert(data: Bytes, w: Weight, out: Bytes) -> None:
    """Write the bytes of a tensor of the file, in whole groups of rows, as device rows into `out`.

    `data` may be any number of whole groups of the tensor's rows; `out` has device_row_bytes for each of its rows.
    """
    fmt, k = device_format(w.type, w.name), w.shape[0]
    stored = row_size(w.type, k)
    rows, target = data.reshape(-1, stored), out.reshape(-1, fmt.row_bytes(k))
    group = get_format(w.type).rows
    step = max(1, _CHUNK_BYTES // (stored * group)) * group
    for i in range(0, len(rows), step):
        _convert_rows(_separated(rows[i : i + step], w.type, k), fmt, target[i : i + step], w.type, k)


def _separated(rows: Bytes, type_: GGMLType, k: int) -> Bytes:
    """Return rows of a plain type."""
    if get_format(type_).rows == 1:
        return rows
    plain = unrepack_rows(rows, type_, k)
    if type_ == T.Q8_K_R16:
        plain.reshape(len(plain), -1, 258)[:, :, 2:] ^= _FLIPPED
    return plain


def _convert_rows(rows: Bytes, fmt: DeviceRowFormat, out: Bytes, type_: GGMLType, k: int) -> None:
    n_blocks, at = k // fmt.columns, 0
    blocks = rows[:, fmt.header :].reshape(len(rows), n_blocks, fmt.n_bytes) if fmt.columns > 1 else None
    for offset, size in fmt.planes:
        n = n_blocks * size
        if blocks is None:
            out[:, at : at + n] = rows
        else:
            out[:, at : at + n].reshape(len(rows), n_blocks, size)[...] = blocks[:, :, offset : offset + size]
        out[:, at + n : at + _aligned(n)] = 0
        at += _aligned(n)
    if fmt.scale:
        out[:, at:] = 0
        out[:, at : at + fmt.scale] = rows[:, : fmt.scale]
        factor = TYPES[device_type(type_)].matmul_scale
        if factor != 1:  # what the reference does in products: once here
            scales = np.ascontiguousarray(rows[:, :4]).view("<f4") * np.float32(factor)
            out[:, at : at + 4] = scales.view(np.uint8)


def table_name(type_: GGMLType) -> str:
    """Return the grid whose points the kernels of a type read, or an empty text."""
    return TYPES[device_type(type_)].grid


@cache
def table_bytes(name: str) -> bytes:
    """Return the points of a grid as bytes, first column first; eightfold for the ternary grid."""
    factor = 8 if name == "IQ1_S" else 1
    return (grid(name) * factor).astype(np.int8).tobytes()
