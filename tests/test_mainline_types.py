"""Types of llama.cpp alone: bytes and values are those of the gguf package, or of a block written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.quant.decode import dequantize
from ikcli.quant.encoders import EncodeOptions, nvfp4
from ikcli.quant.encoders.ternary import encode

T = GGMLType
SCALES = {T.TQ1_0: 52, T.TQ2_0: 64}  # where a block has its f16


@pytest.mark.parametrize("type", [T.TQ1_0, T.TQ2_0, T.NVFP4], ids=lambda t: t.name)
def test_values_of_all_bytes(type: GGMLType) -> None:
    record = TYPES[type]
    blocks = np.random.default_rng(int(type)).integers(0, 256, (300, record.type_size), dtype=np.uint8)
    if type in SCALES:
        blocks[:, SCALES[type] :] = np.array([0.75], "<f2").view(np.uint8)
    wanted = quants.dequantize(blocks, GGMLQuantizationType(int(type)))
    np.testing.assert_array_equal(dequantize(blocks.reshape(-1), type, (record.block_size, 300)), wanted)


@pytest.mark.parametrize("type", SCALES, ids=lambda t: t.name)
def test_bytes_of_ternary_types(type: GGMLType) -> None:
    rows = np.random.default_rng(5).standard_normal((9, 512)).astype(np.float32)
    rows[3] = 0
    rows[4] = np.sign(rows[4]) * np.float32(0.5)
    found = encode(rows, type, None, EncodeOptions())
    np.testing.assert_array_equal(found, quants.quantize(rows, GGMLQuantizationType(int(type))).reshape(-1))
    np.testing.assert_array_equal(dequantize(found, type, (512, 9))[3:5], rows[3:5])


def test_a_block_of_two_bits() -> None:
    """Four adjacent elements per byte, the first in the lowest bits; code 1 is 0."""
    block: Any = np.array([0, 0x38, 0b11100100, *[0b01010101] * 15], np.uint8)  # d = 0.5
    found = dequantize(block, T.Q2_0, (64, 1)).reshape(-1)
    np.testing.assert_array_equal(found[:4], [-0.5, 0, 0.5, 1])
    assert not found[4:].any()


E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled


def e4m3(x: np.float32) -> int:
    """A number as E4M3 without sign, one step after the other as ggml-impl.h takes them."""
    if not x > 0:
        return 0
    bits = int(np.float32(min(x, np.float32(448))).view(np.uint32))
    exponent, fraction = (bits >> 23) - 127 + 7, bits >> 20 & 7
    if exponent <= 0:
        tiny = min(int(np.float32(x * np.float32(512) + np.float32(0.5))), 7)
        return max(tiny, 0)
    fraction += bits >> 19 & 1
    if fraction > 7:
        exponent, fraction = exponent + 1, 0
    return 0x7E if exponent >= 15 else exponent << 3 | fraction


def block_of_nvfp4(values: Any) -> bytes:
    """64 numbers as llama.cpp encodes them, number by number."""
    scales, codes = [], []
    for part in values.reshape(4, 16):
        scale = e4m3(np.abs(part).max() / np.float32(6))
        exponent, fraction = scale >> 3, scale & 7
        d = np.float32(((1 + fraction / 8) * 2.0 ** (exponent - 7) if exponent else fraction * 2.0**-9) / 2)
        # `min` keeps the first of equal distances
        found = [min(range(16), key=lambda i: abs(np.float32(E2M1[i]) * d - x)) for x in part]
        scales.append(scale)
        codes += [found[j] | found[8 + j] << 4 for j in range(8)]
    return bytes(scales + codes)


def test_bytes_of_nvfp4() -> None:
    rng = np.random.default_rng(8)
    rows = rng.standard_normal((24, 64)).astype(np.float32) * np.float32(2.0) ** np.arange(-16, 8)[:, None]
    rows = np.concatenate([rows, np.zeros((1, 64)), rng.integers(-12, 13, (6, 64)) / 2, rows[-1:] * 100])
    rows[5] = np.abs(rows[5])
    rows = rows.astype(np.float32)
    found = nvfp4.encode(rows, T.NVFP4, None, EncodeOptions()).reshape(-1, 36)
    for values, block in zip(rows, found, strict=True):
        assert block.tobytes() == block_of_nvfp4(values)
    assert {0, 0x7E} < set(found[:, :4].flat) and set(range(1, 8)) & set(found[:, :4].flat)  # none, largest, tiny
    assert not np.isin(found[:, 4:] & 15, 8).any() and not np.isin(found[:, 4:] >> 4, 8).any()  # no zero with a sign


def test_values_that_nvfp4_holds_come_back() -> None:
    rows = np.random.default_rng(3).choice([0, 0.5, 1, 1.5, 2, 3, 4, -6], (9, 128)).astype(np.float32) * np.float32(
        0.75
    )
    rows[:, ::16] = -4.5  # 6 times the scale
    found = nvfp4.encode(rows, T.NVFP4, None, EncodeOptions())
    np.testing.assert_array_equal(dequantize(found, T.NVFP4, (128, 9)), rows)
