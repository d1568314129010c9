"""The benchmark of families: makes and keeps models, measures what is missing, prints one table over all of them."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_scripts import load

from ikcli.bench.disturbance import Disturbance
from ikcli.gguf.reader import open_gguf

PROGRAM = """#!{python}
import json, os, shutil, sys
with open({calls!r}, "a") as log:
    print(os.environ.get("IK_CPU_ISA", "-"), *sys.argv[1:], file=log)
if sys.argv[1] == "quantize":
    shutil.copy(sys.argv[-3], sys.argv[-2])
elif sys.argv[1] == "doctor":
    print(json.dumps({{"model": {{"speeds": [{{"tokens_per_s": x}} for x in (600.0, 100.0, 50.0)]}}}}))
else:
    pp = 300 if sys.argv[1] == "sweep-bench" else 200
    stride, n_ctx = int(sys.argv[sys.argv.index("--sweep-stride") + 1]), int(sys.argv[sys.argv.index("-c") + 1])
    print("| PP | TG | N_KV | T_PP s | S_PP t/s | T_TG s | S_TG t/s |")
    for depth in range(0, n_ctx - 511, 512 * stride):
        print(f"| 512 | 64 | {{depth}} | 1 | {{pp}} | 1 | 40 |")
"""
SIZES = ("--layers", "1", "--experts", "2", "--vocab", "400")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("families")


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """Programs in the temporary folder that write their calls to this file."""
    path = tmp_path / "calls"
    for name in ("ik", "llama-sweep-bench"):
        program = tmp_path / name
        program.write_text(PROGRAM.format(python=sys.executable, calls=str(path)))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return path


def options(calls: Path, *more: str) -> list[str]:
    folder = calls.parent
    paths = ("--reference", str(folder), "--ik", str(folder / "ik"), "--folder", str(folder / "made"))
    return ["qwen3moe", *paths, *SIZES, "-r", "1", *more]


@pytest.mark.slow  # makes models
def test_models_are_made_once_and_compared(script: ModuleType, calls: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stem = "qwen3moe-l1-e2-v400"
    for _ in range(2):
        assert script.main(options(calls, "--types", "Q4_K_M,MXFP4", "--", "-ctk", "q8_0")) == 0
        rows = [line for line in capfd.readouterr().out.splitlines() if "| 300 (1.50, 50 %) | 40.0 (1.00," in line]
        assert [row.split("|")[2:4] for row in rows] == [
            [f" {type_} ", f" {depth} "] for type_ in ("Q4_K_M", "MXFP4") for depth in (0, 8192)
        ]
    made = calls.parent / "made"
    assert sorted(p.name for p in made.iterdir()) == [f"{stem}-MXFP4.gguf", f"{stem}-Q4_K_M.gguf"]
    lines = [line.split(maxsplit=1)[1] for line in calls.read_text().splitlines()]
    assert sum(line.startswith("quantize") for line in lines) == 1  # of the type that is not made directly
    sweeps = [line for line in lines if line.startswith(("sweep-bench", "-m"))]
    assert len(sweeps) == 8 and all("-c 8704 -ub 512" in x and "--sweep-stride 16 -ctk q8_0" in x for x in sweeps)
    file = open_gguf(made / f"{stem}-Q4_K_M.gguf")
    assert file.arch == "qwen3moe" and file.get("qwen3moe.expert_count") == 2


def test_turns_are_kept_and_only_missing_ones_measured(
    script: ModuleType, calls: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "make", lambda family, type_, options: tmp_path / f"{family}-{type_}.gguf")
    monkeypatch.setattr(script.isa, "host", lambda: script.isa.level("avx512"))
    file = tmp_path / "turns.json"
    base = ("--types", "Q8_0", "--json", str(file), "--isa", "avx512,avx2")

    def measured() -> list[str]:
        lines = calls.read_text().splitlines() if calls.exists() else []
        calls.unlink(missing_ok=True)
        return [" ".join(line.split()[:2]) for line in lines]

    argv = options(calls, *base, "--depths", "0")
    assert script.main([*argv, "--seconds", "0"]) == 3 and not measured()
    assert script.main(argv) == 0
    assert measured() == ["- doctor", "- sweep-bench", "- -m", "avx2 doctor", "avx2 sweep-bench", "- -m"]
    assert script.main(argv) == 0 and not measured()
    out = capsys.readouterr().out
    assert (
        "| qwen3moe | Q8_0 | 0 | 300 (1.50, 50 %) | 40.0 (1.00, 40 %) | 300 (1.50, 50 %) | 40.0 (1.00, 40 %) |" in out
    )
    assert "avx2, N_KV 0, PP: geometric mean of 1 ratios 1.50, lowest 1.50" in out
    # Another depth is missing; a turn that others disturbed does not count, so it is repeated.
    busy = iter((2.0, 0.1, 0.1))

    class Watch:
        def __enter__(self) -> Watch:
            return self

        def __exit__(self, *_: object) -> None:
            self.found = Disturbance(others=next(busy))

    monkeypatch.setattr(script, "Watch", Watch)
    assert script.main(options(calls, *base, "--depths", "0,8192", "--idle", "0.5")) == 0
    assert measured().count("- sweep-bench") == 2 and len(json.loads(file.read_text())["cells"]) == 2
    # Seconds grow linearly with the depth: 10 ms at an empty cache, 20 ms at 8704 tokens, so 19.4 ms at 8192.
    assert "| qwen3moe | Q8_0 | 8192 | 300 (1.50, 50 %) | 40.0 (1.00, 78 %) |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="turns of other settings"):
        script.main(options(calls, *base, "-t", "3"))


@pytest.mark.parametrize("argv", [("--depths", "100"), ("--reference", "nowhere"), ("unheard",)], ids=str)
def test_faults_are_told(script: ModuleType, calls: Path, argv: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        script.main([*argv, *options(calls)] if argv == ("unheard",) else options(calls, *argv))
    assert caught.value.code == 2
