"""`ik devices`, with a driver, without one, and with GPUs that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_cuda import needs_gcc, run

from ikcli.backends.cuda import driver
from ikcli.backends.cuda.device import DriverMissing
from ikcli.main import main

pytestmark = needs_gcc


def test_gpus_and_their_memory() -> None:
    result = run(["-m", "ikcli", "devices"], FAKE_CUDA_DEVICES=2)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("CPU ") and any(line.startswith("RAM ") for line in lines)
    assert lines[-2:] == [
        f"CUDA{i}  Fake GPU {i}: 1.0 GiB, 1.0 GiB free, compute capability 9.0, 132 SMs, driver CUDA 13.0"
        for i in range(2)
    ]


def test_json() -> None:
    found = json.loads(run(["-m", "ikcli", "devices", "--json"], FAKE_CUDA_MEMORY=5 << 30).stdout)
    assert found["no_gpu"] is None and found["cpu"]["physical_cores"] >= 1
    assert found["gpus"] == [
        {
            "name": "CUDA0",
            "model": "Fake GPU 0",
            "compute_capability": "9.0",
            "multiprocessors": 132,
            "memory": 5 << 30,
            "free": 5 << 30,
            "l2": 60 << 20,
            "shared_per_block": 232448,
            "driver_cuda": "13.0",
            "problem": None,
        }
    ]


def test_a_gpu_that_is_too_old_is_listed_with_the_reason() -> None:
    lines = run(["-m", "ikcli", "devices"], FAKE_CUDA_CC=61).stdout.splitlines()
    assert "? GiB free, compute capability 6.1" in lines[-2]
    assert lines[-1].startswith("       cannot be used: Fake GPU 0 has compute capability 6.1; 8.0 or newer is needed")


def test_no_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def none() -> list[object]:
        raise DriverMissing("no NVIDIA driver on this machine (libcuda is not installed)")

    monkeypatch.setattr(driver, "devices", none)
    assert main(["devices"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "no GPU: no NVIDIA driver on this machine (libcuda is not installed)"
    )
    assert main(["devices", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpus"] == [] and found["no_gpu"].startswith("no NVIDIA driver")


def test_self_test(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["devices", "--self-test"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "all right on CPU" and any(line.startswith("CPU: flash_attn") for line in lines)
    assert main(["devices", "--self-test", "--json"]) == 0
    families = json.loads(capsys.readouterr().out)
    assert all(0 <= family["worst"] <= family["bound"] for family in families) and len(families) > 5
    assert main(["devices", "--self-test", "-m", str(tmp_path / "none.gguf")]) == 1
    assert "none.gguf: no such file" in capsys.readouterr().err
