"""`ik inspect --diff`, `--match`, `--hash`, `--check`, and changes of metadata."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from weight_bytes import stored

from ikcli.gguf.constants import GGMLType, GGUFValueType
from ikcli.gguf.hashes import Digest, Xxh64, read_manifest
from ikcli.gguf.reader import open_gguf
from ikcli.gguf.values import Typed
from ikcli.gguf.writer import GGUFWriter, NewTensor
from ikcli.main import main
from ikcli.quant.decode import dequantize

KEYS: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "one",
    "llama.block_count": 2,
    "llama.expert_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.scores": np.array([0, 1, 2, 3], np.float32),
    "tokenizer.chat_template": "short",
}
NAMES = {
    "token_embd.weight": (256, 8),
    "blk.0.attn_norm.weight": (256,),
    "blk.0.attn_k.weight": (256, 16),
    "blk.0.attn_v.weight": (256, 16),
    "blk.0.ffn_up_exps.weight": (256, 4, 2),
    "blk.1.ffn_up_exps.weight": (256, 4, 2),
    "blk.1.ffn_up.weight": (256, 4),
}


def model(
    path: Path, types: dict[str, GGMLType] | None = None, keys: dict[str, Any] | None = None, **options: Any
) -> str:
    """A model of random numbers; those of quantized tensors have nothing to do with the others."""
    rng, types = np.random.default_rng(3), types or {}
    data = {name: rng.standard_normal(shape[::-1], np.float32) for name, shape in NAMES.items()}
    specs = [NewTensor(name, shape, types.get(name, GGMLType.F32)) for name, shape in NAMES.items()]
    with GGUFWriter(path, KEYS if keys is None else keys, specs, **options) as w:
        for s in specs:
            row = s.shape[0]
            w.write_tensor(
                s.name,
                data[s.name] if s.type == GGMLType.F32 else stored(s.type, data[s.name].size // row, row).tobytes(),
            )
    return str(path)


def inspect(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["inspect", *argv])
    out = capsys.readouterr()
    return code, out.out, out.err


# -- digests


@pytest.mark.parametrize(
    ("text", "digest"),
    [
        (b"", "ef46db3751d8e999"),
        (b"a", "d24ec4f1a98c6e5b"),
        (b"abc", "44bc2cf5ad770999"),
        (b"Nobody inspects the spammish repetition", "fbcea83c8a378bf1"),
        (b"x" * 32, "e2df261fc2ec30eb"),
        (bytes(range(256)) * 5, "afc184ad7938a354"),
    ],
)
def test_xxh64(text: bytes, digest: str) -> None:
    for step in (1, 7, 31, 32, 33, 2000):
        h = Xxh64()
        for i in range(0, len(text), step):
            h.update(text[i : i + step])
        assert h.hexdigest() == digest


def test_digests_of_tensors_and_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model(tmp_path / "m.gguf", {"blk.0.attn_v.weight": GGMLType.IQ4_KS})
    file = open_gguf(path)
    code, out, _ = inspect(capsys, path, "--hash", "uuid,sha256,sha1")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0
    for name in file.tensors:
        assert ["sha256", hashlib.sha256(file.data(name)).hexdigest(), f"{path}:{name}"] in lines
    everything = b"".join(file.data(name).tobytes() for name in file.tensors)
    namespace = uuid.UUID("ef001206-dadc-5f6d-a15f-3359e577d4e5")
    expected = uuid.UUID(bytes=hashlib.sha1(namespace.bytes + everything).digest()[:16], version=5)
    assert lines[-3:] == [
        ["sha1", hashlib.sha1(everything).hexdigest(), path],
        ["sha256", hashlib.sha256(everything).hexdigest(), path],
        ["uuid", str(expected), path],
    ]
    code, out, _ = inspect(capsys, path, "--hash", "xxh64", "--no-layer", "--json")
    h = Xxh64()
    h.update(everything)
    assert json.loads(out)["digests"] == [{"kind": "xxh64", "digest": h.hexdigest(), "tensor": None}]
    split = model(tmp_path / "s.gguf", {"blk.0.attn_v.weight": GGMLType.IQ4_KS}, splits=[3, 4])
    _, out, _ = inspect(capsys, split.replace("s.gguf", "s-00001-of-00002.gguf"), "--hash", "xxh64", "--no-layer")
    assert out.split()[1] == h.hexdigest()


def test_digests_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, other = model(tmp_path / "m.gguf"), model(tmp_path / "o.gguf", {"token_embd.weight": GGMLType.F16})
    _, out, _ = inspect(capsys, path, "--hash", "all")
    sums = tmp_path / "sums"
    sums.write_text(out)
    code, out, err = inspect(capsys, path, "--check", str(sums))
    assert (code, err, out.count("-  ok"), out.count("sha256")) == (0, "", len(NAMES) + 1, len(NAMES) + 1)
    code, out, err = inspect(capsys, other, "--check", str(sums))
    assert code == 1
    assert "token_embd.weight  -  mismatch" in out
    assert f"2 of {len(NAMES) + 1} digests differ" in err
    sums.write_text(f"sha1 {'0' * 40}  C:\\models\\m.gguf:other.weight\n")
    code, out, err = inspect(capsys, path, "--check", str(sums))
    assert (code, "has no digest of these tensors" in err) == (1, True)


def test_names_in_a_manifest(tmp_path: Path) -> None:
    path = tmp_path / "sums"
    path.write_text("sha1  AB  /a:b/m.gguf\nsha1 cd m.gguf:x.weight\nmanifest: other\nsha1  ef  -:y\n")
    manifest = read_manifest(path)
    assert manifest.digests == {("sha1", ""): "ab", ("sha1", "x.weight"): "cd", ("sha1", "y"): "ef"}
    assert manifest.verdict(Digest("sha1", "cd", "z")) == "not found"


# -- differences


def test_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = model(tmp_path / "a.gguf"), model(tmp_path / "b.gguf", splits=[2, 5])
    b = b.replace("b.gguf", "b-00001-of-00002.gguf")
    code, out, _ = inspect(capsys, "--diff", a, a, "--json")
    assert (code, json.loads(out)["identical"]) == (0, True)
    code, out, _ = inspect(capsys, a, "--diff", b, "--json")
    found = json.loads(out)
    assert [k["key"] for k in found["metadata"]] == ["split.no", "split.count", "split.tensors.count"]
    assert (found["same_tensors"], found["tensors"]) == (len(NAMES), [])


def test_differences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = np.array([0, 1, 9, 4], np.float32)
    keys = KEYS | {"general.name": "two", "new.key": True, "tokenizer.ggml.scores": scores}
    del keys["tokenizer.chat_template"]
    types = {"blk.0.attn_k.weight": GGMLType.Q8_0, "blk.0.attn_v.weight": GGMLType.Q4_K_R4}
    a, b = model(tmp_path / "a.gguf"), model(tmp_path / "b.gguf", types, keys)
    raw = bytearray((tmp_path / "b.gguf").read_bytes())
    at = open_gguf(b).tensors["token_embd.weight"].offset + 4 * (256 + 3)
    raw[at : at + 4] = np.float32(100).tobytes()
    os.unlink(b)
    Path(b).write_bytes(raw)
    code, out, _ = inspect(capsys, "--diff", a, b, "--json")
    found = json.loads(out)
    assert code == 0
    changed = {k["key"]: (k["a"], k["b"]) for k in found["metadata"]}
    assert set(changed) == {"general.name", "new.key", "tokenizer.ggml.scores", "tokenizer.chat_template"}
    assert changed["new.key"] == (None, {"type": "bool", "value": True})
    tensors = {t["name"]: t for t in found["tensors"]}
    assert set(tensors) == {"token_embd.weight", *types}
    counts = {t["type"]: (t["a"], t["b"]) for t in found["types"]}
    assert counts["q8_0"] == (None, {"n_tensors": 1, "n_bytes": 16 * 8 * 34})
    assert (counts["f32"][0]["n_tensors"], counts["f32"][1]["n_tensors"]) == (7, 5)
    embd = tensors["token_embd.weight"]
    assert (embd["at"], embd["n_different"], embd["values"][1]) == ([3, 1], 1, 100.0)
    assert [t["name"] for t in found["tensors"]] == sorted(tensors, key=lambda n: -tensors[n]["relative"])
    for name, type in types.items():
        file, other = open_gguf(a), open_gguf(b)
        x = file.data(name).view(np.float32).astype(np.float64)
        y = dequantize(other.data(name), type, NAMES[name]).reshape(-1).astype(np.float64)
        assert tensors[name]["relative"] == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(x))
        assert tensors[name]["largest"] == pytest.approx(np.abs(x - y).max())
    _, out, _ = inspect(capsys, "--diff", a, b)
    assert "tokenizer.ggml.scores" in out
    assert "2 elements, the first is 2" in out
    assert "4 the same, 3 different" in out


def test_tensors_of_one_model_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a.gguf", tmp_path / "b.gguf"
    for path, names in ((a, {"x": (8,), "y": (8,), "s": (4, 2)}), (b, {"y": (8,), "z": (8,), "s": (2, 4)})):
        with GGUFWriter(path, KEYS, [NewTensor(n, s, GGMLType.F32) for n, s in names.items()]) as w:
            for n in names:
                w.write_tensor(n, np.array([np.nan, np.inf, *range(6)], np.float32))
    _, out, _ = inspect(capsys, "--diff", str(a), str(b), "--json")
    found = json.loads(out)
    assert [t["name"] for t in found["only_a"]] == ["x"]
    assert [t["name"] for t in found["only_b"]] == ["z"]
    assert found["same_tensors"] == 1
    assert [(t["name"], t["problem"]) for t in found["tensors"]] == [("s", "the shapes differ")]
    _, out, _ = inspect(capsys, "--diff", str(a), str(b))
    assert "tensors only in A" in out
    assert "f32 4 x 2" in out


def test_pieces_of_a_tensor_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ikcli.quant import model_diff

    types = {"blk.0.attn_v.weight": GGMLType.Q4_K_R4}
    a, b = open_gguf(model(tmp_path / "a.gguf")), open_gguf(model(tmp_path / "b.gguf", types))
    whole = model_diff.compare_tensor(a, b, "blk.0.attn_v.weight")
    monkeypatch.setattr(model_diff, "_PIECE", 1)
    monkeypatch.setattr(model_diff, "_ROWS", 4)
    pieces = model_diff.compare_tensor(a, b, "blk.0.attn_v.weight")
    assert whole is not None
    assert pieces is not None
    assert (pieces.at, pieces.largest, pieces.n_different) == (whole.at, whole.largest, whole.n_different)
    assert pieces.relative == pytest.approx(whole.relative)


# -- rules


def test_placement_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model(tmp_path / "m.gguf")
    code, out, _ = inspect(capsys, path, "--match", "exps=CPU,blk=CUDA0", "--json")
    rules = json.loads(out)["rules"]
    assert code == 0
    assert [(r["kind"], r["target"], r["matched"], r["taken"]) for r in rules] == [
        ("-ot", "CPU", 2, 2),
        ("-ot", "CUDA0", 6, 4),
    ]
    assert rules[0]["n_bytes"] == 2 * 256 * 4 * 2 * 4
    assert {t["name"] for t in rules[1]["tensors"] if t["taken_by"] == 0} == {n for n in NAMES if "exps" in n}
    (tmp_path / "rules.txt").write_text("# a comment\nexps=CPU\nblk=CUDA0\n")
    assert json.loads(inspect(capsys, path, "--match", f"@{tmp_path / 'rules.txt'}", "--json")[1])["rules"] == rules


def test_type_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model(tmp_path / "m.gguf")
    code, out, _ = inspect(capsys, path, "--match", "attn_k=q8_0,attn=iq4_ks", "--json")
    first, second = json.loads(out)["rules"]
    assert (code, first["kind"], first["new_bytes"]) == (0, "--custom-q", 16 * 8 * 34)
    fate = {t["name"]: (t["taken_by"], t["kept"], t["new"]) for t in second["tensors"]}
    assert fate == {
        "blk.0.attn_norm.weight": (None, True, None),
        "blk.0.attn_k.weight": (0, False, None),
        "blk.0.attn_v.weight": (None, False, "iq4_ks"),
    }
    _, out, _ = inspect(capsys, path, "--match", "attn_k=q8_0,attn=iq4_ks")
    assert 'rule 1 "attn_k=q8_0"' in out
    assert "stays as it is" in out


def test_a_bare_expression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = inspect(capsys, model(tmp_path / "m.gguf"), "--match", "ffn_up")
    assert code == 0
    assert 'rule 1 "ffn_up": 3 match, 3 taken' in out


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ("(=CPU", "is not a valid regular expression"),
        ("(", "is not a valid regular expression"),
        ("experts=CPU", "matches no tensor of this model"),
        ("ffn_upp", "matches no tensor of this model; nearest: ffn_up"),
        ("exps=q99", "q99"),
        ("exps=CPU,attn=q8_0", "different kinds"),
        (",", "the rule is empty"),
        ("=CPU", "incomplete rule"),
    ],
)
def test_bad_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str], rule: str, problem: str) -> None:
    code, out, err = inspect(capsys, model(tmp_path / "m.gguf"), "--match", rule)
    assert (code, out) == (2, "")
    assert problem in err


# -- changes of metadata


def test_change_in_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model(tmp_path / "m.gguf")
    before = Path(path).read_bytes()
    code, out, err = inspect(
        capsys, path, "--set", "general.name=str:two", "--set", "llama.rope.freq_base=float:5e5"
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "general.name: string one -> string two",
        "llama.rope.freq_base: float32 10000 -> float32 500000",
        f"changed: {path}",
    ]
    after = Path(path).read_bytes()
    assert len(after) == len(before)
    assert after[open_gguf(path).data_start :] == before[open_gguf(path).data_start :]
    fields = gguf.GGUFReader(path).fields
    assert (fields["general.name"].contents(), fields["llama.rope.freq_base"].contents()) == ("two", 500000.0)
    assert list(open_gguf(path).metadata) == list(KEYS)


def test_padding_is_used_and_no_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model(tmp_path / "m.gguf", alignment=64)
    file = open_gguf(path)
    with Path(path).open("rb") as f:
        header = f.read(file.data_start).rstrip(b"\0")
    room = file.data_start - len(header) - 8
    before = Path(path).read_bytes()
    assert inspect(capsys, path, "--set", "general.name=str:" + "x" * (3 + 64))[0] == 1
    assert Path(path).read_bytes() == before
    if room > 4:
        assert inspect(capsys, path, "--set", "general.name=str:" + "x" * 4)[0] == 0
        assert open_gguf(path).metadata["general.name"] == "xxxx"
    code, _, err = inspect(capsys, path, "--delete", "tokenizer.ggml.scores", "--delete", "llama.rope.freq_base")
    assert code == 1
    assert "less than lie before the tensors: write a new file with -o" in err


def test_a_new_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model(tmp_path / "m.gguf", {"blk.0.attn_v.weight": GGMLType.IQ4_KS})
    (tmp_path / "chat.jinja").write_text("{{ 'größe' * 100 }}\n", encoding="utf-8")
    out = tmp_path / "new" / "o.gguf"
    code, said, _ = inspect(
        capsys, path, "-o", str(out), "--set-file", f"tokenizer.chat_template=@{tmp_path / 'chat.jinja'}",
        "--delete", "tokenizer.ggml.scores", "--set", "a.b=i16[]:[1, -2]", "--set", 'a.c=str[]:["x","y"]',
        "--set", "a.d=int:-5", "--set", "a.e=bool:true", "--json",
    )  # fmt: skip
    assert (code, json.loads(said)["in_place"]) == (0, False)
    a, b = open_gguf(path), open_gguf(out)
    assert b.metadata["tokenizer.chat_template"] == "{{ 'größe' * 100 }}\n"
    assert "tokenizer.ggml.scores" not in b.metadata
    assert (b.metadata["a.b"].tolist(), b.item_types["a.b"]) == ([1, -2], GGUFValueType.INT16)
    assert (b.metadata["a.c"], b.metadata["a.d"], b.metadata["a.e"]) == (["x", "y"], -5, True)
    assert all(np.array_equal(a.data(n), b.data(n)) for n in NAMES)
    assert inspect(capsys, path, "-o", str(out), "--set", "general.name=str:x")[0] == 2  # it exists
    assert inspect(capsys, path, "-o", path, "--force", "--set", "general.name=str:x")[0] == 2  # the input
    assert inspect(capsys, path, "-o", str(out), "--force", "--set", "general.alignment=u32:256")[0] == 0
    c = open_gguf(out)
    assert (c.alignment, len(c.tensors)) == (256, len(NAMES))
    assert all(t.offset % 256 == 0 and np.array_equal(a.data(t.name), c.data(t.name)) for t in c.tensors.values())
    assert sorted(p.name for p in out.parent.iterdir()) == ["o.gguf"]


def test_a_split_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model(tmp_path / "m.gguf", splits=[3, 4])
    path = str(tmp_path / "m-00001-of-00002.gguf")
    assert inspect(capsys, path, "--set", "general.name=str:two")[0] == 0
    assert open_gguf(path).metadata["general.name"] == "two"
    code, out, _ = inspect(capsys, path, "--set", "general.name=str:three", "-o", str(tmp_path / "n.gguf"))
    assert code == 0
    parts = [tmp_path / f"n-0000{i}-of-00002.gguf" for i in (1, 2)]
    assert out.splitlines()[-1] == f"written: {parts[0]}, {parts[1]}"
    assert open_gguf(parts[0]).metadata["general.name"] == "three"
    assert len(open_gguf(parts[0]).tensors) == len(NAMES)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--set", "general.name"], "is not of the form KEY=TYPE:VALUE"),
        (["--set", "general.name=word:x"], "has the type word"),
        (["--set", "a=u8:256"], "256 does not fit uint8"),
        (["--set", "a=u8:x"], "x is not a whole number"),
        (["--set", "a=f32:1e300"], "does not fit float32"),
        (["--set", "a=bool:maybe"], "neither true nor false"),
        (["--set", "a=u8[]:3"], "is not a JSON list"),
        (["--set", "a=u8[]:[1"], "Expecting"),
        (["--set", "=str:x"], "is not of the form"),
        (["--set", "llama.block_count=int:3"], "--force changes it nevertheless"),
        (["--set", "llama.expert_count=int:3"], "--force changes it nevertheless"),
        (["--delete", "general.architecture"], "--force changes it nevertheless"),
        (["--set", "split.count=u16:3", "--force"], "ik gguf-split"),
        (["--set", "general.alignment=u32:64", "--force"], "moves all tensors: write a new file with -o"),
        (["--delete", "general.nam"], "has no key general.nam; near: general.name"),
        (["--delete", "general.name", "--set", "general.name=str:x"], "general.name is named twice"),
        (["--set-file", "general.name=@/no/such"], "cannot read /no/such: No such file"),
        (["--set-file", "general.name"], "is not KEY=@FILE"),
        (["--set-file", "llama.rope.freq_base=@x"], "is of type float32"),
        (["--set", "a=str:x", "--diff"], "exclude each other"),
        (["--hash", "md5"], '"md5" is not a digest'),
        (["--no-layer"], "--no-layer goes with --hash"),
        (["-o", "x"], "-o goes with --set"),
        (["--check", "/no/such"], "cannot read /no/such: No such file"),
        (["--diff"], "--diff compares two files"),
    ],
)
def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], problem: str) -> None:
    path = model(tmp_path / "m.gguf")
    before = Path(path).read_bytes()
    code, out, err = inspect(capsys, path, *argv)
    assert (code in (1, 2), out) == (True, "")
    assert problem in err
    assert Path(path).read_bytes() == before


def test_errors_of_the_file_system(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    path = model(tmp_path / "m.gguf")
    assert "unexpected argument" in inspect(capsys, path, path)[2]
    assert "name the file to change" in inspect(capsys, "--set", "general.name=str:x")[2]
    (tmp_path / "file").touch()
    code, out, err = inspect(capsys, path, "--set", "general.name=str:x", "-o", str(tmp_path / "file" / "o.gguf"))
    assert (code, out, len(err.splitlines())) == (1, "", 1)

    def full(self: Any, raw: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ikcli.gguf.edit._overwrite", full)
    code, out, err = inspect(capsys, path, "--set", "general.name=str:two")
    assert (code, "cannot be written (No space left on device)" in err) == (1, True)


def test_unusual_headers_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What would not be written back byte by byte is not changed in place."""
    path = model(tmp_path / "m.gguf", keys=KEYS | {"nested": Typed([[300]], GGUFValueType.ARRAY, GGUFValueType.ARRAY)})
    assert inspect(capsys, path, "--set", "general.name=str:two")[0] == 0
    assert open_gguf(path).metadata["nested"][0].tolist() == [300]
    flagged = model(tmp_path / "f.gguf", keys=KEYS | {"flag": True})
    odd = bytearray(Path(flagged).read_bytes())
    odd[odd.index(b"flag") + 8] = 7  # true, too
    os.unlink(flagged)
    Path(flagged).write_bytes(odd)
    code, _, err = inspect(capsys, flagged, "--set", "general.name=str:two")
    assert (code, "written in an unusual way" in err) == (1, True)
