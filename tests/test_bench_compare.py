"""`ik bench --compare`: sides, order, ratios and their intervals, what disturbs, and the records that a report reads."""

# ruff: noqa: E501  (tables)

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ikcli.bench.compare import Side, SideRun, compare, interval, parse_sides, run_side, speeds_of
from ikcli.bench.disturbance import Disturbance, Watch, warnings_of
from ikcli.commands._bench_compare import common_options
from ikcli.errors import IkError, UsageError
from ikcli.main import main
from ikcli.report.page import page
from ikcli.report.read import read_output, read_results

A, B = Side("a", ("a",)), Side("b", ("b",))


def fake(speeds: dict[str, Any], order: list[str] | None = None) -> Any:
    """A way to run sides that takes their speeds from iterators."""

    def run(side: Side) -> SideRun:
        if order is not None:
            order.append(side.name)
        return SideRun(side, {test: next(values) for test, values in speeds[side.name].items()}, Disturbance())

    return run


def steady(*values: float) -> Any:
    return itertools.cycle(values)


def test_drift_falls_out_of_the_ratio() -> None:
    drift = [100.0 * 0.8**i for i in range(10)]
    run = fake({"a": {"tg": iter(drift)}, "b": {"tg": iter([1.5 * x for x in drift])}})
    *_, found = compare([A, B], 6, 1e-9, warmup=False, run=run)
    (r,) = found.ratios()
    assert r.ratio == pytest.approx(1.5)
    assert (r.low, r.high) == (pytest.approx(1.5), pytest.approx(1.5))
    assert len(found.rounds) == 3  # narrow enough, but never before the third


def test_rounds_end_when_the_interval_stays_wide() -> None:
    run = fake({"a": {"tg": steady(100)}, "b": {"tg": steady(100, 200)}})
    *_, found = compare([A, B], 6, 0.01, warmup=False, run=run)
    (r,) = found.ratios()
    assert (len(found.rounds), r.ratio) == (6, pytest.approx(math.sqrt(2)))
    half = 2.571 * math.log(2) / 2 * math.sqrt(6 / 5) / math.sqrt(6)
    assert (math.log(r.high) - math.log(r.low)) / 2 == pytest.approx(half)


def test_interval_of_one_value_is_unknown() -> None:
    assert interval([0.5]) == (0.5, math.inf)
    run = fake({"a": {"tg": steady(1)}, "b": {"tg": steady(2)}})
    first = next(compare([A, B], 5, 0.01, warmup=False, run=run))
    assert (first.ratios()[0].ratio, first.ratios()[0].high) == (pytest.approx(2), math.inf)


def test_order_is_drawn_and_turned_around() -> None:
    order: list[str] = []
    sides = [A, B, Side("c", ())]
    run = fake({s.name: {"tg": steady(1, 2 + i)} for i, s in enumerate(sides)}, order)
    list(compare(sides, 8, 0.0, warmup=True, seed=3, run=run))
    assert order[:3] == ["a", "b", "c"]  # one run each to warm up
    rounds = [order[i : i + 3] for i in range(3, len(order), 3)]
    assert len(rounds) == 8
    assert all(rounds[i] == rounds[i + 1][::-1] for i in range(0, 8, 2))
    assert len({tuple(r) for r in rounds}) > 2


def test_tests_that_not_all_sides_have() -> None:
    run = fake({"a": {"pp": steady(1), "x": steady(1)}, "b": {"pp": steady(2), "y": steady(1)}})
    found = next(compare([A, B], 2, 0.1, warmup=False, run=run))
    assert (found.tests(), found.left_out()) == (["pp"], ["x", "y"])
    run = fake({"a": {"x": steady(1)}, "b": {"y": steady(1)}})
    with pytest.raises(IkError, match=r"no test in common: .*a has x"):
        next(compare([A, B], 2, 0.1, warmup=False, run=run))


