"""Decoders of the row-interleaved types: rows are separated, then decoded as their plain type.

Formats without a plain type: Q8_K_R8 and Q8_K_R16 (f16 scale and 256 codes per block; the codes of R16 are stored
with 128 added), IQ1_S_R4 and IQ1_M_R4 (f16 scale per row, 32 columns: grid indices, 3-bit or two 4-bit scales).
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ikcli.gguf.constants import INTERLEAVED, GGMLType
from ikcli.quant.decode import Bytes, Floats, plain_row_decoder, row_decoder, row_scales
from ikcli.quant.decode_iquants import interleave_nibbles, ternary, words_at
from ikcli.quant.decode_legacy import f16_at, f32
from ikcli.quant.repack import unrepack_rows


def _regrouped(rows: Bytes, ne0: int, *, type: GGMLType, base: GGMLType) -> Floats:
    return plain_row_decoder(base)(unrepack_rows(rows, type, ne0), ne0)


for _type, (_base, _) in INTERLEAVED.items():
    if _base is not None:
        row_decoder(_type)(partial(_regrouped, type=_type, base=_base))


@row_decoder(GGMLType.Q8_K_R8)
def _q8_k_r8(rows: Bytes, ne0: int) -> Floats:
    blocks = unrepack_rows(rows, GGMLType.Q8_K_R8, ne0).reshape(-1, 258)
    return (f16_at(blocks, 0) * f32(blocks[:, 2:].view(np.int8))).reshape(-1, ne0)


@row_decoder(GGMLType.Q8_K_R16)
def _q8_k_r16(rows: Bytes, ne0: int) -> Floats:
    blocks = unrepack_rows(rows, GGMLType.Q8_K_R16, ne0).reshape(-1, 258)
    return (f16_at(blocks, 0) * (f32(blocks[:, 2:]) - 128)).reshape(-1, ne0)


@row_decoder(GGMLType.IQ1_S_R4)
def _iq1_s_r4(rows: Bytes, ne0: int) -> Floats:
    plain = unrepack_rows(rows, GGMLType.IQ1_S_R4, ne0)
    blocks = np.ascontiguousarray(plain[:, 2:]).reshape(-1, 6)
    d = row_scales(plain, 2).repeat(ne0 // 32)[:, None]
    qh = words_at(blocks, 4, 6, "<u2")
    high = qh >> np.array([0, 3, 6, 9], np.uint16) & 7
    scales = np.repeat(d * (2 * f32(qh >> 12 & 7) + 1), 4, axis=1)
    return ternary(scales, blocks[:, :4] | high << 8, np.repeat(qh >> 15, 4, axis=1)).reshape(-1, ne0)


@row_decoder(GGMLType.IQ1_M_R4)
def _iq1_m_r4(rows: Bytes, ne0: int) -> Floats:
    plain = unrepack_rows(rows, GGMLType.IQ1_M_R4, ne0)
    blocks = np.ascontiguousarray(plain[:, 2:]).reshape(-1, 7)
    d = row_scales(plain, 2).repeat(ne0 // 32)[:, None]
    qh = interleave_nibbles(blocks[:, 4:6])
    scales = np.repeat(d * f32(interleave_nibbles(blocks[:, 6:7])), 2, axis=1)
    return ternary(scales, blocks[:, :4] | (qh & 7).astype(np.uint16) << 8, qh >> 3).reshape(-1, ne0)
