"""Decode the trellis types: an index per group of 8 weights (4 in IQ4_KT) seeds a generator of integer values.

Rows start with one f32 scale; sub-blocks of 32 have a multiplier: x = (d * multiplier) * value.
IQ1_KT sh[8] ql[32] qh[16], 13-bit index                   IQ2_KT scales[4] ql u16[32]
IQ3_KT scales[4] ql u16[32] qh[32], |value| and sign bits  IQ4_KT shb u32[8] ql[64] qh[32], 15-bit index
Corresponds to iqk_quantize.cpp. The scale is the stored one. In matrix products the reference multiplies some types by
a further constant, `TensorType.matmul_scale`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ikcli.quant.decode import Bytes, Floats, row_scale_decoder
from ikcli.quant.decoders.iquants import words_at
from ikcli.quant.decoders.kquants import codes_1bit
from ikcli.quant.decoders.legacy import f32, nibbles
from ikcli.quant.tables import IQ4_VALUES, TRELLIS_OFFSET, TRELLIS_OFFSET_HIGH, trellis


def _scaled(d: Floats, multipliers: Floats, values: Floats) -> Floats:
    """Multiply row scales (n, 1), multipliers (n, 8) and values (n, groups, size); returns (n, 256)."""
    return np.repeat(d * multipliers, 32, axis=1) * values.reshape(-1, 256)


@row_scale_decoder
def iq1_kt(d: Floats, blocks: Bytes) -> Floats:
    sh = blocks[:, :8]
    top = (sh[:, :, None] >> np.arange(4, 8, dtype=np.uint8) & 1).reshape(-1, 32)
    index = blocks[:, 8:40] | nibbles(blocks[:, 40:56]).astype(np.uint16) << 8 | top.astype(np.uint16) << 12
    return _scaled(d, IQ4_VALUES[0][sh & 15], trellis(8)[index])


@row_scale_decoder
def iq2_kt(d: Floats, blocks: Bytes) -> Floats:
    return _scaled(d, IQ4_VALUES[0][nibbles(blocks[:, :4])], trellis(8)[words_at(blocks, 4, 68, "<u2")])


@row_scale_decoder
def iq3_kt(d: Floats, blocks: Bytes) -> Floats:
    x = _scaled(d, f32(nibbles(blocks[:, :4])), np.abs(trellis(8)[words_at(blocks, 4, 68, "<u2")]))
    return np.where(codes_1bit(blocks[:, 68:100]), -x, x)


@row_scale_decoder
def iq4_kt(d: Floats, blocks: Bytes) -> Floats:
    shb = words_at(blocks, 0, 32, "<u4")
    top = (shb[:, :, None] >> np.arange(8, 32, 3, dtype=np.uint32) & 7).reshape(-1, 64)
    index = blocks[:, 32:96] | nibbles(blocks[:, 96:128]).astype(np.uint16) << 8 | top.astype(np.uint16) << 12
    high_half = np.repeat(shb & 1, 8, axis=1)[:, :, None]
    multipliers = f32((shb & 255) >> 1) - 64
    return _scaled(d, multipliers, np.where(high_half, _iq4_kt_table(True)[index], _iq4_kt_table(False)[index]))


def _iq4_kt_table(high: bool) -> npt.NDArray[np.float32]:
    return trellis(4, TRELLIS_OFFSET_HIGH if high else TRELLIS_OFFSET, 32768)
