"""Types of llama.cpp alone: bytes and values are those of the gguf package, or of a block written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.quant.decode import dequantize
from ikcli.quant.encoders import EncodeOptions
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
