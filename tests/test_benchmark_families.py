"""The benchmark of families: makes and keeps models, one table over all of them, one sentence for what cannot be."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_scripts import load

from ikcli.gguf.reader import open_gguf

PROGRAM = """#!{python}
import shutil, sys
with open({calls!r}, "a") as log:
    print(*sys.argv[1:], file=log)
if sys.argv[1] == "quantize":
    shutil.copy(sys.argv[-3], sys.argv[-2])
else:
    print("| PP | TG | N_KV | T_PP s | S_PP t/s | T_TG s | S_TG t/s |")
    for depth in (0, 8192):
        print(f"| 512 | 128 | {{depth}} | 1 | 300 | 1 | 40 |")
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("families")


@pytest.mark.slow  # makes models
def test_models_are_made_once_and_compared(
    script: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    calls = tmp_path / "calls"
    for name in ("ik", "llama-sweep-bench"):
        path = tmp_path / name
        path.write_text(PROGRAM.format(python=sys.executable, calls=str(calls)))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    argv = ["qwen3moe", "--reference", str(tmp_path), "--ik", str(tmp_path / "ik"), "--folder", str(tmp_path / "made"),
            "--layers", "1", "--experts", "2", "--vocab", "400", "-r", "1", "--", "-ctk", "q8_0"]  # fmt: skip
    for _ in range(2):
        assert script.main(argv) == 0
        names = [line.split("|")[1].strip() for line in capfd.readouterr().out.splitlines() if "| 300.00" in line]
        stem = "qwen3moe-l1-e2-v400"
        assert names == [f"{stem}-Q4_K_M.gguf"] * 2 + [f"{stem}-IQ4_K.gguf"] * 2
    assert sorted(p.name for p in (tmp_path / "made").iterdir()) == sorted(set(names))
    lines = calls.read_text().splitlines()
    assert sum(line.startswith("quantize") for line in lines) == 2
    sweeps = [line for line in lines if not line.startswith("quantize")]
    assert len(sweeps) == 8 and all("-c 8704 -ub 512" in x and "--sweep-stride 16 -ctk q8_0" in x for x in sweeps)
    file = open_gguf(tmp_path / "made" / names[0])
    assert file.arch == "qwen3moe" and file.get("qwen3moe.expert_count") == 2
