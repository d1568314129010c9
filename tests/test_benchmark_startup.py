"""The benchmark of first runs: turns alternate, each begins with an empty cache, failures end it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from benchmark_scripts import load

PROGRAM = """
import os, sys
cache = os.environ["IK_CACHE_DIR"]
print(sys.argv[1], len(os.listdir(cache)), *sys.argv[2:], file=open(sys.argv[1], "a"))
open(os.path.join(cache, "kernel"), "w").close()
"""


def test_every_turn_begins_with_an_empty_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, log = tmp_path / "ik.py", tmp_path / "log"
    script.write_text(PROGRAM, encoding="utf-8")
    ik = f"{shlex.quote(sys.executable)} {script} {log}"
    assert (
        load("startup").main(["--ik", f"old={ik} old", "--ik", f"new={ik} new", "-r", "2", "--", "bench", "-n", "1"])
        == 0
    )
    seen = [line.split()[1:] for line in log.read_text(encoding="utf-8").splitlines()]
    names = ["new", "new", "old", "old", "old", "old", "new", "new"]
    assert seen == [[str(n % 2), name, "bench", "-n", "1"] for n, name in enumerate(names)]
    table = capsys.readouterr().out.splitlines()
    assert [row.split(" |")[0] for row in table[2:]] == ["| old", "| new"]


def test_a_run_that_fails_ends_it_with_its_message(tmp_path: Path) -> None:
    ik = shlex.join([sys.executable, "-c", "raise SystemExit('no such model')"])
    with pytest.raises(SystemExit, match="no such model"):
        load("startup").main(["--ik", f"ik={ik}"])
