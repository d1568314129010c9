"""The comparison script: reads both tables, takes medians, prints ratios; run end to end with two small programs."""

from __future__ import annotations

import importlib.util
import json
import stat
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "compare_reference.py"

LOG = """llama_init_from_model: graph splits = 1

main: n_kv_max = 1024, n_batch = 1024, n_ubatch = 512, flash_attn = 1

|    PP |     TG |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |
|-------|--------|--------|----------|----------|----------|----------|
|   512 |    128 |      0 |    0.028 | {pp:8.2f} |    0.009 | {tg:8.2f} |
|   512 |    128 |    512 |    0.023 |   100.00 |    0.011 |    50.00 |

"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_reference", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_table_is_found_in_a_log(script: ModuleType) -> None:
    assert script.parse_table(LOG.format(pp=1.5, tg=2.5)) == {0: (1.5, 2.5), 512: (100.0, 50.0)}
    with_memory = "| PP | TG | N_KV | T_PP s | S_PP t/s | T_TG s | S_TG t/s | RSS HWM | VRAM delta |\n"
    assert script.parse_table(with_memory + "| 8 | 2 | 16 | 1 | 3 | 1 | 4 | 9.0 | - |") == {16: (3.0, 4.0)}
    assert script.parse_table("no table\n| 1 | 2 |") == {}


def test_medians_and_ratios(script: ModuleType) -> None:
    ours = script.medians([{0: (10.0, 1.0)}, {0: (30.0, 3.0)}, {0: (20.0, 5.0), 512: (1.0, 1.0)}])
    assert ours[0] == (20.0, 3.0)
    assert script.table_rows("m", ours, {0: (10.0, 4.0)}) == ["| m | 0 | 20.00 | 10.00 | 2.00 | 3.00 | 4.00 | 0.75 |"]


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
