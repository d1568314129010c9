"""`ik doctor`: facts read from the system, roofs set against a model, advice, and the report."""

# ruff: noqa: E501  (tables)
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import needs_gcc
from fake_cuda import run as run_with_gpu

from ikcli.doctor import examination
from ikcli.doctor import machine as doctor_machine
from ikcli.doctor import roofline as doctor_measure
from ikcli.doctor.advice import machine_advice, model_advice
from ikcli.doctor.machine import KernelCache, MachineMemory, NumaNode, Processor, Roots, kernel_cache, kernel_choice
from ikcli.doctor.model import ModelReport, TokenCost, model_report, speeds, token_cost
from ikcli.doctor.roofline import GpuPeaks, Peaks, ReadRates
from ikcli.engine.plan.startup import prepare
from ikcli.gguf.reader import open_gguf
from ikcli.main import main
from ikcli.native import kernel_cache as native_cache
from ikcli.settings import thread_curve
from ikcli.settings.run import RunConfig, default_model

GIB = 2**30
CPU = Processor("x", "avx512", (), (), 16, 16, 16, None, 16, ("performance",), "acpi-cpufreq")
MEMORY = MachineMemory(64 * GIB, 60 * GIB, None, -1, 0, "madvise", (NumaNode(0, 16, 64 * GIB),), False)
CACHE = KernelCache("/c", True, 10, 1000, 0, 0, GIB)
ROOFS = Peaks(16, {"f32": 1e12, "bf16": 2e12, "i16": 2e12, "i8": 4e12}, 20e9, 100e9, {})
COST = TokenCost({"CPU": 10**9}, {"CPU": {"i8": 4e9}}, {"CPU": 4 * 10**9}, {"CPU": 1000.0}, {}, {})


def tree(root: Path, files: dict[str, str]) -> Roots:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Roots(root / "sys", root / "proc")


# -- facts


def test_memory_of_a_large_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "visible_cpus", lambda: {0, 1, 2, 5})
    roots = tree(tmp_path, {
        "proc/meminfo": "MemTotal: 1000000 kB\nMemAvailable: 500000 kB\nSwapTotal: 100 kB\nSwapFree: 40 kB\nHugePages_Total: 7\n",
        "proc/sys/kernel/numa_balancing": "1\n",
        "sys/fs/cgroup/memory.max": "102400000\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        "sys/devices/system/node/node0/cpulist": "0-3\n",
        "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal: 500 kB\n",
        "sys/devices/system/node/node1/cpulist": "4-7\n",
    })  # fmt: skip
    found = doctor_machine.memory(roots)
    assert (found.total, found.available, found.limit) == (1000000 * 1024, 500000 * 1024, 102400000)
    assert (found.swap_used, found.huge_pages, found.balancing) == (60 * 1024, "never", True)
    assert found.nodes == (NumaNode(0, 3, 500 * 1024), NumaNode(1, 1, None))


def test_nothing_is_known_elsewhere(tmp_path: Path) -> None:
    roots = Roots(tmp_path / "sys", tmp_path / "proc")
    found = doctor_machine.memory(roots)
    assert (found.available, found.limit, found.huge_pages, found.balancing, found.nodes) == (None, None, "", None, ())
    cpu = doctor_machine.processor(roots)
    assert (cpu.governors, cpu.driver, cpu.quota) == ((), None, None)


def test_limits_and_clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "visible_cpus", lambda: {0, 1, 2, 3})
    files = {"sys/fs/cgroup/cpu.max": "150000 100000\n", "proc/cpuinfo": "model name : Some CPU\n"}
    for cpu in range(4):
        base = f"sys/devices/system/cpu/cpu{cpu}"
        files[f"{base}/topology/physical_package_id"] = "0\n"
        files[f"{base}/topology/core_id"] = f"{cpu // 2}\n"
        files[f"{base}/cpufreq/scaling_governor"] = "powersave\n"
        files[f"{base}/cpufreq/scaling_driver"] = "acpi-cpufreq\n"
    found = doctor_machine.processor(tree(tmp_path, files))
    assert (found.name, found.visible, found.physical, found.quota, found.smt) == ("Some CPU", 4, 2, 2, True)
    assert (found.governors, found.driver) == (("powersave",), "acpi-cpufreq")


