"""`ik plan`: available memory, verdict and advice."""

from __future__ import annotations

from pathlib import Path

import pytest

from ikcli import log, main
from ikcli.engine import memory_plan
from ikcli.engine.memory_plan import MemoryPlan, advice, available_memory

MIB = 2**20
PLAN = MemoryPlan({"CPU": {"weights": 1000 * MIB, "KV": 512 * MIB, "output": 0, "compute": 100 * MIB}}, 8192)


def test_available_memory(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal: 10 kB\nMemAvailable:  2048 kB\n")
    assert available_memory(file) == 2 * MIB
    file.write_text("MemTotal: 10 kB\n")
    assert available_memory(file) is None
    assert available_memory(tmp_path / "absent") is None


def test_total_and_advice() -> None:
    assert PLAN.total == 1612 * MIB
    assert advice(PLAN, 256 * MIB) == "-c 4096 would fit"
    assert advice(PLAN, 511 * MIB) == "a smaller -c or -ctk q8_0 may fit"
    assert advice(PLAN, 600 * MIB) == "lower both -c and -ub"
    assert advice(PLAN, 900 * MIB) == "use a smaller quantization of the model"


def test_exit_code_says_whether_it_fits(capsys, monkeypatch: pytest.MonkeyPatch, shared_dir: Path) -> None:
    monkeypatch.setattr(log, "utf8_streams", lambda: None)
    line = ["plan", "-m", str(shared_dir / "golden" / "models" / "tiny-llama.f16.gguf"), "-c", "256", "-t", "1"]
    assert main.main(line) == 0
    out = capsys.readouterr().out
    assert "CPU buffer size" in out and "fits: CPU needs" in out
    monkeypatch.setattr(memory_plan, "available_memory", lambda: MIB)
    assert main.main(line) == 1
    assert "does not fit: CPU needs" in capsys.readouterr().out
    monkeypatch.setattr(memory_plan, "available_memory", lambda: None)
    assert main.main(line) == 0
    assert "fit: " not in capsys.readouterr().out


def test_options_without_implementation_are_named(capsys, monkeypatch, shared_dir: Path) -> None:
    monkeypatch.setattr(log, "utf8_streams", lambda: None)
    model = str(shared_dir / "golden" / "models" / "tiny-llama.f16.gguf")
    main.main(["plan", "-m", model, "-c", "256", "-t", "1", "--fit"])
    assert "not supported in this version, ignored: --fit\n" in capsys.readouterr().err
