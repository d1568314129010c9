"""Perplexity and KL divergence by several workers: what one process prints, whatever dies, and from a journal."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleet_deaths import Deadly, change_workers, kill_driver, other_input

from ikcli.commands import _kl_divergence
from ikcli.commands import perplexity as perplexity_command
from ikcli.main import main
from ikcli.measure import fleet as fleet_windows
from ikcli.settings.run import default_text


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Eight windows and a half, two side by side; the last group has one."""
    path = tmp_path_factory.mktemp("ppl") / "text.txt"
    path.write_text(default_text().read_text("utf-8")[20000:26000], "utf-8")
    return ["perplexity", "-f", str(path), "-c", "64", "-b", "128", "-t", "2", "--chunks", "9"]


Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Final lines show every bit."""
    monkeypatch.setattr(perplexity_command, "final_line", lambda r: repr((r.ppl, r.error, r.mean_nll, r.n_tokens)))
    monkeypatch.setattr(_kl_divergence, "statistics", lambda r: repr((r.summary, r.positions.kld.tolist())))


def printed(words: list[str], capsys: Capture) -> str:
    capsys.readouterr()
    assert main(words) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def base(run: list[str]) -> list[str]:
    """The command that compares a run with another cache type."""
    path = Path(run[2]).with_name("base.kld")
    assert main([*run, "--kl-divergence-base", str(path)]) == 0
    return [*run, "--kl-divergence-base", str(path), "--kl-divergence", "-ctk", "q4_0"]


def test_workers_and_journals_print_the_same(run: list[str], tmp_path: Path, capsys: Capture) -> None:
    alone = printed([*run, "--ppl-output-type", "1"], capsys)
    assert len(alone.splitlines()) == 11
    journal = tmp_path / "j.jsonl"
    assert printed([*run, "--ppl-output-type", "1", "--workers", "2", "--journal", str(journal)], capsys) == alone
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 5
    journal.write_bytes(b"".join([lines[0], lines[3], lines[1]]) + lines[2][:30])
    assert printed([*run, "--ppl-output-type", "1", "--journal", str(journal)], capsys) == alone
    few = ["--chunks", "6", "--journal", str(journal)]
    assert printed([*run, *few], capsys) == printed([*run, "--chunks", "6"], capsys)
    assert journal.read_bytes().count(b"\n") == 1 + 5  # all of these groups were known
    assert main([*run, "-ctk", "q8_0", "--journal", str(journal)]) == 2
    assert "--cache-type-k is None there and 'q8_0' now" in capsys.readouterr().err


@pytest.mark.slow  # starts programs of its own
def test_a_worker_that_dies(run: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = printed(run, capsys)
    change_workers(monkeypatch, fleet_windows, lambda f: Deadly(f, tmp_path))
    assert main([*run, "--workers", "2"]) == 0
    out, err = capsys.readouterr()
    assert out == alone and err.count("its unit is done again") == 1 and (tmp_path / "died").exists()


@pytest.mark.slow  # starts processes for another kind of windows
def test_divergence_of_workers_is_that_of_one_process(base: list[str], tmp_path: Path, capsys: Capture) -> None:
    alone = printed(base, capsys)
    assert "KlSummary(count=279" in alone and len(alone.splitlines()) == 13
    journal = tmp_path / "j.jsonl"
    assert printed([*base, "--workers", "2", "--journal", str(journal)], capsys) == alone
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:3]))
    assert printed([*base, "--journal", str(journal)], capsys) == alone


@pytest.mark.slow  # starts processes for another kind of windows
def test_strided_windows(run: list[str], capsys: Capture) -> None:
    words = [*run, "--ppl-stride", "32", "--chunks", "4"]
    assert printed([*words, "--workers", "2"], capsys) == printed(words, capsys)


@pytest.mark.slow  # starts programs of its own
def test_a_driver_that_is_killed_leaves_a_journal_and_no_process(
    run: list[str], tmp_path: Path, capsys: Capture
) -> None:
    journal = tmp_path / "j.jsonl"
    words = [*run, "--chunks", "-1", "-b", "64", "--journal", str(journal)]
    known = kill_driver([*words, "--workers", "2"], journal)
    resumed = printed(words, capsys)
    assert resumed == printed(words[:-2], capsys)
    assert 2 < known <= journal.read_bytes().count(b"\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers", "0"], "--workers"),
        (["--workers", "2", "--hellaswag"], "not for choices"),
        (["--workers", "2", "--kl-divergence-base", "new.kld"], "stores every prediction"),
        (["--workers", "2", "--profile"], "--profile"),
        (["--journal", "nowhere/j.jsonl"], "cannot write the journal"),
    ],
)
def test_wrong_input_ends_in_a_sentence(words: list[str], message: str, run: list[str], capsys: Capture) -> None:
    assert main([*run, *words]) in (1, 2)
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err


def test_workers_refuse_other_files(run: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    change_workers(monkeypatch, fleet_windows, lambda f: other_input(f, 0))
    assert main([*run, "--workers", "2"]) == 1
    assert "another file than that of the command" in capsys.readouterr().err
