"""Interleaved types: golden bytes, inverses, decoding, chunks, conditions and file types."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest

from ikcli.errors import FormatError, UnsupportedError
from ikcli.gguf.constants import FILE_TYPES, GGMLType
from ikcli.gguf.types import TYPES
from ikcli.quant import repack as repack_module
from ikcli.quant.bitmoves import compile_moves
from ikcli.quant.decode import dequantize
from ikcli.quant.encode import quantize
from ikcli.quant.formats import row_size, tensor_size
from ikcli.quant.repack import (
    REPACKED_FILE_TYPES,
    bf16_of_f16,
    can_repack,
    layout,
    repack,
    repack_rows,
    repacked_file_type,
    repacked_type,
    unrepack,
    unrepack_rows,
)
from ikcli.quant.validate import block_scale_offsets

T = GGMLType
TWINS = [(t.base, t.type) for t in TYPES.values() if t.base is not None]
NOT_FROM_PLAIN_BYTES = {T.BF16_R16, T.Q8_KV_R8}  # the golden ones were encoded in their own way
BY_NAME = pytest.mark.parametrize(("base", "type"), TWINS, ids=lambda t: t.name)

# CRC-32 of the repacked bytes of a pattern, taken when every form agreed with the reference.
KNOWN: dict[GGMLType, int] = {
    T.Q4_0_R8: 0x3450243A,
    T.Q5_0_R4: 0x337463F1,
    T.Q8_0_R8: 0x90477545,
    T.Q2_K_R4: 0x33DBD397,
    T.Q3_K_R4: 0x0EAD4414,
    T.Q4_K_R4: 0xCCA21E51,
    T.Q5_K_R4: 0xA1CE5E6F,
    T.Q6_K_R4: 0x6D45EF20,
    T.IQ2_XXS_R4: 0xBFF79E9C,
    T.IQ2_XS_R4: 0x714A40E4,
    T.IQ3_XXS_R4: 0x5A91F7B8,
    T.IQ4_NL_R4: 0xF4A34719,
    T.IQ3_S_R4: 0x74E24B6C,
    T.IQ2_S_R4: 0x643D0638,
    T.IQ4_XS_R8: 0xCE52C2AE,
    T.BF16_R16: 0x61B3D104,
    T.Q6_0_R4: 0x8F4BEB48,
    T.IQ2_BN_R4: 0x5D386DD4,
    T.IQ2_K_R4: 0x4BE3DA2B,
    T.IQ3_K_R4: 0x7F61FCC1,
    T.IQ4_K_R4: 0x9915028C,
    T.IQ5_K_R4: 0xC66A851B,
    T.IQ4_KS_R4: 0xF9203FF3,
    T.IQ5_KS_R4: 0x00135DFF,
    T.MXFP4_R8: 0x6135AA8A,
    T.Q8_KV_R8: 0x5870A517,
}


@BY_NAME
def test_known_bytes(base: GGMLType, type: GGMLType) -> None:
    shape = (512, TYPES[type].rows)
    data = ((73 * np.arange(tensor_size(base, shape)) + 41) % 256).astype(np.uint8)
    assert zlib.crc32(repack(data, base, shape)[0].tobytes()) == KNOWN[type]


def random_tensor(base: GGMLType, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Random bytes of a plain type; the sums of Q8_KV rows are consistent."""
    data = rng.integers(0, 256, tensor_size(base, shape), np.uint8)
    if base == T.Q8_KV:
        rows = data.reshape(-1, row_size(base, shape[0]))
        rows[:, 4:8] = rows[:, 8:].view(np.int8).sum(axis=1, dtype="<i4")[:, None].view(np.uint8)
    return data


