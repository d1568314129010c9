"""The error table of types and calibration by several workers: what one process finds, whatever dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quant_models
from fleet_deaths import Deadly, change_workers, kill_driver, other_input

from ikcli.main import main
from ikcli.quant.imatrix_file import Imatrix, ImatrixEntry, write_gguf
from ikcli.settings.run import default_model, default_text
from ikcli.study import fleet_calibrate, fleet_stats

Capture = pytest.CaptureFixture[str]
UP = "blk.0.ffn_up_exps.weight"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("stats")
    model = quant_models.write_model(folder / "m.gguf")
    values = np.linspace(0.5, 3, 4 * 256, dtype=np.float32).reshape(4, 256)
    write_gguf(Imatrix({UP: ImatrixEntry(values, np.ones(4, np.float32))}, n_chunks=1), folder / "i.gguf")
    words = ["quantize-stats", "-m", str(model), "--imatrix", str(folder / "i.gguf"), "--type", "q4_K,iq2_k,q8_0"]
    return [*words, "--output-format", "jsonl", "-t", "2", "--rows", "0"]


def printed(words: list[str], capsys: Capture) -> str:
    capsys.readouterr()
    assert main(words) == 0
    return capsys.readouterr().out


def test_workers_and_journals_print_the_same(run: list[str], tmp_path: Path, capsys: Capture) -> None:
    alone, journal = printed(run, capsys), tmp_path / "j.jsonl"
    assert len(alone.splitlines()) > 20 and '"weighted": null' in alone and '"entropy"' in alone
    assert printed([*run, "--workers", "2", "--journal", str(journal)], capsys) == alone
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([lines[0], *lines[:4:-2]]) + lines[2][:30])
    assert printed([*run, "--journal", str(journal)], capsys) == alone
    assert main([*run, "--rows", "16", "--journal", str(journal)]) == 2
    assert "rows is 0 there and 16 now" in capsys.readouterr().err


@pytest.mark.slow  # shared by all commands: test_fleet.py, and with one of them test_perplexity_fleet.py
def test_a_worker_that_dies(run: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = printed(run, capsys)
    change_workers(monkeypatch, fleet_stats, lambda f: Deadly(f, tmp_path))
    assert main([*run, "--workers", "2"]) == 0
    out, err = capsys.readouterr()
    assert out == alone and err.count("its unit is done again") == 1


@pytest.mark.slow  # shared by all commands: test_fleet.py, and with one of them test_perplexity_fleet.py
def test_a_driver_that_is_killed(run: list[str], tmp_path: Path, capsys: Capture) -> None:
    journal = tmp_path / "j.jsonl"
    words = [*run, "--journal", str(journal)]
    known = kill_driver([*words, "--workers", "2"], journal)
    assert printed(words, capsys) == printed(run, capsys)
    assert 2 < known <= journal.read_bytes().count(b"\n")


def test_workers_refuse_other_files(run: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    change_workers(monkeypatch, fleet_stats, lambda f: other_input(f, 1))
    assert main([*run, "--workers", "2"]) == 1
    assert "i.gguf on this node is another file than that of the command" in capsys.readouterr().err


# --- calibration ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def calibrate(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    text = tmp_path_factory.mktemp("calibrate") / "text.txt"
    text.write_text(default_text().read_text("utf-8")[20000:24000], "utf-8")
    words = ["quantize", "--target-bpw", "5", "--candidates", "q4_0,q5_0,q8_0", "--target-rows", "16"]
    return [*words, "--calibrate", str(text), "--calibrate-chunks", "1", "--calibrate-groups", "1", "--dry-run"]


def recipe(words: list[str], path: Path) -> str:
    assert main([*words, "--write-recipe", str(path), str(default_model()), "unused.gguf"]) == 0
    return path.read_text()


@pytest.mark.slow  # measures a model in processes
def test_calibration_by_workers(
    calibrate: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, journal = recipe(calibrate, tmp_path / "alone"), tmp_path / "j.jsonl"
    kept = Path(f"{journal}.calibrate")
    change_workers(monkeypatch, fleet_calibrate, lambda f: Deadly(f, tmp_path))
    capsys.readouterr()
    assert recipe([*calibrate, "--workers", "2", "--journal", str(journal)], tmp_path / "two") == alone
    assert capsys.readouterr().err.count("its unit is done again") == 1
    lines = kept.read_bytes().splitlines(keepends=True)
    kept.write_bytes(b"".join([*lines[:4], *lines[5:]]))
    assert recipe([*calibrate, "--journal", str(journal)], tmp_path / "again") == alone
    assert kept.read_bytes().count(b"\n") == len(lines)


def test_calibration_refuses_another_text(calibrate: list[str], capsys: Capture, monkeypatch: Any) -> None:
    change_workers(monkeypatch, fleet_calibrate, lambda f: other_input(f, -1))
    assert main([*calibrate, "--workers", "2", str(default_model()), "unused.gguf"]) == 1
    assert "text.txt on this node is another file than that of the command" in capsys.readouterr().err