@pytest.mark.parametrize(
    ("target", "features", "integers"),
    [
        ("avx512", {"avx512vnni", "avx512f", "avx2", "fma"}, "AVX-512 VNNI"),
        ("avxvnni", {"avxvnni", "avx2", "fma"}, "AVX-VNNI"),
        ("avx2", {"avx2", "fma"}, "AVX2 without VNNI"),
        ("neon", {"neon"}, "NEON without"),
        ("dotprod", {"neon", "dotprod"}, "dot products"),
        ("i8mm", {"neon", "dotprod", "i8mm", "bf16"}, "matrix products"),
        ("portable", set(), "slow"),
    ],
)
def test_kernels_by_features(target: str, features: set[str], integers: str) -> None:
    assert integers in dict(kernel_choice(target, frozenset(features)))["quantized weights"]


def test_kernel_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IK_CACHE_DIR", str(tmp_path))
    here = native_cache.cache_dir()
    assert kernel_cache().n_files == 0
    here.mkdir(parents=True)
    (here / "a.kernel").write_bytes(bytes(1000))
    (here / "code-a.kernel").hardlink_to(here / "a.kernel")
    (here.parent / "other").mkdir()
    (here.parent / "other" / "b.kernel").write_bytes(bytes(50))
    (here.parent / "no-kernels").mkdir()
    found = kernel_cache()
    assert (found.path, found.writable, found.n_files, found.n_bytes) == (str(here), True, 1, 1000)
    assert (found.stale_folders, found.stale_bytes) == (1, 50)
    assert found.free is not None and found.free > 0


def test_caches_of_processors_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "visible_cpus", lambda: {0, 1, 2, 3})
    for cpu in range(4):
        shared = "0-1" if cpu < 2 else "2-3"
        tree(tmp_path, {f"cpu{cpu}/cache/index3/size": "32768K\n", f"cpu{cpu}/cache/index3/shared_cpu_list": shared})
    assert doctor_machine.l3_bytes(tmp_path) == 64 << 20
    assert doctor_machine.l3_bytes(tmp_path / "none") == 0


# -- a model against the roofs


def planned(**settings: Any) -> Any:
    return prepare(RunConfig(command="plan", model=default_model(), n_ctx=512, **settings))


def test_cost_of_a_token_of_the_bundled_model() -> None:
    """By hand: all weights once, of the experts those that are chosen; of embeddings nothing."""
    startup = planned()
    cost = token_cost(startup.planner, startup.planner.plan(startup.config))
    hp, tensors = startup.planner.hp, open_gguf(default_model()).tensors.values()
    assert hp.n_expert > hp.n_expert_used > 0
    weights, products, once = 0.0, 0.0, 0.0
    for t in tensors:
        if t.name == "token_embd.weight":
            continue
        share = hp.n_expert_used / hp.n_expert if "_exps." in t.name else 1
        weights += t.n_bytes * share
        products += 2 * t.n_elements * share * (len(t.shape) > 1)
        if t.name == "output.weight" or t.name.startswith(f"blk.{hp.n_layer - 1}.ffn_"):
            once += 2 * t.n_elements * share * (len(t.shape) > 1)
    assert cost.weights["CPU"] == pytest.approx(weights)
    assert sum(cost.products["CPU"].values()) == pytest.approx(products)
    assert sum(cost.once["CPU"].values()) == pytest.approx(once)
    assert 0 < once < products
    assert cost.batch_weights["CPU"] > cost.weights["CPU"]
    plan = startup.planner.plan(startup.config)
    assert cost.cache["CPU"] * plan.memory.n_ctx == pytest.approx(plan.memory.parts["CPU"]["KV"], rel=0.01)


