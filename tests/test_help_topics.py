"""`ik help`: every page of docs/ is a topic, unknown ones are suggested."""

from __future__ import annotations

from pathlib import Path

import pytest

from ikcli import main, manual
from ikcli.cli.table import COMMANDS, GROUPS

DOCS = Path(__file__).resolve().parents[1] / "docs"
COMMAND_FILES = DOCS.parent / "ikcli" / "commands"


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main.main(list(argv))
    return code, *capsys.readouterr()


def test_all_pages_are_topics(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "help")
    topics = out.partition("Topics (ik help TOPIC):\n")[2]
    assert code == 0
    assert [line.split()[0] for line in topics.splitlines()] == sorted(p.stem for p in DOCS.glob("*.md"))
    assert "Models by name" in topics


def test_all_commands_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "--help")[1]
    assert all(f"\n  {info.name}" in text for info in COMMANDS) and "version yet" not in text


def test_commands_are_grouped_by_task_and_start_with_what_newcomers_want(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = run(capsys, "--help")[1].split("\n\n")[2:-1]
    listed = [[line.split()[0].rstrip(",") for line in block.splitlines()[1:]] for block in blocks]
    assert [block.splitlines()[0] for block in blocks] == [f"{title}:" for title, _ in GROUPS]
    assert listed == [[info.name for info in members] for _, members in GROUPS]
    assert listed[0][:3] == ["chat", "serve", "pull"]
    names = [info.name for info in COMMANDS]
    assert len(names) == len(set(names)) == len(list(COMMAND_FILES.glob("[a-z]*.py")))
    assert all(len(line) <= 100 for block in blocks for line in block.splitlines())


def test_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("placement", "PLACEMENT", "placement.md"):
        assert run(capsys, "help", name) == (0, (DOCS / "placement.md").read_text(encoding="utf-8"), "")


def test_a_page_about_a_command_names_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "help", "serve")
    assert code == 0 and out == (DOCS / "serve.md").read_text(encoding="utf-8")
    assert err == "options: ik serve --help\n"
    assert run(capsys, "help", "warmup") == run(capsys, "warmup", "--help")


def test_on_a_terminal_it_is_rendered(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    out = run(capsys, "help", "pull")[1]
    assert "Models by name" in out and "# Models" not in out and "```" not in out


def test_an_unknown_topic_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "help", "placment")
    assert (code, out) == (2, "") and "no topic placment; did you mean placement?" in err
    assert "did you mean sweep-bench?" in run(capsys, "help", "sweep-bnech")[2]
    assert run(capsys, "help", "a", "b")[0] == 2


def test_without_the_pages(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(manual, "_PACKAGE", tmp_path / "ikcli")
    code, _, err = run(capsys, "help", "placement")
    assert code == 1 and "not part of this installation" in err
