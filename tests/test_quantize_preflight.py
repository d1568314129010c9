"""`ik quantize --preflight`, data borrowed by MTP blocks, and refusals before the first tensor."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikcli import log, main
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.heads import head_blocks
from ikcli.gguf.reader import TensorInfo, open_gguf
from ikcli.gguf.writer import GGUFWriter, NewTensor
from ikcli.quant import encoders
from ikcli.quant.covariance_file import Moments, write_covariance
from ikcli.quant.imatrix_file import Imatrix, ImatrixEntry, write_gguf, write_legacy
from ikcli.quant.imatrix_use import name_patterns, with_borrowed

T = GGMLType
N_BLOCKS, N_EXPERTS = 4, 3
PARTS = {
    "attn_norm": (256,), "attn_q": (256, 256), "attn_k": (256, 32), "attn_output": (256, 256),
    "ffn_up_exps": (256, 256, N_EXPERTS), "ffn_gate_exps": (256, 256, N_EXPERTS),
    "ffn_down_exps": (256, 256, N_EXPERTS),
}  # fmt: skip
SHAPES: dict[str, tuple[int, ...]] = {
    "token_embd.weight": (256, 32),
    **{f"blk.{il}.{part}.weight": shape for il in range(N_BLOCKS) for part, shape in PARTS.items()},
    "blk.3.nextn.eh_proj.weight": (512, 256),
    "output.weight": (256, 32),
}


@pytest.fixture(autouse=True)
def _plain_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "utf8_streams", lambda: None)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three ordinary blocks and one of multi-token prediction."""
    path = tmp_path_factory.mktemp("m") / "in.gguf"
    keys: dict[str, Any] = {"general.architecture": "llama", "llama.block_count": 4, "llama.expert_count": N_EXPERTS}
    specs = [NewTensor(n, s, T.F32 if len(s) == 1 else T.F16) for n, s in SHAPES.items()]
    rng = np.random.default_rng(3)
    with GGUFWriter(path, keys, specs) as writer:
        for spec in specs:
            x = rng.normal(size=spec.shape[::-1]).astype(np.float32)
            writer.write_tensor(spec.name, x if spec.type == T.F32 else x.astype(np.float16))
    return path


def matrix(skip: tuple[str, ...] = (), counts: tuple[float, ...] = (5000, 5000, 5000)) -> Imatrix:
    """What a run over the ordinary blocks collects."""
    made = Imatrix(datasets=("text",), n_chunks=9, path="m.gguf")
    for name, shape in SHAPES.items():
        if len(shape) < 2 or not name.startswith(("blk.0.", "blk.1.", "blk.2.")) or any(s in name for s in skip):
            continue
        n = np.array(counts if len(shape) > 2 else (5000.0,), np.float32)
        il = float(name.split(".")[1])
        means = np.linspace(1 + il, 2 + il, shape[0]) * (1 + np.arange(len(n)))[:, None]
        made.entries[name] = ImatrixEntry((means * n[:, None]).astype(np.float32), n)
    return made


def saved(path: Path, m: Imatrix) -> Path:
    (write_gguf if path.suffix == ".gguf" else write_legacy)(m, path)
    return path


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = main.main(["quantize", *(str(a) for a in argv)])
    out, err = capsys.readouterr()
    return code, out, err


def rows(report: str, check: str) -> list[tuple[str, str]]:
    """(level, text) of all findings of one check."""
    cells = [[cell.strip() for cell in line.split(" | ")] for line in report.splitlines()]
    return [(c[1], c[2].removesuffix(" |")) for c in cells if c[0] == f"| {check}" and len(c) == 3]


