"""The script that compares encoding speeds: its model and tables, and a run with two small programs."""

from __future__ import annotations

import math
import stat
import sys
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_scripts import load


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("encode")


def test_every_quantized_type_has_a_file_type(script: ModuleType) -> None:
    names = script.file_types()
    assert {"Q8_0", "Q4_K", "IQ2_S", "IQ1_S_R4", "IQ4_KT", "Q8_KV_R8"} <= names.keys()
    assert names["IQ2_S"] == "IQ2_M" and "F16" not in names


def program(path: Path, line: str) -> Path:
    """An executable that writes its output file, prints a line and remembers its arguments."""
    calls = str(path.with_suffix(".calls"))
    path.write_text(
        f"#!{sys.executable}\nimport sys\nopen({calls!r}, 'a').write(repr(sys.argv[1:]) + chr(10))\n"
        f"open(sys.argv[-3], 'wb')\nprint({line!r})\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_end_to_end(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program(tmp_path / "llama-quantize", "main: quantize time =   500.00 ms")
    ours = program(tmp_path / "ik", "wrote 1 file in 0.25 s (1 MiB/s of input)")
    argv = ["q4_0", "IQ2_S", "--reference", str(tmp_path), "--ik", str(ours), "-r", "2", "-n", "0.1", "-t", "3"]
    assert script.main([*argv, "--folder", str(tmp_path / "work")]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| Q4_0 |", "| IQ2_S |"))]
    assert [[cell.strip() for cell in row.split("|")][6:9] for row in rows] == [["0.25", "0.50", "2.00"]] * 2
    calls = [(tmp_path / f"{name}.calls").read_text().splitlines() for name in ("ik", "llama-quantize")]
    assert len(calls[0]) == len(calls[1]) == 4
    assert "'quantize', '--pure'" in calls[0][0] and "--imatrix" not in calls[0][0] and "'Q4_0', '3'" in calls[0][0]
    assert "--imatrix" in calls[1][2] and "'IQ2_M', '3'" in calls[1][2]
    with pytest.raises(SystemExit, match="F7"):
        script.main(["F7", "--reference", str(tmp_path)])


def test_failing_program_is_reported(script: ModuleType, tmp_path: Path) -> None:
    quiet = script.run_once([sys.executable, "-c", "open('o', 'wb')"], tmp_path / "o", 60)
    assert math.isnan(quiet.quantize) and quiet.command > 0
    with pytest.raises(SystemExit, match="exit code 3"):
        script.run_once([sys.executable, "-c", "import sys; print('oops'); sys.exit(3)"], tmp_path / "o", 60)
    with pytest.raises(SystemExit, match="exit code 0"):  # nothing written
        script.run_once([sys.executable, "-c", ""], tmp_path / "o", 60)
