"""Describe the bit layouts of the row-interleaved types: the bits of every field in a plain block and in a group.

A group is R consecutive rows: first their headers in row order, then one interleaved unit per block position. Fields
are pairs of bit addresses, (items, width) in the plain block and (R, items, width) in the unit; `k` is the row in the
group. An index r in a sub-block of 32 splits into r = 16a + 8h + 4c + i = 16a + 4s + i, so that runs of four elements
stay together. Types without a plain twin get one here: the same fields, one row at a time. `TensorType.layout` names a
function that returns the fields, or an `InterleavedUnit` where fields alone are not enough. Corresponds to the repack
functions of iqk_quantize.cpp, https://github.com/ikawrakow/ik_llama.cpp/pull/134.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ikcli.references import load

Bits = npt.NDArray[np.int64]
Field = tuple[Bits, Bits]
Fields = tuple[Field, ...]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SignCodes:
    """Place of 7-bit sign codes: bytes start..stop of a block as integers of `dtype`, every `step`-th."""

    start: int
    stop: int
    dtype: str
    step: int
    shifts: tuple[int, ...]  # first bit of each code in an integer

    def scramble(self, blocks: Bytes) -> None:
        """Replace every code by the XOR of its lower bits, bit by bit, in blocks (..., bytes)."""
        words = self._words(blocks)
        for n in (1, 2, 4):
            words ^= words << words.dtype.type(n) & self.mask(n)

    def unscramble(self, blocks: Bytes) -> None:
        """Invert `scramble`."""
        words = self._words(blocks)
        words ^= words << words.dtype.type(1) & self.mask(1)

    def _words(self, blocks: Bytes) -> npt.NDArray[np.unsignedinteger]:
        return blocks[..., self.start : self.stop].view(self.dtype)[..., self.step - 1 :: self.step]

    def mask(self, n: int) -> np.unsignedinteger:
        """Return the bits of all codes of an integer that have another bit of their code `n` places below."""
        return np.dtype(self.dtype).type(sum((127 >> n << n) << shift for shift in self.shifts))


@dataclass(frozen=True, slots=True)
class Layout:
    """One interleaved type: group height, elements and bytes of a plain block, its fields, its sign codes."""

    rows: int
    n_elements: int
    n_bytes: int
    fields: tuple[Field, ...]
    signs: SignCodes | None = None

    def moves(self, stride: int = 0, lead: int = 0) -> tuple[Bits, Bits]:
        """Return bit addresses in the unit and in R plain blocks at `lead` of `stride` bytes (default: dense)."""
        offsets = ((stride or self.n_bytes) * np.arange(self.rows) + lead)[:, None, None] * 8
        unit = [np.broadcast_to(grouped, (self.rows, *plain.shape)).reshape(-1) for plain, grouped in self.fields]
        rows = [(plain + offsets).reshape(-1) for plain, _ in self.fields]
        return np.concatenate(unit), np.concatenate(rows)


class InterleavedUnit(NamedTuple):
    """The fields of a type, its sign codes, and how many plain blocks form one unit."""

    fields: Fields
    signs: SignCodes | None = None
    n_blocks: int = 1


@cache
def layout_of(text: str) -> Layout:
    """Return the layout for `reference,rows,elements,bytes`: rows of a group, elements and bytes of a plain block."""
    reference, *numbers = text.split(",")
    rows, n_elements, n_bytes = map(int, numbers)
    found = load(reference)()
    unit = found if isinstance(found, InterleavedUnit) else InterleavedUnit(found)
    return Layout(rows, n_elements * unit.n_blocks, n_bytes * unit.n_blocks, unit.fields, unit.signs)


def _bits(byte: npt.ArrayLike, first: npt.ArrayLike = 0, width: int = 8) -> Bits:
    """Return the addresses of `width` bits from bit `first` of `byte`, broadcast over items: (..., width)."""
    return (np.asarray(byte) * 8 + np.asarray(first))[..., None] + np.arange(width)


def _k(rows: int = 4) -> Bits:
    return np.arange(rows)[:, None]


def _f16(plain: int, at: int, rows: int = 4) -> Field:
    """Describe a 16-bit field per row."""
    return _bits([plain], 0, 16), _bits(at + 2 * _k(rows), 0, 16)


def _bytes(plain: int, at: int, n: int, rows: int = 4) -> Field:
    """Describe `n` bytes; byte j of all rows is together."""
    j = np.arange(n)
    return _bits(plain + j), _bits(at + rows * j + _k(rows))


def _runs(plain: int, at: int, n: int, rows: int, run: int = 4) -> Field:
    """Describe `n` bytes in runs of `run` bytes; run j of all rows is together."""
    j = np.arange(n)
    return _bits(plain + j), _bits(at + run * rows * (j // run) + run * _k(rows) + j % run)


def _p4(e: Bits, at: int) -> Bits:
    """Return the addresses of nibbles: 64 bytes per 32 columns, elements r and r + 8 share a byte."""
    b, r = e // 32, e % 32
    return _bits(at + 64 * b + 32 * (r // 4 % 2) + 16 * (r // 16) + 4 * _k() + r % 4, 4 * (r // 8 % 2), 4)


def _low16(plain: int, at: int, n: int = 256) -> Field:
    """Describe 4-bit codes of plain sub-blocks of 16 bytes: low nibbles are the first 16 elements."""
    e = np.arange(n)
    return _bits(plain + 16 * (e // 32) + e % 16, 4 * (e % 32 // 16), 4), _p4(e, at)


def _low32(plain: int, at: int) -> Field:
    """Describe 4-bit codes of plain pairs of sub-blocks: low nibbles are the first sub-block."""
    e = np.arange(256)
    return _bits(plain + 32 * (e // 64) + e % 32, 4 * (e // 32 % 2), 4), _p4(e, at)


def _low_q6_k(plain: int, at: int) -> Field:
    """Describe 4-bit codes of halves of 128: low nibbles are the first 64 elements."""
    e = np.arange(256)
    return _bits(plain + 64 * (e // 128) + e % 64, 4 * (e % 128 // 64), 4), _p4(e, at)


def _two_bits(plain: int, at: int, *, as_q6_k: bool = False) -> Field:
    """Describe 2-bit codes: a byte of the unit holds s = 0..3 of one run, in the order h + 2c for Q6_K."""
    e = np.arange(256)
    b, r = e // 32, e % 32
    s = 2 * (r // 4 % 2) + r // 8 % 2 if as_q6_k else r // 4 % 4
    grouped = _bits(at + 32 * b + 16 * (r // 16) + 4 * _k() + r % 4, 2 * s, 2)
    return _bits(plain + 32 * (e // 128) + r, 2 * (b % 4), 2), grouped


def _one_bit(plain: int, at: int, a: int, h: int, c: int) -> Field:
    """Describe single bits: 16 bytes per sub-block; (a, h, c) are the weights of the parts of r in the bit position."""
    e = np.arange(256)
    b, r = e // 32, e % 32
    position = a * (r // 16) + h * (r // 8 % 2) + c * (r // 4 % 2)
    return _bits(plain + r, b, 1), _bits(at + 16 * b + 4 * _k() + r % 4, position, 1)


def _scale_parts(low: Bits, high: Bits, at_low: int, at_high: int, rows: int = 4) -> tuple[Field, Field]:
    """Describe 4 + 2 bit scales at the plain addresses (n, 4) and (n, 2), numbered rows * j + k in the unit."""
    number = rows * np.arange(len(low)) + _k(rows)
    return (
        (low, _bits(at_low + number % 32, 4 * (number // 32), 4)),
        (high, _bits(at_high + number % 16, 2 * (number // 16), 2)),
    )


def _nibble_scales(plain: int, at: int) -> Field:
    """Describe sixteen 4-bit scales."""
    j = np.arange(16)
    number = 4 * j + _k()
    return _bits(plain + j // 2, 4 * (j % 2), 4), _bits(at + number % 32, 4 * (number // 32), 4)


def _flags(plain: int, at: int) -> Field:
    """Describe one bit per sub-block of 16 (table choice, sign of the scale)."""
    j = np.arange(16)
    return _bits(plain, j, 1), _bits(at + 4 * (j % 2) + _k(), j // 2, 1)


def _iqk_scales() -> Fields:
    """Describe d, table choice and 6-bit scales of IQ4_K and IQ5_K."""
    j = np.arange(16)
    low, high = _bits(8 + j // 2, 4 * (j % 2), 4), _bits(4 + j // 4, 2 * (j % 4), 2)
    return _f16(0, 0), _flags(2, 8), *_scale_parts(low, high, 32, 16)


def _q4_k_scales() -> Fields:
    """Describe d, dmin, eight 6-bit scales and eight 6-bit minimums of Q4_K and Q5_K."""
    j = np.arange(8)
    first = j < 4
    sc_low = _bits(np.where(first, 4 + j, 8 + j), 0, 4)
    mn_low = _bits(8 + j, np.where(first, 0, 4), 4)
    sc_high = _bits(np.where(first, 4 + j, j), np.where(first, 4, 6), 2)
    mn_high = _bits(np.where(first, 8 + j, 4 + j), np.where(first, 4, 6), 2)
    number = 4 * j + _k()
    low, high, nibble = 32 + number, 16 + number % 16, 4 * (number // 16)
    return (
        _f16(0, 0),
        _f16(2, 8),
        (sc_low, _bits(low, 0, 4)),
        (mn_low, _bits(low, 4, 4)),
        (sc_high, _bits(high, nibble, 2)),
        (mn_high, _bits(high, nibble + 2, 2)),
    )


def q3_k_r4() -> Fields:
    j = np.arange(16)
    low, high = _bits(96 + j % 8, 4 * (j // 8), 4), _bits(104 + j % 4, 2 * (j // 4), 2)
    scales = _scale_parts(low, high, 24, 8)
    return _f16(108, 0), *scales, _one_bit(0, 56, 4, 2, 1), _two_bits(32, 184)


def iq4_xs_r8() -> Fields:
    b = np.arange(8)
    scales = _scale_parts(_bits(4 + b // 2, 4 * (b % 2), 4), _bits(2, 2 * b, 2), 32, 16, rows=8)
    e = np.arange(256)
    r = e % 32
    plain = _bits(8 + 16 * (e // 32) + e % 16, 4 * (r // 16), 4)
    grouped = _bits(64 + 128 * (e // 32) + 32 * (r // 8) + 4 * _k(8) + r % 4, 4 * (r // 4 % 2), 4)
    return _f16(0, 0, 8), *scales, (plain, grouped)


def q5_0_r4() -> Fields:
    r = np.arange(32)
    position = 2 * (r // 4 % 2) + r // 16 + 4 * (r // 8 % 2)
    return _f16(0, 0), (_bits(2, r, 1), _bits(8 + 4 * _k() + r % 4, position, 1)), _low16(6, 24, 32)


def q6_0_r4() -> Fields:
    r = np.arange(32)
    plain = _bits(2 + r % 8, 4 * (r % 16 // 8) + 2 * (r // 16), 2)
    grouped = _bits(8 + 16 * (r // 16) + 4 * _k() + r % 4, 2 * (r // 4 % 4), 2)
    return _f16(0, 0), (plain, grouped), _low16(10, 40, 32)


def iq2_bn_r4() -> Fields:
    e = np.arange(64)
    return ((_bits(e % 16, 2 * (e // 16), 2), _bits(16 * (e // 16) + 4 * _k() + e % 4, 2 * (e // 4 % 4), 2)),)


def _signs_and_scales(word: Bits) -> tuple[Field, Field]:
    """Describe sign codes and scales of IQ2_XXS and IQ3_XXS: the u32 at byte `word` of each sub-block (8,)."""
    group = np.arange(32)
    byte, i = 8 + 16 * (group // 4) + 4 * _k() + group % 4, group % 4
    start = word[group // 4]
    return (_bits(start, 7 * i, 7), _bits(byte, 1, 7)), (_bits(start, 28 + i, 1), _bits(byte, 0, 1))


def iq2_xxs_r4() -> InterleavedUnit:
    b, group = np.arange(8), np.arange(32)
    index = _bits(2 + 8 * (group // 4) + group % 4), _bits(136 + 16 * (group // 4) + 4 * _k() + group % 4)
    signs = SignCodes(2, 66, "<u4", 2, (0, 7, 14, 21))
    return InterleavedUnit((_f16(0, 0), *_signs_and_scales(6 + 8 * b), index), signs)


def iq2_xs_r4() -> InterleavedUnit:
    return InterleavedUnit((_f16(0, 0), _runs(2, 8, 64, 4, 8), _bytes(66, 264, 8)), SignCodes(2, 66, "<u2", 1, (9,)))


def iq3_xxs_r4() -> InterleavedUnit:
    fields = _f16(0, 0), *_signs_and_scales(66 + 4 * np.arange(8)), _runs(2, 136, 64, 4, 8)
    return InterleavedUnit(fields, SignCodes(66, 98, "<u4", 1, (0, 7, 14, 21)))


def iq3_s_r4() -> Fields:
    g = np.arange(64)
    index = _bits(2 + g), _bits(8 + 32 * (g // 8) + 8 * (g % 4) + 4 * (g % 8 // 4) + _k())
    e, b = np.arange(256), np.arange(8)
    r = e % 32
    signs = _bits(74 + e // 8, e % 8, 1), _bits(296 + 16 * (e // 32) + 4 * _k() + r % 4, r // 4, 1)
    number = 4 * b + _k()
    scales = _bits(106 + b // 2, 4 * (b % 2), 4), _bits(424 + number % 16, 4 * (number // 16), 4)
    return _f16(0, 0), index, _bytes(66, 264, 8), signs, scales


def q4_0_r8() -> Fields:
    return _f16(0, 0, 8), _runs(2, 16, 16, 8)


def q8_0_r8() -> Fields:
    return _f16(0, 0, 8), _runs(2, 16, 32, 8)


def mxfp4_r8() -> Fields:
    return _bytes(0, 0, 1, 8), _runs(1, 8, 16, 8)


def iq4_nl_r4() -> Fields:
    return _f16(0, 0), _low16(2, 8, 32)


def q2_k_r4() -> Fields:
    return _f16(80, 0), _f16(82, 8), _bytes(0, 16, 16), _two_bits(16, 80)


def q4_k_r4() -> Fields:
    return *_q4_k_scales(), _low32(16, 64)


def q5_k_r4() -> Fields:
    return *_q4_k_scales(), _one_bit(16, 64, 4, 1, 2), _low32(48, 192)


def q6_k_r4() -> Fields:
    return _f16(208, 0), _bytes(192, 8, 16), _two_bits(128, 72, as_q6_k=True), _low_q6_k(0, 328)


def iq2_s_r4() -> Fields:
    return _f16(0, 0), _runs(2, 8, 32, 4), _bytes(66, 136, 8), _runs(34, 168, 32, 4), _bytes(74, 296, 8)


def iq2_k_r4() -> Fields:
    return _f16(0, 0), _flags(2, 8), _nibble_scales(4, 16), _two_bits(12, 48)


def iq3_k_r4() -> Fields:
    scales = _f16(0, 0), _flags(2, 8), _flags(4, 16), _nibble_scales(6, 24)
    return *scales, _two_bits(14, 56), _one_bit(78, 312, 4, 2, 1)


def iq4_k_r4() -> Fields:
    return *_iqk_scales(), _low16(16, 64)


def iq5_k_r4() -> Fields:
    return *_iqk_scales(), _low32(16, 64), _one_bit(144, 576, 2, 1, 4)


def iq4_ks_r4() -> Fields:
    return _bytes(0, 0, 8), _low16(8, 32)


def iq5_ks_r4() -> Fields:
    return _bytes(0, 0, 8), _low32(8, 32), _one_bit(136, 544, 2, 1, 4)


def q8_kv_r8() -> Fields:
    return (_runs(0, 0, 32, 8),)


def bf16_r16() -> InterleavedUnit:
    return InterleavedUnit((_runs(0, 0, 4, 16),), n_blocks=2)


# Formats without a plain twin, and the block that `decoders.interleaved` reads: d qs[256]; qs[4] qh u16; qs[4] qh[2] s
def q8_k_r8() -> Fields:
    return _f16(0, 0, 8), _runs(2, 16, 256, 8)


def q8_k_r16() -> Fields:
    return _f16(0, 0, 16), _runs(2, 32, 256, 16)


def iq1_s_r4() -> Fields:
    return _bytes(0, 0, 4), _f16(4, 16)


def iq1_m_r4() -> Fields:
    return _bytes(0, 0, 4), _bytes(4, 16, 2), _bytes(6, 24, 1)
