"""Documents that are generated or that name commands must agree with the code."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest

from ikcli.cli.parser import all_options, parse
from ikcli.cli.table import BY_NAME, COMMANDS
from ikcli.convert.archs import by_class
from ikcli.models import ARCHITECTURES
from ikcli.settings.tools import TOOLS

ROOT = Path(__file__).resolve().parents[1]
LATER_NAMES = tuple((Path(__file__).parent / "data" / "later_architectures.txt").read_text().split())
"""Architectures of llama.cpp (late 2026) that the gguf package does not name yet."""


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


def test_readme_has_ten_examples_that_are_command_lines() -> None:
    block = (ROOT / "README.md").read_text(encoding="utf-8").split("## Ten examples\n\n```\n")[1].split("```")[0]
    assert len(block.splitlines()) == 10
    for line in block.splitlines():
        program, command, *argv = shlex.split(line, comments=True)
        parsed = parse(command, argv)
        assert program == "ik" and not parsed.ignored and not parsed.unsupported, line


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
    assert total <= 3910


def test_architecture_names_what_exists() -> None:
    """`file.py` is a file and `file.py:name` or `file.py:Class.method` a definition in it."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:\w+/)+\w+\.py|references\.py)(?::([\w.]+))?`", text)
    assert len(named) > 100
    for file, name in named:
        path = next((p for p in (ROOT / "ikcli" / file, ROOT / file) if p.is_file()), None)
        assert path is not None, f"{file} does not exist"
        scope: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
        for part in name.split(".") if name else ():
            found = [n for n in ast.iter_child_nodes(scope) if getattr(n, "name", "") == part]
            assert found, f"{file} has no {name}"
            scope = found[0]


def test_architecture_has_every_package() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("\n## Read one run")[0]
    folders = [path.parent.name for path in (ROOT / "ikcli").glob("*/__init__.py")]
    assert folders and not [name for name in folders if not re.search(rf"`{name}[/`]", text)]


def test_links_between_pages_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for target, anchor in re.findall(r"\]\(([\w./-]*\.md)?(?:#([\w-]+))?\)", text):
            path = page.parent / target if target else page
            assert path.is_file(), f"{page.name} links to {target}"
            titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.M)
            known = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert not anchor or anchor in known, f"{page.name} links to {target}#{anchor}"


def test_sentences_are_plain() -> None:
    """No "is no ..." and the like, which read as translated: say what is missing, who acts, or what a thing does."""
    files = [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")]
    files += [path for path in (ROOT / "ikcli").glob("**/*") if path.suffix in (".py", ".md", ".txt", ".html", ".js")]
    wrong = re.compile(r"\bis no [a-z]+\b|\bwhoever\b|Answers to")
    found = {str(path.relative_to(ROOT)): wrong.findall(path.read_text(encoding="utf-8")) for path in files}
    assert {name: words for name, words in found.items() if words} == {}


def test_models_lists_every_architecture_of_llama_cpp() -> None:
    """Those that run are named before "What is not supported", all others after it."""
    from gguf.constants import MODEL_ARCH_NAMES

    text = (ROOT / "docs" / "models.md").read_text()
    here, elsewhere = (set(re.findall(r"`([^`]+)`", part)) for part in text.split("## What is not supported"))
    assert set(ARCHITECTURES) <= here and not set(ARCHITECTURES) & elsewhere
    assert {*MODEL_ARCH_NAMES.values(), *LATER_NAMES} - set(ARCHITECTURES) <= elsewhere
    classes = set((Path(__file__).parent / "data" / "causal_lm_classes.txt").read_text().split())  # of transformers
    assert classes - set(by_class()) == classes & elsewhere
    assert f"converts {len(classes & set(by_class()))} classes" in text.replace("\n", " ")
