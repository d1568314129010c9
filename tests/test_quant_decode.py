"""Decoders and closed-form encoders against hand-made blocks, the `gguf` package and golden bytes."""

from __future__ import annotations

from pathlib import Path

import gguf.quants
import numpy as np
import pytest

from ikcli.errors import FormatError, UnsupportedError, UsageError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import GGUFFile, TensorInfo
from ikcli.gguf.types import TYPES
from ikcli.quant import decode
from ikcli.quant.decode import decodable_types, dequantize
from ikcli.quant.decoders.iqk import iq6_k_of
from ikcli.quant.encode import quantize
from ikcli.quant.formats import tensor_size
from ikcli.quant.validate import block_scale_offsets, check_tensors, first_non_finite

T = GGMLType
ONE = np.array([1.0], "<f2").tobytes()
HALF = np.array([0.5], "<f2").tobytes()
PACKAGE_TYPES = sorted(t for t in decodable_types() if t.name in gguf.GGMLQuantizationType.__members__)
# The reference does not decode these.
NO_GOLDEN = {T.F32, T.I2_S, T.Q1_0_G128, T.Q8_K_R16, T.BF16_R16, T.MXFP4_R8, T.TQ1_0, T.TQ2_0, T.NVFP4, T.Q2_0}
DECODED_OTHERWISE = {T.IQ1_BN, T.IQ2_BN, T.IQ6_K}  # tests of their own below
GOLDEN_TYPES = sorted(decodable_types() - NO_GOLDEN - DECODED_OTHERWISE)
NO_ZERO_SIGN = {T.Q5_0_R4, T.Q6_0_R4}  # the reference subtracts an offset, which loses the sign of zeros


def decode_block(raw: bytes, type: GGMLType) -> np.ndarray:
    return dequantize(np.frombuffer(raw, np.uint8), type, (TYPES[type].block_size,))


def random_blocks(type: GGMLType, n: int, rng: np.random.Generator) -> np.ndarray:
    """Random bytes with finite scales."""
    blocks = rng.integers(0, 256, (n, TYPES[type].type_size), np.uint8)
    for o in block_scale_offsets(type):
        blocks[:, o : o + 2] = rng.normal(0, 0.1, (n, 1)).astype("<f2").view(np.uint8)
    return blocks


def test_q4_0_nibbles() -> None:
    x = decode_block(HALF + bytes([0xF0] + [0x87] * 15), T.Q4_0)
    assert x[0] == -4.0
    assert x[16] == 3.5
    assert (x[1:16] == -0.5).all()
    assert (x[17:] == 0).all()


def test_q5_1_fifth_bit_and_minimum() -> None:
    x = decode_block(ONE + HALF + (1 << 0 | 1 << 17).to_bytes(4, "little") + bytes([0x21] * 16), T.Q5_1)
    assert x[0] == 17.5
    assert (x[1:16] == 1.5).all()
    assert x[17] == 18.5
    assert x[16] == 2.5


def test_q6_0_upper_bits() -> None:
    qh = bytes([0b11_10_01_00] + [0] * 7)  # elements 0, 16, 8, 24
    x = decode_block(ONE + qh + bytes(16), T.Q6_0)
    assert [x[e] for e in (0, 16, 8, 24, 1)] == [-32, -16, 0, 16, -32]


def test_iq4_nl_table() -> None:
    x = decode_block(ONE + bytes([0x0F] * 16), T.IQ4_NL)
    assert (x[:16] == 113).all()
    assert (x[16:] == -127).all()


def test_q4_k_six_bit_scales() -> None:
    sc, mn = [1, 2, 3, 63, 17, 34, 51, 5], [0, 1, 2, 3, 60, 61, 62, 63]
    packed = bytes(
        [sc[j] | (sc[j + 4] >> 4) << 6 for j in range(4)]
        + [mn[j] | (mn[j + 4] >> 4) << 6 for j in range(4)]
        + [sc[j + 4] & 15 | (mn[j + 4] & 15) << 4 for j in range(4)]
    )
    x = decode_block(ONE + HALF + packed + bytes([0x31] * 128), T.Q4_K)
    expected = [s * (1 if j % 2 == 0 else 3) - m / 2 for j, (s, m) in enumerate(zip(sc, mn, strict=True))]
    assert x.reshape(8, 32)[:, 0].tolist() == expected
    assert (x.reshape(8, 32) == x.reshape(8, 32)[:, :1]).all()


