"""Decode row-interleaved types without a plain twin, after `repack.unrepack_rows` has separated their rows.

Q8_K_R8, Q8_K_R16: f16 scale and 256 codes per block; the codes of R16 are stored with 128 added. IQ1_S_R4, IQ1_M_R4:
f16 scale per row; per 32 columns grid indices and a 3-bit scale or two 4-bit scales.
"""

from __future__ import annotations

import numpy as np

from ikcli.quant.decode import Bytes, Floats, block_decoder, row_scale_decoder
from ikcli.quant.decoders.iquants import interleave_nibbles, ternary, words_at
from ikcli.quant.decoders.legacy import f16_at, f32


@block_decoder
def q8_k_r8(blocks: Bytes) -> Floats:
    return f16_at(blocks, 0) * f32(blocks[:, 2:].view(np.int8))


@block_decoder
def q8_k_r16(blocks: Bytes) -> Floats:
    return f16_at(blocks, 0) * (f32(blocks[:, 2:]) - 128)


@row_scale_decoder
def iq1_s_r4(d: Floats, blocks: Bytes) -> Floats:
    qh = words_at(blocks, 4, 6, "<u2")
    high = qh >> np.array([0, 3, 6, 9], np.uint16) & 7
    scales = np.repeat(d * (2 * f32(qh >> 12 & 7) + 1), 4, axis=1)
    return ternary(scales, blocks[:, :4] | high << 8, np.repeat(qh >> 15, 4, axis=1))


@row_scale_decoder
def iq1_m_r4(d: Floats, blocks: Bytes) -> Floats:
    qh = interleave_nibbles(blocks[:, 4:6])
    scales = np.repeat(d * f32(interleave_nibbles(blocks[:, 6:7])), 2, axis=1)
    return ternary(scales, blocks[:, :4] | (qh & 7).astype(np.uint16) << 8, qh >> 3)
