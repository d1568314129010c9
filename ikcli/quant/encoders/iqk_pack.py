"""Pack the IQ*_K, KS, KSS and KL types: scales, multipliers, table rows and codes into rows of bytes.

A packer takes d (units) float32, m (units, subs) int8, t (units, subs) 0 or 1, codes (units, subs, n) and the number of
rows, and returns uint8 (n_rows, row size). The decoders in `ikcli.quant.decoders.iqk` describe the layouts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ikcli.gguf.constants import GGMLType

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int8]
Floats = npt.NDArray[np.float32]
Packer = Callable[[Floats, Ints, Bytes, Bytes, int], Bytes]


def _f16_bytes(d: Floats) -> Bytes:
    return d.astype("<f2").view(np.uint8).reshape(-1, 2)


def _f32_bytes(d: Floats) -> Bytes:
    return d.astype("<f4").view(np.uint8).reshape(-1, 4)


def _bits(flags: npt.NDArray[np.generic]) -> Bytes:
    """Pack flags (n, 8k) into bytes (n, k), first flag lowest."""
    return np.packbits(flags.astype(np.bool_), axis=1, bitorder="little")


def _fields(values: Bytes, width: int) -> Bytes:
    """Pack neighbouring fields (n, k) of 2 or 4 bits into bytes, first field lowest."""
    per_byte = 8 // width
    parts = values.reshape(len(values), -1, per_byte)
    out = parts[:, :, 0].copy()
    for i in range(1, per_byte):
        out |= parts[:, :, i] << np.uint8(width * i)
    return out


def _planes(codes: Bytes, group: int, width: int) -> Bytes:
    """Pack codes (n, 256), `width` bits each.

    Byte r of every `group` elements holds elements r, r+32, ... of it.
    """
    parts = codes.reshape(len(codes), -1, group // 32, 32)
    out = parts[:, :, 0].copy()
    for i in range(1, group // 32):
        out |= parts[:, :, i] << np.uint8(width * i)
    return out.reshape(len(codes), -1)


def _half_nibbles(codes: Bytes) -> Bytes:
    """Pack codes (n, 256): byte i of every 32 elements holds elements i and i + 16."""
    parts = codes.reshape(len(codes), -1, 2, 16)
    return (parts[:, :, 0] | parts[:, :, 1] << np.uint8(4)).reshape(len(codes), -1)


def _two_bit(codes: Bytes) -> Bytes:
    return _planes(codes & np.uint8(3), 128, 2)


def _high_bits(codes: Bytes, shift: int) -> Bytes:
    """Pack bit `shift` of the codes, eight elements 32 apart to a byte."""
    return _planes(codes >> np.uint8(shift) & np.uint8(1), 256, 1)


def _six_bit(m: Ints) -> tuple[Bytes, Bytes]:
    """Split sixteen multipliers -32..31 into tops (n, 4) and low nibbles (n, 8)."""
    u = (m + np.int8(32)).astype(np.uint8)
    return _fields(u >> np.uint8(4), 2), _fields(u & np.uint8(15), 4)


def _blocks(parts: list[Bytes], n_rows: int) -> Bytes:
    return np.concatenate(parts, axis=1).reshape(n_rows, -1)


def _iq2_k(d: Floats, m: Ints, t: Bytes, codes: Bytes, n_rows: int) -> Bytes:
    scales = _fields((m + np.int8(8)).astype(np.uint8), 4)
    return _blocks([_f16_bytes(d), _bits(t), scales, _two_bit(codes.reshape(-1, 256))], n_rows)


def _iq3_k(d: Floats, m: Ints, t: Bytes, codes: Bytes, n_rows: int) -> Bytes:
    c = codes.reshape(-1, 256)
    low = _fields(np.abs(m).astype(np.uint8) >> np.uint8(1), 4)
    return _blocks([_f16_bytes(d), _bits(t), _bits(m < 0), low, _two_bit(c), _high_bits(c, 2)], n_rows)


def _iq4_k(d: Floats, m: Ints, t: Bytes, codes: Bytes, n_rows: int) -> Bytes:
    high, low = _six_bit(m)
    return _blocks([_f16_bytes(d), _bits(t), high, low, _half_nibbles(codes.reshape(-1, 256))], n_rows)


def _iq5_k(d: Floats, m: Ints, t: Bytes, codes: Bytes, n_rows: int) -> Bytes:
    high, low = _six_bit(m)
    c = codes.reshape(-1, 256)
    qs = _planes(c & np.uint8(15), 64, 4)
    return _blocks([_f16_bytes(d), _bits(t), high, low, qs, _high_bits(c, 4)], n_rows)


def _iq6_k(d: Floats, m: Ints, t: Bytes, codes: Bytes, n_rows: int) -> Bytes:
    c = codes.reshape(-1, 256)
    qs, qh = _planes(c & np.uint8(15), 64, 4), _two_bit(c >> np.uint8(4))
    return _blocks([_f16_bytes(d), _bits(t), m.view(np.uint8), qs, qh], n_rows)


def _with_header(header: Bytes, parts: list[Bytes], n_rows: int) -> Bytes:
    return np.concatenate([header, np.concatenate(parts, axis=1).reshape(n_rows, -1)], axis=1)


def _split_nibbles(u: Bytes) -> Bytes:
    """Pack eight low nibbles (n, 8) into bytes (n, 4): sub-blocks i and i + 4."""
    return u[:, :4] & np.uint8(15) | u[:, 4:] << np.uint8(4)


def _iq2_ks(d: Floats, m: Ints, t: Bytes, codes: Bytes, n_rows: int) -> Bytes:
    u = (m.reshape(-1, 8) + np.int8(16)).astype(np.uint8)
    parts = [_bits(t.reshape(-1, 8)), _bits(u >> np.uint8(4)), _fields(u & np.uint8(15), 4)]
    return _with_header(_f16_bytes(d), [*parts, _two_bit(codes.reshape(-1, 256))], n_rows)


def _iq3_ks(d: Floats, m: Ints, t: Bytes, codes: Bytes, n_rows: int) -> Bytes:
    u = (m.reshape(-1, 8) + np.int8(16)).astype(np.uint8)
    c = codes.reshape(-1, 256)
    parts = [_bits(u >> np.uint8(4)), _bits(t.reshape(-1, 8)), _split_nibbles(u), _two_bit(c), _high_bits(c, 2)]
    return _with_header(_f16_bytes(d), parts, n_rows)


def _scale_bytes(m: Ints, t: Bytes) -> Bytes:
    """Return odd multipliers and table rows, a byte per sub-block."""
    return ((m.astype(np.int16) + 127).astype(np.uint8) & np.uint8(254) | t).reshape(-1, 8)


def _iq4_ks(d: Floats, m: Ints, t: Bytes, codes: Bytes, n_rows: int) -> Bytes:
    return _with_header(_f32_bytes(d), [_scale_bytes(m, t), _half_nibbles(codes.reshape(-1, 256))], n_rows)


def _iq5_ks(d: Floats, m: Ints, t: Bytes, codes: Bytes, n_rows: int) -> Bytes:
    c = codes.reshape(-1, 256)
    parts = [_scale_bytes(m, t), _planes(c & np.uint8(15), 64, 4), _high_bits(c, 4)]
    return _with_header(_f32_bytes(d), parts, n_rows)


def _iq4_kss(d: Floats, m: Ints, t: Bytes, codes: Bytes, n_rows: int) -> Bytes:
    nibbles = _half_nibbles(codes.reshape(-1, 256))
    v = nibbles.view("<u2").copy()  # words of even parity
    for shift in (1, 2, 4, 8):  # bit k becomes the XOR of bits 0..k
        v ^= v << np.uint16(shift)
    flags = np.unpackbits(_scale_bytes(m, t).reshape(-1, 1), axis=1, bitorder="little").reshape(len(v), -1)
    words = (v << np.uint16(1)) | flags
    return _with_header(_f32_bytes(d), [words.astype("<u2").view(np.uint8)], n_rows)


def _iq2_kl(d: Floats, m: Ints, t: Bytes, codes: Bytes, n_rows: int) -> Bytes:
    u = (m.reshape(-1, 8) + np.int8(32)).astype(np.uint8)
    pairs = codes.reshape(-1, 8, 16)
    low = pairs[:, 0::2] & np.uint8(15) | pairs[:, 1::2] << np.uint8(4)
    high = np.packbits(pairs.swapaxes(1, 2) >> np.uint8(4), axis=2, bitorder="little")
    parts = [_fields(u >> np.uint8(4), 2), _split_nibbles(u), low.reshape(-1, 64), high.reshape(-1, 16)]
    return _with_header(_f16_bytes(d), parts, n_rows)


PACKERS: dict[GGMLType, Packer] = {
    GGMLType.IQ2_K: _iq2_k,
    GGMLType.IQ3_K: _iq3_k,
    GGMLType.IQ4_K: _iq4_k,
    GGMLType.IQ5_K: _iq5_k,
    GGMLType.IQ6_K: _iq6_k,
    GGMLType.IQ2_KS: _iq2_ks,
    GGMLType.IQ3_KS: _iq3_ks,
    GGMLType.IQ4_KS: _iq4_ks,
    GGMLType.IQ5_KS: _iq5_ks,
    GGMLType.IQ4_KSS: _iq4_kss,
    GGMLType.IQ2_KL: _iq2_kl,
}
