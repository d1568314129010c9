"""Quantized checkpoints: tensors packed here, value by value as their formats are documented, are read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ikcli.convert.float8 import E2M1, FLOAT8
from ikcli.convert.kept_blocks import kept
from ikcli.convert.pieces import TensorRows
from ikcli.convert.quantized import Dequantized, dequantized
from ikcli.convert.source import Array
from ikcli.errors import FormatError, IkError, UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.quant.decode import dequantize

Floats = npt.NDArray[np.float32]


@dataclass
class Memory:
    """A source of arrays; what NumPy has no type for comes with its name."""

    tensors: Mapping[str, Array | tuple[str, Array]]

    def _get(self, name: str) -> tuple[str, Array]:
        found = self.tensors[name]
        if isinstance(found, tuple):
            return found
        kinds = {"float32": "F32", "float16": "F16", "int32": "I32", "int64": "I64", "uint8": "U8", "int8": "I8"}
        return kinds[found.dtype.name], found

    @property
    def names(self) -> Sequence[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._get(name)[1].shape

    def dtype(self, name: str) -> str:
        return self._get(name)[0]

    def read(self, name: str) -> Array:
        return self._get(name)[1].copy()

    def rows(self, name: str, first: int, last: int) -> Array:
        values = self._get(name)[1]
        return values.reshape(-1, values.shape[-1] if values.shape else 1)[first:last].copy()


def check(source: Any, name: str, wanted: Floats, rtol: float = 1e-6) -> None:
    """All values, and those of slabs whose ends are anywhere."""
    assert (source.shape(name), source.dtype(name)) == (wanted.shape, "F32")
    np.testing.assert_allclose(source.read(name), wanted, rtol=rtol, atol=0)
    flat = wanted.reshape(-1, wanted.shape[-1])
    assert source.rows(name, 0, 1).dtype == source.read(name).dtype == np.float32
    for first, last in ((0, 1), (1, 5), (3, len(flat)), (len(flat) - 1, len(flat))):
        np.testing.assert_allclose(source.rows(name, first, last), flat[first:last], rtol=rtol, atol=0)


def bf16(values: Floats) -> tuple[tuple[str, Array], Floats]:
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    return ("BF16", bits), (bits.astype(np.uint32) << 16).view(np.float32)


def fp8(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    return codes


def e4m3(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def test_tables_of_small_floats() -> None:
    assert [float(v) for v in E2M1[:8]] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    np.testing.assert_array_equal(E2M1[8:], -E2M1[:8])
    table = FLOAT8["F8_E4M3"]
    assert all(float(table[code]) == e4m3(code) for code in range(256) if code & 0x7F != 0x7F)
    assert np.isnan(table[[0x7F, 0xFF]]).all()
    with np.errstate(all="ignore"):
        halves = (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(FLOAT8["F8_E5M2"], halves)
    assert [float(FLOAT8["F8_E8M0"][i]) for i in (0, 126, 127, 130)] == [2.0**-127, 0.5, 1, 8]


@pytest.mark.parametrize("shape", [(256, 384), (300, 130), (3, 160, 256)])
def test_fp8_in_blocks(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    codes = fp8(rng, shape)
    *lead, n, m = shape
    scale = rng.random((*lead, -(-n // 128), -(-m // 128)), np.float32) + 0.5
    wanted = np.empty(shape, np.float32)
    for at in np.ndindex(shape):
        wanted[at] = np.float32(e4m3(int(codes[at]))) * scale[(*at[:-2], at[-2] // 128, at[-1] // 128)]
    plain = rng.random((4, 4), np.float32)
    tensors = {
        "a.weight": ("F8_E4M3", codes),
        "a.weight_scale_inv": scale,
        "b.weight": plain,
        "a.activation_scale": plain,
    }
    source = dequantized(
        Memory(tensors), {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    )
    assert list(source.names) == ["a.weight", "b.weight"]
    check(source, "a.weight", wanted)
    np.testing.assert_array_equal(source.read("b.weight"), plain)
    np.testing.assert_array_equal(source.rows("b.weight", 1, 3), plain[1:3])


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        ((8, 6), ()),
        ((8, 6), (1,)),
        ((8, 6), (8,)),
        ((8, 6), (8, 1)),
        ((3, 4, 6), (3,)),
        ((3, 4, 6), (3, 1, 6)),
        ((8, 6), (8, 2)),
    ],
)
def test_scales_of_tensor_row_expert_and_group(
    rng: np.random.Generator, shape: tuple[int, ...], grid: tuple[int, ...]
) -> None:
    codes, scale = fp8(rng, shape), rng.random(grid, np.float32) + np.float32(0.5)
    stored, scale = bf16(np.asarray(scale, np.float32))
    full = scale.reshape(grid + (1,) * (len(shape) - len(grid)))
    if grid == (8, 2):
        full = np.repeat(full, 3, axis=1)
    wanted = FLOAT8["F8_E4M3"][codes] * full
    source = dequantized(
        Memory({"a.weight": ("F8_E4M3", codes), "a.weight_scale": stored, "a.input_scale": np.ones(1, np.float32)}),
        {"text_config": {"quantization_config": {"quant_method": "fbgemm_fp8"}}},
    )
    check(source, "a.weight", wanted)
    assert list(source.names) == ["a.weight"]


def test_integers_of_8_bits_with_zero_points(rng: np.random.Generator) -> None:
    codes = rng.integers(-128, 128, (6, 8)).astype(np.int8)
    scale, zero = rng.random((6, 1), np.float32), rng.integers(-9, 9, (6, 1)).astype(np.int8)
    tensors = {"a.weight": codes, "a.weight_scale": scale, "a.weight_zero_point": zero}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {}}
    source = dequantized(Memory(tensors), {"quantization_config": config})
    check(source, "a.weight", (codes.astype(np.float32) - zero) * scale)


def pairs(codes: Array) -> Array:
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


@pytest.mark.parametrize("producer", ["modelopt", "compressed-tensors", "NVFP4", None])
def test_nvfp4(rng: np.random.Generator, producer: str | None) -> None:
    codes, scale = rng.integers(0, 16, (6, 64)).astype(np.uint8), fp8(rng, (6, 4)) & 0x7F
    other = np.array([7.0], np.float32)
    wanted = np.empty((6, 64), np.float32)
    for i, j in np.ndindex(6, 64):
        factor = 1 / other[0] if producer == "compressed-tensors" else other[0]
        wanted[i, j] = E2M1[codes[i, j]] * e4m3(int(scale[i, j // 16])) * factor
    name, times = "weight", "weight_scale_2"
    if producer == "compressed-tensors":
        name, times = "weight_packed", "weight_global_scale"
    tensors = {f"a.{name}": pairs(codes), "a.weight_scale": ("F8_E4M3", scale), f"a.{times}": other}
    tensors["b.weight"] = ("F8_E4M3", fp8(rng, (4, 4)))
    tensors["b.weight_scale"] = np.array(2.0, np.float32)
    settings: dict[str, Any] = {"quant_algo": producer} if producer == "NVFP4" else {"quant_method": producer}
    config = {} if producer is None else {"quantization_config": settings}
    source = dequantized(Memory(tensors), config)
    assert list(source.names) == ["a.weight", "b.weight"]
    check(source, "a.weight", wanted, 1e-5)
    assert source.packed("a.weight") is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("divides", [False, True])
def test_nvfp4_experts_have_a_factor_per_matrix(rng: np.random.Generator, divides: bool) -> None:
    n_expert, n_out, n_in = 3, 6, 64
    codes = rng.integers(0, 16, (n_expert, n_out, n_in)).astype(np.uint8)
    scale = fp8(rng, (n_expert, n_out, n_in // 16)) & 0x7F
    factors = np.array([0.5, 3.0, 8.0], np.float32)
    blocks = np.array([e4m3(int(s)) for s in scale.reshape(-1)], np.float32).reshape(scale.shape)
    values = E2M1[codes] * np.repeat(blocks, 16, axis=2)
    wanted = values / factors[:, None, None] if divides else values * factors[:, None, None]
    weight, name = ("weight_packed", "weight_global_scale") if divides else ("weight", "weight_scale_2")
    method = "compressed-tensors" if divides else "modelopt"
    config = {"quantization_config": {"quant_method": method}}
    tensors = {f"a.{weight}": pairs(codes), "a.weight_scale": ("F8_E4M3", scale), f"a.{name}": factors}
    source = dequantized(Memory(tensors), config)
    check(source, "a.weight", wanted, 1e-5)  # with slabs that end within a matrix
    for wrong in (np.ones(4, np.float32), np.zeros(0, np.float32)):
        source = dequantized(Memory(tensors | {f"a.{name}": wrong}), config)
        with pytest.raises(FormatError, match=f"a.{name}: {wrong.size} factors do not fit"):
            source.rows("a.weight", 0, 1)


def test_mxfp4_of_experts_as_values_and_as_bits(rng: np.random.Generator) -> None:
    n_expert, n_out, n_in = 3, 4, 64
    codes = rng.integers(0, 16, (n_expert, n_out, n_in)).astype(np.uint8)
    scales = rng.integers(118, 136, (n_expert, n_out, n_in // 32)).astype(np.uint8)
    rows = E2M1[codes] * np.repeat(2.0 ** (scales.astype(np.float32) - 127), 32, axis=2)
    base = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {
        base + "_bias": np.zeros((n_expert, n_out), np.float32),
        base + "_blocks": pairs(codes).reshape(n_expert, n_out, n_in // 32, 16),
        base + "_scales": scales,
    }
    source = dequantized(Memory(tensors), {"quantization_config": {"quant_method": "mxfp4"}})
    assert isinstance(source, Dequantized)
    assert list(source.names) == [base + "_bias", base]
    check(source, base, np.ascontiguousarray(rows.swapaxes(1, 2), np.float32))
    packed = source.packed(base)
    assert packed is not None and source.packed(base + "_bias") is None
    assert (source.shape(packed), source.dtype(packed)) == ((n_expert, n_out, n_in), "MXFP4")
    data = source.rows(packed, 0, n_expert * n_out)
    assert data.shape == (n_expert * n_out, n_in // 32 * 17)
    values = dequantize(np.ascontiguousarray(data).reshape(-1), GGMLType.MXFP4, (n_in, n_expert * n_out))
    np.testing.assert_array_equal(values.reshape(rows.shape), rows)
    np.testing.assert_array_equal(source.rows(packed, 5, 7), data[5:7])


def test_mxfp4_of_compressed_tensors_has_bits_too(rng: np.random.Generator) -> None:
    codes, scales = rng.integers(0, 16, (5, 64)).astype(np.uint8), rng.integers(120, 130, (5, 2)).astype(np.uint8)
    source = dequantized(
        Memory({"a.weight_packed": pairs(codes), "a.weight_scale": scales}),
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}},
    )
    wanted = E2M1[codes] * np.repeat(2.0 ** (scales.astype(np.float32) - 127), 32, axis=1)
    check(source, "a.weight", wanted.astype(np.float32))
    assert isinstance(source, Dequantized)
    data = source.rows(str(source.packed("a.weight")), 0, 5)
    np.testing.assert_array_equal(dequantize(data.reshape(-1), GGMLType.MXFP4, (64, 5)).reshape(5, 64), wanted)


def words(values: Array, bits: int) -> Array:
    """Rows of values packed as many to a word as fit, the first lowest."""
    per = 32 // bits
    n, m = values.shape
    out = np.zeros((n, -(-m // per)), np.uint32)
    for i, j in np.ndindex(n, m):
        out[i, j // per] |= np.uint32(int(values[i, j]) << (j % per * bits))
    return out.view(np.int32)


@pytest.mark.parametrize(("bits", "dense"), [(4, False), (8, False), (3, False), (3, True), (5, True)])
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("n_groups", [1, 4])
@pytest.mark.parametrize("ordered", [True, False])
def test_pack_quantized(
    rng: np.random.Generator, bits: int, dense: bool, zero_points: bool, n_groups: int, ordered: bool
) -> None:
    n, m, half = 10, 64, 1 << (bits - 1)
    values = rng.integers(-half, half, (n, m))
    zeros = rng.integers(-half, half, (n, n_groups)) if zero_points else np.zeros((n, n_groups), int)
    scale = rng.random((n, n_groups), np.float32)
    group = np.arange(m) // (m // n_groups)
    if not ordered:
        group = rng.permutation(group)
    wanted = ((values - zeros[:, group]) * scale[:, group]).astype(np.float32)
    tensors: dict[str, Any] = {
        "a.weight_packed": stream((values + half).T, bits).T if dense else words(values + half, bits),
        "a.weight_scale": scale,
        "a.weight_shape": np.array([n, m], np.int64),
    }
    if zero_points:
        tensors["a.weight_zero_point"] = stream(zeros + half, bits) if dense else words((zeros + half).T, bits).T
    if not ordered:
        tensors["a.weight_g_idx"] = group.astype(np.int32)
    config = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": bits}}}}
    source = dequantized(Memory(tensors), {"quantization_config": config})
    assert list(source.names) == ["a.weight"]
    check(source, "a.weight", wanted)


def test_pack_quantized_experts(rng: np.random.Generator) -> None:
    values, zeros = rng.integers(-8, 8, (3, 8, 16)), rng.integers(-8, 8, (3, 8, 2))
    scale = rng.random((3, 8, 2), np.float32)
    tensors = {
        "a.weight_packed": np.stack([words(v + 8, 4) for v in values]),
        "a.weight_scale": scale,
        "a.weight_shape": np.array([3, 8, 16]),
        "a.weight_zero_point": np.stack([words((z + 8).T, 4).T for z in zeros]),
    }
    config = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4}}}}
    wanted = (values - np.repeat(zeros, 8, axis=2)) * np.repeat(scale, 8, axis=2)
    check(dequantized(Memory(tensors), {"quantization_config": config}), "a.weight", wanted.astype(np.float32))


def stream(values: Array, bits: int) -> Array:
    """Columns of values as one stream of bits each."""
    n, m = values.shape
    out = np.zeros((-(-n * bits // 32), m), np.uint32)
    for i, j in np.ndindex(n, m):
        for bit in range(bits):
            at = i * bits + bit
            out[at // 32, j] |= np.uint32((int(values[i, j]) >> bit & 1) << at % 32)
    return out.view(np.int32)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("act_order", [True, False])
def test_gptq(rng: np.random.Generator, bits: int, form: str, act_order: bool) -> None:
    n_in, n_out, n_groups = 64, 32, 4
    values, zeros = rng.integers(0, 1 << bits, (n_in, n_out)), rng.integers(1, 1 << bits, (n_groups, n_out))
    scales = rng.random((n_groups, n_out)).astype(np.float16)
    group = rng.permutation(n_in) % n_groups if act_order else np.arange(n_in) // (n_in // n_groups)
    wanted = ((values - zeros[group]) * scales[group].astype(np.float32)).T
    stored = zeros - 1 if form == "gptq" else zeros
    tensors = {
        "a.qweight": stream(values, bits),
        "a.qzeros": np.ascontiguousarray(stream(stored.T, bits).T),
        "a.scales": scales,
        "a.g_idx": group.astype(np.int32),
        "a.bias": np.ones(n_out, np.float32),
    }
    if not act_order:
        del tensors["a.g_idx"]
    config = {"quant_method": "gptq", "bits": bits, "checkpoint_format": form, "desc_act": act_order}
    source = dequantized(Memory(tensors), {"quantization_config": config})
    assert list(source.names) == ["a.weight", "a.bias"]
    check(source, "a.weight", np.ascontiguousarray(wanted, np.float32))


def test_awq(rng: np.random.Generator) -> None:
    n_in, n_out, n_groups = 24, 32, 3
    values, zeros = rng.integers(0, 16, (n_in, n_out)), rng.integers(0, 16, (n_groups, n_out))
    scales = rng.random((n_groups, n_out)).astype(np.float16)
    group = np.arange(n_in) // 8
    wanted = ((values - zeros[group]) * scales[group].astype(np.float32)).T

    def interleaved(matrix: Array) -> Array:
        out = np.zeros((len(matrix), n_out // 8), np.uint32)
        for i, word, k in np.ndindex(len(matrix), n_out // 8, 8):
            out[i, word] |= np.uint32(int(matrix[i, word * 8 + (0, 2, 4, 6, 1, 3, 5, 7)[k]]) << 4 * k)
        return out.view(np.int32)

    tensors = {"a.qweight": interleaved(values), "a.qzeros": interleaved(zeros), "a.scales": scales}
    config = {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"}
    check(
        dequantized(Memory(tensors), {"quantization_config": config}),
        "a.weight",
        np.ascontiguousarray(wanted, np.float32),
    )


def test_threads_read_what_one_reads(rng: np.random.Generator) -> None:
    """Experts and packed words are kept for a while; threads that want others meanwhile get theirs."""
    tensors: dict[str, Any] = {}
    for i in range(6):
        tensors[f"{i}_blocks"] = rng.integers(0, 256, (3, 8, 2, 16)).astype(np.uint8)
        tensors[f"{i}_scales"] = rng.integers(120, 130, (3, 8, 2)).astype(np.uint8)
    source = dequantized(Memory(tensors), {"quantization_config": {"quant_method": "mxfp4"}})
    wanted = {name: source.read(name).reshape(-1, 8) for name in source.names}
    places = [(str(rng.integers(6)), int(rng.integers(190))) for _ in range(400)]

    def same(place: tuple[str, int]) -> bool:
        name, first = place
        return bool(np.array_equal(source.rows(name, first, first + 2), wanted[name][first : first + 2]))

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(same, places))


def test_a_plain_checkpoint_is_its_own_source() -> None:
    source = Memory({"a.weight": np.ones((2, 2), np.float32)})
    assert dequantized(source, {}) is source


ONES = np.ones((4, 4), np.int32)
F8 = ("F8_E4M3", np.zeros((4, 4), np.uint8))


@pytest.mark.parametrize(
    ("settings", "tensors", "message"),
    [
        (None, {"a.weight": F8}, r"a\.weight is quantized, but config\.json has no quantization_config"),
        ({"quant_method": "bitsandbytes"}, {}, r"quant_method 'bitsandbytes' cannot be read \(known: awq, "),
        ({}, {}, "quant_method None cannot be read"),
        ({"bits": 4}, {"a.weight": ("U32", ONES)}, r"a\.weight is quantized by MLX, .* it was made from"),
        ({"quant_method": "fp8"}, {"a.weight": F8}, r"'fp8': tensor a\.weight is of a kind that is not understood"),
        (
            {"quant_method": "fp8"},
            {"a.weight": F8, "a.weight_scale": np.ones((3, 1), np.float32)},
            r"scales of \[3, 1\] do not fit a\.weight of \[4, 4\]",
        ),
        ({"quant_method": "fp8", "weight_block_size": "x"}, {}, "a block of .* is not understood"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            {"a.qweight": ONES, "a.qzeros": ONES, "a.scales": np.ones((4, 32), np.float16)},
            "quant_method 'gptq': checkpoint_format 'marlin' cannot be read",
        ),
        ({"quant_method": "gptq", "bits": 4}, {"a.qweight": ONES, "a.scales": ONES}, "has no a.scales or a.qzeros"),
        (
            {"quant_method": "gptq", "bits": 8},
            {"a.qweight": ONES, "a.qzeros": ONES, "a.scales": np.ones((4, 32), np.float16)},
            "8 bits do not fit",
        ),
        (
            {"quant_method": "awq", "bits": 4, "version": "gemv"},
            {"a.qweight": ONES, "a.qzeros": ONES, "a.scales": np.ones((4, 32), np.float16)},
            "version 'gemv' cannot be read",
        ),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            {},
            "sparsity_config format 'sparse-24-bitmask' is not read",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": 3}, {}, "config_groups does not map names"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}},
            {"a.weight_packed": ONES, "a.weight_scale": ONES, "a.weight_shape": np.array([4, 32])},
            "num_bits of tensor a.weight_packed is ambiguous",
        ),
        ({"quant_method": "mxfp4"}, {"a_blocks": ONES, "a_scales": ONES}, "are not blocks of 32 of experts"),
        ({"quant_method": "modelopt"}, {"a.pre_quant_scale": ONES}, r"tensor a\.pre_quant_scale is of a kind"),
    ],
)
def test_what_is_not_understood_is_named(settings: Any, tensors: Any, message: str) -> None:
    config = {} if settings is None else {"quantization_config": settings}
    with pytest.raises(IkError, match=message) as caught:
        dequantized(Memory(tensors), config)
    assert isinstance(caught.value, FormatError | UnsupportedError)


def test_ternary_matrices_and_their_numbers() -> None:
    """Four rows per byte, by quarters; weights as they were trained become multiples of their mean magnitude."""
    rows = np.random.default_rng(3).integers(-1, 2, (8, 6))
    codes = (rows + 1).astype(np.uint8)
    packed = codes[:2] | codes[2:4] << 2 | codes[4:6] << 4 | codes[6:] << 6
    tensors = {"a.o_proj.weight": packed, "a.o_proj.weight_scale": np.array([0.25], np.float32)}
    for kind, number in (("autobitlinear", 0.25), ("bitlinear", 4.0)):
        settings = {"quant_method": "bitnet", "linear_class": kind, "quantization_mode": "offline"}
        found = dequantized(Memory(tensors), {"quantization_config": settings})
        assert list(found.names) == list(tensors)
        check(found, "a.o_proj.weight", rows.astype(np.float32))
        assert found.read("a.o_proj.weight_scale").tolist() == [number]

    trained = np.array([[0.1, -3.0, 0.9], [-0.4, 2.0, -0.8]], np.float32)  # mean magnitude 1.2
    online = {"architectures": ["BitnetForCausalLM"]}
    found = dequantized(Memory({"a.q_proj.weight": trained, "a.norm.weight": trained[0]}), online)
    assert list(found.names) == ["a.q_proj.weight", "a.q_proj.weight_scale", "a.norm.weight"]
    check(found, "a.q_proj.weight", np.array([[0, -1, 1], [0, 1, -1]], np.float32))
    np.testing.assert_allclose(found.read("a.q_proj.weight_scale"), [1.2], rtol=1e-6)
    for settings, message in (({"use_rms_norm": True}, "use_rms_norm True is not read"),
                              ({"quantization_mode": "later"}, "quantization_mode 'later'")):  # fmt: skip
        with pytest.raises(UnsupportedError, match=message):
            dequantized(Memory(tensors), {"quantization_config": {"quant_method": "bitnet"} | settings})
    with pytest.raises(FormatError, match=r"o_proj.weight has no a\.o_proj\.weight_scale beside it"):
        dequantized(Memory({"a.o_proj.weight": packed}), {"quantization_config": {"quant_method": "bitnet"}})


def test_other_names_of_known_layouts(rng: np.random.Generator) -> None:
    """AutoRound (some weights of 8 bits among those of 4), Quark, MXFP8 and ModelOpt's blocks."""
    n_in, n_out = 64, 32
    tensors: dict[str, Any] = {}
    wanted: dict[str, Floats] = {}
    for name, bits in (("a", 4), ("b", 8)):
        values, zeros = rng.integers(0, 1 << bits, (n_in, n_out)), rng.integers(1, 1 << bits, (2, n_out))
        scales = rng.random((2, n_out)).astype(np.float16)
        group = np.arange(n_in) // 32
        wanted[name] = ((values - zeros[group]) * scales[group].astype(np.float32)).T.astype(np.float32)
        tensors |= {f"{name}.qweight": stream(values, bits), f"{name}.scales": scales}
        tensors[f"{name}.qzeros"] = np.ascontiguousarray(stream((zeros - 1).T, bits).T)
    settings: dict[str, Any] = {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "bits": 4,
        "group_size": 32,
    }
    settings["extra_config"] = {"b": {"bits": 8}}
    source = dequantized(Memory(tensors), {"quantization_config": settings})
    for name, x in wanted.items():
        check(source, f"{name}.weight", np.ascontiguousarray(x))
    with pytest.raises(UnsupportedError, match="'auto-round': packing_format 'itrex' cannot be read"):
        dequantized(Memory(tensors), {"quantization_config": settings | {"packing_format": "itrex"}})

    codes, powers = rng.integers(0, 16, (6, 64)).astype(np.uint8), rng.integers(118, 130, (6, 2)).astype(np.uint8)
    quark = {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group"}}}
    source = dequantized(Memory({"a.weight": pairs(codes), "a.weight_scale": powers}), {"quantization_config": quark})
    check(source, "a.weight", E2M1[codes] * np.repeat(2.0 ** (powers.astype(np.float32) - 127), 32, axis=1))
    assert isinstance(source, Dequantized) and source.packed("a.weight")

    eight = fp8(rng, (6, 64))
    tensors = {"a.weight": ("F8_E4M3", eight), "a.weight_scale_inv": powers}
    source = dequantized(Memory(tensors), {"quantization_config": {"quant_method": "mxfp8"}})
    check(
        source, "a.weight", FLOAT8["F8_E4M3"][eight] * np.repeat(2.0 ** (powers.astype(np.float32) - 127), 32, axis=1)
    )

    eight, scale = fp8(rng, (256, 130)), rng.random((2, 1, 2, 1), np.float32)
    tensors = {"a.weight": ("F8_E4M3", eight), "a.weight_scale": scale}
    settings = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "weight_block_size": [128, 128]}
    source = dequantized(Memory(tensors), {"quantization_config": settings})
    full = np.repeat(np.repeat(scale[:, 0, :, 0], 128, axis=0), 128, axis=1)[:, :130]
    check(source, "a.weight", FLOAT8["F8_E4M3"][eight] * full)