def test_what_limits() -> None:
    prompt, empty, full = speeds(COST, ROOFS, 512, 10**6)
    assert prompt.tokens_per_s == pytest.approx(1000)  # 4e9 at 4e12 per second
    assert prompt.limit == "products of i8"
    once = replace(COST, once={"CPU": {"i8": 2e9}})  # of the last token only
    assert speeds(once, ROOFS, 512, 10**6)[0].tokens_per_s == pytest.approx(512 / (513 * 2e9 / 4e12))
    assert (empty.tokens_per_s, empty.limit) == (pytest.approx(100), "memory bandwidth")
    assert full.tokens_per_s == pytest.approx(50)
    prompt, *_ = speeds(COST, ROOFS, 8, 512)  # 8 tokens: 8 ms of products, 40 ms of weights
    assert prompt.tokens_per_s == pytest.approx(200)
    assert "larger -ub" in prompt.limit
    slow = replace(ROOFS, products={"f32": 1e11, "i8": 1e11})
    assert [s.limit for s in speeds(COST, slow, 512, 512)][1:] == ["products", "products"]


def test_devices_whose_roofs_are_not_known() -> None:
    cost = replace(COST, weights={"CPU": 10**9, "CUDA0": 10**9})
    assert [s.tokens_per_s for s in speeds(cost, ROOFS, 512, 0)] == [None, None, None]
    with_gpu = replace(ROOFS, gpus=(GpuPeaks("CUDA0", 1e12, 25e9),))
    _, empty, _ = speeds(cost, with_gpu, 512, 0)
    assert empty.tokens_per_s == pytest.approx(1 / (0.01 + 0.001))
    assert empty.limit == "memory bandwidth (91 % of the time)"


def test_report_of_a_model() -> None:
    startup = planned()
    found = model_report(startup.planner, startup.config, None)
    assert (found.arch, found.fits, found.speeds, found.n_ctx) == ("deepseek2", True, (), 512)
    assert sum(n for _, n in found.types) == found.n_bytes
    assert len(model_report(startup.planner, startup.config, ROOFS).speeds) == 3


# -- advice


def said(advice: Any) -> list[str]:
    return [a.what for a in advice]


def test_advice_about_the_machine() -> None:
    assert machine_advice(CPU, MEMORY, CACHE, ROOFS) == []
    assert said(machine_advice(replace(CPU, quota=4, threads=4), MEMORY, CACHE, None)) == ["-t 4"]
    assert said(machine_advice(replace(CPU, visible=32), MEMORY, CACHE, None)) == ["-t 16"]
    slow = replace(CPU, governors=("powersave",))
    assert said(machine_advice(slow, MEMORY, CACHE, None)) == ["cpupower frequency-set -g performance"]
    assert machine_advice(replace(slow, driver="amd-pstate-epp"), MEMORY, CACHE, None) == []
    nodes = replace(MEMORY, nodes=(NumaNode(0, 8, 1), NumaNode(1, 8, 1)), balancing=True)
    assert said(machine_advice(CPU, nodes, CACHE, None)) == [
        "--numa distribute --no-mmap",
        "echo 0 > /proc/sys/kernel/numa_balancing",
    ]
    assert "transparent_hugepage" in said(machine_advice(CPU, replace(MEMORY, huge_pages="never"), CACHE, None))[0]
    assert "swap" in machine_advice(CPU, replace(MEMORY, swap_used=2 * GIB), CACHE, None)[0].why
    assert said(machine_advice(CPU, MEMORY, replace(CACHE, writable=False), None)) == ["IK_CACHE_DIR=FOLDER"]
    assert said(machine_advice(CPU, MEMORY, replace(CACHE, stale_bytes=GIB), None)) == ["make clean-cache"]
    narrow = machine_advice(CPU, MEMORY, CACHE, replace(ROOFS, read_one=95e9))
    assert "hardly faster than one" in narrow[0].why


