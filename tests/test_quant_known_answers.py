"""Known answers of every ik type and interleaved form: patterned bytes with unit scales, checksums of the floats.

Byte i of a row, or of a row group, is (73 i + 41) mod 256; then every scale becomes 1. The checksums were taken
from the reference; those of `MAINLINE` from decoders that agree with its output on other data.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import pytest

from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.quant import tables
from ikcli.quant.decode import dequantize
from ikcli.quant.decoders.iqk import iq6_k_of
from ikcli.quant.formats import tensor_size
from ikcli.quant.validate import block_scale_offsets

T = GGMLType
NE0 = 512
ONE = np.array([1], "<f2").view(np.uint8)

# type -> CRC-32 of the little-endian floats (negative zeros cleared) and the first three values
ROW_SCALE = {
    T.IQ2_KS: (0xA7A4002B, [24, -18, -66]),
    T.IQ3_KS: (0xF98F0442, [169, -299, 611]),
    T.IQ2_KL: (0x98B51B79, [29, 29, -667]),
    T.IQ4_KS: (0xB86C3CB8, [1581, -4743, 306]),
    T.IQ5_KS: (0xEBD5E167, [-1581, 510, -2295]),
    T.IQ4_KSS: (0x1C061333, [3683, 9271, -12700]),
    T.IQ1_KT: (0x6F69A0FF, [-1242, 2139, -207]),
    T.IQ2_KT: (0x1FB1307C, [1863, 4140, 2070]),
    T.IQ3_KT: (0xE16D75E0, [-351, 780, -390]),
    T.IQ4_KT: (0xE672ECA3, [728, -312, 1404]),
    T.IQ1_BN: (0x592DE110, [-1, 1, 0]),
    T.IQ2_BN: (0x4EBA0B0B, [0, 1, 2]),
    T.Q8_KV: (0x46CFD2D7, [113, -70, 3]),
    T.IQ4_KS_R4: (0xEAC64BBB, [969, -4503, 2394]),
    T.IQ5_KS_R4: (0xAB26A5EE, [3477, -5757, 4503]),
    T.IQ2_BN_R4: (0x6BD878B9, [0, 1, 2]),
    T.IQ1_S_R4: (0xBF3E1272, [10.125, 1.125, -7.875]),
    T.IQ1_M_R4: (0x282B3465, [10.125, 1.125, -7.875]),
    T.Q8_KV_R8: (0xDD07807C, [73, -110, -37]),
}
# one f16 scale per block and row (two in types with a minimum), at the start of the block
BLOCK_SCALE = {
    T.IQ2_K: (0x0E39C6C1, [-40, 30, 110]),
    T.IQ3_K: (0x6626A97E, [-1581, 1829, -527]),
    T.IQ4_K: (0x13D25A33, [-255, 1185, -630]),
    T.IQ5_K: (0x555F52F0, [-915, 1515, -1185]),
    T.Q6_0: (0x38F943A3, [19, -20, -11]),
    T.Q1_0_G128: (0x5153E521, [1, 1, -1]),
    T.IQ2_K_R4: (0xA21C5AEF, [-8, 6, 22]),
    T.IQ3_K_R4: (0x0B31045D, [-51, 57, -153]),
    T.IQ4_K_R4: (0x1A64DA20, [-119, 553, -294]),
    T.IQ5_K_R4: (0xDA20ECB9, [-427, 707, -553]),
    T.Q2_K_R4: (0x664AE525, [-2, 7, 16]),
    T.Q3_K_R4: (0xAA3511D2, [-15, 30, -45]),
    T.Q4_K_R4: (0x056E5E06, [189, 14, 239]),
    T.Q5_K_R4: (0x67C92D65, [589, 14, 639]),
    T.Q6_K_R4: (0xC5905458, [-1695, 1130, 2147]),
    T.IQ2_XXS_R4: (0x837A6027, [34.375, 34.375, 11]),
    T.IQ2_XS_R4: (0xC33D4430, [-3, -3, -16.125]),
    T.IQ2_S_R4: (0xBAB185CD, [-3, 3, 9.375]),
    T.IQ3_XXS_R4: (0xFB7ECF5E, [143, 55, 33]),
    T.IQ3_S_R4: (0x9AE7C1D8, [-3, 9, -15]),
    T.IQ4_NL_R4: (0x1B12A59B, [-104, 25, -65]),
    T.Q5_0_R4: (0x89B47D17, [1, -6, 3]),
    T.Q6_0_R4: (0xF0893916, [-15, 10, 19]),
    T.Q4_0_R8: (0xCF06637D, [1, -6, 3]),
    T.Q8_0_R8: (0xC0BEC925, [-71, 2, 75]),
    T.IQ4_XS_R8: (0x90A07E2F, [-91, 581, -266]),
    T.Q8_K_R8: (0x31872DF1, [-71, 2, 75]),
    T.Q8_K_R16: (0x4F9B2B2E, [-55, 18, 91]),
}
TWO_SCALES = {T.Q2_K_R4, T.Q4_K_R4, T.Q5_K_R4}


MAINLINE = {
    T.Q4_0: (0x39219775, [3, -4, 5]),
    T.Q4_1: (0x00B77B4D, [14, 7, 16]),
    T.Q5_0: (0xECAB5511, [15, 8, -15]),
    T.Q5_1: (0xFC263D83, [18, 11, 20]),
    T.Q8_0: (0x561BC52B, [-69, 4, 77]),
    T.IQ4_NL: (0xA55DBA0F, [38, -49, 69]),
    T.MXFP4: (0x89CC4CEA, [2, -3, 4]),
    T.MXFP4_R8: (0xF1BA604E, [1, -2, 3]),
    T.Q2_K: (0x56591C00, [7, 16, 25]),
    T.Q3_K: (0xC4A9B4D9, [-7, 14, -21]),
    T.Q4_K: (0xB1FC9636, [68, -23, 94]),
    T.Q5_K: (0xAD9D4283, [276, -23, 302]),
    T.Q6_K: (0x71BA2701, [161, -46, -621]),
    T.IQ4_XS: (0x08E0EA99, [-3016, 725, -1885]),
    T.IQ2_XXS: (0x6AC63086, [-123.625, -123.625, -23]),
    T.IQ2_XS: (0x5CE48D32, [23, -71.875, 23]),
    T.IQ2_S: (0x02B31682, [-7, -21.875, 21.875]),
    T.IQ3_XXS: (0x96B00052, [-297, -243, 189]),
    T.IQ3_S: (0x09C98934, [-35, -7, 105]),
    T.IQ1_S: (0x77658BBF, [0.625, 0.625, -4.375]),
    T.IQ1_M: (0x4B36DD64, [2.625, -3.375, -3.375]),
}


def pattern(n_bytes: int) -> np.ndarray:
    return ((73 * np.arange(n_bytes) + 41) % 256).astype(np.uint8)


def unit_blocks(type: GGMLType) -> np.ndarray:
    fmt = TYPES[type]
    data = pattern(tensor_size(type, (NE0, fmt.rows)))
    n_scales = fmt.rows * (2 if type in TWO_SCALES else 1)
    data.reshape(-1, fmt.type_size * fmt.rows)[:, : 2 * n_scales] = np.tile(ONE, n_scales)
    return data


def unit_rows(type: GGMLType) -> np.ndarray:
    fmt = TYPES[type]
    data = pattern(tensor_size(type, (NE0, fmt.rows)))
    scale = ONE if fmt.row_meta_size == 2 else np.array([1], "<f4").view(np.uint8)
    for row in range(fmt.rows):
        at = row * fmt.row_meta_size
        data[at : at + len(scale)] = scale
    return data


def unit_mainline(type: GGMLType) -> np.ndarray:
    fmt = TYPES[type]
    data = pattern(tensor_size(type, (NE0, fmt.rows)))
    blocks = data.reshape(-1, fmt.type_size * fmt.rows)
    for at in block_scale_offsets(type):
        blocks[:, at : at + 2] = ONE
    if type in (T.MXFP4, T.MXFP4_R8):
        blocks[:, : fmt.rows] = 128
    if type == T.IQ1_M:
        blocks[:, 49:56:2] = blocks[:, 49:56:2] & 15 | np.array([0, 0, 0xC0, 0x30], np.uint8)
    return data


def check(x: np.ndarray, crc: int, first: list[float]) -> None:
    assert x.reshape(-1)[:3].tolist() == first
    assert zlib.crc32((x + 0.0).astype("<f4").tobytes()) == crc


@pytest.mark.parametrize("type", [*ROW_SCALE, *BLOCK_SCALE], ids=lambda t: t.name)
def test_known_floats(type: GGMLType) -> None:
    make: Callable[[GGMLType], np.ndarray] = unit_rows if type in ROW_SCALE else unit_blocks
    crc, first = {**ROW_SCALE, **BLOCK_SCALE}[type]
    check(dequantize(make(type), type, (NE0, TYPES[type].rows)), crc, first)


@pytest.mark.parametrize("type", MAINLINE, ids=lambda t: t.name)
def test_known_floats_of_mainline_types(type: GGMLType) -> None:
    crc, first = MAINLINE[type]
    check(dequantize(unit_mainline(type), type, (NE0, TYPES[type].rows)), crc, first)


def test_i2_s_is_one_unit_per_tensor() -> None:
    data = pattern(NE0 // 4 + 32)
    data[NE0 // 4 : NE0 // 4 + 4] = np.array([1], "<f4").view(np.uint8)
    x = dequantize(data, T.I2_S, (NE0,))
    check(x, 0xB47DC1CA, [-1, 0, 1])
    assert np.array_equal(dequantize(data, T.I2_S, (128, 2, 2)).reshape(-1), x)


def cubic() -> np.ndarray:
    """The values of the reference's row decoder of IQ6_K: a cubic in float32, plus one in the shifted row."""
    a, b, c, d = (np.float32(v) for v in (-127.0, 6.2568, -0.11218, 0.0011972))
    q = np.arange(64, dtype=np.float32)
    base = a + q * (b + q * (c + q * d))
    return np.stack((base, base + np.float32(1)))