def test_nvfp4_experts_in_one_tensor(rng: np.random.Generator) -> None:
    """Scales have `_weight` before their names; gate and up may have a factor each."""
    codes, scale = rng.integers(0, 16, (3, 8, 64)).astype(np.uint8), fp8(rng, (3, 8, 4)) & 0x7F
    factors, name = rng.random((3, 2), np.float32) + np.float32(0.5), "mlp.experts.gate_up_proj"
    tensors = {name: pairs(codes), f"{name}_weight_scale": ("F8_E4M3", scale), f"{name}_weight_scale_2": factors}
    tensors[f"{name}_input_scale"] = np.ones(3, np.float32)
    source = dequantized(Memory(tensors), {"quantization_config": {"quant_method": "modelopt"}})
    assert list(source.names) == [name] and isinstance(source, Dequantized)
    wanted = E2M1[codes] * np.repeat(FLOAT8["F8_E4M3"][scale], 16, axis=2) * np.repeat(factors, 4, axis=1)[:, :, None]
    check(source, name, wanted)
    both = (TensorRows(name, 4, 64, 8 * e + first) for first in (0, 4) for e in range(3))
    for i, pieces in enumerate(zip(*[both] * 3, strict=True)):
        found = kept(source, "blk.0.ffn_up_exps.weight", pieces, (64, 4, 3), ("NVFP4",))
        assert found is not None and found.type == "NVFP4"
        row = found.numbers["blk.0.ffn_up_exps.scale"].read(source, 0, 1)
        np.testing.assert_array_equal(row[0], factors[:, i])
        assert found.numbers["blk.0.ffn_up_exps.input_scale"].read(source, 0, 1).tolist() == [[1, 1, 1]]
    mixed = (TensorRows(name, 8, 64, 0), TensorRows(name, 8, 64, 8))  # gate and up of an expert have two factors
    assert kept(source, "blk.0.ffn_up_exps.weight", mixed, (64, 8, 2), ("NVFP4",)) is None
