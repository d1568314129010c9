"""Completion in shells: the scripts, run in the shells that are there, and what they ask of the program."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ikcli import main, manual
from ikcli.cli import completion as _completion
from ikcli.cli.app import completions
from ikcli.cli.table import BY_NAME, COMMANDS

CASES = [
    ("ik sw", {"sweep-bench", "sweep-bench-plot"}),
    ("ik sweep-bench --ctx", {"--ctx-size"}),
    ("ik plan -ctk q8", {"q8_0", "q8_KV"}),
    ("ik serve --hf-r", {"--hf-repo", "--hf-repo-draft"}),
    ("ik help plac", {"placement"}),
    ("ik pull --", {"--list", "--ctx-size", "--checkpoint", "--hf-file", "--hf-token", "--offline", "--json"}),
]


@pytest.fixture
def ik_in_path(tmp_path: Path) -> dict[str, str]:
    """An environment in which `ik` is this program."""
    program = tmp_path / "bin" / "ik"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ikcli "$@"\n')
    program.chmod(0o755)
    return os.environ | {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}


def shell(name: str, script: str, environment: dict[str, str], *options: str) -> list[str]:
    """Lines that a shell prints for a script; skips where there is no such shell."""
    if shutil.which(name) is None:
        pytest.skip(f"no {name}")
    done = subprocess.run([name, *options, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.splitlines()


def script(capsys: pytest.CaptureFixture[str], name: str) -> str:
    assert main.main(["--show-completion", name]) == 0
    return capsys.readouterr().out


def test_bash(capsys: pytest.CaptureFixture[str], ik_in_path: dict[str, str]) -> None:
    """The function that the script registers, called as bash calls it."""
    lines = [script(capsys, "bash"), "complete -p ik"]
    for line, _ in CASES:
        words = " ".join(f"'{word}'" for word in line.split(" "))
        lines += [f"COMP_WORDS=({words}); COMP_CWORD={len(line.split(' ')) - 1}; _ik_completion ik"]
        lines += ['echo "= ${COMPREPLY[*]}"']
    registered, *found = shell("bash", "\n".join(lines), ik_in_path, "--norc")
    assert registered == "complete -o default -F _ik_completion ik"
    assert [set(answer.removeprefix("= ").split()) for answer in found] == [words for _, words in CASES]


def test_fish(capsys: pytest.CaptureFixture[str], ik_in_path: dict[str, str]) -> None:
    text = script(capsys, "fish")
    for line, expected in CASES:
        found = shell("fish", f"{text}\ncomplete -C '{line}'", ik_in_path, "--no-config")
        assert {answer.split("\t")[0] for answer in found} == expected


def test_zsh_reads_the_script_and_the_answers(capsys: pytest.CaptureFixture[str], ik_in_path: dict[str, str]) -> None:
    assert not shell("zsh", f"compdef() {{ :; }}\n{script(capsys, 'zsh')}", ik_in_path, "-f")
    for line, expected in CASES:
        asked = "_TYPER_COMPLETE_ARGS=$words _IK_COMPLETE=complete_zsh ik | sed 's/_arguments/print -r --/'"
        found = "\n".join(shell("zsh", f"words='{line}'; eval \"$({asked})\"", ik_in_path, "-f"))
        assert all(f'"{word}"' in found for word in expected), found


@pytest.mark.parametrize("name", ["zsh", "fish"])
def test_answers_have_one_line_each(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_IK_COMPLETE", f"complete_{name}")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "ik serve -")
    with pytest.raises(SystemExit):
        main.main([])
    lines = capsys.readouterr().out.splitlines()
    expected = {item.value for item in completions("serve", [], "-")}
    assert len(lines) == len(expected) > 100
    if name == "fish":
        assert {line.split("\t")[0] for line in lines} == expected


def test_topics_and_commands_are_completed() -> None:
    assert {c.value for c in completions("help", [], "")} == {*manual.pages(), *BY_NAME}
    assert not list(completions("help", ["pull"], "p"))


def test_every_command_completes_its_options() -> None:
    for info in COMMANDS:
        assert list(completions(info.name, [], "-")) or info.name == "help", info.name


def test_shells(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "complete_zsh" in script(capsys, "zsh") and "complete_powershell" in script(capsys, "powershell")
    monkeypatch.setattr(_completion, "_this_shell", lambda: "fish")
    assert main.main(["--show-completion"]) == 0 and "complete_fish" in capsys.readouterr().out
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main.main(["--install-completion", "fish"]) == 0
    (installed,) = tmp_path.rglob("ik.fish")
    assert str(installed) in capsys.readouterr().out and "complete_fish" in installed.read_text()


def test_shells_that_are_none(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main.main(["--show-completion", "tcsh"]) == 2
    assert "no completion for tcsh; name one: ik --show-completion bash|zsh" in capsys.readouterr().err
    monkeypatch.setattr(_completion, "_this_shell", lambda: "")
    assert main.main(["--install-completion"]) == 2
    assert "cannot tell the shell; name one: ik --install-completion bash" in capsys.readouterr().err
    assert main.main(["--show-completion", "bash", "zsh"]) == 2
