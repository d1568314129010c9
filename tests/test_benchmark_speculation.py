"""The script that measures drafts: the hook that replaces choices, the table, and a run."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from benchmark_scripts import load


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("speculation")


def test_choices_are_replaced_by_position(script: ModuleType) -> None:
    """A draft is as long as ever, right where it is to be, and never beyond the text."""

    def draft(wanted: Any) -> None:
        for w in wanted:
            w.found += [0] * 4

    inner = SimpleNamespace(costs=True, sees_pictures=False, prepare=None, finished=None, close=None, draft=draft)
    drafter = script.Agreeing(inner, [True, False, True, True, False])
    drafter.tokens = [10, 11, 12, 13, 14]
    for n_known, found in ((0, [10, 10, 12, 13]), (2, [12, 13, 15])):
        wanted = SimpleNamespace(history=[0] * (script.N_PROMPT + n_known), found=[])
        drafter.draft([wanted])
        assert wanted.found == found


def test_table(script: ModuleType) -> None:
    rows = [
        script.Row("glm4moe", "mtp", "0 % right", 50.0, {"1": 0.5, "4": 0.25}, 0.99, 0.0, 0.01),
        script.Row("demo", "suffix", "T = 0", 2000.0, {"1": 1.0, "4": 2.0}, 1.9, 0.8, 0.5, {"plain": 9.0, "4": 1.5}),
    ]
    head, _, first, second = (line.split(" | ") for line in script.table(rows).splitlines())
    assert dict(zip(head, first, strict=True))["of the best"] == "0.99"
    cells = dict(zip(head, second, strict=True))
    assert (cells["chosen"], cells["of the best"], cells["reference t/s"]) == ("**1.90**", "0.95", "9.0")
    assert second[-1] == "1.50 |" and first[-1] == " |"


@pytest.mark.slow("generates with the demo model in every setting")
def test_a_run(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "rows.json"
    argv = ["--spec", "suffix", "--texts", "1", "-r", "1", "-n", "24", "--lengths", "2", "--json", str(results)]
    assert script.main(argv) == 0
    assert [row["text"] for row in json.loads(results.read_text())] == ["T = 0", "T = 1"]
    assert script.main([*argv, "--only-print"]) == 0
    assert capsys.readouterr().out.count("| demo | suffix | T = ") == 4


@pytest.mark.slow("makes a random model with a head, and generates with it in every setting")
def test_a_run_of_a_family(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(script.FAMILIES, "deepseek2", ("--layers", "1", "--experts", "4"))
    results = tmp_path / "rows.json"
    argv = ["--families", "deepseek2", "--folder", str(tmp_path), "--agreement", "0,100", "--lengths", "2"]
    argv += ["--texts", "1", "-r", "1", "-n", "32", "--json", str(results), "--plot", str(tmp_path / "plot.svg")]
    assert script.main(argv) == 0
    none, all_ = json.loads(results.read_text())
    assert all_["fixed"]["2"] > none["fixed"]["2"]
    assert (tmp_path / "plot.svg").stat().st_size
