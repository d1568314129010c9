"""Decode ternary types of rows and Q8_KV.

IQ1_BN  row: d f16; blocks of 64: ql[12] extra, five base-3 digits per byte     IQ2_BN  row: d f32; 64: qs[16]
Q8_KV   row: d f32, sum of all codes i32; then one i8 per element
I2_S    the whole tensor: 128 elements in 32 bytes, then one f32 scale in 32 bytes (BitNet files of Microsoft)
A ternary code q means d * (q - 1). The row decoders of the reference leave out the row scale of IQ1_BN and IQ2_BN;
here it is applied, as in its matrix products. Corresponds to iqk_quantize.cpp.
"""

from __future__ import annotations

import numpy as np

from ikcli.quant.decode import Bytes, Floats, row_scale_decoder, tensor_decoder
from ikcli.quant.decoders.legacy import f32

_POWERS = np.array([81, 27, 9, 3, 1], np.uint8)  # bring digit 0, 1, ... to the top of a byte
_SHIFTS_2BIT = np.array([0, 2, 4, 6], np.uint8)[:, None]


@row_scale_decoder
def iq1_bn(d: Floats, blocks: Bytes) -> Floats:
    n = len(blocks)
    fractions = blocks[:, :, None] * _POWERS  # (n, 13, 5), modulo 256 on purpose
    digits = (fractions.astype(np.uint16) * 3 >> 8).astype(np.float32)
    runs = digits[:, :12].reshape(n, 4, 15)  # 15 elements of each run of 16 in three bytes, the last one in `extra`
    codes = np.concatenate((runs, digits[:, 12, :4, None]), axis=2).reshape(n, 64)
    return d * (codes - 1)


@row_scale_decoder
def iq2_bn(d: Floats, blocks: Bytes) -> Floats:
    codes = (blocks[:, None, :] >> _SHIFTS_2BIT & np.uint8(3)).reshape(len(blocks), 64)
    return d * (f32(codes) - 1)


@row_scale_decoder
def q8_kv(d: Floats, blocks: Bytes) -> Floats:
    return d * f32(blocks.view(np.int8))


@tensor_decoder
def i2_s(data: Bytes) -> Floats:
    scale = data[-32:-28].view("<f4")
    codes = data[:-32].reshape(-1, 1, 32) >> _SHIFTS_2BIT[::-1] & np.uint8(3)  # first 32 elements in the top bits
    return (scale * (f32(codes) - 1)).reshape(-1)