def test_sides() -> None:
    common = ["-m", "m.gguf", "-p", "8"]
    ik = (sys.executable, "-m", "ikcli")
    plain, other = parse_sides(["-rtr 1"], common)
    assert (plain.name, plain.command) == ("as given", (*ik, "bench", *common, "-o", "json"))
    assert (other.name, other.command) == ("-rtr 1", (*ik, "bench", *common, "-rtr", "1", "-o", "json"))
    sides = parse_sides(["old=ik sweep-bench -ub 64", f"new={sys.executable} 'a b.py'"], common)
    assert [s.name for s in sides] == ["old", "new"]
    assert sides[0].command == (*ik, "sweep-bench", *common, "-ub", "64")
    assert sides[1].command == (sys.executable, *common, "a b.py")


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (["-a", "-a"], 'two sides are called "-a"'),
        (["x=no/such/program"], "program no/such/program was not found"),
        (["x='"], "cannot be split into words"),
        (["ik"], "names no command of ik"),
    ],
)
def test_bad_sides(texts: list[str], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        parse_sides(texts, [])


def test_common_options() -> None:
    argv = [
        "-m",
        "m",
        "--compare",
        "-rtr 0",
        "-o",
        "json",
        "--rounds=5",
        "-p",
        "8",
        "--compare=x",
        "-fa",
        "1",
        "-w",
        "0",
    ]
    assert common_options(argv, 2) == ["-m", "m", "-p", "8", "-fa", "1", "-w", "0"]
    with pytest.raises(UsageError, match="not in a file of options"):
        common_options(["-m", "m"], 1)


def test_speeds_of_programs() -> None:
    sweep = "|    PP |     TG |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |\n|   128 |     32 |    256 |    0.1 |  1280.0 |    0.4 |    80.0 |"
    assert speeds_of(read_output(sweep, "x")) == {"pp@256": 1280.0, "tg@256": 80.0}


def script(path: Path, name: str, body: str) -> str:
    file = path / f"{name}.py"
    file.write_text(f"import sys, json\n{body}\n")
    starter = path / name
    starter.write_text(f'#!/bin/sh\nexec {sys.executable} {file} "$@"\n')
    starter.chmod(0o755)
    return str(starter)


RESULT = "print(json.dumps({'test': 'tg8', 'avg_ts': %s, 'stddev_ts': 0}))"


def test_command_with_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = script(tmp_path, "slow", "assert sys.argv[1] == '-m', sys.argv\n" + RESULT % 50)
    fast = script(tmp_path, "fast", RESULT % 100)
    argv = ["bench", "--compare", f"slow={slow}", "--compare", f"fast={fast} -x 1", "-p", "8", "--rounds", "4"]
    assert main([*argv, "-o", "jsonl"]) == 0
    said = capsys.readouterr()
    record = json.loads(said.out)
    assert (record["compare"], record["side"], record["base"], record["rounds"]) == ("tg8", "fast", "slow", 3)
    assert (record["ratio"], record["speeds"]) == (pytest.approx(2), [100, 100, 100])
    assert record["side_command"].endswith("-p 8 -x 1")
    assert "round 3 of 4: tg8 fast 2.0000 (2.0000 to 2.0000)" in said.err
    (tmp_path / "r.jsonl").write_text(said.out)
    (tmp_path / "bad.jsonl").write_text(json.dumps(record | {"ratio": None}))
    results = read_results([("", tmp_path / "r.jsonl"), ("", tmp_path / "bad.jsonl")])
    assert [(c.test, c.ratio) for c in results.compared] == [("tg8", pytest.approx(2))]
    assert len(results.problems) == 1
    assert "tg8, fast / slow" in page(results, "x")
    assert main(argv) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[2].startswith("| tg8 | fast | 100.00 | 50.00 | 2.0000 | 2.0000 to 2.0000 | faster |")


def test_command_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = script(tmp_path, "good", RESULT % 50)
    for body, problem in (
        ("sys.exit('no memory')", 'side "bad" ended with exit code 1'),
        ("print('hello')", 'side "bad" printed no speed'),
        (RESULT % 1 + "\nsys.exit(3)", "ended with exit code 3"),
    ):
        bad = script(tmp_path, "bad", body)
        assert main(["bench", "--compare", f"good={good}", "--compare", f"bad={bad}"]) == 1
        said = capsys.readouterr()
        assert said.out == ""
        assert problem in said.err
    for argv, problem in (
        (["--compare", "-rtr 1", "-o", "csv"], "md, json or jsonl"),
        (["--compare", "-rtr 1", "-oe", "md"], "has no -oe"),
        (["--rounds", "5"], "--rounds goes with --compare"),
        (["--compare", "x", "--rounds", "1"], "is less than 2"),
    ):
        assert main(["bench", *argv]) == 2
        assert problem in capsys.readouterr().err


@pytest.mark.slow  # starts processes that load models
def test_settings_of_this_program(capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs of the bundled model for real."""
    argv = ["bench", "-p", "4", "-n", "2", "-r", "1", "-w", "0", "--compare", "-ub 8", "--rounds", "2", "-o", "json"]
    assert main(argv) == 0
    records = json.loads(capsys.readouterr().out)
    assert [(r["compare"], r["side"], r["base"], r["rounds"]) for r in records] == [
        ("pp4", "-ub 8", "as given", 2),
        ("tg2", "-ub 8", "as given", 2),
    ]
    assert all(0 < r["low"] < r["ratio"] < r["high"] for r in records)


def test_run_side_says_what_cannot_start(tmp_path: Path) -> None:
    with pytest.raises(IkError, match="cannot be started"):
        run_side(Side("x", (str(tmp_path),)))


# -- what disturbs


def write_proc(proc: Path, busy: int, steal: int) -> None:
    proc.mkdir(exist_ok=True)
    (proc / "stat").write_text(f"cpu  {busy} 0 0 500 0 0 0 {steal} 0 0\n")
    (proc / "loadavg").write_text("1.50 1.0 1.0 1/100 1\n")
    (proc / "cpuinfo").write_text("cpu MHz\t\t: 1800.5\ncpu MHz\t\t: 3000.0\n")


def test_watch(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    write_proc(proc, 1000, 0)
    with Watch(proc) as watch:
        while not watch._clocks:
            time.sleep(0.01)
        write_proc(proc, 100_000, 5000)
    d = watch.found
    assert d.others is not None and d.others > 10
    assert d.stolen is not None and d.stolen > 1
    assert (d.clock_mhz, d.load) == (3000.0, 1.5)
    with Watch(tmp_path / "none") as watch:
        pass
    assert watch.found == Disturbance()


def test_warnings() -> None:
    assert warnings_of([Disturbance(0.05, 0.0, 3000.0), Disturbance(0.0, 0.01, 3010.0)], 4) == []
    assert warnings_of([Disturbance()], 4) == []
    found = warnings_of([Disturbance(1.0, 0.5, 2000.0), Disturbance(0.0, 0.0, 3000.0)], 4)
    assert [
        "1.0 of 4 processors busy in 1 of 2 runs" in found[0],
        "hypervisor" in found[1],
        "2000 and 3000" in found[2],
    ] == [True] * 3
