"""Importance matrices by several workers: the bytes that one process writes, whatever dies, and from a journal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import tiny_model
from fleet_deaths import Deadly, change_workers, kill_driver, other_input
from gguf_files import write_model

from ikcli.errors import FormatError
from ikcli.imatrix import fleet as fleet_imatrix
from ikcli.imatrix.fleet import ImatrixSetup, open_measurer
from ikcli.imatrix.matrix import ImatrixParams, groups
from ikcli.imatrix.sums import StreamSums, Sums
from ikcli.main import main
from ikcli.settings.run import RunConfig, default_text

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Eleven windows, so three groups, of the bundled model."""
    path = tmp_path_factory.mktemp("imatrix") / "text.txt"
    path.write_text(default_text().read_text("utf-8")[20000:26000], "utf-8")
    return ["imatrix", "-f", str(path), "-c", "64", "-t", "2", "--chunks", "11", "-lsim"]


@pytest.fixture(scope="module")
def alone(run: list[str]) -> bytes:
    path = Path(run[2]).with_name("alone.gguf")
    assert main([*run, "-o", str(path), "--save-frequency", "6"]) == 0
    return path.read_bytes()


def written(words: list[str], path: Path) -> bytes:
    assert main([*words, "-o", str(path)]) == 0
    return path.read_bytes()


def test_workers_write_the_same_bytes(run: list[str], alone: bytes, tmp_path: Path, capsys: Capture) -> None:
    out, journal = tmp_path / "i.gguf", tmp_path / "j.jsonl"
    words = [*run, "--save-frequency", "6"]
    capsys.readouterr()
    written(words, tmp_path / "here.gguf")
    printed = capsys.readouterr().out
    assert printed.startswith("[1]") and "[11]" in printed and "sorted layer importances" in printed
    assert written([*words, "--workers", "2", "--journal", str(journal)], out) == alone
    assert capsys.readouterr().out == printed
    assert (tmp_path / "i.gguf.at_6").read_bytes() == (tmp_path / "here.gguf.at_6").read_bytes()
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + len(groups(11, ImatrixParams(stops=(6, 10)))) == 1 + 5
    journal.write_bytes(b"".join([lines[0], lines[3], lines[1]]) + lines[2][:30])
    assert written([*words, "--journal", str(journal)], out) == alone
    journal.with_name("j.jsonl.data").write_bytes(b"x" * 1000)
    capsys.readouterr()
    assert written([*words, "--journal", str(journal)], out) == alone
    assert "lacks the results of 5 units" in capsys.readouterr().err
    assert main([*words, "--no-ppl", "--journal", str(journal), "-o", str(out)]) == 2
    assert "ppl is True there and False now" in capsys.readouterr().err


def test_experts_by_any_number_of_threads(tmp_path: Path) -> None:
    model = tiny_model("qwen3moe", expert_count=8, expert_used_count=3, expert_feed_forward_length=48)
    path = write_model(model, tmp_path / "moe.gguf")
    rows = np.random.default_rng(3).integers(0, 96, (9, 16)).astype(np.int32)
    params = ImatrixParams(n_ctx=16, ppl=False)
    found = []
    for n in (1, 2):
        config = RunConfig(command="imatrix", model=path, n_ctx=16, n_threads=n, n_threads_batch=n, warmup=False)
        with open_measurer(ImatrixSetup(config, params, None, quiet=True)) as sums:
            found.append([sums(rows[i : i + 4])["data"] for i in range(0, 9, 4)])
    assert found[0] == found[1]


@pytest.mark.slow  # shared by all commands: test_fleet.py, and with one of them test_perplexity_fleet.py
def test_a_worker_that_dies(
    run: list[str], alone: bytes, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_workers(monkeypatch, fleet_imatrix, lambda f: Deadly(f, tmp_path))
    assert written([*run, "--save-frequency", "6", "--workers", "2"], tmp_path / "i.gguf") == alone
    assert capsys.readouterr().err.count("its unit is done again") == 1 and (tmp_path / "died").exists()


@pytest.mark.slow  # shared by all commands: test_fleet.py, and with one of them test_perplexity_fleet.py
def test_a_driver_that_is_killed(run: list[str], tmp_path: Path) -> None:
    journal = tmp_path / "j.jsonl"
    words = [*run, "--chunks", "-1"]
    known = kill_driver([*words, "-o", str(tmp_path / "i.gguf"), "--workers", "2", "--journal", str(journal)], journal)
    wanted = written(words, tmp_path / "alone.gguf")
    assert written([*words, "--journal", str(journal)], tmp_path / "i.gguf") == wanted
    assert 2 < known <= journal.read_bytes().count(b"\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers", "2", "--covariance", "c.gguf"], "--covariance needs one process"),
        (["--workers", "2", "--profile"], "--profile"),
        (["--journal", "nowhere/j.jsonl"], "cannot write the journal"),
    ],
)
def test_wrong_input_ends_in_a_sentence(
    words: list[str], message: str, run: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*run, *words, "-o", "i.dat"]) in (1, 2)
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err


def test_workers_refuse_another_model(run: list[str], tmp_path: Path, capsys: Capture, monkeypatch: Any) -> None:
    change_workers(monkeypatch, fleet_imatrix, lambda f: other_input(f, 0))
    assert main([*run, "--workers", "2", "-o", str(tmp_path / "i.dat")]) == 1
    assert "another file than that of the command" in capsys.readouterr().err


def test_sums_keep_all_bits(rng: np.random.Generator) -> None:
    streams = [
        StreamSums(("a", "b"), rng.normal(size=(1, 5)), np.array([3.0])),
        StreamSums(("c",), rng.normal(size=(2, 4)), np.array([0.0, 2.0]), experts=True),
    ]
    sums = Sums(streams, {("layer", 0): (0.1, 7)})
    again = Sums.from_bytes(sums.to_bytes())
    assert again.similarity == sums.similarity and again.unseen_experts() == {"c": [0]}
    for found, wanted in zip(again.streams, streams, strict=True):
        assert (
            found.names == wanted.names and (found.sums == wanted.sums).all() and (found.counts == wanted.counts).all()
        )
    total = Sums()
    total.add(Sums.from_bytes(sums.to_bytes()))
    total.add(again)
    assert (total.streams[1].sums == 2 * streams[1].sums).all() and total.similarity == {("layer", 0): (0.2, 14)}
    with pytest.raises(FormatError, match="other weights"):
        total.add(Sums([streams[1], streams[0]]))
