"""Work in units: journals that go on after anything, executors that give the same, workers that die."""

from __future__ import annotations

import json
import os
import pickle
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ikcli.errors import FormatError, IkError, UnsupportedError, UsageError
from ikcli.fleet import executor as executors
from ikcli.fleet.choose import executor, threads_each
from ikcli.fleet.executor import ByKind, Executor, Factory, LocalExecutor, ProcessExecutor, Queue
from ikcli.fleet.files import moved
from ikcli.fleet.journal import Journal, read
from ikcli.fleet.ray_actor import DiedError, Holder, RayActor
from ikcli.fleet.units import map_units
from ikcli.fleet.worker import UnitFunction, input_file
from ikcli.gguf import digests as digest
from ikcli.settings.fleet import FleetConfig

HEAD = {"kind": "test", "n": 3}


# --- the journal ------------------------------------------------------------------------------------------------------
def test_a_journal_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    first = Journal(path, HEAD)
    first.add("a", {"x": 1.5})
    first.close()
    with path.open("ab") as file:
        file.write(b'{"key": "b", "x"')  # cut off in the middle
    second = Journal(path, HEAD)
    assert second.records == {"a": {"x": 1.5}} and "b" not in second
    second.add("b", {"x": 2})
    second.close()
    assert [json.loads(line).get("key") for line in path.read_text().splitlines()] == [None, "a", "b"]
    assert read(path)[0].records == {"a": {"x": 1.5}, "b": {"x": 2}}


def test_a_journal_of_other_work_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    Journal(path, HEAD).close()
    with pytest.raises(UsageError, match="of other work: n is 3 there and 4 now"):
        Journal(path, HEAD | {"n": 4})


