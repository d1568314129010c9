"""Decode types of llama.cpp alone: TQ1_0, TQ2_0, Q1_0 (here Q1_0_G128), Q2_0 and NVFP4.

TQ1_0  256: qs[48], qh[4], d f16; five base-3 digits per byte, the first on top: elements 32 apart, behind 160 elements
       16 apart, in qh four that are 4 apart; the byte is the fraction, 256 / 243 of the number
TQ2_0  256: qs[64], d f16; 2 bits of elements 32 apart per byte         Q1_0  128: d f16, 16 bytes of bits: d or -d
Q2_0   64: d f16, 16 bytes with 2 bits of adjacent elements             NVFP4  64: 4 scales E4M3 (of 16), qs[32]: E2M1
Ternary codes and those of Q2_0 mean d * (q - 1). Nibbles of NVFP4 are those of 16 elements, 8 apart in a byte; a scale
has no sign, and 127 (NaN) counts as 0. Corresponds to ggml-quants.c.
"""

from __future__ import annotations

import numpy as np

from ikcli.quant.decode import Bytes, Floats, block_decoder
from ikcli.quant.decoders.legacy import f16_at, f32
from ikcli.quant.tables import MXFP4_VALUES

_POWERS = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
_SHIFTS = np.array([0, 2, 4, 6], np.uint8)


def _digits(part: Bytes, n: int) -> Floats:
    """Return n digits per byte of (blocks, bytes): the first of all bytes, then the second, ..."""
    fractions = part[:, None, :] * _POWERS[:n]  # modulo 256 on purpose
    return f32(fractions.astype(np.uint16) * 3 >> 8).reshape(len(part), -1)


@block_decoder
def tq1_0(blocks: Bytes) -> Floats:
    parts = (_digits(blocks[:, :32], 5), _digits(blocks[:, 32:48], 5), _digits(blocks[:, 48:52], 4))
    return f16_at(blocks, 52) * (np.concatenate(parts, axis=1) - 1)


@block_decoder
def tq2_0(blocks: Bytes) -> Floats:
    codes = blocks[:, :64].reshape(-1, 2, 1, 32) >> _SHIFTS[:, None] & np.uint8(3)
    return f16_at(blocks, 64) * (f32(codes).reshape(len(blocks), 256) - 1)


@block_decoder
def q1_0_g128(blocks: Bytes) -> Floats:
    d = f16_at(blocks, 0)
    return np.where(np.unpackbits(blocks[:, 2:], axis=1, bitorder="little"), d, -d)


@block_decoder
def q2_0(blocks: Bytes) -> Floats:
    codes = blocks[:, 2:, None] >> _SHIFTS & np.uint8(3)
    return f16_at(blocks, 0) * (f32(codes).reshape(len(blocks), 64) - 1)


@block_decoder
def nvfp4(blocks: Bytes) -> Floats:
    scale, qs = blocks[:, :4, None], blocks[:, 4:].reshape(-1, 4, 8)
    exponent, fraction = (scale >> 3 & np.uint8(15)).astype(np.int32), f32(scale & np.uint8(7))
    d = np.where(exponent, np.ldexp(1 + fraction / 8, exponent - 7), np.ldexp(fraction, -9))
    d = np.where(scale == 127, 0, d) / 2  # the table holds doubled values
    table = np.asarray(MXFP4_VALUES, np.float32)
    values = np.concatenate((table[qs & np.uint8(15)], table[qs >> 4]), axis=2)
    return (values * d).astype(np.float32).reshape(len(blocks), 64)
