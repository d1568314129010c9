"""`ik publish`: files and digests, recipes that make the same quants, results in the card, splitting, refusals."""

from __future__ import annotations

import hashlib
import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml
from quant_models import write_model

from ikcli import log, main
from ikcli.gguf.reader import open_gguf
from ikcli.gguf.split import copy_tensors, tensor_specs
from ikcli.gguf.writer import GGUFWriter
from ikcli.hub.names import RemoteFile, quants_of

KLD = """\
llama_model_loader: loaded meta data with 20 key-value pairs and 12 tensors from {file} (version GGUF V3 (latest))
====== Perplexity statistics ======
Mean PPL(Q)                   :   {ppl} ±   0.411262
Mean PPL(base)                :  10.5 ±   0.4
====== KL divergence statistics ======
Mean    KLD:   {kld} ±   0.000904
Maximum KLD:   0.086064
====== Token probability statistics ======
Same top p: 98.387 ± 1.136 %
"""


@pytest.fixture(autouse=True)
def _plain_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "utf8_streams", lambda: None)


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = main.main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "Tiny-F16.gguf")


@pytest.fixture
def quants(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> list[Path]:
    listing = tmp_path / "list.txt"
    listing.write_text('Q8_0\nQ4_0\nQ4_0 Q4_0-mine --custom-q "attn_v=iq4_k,ffn_down=bf16"\n')
    meta = [f"general.{k}=str:{v}" for k, v in (("license", "mit"), ("repo_url", "https://huggingface.co/me/Tiny"))]
    keys = [word for text in (*meta, "general.name=str:Tiny") for word in ("--override-kv", text)]
    assert run(capsys, "quantize", *keys, "--matrix", listing, source, tmp_path / "q")[0] == 0
    return [tmp_path / "q" / f"Tiny-{name}.gguf" for name in ("Q8_0", "Q4_0", "Q4_0-mine")]


def front_matter(text: str) -> dict[str, object]:
    return yaml.safe_load(text.split("---\n")[1])  # type: ignore[no-any-return]


def test_the_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path, source: Path, quants: list[Path]) -> None:
    (tmp_path / "imatrix.dat").write_bytes(b"importance")
    logs = []
    for path, kld, ppl in zip(quants, (0.00004, 0.02, 0.02), (10.51, 10.9, 10.7), strict=True):
        logs.append(tmp_path / f"{path.stem}.log")
        logs[-1].write_text(KLD.format(file=path, kld=kld, ppl=ppl))
    out = tmp_path / "up" / "Tiny-GGUF"
    results = [word for path in logs for word in ("--results", path)]
    argv = ["publish", *quants, "--out", out, "--imatrix", tmp_path / "imatrix.dat", *results, "--source", source]
    code, printed, err = run(capsys, *argv, "--note", "ik imatrix -f a,b.txt\nwith ```")
    assert code == 0 and "warning" not in err.lower(), err
    assert sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()) == [
        ".ik-publish", "README.md", "SHA256SUMS", "Tiny-Q4_0-mine.gguf", "Tiny-Q4_0.gguf", "Tiny-Q8_0.gguf",
        "Tiny-imatrix.dat", "quality.svg", "recipes/Tiny-Q4_0-mine.txt", "recipes/Tiny-Q4_0.txt",
        "recipes/Tiny-Q8_0.txt",
    ]  # fmt: skip
    assert str(out / "Tiny-Q4_0-mine.gguf") in printed
    sums = dict(line.split("  ")[::-1] for line in (out / "SHA256SUMS").read_text().splitlines())
    assert len(sums) == 9
    for name, digest in sums.items():
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    for path in quants:
        assert (out / path.name).read_bytes() == path.read_bytes()
    assert (out / "Tiny-imatrix.dat").read_bytes() == b"importance"
    text = (out / "README.md").read_text()
    assert front_matter(text) == {
        "base_model": "me/Tiny", "base_model_relation": "quantized", "license": "mit", "tags": ["gguf"],
    }  # fmt: skip
    (row,) = [line for line in text.splitlines() if line.startswith("| [Tiny-Q4_0-mine.gguf]")]
    file = open_gguf(quants[2])
    assert f"| {8 * file.n_bytes / file.n_elements:.2f} | 10.7 ± 0.411262 | 0.02 ± 0.000904 |" in row
    assert "| 10.51 ± 0.411262 | 0.000040 ± 0.000904 |" in text
    assert hashlib.sha256(source.read_bytes()).hexdigest() in text and "````\nik imatrix -f a,b.txt" in text
    root = ElementTree.fromstring((out / "quality.svg").read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    names = [e.text for e in root.iter() if e.get("class") == "name"]
    assert sorted(str(n) for n in names) == ["Q4_0", "Q4_0-mine", "Q8_0"]
    members = {str(e.get("data-series")): len(e.findall("{*}circle")) for e in root.iter() if e.get("data-series")}
    assert members == {"Pareto front": 2, "others": 1}


def test_recipes_make_the_same_types(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, source: Path, quants: list[Path]
) -> None:
    assert run(capsys, "publish", *quants, "-o", tmp_path / "out")[0] == 0
    again = tmp_path / "again.gguf"
    for path in quants:
        recipe = tmp_path / "out" / "recipes" / f"{path.stem}.txt"
        assert run(capsys, "quantize", "--custom-q", f"@{recipe}", source, again, "Q2_K", "2")[0] == 0
        old, new = open_gguf(path), open_gguf(again)
        for name in old.tensors:
            assert old.tensors[name].type == new.tensors[name].type
            assert bytes(old.data(name)) == bytes(new.data(name)), (path, name)


def test_large_models_are_split_and_can_be_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, quants: list[Path]
) -> None:
    limit = open_gguf(quants[0]).n_bytes - 1
    out = tmp_path / "out"
    code, printed, err = run(capsys, "publish", *quants, "--out", out, "--split-max-size", f"{limit}B", "--json")
    assert code == 0, err
    made = json.loads(printed)
    parts = made["quants"][0]["paths"]
    assert parts == [f"Tiny-Q8_0/Tiny-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]
    assert made["quants"][1]["paths"] == ["Tiny-Q4_0.gguf"]
    whole, joined = open_gguf(quants[0]), open_gguf(out / parts[0])
    assert {n: bytes(whole.data(n)) for n in whole.tensors} == {n: bytes(joined.data(n)) for n in joined.tensors}
    files = [RemoteFile(p.relative_to(out).as_posix(), p.stat().st_size, "") for p in out.rglob("*.gguf")]
    found = {q.name: len(q.files) for q in quants_of(files)}
    assert len(found) == 3 and found["Q8_0"] == 2
    # a split model that needs no splitting becomes one file
    code, _, err = run(capsys, "publish", f"Q8_0={out / parts[0]}", "--out", tmp_path / "one")
    assert code == 0, err
    assert (tmp_path / "one" / "Tiny-Q8_0.gguf").read_bytes() == quants[0].read_bytes()


def test_links_and_dry_run(capsys: pytest.CaptureFixture[str], tmp_path: Path, quants: list[Path]) -> None:
    code, printed, _ = run(capsys, "publish", *quants, "--out", tmp_path / "out", "--dry-run")
    assert code == 0 and "Tiny-Q8_0.gguf" in printed and not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()  # an empty folder is taken
    assert run(capsys, "publish", *quants, "--out", tmp_path / "out", "--link")[0] == 0
    assert (tmp_path / "out" / "Tiny-Q8_0.gguf").samefile(quants[0])


def test_names_and_missing_facts(capsys: pytest.CaptureFixture[str], tmp_path: Path, source: Path) -> None:
    argv = ["publish", f"mine={source}", "--name", 'Odd: "model" 7B', "--out", tmp_path / "out"]
    code, _, err = run(capsys, *argv, "--license", 'odd: "one"', "--base-model", "a/b")
    assert code == 0, err
    assert (tmp_path / "out" / "Odd-model-7B-mine.gguf").exists()
    text = (tmp_path / "out" / "README.md").read_text()
    assert front_matter(text)["license"] == 'odd: "one"' and front_matter(text)["base_model"] == "a/b"
    other = tmp_path / "other-f16-mine.gguf"
    shutil.copyfile(source, other)
    assert run(capsys, "publish", other, source, "--name", "New", "--out", tmp_path / "both")[0] == 0
    assert {p.name for p in (tmp_path / "both").glob("*.gguf")} == {"New-f16-mine.gguf", "New-F16.gguf"}
    code, _, err = run(capsys, "publish", source, "--out", tmp_path / "bare")
    assert code == 0 and "--base-model" in err and "--license" in err
    assert (tmp_path / "bare" / "Tiny-F16.gguf").exists()
    assert front_matter((tmp_path / "bare" / "README.md").read_text()) == {"tags": ["gguf"]}


def test_the_current_folder_is_not_replaced(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    code, _, err = run(capsys, "publish", source, "--out", ".")
    assert code == 2 and "is the current folder" in err and not list(Path.cwd().iterdir())


def test_refusals(capsys: pytest.CaptureFixture[str], tmp_path: Path, source: Path, quants: list[Path]) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").write_text("mine")
    (tmp_path / "none.log").write_text("no results here\n")
    new = tmp_path / "new"
    cases: list[tuple[list[object], str]] = [
        (["--out", new], "name at least one model"),
        ([quants[0]], "--out DIR is missing"),
        ([quants[0], "--out", full], "is there already"),
        ([quants[0], "--out", tmp_path / "none.log" / "x"], "takes no files"),
        ([quants[0], f"Q8_0={quants[1]}", "--out", new], "are both called Q8_0"),
        ([tmp_path / "missing.gguf", "--out", new], "missing.gguf"),
        ([f"a/b={quants[0]}", "--out", new], '"a/b" cannot be a label'),
        ([f"={quants[0]}", "--out", new], "is not of the form LABEL=FILE"),
        ([quants[0], "--imatrix", tmp_path / "no.dat", "--out", new], "no.dat is not a file"),
        ([quants[0], "--results", tmp_path / "none.log", "--out", new], "no results in 1 lines"),
        (
            [quants[0], "--split-max-size", "5X", "--out", new],
            '--split-max-size: "5X" has the size "5X"; write',
        ),
    ]
    for argv, expected in cases:
        code, _, err = run(capsys, "publish", *argv)
        assert code in (1, 2) and expected in err and "Traceback" not in err, (argv, err)
        assert not new.exists()
    assert (full / "file").read_text() == "mine"


def test_results_of_nobody_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, quants: list[Path]) -> None:
    log_file = tmp_path / "x.log"
    log_file.write_text(KLD.format(file="other.gguf", kld=0.1, ppl=11))
    argv = ["publish", quants[0], "--out", tmp_path / "out"]
    code, _, err = run(capsys, *argv, "--results", log_file)
    assert code == 0 and "results of other, which is not one of the quants" in err
    shutil.rmtree(tmp_path / "out")
    assert run(capsys, *argv, "--results", f"Q8_0={log_file}")[0] == 0
    assert "| 11 ± 0.411262 | 0.1 ± 0.000904 |" in (tmp_path / "out" / "README.md").read_text()


def test_nothing_is_left_of_a_run_that_fails(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, quants: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    before = sorted(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
        code, _, err = run(capsys, "publish", *quants, "--out", tmp_path / "out")
    assert code == 1 and "are free" in err and sorted(tmp_path.iterdir()) == before

    def no_space(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", no_space)
        code, _, err = run(capsys, "publish", *quants, "--out", tmp_path / "out")
    assert code == 1 and "No space left on device" in err and sorted(tmp_path.iterdir()) == before


def test_metadata_of_any_kind_end_in_a_card(capsys: pytest.CaptureFixture[str], tmp_path: Path, source: Path) -> None:
    """Texts that are not UTF-8, and values of a type that the card has no use for, do not stop the work."""
    file, path = open_gguf(source), tmp_path / "odd" / "Tiny-F16.gguf"
    path.parent.mkdir()
    keys = file.typed_metadata() | {
        "general.license": ["mit"], "general.tags": ["caf\udce9", "ok"], "general.languages": "en"
    }  # fmt: skip
    with GGUFWriter(path, keys, tensor_specs(file)) as writer:
        copy_tensors(file, writer, lambda n: None)
    code, _, err = run(capsys, "publish", path, "--out", tmp_path / "out")
    assert code == 0, err
    found = front_matter((tmp_path / "out" / "README.md").read_text(encoding="utf-8"))
    assert found == {"tags": ["gguf", "caf?", "ok"]}