def test_iq6_k_with_the_cubic_and_with_the_table() -> None:
    blocks = unit_blocks(T.IQ6_K).reshape(2, -1)
    first = [float(np.float32(v)) for v in (-746.71997, 1190.66956, 9416.50586)]
    check(iq6_k_of(blocks, cubic()), 0x7DCCB50B, first)
    assert np.array_equal(np.rint(cubic()), tables.IQ6_VALUES)
    assert np.array_equal(
        dequantize(blocks, T.IQ6_K, (512,)).reshape(2, 256),
        iq6_k_of(blocks, tables.IQ6_VALUES),
    )


@pytest.mark.parametrize(
    ("shape", "offset", "crc"),
    [
        ((65536, 8), 4096, 0xC8B2A8FC),
        ((8192, 8), 4096, 0xFD306DAA),
        ((32768, 4), 4096, 0xFEF7581B),
        ((32768, 4), 36864, 0xA444E02B),
    ],
)
def test_trellis_tables(shape: tuple[int, int], offset: int, crc: int) -> None:
    values = tables.trellis(shape[1], offset, shape[0])
    assert values.shape == shape
    assert zlib.crc32(values.astype(np.int8).tobytes()) == crc


def test_trellis_starts() -> None:
    assert tables.trellis(8)[8191].tolist() == [-17, -22, -28, 59, -59, -33, 51, 5]
    assert tables.trellis(8)[65535].tolist() == [26, -32, -16, -9, -25, -62, 17, 10]
    assert tables.trellis(4, 36864, 32768)[0].tolist() == [-40, -79, -43, -79]