@pytest.mark.parametrize("text", [b"[1]\n", b'{"a": 1}\nnonsense\n', b'{"a": 1}\n{"no": "key"}\n', b"no line end"])
def test_what_is_no_journal_is_refused(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(text)
    with pytest.raises(FormatError, match="journal"):
        Journal(path, HEAD)
    assert path.read_bytes() == text


def test_a_journal_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(IkError, match="cannot write the journal"):
        Journal(tmp_path / "nowhere" / "j.jsonl", HEAD)


def test_a_journal_of_less_or_more_is_another(tmp_path: Path) -> None:
    """What only one of both says counts as a difference, whichever that is."""
    path = tmp_path / "j.jsonl"
    Journal(path, HEAD).close()
    with pytest.raises(UsageError, match="n is 3 there and None now"):
        Journal(path, {"kind": "test"})
    with pytest.raises(UsageError, match="more is None there and 1 now"):
        Journal(path, HEAD | {"more": 1})
    Journal(path, {"n": 3, "kind": "test"}).close()  # in any order


def test_bytes_of_records_lie_beside_a_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "j.jsonl"
    wanted = {"a": b"one", "b": b"", "c": b"\x00\xff" * 500}
    for key, data in wanted.items():  # each by a run of its own
        journal = Journal(path, HEAD)
        journal.add(key, {"x": key, "data": data})
        journal.close()
    journal = Journal(path, HEAD)
    assert {key: journal.take(key) for key in wanted} == {key: {"x": key, "data": d} for key, d in wanted.items()}
    journal.close()
    stored = journal.data_path.read_bytes()
    assert stored == b"".join(wanted.values())
    for damaged, left in ((b"onE" + stored[3:], ["b", "c"]), (stored[:-1], ["a", "b"]), (b"", ["b"])):
        journal.data_path.write_bytes(damaged)
        again = Journal(path, HEAD)
        assert sorted(again.records) == left
        assert f"lacks the results of {3 - len(left)} units" in capsys.readouterr().err
        again.close()
    journal.data_path.write_bytes(stored)
    journal = Journal(path, HEAD)
    journal.data_path.write_bytes(b"onE" + stored[3:])
    with pytest.raises(FormatError, match=r"j\.jsonl\.data: is damaged"):
        journal.take("a")
    journal.close()


def test_bytes_in_memory_are_given_away() -> None:
    journal = Journal(None, HEAD)
    journal.add("a", {"x": 1, "data": b"large"})
    assert journal.take("a") == {"x": 1, "data": b"large"} and journal.take("a") == {"x": 1}


# --- order ------------------------------------------------------------------------------------------------------------
class Backwards:
    """An executor whose units end last to first, and which notes how it ends itself."""

    n_workers = 2

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.closed = False

    def run(self, factory: Any, units: Any, ahead: int | None = None) -> Generator[tuple[int, Any]]:
        try:
            for i in reversed(range(len(units))):
                self.done.append(units[i])
                yield i, {"value": units[i] * 10}
        finally:
            self.closed = True


def test_results_come_in_order_and_what_is_known_is_not_done_again(tmp_path: Path) -> None:
    units = [(f"unit {i}", i) for i in range(5)]
    journal = Journal(tmp_path / "j.jsonl", HEAD)
    journal.add("unit 1", {"value": -1})
    work = Backwards()
    found = [record["value"] for record in map_units(Squares(tmp_path), units, journal, work)]
    assert found == [0, -1, 20, 30, 40] and work.done == [4, 3, 2, 0] and work.closed
    journal.close()
    assert {k: r["value"] for k, r in read(tmp_path / "j.jsonl")[0].records.items()} == {
        key: value for (key, _), value in zip(units, found, strict=True)
    }


def test_who_stops_asking_ends_the_work(tmp_path: Path) -> None:
    work = Backwards()
    results = map_units(Squares(tmp_path), [("a", 1), ("b", 2)], Journal(None, HEAD), work)
    assert next(results) == {"value": 10} and not work.closed
    results.close()  # type: ignore[attr-defined]
    assert work.closed


def test_records_are_kept_as_units_end_and_forgotten_units_are_done_again(tmp_path: Path) -> None:
    """`keep` sees every result at once; records come in order."""
    units, path, seen = [(f"unit {i}", i) for i in range(3)], tmp_path / "j.jsonl", []

    def keep(i: int, result: Any) -> dict[str, Any]:
        seen.append((i, result["value"]))
        return {"kept": result["value"] + 1}

    with Journal(path, HEAD) as journal:
        records = list(map_units(Squares(tmp_path), units, journal, Backwards(), keep=keep))
    assert seen == [(2, 20), (1, 10), (0, 0)] and [r["kept"] for r in records] == [1, 11, 21]
    work = Backwards()
    with Journal(str(path), HEAD) as journal:
        journal.forget("unit 1")
        journal.forget("never there")
        assert list(map_units(Squares(tmp_path), units, journal, work, keep=lambda i, r: {"kept": 7}))[1] == {"kept": 7}
    assert work.done == [1] and read(path)[0].records["unit 1"] == {"kept": 7}


def test_no_unit_begins_too_far_ahead_of_the_first_that_is_not_done() -> None:
    queue = Queue(6, ahead=2)

    def begun() -> list[int]:
        found = []
        while queue.ready:
            found.append(queue.begin())
        return found

    assert begun() == [0, 1]
    queue.done(1)
    assert begun() == []
    queue.done(0)
    assert begun() == [2, 3]
    queue.again(3, "a worker died")
    queue.again(2, "a worker died")
    assert begun() == [2, 3], "those of dead workers come first, in order"
    queue.done(3)
    queue.done(2)
    assert begun() == [4, 5] and not queue


def test_a_unit_is_begun_three_times() -> None:
    queue = Queue(3)
    for _ in range(2):
        assert queue.begin() == 0
        queue.again(0, "a worker died")
    assert queue.begin() == 0
    with pytest.raises(IkError, match="a worker died 3 times at unit 1"):
        queue.again(0, "a worker died")


def test_units_of_a_kind_go_to_its_executor(tmp_path: Path) -> None:
    """All kinds at once; the work ends when that of every kind has."""
    works = {kind: Backwards() for kind in ("a", "b", "c")}
    units = [("b", 0), ("a", 1), ("b", 2), ("a", 3), ("b", 4)]
    found = dict(ByKind(works).run(Squares(tmp_path), units))
    assert found == {i: {"value": 10 * i} for i in range(5)}
    assert {kind: sorted(work.done) for kind, work in works.items()} == {"a": [1, 3], "b": [0, 2, 4], "c": []}


def test_threads_of_workers() -> None:
    """Of this machine they are shared, on nodes of a cluster every worker has all of its own."""
    found = [
        threads_each(8, fleet)
        for fleet in (
            FleetConfig(), FleetConfig(workers=3), FleetConfig(workers=20), FleetConfig(ray="local", ray_workers=4),
            FleetConfig(ray="auto", ray_workers=4), FleetConfig(ray="10.0.0.1:6379", ray_workers=2),
        )
    ]  # fmt: skip
    assert found == [8, 2, 1, 2, 8, 8]


# --- executors --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Squares:
    """Makes workers that square; they die once at units for which `room` has no file yet."""

    room: Path
    dies_at: tuple[int, ...] = ()
    always: bool = False
    broken: bool = False

    def __call__(self) -> Squares:
        if self.broken:
            raise IkError("this worker cannot begin")
        return self

    def do(self, unit: int) -> int:
        mark = self.room / str(unit)
        if unit in self.dies_at and (self.always or not mark.exists()):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if unit < 0:
            raise IkError(f"{unit} is negative")
        return unit * unit

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class Scale:
    """What `scaling` needs: a file with a factor, and one that says when it is closed."""

    factor: Path
    closed: Path


@contextmanager
def scaling(setup: Scale) -> Iterator[Callable[[int], int]]:
    factor = int(setup.factor.read_text())
    yield lambda unit: factor * unit
    setup.closed.touch()


def test_a_function_is_opened_where_it_runs_after_its_files_were_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("factor").write_text("3")
    setup = Scale(tmp_path / "factor", tmp_path / "closed")
    inputs = (input_file(Path("factor")), None, input_file(tmp_path / "factor"))
    function = UnitFunction(scaling, setup, inputs)
    assert function.files == [(tmp_path / "factor", digest.of_file(setup.factor))]
    assert not setup.closed.exists()
    assert results(LocalExecutor(), pickle.loads(pickle.dumps(function)), [1, 2]) == [3, 6] and setup.closed.exists()
    other = moved(function, {setup.factor: tmp_path / "elsewhere"})
    (tmp_path / "elsewhere").write_text("3")
    assert results(LocalExecutor(), other, [5]) == [15]
    (tmp_path / "elsewhere").write_text("4")
    with pytest.raises(IkError, match="elsewhere on this node is another file than that of the command"):
        other()


def results(work: Executor, factory: Factory, units: list[Any]) -> list[Any]:
    found = dict(work.run(factory, units))
    return [found[i] for i in range(len(units))]


UNITS = list(range(7))
SQUARES = [u * u for u in UNITS]


def test_here_and_processes_agree(tmp_path: Path) -> None:
    assert isinstance(executor(1, None, 1), LocalExecutor) and isinstance(executor(2, None, 1), ProcessExecutor)
    assert results(LocalExecutor(), Squares(tmp_path), UNITS) == SQUARES
    assert results(ProcessExecutor(2), Squares(tmp_path), UNITS) == SQUARES
    assert results(ProcessExecutor(2), Squares(tmp_path), []) == results(LocalExecutor(), Squares(tmp_path), []) == []


def test_units_of_dead_processes_are_done_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert results(ProcessExecutor(2), Squares(tmp_path, dies_at=(2, 5)), UNITS) == SQUARES
    assert capsys.readouterr().err.count("its unit is done again") == 2
    with pytest.raises(IkError, match=f"died {executors.TRIES} times at unit 4"):
        results(ProcessExecutor(1), Squares(tmp_path, dies_at=(3,), always=True), UNITS)


def test_errors_of_units_end_the_work(tmp_path: Path) -> None:
    with pytest.raises(IkError, match="-1 is negative"):
        results(ProcessExecutor(2), Squares(tmp_path), [1, -1, 2])


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"ikcli\[ray\]"):
        results(executor(2, "local", 1), Squares(tmp_path), UNITS)


