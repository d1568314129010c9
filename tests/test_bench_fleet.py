"""Bench on kinds of nodes: the grid, forms of output, continuing from a journal. Ray itself is in test_fleet_ray.py."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ikcli.bench import fleet as fleet_bench
from ikcli.errors import IkError
from ikcli.fleet.executor import ByKind, LocalExecutor
from ikcli.main import main

WORDS = ["bench", "-p", "16", "-n", "2", "-r", "2", "-t", "1", "-ub", "8,16", "--ray", "auto", "--ray-node", "old,new"]
Capture = pytest.CaptureFixture[str]


class Nodes(LocalExecutor):
    """In this process, under the name of a kind of node."""

    one_at_a_time = threading.Lock()
    done: ClassVar[list[tuple[str, Any]]] = []

    def __init__(self, address: str, n_workers: int, n_threads: int, node: str, share: float) -> None:
        assert (address, n_workers, n_threads, share) == ("auto", 2, 1, 1)
        self.node = node

    @contextmanager
    def connected(self) -> Iterator[None]:
        yield

    def run(self, factory: Any, units: Sequence[Any], ahead: int | None = None) -> Generator[tuple[int, Any]]:
        with self.one_at_a_time:  # threads stand for machines, and share what belongs to the process
            found = list(super().run(factory, units))
        for i, result in found:
            self.done.append((self.node, units[i].config.n_ubatch))
            yield i, result


@pytest.fixture(autouse=True)
def nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    Nodes.done = []
    monkeypatch.setattr(fleet_bench, "RayExecutor", Nodes)


def test_a_grid_on_two_kinds_of_nodes(capsys: Capture, tmp_path: Path) -> None:
    journal = tmp_path / "j.jsonl"
    words = [*WORDS, "-o", "jsonl", "--journal", str(journal)]
    assert main(words) == 0
    out = capsys.readouterr().out
    found = [json.loads(line) for line in out.splitlines()]
    assert [(r["node"], r["n_ubatch"], r["test"]) for r in found] == [
        (node, n, test) for node in ("old", "new") for n in (8, 16) for test in ("pp16", "tg2")
    ]
    assert all(len(r["samples_ns"]) == 2 and r["cpu_info"] and r["n_threads"] == 1 for r in found)
    assert sorted(Nodes.done) == [("new", 8), ("new", 16), ("old", 8), ("old", 16)]
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(line for line in lines if b'"key": "new' not in line))
    Nodes.done.clear()
    assert main(words) == 0
    again = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(Nodes.done) == [("new", 8), ("new", 16)]
    assert again[:4] == found[:4] and [r["test"] for r in again] == [r["test"] for r in found]


@pytest.mark.parametrize(("form", "wanted"), [("md", "| old  "), ("csv", ',"old"'), ("sql", ", node) VALUES")])
def test_every_form_names_the_node(form: str, wanted: str, capsys: Capture) -> None:
    assert main([*WORDS[:-1], "old", "-ub", "8", "-o", form]) == 0
    assert wanted in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "--ray-node", "old"], "add --ray ADDRESS"),
        (["bench", "--journal", "j"], "add --ray ADDRESS"),
        ([*WORDS, "--profile"], "--profile"),
        ([*WORDS, "--compare", "-ub 8"], "--compare"),
        (["perplexity", "--workers", "2", "--ray-node", "old"], "add --ray ADDRESS"),
        (["perplexity", "--ray", "auto", "--ray-node", "old,new"], "only ik bench takes several"),
    ],
)
def test_wrong_input_ends_in_a_sentence(words: list[str], message: str, capsys: Capture) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err


# --- kinds ------------------------------------------------------------------------------------------------------------
class Half:
    """Halves even numbers."""

    def __call__(self) -> Half:
        return self

    def do(self, unit: int) -> int:
        if unit % 2:
            raise IkError(f"{unit} is odd")
        return unit // 2

    def close(self) -> None:
        """Nothing is held."""


def test_units_by_kind() -> None:
    work = ByKind({"a": LocalExecutor(), "b": LocalExecutor()})
    units = [("b", 2), ("a", 4), ("b", 6), ("a", 8)]
    assert sorted(work.run(Half(), units)) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    with pytest.raises(IkError, match="5 is odd"):
        list(work.run(Half(), [*units, ("b", 5)]))