def test_advice_about_a_model() -> None:
    model = ModelReport(
        "m", "llama", 10**10, 8 * GIB, (), 0, 4096, 512, {"CPU": 9 * GIB}, {"CPU": 60 * GIB}, True, COST, ()
    )
    assert said(model_advice(model, MEMORY, 0, False)) == []
    assert said(model_advice(model, MEMORY, 7 * GIB, True)) == ["-rtr"]
    assert said(model_advice(replace(model, n_bytes=40 * GIB), MEMORY, 0, True)) == ["--no-mmap"]
    both = model_advice(replace(model, needs={"CPU": GIB, "CUDA0": GIB}), MEMORY, 7 * GIB, False)
    assert "beside a GPU it keeps the prompt work of weights in RAM on the CPU" in both[0].why
    assert "GPU" not in model_advice(model, MEMORY, 7 * GIB, False)[0].why
    short = replace(model, fits=False, needs={"CPU": 90 * GIB})
    assert "does not fit into CPU" in model_advice(short, MEMORY, 0, False)[0].why
    gpu = replace(
        model, fits=False, n_experts=8, needs={"CUDA0": 30 * GIB, "CPU": 1}, free={"CUDA0": 24 * GIB, "CPU": 2}
    )
    assert said(model_advice(gpu, MEMORY, 0, False)) == ["-ngl 99 -ot exps=CPU"]
    assert said(model_advice(replace(model, n_bytes=61 * GIB), MEMORY, 0, False)) == ["ik quantize --target-size"]
    deep = replace(model, n_ctx=10**6)
    assert said(model_advice(deep, MEMORY, 0, False)) == ["-ctk q8_0 (and -ctv q8_0)"]
    waits = replace(model, speeds=tuple(speeds(COST, ROOFS, 8, 512)), n_ubatch=8)
    assert said(model_advice(waits, MEMORY, 0, False)) == ["-ub 16 or more"]


# -- the command


def test_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pages = {"mapped file": ReadRates(21e9, 80e9, 90e9)}
    measured = replace(ROOFS, read_nodes={0: 50e9}, problems=("these are too low: x",), pages=pages)
    monkeypatch.setattr("ikcli.doctor.examination.measure", lambda threads, file: replace(measured, threads=threads))
    assert main(["doctor", "-m", str(default_model()), "-c", "512", "-t", "3"]) == 0
    text = capsys.readouterr().out
    for part in ("processor ", "cores ", "quantized weights: ", "huge pages ", "GPU ", "kernel cache ", "i8 4.00 T",
                 "100.0 GB/s by 3 (medians",
                 "mapped file: 21.0 GB/s by one thread, 80.0 GB/s by 3, 90.0 GB/s in the fastest pass", "node 0: 50.0 GB/s", "too low: x", "with 512 tokens of context", "advice ",
                 "generation, empty cache: at most "):  # fmt: skip
        assert part in text, part


