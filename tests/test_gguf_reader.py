"""Reading GGUF files: values, splits, overrides, agreement with the `gguf` package."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from ikcli.commands.inspect import run as inspect
from ikcli.errors import FormatError, UsageError
from ikcli.gguf.constants import GGMLType, GGUFValueType
from ikcli.gguf.reader import GGUFFile, open_gguf
from ikcli.gguf.values import Typed
from ikcli.gguf.writer import GGUFWriter, NewTensor, plan_splits
from ikcli.settings.tools import InspectConfig

V = GGUFValueType
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "u8": Typed(255, V.UINT8),
    "i8": Typed(-128, V.INT8),
    "u16": Typed(65535, V.UINT16),
    "i16": Typed(-32768, V.INT16),
    "u32": Typed(2**32 - 1, V.UINT32),
    "i32": Typed(-(2**31), V.INT32),
    "u64": Typed(2**64 - 1, V.UINT64),
    "i64": Typed(-(2**63), V.INT64),
    "f32": Typed(0.5, V.FLOAT32),
    "f64": Typed(1e300, V.FLOAT64),
    "flag": True,
    "text": "größe\n",
    "ints": np.array([1, -2, 3], np.int32),
    "floats": np.array([0.25, 0.5], np.float32),
    "flags": np.array([True, False]),
    "words": ["a", "", "\udcff\udcfe", "日本"],
    "nested": Typed([[1, 2], ["x"], [[0.5]]], V.ARRAY, V.ARRAY),
}
TENSORS = [
    NewTensor("token_embd.weight", (64, 8), GGMLType.F32),
    NewTensor("blk.0.attn_norm.weight", (7,), GGMLType.F32),
    NewTensor("blk.0.ffn_up_exps.weight", (64, 3, 2), GGMLType.Q8_0),
    NewTensor("blk.1.ffn_up.weight", (256, 4), GGMLType.IQ4_KS),
    NewTensor("output.weight", (64, 8), GGMLType.F16),
]


def write(path: Path, metadata: dict[str, Any] | None = None, **options: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    data = {t.name: rng.integers(0, 256, t.n_bytes, np.uint8) for t in TENSORS}
    with GGUFWriter(path, METADATA if metadata is None else metadata, TENSORS, **options) as w:
        for name, raw in data.items():
            w.write_tensor(name, raw)
    return data


def rewritten_key(path: Path, key: str, code: str, value: int) -> None:
    """Change the scalar stored for `key` in place."""
    raw = bytearray(path.read_bytes())
    at = raw.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key) + 4
    struct.pack_into(code, raw, at, value)
    path.unlink()
    path.write_bytes(raw)


def assert_same_tensors(file: GGUFFile, data: dict[str, np.ndarray]) -> None:
    assert list(file.tensors) == list(data)
    for spec in TENSORS:
        t = file.tensors[spec.name]
        assert (t.shape, t.type, t.n_bytes) == (spec.shape, spec.type, spec.n_bytes)
        assert t.n_elements == np.prod(spec.shape)
        assert np.array_equal(file.data(spec.name), data[spec.name])


@pytest.mark.parametrize(("version", "alignment"), [(3, 32), (2, 32), (3, 1), (3, 4096)])
def test_all_value_types_and_tensors(tmp_path: Path, version: int, alignment: int) -> None:
    data = write(tmp_path / "m.gguf", version=version, alignment=alignment)
    file = open_gguf(tmp_path / "m.gguf")
    assert (file.version, file.alignment, file.arch) == (version, alignment, "llama")
    assert_same_tensors(file, data)
    assert all(t.offset % alignment == 0 for t in file.tensors.values())
    for key, value in METADATA.items():
        expected = value.value if isinstance(value, Typed) else value
        found = file.metadata[key]
        if key == "nested":
            assert [np.asarray(v).tolist() for v in found[:2]] == expected[:2]
            assert found[2][0].tolist() == [0.5]
        elif isinstance(expected, np.ndarray):
            assert found.dtype == expected.dtype
            assert found.tolist() == expected.tolist()
        else:
            assert found == expected
            assert type(found) is type(expected)
    assert file.value_types["i16"] == V.INT16
    assert file.value_types["words"] == V.ARRAY
    assert file.item_types["words"] == V.STRING
    assert file.n_bytes == sum(t.n_bytes for t in TENSORS)


def test_data_is_a_read_only_view(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    view = open_gguf(tmp_path / "m.gguf").data("output.weight")
    assert view.ndim == 1
    assert not view.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_agrees_with_the_gguf_package(shared_dir: Path) -> None:
    paths = sorted((shared_dir / "golden" / "models").glob("*.gguf"))
    assert paths
    for path in paths:
        file, other = open_gguf(path), gguf.GGUFReader(path)
        assert list(file.tensors) == [t.name for t in other.tensors]
        for t in other.tensors:
            mine = file.tensors[t.name]
            assert mine.shape == tuple(int(n) for n in t.shape)
            assert (int(mine.type), mine.offset, mine.n_bytes) == (int(t.tensor_type), t.data_offset, t.n_bytes)
            assert np.array_equal(file.data(t.name), np.asarray(t.data).view(np.uint8).reshape(-1))
        fields = {k: f for k, f in other.fields.items() if not k.startswith("GGUF.")}
        assert list(file.metadata) == list(fields)
        for key, field in fields.items():
            value = file.metadata[key]
            assert (list(value) if isinstance(value, list | np.ndarray) else value) == field.contents()
            assert file.value_types[key] == int(field.types[0])


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    w = gguf.GGUFWriter(path, "llama")
    w.add_uint32("llama.block_count", 1)
    w.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(1000)])
    w.add_tensor("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    file = open_gguf(path)
    assert file.get("llama.block_count") == 1
    assert file.metadata["tokenizer.ggml.tokens"][999] == "t999"
    assert file.tensors["a"].shape == (3, 2)
    assert file.data("a").view(np.float32).tolist() == [0, 1, 2, 3, 4, 5]


# -- splits


@pytest.mark.parametrize("splits", [[2, 3], [0, 5], [1, 1, 3], [0, 1, 0, 4]])
def test_split_files(tmp_path: Path, splits: list[int]) -> None:
    data = write(tmp_path / "m.gguf", splits=splits)
    n = len(splits)
    file = open_gguf(tmp_path / f"m-00001-of-{n:05d}.gguf")
    assert len(file.paths) == n
    assert_same_tensors(file, data)
    assert file.metadata["text"] == METADATA["text"]
    assert [t.file_index for t in file.tensors.values()] == [i for i, k in enumerate(splits) for _ in range(k)]


def test_missing_part_is_named(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", splits=[2, 2, 1])
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(FormatError, match=r"part 2 of 3 is missing, expected .*m-00002-of-00003\.gguf"):
        open_gguf(tmp_path / "m-00001-of-00003.gguf")


def test_later_part_names_the_first(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", splits=[0, 5])
    with pytest.raises(FormatError, match=r"is part 2 of 2; open the first part, .*m-00001-of-00002\.gguf"):
        open_gguf(tmp_path / "m-00002-of-00002.gguf")


def test_renamed_first_part(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", splits=[2, 3])
    (tmp_path / "m-00001-of-00002.gguf").rename(tmp_path / "model.gguf")
    with pytest.raises(FormatError, match=r"does not end in -00001-of-00002\.gguf"):
        open_gguf(tmp_path / "model.gguf")


def test_part_of_another_model(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", splits=[2, 3])
    rewritten_key(tmp_path / "m-00002-of-00002.gguf", "split.no", "<H", 0)
    with pytest.raises(FormatError, match=r"00002-of-00002\.gguf: says it is part 1 of 2, not part 2 of 2"):
        open_gguf(tmp_path / "m-00001-of-00002.gguf")


def test_tensor_total_is_checked(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", splits=[2, 3])
    rewritten_key(tmp_path / "m-00001-of-00002.gguf", "split.tensors.count", "<i", 6)
    with pytest.raises(FormatError, match=r"hold 5 tensors, split\.tensors\.count says 6"):
        open_gguf(tmp_path / "m-00001-of-00002.gguf")


@pytest.mark.parametrize("count", [0, 1, 7])
def test_merged_file_may_keep_split_keys(tmp_path: Path, count: int) -> None:
    keys = {"split.tensors.count": 5, "split.no": 0, "split.count": Typed(count, V.UINT16)}
    data = write(tmp_path / "m.gguf", METADATA | keys)
    assert_same_tensors(open_gguf(tmp_path / "m.gguf"), data)


def test_split_key_order_and_width_do_not_matter(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", splits=[2, 3])
    first = tmp_path / "m-00001-of-00002.gguf"
    part = open_gguf(first)
    keys = {"split.count": Typed(2, V.UINT32), "x": 1, "split.no": Typed(0, V.INT64)}
    specs = [NewTensor(t.name, t.shape, t.type) for t in part.tensors.values() if t.file_index == 0]
    with GGUFWriter(tmp_path / "new", {**keys, "general.architecture": "llama"}, specs) as w:
        for t in specs:
            w.write_tensor(t.name, part.data(t.name))
    (tmp_path / "new").rename(first)
    assert len(open_gguf(first).tensors) == 5


def test_plan_splits() -> None:
    sizes = [t.n_bytes for t in TENSORS]
    assert plan_splits(TENSORS) == [5]
    assert plan_splits(TENSORS, max_tensors=2) == [2, 2, 1]
    assert plan_splits(TENSORS, max_tensors=3, no_tensor_first=True) == [0, 3, 2]
    assert plan_splits(TENSORS, max_bytes=sizes[0] + sizes[1]) == [2, 3]
    assert plan_splits(TENSORS, max_bytes=sizes[2] + sizes[3]) == [1, 2, 1, 1]
    assert plan_splits(TENSORS, max_bytes=1) == [1] * 5


# -- overrides


def test_overrides(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", METADATA | {"per_layer": [1, 2, 3]})
    file = open_gguf(
        tmp_path / "m.gguf",
        [
            "u32=int:6",
            "f32=float:0.1",
            "flag=bool:false",
            "text=str:a=b:c",
            "new.int=int:-7",
            "new.float=float:2",
            "per_layer=int:4",
        ],
    )
    assert file.metadata["u32"] == 6
    assert file.metadata["f32"] == float(np.float32(0.1))
    assert file.metadata["flag"] is False
    assert file.metadata["text"] == "a=b:c"
    assert (file.metadata["new.int"], file.value_types["new.int"]) == (-7, V.INT32)
    assert (file.metadata["new.float"], file.value_types["new.float"]) == (2.0, V.FLOAT32)
    assert (file.metadata["per_layer"], file.value_types["per_layer"]) == (4, V.INT32)
    assert file.value_types["u32"] == V.UINT32


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("u32", "expected KEY=TYPE:VALUE"),
        ("u32=6", "expected KEY=TYPE:VALUE"),
        ("=int:6", "expected KEY=TYPE:VALUE"),
        ("u32=int:six", "'six' is not a valid int"),
        ("u32=int:99999999999999999999999", "not a valid int"),
        ("flag=bool:1", "'1' is not a valid bool"),
        ("u32=uint:1", "unknown type 'uint'"),
        ("u32=int:-1", "of type uint32"),
        ("u8=int:256", "of type uint8"),
        ("text=int:1", "of type string"),
        ("u32=str:1", "of type uint32"),
        ("f32=float:1e300", "of type float32"),
        ("new=float:1e300", "of type float32"),
    ],
)
def test_bad_overrides(tmp_path: Path, text: str, problem: str) -> None:
    write(tmp_path / "m.gguf")
    with pytest.raises(UsageError, match=problem) as e:
        open_gguf(tmp_path / "m.gguf", [text])
    assert f"'{text}'" in str(e.value)


# -- access


def test_unknown_tensor_and_missing_architecture(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", {"a": 1})
    file = open_gguf(tmp_path / "m.gguf")
    with pytest.raises(FormatError, match=r"no tensor named blk\.9"):
        file.data("blk.9")
    with pytest.raises(FormatError, match=r"no general\.architecture"):
        _ = file.arch


def test_missing_empty_and_directory(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    for name, problem in (("none.gguf", "no such file"), ("empty.gguf", "empty"), ("", "cannot be read")):
        with pytest.raises(FormatError, match=problem):
            open_gguf(tmp_path / name)


# -- the inspect command


def test_inspect_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "m.gguf", METADATA | {"general.file_type": 145})
    assert inspect(InspectConfig((str(tmp_path / "m.gguf"),), tensors=True)) == 0
    out = capsys.readouterr().out
    out.encode()  # undecodable bytes of the file must not reach the terminal
    assert "IQ4_KS - 4.25 bpw" in out
    assert "ik-only types      iq4_ks (mainline tools cannot read this file)" in out
    assert "text                  string      größe\\n" in out
    assert "64 x 3 x 2" in out
    assert "\x1b" not in out


def test_inspect_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "m.gguf", METADATA | {"bad": float("nan")}, splits=[2, 3])
    assert inspect(InspectConfig(model=str(tmp_path / "m-00001-of-00002.gguf"), tensors=True, json=True)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metadata"]["u64"] == 2**64 - 1
    assert found["metadata"]["bad"] == "nan"
    assert found["metadata"]["words"]["length"] == 4
    assert [t["part"] for t in found["tensors"]] == [0, 0, 1, 1, 1]
    assert {t["type"]: t["standard"] for t in found["types"]} == {
        "f32": True,
        "q8_0": True,
        "iq4_ks": False,
        "f16": True,
    }
