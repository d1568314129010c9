"""The script that compares what types cost in two programs: its table, from two small programs."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_scripts import load

STATISTICS = """
====== Perplexity statistics ======
Mean PPL(Q)                   : {ppl} ±   0.234238
Mean PPL(base)                :   6.897399 ±   0.220934
====== KL divergence statistics ======
Mean    KLD:   0.105089 ±   0.001887
Maximum KLD:   2.759160
99.0%   KLD:   0.824020
Median  KLD:   0.060494
====== Token probability statistics ======
Mean    Δp: -2.838 ± 0.116 %
Same top p: 82.026 ± 0.439 %
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("kernel_divergence")


def program(path: Path, ppl: str) -> Path:
    """An executable that remembers its arguments, writes what `quantize` would and prints statistics."""
    calls, text = str(path.with_suffix(".calls")), STATISTICS.format(ppl=ppl)
    path.write_text(
        f"#!{sys.executable}\nimport sys\nopen({calls!r}, 'a').write(' '.join(sys.argv[1:]) + chr(10))\n"
        f"if sys.argv[1] == 'quantize': open(sys.argv[-2], 'wb')\nprint({text!r})\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_every_type_is_evaluated_as_it_is_and_repacked(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program(tmp_path / "llama-perplexity", "  7.387837")
    ours = program(tmp_path / "ik", "  7.373039")
    argv = ["Q4_K", "IQ2_KT", "-m", "m.gguf", "-f", "t.txt", "--imatrix", "i.dat", "-t", "3"]
    assert script.main([*argv, "--reference", str(tmp_path), "--ik", str(ours)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert [row.split("|")[1].strip() for row in rows[::2]] == ["Q4_K", "Q4_K -rtr", "IQ2_KT", "IQ2_KT -rtr"]
    assert rows[0] == "| Q4_K | ik | 7.3730 | 0.105089 | 0.060494 | 0.82402 | 82.03 |"
    assert rows[1].startswith("| Q4_K | reference | 7.3878 |")
    calls, others = ((tmp_path / f"{name}.calls").read_text().splitlines() for name in ("ik", "llama-perplexity"))
    assert calls[0].startswith("perplexity -m") and calls[0].endswith("--kl-divergence-base base.kld")
    assert calls[1].endswith("q.gguf Q4_K") and f"--imatrix {Path('i.dat').resolve()}" in calls[1]
    assert [call.removeprefix("perplexity ") for call in calls if "-m q.gguf" in call] == others
    assert ["-rtr" in call for call in others] == [False, True] * 2


def test_output_without_statistics_is_an_error(script: ModuleType) -> None:
    with pytest.raises(SystemExit, match="does not name Mean KLD, Median KLD"):
        script.parse("Mean PPL(Q)  : 7.3 ± 0.2\nfailed to load\n")
