"""`ik embed`: forms of output, texts, mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ikcli import main

TEXTS = "Castle\nStronghold\nDog"


def run(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert main.main(["embed", *argv, "-t", "1"]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def numbers(line: str) -> list[float]:
    return [float(word) for word in line.split(":")[-1].split()]


def test_default_form(capsys: pytest.CaptureFixture[str]) -> None:
    one = run(capsys, "-p", "Castle", "--pooling", "mean")
    (vector,) = [numbers(line) for line in one.splitlines()]
    assert one.startswith("embedding 0: ") and len(vector) == 256 and np.linalg.norm(vector) == pytest.approx(1, 1e-4)
    lines = run(capsys, "-p", TEXTS, "--pooling", "mean").splitlines()
    assert len(numbers(lines[0])) == 16 and numbers(lines[0]) == pytest.approx(vector[:16], abs=2e-3)
    assert lines[3:7] == ["", "cosine similarity matrix:", "", "Castle Strong Dog    "]
    matrix = np.array([[float(x) for x in line.split()[:3]] for line in lines[7:]])
    assert (np.diag(matrix) == 1).all() and (matrix == matrix.T).all() and (matrix < 1.001).all()
    assert lines[8].endswith(" Stronghold")
    tokens = run(capsys, "-p", "Castle").splitlines()
    assert len(tokens) > 1 and len(numbers(tokens[1].replace("...", ""))) == 6
    assert "." not in run(capsys, "-p", "Castle", "--pooling", "last", "--embd-normalize", "0")


def test_json_forms(capsys: pytest.CaptureFixture[str]) -> None:
    pooled = ("-p", TEXTS, "--pooling", "last")
    found = json.loads(run(capsys, *pooled, "--embd-output-format", "json+"))
    assert [item["index"] for item in found["data"]] == [0, 1, 2] and len(found["cosineSimilarity"]) == 3
    plain = json.loads(run(capsys, *pooled, "--json"))
    assert plain["data"] == found["data"] and "cosineSimilarity" not in plain
    array = json.loads(run(capsys, *pooled, "--embd-output-format", "array"))
    assert array == [item["embedding"] for item in found["data"]]
    raw = run(capsys, *pooled, "--embd-output-format", "raw").splitlines()
    np.testing.assert_allclose([numbers(line) for line in raw], array, atol=1e-6)


def test_texts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text(TEXTS + "\n")
    form = ("--pooling", "last", "--embd-output-format", "array")
    wanted = run(capsys, "-p", TEXTS, *form)
    assert run(capsys, "-f", str(file), *form) == wanted
    assert run(capsys, "-p", TEXTS.replace("\n", "<#>"), "--embd-separator", "<#>", *form) == wanted
    assert run(capsys, "-p", TEXTS.replace("\n", "\t"), "--embd-separator", "\\t", *form) == wanted
    assert run(capsys, "-p", TEXTS, "-ub", "4", *form) != "[]"


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "-p TEXT or -f FILE" in run(capsys, code=2)
    assert "text 2 of 3 is empty" in run(capsys, "-p", "a\n\nb", code=2)
    assert "more than -c 4" in run(capsys, "-p", "Castle and Stronghold and Dog", "-c", "4", code=2)
    assert "cannot read" in run(capsys, "-f", "/nowhere/at all", code=1)
    assert "cannot rank" in run(capsys, "-p", "a", "--pooling", "rank", code=1)
    for wrong in (("--pooling", "best"), ("--embd-output-format", "xml"), ("--embd-normalize", "-2")):
        assert wrong[0] in run(capsys, "-p", "a", *wrong, code=2)
