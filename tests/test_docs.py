"""Documents that are generated or that name commands must agree with the code."""

from __future__ import annotations

import re
from pathlib import Path

from ikcli.commands._help import parameters_markdown
from ikcli.commands._options import all_options
from ikcli.commands._table import BY_NAME, COMMANDS

ROOT = Path(__file__).resolve().parents[1]


def test_parameters_are_current() -> None:
    text = (ROOT / "docs" / "parameters.md").read_text(encoding="utf-8")
    assert text == parameters_markdown(), "run python tools/gen_docs.py"


def test_parameters_name_every_spelling() -> None:
    text = parameters_markdown()
    for bound in all_options():
        for name in (*bound.option.names, *bound.option.negative):
            assert f"`{name}`" in text
    for line in text.splitlines():
        if line.startswith("| `"):
            assert len(re.findall(r"(?<!\\)\|", line)) == 6, line


def test_readme_names_commands_that_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\bik ([a-z-]+)", text))
    assert named <= {*BY_NAME, "--help"}, named
    for info in COMMANDS:
        if info.module:
            assert f"`{info.name}`" in text or f"ik {info.name}" in text
