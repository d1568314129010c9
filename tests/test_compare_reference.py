"""The comparison script: reads both tables, takes medians, prints ratios; run end to end with two small programs."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_scripts import load

LOG = """llama_init_from_model: graph splits = 1

main: n_kv_max = 1024, n_batch = 1024, n_ubatch = 512, flash_attn = 1

|    PP |     TG |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |
|-------|--------|--------|----------|----------|----------|----------|
|   512 |    128 |      0 |    0.028 | {pp:8.2f} |    0.009 | {tg:8.2f} |
|   512 |    128 |    512 |    0.023 |   100.00 |    0.011 |    50.00 |

"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("compare_reference")


def program(path: Path, stream: str, pp: float, tg: float) -> Path:
    """An executable that prints a log and remembers its arguments."""
    calls = str(path.with_suffix(".calls"))
    path.write_text(
        f"#!{sys.executable}\nimport sys\nopen({calls!r}, 'a').write(' '.join(sys.argv[1:]) + chr(10))\n"
        f"sys.{stream}.write({LOG.format(pp=pp, tg=tg)!r})\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_end_to_end(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program(tmp_path / "llama-sweep-bench", "stderr", 200, 40)
    ours = program(tmp_path / "ik", "stdout", 300, 30)
    argv = ["a.gguf", "--reference", str(tmp_path), "--ik", str(ours), "-r", "2", "-t", "3", "--", "-ctk", "q8_0"]
    assert script.main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("`-t 3 ") and "-ctk q8_0`" in lines[0]
    assert lines[-2:] == [
        "| a.gguf | 0 | 300.00 | 200.00 | 1.50 | 30.00 | 40.00 | 0.75 |",
        "| a.gguf | 512 | 100.00 | 100.00 | 1.00 | 50.00 | 50.00 | 1.00 |",
    ]
    calls = (tmp_path / "ik.calls").read_text().splitlines()
    options = f"-m {Path('a.gguf').resolve()} -c 1024 -ub 512 -t 3 -fa on -mla 3 -wb -ctk q8_0"
    assert calls == [f"sweep-bench {options}"] * 2
    assert (tmp_path / "llama-sweep-bench.calls").read_text().splitlines() == [options] * 2


def test_failing_program_is_reported(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(script.NoTable, match="llama-sweep-bench"):
        script.run_once([str(tmp_path / "llama-sweep-bench")], 10)
    with pytest.raises(script.NoTable, match="exit code 3"):
        script.run_once([sys.executable, "-c", "import sys; print('oops'); sys.exit(3)"], 60)


def test_results_of_ik_remain_where_the_reference_fails(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = program(tmp_path / "ik", "stdout", 300, 30)
    argv = ["a.gguf", "--reference", str(tmp_path), "--ik", str(ours), "--json", str(tmp_path / "found.json")]
    with pytest.raises(SystemExit, match="llama-sweep-bench"):
        script.main(argv)
    assert "| a.gguf | 0 | 300.00 | 0.00 | - | 30.00 | 0.00 | - |" in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert [(r["program"], r["n_kv"], r["pp"]) for r in found] == [("ik", 0, 300.0), ("ik", 512, 100.0)]
