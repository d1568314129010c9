"""Weights on the device: rows of a file's tensor rearranged so that neighbouring lanes read neighbouring bytes.

A row becomes planes: one field of all its blocks after the other, planes and rows 16-byte aligned (a few bytes per row
more than in the file). Row-interleaved types are separated first, so the device knows plain types only. Scales
of a row come last. The order of fields is what `load` of the format in `kernels/weights_*.cuh` expects.
Also here: the tables that kernels of grid types read, and the name under which kernels know a type.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.graph import Weight
from ikcli.quant.formats import get_format, row_size
from ikcli.quant.repack import unrepack_rows
from ikcli.quant.tables import MATMUL_SCALE, grid

Bytes = npt.NDArray[np.uint8]
T = GGMLType

_CHUNK_BYTES = 1 << 24  # of a tensor at a time: bounds temporaries


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Rows of blocks of `columns` columns and `n_bytes` bytes after a header; `planes`: (offset, bytes) in a block.

    `scale`: bytes of the row's scale that are kept from the start of the header, 0: no such scale.
    """

    name: str  # of the kernels: mv_<name>, mm_<name>, embed_<name>
    columns: int
    n_bytes: int
    planes: tuple[tuple[int, int], ...]
    header: int = 0
    scale: int = 0

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of k columns on the device."""
        blocks = k // self.columns
        return sum(_aligned(blocks * size) for _, size in self.planes) + _aligned(self.scale)


def _aligned(n: int) -> int:
    return -(-n // 16) * 16


def _plain(name: str, n_bytes: int, *planes: tuple[int, int], columns: int = 256) -> RowFormat:
    return RowFormat(name, columns, n_bytes, planes)


def _scaled(
    name: str, n_bytes: int, scale: int, *planes: tuple[int, int], columns: int = 256, more: int = 0
) -> RowFormat:
    return RowFormat(name, columns, n_bytes, planes, scale + more, scale)


# Field offsets: the docstrings of `quant/decode_*.py`.
FORMATS: dict[GGMLType, RowFormat] = {
    T.Q4_0: _plain("q4_0", 18, (2, 16), (0, 2), columns=32),
    T.IQ4_NL: _plain("iq4_nl", 18, (2, 16), (0, 2), columns=32),
    T.MXFP4: _plain("mxfp4", 17, (1, 16), (0, 1), columns=32),
    T.Q4_1: _plain("q4_1", 20, (4, 16), (0, 4), columns=32),
    T.Q5_0: _plain("q5_0", 22, (6, 16), (2, 4), (0, 2), columns=32),
    T.Q5_1: _plain("q5_1", 24, (8, 16), (4, 4), (0, 4), columns=32),
    T.Q6_0: _plain("q6_0", 26, (10, 16), (2, 8), (0, 2), columns=32),
    T.Q8_0: _plain("q8_0", 34, (2, 32), (0, 2), columns=32),
    T.Q8_KV: _scaled("q8_KV", 32, 4, (0, 32), columns=32, more=4),
    T.Q8_K_R8: _plain("q8_K", 258, (2, 256), (0, 2)),
    T.Q8_K_R16: _plain("q8_K", 258, (2, 256), (0, 2)),
    T.Q2_K: _plain("q2_K", 84, (16, 64), (0, 16), (80, 4)),
    T.Q3_K: _plain("q3_K", 110, (32, 64), (0, 32), (96, 12), (108, 2)),
    T.Q4_K: _plain("q4_K", 144, (16, 128), (0, 16)),
    T.Q5_K: _plain("q5_K", 176, (48, 128), (16, 32), (0, 16)),
    T.Q6_K: _plain("q6_K", 210, (0, 128), (128, 64), (192, 16), (208, 2)),
    T.IQ4_XS: _plain("iq4_xs", 136, (8, 128), (0, 8)),
    T.IQ2_XXS: _plain("iq2_xxs", 66, (2, 64), (0, 2)),
    T.IQ2_XS: _plain("iq2_xs", 74, (2, 64), (66, 8), (0, 2)),
    T.IQ2_S: _plain("iq2_s", 82, (2, 32), (34, 32), (66, 8), (74, 8), (0, 2)),
    T.IQ3_XXS: _plain("iq3_xxs", 98, (2, 64), (66, 32), (0, 2)),
    T.IQ3_S: _plain("iq3_s", 110, (2, 64), (66, 8), (74, 32), (106, 4), (0, 2)),
    T.IQ1_S: _plain("iq1_s", 50, (2, 32), (34, 16), (0, 2)),
    T.IQ1_M: _plain("iq1_m", 56, (0, 32), (32, 16), (48, 8)),
    T.IQ1_S_R4: _scaled("iq1_s_r", 6, 2, (0, 4), (4, 2), columns=32),
    T.IQ1_M_R4: _scaled("iq1_m_r", 7, 2, (0, 4), (4, 2), (6, 1), columns=32),
    T.IQ2_K: _plain("iq2_k", 76, (12, 64), (4, 8), (0, 4)),
    T.IQ3_K: _plain("iq3_k", 110, (14, 64), (78, 32), (6, 8), (0, 6)),
    T.IQ4_K: _plain("iq4_k", 144, (16, 128), (0, 8), (8, 8)),
    T.IQ5_K: _plain("iq5_k", 176, (16, 128), (144, 32), (0, 8), (8, 8)),
    T.IQ6_K: _plain("iq6_k", 212, (20, 128), (148, 64), (4, 16), (0, 4)),
    T.IQ2_KS: _scaled("iq2_ks", 70, 2, (6, 64), (0, 6)),
    T.IQ3_KS: _scaled("iq3_ks", 102, 2, (6, 64), (70, 32), (0, 6)),
    T.IQ4_KS: _scaled("iq4_ks", 136, 4, (8, 128), (0, 8)),
    T.IQ5_KS: _scaled("iq5_ks", 168, 4, (8, 128), (136, 32), (0, 8)),
    T.IQ4_KSS: _scaled("iq4_kss", 128, 4, (0, 128)),
    T.IQ2_KL: _scaled("iq2_kl", 86, 2, (6, 64), (70, 16), (0, 6)),
    T.IQ1_KT: _scaled("iq1_kt", 56, 4, (8, 32), (40, 16), (0, 8)),
    T.IQ2_KT: _scaled("iq2_kt", 68, 4, (4, 64), (0, 4)),
    T.IQ3_KT: _scaled("iq3_kt", 100, 4, (4, 64), (68, 32), (0, 4)),
    T.IQ4_KT: _scaled("iq4_kt", 128, 4, (32, 64), (96, 32), (0, 32)),
    T.IQ1_BN: _scaled("iq1_bn", 13, 2, (0, 12), (12, 1), columns=64),
    T.IQ2_BN: _scaled("iq2_bn", 16, 4, (0, 16), columns=64),
    T.F32: _plain("f32", 4, (0, 4), columns=1),
    T.F16: _plain("f16", 2, (0, 2), columns=1),
    T.BF16: _plain("bf16", 2, (0, 2), columns=1),
}
FLOAT_TYPES = frozenset({T.F32, T.F16, T.BF16})


def device_type(type_: GGMLType, name: str = "a tensor") -> GGMLType:
    """The type as which rows of a stored type are on the device; UnsupportedError names the tensor."""
    base = get_format(type_).base
    found = base if base is not None else type_
    if found not in FORMATS:
        known = ", ".join(get_format(t).name for t in FORMATS)
        raise UnsupportedError(f"{name} is {get_format(type_).name}, which has no CUDA kernel; use a file in {known}")
    return found


def device_format(type_: GGMLType, name: str = "a tensor") -> RowFormat:
    """How rows of a stored type are on the device."""
    return FORMATS[device_type(type_, name)]


def is_float(type_: GGMLType) -> bool:
    """Products of this type take float activations."""
    return device_type(type_) in FLOAT_TYPES


def device_row_bytes(type_: GGMLType, k: int) -> int:
    """Bytes of a row of k columns on the device."""
    return device_format(type_).row_bytes(k)


def device_bytes(w: Weight) -> int:
    """Bytes of a whole tensor on the device."""
    n_rows = int(np.prod(w.shape[1:], dtype=np.int64)) if len(w.shape) > 1 else 1
    return n_rows * device_format(w.type, w.name).row_bytes(w.shape[0])


def convert(data: Bytes, w: Weight, out: Bytes) -> None:
    """The bytes of a tensor of the file, in whole groups of rows, as device rows into `out`.

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
    """Rows of a plain type."""
    if get_format(type_).rows == 1:
        return rows
    plain = unrepack_rows(rows, type_, k)
    if type_ == T.Q8_K_R16:  # stored with 128 added
        plain.reshape(len(plain), -1, 258)[:, :, 2:] ^= 128
    return plain


def _convert_rows(rows: Bytes, fmt: RowFormat, out: Bytes, type_: GGMLType, k: int) -> None:
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
        factor = MATMUL_SCALE.get(device_type(type_))
        if factor is not None:  # what the reference does in products: once here
            scales = np.ascontiguousarray(rows[:, :4]).view("<f4") * np.float32(factor)
            out[:, at : at + 4] = scales.view(np.uint8)


_GRIDS = {T.IQ1_M: T.IQ1_S, T.IQ1_S_R4: T.IQ1_S, T.IQ1_M_R4: T.IQ1_S}


def table_type(type_: GGMLType) -> GGMLType | None:
    """The grid type whose table the kernels of a type read, or None."""
    found = _GRIDS.get(device_type(type_), device_type(type_))
    return found if found in (T.IQ1_S, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ3_XXS, T.IQ3_S) else None


@cache
def table_bytes(type_: GGMLType) -> bytes:
    """The points of a grid as bytes, first column first; eightfold for the ternary grid."""
    factor = 8 if type_ == T.IQ1_S else 1
    return (grid(type_) * factor).astype(np.int8).tobytes()
