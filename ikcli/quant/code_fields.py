"""Read the integer fields of encoded rows: codes, multipliers, minimums and table choices of sub-blocks.

The decoders in `ikcli.quant.decoders` turn the same fields into values and document the block layouts. Here the fields
are only counted, so signs that are stored apart from their code are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.quant.decoders.iquants import codes_nl, interleave_nibbles, words_at
from ikcli.quant.decoders.kquants import codes_1bit, codes_2bit, codes_4bit, scales_6bit, scales_q3_k
from ikcli.quant.decoders.legacy import nibbles
from ikcli.quant.tables import IQ4_VALUES
from ikcli.references import load

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[Any]
_SHIFTS_2BIT = np.array([0, 2, 4, 6], np.uint8)


@dataclass(frozen=True, slots=True)
class CodeSpace:
    """The ranges of a type's fields: `n_codes` codes, each for `group` weights; bounds of multipliers and minimums.

    Bounds are None where a type has no such field. `shifts`: every sub-block picks one of two value tables. `in_order`:
    the bits of a code are bits of the block, in some order, and make a value with the scales of its sub-block
    (IQ2_KL: two values).
    """

    n_codes: int
    group: int = 1
    multipliers: tuple[int, int] | None = None
    minimums: tuple[int, int] | None = None
    shifts: bool = False
    in_order: bool = True


@dataclass(frozen=True, slots=True)
class Fields:
    """Fields of n blocks: codes (n, a) counted from 0, the others (n, sub-blocks) in the units of their CodeSpace."""

    codes: Integers
    multipliers: Integers | None = None
    minimums: Integers | None = None
    shifts: Integers | None = None


Reader = Callable[[Bytes], Fields]


class CodeFields(NamedTuple):
    """The value of `TensorType.codes`: the fields of a type, and how to read them from blocks (n, type_size)."""

    space: CodeSpace
    read: Reader


def _codes(*space: Any, **more: Any) -> Callable[[Reader], CodeFields]:
    """Decorate a function that reads blocks with the arguments of its CodeSpace."""
    return lambda read: CodeFields(CodeSpace(*space, **more), read)


def _bits(raw: Bytes) -> Bytes:
    """Unpack bytes (n, k) into bits (n, 8k), least significant first."""
    return np.unpackbits(raw, axis=1, bitorder="little")


def _pairs(raw: Bytes) -> Bytes:
    """Unpack bytes (n, k) into 2-bit numbers (n, 4k), least significant first."""
    return (raw[:, :, None] >> _SHIFTS_2BIT & np.uint8(3)).reshape(len(raw), -1)


def _signed(low: Bytes, high: Bytes, offset: int) -> Integers:
    """Join four low bits with the bits above them into signed multipliers."""
    return (low | high << 4).astype(np.int16) - np.int16(offset)


def _odd(scales: Bytes) -> Integers:
    return (scales & 254).astype(np.int16) - np.int16(127)


def _bytes_as_codes(raw: Bytes) -> Integers:
    return raw.view(np.int8).astype(np.int16) + np.int16(128)


# --- blocks of 32 -----------------------------------------------------------------------------------------------------
def _nibbles_at(offset: int) -> CodeFields:
    return CodeFields(CodeSpace(16), lambda b: Fields(nibbles(b[:, offset:])))


def _q5(offset: int) -> CodeFields:
    return CodeFields(
        CodeSpace(32), lambda b: Fields(nibbles(b[:, offset + 4 :]) | _bits(b[:, offset : offset + 4]) << 4)
    )


q4_0, q4_1 = _nibbles_at(2), _nibbles_at(4)
q5_0, q5_1 = _q5(2), _q5(4)
mxfp4, iq4_nl = _nibbles_at(1), _nibbles_at(2)


@_codes(16)
def nvfp4(b: Bytes) -> Fields:
    halves = b[:, 4:].reshape(-1, 4, 1, 8) >> np.array([0, 4], np.uint8)[:, None] & np.uint8(15)
    return Fields(halves.reshape(len(b), 64))


@_codes(256, in_order=False)
def q8_0(b: Bytes) -> Fields:
    return Fields(_bytes_as_codes(b[:, 2:]))


@_codes(256, in_order=False)
def q8_kv(b: Bytes) -> Fields:
    return Fields(_bytes_as_codes(b))


@_codes(64)
def q6_0(b: Bytes) -> Fields:
    e = np.arange(32)
    high = b[:, 2 + e % 8] >> (4 * (e % 16 // 8) + 2 * (e // 16)).astype(np.uint8) & 3
    return Fields(nibbles(b[:, 10:]) | high << 4)


# --- k-quants ---------------------------------------------------------------------------------------------------------
@_codes(4, 1, (0, 15), (0, 15))
def q2_k(b: Bytes) -> Fields:
    return Fields(codes_2bit(b[:, 16:80]), b[:, :16] & 15, b[:, :16] >> 4)


@_codes(8, 1, (-32, 31))
def q3_k(b: Bytes) -> Fields:
    return Fields(codes_2bit(b[:, 32:96]) | codes_1bit(b[:, :32]) << 2, scales_q3_k(b[:, 96:108]))


@_codes(16, 1, (0, 63), (0, 63))
def q4_k(b: Bytes) -> Fields:
    return Fields(codes_4bit(b[:, 16:]), *scales_6bit(b[:, 4:16]))


@_codes(32, 1, (0, 63), (0, 63))
def q5_k(b: Bytes) -> Fields:
    return Fields(codes_4bit(b[:, 48:]) | codes_1bit(b[:, 16:48]) << 4, *scales_6bit(b[:, 4:16]))


@_codes(64, 1, (-128, 127))
def q6_k(b: Bytes) -> Fields:
    low = b[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None] & 15
    return Fields(low.reshape(-1, 256) | codes_2bit(b[:, 128:192]) << 4, b[:, 192:208].view(np.int8))


@_codes(16, 1, (-32, 31))
def iq4_xs(b: Bytes) -> Fields:
    return Fields(codes_nl(b[:, 8:]), _signed(interleave_nibbles(b[:, 4:8]), _pairs(b[:, 2:4]), 32))


# --- grids ------------------------------------------------------------------------------------------------------------
@_codes(256, 8, (1, 31))
def iq2_xxs(b: Bytes) -> Fields:
    parts = b[:, 2:].reshape(-1, 8, 8)
    return Fields(parts[:, :, :4].reshape(-1, 32), 2 * (parts[:, :, 7] >> 4) + 1)


@_codes(512, 8, (1, 31))
def iq2_xs(b: Bytes) -> Fields:
    return Fields(words_at(b, 2, 66, "<u2") & 511, 2 * interleave_nibbles(b[:, 66:74]) + 1)


@_codes(1024, 8, (1, 31))
def iq2_s(b: Bytes) -> Fields:
    return Fields(b[:, 2:34] | _pairs(b[:, 66:74]).astype(np.uint16) << 8, 2 * interleave_nibbles(b[:, 74:82]) + 1)


@_codes(256, 4, (1, 31))
def iq3_xxs(b: Bytes) -> Fields:
    return Fields(b[:, 2:66], 2 * (words_at(b, 66, 98, "<u4") >> 28).astype(np.uint8) + 1)


@_codes(512, 4, (1, 31))
def iq3_s(b: Bytes) -> Fields:
    codes = b[:, 2:66] | _bits(b[:, 66:74]).astype(np.uint16) << 8
    return Fields(codes, 2 * interleave_nibbles(b[:, 106:110]) + 1)


@_codes(2048, 8, (1, 15), None, True)
def iq1_s(b: Bytes) -> Fields:
    qh = words_at(b, 34, 50, "<u2")
    high = (qh[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(-1, 32)
    return Fields(b[:, 2:34] | high << 8, 2 * (qh >> 12 & 7) + 1, shifts=qh >> 15)


@_codes(2048, 8, (1, 15), None, True)
def iq1_m(b: Bytes) -> Fields:
    sc = words_at(b, 48, 56, "<u2")
    ls = (sc[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(-1, 16)
    qh = interleave_nibbles(b[:, 32:48])
    return Fields(b[:, :32] | (qh & 7).astype(np.uint16) << 8, 2 * ls + 1, shifts=qh >> 3)


# --- iqk --------------------------------------------------------------------------------------------------------------
@_codes(4, 1, (-8, 7), None, True)
def iq2_k(b: Bytes) -> Fields:
    m = interleave_nibbles(b[:, 4:12]).astype(np.int8) - np.int8(8)
    return Fields(codes_2bit(b[:, 12:76]), m, shifts=_bits(b[:, 2:4]))


@_codes(8, 1, (-31, 31), None, True)
def iq3_k(b: Bytes) -> Fields:
    m = 2 * interleave_nibbles(b[:, 6:14]).astype(np.int8) + 1
    codes = codes_2bit(b[:, 14:78]) | codes_1bit(b[:, 78:110]) << 2
    return Fields(codes, np.where(_bits(b[:, 4:6]), -m, m), shifts=_bits(b[:, 2:4]))


def _signed_6bit(b: Bytes) -> Integers:
    return _signed(interleave_nibbles(b[:, 8:16]), _pairs(b[:, 4:8]), 32)


@_codes(16, 1, (-32, 31), None, True)
def iq4_k(b: Bytes) -> Fields:
    return Fields(codes_nl(b[:, 16:144]), _signed_6bit(b), shifts=_bits(b[:, 2:4]))


@_codes(32, 1, (-32, 31), None, True)
def iq5_k(b: Bytes) -> Fields:
    codes = codes_4bit(b[:, 16:144]) | codes_1bit(b[:, 144:176]) << 4
    return Fields(codes, _signed_6bit(b), shifts=_bits(b[:, 2:4]))


@_codes(64, 1, (-128, 127), None, True)
def iq6_k(b: Bytes) -> Fields:
    codes = codes_4bit(b[:, 20:148]) | codes_2bit(b[:, 148:212]) << 4
    return Fields(codes, b[:, 4:20].view(np.int8), shifts=_bits(b[:, 2:4]))


@_codes(4, 1, (-16, 15), None, True)
def iq2_ks(b: Bytes) -> Fields:
    m = _signed(interleave_nibbles(b[:, 2:6]), _bits(b[:, 1:2]), 16)
    return Fields(codes_2bit(b[:, 6:70]), m, shifts=_bits(b[:, :1]))


@_codes(8, 1, (-16, 15), None, True)
def iq3_ks(b: Bytes) -> Fields:
    codes = codes_2bit(b[:, 6:70]) | codes_1bit(b[:, 70:102]) << 2
    return Fields(codes, _signed(nibbles(b[:, 2:6]), _bits(b[:, :1]), 16), shifts=_bits(b[:, 1:2]))


@_codes(16, 1, (-127, 127), None, True)
def iq4_ks(b: Bytes) -> Fields:
    return Fields(codes_nl(b[:, 8:136]), _odd(b[:, :8]), shifts=b[:, :8] & 1)


@_codes(32, 1, (-127, 127), None, True)
def iq5_ks(b: Bytes) -> Fields:
    codes = codes_4bit(b[:, 8:136]) | codes_1bit(b[:, 136:168]) << 4
    return Fields(codes, _odd(b[:, :8]), shifts=b[:, :8] & 1)


@_codes(16, 1, (-127, 127), None, True, False)
def iq4_kss(b: Bytes) -> Fields:
    words = words_at(b, 0, 128, "<u2")
    s = np.packbits((words & 1).astype(np.uint8), axis=1, bitorder="little")
    u = words & np.uint16(0xFFFE)
    return Fields(codes_nl((u ^ u >> 1).astype("<u2").view(np.uint8)), _odd(s), shifts=s & 1)


@_codes(32, 2, (-32, 31))
def iq2_kl(b: Bytes) -> Fields:
    low = np.stack((b[:, 6:70] & 15, b[:, 6:70] >> 4), axis=1).reshape(-1, 2, 4, 16)
    high = b[:, None, 70:86] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = low.transpose(0, 2, 1, 3).reshape(-1, 8, 16) | high << 4
    return Fields(codes.reshape(-1, 128), _signed(nibbles(b[:, 2:6]), _pairs(b[:, :2]), 32))


# --- trellis ----------------------------------------------------------------------------------------------------------
def _table(codes: Integers) -> Integers:
    return IQ4_VALUES[0].astype(np.int16)[codes]


@_codes(8192, 8, (-127, 113))
def iq1_kt(b: Bytes) -> Fields:
    top = (b[:, :8, None] >> np.arange(4, 8, dtype=np.uint8) & 1).reshape(-1, 32).astype(np.uint16)
    codes = b[:, 8:40] | nibbles(b[:, 40:56]).astype(np.uint16) << 8 | top << 12
    return Fields(codes, _table(b[:, :8] & 15))


@_codes(65536, 8, (-127, 113))
def iq2_kt(b: Bytes) -> Fields:
    return Fields(words_at(b, 4, 68, "<u2"), _table(nibbles(b[:, :4])))


@_codes(65536, 8, (0, 15))
def iq3_kt(b: Bytes) -> Fields:
    return Fields(words_at(b, 4, 68, "<u2"), nibbles(b[:, :4]))


@_codes(32768, 4, (-64, 63), None, True)
def iq4_kt(b: Bytes) -> Fields:
    shb = words_at(b, 0, 32, "<u4")
    top = (shb[:, :, None] >> np.arange(8, 32, 3, dtype=np.uint32) & 7).reshape(-1, 64).astype(np.uint16)
    codes = b[:, 32:96] | nibbles(b[:, 96:128]).astype(np.uint16) << 8 | top << 12
    return Fields(codes, ((shb & 255) >> 1).astype(np.int16) - np.int16(64), shifts=shb & 1)


def code_space(type: GGMLType) -> CodeSpace | None:
    """Return the fields of a type; None for float types, ternary types and formats that exist only interleaved."""
    found = _find(type)
    return found.space if found is not None else None


def read_fields(blocks: Bytes, type: GGMLType) -> Fields:
    """Read the fields of blocks (n, type_size), without row headers, of a type that has a `code_space`."""
    found = _find(type)
    assert found is not None
    return found.read(blocks)


def _find(type: GGMLType) -> CodeFields | None:
    reference = TYPES[type].codes
    found: CodeFields | None = load(reference) if reference else None
    return found


# --- replacing codes --------------------------------------------------------------------------------------------------
def is_replaceable(type: GGMLType) -> bool:
    """Return whether `replace_codes` supports a type."""
    space = code_space(type)
    return space is not None and space.in_order and space.group <= 2


@cache
def _code_bits(type: GGMLType) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int64]]:
    """Return the bit numbers (n_codes, bits) of every code in a block, and the codes of an all-zero block.

    Each bit is located by reading a block in which it alone is set. This works only for types whose codes are the bits
    of the block in another order.
    """
    n_bits = 8 * TYPES[type].type_size
    probes = np.packbits(np.eye(n_bits + 1, n_bits, dtype=np.uint8), axis=1, bitorder="little")
    space, codes = code_space(type), read_fields(probes, type).codes.astype(np.int64)
    assert space is not None
    zero = codes[n_bits]
    changed = codes[:n_bits] ^ zero
    places = np.full((codes.shape[1], (space.n_codes - 1).bit_length()), -1, np.intp)
    for b in range(places.shape[1]):
        bit, code = np.nonzero(changed >> b & 1)
        places[code, b] = bit
    return places, zero


def replace_codes(blocks: Bytes, type: GGMLType, codes: Integers) -> Bytes:
    """Return blocks (n, type_size) with other codes (n, a), counted as in `Fields`; all other fields stay.

    Raises UnsupportedError for types whose codes depend on each other (IQ4_KSS) or do not determine the value with the
    scales alone.
    """
    if not is_replaceable(type):
        raise UnsupportedError(f"codes of {TYPES[type].name} cannot be replaced one by one")
    places, zero = _code_bits(type)
    bits = np.unpackbits(blocks, axis=1, bitorder="little")
    new = codes.astype(np.int64) ^ zero
    for b in range(places.shape[1]):
        bits[:, places[:, b]] = new >> b & 1
    return np.packbits(bits, axis=1, bitorder="little")
