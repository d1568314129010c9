"""The commit that `ik version` states: of a build, of a checkout of this project, and of nothing else."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import ikcli
from ikcli import commit as module
from ikcli.commit import RECORDED, commit
from ikcli.main import main

HASH, OTHER = "0123456789abcdef0123456789abcdef01234567", "f" * 40


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A checkout of this project, on a branch."""
    made = tmp_path / "ik" / "ikcli"
    (made / "data").mkdir(parents=True)
    (made.parent / "pyproject.toml").write_text('[project]\nname = "ikcli"\n')
    write(made.parent / ".git", {"HEAD": "ref: refs/heads/main\n", "refs/heads/main": HASH + "\n"})
    return made


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_a_checkout(package: Path) -> None:
    git = package.parent / ".git"
    assert commit(package) == HASH
    (git / "HEAD").write_text(OTHER + "\n")
    assert commit(package) == OTHER
    (git / "HEAD").write_text("ref: refs/heads/packed\n")
    assert commit(package) == ""
    (git / "packed-refs").write_text(
        f"# pack-refs with: peeled\n{HASH} refs/heads/packed-more\n{OTHER} refs/heads/packed\n"
    )
    assert commit(package) == OTHER


def test_a_worktree(package: Path, tmp_path: Path) -> None:
    other = tmp_path / "tree" / "ikcli"
    other.mkdir(parents=True)
    main_git = package.parent / ".git"
    write(main_git / "worktrees" / "tree", {"HEAD": "ref: refs/heads/topic\n", "commondir": "../..\n"})
    write(main_git, {"refs/heads/topic": OTHER + "\n"})
    write(
        other.parent, {"pyproject.toml": '[project]\nname = "ikcli"\n', ".git": f"gitdir: {main_git}/worktrees/tree\n"}
    )
    assert (commit(other), commit(package)) == (OTHER, HASH)


def test_a_repository_of_something_else_is_not_asked(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package.parent / "pyproject.toml").write_text('[project]\nname = "mine"\n')
    assert commit(package) == ""
    (package.parent / "pyproject.toml").unlink()
    assert commit(package) == ""
    deeper = package / "site-packages" / "ikcli"  # an environment below a checkout
    deeper.mkdir(parents=True)
    assert commit(deeper) == ""


@pytest.mark.parametrize(("text", "known"), [(HASH + "\n", HASH), ("not a hash\n", ""), ("", ""), ("\u00e9", "")])
def test_a_build_has_it_recorded(package: Path, text: str, known: str) -> None:
    (package.parent / ".git" / "HEAD").write_text(OTHER)
    (package / RECORDED).write_text(text, encoding="utf-8")
    assert commit(package) == (known or (OTHER if text == "\u00e9" else ""))


def test_builds_record_it(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`setup.py` writes what the checkout says into wheel and source distribution."""
    import setuptools

    monkeypatch.setattr(setuptools, "setup", lambda **settings: None)
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1]))
    monkeypatch.delitem(sys.modules, "setup", raising=False)
    setup = importlib.import_module("setup")
    monkeypatch.delitem(sys.modules, "setup")
    (package / "commit.py").write_text(Path(module.__file__).read_text())
    monkeypatch.setattr(setup, "ROOT", package.parent)
    setup.record_commit(tmp_path / "build" / "ikcli")
    assert commit(tmp_path / "build" / "ikcli") == HASH
    (package.parent / ".git" / "HEAD").unlink()
    setup.record_commit(tmp_path / "none" / "ikcli")
    assert not (tmp_path / "none").exists()


def test_the_version_states_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for known, line in ((HASH, f"ik {ikcli.__version__} (commit {HASH[:12]})"), ("", f"ik {ikcli.__version__}")):
        monkeypatch.setattr(module, "commit", lambda known=known: known)
        for argv in (["version"], ["--version"]):
            assert main(argv) == 0
            assert capsys.readouterr().out == line + "\n"