def test_q3_k_high_bit_and_scale_bias() -> None:
    hmask, qs = bytes([0b1] * 32), bytes([0b11] * 32 + [0] * 32)
    scales = bytes([0x01] * 8 + [0b10_10_10_10] * 4)  # low nibble 1 or 0, upper bits 2: 33 and 32
    x = decode_block(hmask + qs + scales + ONE, T.Q3_K)
    assert (x[:32] == 3).all()
    assert (x[32:128] == -4).all()
    assert (x[128:] == 0).all()


def test_q6_k_order() -> None:
    ql, qh = bytes([0x0F] + [0] * 127), bytes([0b01] + [0] * 63)
    x = decode_block(ql + qh + np.full(16, -2, np.int8).tobytes() + ONE, T.Q6_K)
    assert x[0] == -2 * (31 - 32)
    assert (x[1:] == 64).all()


@pytest.mark.parametrize("type", PACKAGE_TYPES, ids=lambda t: t.name)
def test_random_blocks_agree_with_the_gguf_package(type: GGMLType, rng: np.random.Generator) -> None:
    blocks = random_blocks(type, 96 if TYPES[type].block_size > 1 else 4096, rng)
    if type in (T.F32, T.F16, T.BF16):
        blocks = quantize(rng.normal(0, 1, (1, 4096)).astype(np.float32), type)
    n = blocks.size // TYPES[type].type_size * TYPES[type].block_size
    with np.errstate(all="ignore"):  # random scales of mxfp4 and iq1_m overflow
        expected = gguf.quants.dequantize(blocks.reshape(1, -1), gguf.GGMLQuantizationType(int(type)))
    assert np.array_equal(dequantize(blocks, type, (n,)), expected.reshape(-1).astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("type", GOLDEN_TYPES, ids=lambda t: t.name)
def test_decoding_of_golden_bytes_is_exact(type: GGMLType, shared_dir: Path) -> None:
    with np.load(shared_dir / "golden" / "quant" / f"{type.name}.npz") as z:
        names = [k.removesuffix("/f32") for k in z.files if k.endswith("/f32")]
        assert names
        for name in names:
            expected = z[f"{name}/f32"]
            x = dequantize(z[f"{name}/{z['f32_of']}"], type, expected.shape[::-1])
            if type in NO_ZERO_SIGN:
                x, expected = x + np.float32(0), expected + np.float32(0)
            assert np.array_equal(x.view(np.uint32), expected.view(np.uint32)), name


def test_iq6_k_is_golden_with_the_cubic_of_the_row_decoder(shared_dir: Path) -> None:
    q = np.arange(64, dtype=np.float64)
    cubic = np.float32(0.0011972)
    for c in (-0.11218, 6.2568, -127.0):  # fused multiply-add: exact product, one rounding
        cubic = (q * cubic.astype(np.float64) + np.float64(np.float32(c))).astype(np.float32)
    with np.load(shared_dir / "golden" / "quant" / "IQ6_K.npz") as z:
        for name in (k.removesuffix("/f32") for k in z.files if k.endswith("/f32")):
            blocks = z[f"{name}/{z['f32_of']}"].reshape(-1, 212)
            x = iq6_k_of(blocks, np.stack((cubic, cubic + np.float32(1)))).reshape(-1)
            assert np.array_equal(x.view(np.uint32), z[f"{name}/f32"].reshape(-1).view(np.uint32)), name


@pytest.mark.parametrize("type", [T.IQ1_BN, T.IQ2_BN], ids=lambda t: t.name)
def test_ternary_types_apply_the_row_scale(type: GGMLType, shared_dir: Path) -> None:
    folder = shared_dir / "golden" / "quant"
    with np.load(folder / "source.npz") as source, np.load(folder / f"{type.name}.npz") as z:
        for key in (k for k in source.files if k.endswith("/f32")):
            values = source[key]
            d = np.abs(values).max(axis=-1, keepdims=True)
            codes = np.where(np.abs(values) < d / 2, 0, np.sign(values))
            stored = d.astype("<f2").astype(np.float32) if type == T.IQ1_BN else d
            x = dequantize(z[key.removesuffix("/f32") + "/plain"], type, values.shape[::-1])
            assert np.array_equal(x, stored * codes.astype(np.float32)), key


@pytest.mark.parametrize("type", [T.F16, T.BF16, T.Q8_0, T.Q4_0], ids=lambda t: t.name)
def test_encoding_gives_golden_bytes(type: GGMLType, shared_dir: Path) -> None:
    folder = shared_dir / "golden" / "quant"
    with np.load(folder / "source.npz") as source, np.load(folder / f"{type.name}.npz") as z:
        for key in (k for k in source.files if k.endswith("/f32")):
            assert np.array_equal(quantize(source[key], type), z[key.removesuffix("/f32") + "/plain"]), key


@pytest.mark.parametrize("type", [T.F16, T.BF16, T.Q8_0, T.Q4_0], ids=lambda t: t.name)
def test_encoding_agrees_with_the_gguf_package(type: GGMLType, rng: np.random.Generator) -> None:
    x = (rng.standard_t(3, (16, 256)) * rng.choice([1e-6, 1.0, 50.0], (16, 1))).astype(np.float32)
    x[3, :32] = 0
    expected = gguf.quants.quantize(x, gguf.GGMLQuantizationType(int(type)))
    assert np.array_equal(quantize(x, type), expected.reshape(-1).view(np.uint8))


def test_known_q8_0_and_q4_0_bytes() -> None:
    x = np.zeros(32, np.float32)
    x[0], x[1], x[17] = 127.0, -0.5, 2.5
    raw = quantize(x, T.Q8_0)
    assert raw[:2].tobytes() == ONE
    assert raw[2:].view(np.int8)[[0, 1, 2, 17]].tolist() == [127, -1, 0, 3]
    x[0] = -8.0
    raw = quantize(x, T.Q4_0)
    assert raw[:2].tobytes() == ONE
    assert raw[2:4].tolist() == [0x80, 0xB8]  # elements 0 and 16: codes 0, 8; elements 1 and 17: 8, 11
    assert quantize(np.zeros(32, np.float32), T.Q4_0).tolist() == [0, 0x80, *[0x88] * 16]


def test_bf16_rounds_to_even_and_keeps_nan() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F800001, 0x7F800000], np.uint32)
    assert quantize(bits.view(np.float32), T.BF16).view("<u2").tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7FC0, 0x7F80]


