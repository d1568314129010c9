"""Writing GGUF files: byte-identical copies, splits, streaming, clean failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from ikcli.errors import FormatError, UsageError
from ikcli.gguf.constants import GGMLType, GGUFValueType
from ikcli.gguf.reader import open_gguf
from ikcli.gguf.values import Typed
from ikcli.gguf.writer import GGUFWriter, NewTensor, split_path

V = GGUFValueType
A = NewTensor("a", (5,), GGMLType.F32)
B = NewTensor("b", (32, 2), GGMLType.Q4_0)
DATA = {"a": np.arange(5, dtype=np.float32), "b": np.arange(36, dtype=np.uint8)}


def write(path: Path, metadata: dict[str, Any], **options: Any) -> None:
    with GGUFWriter(path, metadata, [A, B], **options) as w:
        for name, data in DATA.items():
            w.write_tensor(name, data)


def test_copies_are_byte_identical(shared_dir: Path, tmp_path: Path) -> None:
    for path in sorted((shared_dir / "golden" / "models").glob("*.gguf")):
        file = open_gguf(path)
        specs = [NewTensor(t.name, t.shape, t.type) for t in file.tensors.values()]
        with GGUFWriter(tmp_path / path.name, file.typed_metadata(), specs) as w:
            for name in file.tensors:
                w.write_tensor(name, file.data(name))
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_gguf_package_reads_it(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", {"general.architecture": "llama", "n": -3, "words": ["x", "yz"], "big": 2**40})
    other = gguf.GGUFReader(tmp_path / "m.gguf")
    assert other.fields["n"].contents() == -3
    assert other.fields["big"].contents() == 2**40
    assert other.fields["words"].contents() == ["x", "yz"]
    assert other.tensors[0].data.tolist() == [0, 1, 2, 3, 4]
    assert other.tensors[1].tensor_type == gguf.GGMLQuantizationType.Q4_0


@pytest.mark.parametrize(
    ("value", "type", "item_type"),
    [
        (True, V.BOOL, None),
        (7, V.UINT32, None),
        (-7, V.INT32, None),
        (2**33, V.UINT64, None),
        (-(2**33), V.INT64, None),
        (0.5, V.FLOAT32, None),
        ("s", V.STRING, None),
        (np.float64(0.1), V.FLOAT64, None),
        ([1, 2], V.ARRAY, V.INT32),
        ([1, 2.5], V.ARRAY, V.FLOAT32),
        ([2**40], V.ARRAY, V.INT64),
        ([True, False], V.ARRAY, V.BOOL),
        ([], V.ARRAY, V.STRING),
        ([["a"], ["b", "c"], []], V.ARRAY, V.ARRAY),
        (np.zeros(2, np.uint16), V.ARRAY, V.UINT16),
    ],
)
def test_inferred_types(tmp_path: Path, value: Any, type: V, item_type: V | None) -> None:
    write(tmp_path / "m.gguf", {"k": value})
    file = open_gguf(tmp_path / "m.gguf")
    assert (file.value_types["k"], file.item_types.get("k")) == (type, item_type)
    found = file.metadata["k"]
    assert (found.tolist() if isinstance(found, np.ndarray) else found) == np.asarray(value, object).tolist()


def test_chunked_and_whole_data_are_the_same(tmp_path: Path) -> None:
    write(tmp_path / "whole.gguf", {"x": 1})
    with GGUFWriter(tmp_path / "parts.gguf", {"x": 1}, [A, B]) as w:
        w.write_tensor("a", (DATA["a"][i : i + 2] for i in range(0, 5, 2)))
        w.write_tensor("b", iter([DATA["b"][:7].tobytes(), DATA["b"][7:].reshape(-1, 1)]))
    assert (tmp_path / "parts.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_split_keys(tmp_path: Path) -> None:
    write(
        tmp_path / "m.gguf", {"general.architecture": "llama", "split.count": 9, "x": "y"}, splits=[1, 1], alignment=64
    )
    first, second = (open_gguf_alone(split_path(tmp_path / "m.gguf", i, 2)) for i in (0, 1))
    assert first["x"].value == "y"
    assert "x" not in second
    assert second["general.alignment"].value == 64
    for no, part in enumerate((first, second)):
        assert part["split.no"] == Typed(no, V.UINT16)
        assert part["split.count"] == Typed(2, V.UINT16)
        assert part["split.tensors.count"] == Typed(2, V.INT32)
    assert list(open_gguf(tmp_path / "m-00001-of-00002.gguf").tensors) == ["a", "b"]


def open_gguf_alone(path: Path) -> dict[str, Typed]:
    """Metadata of one part, read with the `gguf` package."""
    fields = gguf.GGUFReader(path).fields
    return {k: Typed(f.contents(), V(int(f.types[0]))) for k, f in fields.items() if not k.startswith("GGUF.")}


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_nothing_remains_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="boom"), GGUFWriter(tmp_path / "m.gguf", {}, [A, B], splits=[1, 1]) as w:
        w.write_tensor("a", DATA["a"])
        assert len(leftovers(tmp_path)) == 1
        raise RuntimeError("boom")
    assert leftovers(tmp_path) == []


def test_an_old_file_survives_a_failed_rewrite(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", {"x": 1})
    before = (tmp_path / "m.gguf").read_bytes()
    with pytest.raises(FormatError, match="only 1 of 2 tensors"), GGUFWriter(tmp_path / "m.gguf", {}, [A, B]) as w:
        w.write_tensor("a", DATA["a"])
    assert (tmp_path / "m.gguf").read_bytes() == before
    assert leftovers(tmp_path) == ["m.gguf"]


def test_misuse_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(FormatError, match="tensor b is out of order, expected a"), GGUFWriter(path, {}, [A, B]) as w:
        w.write_tensor("b", DATA["b"])
    with pytest.raises(FormatError, match=r"tensor a \(f32\) needs 20 bytes, got 36"), GGUFWriter(path, {}, [A]) as w:
        w.write_tensor("a", DATA["b"])
    with pytest.raises(FormatError, match="tensor b was not announced"), GGUFWriter(path, {}, [A]) as w:
        w.write_tensor("a", DATA["a"])
        w.write_tensor("b", DATA["b"])
    with pytest.raises(FormatError, match="written twice"):
        GGUFWriter(path, {}, [A, A])
    with pytest.raises(FormatError, match="tensor c: row length 33"):
        GGUFWriter(path, {}, [NewTensor("c", (33,), GGMLType.Q4_0)])
    with pytest.raises(FormatError, match="impossible shape"):
        GGUFWriter(path, {}, [NewTensor("c", (32, 0), GGMLType.Q4_0)])
    for options in ({"alignment": 24}, {"version": 1}, {"splits": [1, 2]}):
        with pytest.raises(UsageError):
            GGUFWriter(path, {}, [A, B], **options)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (Typed(300, V.UINT8), "key k: the value 300 does not fit type uint8"),
        (Typed("x", V.INT32), "does not fit type int32"),
        (Typed(["x"], V.ARRAY, V.INT32), "elements do not fit type int32"),
        (None, "NoneType cannot be stored"),
        (np.zeros(2, np.complex64), "complex64 cannot be stored"),
    ],
)
def test_values_that_do_not_fit(tmp_path: Path, value: Any, problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        write(tmp_path / "m.gguf", {"k": value})
    with pytest.raises(FormatError, match=problem), GGUFWriter(tmp_path / "m.gguf", {"k": value}, []):
        pass
    assert leftovers(tmp_path) == []


def test_target_folder_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"m\.gguf: cannot be written"):
        write(tmp_path / "none" / "m.gguf", {})
