"""Decode the i-quants: 4-bit non-linear types, and grids of 8 or 4 magnitudes with separate signs, in blocks of 256.

IQ4_XS   d scales_h u16 scales_l[4] qs[128]        MXFP4  e qs[16], blocks of 32
IQ2_XXS  d (grid index[4], signs and scale u32)[8] IQ2_XS d (index and signs u16)[32] scales[8]
IQ2_S    d qs[32] signs[32] qh[8] scales[8]        IQ3_XXS d qs[64] (signs and scale u32)[8]
IQ3_S    d qs[64] qh[8] signs[32] scales[4]        IQ1_S  d qs[32] qh u16[8]
IQ1_M    qs[32] qh[16] scales[8] (d in their top nibbles)      Corresponds to ggml-quants.c.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ikcli.quant.decode import Bytes, Floats, block_decoder
from ikcli.quant.decoders.legacy import f16_at, f32, nibbles
from ikcli.quant.tables import IQ4_NL_VALUES, MXFP4_VALUES, grid, sign_bytes, sign_table

IQ1_DELTA = np.float32(0.125)
_SIGN_SHIFTS = np.array([0, 7, 14, 21], np.uint32)


def words_at(blocks: Bytes, start: int, stop: int, code: str) -> npt.NDArray[np.unsignedinteger]:
    """Read bytes start..stop of every block as little-endian integers of NumPy code `code`."""
    return np.ascontiguousarray(blocks[:, start:stop]).view(code)


def interleave_nibbles(packed: Bytes) -> Bytes:
    """Unpack bytes (n, k) into (n, 2k): low nibble of byte 0, high nibble of byte 0, low nibble of byte 1, ..."""
    return np.stack((packed & 15, packed >> 4), axis=2).reshape(len(packed), -1)


def codes_nl(qs: Bytes) -> Bytes:
    """Unpack bytes (n, 128) into codes (n, 256): 16 bytes per sub-block of 32, low nibbles first."""
    return nibbles(qs.reshape(-1, 16)).reshape(len(qs), -1)


@block_decoder
def mxfp4(blocks: Bytes) -> Floats:
    d = np.ldexp(np.ones((len(blocks), 1), np.float32), blocks[:, :1].astype(np.int32) - 128)
    return d * MXFP4_VALUES[nibbles(blocks[:, 1:])]


@block_decoder
def iq4_xs(blocks: Bytes) -> Floats:
    high = words_at(blocks, 2, 4, "<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    ls = (interleave_nibbles(blocks[:, 4:8]) | high << 4).astype(np.float32) - 32
    return np.repeat(f16_at(blocks, 0) * ls, 32, axis=1) * IQ4_NL_VALUES[codes_nl(blocks[:, 8:])]


def _signed(scales: Floats, magnitudes: Floats, signs: Bytes) -> Floats:
    """Multiply scales (n, 32) per group of 8, grid values (n, ...) and signs from bytes (n, 32); returns (n, 256)."""
    n = len(scales)
    return (scales[:, :, None] * magnitudes.reshape(n, 32, 8) * sign_table()[signs]).reshape(n, 256)


def _scale_and_signs(words: npt.NDArray[np.unsignedinteger]) -> tuple[Floats, Bytes]:
    """Split the u32 of every sub-block into scales per group and sign bytes, both (n, 32).

    It holds four 7-bit sign codes and a 4-bit scale.
    """
    codes = (words[:, :, None] >> _SIGN_SHIFTS).reshape(len(words), 32)
    return np.repeat(f32(words >> 28), 4, axis=1), sign_bytes(codes)


@block_decoder
def iq2_xxs(blocks: Bytes) -> Floats:
    parts = blocks[:, 2:].reshape(-1, 8, 8)
    index = parts[:, :, :4].reshape(-1, 32)
    ls, signs = _scale_and_signs(np.ascontiguousarray(parts[:, :, 4:]).reshape(-1, 32).view("<u4"))
    scale = f16_at(blocks, 0) * (np.float32(0.5) + ls) * np.float32(0.25)
    return _signed(scale, grid("IQ2_XXS")[index], signs)


def _scale_per_16(blocks: Bytes, start: int) -> Floats:
    """Return d * (0.5 + scale) / 4 per group of 8, (n, 32), from 8 bytes of 4-bit scales of sub-blocks of 16."""
    ls = f32(interleave_nibbles(blocks[:, start : start + 8]))
    return np.repeat(f16_at(blocks, 0) * (np.float32(0.5) + ls) * np.float32(0.25), 2, axis=1)


@block_decoder
def iq2_xs(blocks: Bytes) -> Floats:
    q = words_at(blocks, 2, 66, "<u2")
    return _signed(_scale_per_16(blocks, 66), grid("IQ2_XS")[q & 511], sign_bytes(q >> 9))


@block_decoder
def iq2_s(blocks: Bytes) -> Floats:
    high = blocks[:, 66:74, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    index = blocks[:, 2:34] | high.reshape(-1, 32).astype(np.uint16) << 8
    return _signed(_scale_per_16(blocks, 74), grid("IQ2_S")[index], blocks[:, 34:66])


@block_decoder
def iq3_xxs(blocks: Bytes) -> Floats:
    ls, signs = _scale_and_signs(words_at(blocks, 66, 98, "<u4"))
    scale = f16_at(blocks, 0) * (np.float32(0.5) + ls) * np.float32(0.5)
    return _signed(scale, grid("IQ3_XXS")[blocks[:, 2:66]], signs)


@block_decoder
def iq3_s(blocks: Bytes) -> Floats:
    high = np.unpackbits(blocks[:, 66:74], axis=1, bitorder="little")
    index = blocks[:, 2:66] | high.astype(np.uint16) << 8
    scale = f16_at(blocks, 0) * (1 + 2 * f32(interleave_nibbles(blocks[:, 106:110])))
    return _signed(np.repeat(scale, 4, axis=1), grid("IQ3_S")[index], blocks[:, 74:106])


def ternary(scales: Floats, index: npt.NDArray[np.integer], negative: npt.NDArray[np.generic]) -> Floats:
    """Decode groups of 8 from their scale, grid index and sign of the offset, all (n, k); returns (n, 8k)."""
    delta = np.where(negative != 0, -IQ1_DELTA, IQ1_DELTA)
    values = grid("IQ1_S")[index] + delta[:, :, None]
    return (scales[:, :, None] * values).reshape(len(scales), -1)


@block_decoder
def iq1_s(blocks: Bytes) -> Floats:
    qh = words_at(blocks, 34, 50, "<u2")
    high = (qh[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(-1, 32)
    scale = f16_at(blocks, 0) * (2 * f32(qh >> 12 & 7) + 1)
    return ternary(np.repeat(scale, 4, axis=1), blocks[:, 2:34] | high << 8, np.repeat(qh >> 15, 4, axis=1))


@block_decoder
def iq1_m(blocks: Bytes) -> Floats:
    sc = words_at(blocks, 48, 56, "<u2")
    bits = ((sc >> 12) << np.array([0, 4, 8, 12], np.uint16)).sum(axis=1, dtype=np.uint16)
    d = bits.view(np.float16).astype(np.float32)[:, None]
    ls = f32(sc[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(-1, 16)
    qh = interleave_nibbles(blocks[:, 32:48])
    index = blocks[:, :32] | (qh & 7).astype(np.uint16) << 8
    return ternary(np.repeat(d * (2 * ls + 1), 2, axis=1), index, qh >> 3)