def test_json_without_measuring(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        "ikcli.doctor.examination.measure", lambda threads, file: pytest.fail("it was told not to measure")
    )
    assert main(["doctor", "--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["roofs"], found["model"]) == (None, None)
    assert found["processor"]["threads"] >= 1
    assert main(["doctor", "--quick", "-m", str(default_model())]) == 0
    assert "no speeds: nothing was measured" in capsys.readouterr().out


def test_a_model_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("ikcli.engine.plan.devices.available_memory", lambda: 1 << 20)
    assert main(["doctor", "--quick", "-m", str(default_model())]) == 1
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text
    assert "ik plan -m MODEL" in text


def test_bad_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.gguf").write_bytes(b"nothing")
    for argv, code, problem in (
        (["-m", str(tmp_path / "none.gguf")], 2, "no such file"),
        (["-m", str(tmp_path)], 2, "is a folder"),
        (["-m", str(tmp_path / "x.gguf")], 1, "x.gguf"),
        (["-ub", "0"], 2, "is less than 1"),
        (["x"], 2, "unexpected argument"),
    ):
        assert main(["doctor", *argv]) == code
        out = capsys.readouterr()
        assert (out.out, problem in out.err) == ("", True), argv


def test_measuring_is_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it for real, on little memory: every kind of pages, and a file if it is large enough."""
    for name, value in {"_LEAST": 1 << 20, "_MOST": 1 << 20, "_PRODUCT_S": 0.0}.items():
        monkeypatch.setattr(doctor_measure, name, value)
    monkeypatch.setattr(doctor_measure, "thp_state", lambda: "madvise")
    file = tmp_path / "model"
    file.write_bytes(bytes(3 << 20))
    found = doctor_measure.measure(2, file, seconds=0.01)
    assert found.products["i8"] > 0
    assert [name.split(" ", 1)[-1] for name in found.pages] == ["KiB pages", "MiB pages", "file"]
    assert all(rates.fastest >= rates.all > 0 < rates.one for rates in found.pages.values())
    assert found.read_all == max(rates.all for rates in found.pages.values())
    assert found.read_one == max(rates.one for rates in found.pages.values())
    assert found.gpus == ()
    monkeypatch.setattr(doctor_measure, "thp_state", lambda: "never")
    file.write_bytes(bytes(1000))
    assert len(doctor_measure._kinds(1 << 20, file)) == 1


def test_rates_are_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst at the beginning does not count, and a file is not written."""
    calls: list[tuple[int, int, bool]] = []

    def rates(data: np.ndarray, threads: int, *, fill: bool, repeat: int, seconds: float) -> list[float]:
        calls.append((len(data), threads, fill))
        return [87e9 if len(calls) < 3 else 40e9, 40e9 + threads]

    monkeypatch.setattr(doctor_measure, "read_rates", rates)
    file = np.frombuffer(bytes(9), np.uint8)
    found = doctor_measure.read_pages({"small": np.zeros(8, np.uint8), "file": file}, 2, 1.0)
    assert found["small"] == ReadRates(40e9 + 1, 40e9 + 2, 87e9) and found["file"].fastest == 40e9 + 2
    assert [call for call in calls if call[2]] == [(8, 2, True)] and len(calls) == 12


def test_bandwidth_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of threads take turns in one memory; the number of fast cores is among them."""
    calls: list[tuple[int, bool]] = []

    def rates(data: np.ndarray, threads: int, *, fill: bool, repeat: int, seconds: float) -> list[float]:
        calls.append((threads, fill))
        return [min(threads, 4) * 1e10]

    monkeypatch.setattr(doctor_measure, "read_rates", rates)
    monkeypatch.setattr(doctor_measure, "performance_count", lambda cpus: 6)
    assert doctor_measure._curve(1 << 20, 8) == {2: 2e10, 4: 4e10, 6: 4e10, 8: 4e10}
    assert calls[:4] == [(8, True), (6, False), (4, False), (2, False)] and calls.count((8, False)) == 2
    assert doctor_measure._curve(1 << 20, 2) == {}


def test_the_curve_is_kept_for_later_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("IK_CACHE_DIR", str(tmp_path))
    curve = {1: 1e10, 4: 4e10, 8: 3e10}
    roofs = replace(ROOFS, threads=8, by_threads=curve)

    def doctor(*argv: str, roofs: Peaks = roofs) -> str:
        monkeypatch.setattr(examination, "measure", lambda threads, file: roofs)
        assert main(["doctor", *argv]) == 0
        return capsys.readouterr().out

    for argv, busy in (("--quick",), False), (("-t", "8"), False), ((), True):
        out = doctor(*argv, roofs=replace(roofs, disturbed=busy))
        assert thread_curve.remembered() == {}
    assert "4 threads read faster than 8, so try -t 4: measure again on an idle machine" in out
    assert "GB/s by threads: 1: 10.0, 4: 40.0, 8: 30.0" in doctor()
    assert thread_curve.remembered() == curve and thread_curve.best_threads(curve) == 4
    monkeypatch.setattr(thread_curve, "visible_cpus", lambda: {900})  # other CPUs, which have a curve of their own
    assert thread_curve.remembered() == {} and thread_curve.remember({1: 1.0})
    assert thread_curve.remembered() == {1: 1.0} and len(json.loads(thread_curve.curve_file().read_text())) == 2
    for damage in ("[1]", "{", '{"900": 3}', '{"900": {"x": 1}}'):
        thread_curve.curve_file().write_text(damage)
        assert thread_curve.remembered() == {}
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert not thread_curve.remember(curve, blocked / "threads.json")


@needs_gcc
@pytest.mark.slow  # seconds of emulation
def test_gpus_are_measured() -> None:
    result = run_with_gpu(["-m", "ikcli", "doctor", "-t", "1", "--json"], FAKE_CUDA_DEVICES=1)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert [g["name"] for g in found["gpus"]] == ["CUDA0"]
    assert [g["name"] for g in found["roofs"]["gpus"]] == ["CUDA0"]
    assert all(g["memory"] > 0 and g["pcie"] > 0 for g in found["roofs"]["gpus"])
