"""Decode the IQ*_K family (one f16 scale per 256) and the KS, KSS and KL types (one scale per row).

A code picks an entry of a non-linear table; every sub-block of 16 (K) or 32 has an integer multiplier and one bit
that picks the base or the shifted row of the table: x = (d * multiplier) * table[bit][code], in this order.
IQ2_K d extra u16 scales[8] qs[64]                         IQ3_K d extra scales_h u16 scales_l[8] qs[64] qh[32]
IQ4_K d extra scales_h[4] scales_l[8] qs[128]              IQ5_K as IQ4_K, then qh[32]
IQ6_K d extra scales i8[16] qs[128] qh[64]                 IQ2_KS extra scales[4] qs[64]
IQ3_KS extra scales[4] qs[64] qh[32]                       IQ4_KS scales[8] qs[128]   IQ5_KS as IQ4_KS, then qh[32]
IQ4_KSS u16[64]: four code pairs and a scale bit each      IQ2_KL scales_h u16 scales_l[4] qs[64] qh[16]
Corresponds to iqk_quantize.cpp. IQ6_K is decoded with the rounded table, as in matrix products of the reference. The
reference's row decoder evaluates the cubic behind the table and differs by up to half a step of the table.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ikcli.quant.decode import Bytes, Floats, block_decoder, row_scale_decoder
from ikcli.quant.decoders.iquants import codes_nl, interleave_nibbles, words_at
from ikcli.quant.decoders.kquants import codes_1bit, codes_2bit, codes_4bit
from ikcli.quant.decoders.legacy import f16_at, f32, nibbles
from ikcli.quant.tables import IQ2_KL_VALUES, IQ2_VALUES, IQ3_VALUES, IQ4_VALUES, IQ5_VALUES, IQ6_VALUES

_SHIFTS_2BIT = np.array([0, 2, 4, 6], np.uint8)


def _values(table: Floats, shifted: npt.NDArray[np.generic], codes: npt.NDArray[np.integer]) -> Floats:
    """Look up codes (n, 256) in a value table whose row (0 or 1) is given per sub-block (n, k); returns (n, 256)."""
    n_codes = table.shape[1]
    row = np.repeat(shifted.astype(np.uint8), codes.shape[1] // shifted.shape[1], axis=1)
    return table.reshape(-1)[codes + row * np.uint8(n_codes)]


def _scaled(d: Floats, multipliers: npt.NDArray[np.generic], values: Floats) -> Floats:
    """Return (d * multiplier) * value with multipliers (n, k) per sub-block."""
    dl = d * f32(multipliers)
    return np.repeat(dl, values.shape[1] // dl.shape[1], axis=1) * values


def _bits(blocks: Bytes, start: int, stop: int) -> Bytes:
    return np.unpackbits(blocks[:, start:stop], axis=1, bitorder="little")


def _signed_6bit(scales_l: Bytes, scales_h: Bytes) -> npt.NDArray[np.int8]:
    """Join the low nibbles [8] and 2-bit tops [4] of sixteen scales into multipliers -32..31."""
    high = (scales_h[:, :, None] >> _SHIFTS_2BIT & np.uint8(3)).reshape(-1, 16)
    return (interleave_nibbles(scales_l) | high << 4).astype(np.int8) - np.int8(32)


@block_decoder
def iq2_k(blocks: Bytes) -> Floats:
    m = interleave_nibbles(blocks[:, 4:12]).astype(np.int8) - np.int8(8)
    return _scaled(f16_at(blocks, 0), m, _values(IQ2_VALUES, _bits(blocks, 2, 4), codes_2bit(blocks[:, 12:76])))


@block_decoder
def iq3_k(blocks: Bytes) -> Floats:
    m = 2 * interleave_nibbles(blocks[:, 6:14]).astype(np.int8) + 1
    m = np.where(_bits(blocks, 4, 6), -m, m)
    codes = codes_2bit(blocks[:, 14:78]) | codes_1bit(blocks[:, 78:110]) << 2
    return _scaled(f16_at(blocks, 0), m, _values(IQ3_VALUES, _bits(blocks, 2, 4), codes))


@block_decoder
def iq4_k(blocks: Bytes) -> Floats:
    m = _signed_6bit(blocks[:, 8:16], blocks[:, 4:8])
    return _scaled(f16_at(blocks, 0), m, _values(IQ4_VALUES, _bits(blocks, 2, 4), codes_nl(blocks[:, 16:144])))


@block_decoder
def iq5_k(blocks: Bytes) -> Floats:
    m = _signed_6bit(blocks[:, 8:16], blocks[:, 4:8])
    codes = codes_4bit(blocks[:, 16:144]) | codes_1bit(blocks[:, 144:176]) << 4
    return _scaled(f16_at(blocks, 0), m, _values(IQ5_VALUES, _bits(blocks, 2, 4), codes))


def iq6_k_of(blocks: Bytes, table: Floats) -> Floats:
    """Decode IQ6_K blocks (n, 212) into (n, 256) with the values of `table` (2, 64)."""
    codes = codes_4bit(blocks[:, 20:148]) | codes_2bit(blocks[:, 148:212]) << 4
    return _scaled(f16_at(blocks, 0), blocks[:, 4:20].view(np.int8), _values(table, _bits(blocks, 2, 4), codes))


@block_decoder
def iq6_k(blocks: Bytes) -> Floats:
    return iq6_k_of(blocks, IQ6_VALUES)


def _scales_5bit(scales: Bytes, high: Bytes) -> npt.NDArray[np.int8]:
    """Join eight 4-bit fields with their fifth bits into multipliers -16..15."""
    return (scales | high << 4).astype(np.int8) - np.int8(16)


@row_scale_decoder
def iq2_ks(d: Floats, blocks: Bytes) -> Floats:
    m = _scales_5bit(interleave_nibbles(blocks[:, 2:6]), _bits(blocks, 1, 2))
    return _scaled(d, m, _values(IQ2_VALUES, _bits(blocks, 0, 1), codes_2bit(blocks[:, 6:70])))


@row_scale_decoder
def iq3_ks(d: Floats, blocks: Bytes) -> Floats:
    m = _scales_5bit(nibbles(blocks[:, 2:6]), _bits(blocks, 0, 1))  # the halves of `extra` swap roles against IQ2_KS
    codes = codes_2bit(blocks[:, 6:70]) | codes_1bit(blocks[:, 70:102]) << 2
    return _scaled(d, m, _values(IQ3_VALUES, _bits(blocks, 1, 2), codes))


def _odd_scales(scales: Bytes) -> npt.NDArray[np.int16]:
    """Turn scale bytes into odd multipliers -127..127; bit 0 belongs to the table choice."""
    return (scales & 254).astype(np.int16) - np.int16(127)


@row_scale_decoder
def iq4_ks(d: Floats, blocks: Bytes) -> Floats:
    s = blocks[:, :8]
    return _scaled(d, _odd_scales(s), _values(IQ4_VALUES, s & 1, codes_nl(blocks[:, 8:136])))


@row_scale_decoder
def iq5_ks(d: Floats, blocks: Bytes) -> Floats:
    s = blocks[:, :8]
    codes = codes_4bit(blocks[:, 8:136]) | codes_1bit(blocks[:, 136:168]) << 4
    return _scaled(d, _odd_scales(s), _values(IQ5_VALUES, s & 1, codes))


@row_scale_decoder
def iq4_kss(d: Floats, blocks: Bytes) -> Floats:
    words = words_at(blocks, 0, 128, "<u2")
    s = np.packbits((words & 1).astype(np.uint8), axis=1, bitorder="little")
    u = words & np.uint16(0xFFFE)
    qs = (u ^ u >> 1).astype("<u2").view(np.uint8)  # nibbles of an even-parity word, as in IQ4_KS
    return _scaled(d, _odd_scales(s), _values(IQ4_VALUES, s & 1, codes_nl(qs)))


@row_scale_decoder
def iq2_kl(d: Floats, blocks: Bytes) -> Floats:
    n = len(blocks)
    low = np.stack((blocks[:, 6:70] & 15, blocks[:, 6:70] >> 4), axis=1)  # (n, parity of the sub-block, 4 * 16)
    low = low.reshape(n, 2, 4, 16).transpose(0, 2, 1, 3).reshape(n, 8, 16)
    high = blocks[:, None, 70:86] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    scale_high = (words_at(blocks, 0, 2, "<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3).astype(np.uint8)
    m = (nibbles(blocks[:, 2:6]) | scale_high << 4).astype(np.int8) - np.int8(32)
    return _scaled(d, m, IQ2_KL_VALUES[low | high << 4].reshape(n, 256))
