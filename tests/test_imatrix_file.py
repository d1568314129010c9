"""Importance matrix files: both formats, lookups by tensor, merging, damaged files."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from ikcli.errors import FormatError, NonFiniteError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.writer import GGUFWriter, NewTensor
from ikcli.quant.imatrix_file import Imatrix, ImatrixEntry, merge, read_imatrix, write_gguf, write_legacy


def entry(*rows: list[float], counts: list[float] | None = None) -> ImatrixEntry:
    return ImatrixEntry(np.array(rows, np.float32), np.array(counts or [1.0] * len(rows), np.float32))


def legacy(*entries: tuple[bytes, int, list[float]], tail: bytes = b"") -> bytes:
    out = struct.pack("<i", len(entries))
    for name, n_calls, values in entries:
        out += struct.pack("<i", len(name)) + name + struct.pack("<ii", n_calls, len(values))
        out += np.array(values, "<f4").tobytes()
    return out + tail


def test_legacy_values_are_divided_by_the_calls(tmp_path: Path) -> None:
    path = tmp_path / "m.dat"
    path.write_bytes(
        legacy((b"a.weight", 4, [8.0, 2.0]), (b"b.weight", 0, [3.0]), tail=struct.pack("<ii", 7, 3) + b"txt")
    )
    found = read_imatrix(path)
    assert (found.n_chunks, found.datasets) == (7, ("txt",))
    assert found.entries["a.weight"].values.tolist() == [2.0, 0.5]
    assert found.entries["b.weight"].values.tolist() == [3.0]
    path.write_bytes(legacy((b"a.weight", 1, [8.0])))  # old files end here
    assert (read_imatrix(path).n_chunks, read_imatrix(path).datasets) == (0, ())


def test_both_formats_keep_the_values(tmp_path: Path) -> None:
    made = Imatrix(
        {"x.weight": entry([2.0, 4.0], counts=[2.0]), "e.weight": entry([1.0, 2.0], [9.0, 3.0], counts=[1.0, 3.0])},
        ("some.txt",), 5, 256,
    )  # fmt: skip
    write_gguf(made, tmp_path / "m.gguf")
    again = read_imatrix(tmp_path / "m.gguf")
    assert (again.datasets, again.n_chunks, again.chunk_size) == (("some.txt",), 5, 256)
    assert again.entries["e.weight"].counts.tolist() == [1.0, 3.0]
    write_legacy(again, tmp_path / "m.dat")
    old = read_imatrix(tmp_path / "m.dat")
    for found in (again, old):
        for name, e in made.entries.items():
            np.testing.assert_array_equal(found.entries[name].values, e.values)


def test_matrix_that_saw_no_input_weighs_one() -> None:
    assert entry([0.0, 0.0], [4.0, 2.0], counts=[0.0, 2.0]).values.tolist() == [1.0, 1.0, 2.0, 1.0]


def test_real_file_is_reproduced_byte_for_byte(shared_dir: Path, tmp_path: Path) -> None:
    source = shared_dir / "data" / "stories260K-d256.imatrix.dat"
    found = read_imatrix(source)
    assert (len(found.entries), found.n_chunks) == (35, 20)
    write_legacy(found, tmp_path / "copy.dat")
    assert (tmp_path / "copy.dat").read_bytes() == source.read_bytes()


@pytest.mark.parametrize(
    ("have", "want", "found"),
    [
        ("blk.1.ffn_gate_up_exps.weight", "blk.1.ffn_up_exps.weight", True),
        ("blk.1.ffn_up_exps.weight", "blk.1.ffn_gate_exps.weight", True),
        ("blk.1.ffn_up_exps.weight", "blk.1.ffn_gate_up_exps.weight", True),
        ("blk.1.ffn_up.weight", "blk.1.ffn_gate.weight", True),
        ("blk.1.ffn_gate.weight", "blk.1.ffn_up.weight", True),
        ("blk.1.attn_kv_b.weight", "blk.1.attn_v_b.weight", True),
        ("blk.1.attn_v_b.weight", "blk.1.attn_kv_b.weight", True),
        ("blk.1.attn_kv_b.weight", "blk.1.attn_k_b.weight", False),
        ("blk.1.ffn_up.weight", "blk.2.ffn_gate.weight", False),
        ("blk.1.ffn_up_exps.weight", "blk.1.ffn_down_exps.weight", False),
    ],
)
def test_tensors_with_the_same_input_share_an_entry(have: str, want: str, found: bool) -> None:
    assert (Imatrix({have: entry([1.0])}).find(want) == have) == found


def test_weights_have_one_row_per_matrix_and_fit() -> None:
    m = Imatrix({"e.weight": entry([1.0, 2.0], [3.0, 4.0]), "token_embd.weight": entry([1.0])}, path="m.dat")
    weights = m.weights("e.weight", (2, 7, 2))
    assert weights is not None and weights.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert m.weights("other.weight", (2, 7)) is None and m.weights("token_embd.weight", (2, 7)) is None
    with pytest.raises(FormatError, match=r"m\.dat: the entry e\.weight has 4 values, but tensor e\.weight needs 6"):
        m.weights("e.weight", (2, 7, 3))


def test_heads_of_mla_share_the_weights_of_the_joint_matrix() -> None:
    joint = Imatrix({"blk.0.attn_kv_b.weight": entry([1.0, 2.0])})
    weights = joint.weights("blk.0.attn_v_b.weight", (2, 5, 3))
    assert weights is not None and weights.tolist() == [[1.0, 2.0]] * 3
    heads = Imatrix({"blk.0.attn_v_b.weight": entry([1.0, 2.0], [3.0, 4.0])})
    weights = heads.weights("blk.0.attn_kv_b.weight", (2, 10))
    assert weights is not None and weights.tolist() == [[2.0, 3.0]]


def test_filters() -> None:
    m = Imatrix({name: entry([1.0]) for name in ("attn_q", "attn_k", "ffn_up")})
    assert list(m.filtered(include=["attn"]).entries) == ["attn_q", "attn_k"]
    assert list(m.filtered(exclude=["_k", "up"]).entries) == ["attn_q"]


def test_merging_adds_what_was_seen() -> None:
    a = Imatrix({"x": entry([2.0], counts=[1.0]), "e": entry([2.0, 4.0], counts=[2.0])}, ("a",), 1)
    b = Imatrix({"x": entry([4.0], counts=[3.0]), "e": entry([1.0], [2.0], counts=[1.0, 0.0])}, ("b",), 2)
    both = merge([a, b])
    assert both.entries["x"].values.tolist() == [1.5] and (both.datasets, both.n_chunks) == (("a", "b"), 3)
    assert both.entries["e"].values.tolist() == [1.0, 3.0]
    with pytest.raises(FormatError, match="has 2 values, an earlier file 1"):
        merge([a, Imatrix({"x": entry([1.0, 2.0])})])


@pytest.mark.parametrize("cut", [3, 6, 11, 18, 21, 27, 30])
def test_cut_files_are_refused(tmp_path: Path, cut: int) -> None:
    data = legacy((b"a.weight", 4, [8.0, 2.0]), tail=struct.pack("<ii", 7, 3) + b"txt")
    (tmp_path / "m.dat").write_bytes(data[:cut])
    with pytest.raises(FormatError, match=r"m\.dat"):
        read_imatrix(tmp_path / "m.dat")


def test_bad_values_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.dat"
    path.write_bytes(legacy((b"a", 1, [1.0]), (b"bad", 1, [1.0, float("inf")])))
    with pytest.raises(NonFiniteError, match="the entry bad holds NaN or Inf"):
        read_imatrix(path)
    path.write_bytes(legacy((b"bad", 1, [-1.0])))
    with pytest.raises(FormatError, match="negative"):
        read_imatrix(path)
    path.write_bytes(b"hello, this is text")
    with pytest.raises(FormatError, match="not an importance matrix"):
        read_imatrix(path)


def test_gguf_without_a_matrix_is_refused(tmp_path: Path) -> None:
    with GGUFWriter(tmp_path / "m.gguf", {"general.type": "adapter"}, [NewTensor("x", (4,), GGMLType.F32)]) as writer:
        writer.write_tensor("x", bytes(16))
    with pytest.raises(FormatError, match=r"holds no importance matrix \(general\.type is adapter\)"):
        read_imatrix(tmp_path / "m.gguf")