def test_shapes_and_chunks(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    x = rng.normal(0, 1, (3, 5, 64)).astype(np.float32)
    raw = quantize(x, T.Q8_0)
    whole = dequantize(raw, T.Q8_0, (64, 5, 3))
    assert whole.shape == (3, 5, 64)
    assert np.abs(whole - x).max() < 0.02
    monkeypatch.setattr(decode, "_CHUNK_ELEMENTS", 128)
    assert np.array_equal(dequantize(raw, T.Q8_0, (64, 5, 3)), whole)


def test_errors_name_the_type() -> None:
    missing = next(t for t in GGMLType if t not in decodable_types())
    with pytest.raises(UnsupportedError, match=TYPES[missing].name):
        dequantize(np.zeros(1, np.uint8), missing, (256,))
    with pytest.raises(UnsupportedError, match="i8"):
        quantize(np.zeros(256, np.float32), T.I8)
    with pytest.raises(FormatError, match="q8_0"):
        dequantize(np.zeros(33, np.uint8), T.Q8_0, (32,))
    with pytest.raises(UsageError, match="multiple of 32"):
        quantize(np.zeros(33, np.float32), T.Q8_0)


def info(type: GGMLType, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo("blk.0.ffn_up.weight", shape, type, tensor_size(type, shape), int(np.prod(shape)), 0)


@pytest.mark.parametrize("type", [t for t in GGMLType if block_scale_offsets(t)], ids=lambda t: t.name)
def test_scan_finds_a_bad_scale(type: GGMLType, rng: np.random.Generator) -> None:
    fmt = TYPES[type]
    shape = (4 * fmt.block_size, 6)
    for offset in block_scale_offsets(type):
        blocks = random_blocks(type, 24, rng)
        assert first_non_finite(blocks.reshape(-1), info(type, shape)) is None
        blocks[13, offset : offset + 2] = (0x00, 0x7C)
        assert first_non_finite(blocks.reshape(-1), info(type, shape)) == 13 * fmt.block_size


@pytest.mark.parametrize(
    "type", [f.type for f in TYPES.values() if f.row_meta_size and f.storage], ids=lambda t: t.name
)
def test_scan_finds_a_bad_row_header(type: GGMLType) -> None:
    fmt = TYPES[type]
    shape = (2 * fmt.block_size, 4 * fmt.rows)
    data = np.zeros(tensor_size(type, shape), np.uint8)
    assert first_non_finite(data, info(type, shape)) is None
    row = 2 * fmt.rows + (1 if fmt.rows > 1 else 0)  # second row of the third group
    group = 2 * fmt.rows * (len(data) // shape[1])
    at = group + (row - 2 * fmt.rows) * fmt.row_meta_size
    width = 2 if fmt.row_meta_size == 2 else 4
    data[at : at + width] = np.array([np.nan], f"<f{width}").view(np.uint8)
    assert first_non_finite(data, info(type, shape)) == row * shape[0]


@pytest.mark.parametrize("type", [T.F32, T.F16, T.BF16, T.F64], ids=lambda t: t.name)
def test_scan_of_floats(type: GGMLType) -> None:
    n_bytes = TYPES[type].type_size
    data = np.zeros(64 * n_bytes, np.uint8)
    assert first_non_finite(data, info(type, (64,))) is None
    data[17 * n_bytes : 18 * n_bytes] = 0xFF
    assert first_non_finite(data, info(type, (64,))) == 17


def test_scan_of_interleaved_types() -> None:
    data = np.zeros(tensor_size(T.Q4_K_R4, (512, 8)), np.uint8)
    block = 4 * 144
    at = 2 * block + block + 8 + 2 * 3  # second group, second block, dmin of row 3
    data[at : at + 2] = 0xFF
    assert first_non_finite(data, info(T.Q4_K_R4, (512, 8))) == (4 + 3) * 512 + 256
    data = np.zeros(tensor_size(T.BF16_R16, (8, 16)), np.uint8)
    data.view("<u2")[32 * 1 + 2 * 5 + 1] = 0x7FC0  # row 5, column 3
    assert first_non_finite(data, info(T.BF16_R16, (8, 16))) == 5 * 8 + 3


def test_scan_of_iq1_m_and_i2_s() -> None:
    data = np.zeros(56 * 2, np.uint8)
    data[56 + 48 : 56 + 56] = np.array([0x0FFF, 0x0FFF, 0xCFFF, 0x7FFF], "<u2").view(np.uint8)  # d = 0x7C00
    assert first_non_finite(data, info(T.IQ1_M, (512,))) == 256
    data = np.zeros(tensor_size(T.I2_S, (128,)), np.uint8)
    data[32:36] = 0xFF
    assert first_non_finite(data, info(T.I2_S, (128,))) == 0


@pytest.mark.parametrize("type", [t for t in GGMLType if t in decodable_types() - {T.F32, T.F16}], ids=lambda t: t.name)
def test_scan_agrees_with_decoding(type: GGMLType, rng: np.random.Generator) -> None:
    fmt = TYPES[type]
    shape = (4 * max(fmt.block_size, 2), 2 * fmt.rows)
    n_bytes = tensor_size(type, shape)
    for limit in [2 * fmt.rows] * 8 + [n_bytes] * 8:  # scales are at the start of groups in most types
        data = rng.integers(0, 100, n_bytes, np.uint8)  # no exponent of f16, f32 or bf16 is all ones
        at = 2 * int(rng.integers(0, limit // 2))
        data[at : at + 2] = 0xFF
        bad = ~np.isfinite(dequantize(data, type, shape).reshape(-1))
        if T.MXFP4 in (type, fmt.base):  # zero codes stay zero, but the block counts
            bad = bad.reshape(-1, 32).any(axis=1, keepdims=True).repeat(32, axis=1).reshape(-1)
        assert first_non_finite(data, info(type, shape)) == (int(bad.argmax()) if bad.any() else None), at


def test_check_tensors_names_the_tensor() -> None:
    x = np.array([0, np.inf, 1, 2], np.float32)
    t = TensorInfo("output_norm.weight", (4,), T.F32, 16, 4, 0)
    file = GGUFFile([Path("m.gguf")], 3, {}, {}, {}, {t.name: t}, 32, [x.view(np.uint8)])
    assert list(check_tensors(file)) == [("output_norm.weight", 1)]
    assert list(check_tensors(file, [])) == []
    with pytest.raises(FormatError, match="nope"):
        list(check_tensors(file, ["nope"]))