# --- preflight --------------------------------------------------------------------------------------------------------
def test_all_is_well(capsys, model_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.gguf"
    code, text, err = run(capsys, "--preflight", "--imatrix", saved(tmp_path / "i.gguf", matrix()), model_file, out, 12)
    assert code == 0 and "FAIL" not in text and text.endswith("preflight: this run can start\n") and err == ""
    assert rows(text, "input")[0][1].startswith(f"{len(SHAPES)} tensors in 1 file of full length")
    assert rows(text, "imatrix") == [
        ("ok", f"{tmp_path / 'i.gguf'}: {3 * 6} entries, 9 chunks from text"),
        ("ok", "all entries have the sizes of this model"),
    ]
    assert rows(text, "experts") == [("ok", "all experts of 9 tensors have data")]
    assert rows(text, "disk")[0][0] == rows(text, "memory")[0][0] == "ok"
    assert [p.name for p in tmp_path.iterdir()] == ["i.gguf"]  # nothing is written, no folder is made


def test_tensors_without_data_are_named_with_what_they_get(capsys, model_file: Path, tmp_path: Path) -> None:
    imatrix = saved(tmp_path / "i.gguf", matrix(skip=("attn_output",)))
    rules = r"blk\.[01]\.attn_output=iq2_xs,blk\.2\.attn_output=q6_K"
    code, text, _ = run(
        capsys, "--preflight", "--imatrix", imatrix, "--custom-q", rules, model_file, tmp_path / "o.gguf", "IQ4_K"
    )
    assert code == 1 and "preflight: 1 problem, this run would fail or be refused" in text
    assert ("FAIL", "2 tensors would get a type that needs importance data; choose other types for them with "
            "--custom-q") in rows(text, "data")  # fmt: skip
    assert "| blk.{0..1}.attn_output.weight | iq2_xs | no data | refused: this type needs data |" in text
    assert "| blk.2.attn_output.weight | q6_K | no data | equal weights |" in text
    mtp = "MTP (did not run while collecting)"
    assert f"| blk.3.nextn.eh_proj.weight | iq4_k | {mtp} | equal weights |" in text
    assert f"| blk.3.attn_q.weight | iq4_k | {mtp} | weights of block 2 |" in text
    assert "| blk.0.attn_q.weight" not in text and "| output.weight | " in text
    code, _, err = run(capsys, "--imatrix", imatrix, "--custom-q", rules, model_file, tmp_path / "o.gguf", "IQ4_K")
    assert code == 1 and "iq2_xs for tensor blk.0.attn_output.weight needs importance weights" in err
    assert not (tmp_path / "o.gguf").exists()


@pytest.mark.parametrize(("name", "few"), [("i.gguf", "3"), ("i.dat", "unknown")])
def test_experts_with_little_data_are_counted(capsys, model_file: Path, tmp_path: Path, name: str, few: str) -> None:
    imatrix = saved(tmp_path / name, matrix(counts=(5000, 0, 20)))
    out = tmp_path / "o.gguf"
    code, text, _ = run(capsys, "--preflight", "--imatrix", imatrix, model_file, out, "IQ4_K")
    least = "0 | 20" if few == "3" else "unknown | unknown"
    assert code == 0 and f"| blk.{{0..2}}.ffn_up_exps.weight | 9 | 3 | {few} | {least} |" in text
    assert rows(text, "experts") == [
        ("note", f"of 27 experts 9 have no data and {9 if few == '3' else 0} fewer than 288 rows (listed below)")
    ]
    code, _, err = run(capsys, "--dry-run", "-v", "--imatrix", imatrix, model_file, out, "IQ4_K")
    line = "importance matrix: of 27 experts in 9 tensors, 9 without data get the mean of their layer"
    more = ", 9 with fewer than 288 rows are drawn towards it" if few == "3" else ""
    assert code == 0 and f"{line}{more}\n" in err
    detail = "  blk.1.ffn_down_exps.weight: 1 of 3 experts without data"
    assert detail + (", 1 with fewer than 288 rows (median 20)\n" if few == "3" else "\n") in err
    assert detail not in run(capsys, "--dry-run", "--imatrix", imatrix, model_file, out, "IQ4_K")[2]


def test_every_rule_without_match_is_named(capsys, model_file: Path, tmp_path: Path) -> None:
    rules = "ffn_dwn=q8_0,attn_q=q6_K,foo=q8_0"
    argv = ("--preflight", "--custom-q", rules, model_file, tmp_path / "o.gguf", "Q4_K_M")
    for strict, level in (((), "note"), (("--strict",), "FAIL")):
        code, text, _ = run(capsys, *strict, *argv)
        found = rows(text, "rules")
        assert code == len(strict) and [level for level, _ in found] == [level, level]
        assert 'rule "ffn_dwn=q8_0" matches no tensor' in found[0][1] and 'rule "foo=q8_0"' in found[1][1]


def test_file_types_and_inputs_that_are_refused(capsys, model_file: Path, tmp_path: Path) -> None:
    code, text, _ = run(capsys, "--preflight", model_file, tmp_path / "o.gguf", "IQ2_XXS")
    assert code == 1 and "Please do not use IQ2_XXS quantization" in rows(text, "types")[-1][1]
    assert "| blk.{0..2}.attn_q.weight |" in text and "give --imatrix FILE" in text
    code, text, _ = run(capsys, "--preflight", "--ignore-imatrix-rules", model_file, tmp_path / "o.gguf", "IQ2_XXS")
    assert code == 0
    assert run(capsys, model_file, tmp_path / "q8.gguf", "Q8_0")[0] == 0
    code, text, _ = run(capsys, "--preflight", tmp_path / "q8.gguf", tmp_path / "o.gguf", "Q4_K")
    assert code == 1 and "are quantized already" in rows(text, "types")[-1][1]
    cut = tmp_path / "cut.gguf"
    cut.write_bytes((tmp_path / "q8.gguf").read_bytes()[:-4096])
    code, text, _ = run(capsys, "--preflight", cut, tmp_path / "o.gguf", "Q4_K")
    assert code == 1 and "but the file ends at" in rows(text, "input")[0][1]
    assert run(capsys, "--preflight", "--dry-run", model_file, "Q8_0")[0] == 2


def test_parts_that_are_missing(capsys, model_file: Path, tmp_path: Path) -> None:
    assert main.main(["gguf-split", "--split-max-tensors", "9", str(model_file), str(tmp_path / "s")]) == 0
    capsys.readouterr()
    parts = sorted(tmp_path.glob("s-*.gguf"))
    code, text, _ = run(capsys, "--preflight", "--keep-split", parts[0], tmp_path / "o", "Q8_0")
    assert code == 0 and f"in {len(parts)} files of full length" in text and f"and {len(parts) - 1} more" in text
    parts[2].unlink()
    code, text, _ = run(capsys, "--preflight", parts[0], tmp_path / "o.gguf", "Q8_0")
    assert code == 1 and "part 3 of 4 is missing" in rows(text, "input")[0][1]


def test_outputs_that_cannot_be_written(
    capsys, model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def problem(output: Path) -> str:
        code, text, _ = run(capsys, "--preflight", model_file, output, "Q8_0")
        ((level, found),) = rows(text, "output")
        assert code == 1 and level == "FAIL"
        return found

    assert "is the input" in problem(model_file) and "is a folder" in problem(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    assert "is not a directory" in problem(tmp_path / "file" / "o.gguf")
    with monkeypatch.context() as m:
        m.setattr(os, "access", lambda *args: False)
        assert "is write-protected" in problem(tmp_path / "o.gguf")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=1000))
    code, text, _ = run(capsys, "--preflight", model_file, tmp_path / "o.gguf", "Q8_0")
    assert code == 1 and "1000 bytes are free" in rows(text, "disk")[0][1]


def test_memory_is_compared(capsys, model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for available, level, code in ((10 << 20, "FAIL", 1), (None, "note", 0), (1 << 40, "ok", 0)):
        monkeypatch.setattr("ikcli.hostinfo.available_memory", lambda available=available: available)
        found, text, _ = run(capsys, "--preflight", model_file, tmp_path / "o.gguf", "Q8_0")
        assert (found, rows(text, "memory")[0][0]) == (code, level)


def test_repack_and_targets(capsys, model_file: Path, tmp_path: Path) -> None:
    code, text, _ = run(capsys, "--preflight", "--repack", model_file, tmp_path / "o.gguf")
    assert code == 0 and rows(text, "types")[0] == ("ok", f"0 of {len(SHAPES)} tensors change")
    code, text, _ = run(capsys, "--preflight", "--target-size", "2MiB", model_file, tmp_path / "o.gguf")
    assert code == 0 and "a target chooses those that no rule decides about" in text
    code, text, _ = run(capsys, "--preflight", "--target-size", "900TiB", model_file, tmp_path / "o.gguf")
    assert code == 1 and "the result needs 921600.00 GiB" in rows(text, "disk")[0][1]


# --- refusals before the first tensor ---------------------------------------------------------------------------------
def test_data_of_another_model_is_refused_at_once(
    capsys, model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **options: Any) -> None:
        raise AssertionError("a tensor was encoded")

    monkeypatch.setattr("ikcli.quant.encoding.quantize_rows", never)
    other = matrix()
    for part in ("attn_output", "ffn_down_exps"):
        other.entries[f"blk.2.{part}.weight"] = ImatrixEntry(np.ones((1, 128), np.float32), np.ones(1, np.float32))
    imatrix, out = saved(tmp_path / "i.gguf", other), tmp_path / "o.gguf"
    code, _, err = run(capsys, "--imatrix", imatrix, model_file, out, "Q4_K")
    assert code == 1 and "blk.2.attn_output.weight has 128 values" in err and "belongs to another model" in err
    code, text, _ = run(capsys, "--preflight", "--imatrix", imatrix, model_file, out, "Q4_K")
    ((level, found),) = [row for row in rows(text, "imatrix") if "values" in row[1]]
    assert (code, level) == (1, "FAIL") and found.endswith("(and so on for 1 more)")
    name = "blk.1.attn_output.weight"
    moments = Moments(np.zeros((1, 64, 64), np.float32), np.zeros((1, 64), np.float32), np.ones(1))
    write_covariance(tmp_path / "c.gguf", [([name], moments)])
    options = ("--imatrix", saved(tmp_path / "i.gguf", matrix()), "--covariance", tmp_path / "c.gguf")
    code, _, err = run(capsys, *options, model_file, out, "Q4_K")
    assert code == 1 and f"tensor {name} has rows of 256; the file belongs to another model" in err
    code, text, _ = run(capsys, "--preflight", *options, model_file, out, "Q4_K")
    assert code == 1 and [level for level, _ in rows(text, "covariance")] == ["ok", "FAIL"] and not out.exists()


def test_a_target_is_not_measured_for_nothing(
    capsys, model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **options: Any) -> None:
        raise AssertionError("a tensor was measured")

    monkeypatch.setattr("ikcli.quant.target.measure_piece", never)
    code, _, err = run(capsys, "--target-bpw", "5", model_file, model_file)
    assert code == 2 and "is the input" in err
    code, _, err = run(capsys, "--strict", "--target-bpw", "5", "--custom-q", "foo=q8_0", model_file, tmp_path / "o")
    assert code == 2 and 'rule "foo=q8_0" matches no tensor' in err


# --- multi-token prediction -------------------------------------------------------------------------------------------
def test_mtp_tensors_borrow_from_the_last_block_that_has_data(model_file: Path) -> None:
    file = open_gguf(model_file)
    plain = matrix()
    del plain.entries["blk.2.attn_output.weight"]
    assert plain.weights("blk.3.attn_output.weight", (256, 256)) is None
    m = with_borrowed(plain, file.tensors, file.metadata)
    assert m.borrowed["blk.3.attn_output.weight"] == "blk.1.attn_output.weight"
    assert "blk.3.nextn.eh_proj.weight" not in m.borrowed and "blk.2.attn_output.weight" not in m.borrowed
    q = m.weights("blk.3.attn_q.weight", (256, 256))
    assert q is not None and q[0] == pytest.approx(np.linspace(3, 4, 256))
    up = m.weights("blk.3.ffn_up_exps.weight", SHAPES["blk.3.ffn_up_exps.weight"])
    assert up is not None and up.shape == (3, 256)  # every expert gets the mean of all
    assert all(row == pytest.approx(2 * np.linspace(3, 4, 256)) for row in up)
    assert len(m.entries) == len(plain.entries)
    own = matrix()
    own.entries["blk.3.attn_q.weight"] = ImatrixEntry(np.full((1, 256), 7, np.float32), np.ones(1, np.float32))
    found = with_borrowed(own, file.tensors, file.metadata).weights("blk.3.attn_q.weight", (256, 256))
    assert found is not None and (found == 7).all()


def test_shapes_must_agree_and_excluded_tensors_stay_without(model_file: Path) -> None:
    file = open_gguf(model_file)
    tensors = dict(file.tensors)
    t = tensors["blk.3.attn_q.weight"]
    tensors[t.name] = TensorInfo(t.name, (256, 128), t.type, t.n_bytes // 2, t.n_elements // 2, t.offset)
    tensors["blk.3.attn_k.weight"] = TensorInfo("blk.3.attn_k.weight", (128, 32), T.F16, 8192, 4096, t.offset)
    m = with_borrowed(matrix(), tensors, file.metadata)
    assert not {"blk.3.attn_q.weight", "blk.3.attn_k.weight"} & m.borrowed.keys()
    assert "blk.3.attn_output.weight" in m.borrowed
    excluded = with_borrowed(matrix().filtered(exclude=["attn_output"]), file.tensors, file.metadata)
    assert "blk.3.attn_output.weight" not in excluded.borrowed


def test_mtp_blocks_are_told_by_names_or_metadata() -> None:
    names = [f"blk.{i}.attn_q.weight" for i in range(6)]
    assert head_blocks([*names, "blk.5.nextn.eh_proj.weight"], {}) == {5}
    keys = {"general.architecture": "x", "x.block_count": 6, "x.nextn_predict_layers": 2}
    assert head_blocks(names, keys) == {4, 5} and head_blocks(names, {}) == head_blocks(names[:4], keys) == set()


def test_a_run_uses_and_reports_borrowed_data(
    capsys, model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float | None] = []

    def spy(x: Any, type: GGMLType, row: Any, **options: Any) -> Any:
        if x.shape[1] == 256:
            seen.append(None if row is None else round(float(row[0]), 3))
        return encoders.quantize_rows(x, type, row, **options)

    monkeypatch.setattr("ikcli.quant.encoding.quantize_rows", spy)
    imatrix = saved(tmp_path / "i.gguf", matrix())
    code, _, err = run(capsys, "--imatrix", imatrix, "--pure", model_file, tmp_path / "o.gguf", "Q4_0", 1)
    assert code == 0 and "weighted like those of block 2: blk.3.attn_q.weight, blk.3.attn_k.weight" in err
    assert "MTP tensors without importance data get equal weights: blk.3.nextn.eh_proj.weight" in err
    assert {1.0, 2.0, 3.0, 6.0} <= set(seen) and seen.count(6.0) >= 3 * N_EXPERTS


def test_name_patterns() -> None:
    names = ["blk.0.a.weight", "blk.1.a.weight", "x.weight", "blk.7.a.weight", "blk.4.b", "blk.2.a.weight"]
    assert name_patterns(names) == ["blk.{0..2,7}.a.weight", "x.weight", "blk.4.b"]
