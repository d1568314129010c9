"""Integer fields of encoded rows: code of every weight (or group), multiplier, minimum and table choice of sub-blocks.

The decoders of `ikcli.quant.decode_*` turn the same fields into values; here they are only counted, so signs that are
stored apart from a code are left out. Block layouts are given in those modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.quant.decode_iquants import codes_nl, interleave_nibbles, words_at
from ikcli.quant.decode_kquants import codes_1bit, codes_2bit, codes_4bit, scales_6bit, scales_q3_k
from ikcli.quant.decode_legacy import nibbles
from ikcli.quant.formats import FORMATS
from ikcli.quant.tables import IQ4_VALUES

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[Any]
T = GGMLType
_SHIFTS_2BIT = np.array([0, 2, 4, 6], np.uint8)


@dataclass(frozen=True, slots=True)
class CodeSpace:
    """`n_codes` codes, each for `group` weights; least and largest multiplier and minimum, None where there are none.

    `shifts` tells whether every sub-block picks one of two value tables.
    """

    n_codes: int
    group: int = 1
    multipliers: tuple[int, int] | None = None
    minimums: tuple[int, int] | None = None
    shifts: bool = False


@dataclass(frozen=True, slots=True)
class Fields:
    """Fields of n blocks: codes (n, a) counted from 0, the others (n, sub-blocks) in the units of their CodeSpace."""

    codes: Integers
    multipliers: Integers | None = None
    minimums: Integers | None = None
    shifts: Integers | None = None


Reader = Callable[[Bytes], Fields]


def _bits(raw: Bytes) -> Bytes:
    """(n, k) bytes -> (n, 8k) bits, least significant first."""
    return np.unpackbits(raw, axis=1, bitorder="little")


def _pairs(raw: Bytes) -> Bytes:
    """(n, k) bytes -> (n, 4k) numbers of two bits, least significant first."""
    return (raw[:, :, None] >> _SHIFTS_2BIT & np.uint8(3)).reshape(len(raw), -1)


def _signed(low: Bytes, high: Bytes, offset: int) -> Integers:
    """Four low bits and the bits above them -> signed multipliers."""
    return (low | high << 4).astype(np.int16) - np.int16(offset)


def _odd(scales: Bytes) -> Integers:
    return (scales & 254).astype(np.int16) - np.int16(127)


def _bytes_as_codes(raw: Bytes) -> Integers:
    return raw.view(np.int8).astype(np.int16) + np.int16(128)


# --- blocks of 32 -----------------------------------------------------------------------------------------------------
def _nibbles_at(offset: int) -> Reader:
    return lambda b: Fields(nibbles(b[:, offset:]))


def _q5(offset: int) -> Reader:
    return lambda b: Fields(nibbles(b[:, offset + 4 :]) | _bits(b[:, offset : offset + 4]) << 4)


def _q6_0(b: Bytes) -> Fields:
    e = np.arange(32)
    high = b[:, 2 + e % 8] >> (4 * (e % 16 // 8) + 2 * (e // 16)).astype(np.uint8) & 3
    return Fields(nibbles(b[:, 10:]) | high << 4)


# --- k-quants ---------------------------------------------------------------------------------------------------------
def _q2_k(b: Bytes) -> Fields:
    return Fields(codes_2bit(b[:, 16:80]), b[:, :16] & 15, b[:, :16] >> 4)


def _q3_k(b: Bytes) -> Fields:
    return Fields(codes_2bit(b[:, 32:96]) | codes_1bit(b[:, :32]) << 2, scales_q3_k(b[:, 96:108]))


def _q4_k(b: Bytes) -> Fields:
    return Fields(codes_4bit(b[:, 16:]), *scales_6bit(b[:, 4:16]))


def _q5_k(b: Bytes) -> Fields:
    return Fields(codes_4bit(b[:, 48:]) | codes_1bit(b[:, 16:48]) << 4, *scales_6bit(b[:, 4:16]))


def _q6_k(b: Bytes) -> Fields:
    low = b[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None] & 15
    return Fields(low.reshape(-1, 256) | codes_2bit(b[:, 128:192]) << 4, b[:, 192:208].view(np.int8))


def _iq4_xs(b: Bytes) -> Fields:
    return Fields(codes_nl(b[:, 8:]), _signed(interleave_nibbles(b[:, 4:8]), _pairs(b[:, 2:4]), 32))


# --- grids ------------------------------------------------------------------------------------------------------------
def _iq2_xxs(b: Bytes) -> Fields:
    parts = b[:, 2:].reshape(-1, 8, 8)
    return Fields(parts[:, :, :4].reshape(-1, 32), 2 * (parts[:, :, 7] >> 4) + 1)


def _iq2_xs(b: Bytes) -> Fields:
    return Fields(words_at(b, 2, 66, "<u2") & 511, 2 * interleave_nibbles(b[:, 66:74]) + 1)


def _iq2_s(b: Bytes) -> Fields:
    return Fields(b[:, 2:34] | _pairs(b[:, 66:74]).astype(np.uint16) << 8, 2 * interleave_nibbles(b[:, 74:82]) + 1)


def _iq3_xxs(b: Bytes) -> Fields:
    return Fields(b[:, 2:66], 2 * (words_at(b, 66, 98, "<u4") >> 28).astype(np.uint8) + 1)


def _iq3_s(b: Bytes) -> Fields:
    codes = b[:, 2:66] | _bits(b[:, 66:74]).astype(np.uint16) << 8
    return Fields(codes, 2 * interleave_nibbles(b[:, 106:110]) + 1)


def _iq1_s(b: Bytes) -> Fields:
    qh = words_at(b, 34, 50, "<u2")
    high = (qh[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(-1, 32)
    return Fields(b[:, 2:34] | high << 8, 2 * (qh >> 12 & 7) + 1, shifts=qh >> 15)


def _iq1_m(b: Bytes) -> Fields:
    sc = words_at(b, 48, 56, "<u2")
    ls = (sc[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(-1, 16)
    qh = interleave_nibbles(b[:, 32:48])
    return Fields(b[:, :32] | (qh & 7).astype(np.uint16) << 8, 2 * ls + 1, shifts=qh >> 3)


# --- iqk --------------------------------------------------------------------------------------------------------------
def _iq2_k(b: Bytes) -> Fields:
    m = interleave_nibbles(b[:, 4:12]).astype(np.int8) - np.int8(8)
    return Fields(codes_2bit(b[:, 12:76]), m, shifts=_bits(b[:, 2:4]))


def _iq3_k(b: Bytes) -> Fields:
    m = 2 * interleave_nibbles(b[:, 6:14]).astype(np.int8) + 1
    codes = codes_2bit(b[:, 14:78]) | codes_1bit(b[:, 78:110]) << 2
    return Fields(codes, np.where(_bits(b[:, 4:6]), -m, m), shifts=_bits(b[:, 2:4]))


def _signed_6bit(b: Bytes) -> Integers:
    return _signed(interleave_nibbles(b[:, 8:16]), _pairs(b[:, 4:8]), 32)


def _iq4_k(b: Bytes) -> Fields:
    return Fields(codes_nl(b[:, 16:144]), _signed_6bit(b), shifts=_bits(b[:, 2:4]))


def _iq5_k(b: Bytes) -> Fields:
    codes = codes_4bit(b[:, 16:144]) | codes_1bit(b[:, 144:176]) << 4
    return Fields(codes, _signed_6bit(b), shifts=_bits(b[:, 2:4]))


def _iq6_k(b: Bytes) -> Fields:
    codes = codes_4bit(b[:, 20:148]) | codes_2bit(b[:, 148:212]) << 4
    return Fields(codes, b[:, 4:20].view(np.int8), shifts=_bits(b[:, 2:4]))


def _iq2_ks(b: Bytes) -> Fields:
    m = _signed(interleave_nibbles(b[:, 2:6]), _bits(b[:, 1:2]), 16)
    return Fields(codes_2bit(b[:, 6:70]), m, shifts=_bits(b[:, :1]))


def _iq3_ks(b: Bytes) -> Fields:
    codes = codes_2bit(b[:, 6:70]) | codes_1bit(b[:, 70:102]) << 2
    return Fields(codes, _signed(nibbles(b[:, 2:6]), _bits(b[:, :1]), 16), shifts=_bits(b[:, 1:2]))


def _iq4_ks(b: Bytes) -> Fields:
    return Fields(codes_nl(b[:, 8:136]), _odd(b[:, :8]), shifts=b[:, :8] & 1)


def _iq5_ks(b: Bytes) -> Fields:
    codes = codes_4bit(b[:, 8:136]) | codes_1bit(b[:, 136:168]) << 4
    return Fields(codes, _odd(b[:, :8]), shifts=b[:, :8] & 1)


def _iq4_kss(b: Bytes) -> Fields:
    words = words_at(b, 0, 128, "<u2")
    s = np.packbits((words & 1).astype(np.uint8), axis=1, bitorder="little")
    u = words & np.uint16(0xFFFE)
    return Fields(codes_nl((u ^ u >> 1).astype("<u2").view(np.uint8)), _odd(s), shifts=s & 1)


def _iq2_kl(b: Bytes) -> Fields:
    low = np.stack((b[:, 6:70] & 15, b[:, 6:70] >> 4), axis=1).reshape(-1, 2, 4, 16)
    high = b[:, None, 70:86] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = low.transpose(0, 2, 1, 3).reshape(-1, 8, 16) | high << 4
    return Fields(codes.reshape(-1, 128), _signed(nibbles(b[:, 2:6]), _pairs(b[:, :2]), 32))


# --- trellis ----------------------------------------------------------------------------------------------------------
def _table(codes: Integers) -> Integers:
    return IQ4_VALUES[0].astype(np.int16)[codes]


def _iq1_kt(b: Bytes) -> Fields:
    top = (b[:, :8, None] >> np.arange(4, 8, dtype=np.uint8) & 1).reshape(-1, 32).astype(np.uint16)
    codes = b[:, 8:40] | nibbles(b[:, 40:56]).astype(np.uint16) << 8 | top << 12
    return Fields(codes, _table(b[:, :8] & 15))


def _iq2_kt(b: Bytes) -> Fields:
    return Fields(words_at(b, 4, 68, "<u2"), _table(nibbles(b[:, :4])))


def _iq3_kt(b: Bytes) -> Fields:
    return Fields(words_at(b, 4, 68, "<u2"), nibbles(b[:, :4]))


def _iq4_kt(b: Bytes) -> Fields:
    shb = words_at(b, 0, 32, "<u4")
    top = (shb[:, :, None] >> np.arange(8, 32, 3, dtype=np.uint32) & 7).reshape(-1, 64).astype(np.uint16)
    codes = b[:, 32:96] | nibbles(b[:, 96:128]).astype(np.uint16) << 8 | top << 12
    return Fields(codes, ((shb & 255) >> 1).astype(np.int16) - np.int16(64), shifts=shb & 1)


_READERS: dict[GGMLType, tuple[CodeSpace, Reader]] = {
    T.Q4_0: (CodeSpace(16), _nibbles_at(2)),
    T.Q4_1: (CodeSpace(16), _nibbles_at(4)),
    T.Q5_0: (CodeSpace(32), _q5(2)),
    T.Q5_1: (CodeSpace(32), _q5(4)),
    T.Q6_0: (CodeSpace(64), _q6_0),
    T.Q8_0: (CodeSpace(256), lambda b: Fields(_bytes_as_codes(b[:, 2:]))),
    T.Q8_KV: (CodeSpace(256), lambda b: Fields(_bytes_as_codes(b))),
    T.MXFP4: (CodeSpace(16), _nibbles_at(1)),
    T.IQ4_NL: (CodeSpace(16), _nibbles_at(2)),
    T.Q2_K: (CodeSpace(4, 1, (0, 15), (0, 15)), _q2_k),
    T.Q3_K: (CodeSpace(8, 1, (-32, 31)), _q3_k),
    T.Q4_K: (CodeSpace(16, 1, (0, 63), (0, 63)), _q4_k),
    T.Q5_K: (CodeSpace(32, 1, (0, 63), (0, 63)), _q5_k),
    T.Q6_K: (CodeSpace(64, 1, (-128, 127)), _q6_k),
    T.IQ4_XS: (CodeSpace(16, 1, (-32, 31)), _iq4_xs),
    T.IQ2_XXS: (CodeSpace(256, 8, (1, 31)), _iq2_xxs),
    T.IQ2_XS: (CodeSpace(512, 8, (1, 31)), _iq2_xs),
    T.IQ2_S: (CodeSpace(1024, 8, (1, 31)), _iq2_s),
    T.IQ3_XXS: (CodeSpace(256, 4, (1, 31)), _iq3_xxs),
    T.IQ3_S: (CodeSpace(512, 4, (1, 31)), _iq3_s),
    T.IQ1_S: (CodeSpace(2048, 8, (1, 15), None, True), _iq1_s),
    T.IQ1_M: (CodeSpace(2048, 8, (1, 15), None, True), _iq1_m),
    T.IQ2_K: (CodeSpace(4, 1, (-8, 7), None, True), _iq2_k),
    T.IQ3_K: (CodeSpace(8, 1, (-31, 31), None, True), _iq3_k),
    T.IQ4_K: (CodeSpace(16, 1, (-32, 31), None, True), _iq4_k),
    T.IQ5_K: (CodeSpace(32, 1, (-32, 31), None, True), _iq5_k),
    T.IQ6_K: (CodeSpace(64, 1, (-128, 127), None, True), _iq6_k),
    T.IQ2_KS: (CodeSpace(4, 1, (-16, 15), None, True), _iq2_ks),
    T.IQ3_KS: (CodeSpace(8, 1, (-16, 15), None, True), _iq3_ks),
    T.IQ4_KS: (CodeSpace(16, 1, (-127, 127), None, True), _iq4_ks),
    T.IQ5_KS: (CodeSpace(32, 1, (-127, 127), None, True), _iq5_ks),
    T.IQ4_KSS: (CodeSpace(16, 1, (-127, 127), None, True), _iq4_kss),
    T.IQ2_KL: (CodeSpace(32, 2, (-32, 31)), _iq2_kl),
    T.IQ1_KT: (CodeSpace(8192, 8, (-127, 113)), _iq1_kt),
    T.IQ2_KT: (CodeSpace(65536, 8, (-127, 113)), _iq2_kt),
    T.IQ3_KT: (CodeSpace(65536, 8, (0, 15)), _iq3_kt),
    T.IQ4_KT: (CodeSpace(32768, 4, (-64, 63), None, True), _iq4_kt),
}


def code_space(type: GGMLType) -> CodeSpace | None:
    """The fields of a type, or None for float types, ternary ones and formats that exist only interleaved."""
    found = _READERS.get(type)
    return found[0] if found is not None else None


def read_fields(blocks: Bytes, type: GGMLType) -> Fields:
    """Fields of blocks (n, type_size) without row headers; KeyError for a type without `code_space`."""
    return _READERS[type][1](blocks)


# --- replacing codes --------------------------------------------------------------------------------------------------
@cache
def _code_bits(type: GGMLType) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int64]]:
    """Where bit b of code i lies in a block: bit numbers (n_codes, bits), and the codes of a block of zeros.

    Found by reading blocks of one set bit each; only for types whose codes are bits in another order.
    """
    n_bits = 8 * FORMATS[type].type_size
    probes = np.packbits(np.eye(n_bits + 1, n_bits, dtype=np.uint8), axis=1, bitorder="little")
    codes = read_fields(probes, type).codes.astype(np.int64)
    zero = codes[n_bits]
    changed = codes[:n_bits] ^ zero
    places = np.full((codes.shape[1], (_READERS[type][0].n_codes - 1).bit_length()), -1, np.intp)
    for b in range(places.shape[1]):
        bit, code = np.nonzero(changed >> b & 1)
        places[code, b] = bit
    return places, zero


def replace_codes(blocks: Bytes, type: GGMLType, codes: Integers) -> Bytes:
    """Blocks (n, type_size) with other codes (n, a), counted as in `Fields`; everything else stays.

    UnsupportedError for types whose codes depend on each other (IQ4_KSS) or are not all of what a value is made of.
    """
    if type not in REPLACEABLE:
        raise UnsupportedError(f"codes of {FORMATS[type].name} cannot be replaced one by one")
    places, zero = _code_bits(type)
    bits = np.unpackbits(blocks, axis=1, bitorder="little")
    new = codes.astype(np.int64) ^ zero
    for b in range(places.shape[1]):
        bits[:, places[:, b]] = new >> b & 1
    return np.packbits(bits, axis=1, bitorder="little")


# Types of which a code, with the scales of its sub-block, makes a value (IQ2_KL: two).
REPLACEABLE = frozenset(t for t, (space, _) in _READERS.items() if space.group <= 2) - {
    GGMLType.IQ4_KSS, GGMLType.Q8_0, GGMLType.Q8_KV,
}  # fmt: skip
