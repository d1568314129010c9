"""The script that measures drafts: the hook that replaces choices, the table, and a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

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
    drafter.n_prompt, drafter.tokens = 7, [10, 11, 12, 13, 14]
    for n_known, found in ((0, [10, 10, 12, 13]), (2, [12, 13, 15])):
        wanted = SimpleNamespace(history=[0] * (7 + n_known), found=[])
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
    rows[0].note = "llama-server does not run it"
    assert script.table(rows).endswith(" |\n\nllama-server does not run it.")


def test_results_are_kept(script: ModuleType, tmp_path: Path) -> None:
    """A row is measured once; again if it lacks a length or figures of the other program."""
    file = tmp_path / "rows.json"
    row = script.Row("glm4moe", "mtp", "0 % right", 50.0, {"1": 0.5, "4": 0.25}, 0.99)
    script.Results(file).add(row)
    known = script.Results(file)
    assert known.rows == [row]

    def missing(*, lengths: Sequence[int] = (1, 4), again: bool = False, reference: bool = False) -> bool:
        found: bool = known.missing(row.key, SimpleNamespace(lengths=lengths, again=again), reference=reference)
        return found

    assert not missing() and missing(lengths=(1, 2)) and missing(again=True) and missing(reference=True)
    known.add(replace(row, note="llama-server does not run it"))
    assert not missing(reference=True)
    assert known.missing(("glm4moe", "mtp", "50 % right"), SimpleNamespace(again=False), reference=False)


def test_a_program_that_does_not_run_the_model(script: ModuleType, tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\necho no such tensor\nexit 3\n")
    program.chmod(0o755)
    options = SimpleNamespace(reference=tmp_path, n_gen=4, threads=1, lengths=[1], rounds=1)
    found, note = script.measure_reference(tmp_path / "m.gguf", "mtp", [SimpleNamespace(prompt=(1,))], options)
    assert (found, note) == ({}, "llama-server does not run m.gguf")


def test_plot(script: ModuleType) -> None:
    rows = [script.Row("deepseek2", "mtp", f"{x} % right", 50.0, {"4": x / 50}, 1.0) for x in (95, 0, 50)]
    root = ElementTree.fromstring(script.plot([*rows, script.Row("demo", "suffix", "T = 0", 9.0, {"2": 1.0}, 1.0)]))
    name = "{http://www.w3.org/2000/svg}"
    shown = {g.get("data-series"): g.findall(f"{name}circle/{name}title") for g in root.iter(f"{name}g")}
    assert [t.text for t in shown["4 fixed"]] == ["4 fixed, 0 %: 0.00", "4 fixed, 50 %: 1.00", "4 fixed, 95 %: 1.90"]
    assert {"chosen", "plain"} <= {*shown} and "2 fixed" not in shown
    with pytest.raises(SystemExit, match="draws families"):
        script.plot([])


@pytest.mark.slow("generates with the demo model in every setting")
def test_a_run(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "rows.json"
    argv = ["--spec", "suffix", "--texts", "1", "-r", "1", "-n", "24", "--lengths", "2", "--json", str(results)]
    assert script.main(argv) == 0
    assert [row["text"] for row in json.loads(results.read_text())] == ["T = 0", "T = 1"]
    assert script.main([*argv, "--only-print"]) == 0
    assert capsys.readouterr().out.count("| demo | suffix | T = ") == 4


@pytest.mark.slow("makes a random model with a head, and generates with it in every setting")
def test_a_run_of_a_family(script: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "rows.json"
    argv = ["--families", "deepseek2", "--folder", str(tmp_path), "--agreement", "0,100", "--lengths", "2"]
    argv += ["--texts", "1", "-r", "1", "-n", "32", "--json", str(results), "--plot", str(tmp_path / "plot.svg")]
    argv += ["--layers", "1"]
    assert script.main(argv) == 0
    none, all_ = json.loads(results.read_text())
    assert all_["fixed"]["2"] > none["fixed"]["2"]
    assert "deepseek2" in (tmp_path / "plot.svg").read_text()
    capfd.readouterr()
    assert script.main(argv) == 0
    assert not capfd.readouterr().err, "nothing is measured again"