# --- actors -----------------------------------------------------------------------------------------------------------
def test_the_object_of_an_actor(tmp_path: Path) -> None:
    """Errors of ours are values, those of programming are not, and calls say why there is no object."""
    holder = Holder()
    holder.placed()
    assert holder.call("do", 3) == (None, "its actor holds nothing yet")
    assert holder.make(Squares(tmp_path, broken=True)) == (None, "this worker cannot begin")
    assert holder.call("do", 3) == (None, "this worker cannot begin")
    assert holder.make(Squares(tmp_path)) == (None, "")
    assert holder.call("do", 3) == (9, "") and holder.call("do", -3) == (None, "-3 is negative")
    with pytest.raises(TypeError):
        holder.call("do", None)


class Ray:
    """As much of Ray as an actor uses, in this process; a reference is a function. `lost`: the node died."""

    class exceptions:
        RayError = type("RayError", (Exception,), {})
        RayTaskError = type("RayTaskError", (RayError,), {})

    def __init__(self) -> None:
        self.lost, self.killed = False, 0

    def remote(self, **options: Any) -> Any:
        assert options == {"num_cpus": 2}

        def handle(kind: type) -> Any:
            made = kind()
            methods = {
                name: SimpleNamespace(remote=partial(partial, getattr(made, name)))
                for name in ("placed", "make", "call")
            }
            return SimpleNamespace(**methods)

        return lambda kind: SimpleNamespace(remote=lambda: handle(kind))

    def get(self, ref: Any) -> Any:
        if self.lost:
            raise self.exceptions.RayError("a long story\n  the node died\n")
        try:
            return ref()
        except (TypeError, ZeroDivisionError) as error:
            raise self.exceptions.RayTaskError(str(error)) from error

    def kill(self, actor: Any) -> None:
        self.killed += 1
        raise self.exceptions.RayError("it is gone")


def test_outcomes_of_an_actor(tmp_path: Path) -> None:
    ray = Ray()
    actor = RayActor(ray, Squares(tmp_path), num_cpus=2)
    assert actor.outcome(actor.begun) == (None, "") and actor.outcome(actor.call("do", 4)) == (16, "")
    with pytest.raises(Ray.exceptions.RayTaskError):
        actor.outcome(actor.call("do", None))
    bad = RayActor(ray, lambda: 1 // 0, num_cpus=2)
    with pytest.raises(DiedError, match="division"):
        bad.outcome(bad.begun)
    ray.lost = True
    with pytest.raises(DiedError, match=r"^the node died$"):
        actor.outcome(actor.call("do", 4))
    actor.kill()
    assert ray.killed == 1
