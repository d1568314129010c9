"""`ik plan`: memory of the machine, the verdict per device, and options that would help."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from deepseek_shapes import LITE, expert_types
from header_models import write_deepseek

from ikcli import log, main
from ikcli.cli.parser import parse
from ikcli.engine.plan import devices, memory_plan
from ikcli.engine.plan.device_memory import MemoryPlan
from ikcli.engine.plan.devices import CONTEXT_BYTES, described_machine
from ikcli.engine.plan.planner import Planner
from ikcli.engine.plan.prompt_speed import (
    CPU_OPS_PER_THREAD,
    CPU_READ,
    GPU_OPS_PER_SM,
    NEWER_BUS,
    Speeds,
    Work,
    seconds,
    speeds_of,
    work_of,
)
from ikcli.engine.run.run_device import RESERVE_BYTES
from ikcli.gguf.reader import open_gguf
from ikcli.hostinfo import available_memory
from ikcli.models import HParams
from ikcli.settings.run import RunConfig
from ikcli.settings.values import parse_device_spec

MIB = 2**20
GIB = 2**30
BASE = replace(RunConfig(command="plan"), n_threads=1, n_threads_batch=1, n_ctx=4096, n_ubatch=64)


@pytest.fixture(scope="module")
def lite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_deepseek(tmp_path_factory.mktemp("lite") / "lite.gguf", LITE, expert_types("q4_0", "q4_0"))


def planner_for(path: Path, spec: str) -> Planner:
    file = open_gguf(path, header_only=True)
    hp = HParams.from_gguf(file.metadata, file.tensors, str(path))
    return Planner(file, hp, described_machine(parse_device_spec(spec), None))


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main.main(["plan", "-t", "1", "-ub", "64", *argv])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(autouse=True)
def plain_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "utf8_streams", lambda: None)


def test_available_memory(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal: 10 kB\nMemAvailable:  2048 kB\n")
    assert available_memory(file) == 2 * MIB
    file.write_text("MemTotal: 10 kB\n")
    assert available_memory(file) is None
    assert available_memory(tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cuda:24GiB", [("cuda", 24 * GIB, None)]),
        ("2*CUDA:24gib:cc=8.6, cpu:64G", [("cuda", 24 * GIB, (8, 6))] * 2 + [("cpu", 64 * GIB, None)]),
        ("cuda:24GB,cuda:1.5GiB", [("cuda", 24 * 10**9, None), ("cuda", 3 * GIB // 2, None)]),
        ("cuda:24564MiB:cc=12.0", [("cuda", 24564 * MIB, (12, 0))]),
        ("cuda:1GiB:tops=180:CC=8.6:bus=22.5", [("cuda", GIB, (8, 6))]),
    ],
)
def test_device_spec(text, expected) -> None:
    assert [(s.kind, s.n_bytes, s.capability) for s in parse_device_spec(text)] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuda:24", "write it with a unit, 24GiB"),
        ("24GiB", "not of the form cuda:24GiB"),
        ("cuda:24GiB;cuda:24GiB", "not of the form"),
        ("cuda:24PiB", "with a unit"),
        ("cuda:1.2.3GiB", "write a number above 0 with a unit"),
        ("cuda:0GiB", "above 0"),
        ("0*cuda:1GiB", "above 0"),
        ("99999999*cuda:1GiB", "more than 64 GPUs"),
        ("cpu:1GiB,cpu:2GiB", "more than once"),
        ("cpu:1GiB:cc=8.0", "only GPUs"),
        ("cpu:1GiB:bus=8", "facts of cpu are tops and read, not bus"),
        ("cuda:1GiB:read=8", "facts of cuda are cc, tops and bus, not read"),
        ("cuda:1GiB:tops=0", "tops must be a number above 0"),
        ("cuda:1GiB:bus=1.2.3", "bus must be a number above 0"),
        ("cuda:1GiB:cc=8", "not of the form"),
        (" , ", "names no device"),
    ],
)
def test_wrong_device_specs_are_usage_errors(capsys, lite: Path, text, message) -> None:
    with pytest.raises(ValueError, match=message.replace("*", r"\*")):
        parse_device_spec(text)
    code, _, err = run(capsys, "-m", str(lite), "--device-spec", text)
    assert code == 2 and message in err and err.count("\n") == 1


def test_described_speeds_are_those_of_the_prediction() -> None:
    spec = "cuda:24GiB:tops=200:bus=20,cuda:8GiB,cpu:256GiB:tops=2:read=100"
    machine = described_machine(parse_device_spec(spec), None)
    small, large = speeds_of(machine, 16, 100 * GIB), speeds_of(machine, 16, 129 * GIB)
    assert small == Speeds(200e12, 0.8 * 20e9, 2e12, 100e9)
    assert large.bus == 0.4 * 20e9, "not all of it can be pinned"
    assumed = speeds_of(described_machine(parse_device_spec("cuda:24GiB:cc=9.0"), 64 * GIB), 16, GIB)
    assert assumed == Speeds(132 * GPU_OPS_PER_SM, 0.8 * NEWER_BUS, 16 * CPU_OPS_PER_THREAD, CPU_READ)


def test_seconds_of_a_prompt() -> None:
    work, speeds = Work(4e9, 1e9, 8e9, 20 * 10**9), Speeds(1e14, 1e10, 1e12, 5e10)
    fixed = 4e9 / 1e14 + 1e9 / 1e12
    assert seconds(work, speeds, 10, streamed=True) == pytest.approx(10 * fixed + 2)  # copies
    assert seconds(work, speeds, 10, streamed=False) == pytest.approx(10 * fixed + 0.4)  # reading
    n = 100_000
    assert seconds(work, speeds, n, streamed=True) == pytest.approx(n * (fixed + 8e-5))  # products
    assert seconds(work, speeds, n, streamed=False) == pytest.approx(n * (fixed + 8e-3))


@pytest.mark.slow  # plans a model
def test_a_plan_predicts_prompts_with_and_without_copied_experts(capsys, lite: Path) -> None:
    spec = "cuda:24GiB:tops=200:bus=20,cpu:256GiB:tops=2:read=100"
    line = ["-m", str(lite), "-rtr", "-b", "4096", "-ub", "4096", "-c", "8192", "-ngl", "99", "-ot", "exps=CPU"]
    assert main.main(["plan", *line, "-t", "16", "--device-spec", spec]) == 0
    speed, facts, where = capsys.readouterr().out.splitlines()[-3:]
    assert where.startswith("prompts: pieces of 342 tokens and more are computed on GPUs")
    assert facts.startswith(
        "speeds: CUDA0 200 TOP/s (given); bus 20 GB/s (given), of which copies reach 0.8; CPU 2 TOP/s"
    )
    planner = planner_for(lite, spec)
    plan = planner.plan(parse("plan", [*line, "-t", "16"]).config)
    work = work_of(planner, plan)
    n_routed = 26 * 3 * 64 * 1408 * 2048
    assert work.experts == pytest.approx(2 * n_routed * 6 / 64) and work.cpu == 0 and work.gpu > 0
    assert work.expert_bytes == plan.memory.parts["CPU"]["weights"] - planner.model(plan.config).n_bytes(
        ["token_embd.weight"]
    )
    rates = Speeds(200e12, 16e9, 2e12, 100e9)
    with_, without = (round(4096 / seconds(work, rates, 4096, streamed=on)) for on in (True, False))
    assert f"-ub 4096: about {with_} tokens/s" in speed and f"GPU, {without} with experts on the CPU" in speed
    assert with_ > 2 * without


def test_a_described_gpu_gives_memory_to_the_context() -> None:
    machine = described_machine(parse_device_spec("cuda:24GiB,cuda:256MiB,cpu:64GiB"), 7)
    assert machine.names == ("CUDA0", "CUDA1") and machine.ram == 64 * GIB
    assert machine.free == (24 * GIB - CONTEXT_BYTES, 0)
    assert described_machine(parse_device_spec("cuda:24GiB"), 7).ram == 7


def test_totals_and_margins() -> None:
    parts, free = {"CPU": {"weights": 5}, "CUDA0": {"weights": 6, "KV": 2}}, 9 + RESERVE_BYTES
    plan = MemoryPlan(parts, 256, {"CPU": 5, "CUDA0": free})
    assert plan.total("CUDA0") == 8 and plan.fits() and plan.fits(1) and plan.fits(RESERVE_BYTES + 1)
    assert not plan.fits(RESERVE_BYTES + 2) and plan.short("CUDA0", RESERVE_BYTES + 3) == 2 and plan.short("CPU") == 0
    assert MemoryPlan(parts, 256, {"CPU": 5, "CUDA0": free - 2}).short("CUDA0") == 1, "kernels and graphs need some"
    assert not MemoryPlan(plan.parts, 256, {"CPU": 4}).fits()
    assert MemoryPlan(plan.parts, 256, {"CPU": 4}).gpus_fit()
    assert MemoryPlan(plan.parts, 256, {}).fits()


def test_exit_code_says_whether_it_fits(capsys, monkeypatch: pytest.MonkeyPatch, shared_dir: Path) -> None:
    line = ["-m", str(shared_dir / "golden" / "models" / "tiny-llama.f16.gguf"), "-c", "256"]
    code, out, _ = run(capsys, *line)
    assert code == 0 and "CPU buffer size" in out and "fits: CPU needs" in out
    monkeypatch.setattr(devices, "available_memory", lambda: MIB // 2)
    code, out, _ = run(capsys, *line)
    assert code == 1 and "does not fit: CPU needs" in out
    monkeypatch.setattr(devices, "available_memory", lambda: None)
    code, out, _ = run(capsys, *line)
    assert code == 0 and "fit: " not in out


def test_a_machine_can_be_described_where_there_is_no_gpu(capsys, lite: Path) -> None:
    line = ["-m", str(lite), "-c", "4096", "-ngl", "99", "-ot", "exps=CPU"]
    code, out, err = run(capsys, *line, "--device-spec", "cuda:6GiB,cpu:32GiB")
    assert code == 0
    assert "no CUDA device" not in err and 'rule 1 "exps=CPU": 78 matches' in err
    assert "the data of 431 of 431 tensors" in err and "enough for a plan, not for a run" in err
    assert "llm_load_tensors: offloaded 28/28 layers to GPU" in out
    assert "CUDA0: described, 6144 MiB, of which 512 MiB are taken as used by the CUDA context (an estimate)" in out
    assert "llama_kv_cache_init:      CUDA0 KV buffer size =   121.50 MiB" in out
    assert "attention 27/27 layers, shared experts 26/26, routed experts 0/26 on GPU" in out
    assert "fits: CPU needs" in out and "fits: CUDA0 needs" in out and "5632.00 MiB are available" in out


def test_a_run_needs_real_devices_and_data(capsys, lite: Path) -> None:
    code = main.main(["sweep-bench", "-m", str(lite), "-c", "256", "--device-spec", "cuda:6GiB"])
    assert code == 2 and "add --dry-run, or use ik plan" in capsys.readouterr().err
    assert main.main(["sweep-bench", "-m", str(lite), "-c", "256"]) == 1
    assert "but the file ends at" in capsys.readouterr().err


def test_proposals_are_planned_before_they_are_made(lite: Path) -> None:
    planner = planner_for(lite, "cuda:6GiB,cpu:32GiB")
    plan = planner.plan(BASE)
    assert not plan.memory.fits() and plan.memory.short("CPU") == 0
    lines = memory_plan.verdict_lines(planner, plan)
    assert any(line.startswith("does not fit: CUDA0 needs") and "too few" in line for line in lines)
    assert lines[-1].startswith("would fit with --n-cpu-moe ")
    n = int(lines[-1].split()[4].rstrip(","))
    assert planner.plan(replace(BASE, n_cpu_moe=n)).memory.fits()
    assert not planner.plan(replace(BASE, n_cpu_moe=n - 1)).memory.fits()


@pytest.mark.slow  # plans a model a dozen times
def test_context_and_cache_type_are_proposed_where_the_cache_is_too_large(lite: Path) -> None:
    config = replace(BASE, n_ctx=131072, cpu_moe=True, no_kv_offload=False)
    spec = "cuda:4GiB,cpu:32GiB"
    planner = planner_for(lite, spec)
    plan = planner.plan(config)
    assert plan.memory.short("CUDA0")
    found = list(memory_plan.proposals(planner, plan))
    sizes = [int(text.removeprefix("-c ")) for text in found if text.startswith("-c ")]
    assert len(sizes) == 1 and sizes[0] % 256 == 0
    assert planner.plan(replace(config, n_ctx=sizes[0])).memory.fits()
    assert not planner.plan(replace(config, n_ctx=sizes[0] * 5 // 4)).memory.fits()
    smaller = planner.plan(replace(config, type_k="q8_0")).memory.fits()
    assert ("-ctk q8_0" in found) == smaller


def test_nothing_helps(lite: Path) -> None:
    planner = planner_for(lite, "cpu:1GiB")
    lines = memory_plan.verdict_lines(planner, planner.plan(BASE))
    assert lines[-1].startswith("no change of options is enough")


@pytest.mark.slow  # plans a model a dozen times
def test_where_prompts_are_computed(lite: Path, tmp_path: Path) -> None:
    config = replace(BASE, cpu_moe=True, n_ubatch=256)

    def last(planner: Planner, config: RunConfig) -> str:
        return memory_plan.verdict_lines(planner, planner.plan(config))[-1]

    planner = planner_for(lite, "cuda:12GiB,cpu:64GiB")
    assert last(planner, config).endswith("-ub 256 is below 342 tokens; from -ub 342 on a GPU does it")
    large = replace(config, n_ubatch=342)
    assert last(planner, large).startswith("prompts: pieces of 342 tokens and more are computed on GPUs")
    grown = planner.plan(large).memory.parts["CUDA0"]["compute"] - planner.plan(config).memory.parts["CUDA0"]["compute"]
    off = replace(large, offload_policy=(("ALL", False),))
    saved = planner.plan(large).memory.parts["CUDA0"]["compute"] - planner.plan(off).memory.parts["CUDA0"]["compute"]
    assert grown > 0 and saved > 0
    assert last(planner, off).endswith("because -op says so")
    assert last(planner, replace(config, cpu_moe=False)).startswith("fits: CUDA0")
    interleaved = write_deepseek(tmp_path / "r.gguf", LITE, expert_types("q4_0_r8", "q4_0_r8"))
    assert last(planner_for(interleaved, "cuda:12GiB,cpu:64GiB"), large).startswith("prompts: pieces of 342 tokens")
    assert last(planner, replace(large, run_time_repack=True)).startswith("prompts: pieces of 342 tokens")


def test_examples_of_the_page_are_command_lines() -> None:
    text = (Path(__file__).resolve().parents[1] / "docs" / "placement.md").read_text(encoding="utf-8")
    lines = [line.split("   ")[0] for line in text.splitlines() if line.startswith("ik ")]
    assert len(lines) == 5
    for line in lines:
        _, command, *argv = shlex.split(line)
        parsed = parse(command, argv)
        assert not parsed.ignored and not parsed.unsupported, line
