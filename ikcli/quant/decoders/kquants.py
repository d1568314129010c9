"""Decode the k-quants: super-blocks of 256 with one f16 scale (and minimum) over sub-blocks of 16 or 32.

Q2_K   scales[16] qs[64] d dmin          Q3_K  hmask[32] qs[64] scales[12] d
Q4_K   d dmin scales[12] qs[128]         Q5_K  d dmin scales[12] qh[32] qs[128]
Q6_K   ql[128] qh[64] scales[16] d       Corresponds to ggml-quants.c, https://github.com/ggerganov/llama.cpp/pull/1684.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ikcli.quant.decode import Bytes, Floats, block_decoder
from ikcli.quant.decoders.legacy import f16_at, f32

_SHIFTS_2BIT = np.array([0, 2, 4, 6], np.uint8)[:, None]
_SHIFTS_4BIT = np.array([0, 4], np.uint8)[:, None]
_SHIFTS_1BIT = np.arange(8, dtype=np.uint8)[:, None]


def codes_2bit(qs: Bytes) -> Bytes:
    """Unpack bytes (n, 64) into codes (n, 256): each half of 128 is four 2-bit planes over the same 32 bytes."""
    n = len(qs)
    return (qs.reshape(n, 2, 1, 32) >> _SHIFTS_2BIT & np.uint8(3)).reshape(n, 256)


def codes_4bit(qs: Bytes) -> Bytes:
    """Unpack bytes (n, 128) into codes (n, 256): 32 low nibbles, then the 32 high nibbles of the same bytes."""
    n = len(qs)
    return (qs.reshape(n, 4, 1, 32) >> _SHIFTS_4BIT & np.uint8(15)).reshape(n, 256)


def codes_1bit(qh: Bytes) -> Bytes:
    """Unpack bytes (n, 32) into bits (n, 256): bit b of every byte belongs to sub-block b of 32."""
    n = len(qh)
    return (qh.reshape(n, 1, 32) >> _SHIFTS_1BIT & np.uint8(1)).reshape(n, 256)


def scales_6bit(scales: Bytes) -> tuple[Bytes, Bytes]:
    """Unpack the 12 bytes of Q4_K and Q5_K into eight 6-bit scales and eight 6-bit minimums, both (n, 8)."""
    a, b, c = scales[:, 0:4], scales[:, 4:8], scales[:, 8:12]
    sc = np.concatenate((a & 63, c & 15 | a >> 6 << 4), axis=1)
    mn = np.concatenate((b & 63, c >> 4 | b >> 6 << 4), axis=1)
    return sc, mn


def scales_q3_k(scales: Bytes) -> npt.NDArray[np.int8]:
    """Unpack the 12 bytes of Q3_K into sixteen signed multipliers -32..31, (n, 16)."""
    low = np.concatenate((scales[:, :8] & 15, scales[:, :8] >> 4), axis=1)
    high = (scales[:, None, 8:12] >> _SHIFTS_2BIT & np.uint8(3)).reshape(-1, 16)
    return (low | high << 4).astype(np.int8) - np.int8(32)


def _spread(per_sub_block: Floats, size: int) -> Floats:
    return np.repeat(per_sub_block, size, axis=1)


@block_decoder
def q2_k(blocks: Bytes) -> Floats:
    scale = f16_at(blocks, 80) * f32(blocks[:, :16] & 15)
    minimum = f16_at(blocks, 82) * f32(blocks[:, :16] >> 4)
    return _spread(scale, 16) * f32(codes_2bit(blocks[:, 16:80])) - _spread(minimum, 16)


@block_decoder
def q3_k(blocks: Bytes) -> Floats:
    codes = codes_2bit(blocks[:, 32:96]) | codes_1bit(blocks[:, :32]) << 2
    scale = f16_at(blocks, 108) * f32(scales_q3_k(blocks[:, 96:108]))
    return _spread(scale, 16) * (f32(codes) - 4)


@block_decoder
def q4_k(blocks: Bytes) -> Floats:
    sc, mn = scales_6bit(blocks[:, 4:16])
    scale, minimum = f16_at(blocks, 0) * f32(sc), f16_at(blocks, 2) * f32(mn)
    return _spread(scale, 32) * f32(codes_4bit(blocks[:, 16:])) - _spread(minimum, 32)


@block_decoder
def q5_k(blocks: Bytes) -> Floats:
    sc, mn = scales_6bit(blocks[:, 4:16])
    scale, minimum = f16_at(blocks, 0) * f32(sc), f16_at(blocks, 2) * f32(mn)
    codes = codes_4bit(blocks[:, 48:]) | codes_1bit(blocks[:, 16:48]) << 4
    return _spread(scale, 32) * f32(codes) - _spread(minimum, 32)


@block_decoder
def q6_k(blocks: Bytes) -> Floats:
    n = len(blocks)
    low = (blocks[:, :128].reshape(n, 2, 1, 64) >> _SHIFTS_4BIT & np.uint8(15)).reshape(n, 256)
    codes = low | codes_2bit(blocks[:, 128:192]) << 4
    scale = f16_at(blocks, 208) * f32(blocks[:, 192:208].view(np.int8))
    return _spread(scale, 16) * (f32(codes) - 32)
