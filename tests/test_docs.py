"""Documents that are generated or that name commands must agree with the code."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from ikcli.cli.parser import all_options
from ikcli.cli.table import BY_NAME, COMMANDS
from ikcli.settings.tools import TOOLS

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def parameters(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("gen_docs").page()


def test_parameters_are_current(parameters: str) -> None:
    text = (ROOT / "docs" / "parameters.md").read_text(encoding="utf-8")
    assert text == parameters, "run python tools/gen_docs.py"


def test_parameters_name_every_spelling(parameters: str) -> None:
    for bound in (*all_options(), *(bound for command in TOOLS for bound in all_options(command))):
        for name in (*bound.option.names, *bound.option.negative):
            assert f"`{name}`" in parameters
    both, others = parameters.split("# Commands that run no model")
    model_runs, elsewhere = both.split("## Other options of llama.cpp")
    for text, n_bars in ((model_runs, 6), (elsewhere, 3), (others, 5)):
        for line in text.splitlines():
            if line.startswith("| `"):
                assert len(re.findall(r"(?<!\\)\|", line)) == n_bars, line


def test_readme_names_commands_that_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\bik ([a-z-]+)", text))
    assert named <= {*BY_NAME, "--help", "--install-completion"}, named
    for info in COMMANDS:
        assert f"`{info.name}`" in text or f"ik {info.name}" in text


def test_reading_path_is_as_short_as_it_says() -> None:
    """From the command line to the executor, in files that exist."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [\w ]+ \| (\d+) \| (`.*`) \|$", text, re.M)
    assert len(rows) == 4
    total = 0
    for stated, files in rows:
        paths = [ROOT / "ikcli" / name for name in re.findall(r"`([^`]+)`", files)]
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
        assert lines == pytest.approx(int(stated), rel=0.1), files
        total += lines
    assert total <= 3500
