"""Names, sizes and lookups of tensor formats and file types."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import pytest

from ikcli.errors import UsageError
from ikcli.gguf.constants import FILE_TYPES, GGMLType, file_type_label
from ikcli.gguf.types import TYPES
from ikcli.quant.formats import format_by_name, get_format, interleaved_type, row_size, tensor_size

# name -> elements, bytes per block, bytes per row
SIZES = {
    "f32": (1, 4, 0),
    "f16": (1, 2, 0),
    "q8_0": (32, 34, 0),
    "q4_0": (32, 18, 0),
    "iq4_nl": (32, 18, 0),
    "q6_K": (256, 210, 0),
    "q5_K": (256, 176, 0),
    "q4_K": (256, 144, 0),
    "q3_K": (256, 110, 0),
    "iq3_s": (256, 110, 0),
    "q2_K": (256, 84, 0),
    "iq3_xxs": (256, 98, 0),
    "iq2_k": (256, 76, 0),
    "iq3_k": (256, 110, 0),
    "iq4_k": (256, 144, 0),
    "iq5_k": (256, 176, 0),
    "iq4_ks": (256, 136, 4),
    "iq5_ks": (256, 168, 4),
    "iq3_ks": (256, 102, 2),
    "iq2_ks": (256, 70, 2),
}
BPW = {"q8_0": 8.5, "q6_K": 6.5625, "q5_K": 5.5, "q4_K": 4.5, "q3_K": 3.4375, "q2_K": 2.625, "iq2_k": 2.375}


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str) -> None:
    f = format_by_name(name)
    assert f.name == name
    assert (f.block_size, f.type_size, f.row_meta_size) == SIZES[name]


def test_bits_per_weight() -> None:
    assert {name: format_by_name(name).bpw for name in BPW} == BPW


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("q2_K", 1176),
        ("iq2_k", 1064),
        ("q3_K", 1540),
        ("iq4_ks", 1906),
        ("iq4_k", 2016),
        ("iq5_ks", 2354),
        ("q6_K", 2940),
    ],
)
def test_expert_tensor_bytes(name: str, mib: int) -> None:
    assert tensor_size(format_by_name(name).type, (7168, 2048, 256)) == mib * 2**20


def test_down_expert_has_more_row_headers() -> None:
    assert tensor_size(GGMLType.IQ5_KS, (2048, 7168, 256)) == 2359 * 2**20


@pytest.mark.parametrize(("name", "mib"), [("q8_0", 938.98), ("q6_K", 724.95), ("q4_K", 497.11), ("q2_K", 289.98)])
def test_token_embedding_bytes(name: str, mib: float) -> None:
    assert round(tensor_size(format_by_name(name).type, (7168, 129280)) / 2**20, 2) == mib


@pytest.mark.parametrize("spelling", [str.lower, str.upper, str.title])
def test_names_in_any_case(spelling) -> None:
    for f in TYPES.values():
        if f.storage:
            assert format_by_name(spelling(f.name)) is f


def test_exact_spelling() -> None:
    names = [TYPES[t].name for t in (GGMLType.Q4_K, GGMLType.Q4_K_R4, GGMLType.Q8_KV, GGMLType.Q8_KV_R8)]
    assert names == ["q4_K", "q4_k_r4", "q8_KV", "q8_KV_r8"]


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"unknown tensor type 'q4_kk'; did you mean .*q4_K"):
        format_by_name("q4_kk")
    with pytest.raises(UsageError, match=r"known types: f32, f16"):
        format_by_name("zzzzzz")


def test_activation_formats_are_not_offered() -> None:
    assert TYPES[GGMLType.Q8_K].type_size == 296
    with pytest.raises(UsageError):
        format_by_name("q8_K")


def test_unknown_id() -> None:
    with pytest.raises(UsageError, match="142"):
        get_format(142)


def test_row_length_must_fit() -> None:
    with pytest.raises(UsageError, match=r"100 is not a multiple of 256, the block size of iq4_ks"):
        row_size(GGMLType.IQ4_KS, 100)
    assert row_size(GGMLType.IQ4_KS, 512) == 4 + 2 * 136
    assert tensor_size(GGMLType.I2_S, (256, 3)) == 256 * 3 // 4 + 32


def test_interleaved_types_have_the_bytes_of_their_base() -> None:
    for f in TYPES.values():
        if f.base is None:
            continue
        base = TYPES[f.base]
        assert f.name.endswith(f"_r{f.rows}")
        assert (f.block_size, f.type_size) == (base.block_size, base.type_size)
        assert f.plain == base.type
        assert interleaved_type(base.type) == f.type
        if f.type != GGMLType.Q8_KV_R8:  # drops the row sum
            assert f.row_meta_size == base.row_meta_size


def test_sizes_agree_with_the_gguf_package() -> None:
    checked = 0
    for q, (block, size) in gguf.GGML_QUANT_SIZES.items():
        if int(q) in GGMLType.__members__.values() and q.name not in ("Q8_K", "Q8_1"):
            traits = TYPES[GGMLType(int(q))]
            assert (traits.block_size, traits.type_size) == (block, size), q
            checked += 1
    assert checked >= 25


@pytest.mark.parametrize(
    ("number", "label"),
    [
        (0, "all F32"),
        (10, "Q2_K - Medium"),
        (15, "Q4_K - Medium"),
        (23, "IQ3_XXS - 3.0625 bpw"),
        (214, "Q4_K_R4"),
        (338, "IQ2_K_R4 - 2.375 bpw"),
        (340, "IQ4_K_R4 - 4.5 bpw"),
        (345, "IQ4_KS_R4 - 4.25 bpw"),
        (1024 + 1, "F16 (guessed)"),
        (77, "unknown file type 77"),
    ],
)
def test_file_type_labels(number: int, label: str) -> None:
    assert file_type_label(number) == label


def test_file_types_name_storage_types() -> None:
    names = [n for f in FILE_TYPES.values() for n in f.names]
    assert len(names) == len(set(names))
    assert FILE_TYPES[28].type == GGMLType.IQ2_XS
    assert FILE_TYPES[229].type == GGMLType.IQ2_S_R4
    assert all(TYPES[f.type].storage for f in FILE_TYPES.values())


def test_every_table_row_of_the_specification(shared_dir: Path) -> None:
    rows = re.findall(
        r"^\| (\w+) \| (\d+) \| `(\w+)` \| (\d+) \| (\d+) \| (\d+) \|",
        (shared_dir / "spec" / "classic.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) > 50
    for member, number, name, block, size, meta in rows:
        t = GGMLType[member]
        traits = TYPES[t]
        found = (int(t), traits.name, traits.block_size, traits.type_size, traits.row_meta_size)
        assert found == (int(number), name, int(block), int(size), int(meta))
