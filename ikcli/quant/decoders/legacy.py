"""Decode the legacy types, blocks of 32.

A block starts with an f16 scale `d`, followed by an f16 minimum `m` in the _1 types. `qs[16]` holds two 4-bit codes per
byte: low nibbles are elements 0..15, high nibbles 16..31. A fifth and sixth bit come from `qh`. Corresponds to
ggml-quants.c.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ikcli.quant.decode import Bytes, Floats, block_decoder
from ikcli.quant.tables import IQ4_NL_VALUES


def f16_at(blocks: Bytes, offset: int) -> Floats:
    """Read the f16 field at a byte offset of every block, as (n, 1) float32."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)


def nibbles(qs: Bytes) -> Bytes:
    """Unpack bytes (n, k) into codes (n, 2k): all low nibbles, then all high nibbles."""
    return np.concatenate((qs & 15, qs >> 4), axis=1)


def _bits32(qh: Bytes) -> Bytes:
    """Unpack bytes (n, 4) into bits (n, 32), least significant first."""
    return np.unpackbits(qh, axis=1, bitorder="little")


def f32(codes: npt.NDArray[np.generic]) -> Floats:
    return codes.astype(np.float32)


@block_decoder
def q4_0(blocks: Bytes) -> Floats:
    return f16_at(blocks, 0) * (f32(nibbles(blocks[:, 2:])) - 8)


@block_decoder
def q4_1(blocks: Bytes) -> Floats:
    return f16_at(blocks, 0) * f32(nibbles(blocks[:, 4:])) + f16_at(blocks, 2)


@block_decoder
def q5_0(blocks: Bytes) -> Floats:
    codes = nibbles(blocks[:, 6:]) | _bits32(blocks[:, 2:6]) << 4
    return f16_at(blocks, 0) * (f32(codes) - 16)


@block_decoder
def q5_1(blocks: Bytes) -> Floats:
    codes = nibbles(blocks[:, 8:]) | _bits32(blocks[:, 4:8]) << 4
    return f16_at(blocks, 0) * f32(codes) + f16_at(blocks, 2)


@block_decoder
def q6_0(blocks: Bytes) -> Floats:
    e = np.arange(32)
    high = blocks[:, 2 + e % 8] >> (4 * (e % 16 // 8) + 2 * (e // 16)).astype(np.uint8) & 3
    return f16_at(blocks, 0) * (f32(nibbles(blocks[:, 10:]) | high << 4) - 32)


@block_decoder
def q8_0(blocks: Bytes) -> Floats:
    return f16_at(blocks, 0) * f32(blocks[:, 2:].view(np.int8))


@block_decoder
def iq4_nl(blocks: Bytes) -> Floats:
    return f16_at(blocks, 0) * IQ4_NL_VALUES[nibbles(blocks[:, 2:])]