@pytest.mark.parametrize(
    ("type", "shape", "levels"),
    [
        (T.IQ2_XXS, (256, 8), {8, 25, 43}),
        (T.IQ2_XS, (512, 8), {8, 25, 43}),
        (T.IQ2_S, (1024, 8), {8, 25, 43}),
        (T.IQ3_XXS, (256, 4), {4, 12, 20, 28, 36, 44, 52, 62}),
        (T.IQ3_S, (512, 4), set(range(1, 16, 2))),
        (T.IQ1_S, (2048, 8), {-1, 0, 1}),
        (T.IQ1_M, (2048, 8), {-1, 0, 1}),
    ],
    ids=lambda v: v.name if isinstance(v, T) else "",
)
def test_grids_are_sorted_and_complete(type: GGMLType, shape: tuple[int, int], levels: set[int]) -> None:
    grid = tables.grid(type.name)
    assert grid.shape == shape
    assert set(np.unique(grid)) == levels
    level = np.searchsorted(np.array(sorted(levels)), grid)
    keys = level @ ((4 if shape[1] == 8 else 8) ** np.arange(shape[1]))
    assert (np.diff(keys) > 0).all()


def test_sign_bytes_have_even_parity() -> None:
    signs = tables.sign_bytes(np.arange(256, dtype=np.uint16))
    assert [signs[i] for i in (0, 1, 3, 127, 128)] == [0, 129, 3, 255, 0]
    assert (np.unpackbits(signs[:, None], axis=1).sum(axis=1) % 2 == 0).all()
    assert tables.sign_table()[0b101].tolist() == [-1, 1, -1, 1, 1, 1, 1, 1]