def set_scales(data: np.ndarray, base: GGMLType, ne0: int, rng: np.random.Generator) -> None:
    """Make all floats in random bytes finite and of moderate size."""
    fmt = TYPES[base]
    rows = data.reshape(-1, row_size(base, ne0))
    if fmt.row_meta_size:
        rows[:, :4] = rng.normal(0, 1, (len(rows), 1)).astype("<f4").view(np.uint8)
    blocks = rows[:, fmt.row_meta_size :].reshape(-1, fmt.type_size)
    for at in block_scale_offsets(base):
        blocks[:, at : at + 2] = rng.normal(0, 1, (len(blocks), 1)).astype("<f2").view(np.uint8)
    if fmt.row_meta_size == 0:
        data[:] = blocks.reshape(-1)
    if base == T.BF16:
        data[:] = quantize(rng.normal(0, 1, data.size // 2).astype(np.float32), T.BF16)
    if base == T.MXFP4:
        data.reshape(-1, 17)[:, 0] = rng.integers(100, 140, data.size // 17)


@pytest.mark.parametrize("type", [t.type for t in TYPES.values() if t.layout], ids=lambda t: t.name)
def test_layouts_move_every_bit_once(type: GGMLType) -> None:
    found = layout(type)
    unit, rows = found.moves()
    n_bits = 8 * found.rows * found.n_bytes
    assert np.array_equal(np.sort(unit), np.arange(n_bits))
    assert np.array_equal(np.sort(rows), np.arange(n_bits))


@BY_NAME
def test_unrepack_is_the_inverse(base: GGMLType, type: GGMLType, rng: np.random.Generator) -> None:
    shape = (512, 2 * TYPES[type].rows, 3)
    data = random_tensor(base, shape, rng)
    packed, new_type = repack(data, base, shape)
    assert new_type == type
    assert packed.size == tensor_size(type, shape)
    assert not np.array_equal(packed, data)
    back, old_type = unrepack(packed, type, shape)
    assert old_type == base
    assert np.array_equal(back, data)


@BY_NAME
def test_repack_is_the_inverse(base: GGMLType, type: GGMLType, rng: np.random.Generator) -> None:
    shape = (768, TYPES[type].rows)
    packed = rng.integers(0, 256, tensor_size(type, shape), np.uint8)
    assert np.array_equal(repack(unrepack(packed, type, shape)[0], base, shape)[0], packed)


@BY_NAME
def test_rows_decode_to_the_same_floats(base: GGMLType, type: GGMLType, rng: np.random.Generator) -> None:
    shape = (512, 2 * TYPES[type].rows)
    data = random_tensor(base, shape, rng)
    set_scales(data, base, shape[0], rng)
    x = dequantize(data, base, shape)
    assert np.isfinite(x).all()
    assert len(np.unique(x)) > 2
    assert np.array_equal(dequantize(repack(data, base, shape)[0], type, shape), x)


@BY_NAME
def test_ranges_of_groups_can_be_repacked_alone(
    base: GGMLType, type: GGMLType, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = TYPES[type].rows
    rows = random_tensor(base, (256, 5 * n), rng).reshape(5 * n, -1)
    whole = repack_rows(rows, type, 256)
    parts = [repack_rows(rows[a:b], type, 256) for a, b in ((0, n), (n, 4 * n), (4 * n, 5 * n))]
    assert np.array_equal(np.concatenate(parts), whole)
    monkeypatch.setattr(repack_module, "_CHUNK_BYTES", 1)
    assert np.array_equal(repack_rows(rows, type, 256), whole)
    assert np.array_equal(unrepack_rows(whole, type, 256), rows)


def test_rows_that_do_not_fill_groups_are_refused(rng: np.random.Generator) -> None:
    rows = random_tensor(T.Q4_0, (64, 12), rng).reshape(12, -1)
    with pytest.raises(FormatError, match="8 rows at a time, not 12"):
        repack_rows(rows, T.Q4_0_R8, 64)
    with pytest.raises(UnsupportedError, match=r"\[64, 12\].*q4_0_r8.*multiple of 8"):
        repack(rows, T.Q4_0, (64, 12))
    with pytest.raises(FormatError, match="whole groups"):
        unrepack(rows, T.Q4_0_R8, (64, 12))
    with pytest.raises(FormatError, match="whole groups"):
        unrepack(rows[:1], T.Q4_0_R8, (64,))
    with pytest.raises(FormatError, match="bytes of data"):
        repack(rows, T.Q4_0, (64, 16))
    with pytest.raises(UnsupportedError, match="iq6_k"):
        repack(rows, T.IQ6_K, (256, 8))
    with pytest.raises(UnsupportedError, match="q8_k_r8 have no plain form"):
        unrepack(rows, T.Q8_K_R8, (256, 8))
    with pytest.raises(UnsupportedError, match="iq1_s_r4 have no plain form"):
        repack_rows(rows, T.IQ1_S_R4, 64)


def test_which_tensors_can_be_repacked() -> None:
    assert can_repack(T.Q4_K, (512, 8), "blk.0.ffn_up.weight")
    assert can_repack(T.Q4_K, (512, 8, 6), "blk.0.ffn_up_exps.weight")
    assert not can_repack(T.Q4_K, (512, 6, 8), "blk.0.ffn_up_exps.weight")  # 48 rows, but 6 per matrix
    assert not can_repack(T.Q4_K, (512, 8), "token_embd.weight")
    assert not can_repack(T.Q4_K, (512, 8), "per_layer_token_embd.weight")
    assert can_repack(T.Q8_0, (512, 8)) and not can_repack(T.Q8_0, (512, 12))
    assert can_repack(T.BF16, (2, 16)) and not can_repack(T.BF16, (3, 16))
    assert not can_repack(T.F16, (512, 16)) and can_repack(T.F16, (512, 16), lossy=True)
    no_twin = {T.F32, T.Q4_1, T.Q5_1, T.IQ1_S, T.IQ1_M, T.IQ6_K, T.IQ2_KS, T.IQ3_KS, T.IQ4_KSS, T.IQ2_KL}
    no_twin |= {T.IQ1_KT, T.IQ2_KT, T.IQ3_KT, T.IQ4_KT, T.IQ1_BN, T.Q4_K_R4, T.Q8_K_R8}
    assert not any(can_repack(t, (512, 16)) for t in no_twin)
    assert not can_repack(T.Q8_0, (512,))


def test_f16_is_truncated_to_bf16(rng: np.random.Generator) -> None:
    x = np.array([1.0, 1.0 + 127 / 1024, -1.0 - 127 / 1024, 2.0] * 8, "<f2")
    packed, type = repack(np.tile(x.view(np.uint8), 16), T.F16, (32, 16), lossy=True)
    assert type == T.BF16_R16
    row = dequantize(packed, type, (32, 16))[3]
    assert row[:4].tolist() == [1.0, 1.1171875, -1.1171875, 2.0]
    with pytest.raises(UnsupportedError, match="f16"):
        repack(np.tile(x.view(np.uint8), 16), T.F16, (32, 16))


def test_f16_is_rounded_to_bf16_while_loading() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)  # all of them: ties, subnormals, infinities
    found = bf16_of_f16(bits.view(np.uint8)).view(np.uint16)
    exact = bits.view(np.float16).astype(np.float32)
    number = ~np.isnan(exact)
    at = exact.view(np.uint32)
    nearest = (at + 0x7FFF + (at >> 16 & 1) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(found[number], nearest[number])
    assert np.isnan((found[~number].astype(np.uint32) << 16).view(np.float32)).all()


def test_file_types_after_repacking() -> None:
    assert [repacked_file_type(n) for n in (2, 14, 15, 138, 145, 38, 0, 15 | 1024)] == [
        *(202, 214, 214, 338, 345, 38, 0),
        214 | 1024,
    ]
    for old, new in REPACKED_FILE_TYPES.items():
        target = FILE_TYPES[new].type
        if target not in (T.IQ1_S_R4, T.IQ1_M_R4):  # mapped although their bytes cannot be
            assert repacked_type(FILE_TYPES[old].type) == target


def test_moves_of_single_bits() -> None:
    reverse = compile_moves(np.arange(32), np.arange(32)[::-1], 4, 4)
    src = np.array([[0b10000000, 0, 0, 0b00000011], [255, 0, 0, 1]], np.uint8)
    assert reverse.apply(src).tolist() == [[0b11000000, 0, 0, 0b00000001], [128, 0, 0, 255]]
    nothing = compile_moves(np.array([9]), np.array([0]), 4, 4)
    assert nothing.apply(src).tolist() == [[0, 0, 0, 0], [0, 2, 0, 0]]


def load(shared_dir: Path, type: GGMLType) -> dict[str, np.ndarray]:
    with np.load(shared_dir / "golden" / "quant" / f"{type.name}.npz") as z:
        return {k: z[k] for k in z.files}


@pytest.mark.parametrize(("base", "type"), [t for t in TWINS if t[1] not in NOT_FROM_PLAIN_BYTES], ids=lambda t: t.name)
def test_golden_bytes(base: GGMLType, type: GGMLType, shared_dir: Path) -> None:
    shapes = {k.removesuffix("/f32"): v.shape[::-1] for k, v in load(shared_dir, T.F16).items() if k.endswith("/f32")}
    plain, packed = load(shared_dir, base), load(shared_dir, type)
    names = [k for k in plain if k.endswith(("/plain", "/imatrix")) and k in packed]
    compared = 0
    for name in names:
        tensor = name.rpartition("/")[0]
        if packed[f"{tensor}/type"] != type or plain[f"{tensor}/type"] != base:
            continue
        if type == T.Q2_K_R4 and name == "blk.0.attn_output.weight/plain":
            continue  # the reference encoded it differently
        assert np.array_equal(repack(plain[name], base, shapes[tensor])[0], packed[name]), name
        assert np.array_equal(unrepack(packed[name], type, shapes[tensor])[0], plain[name]), name
        compared += 1
    assert compared >= 3


def test_golden_q8_kv(shared_dir: Path) -> None:
    plain, packed = load(shared_dir, T.Q8_KV), load(shared_dir, T.Q8_KV_R8)
    for key in (k for k in packed if k.endswith("/f32")):
        name, shape = key.removesuffix("/f32"), packed[key].shape[::-1]
        assert np.array_equal(repack(plain[f"{name}/plain"], T.Q8_KV, shape)[0], packed[f"{name}/plain"])
        assert np.array_equal(unrepack(packed[f"{name}/plain"], T.Q8_KV_R8, shape)[0], plain[f"{name}/plain"])


def test_golden_bf16_r16_is_truncated_and_regrouped(shared_dir: Path) -> None:
    packed = load(shared_dir, T.BF16_R16)
    with np.load(shared_dir / "golden" / "quant" / "source.npz") as z:
        for key in (k for k in z.files if k.endswith("/f32")):
            name, x = key.removesuffix("/f32"), z[key]
            truncated = (x.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
            shape = x.shape[::-1]
            assert np.array_equal(repack(truncated, T.BF16, shape)[0], packed[f"{name}/imatrix"]), name
