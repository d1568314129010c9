"""benchmarks/gpu.py: it runs on the emulated device, and says in one line that there is no GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from cuda_emulation import EmulatedDevice, needs_emulation

from ikcli.backends.cuda import driver
from ikcli.backends.cuda.device import NoDevice

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_gpu", SCRIPT)
    assert spec is not None and spec.loader is not None
    before = list(sys.path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmark_gpu"] = module
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@needs_emulation
def test_subjects_run_on_the_emulated_device(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "result.json"
    device = EmulatedDevice()
    assert gpu.main(["--tiny", "--only", "basic,roof,launch,delta,matvec", "--json", str(target)], device) == 0
    records = json.loads(target.read_text())["records"]
    assert {r["subject"] for r in records} == {"basic", "roof", "launch", "delta", "matvec"}
    assert all(r["ok"] for r in records if r["subject"] == "basic")
    assert len(capsys.readouterr().out.splitlines()) == len(records) + 1 and device.owners() == {}


@needs_emulation
@pytest.mark.slow  # seconds of emulation
def test_attention_as_in_generation(gpu: ModuleType, tmp_path: Path) -> None:
    """The cache may be larger than what it holds; parts follow what it holds."""
    target, device = tmp_path / "result.json", EmulatedDevice()
    arguments = ["--tiny", "--only", "mla", "--batch-invariant", "--cells", "8192", "--json", str(target)]
    assert gpu.main(arguments, device) == 0
    assert all(r["subject"] == "mla" for r in json.loads(target.read_text())["records"])
    attn = [x for x in device.history if x.kernel.startswith("attn_mla")]
    assert attn and all(x.grid[1] == 4 for x in attn)  # of 64 positions: a bucket of 256 in parts of two blocks


@needs_emulation
@pytest.mark.slow  # seconds of emulation
def test_windows(gpu: ModuleType, tmp_path: Path) -> None:
    """A window counts as many bytes as it reads."""
    target = tmp_path / "result.json"
    assert gpu.main(["--tiny", "--only", "window", "--json", str(target)], EmulatedDevice()) == 0
    found = {r["case"]: r["GB_s"] * r["us"] for r in json.loads(target.read_text())["records"]}
    for type_ in ("f16", "q8_0"):
        whole, part = (found[f"1x4 heads {type_} window {w} n_kv 96"] for w in ("none", "32"))
        assert whole == pytest.approx(3 * part)


def test_no_gpu_is_one_line(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none() -> list[object]:
        raise NoDevice("the NVIDIA driver finds no GPU")

    monkeypatch.setattr(driver, "devices", none)
    assert gpu.main([]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == "no GPU to measure: the NVIDIA driver finds no GPU\n"
    with pytest.raises(SystemExit) as stop:
        gpu.main(["--only", "speed"])
    assert stop.value.code == 2


@needs_emulation
def test_a_case_that_fails_is_reported(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(b: object) -> None:
        raise ValueError("no such thing")

    monkeypatch.setitem(gpu.SUBJECTS, "roof", broken)
    assert gpu.main(["--tiny", "--only", "roof"], EmulatedDevice()) == 1
