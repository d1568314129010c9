"""tools/device_check.py with checks that are small scripts: budget, hangs, going on where it stopped, what is written.

And that its list is that of docs/gpu.md, that its commands are ones, and what it measures on an emulated GPU.
"""

from __future__ import annotations

import importlib.util
import json
import re
import stat
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import device_check as tool
import device_checks
import device_measure as measure
import make_random_model
import numpy as np
import pytest
from cuda_emulation import EmulatedDevice, needs_emulation
from cuda_sessions import Opener, config, written
from device_checks import CHECKS, LOGITS, MODELS, Check, Setup
from fake_cuda import library_folder, needs_gcc

from ikcli.backends.cuda.modules import Package
from ikcli.cli.parser import parse
from ikcli.engine.run import gpus
from ikcli.engine.run.run_device import RESERVE_BYTES
from ikcli.errors import UsageError

ROOT = Path(__file__).resolve().parents[1]


def script(name: str, text: str, value: int = 1, seconds: float = 0.01, **more: Any) -> Check:
    """A check that runs Python; `target` is its JSON file. It notes in `calls` that it ran."""

    def run(setup: Setup, target: Path) -> list[str]:
        note = f"open({str(setup.output / 'calls')!r}, 'a').write({name!r} + ' ')"
        return [sys.executable, "-I", "-S", "-c", f"import json\n{note}\ntarget = {str(target)!r}\n{text}"]

    return Check(name, value, seconds, run, needs=(), **more)


GOOD = "json.dump({'us': 1.25}, open(target, 'w'))"
BAD = "json.dump({'worst': 3.0}, open(target, 'w')); raise SystemExit('the result is wrong')"
HANG = "import time; time.sleep(60)"


@pytest.fixture
def call(tmp_path: Path) -> Callable[..., int]:
    """The tool on the same output folder."""

    def run(checks: Sequence[Check], *argv: str, unmet: Any = lambda need, setup: None) -> int:
        return tool.main(["-o", str(tmp_path / "out"), "--work", str(tmp_path / "work"), *argv], checks, unmet)

    return run


def records(tmp_path: Path) -> list[tuple[str, str]]:
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    return [(r["check"], r["status"]) for r in map(json.loads, lines)]


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "out" / "calls").read_text().split()


def test_checks_run_by_value_and_are_written_one_by_one(call: Any, tmp_path: Path) -> None:
    n_before = "import pathlib; p = pathlib.Path(target).parent / 'results.jsonl'\n"
    last = n_before + "json.dump({'records before': len(p.read_text().splitlines())}, open(target, 'w'))"
    checks = [script("last", last, 1), script("bad/case", BAD, 5), script("good", GOOD, 9)]
    assert call(checks) == 1
    assert calls(tmp_path) == ["good", "bad/case", "last"]
    assert records(tmp_path) == [("good", "ok"), ("bad/case", "failed"), ("last", "ok")]
    lines = [json.loads(x) for x in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [x["values"] for x in lines] == [{"us": 1.25}, {"worst": 3.0}, {"records before": 2}]
    assert lines[1]["reason"] == "exit code 1: the result is wrong"
    table = (tmp_path / "out" / "results.md").read_text().splitlines()
    assert [re.sub(r" \| \d+ \|", " | s |", line) for line in table] == [
        "| check | result | s | found |",
        "|---|---|---:|---|",
        "| last | ok | s | records before 2 |",
        "| bad/case | failed | s | exit code 1: the result is wrong<br>worst 3 |",
        "| good | ok | s | us 1.25 |",
    ]
    assert "=== bad/case: failed\nexit code 1\nthe result is wrong" in (tmp_path / "out" / "logs.txt").read_text()
    assert (tmp_path / "out" / "device_digests.json").read_bytes() == measure.DIGESTS.read_bytes()


def test_a_second_call_skips_what_is_done(call: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checks = [script("good", GOOD, 9), script("bad", BAD, 5), script("new", GOOD, 1)]
    assert call(checks[:1]) == 0 and call(checks[:2]) == 1
    call(checks)
    assert calls(tmp_path) == ["good", "bad", "new"]
    call(checks, "--only", "good")  # done or not
    assert calls(tmp_path)[3:] == ["good"]
    with pytest.raises(SystemExit):
        call(checks, "--only", "goods")
    assert "check goods does not exist" in capsys.readouterr().err


def test_what_takes_longer_than_is_left_does_not_start(call: Any, tmp_path: Path, capsys: Any) -> None:
    checks = [script("long", GOOD, 9, seconds=60), script("short", GOOD, 1, seconds=20)]
    assert call(checks, "--seconds", "50", "--list") == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == ["long", "short"]
    assert listed[0].endswith("60 s  no time") and listed[1].endswith("20 s  runs")
    assert not (tmp_path / "out").exists()
    assert call(checks, "--seconds", "50") == 0
    assert calls(tmp_path) == ["short"] and records(tmp_path) == [("short", "ok")]
    assert "| long | not run |" in (tmp_path / "out" / "results.md").read_text()
    call(checks, "--seconds", "90")
    assert calls(tmp_path) == ["short", "long"]


def test_models_that_are_to_be_made_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check = replace(script("sweep", GOOD, seconds=10), models=("dense",), reference=True)
    setup = Setup(tmp_path, tmp_path)
    assert tool.Run(setup, [check], 1).estimate(check) == 10 + MODELS["dense"].seconds
    setup.model("dense").touch()
    assert tool.Run(setup, [check], 1).estimate(check) == 10
    assert tool.Run(replace(setup, reference=tmp_path), [check], 1).estimate(check) == 20


def test_a_hang_costs_only_itself(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "_LEAST_TIMEOUT", 0.2)
    checks = [script("hangs", HANG, 9), script("good", GOOD, 1, seconds=20)]
    assert call(checks) == 1
    assert records(tmp_path) == [("hangs", "timeout"), ("good", "ok")]
    assert "| hangs | timeout | 0 | ended after 0 s |" in (tmp_path / "out" / "results.md").read_text()
    checks.append(script("new", GOOD, 0, seconds=20))
    call(checks)  # last, once more
    assert records(tmp_path)[2:] == [("new", "ok"), ("hangs", "timeout")]
    call(checks)
    assert len(records(tmp_path)) == 4


def test_the_time_of_a_check_ends_with_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def process(command: Any, environment: Any, timeout: float) -> tuple[str, str]:
        given.append(timeout)
        return "ok", ""

    monkeypatch.setattr(tool, "_process", process)
    for seconds, budget in ((1.0, 500.0), (30.0, 500.0), (20.0, 25.0)):
        tool.Run(Setup(tmp_path, tmp_path), (), budget).run(script("x", GOOD, seconds=seconds))
    assert [round(t) for t in given] == [60, 90, 25]


def test_a_check_during_which_everything_ended_is_tried_last(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = [script("kills", GOOD, 9), script("good", GOOD, 1)]

    def stopped(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tool, "_process", stopped)
        call(checks)
    assert (tmp_path / "out" / "running").read_text() == "kills"
    assert call(checks) == 0
    assert records(tmp_path) == [("kills", "died"), ("good", "ok"), ("kills", "ok")]
    assert not (tmp_path / "out" / "running").exists()


def test_what_cannot_run_is_never_passed(call: Any, tmp_path: Path) -> None:
    check = replace(script("sanitizer", GOOD), needs=("program:compute-sanitizer",))

    def unmet(need: str, setup: Setup) -> str | None:
        assert need == "program:compute-sanitizer"
        return "compute-sanitizer is not on this machine"

    for _ in range(2):  # asked for again, recorded once
        assert call([check], unmet=unmet) == 0
        assert records(tmp_path) == [("sanitizer", "not available")]
    table = (tmp_path / "out" / "results.md").read_text()
    assert "| sanitizer | not available | 0 | compute-sanitizer is not on this machine |" in table
    call([check])
    assert records(tmp_path)[1:] == [("sanitizer", "ok")]


def test_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason: list[str | None] = ["no NVIDIA driver"]
    monkeypatch.setattr(measure.driver, "why_none", lambda: reason[0])
    monkeypatch.setattr(measure.driver, "devices", lambda: [EmulatedDevice().info])
    setup = Setup(tmp_path, tmp_path)
    for need in ("gpu", "gpu or trial", "small-shared"):
        assert device_checks.unmet(need, setup) == "no NVIDIA driver"
    assert device_checks.unmet("gpu or trial", replace(setup, trial=True)) is None
    assert device_checks.unmet("gpu", replace(setup, trial=True)) == "no NVIDIA driver"
    reason[0] = None
    assert device_checks.unmet("gpu", setup) is None
    assert "shared memory" in str(device_checks.unmet("small-shared", setup))
    assert device_checks.unmet("program:no-such-program", setup) == "no-such-program is not on this machine"
    assert "--prepare" in str(device_checks.unmet("logits:dense", setup))
    (tmp_path / "logits-dense.npz").touch()
    assert device_checks.unmet("logits:dense", setup) is None


# --- sweeps ----------------------------------------------------------------------------------------------------------
def program(path: Path, pp: float, tg: float) -> str:
    """An executable that prints a table and notes that it was called."""
    row = f"| 512 | 32 | 0 | 0.028 | {pp} | 0.009 | {tg} |\n| 512 | 32 | 8192 | 0.028 | {pp} | 0.009 | {tg / 2} |"
    head = "|    PP |     TG |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |\n|--|--|--|--|--|--|--|"
    path.write_text(
        f"#!{sys.executable} -IS\nimport sys\nopen({str(path.parent / 'turns')!r}, 'a').write({path.name!r} + ' ')\n"
        f"open({str(path) + '.argv'!r}, 'w').write(' '.join(sys.argv[1:]))\nprint({head + chr(10) + row!r})\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_sweep_runs_in_turns_with_the_reference(tmp_path: Path) -> None:
    check = next(c for c in CHECKS if c.name == "mla/q8_0-q8_0-mla2")
    program(tmp_path / "llama-sweep-bench", 200, 40)
    setup = Setup(tmp_path, tmp_path, reference=tmp_path, ik=program(tmp_path / "ik", 300, 30))
    setup.model("lite-q8_0").touch()
    run = tool.Run(setup, [check], 100)
    record = run.run(check)
    assert record["status"] == "ok", record
    assert (tmp_path / "turns").read_text().split() == ["ik", "llama-sweep-bench"]
    options = f"-m {setup.model('lite-q8_0')} -c 33280 -ub 512 -t 16 -fa on -mla 2 -wb -ngl 99 -n 32 -b 2048 " \
              "--sweep-stride 16 -ctk q8_0"  # fmt: skip
    assert (tmp_path / "ik.argv").read_text() == f"sweep-bench {options}"
    assert (tmp_path / "llama-sweep-bench.argv").read_text() == options
    found = "N_KV 0: pp 300 (1.50), tg 30 (0.75)<br>N_KV 8192: pp 300 (1.50), tg 15 (0.75)"
    assert run.table().splitlines()[2].endswith(f"| {found} |")
    alone = run.__class__(replace(setup, reference=None, output=tmp_path / "alone"), [check], 100)
    alone.setup.output.mkdir()
    assert alone.run(check)["status"] == "ok"
    assert (tmp_path / "turns").read_text().split() == ["ik", "llama-sweep-bench", "ik"]
    assert alone.table().splitlines()[2].endswith("| N_KV 0: pp 300, tg 30<br>N_KV 8192: pp 300, tg 15 |")


def test_a_folder_without_the_reference_is_refused(call: Any, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        call([], "--reference", str(tmp_path))
    assert f"{tmp_path} has no llama-sweep-bench" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        call([], "--inputs", str(tmp_path))
    assert "write it with --prepare" in capsys.readouterr().err


# --- the list --------------------------------------------------------------------------------------------------------
def test_every_item_has_a_check_and_every_check_an_item() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text().partition("## Checks")[2]
    items = re.findall(r"^- \[[ x]\] (.*)", text, re.M)
    named = [re.match(r"`([a-z0-9-]+)`: ", item) for item in items]
    assert all(named), [item for item, name in zip(items, named, strict=True) if name is None]
    assert [m[1] for m in named if m] == list(dict.fromkeys(c.item for c in CHECKS))


def test_checks_are_in_order_and_named_once() -> None:
    values = [c.value for c in CHECKS]
    assert values == sorted(values, reverse=True)
    assert len({c.name for c in CHECKS}) == len(CHECKS) and all(c.seconds > 0 for c in CHECKS)
    assert {m for c in CHECKS for m in c.models} == set(MODELS)


def _subjects() -> set[str]:
    spec = importlib.util.spec_from_file_location("benchmark_gpu_subjects", ROOT / "benchmarks" / "gpu.py")
    assert spec is not None and spec.loader is not None
    before, module = list(sys.path), importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    sys.path[:] = before
    return {*module.SUBJECTS, "attention"}


@pytest.mark.parametrize("trial", [False, True])
def test_commands_are_ones(trial: bool, tmp_path: Path) -> None:
    """Options of runs are those of `ik`, subjects those of benchmarks/gpu.py, tests exist."""
    setup, subjects = Setup(tmp_path, tmp_path, trial=trial), _subjects()
    for check in CHECKS:
        command = check.run(setup, tmp_path / "check.json")
        if "--" in command:
            options = command[command.index("--") + 1 :]
            found = parse("sweep-bench", options).config
            if "compare_reference.py" in command[1]:
                assert str(setup.model(check.models[0])) in command and (found.n_gpu_layers == 0) == trial
            else:
                assert found.model == setup.model(check.models[0])
        elif command[1].endswith("gpu.py"):
            assert set(command[command.index("--only") + 1].split(",")) <= subjects
            assert ("--tiny" in command) == trial
        else:
            tests = [x for x in command if Path(x).name.startswith("test_")]
            assert len(tests) == 1 and (ROOT / "tests" / tests[0]).is_file()


def test_models_have_the_types_that_the_reference_has_kernels_for() -> None:
    parts = [c.models[0] for c in CHECKS if c.reference]
    for name in dict.fromkeys(parts):
        options = dict(zip(MODELS[name].options[::2], MODELS[name].options[1::2], strict=True))
        layers, experts = (int(options.get(key, 0)) or None for key in ("--layers", "--experts"))
        preset = make_random_model.PRESETS[options["--preset"]].changed(layers, None, experts)
        rules = [options["--custom-q"]] if "--custom-q" in options else []
        _, tensors = make_random_model.tensors_of(preset, options["--type"], rules)
        assert {t.type.name for t in tensors if "_exps" not in t.name} <= {"F32", "IQ4_K", "Q8_0"}, name
        assert {t.type.name for t in tensors} <= {"F32", "IQ4_K", "Q4_K", "Q6_K", "Q8_0"}, name


@needs_gcc
@pytest.mark.slow  # a process per check
def test_benchmarks_start_on_a_driver(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of benchmarks/gpu.py, with their own search path, on the stand-in for libcuda that computes nothing."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library_folder()))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    checks = [c for c in CHECKS if c.name in ("window/kernels", "mla-floor", "gqa", "prompts", "matvec")]
    assert len(checks) == 5 and call(checks, "--trial") == 0
    assert records(tmp_path) == [(c.name, "ok") for c in checks]


# --- what is carried -------------------------------------------------------------------------------------------------
def test_what_is_prepared_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are stand-ins here, logits have the size of real ones."""
    made: list[str] = []

    def process(command: list[str], environment: Any, timeout: float) -> tuple[str, str]:
        if "-o" in command:
            Path(command[command.index("-o") + 1]).write_bytes(b"model")
            made.append(command[command.index("--preset") + 1])
        else:
            rows = np.random.default_rng(1).standard_normal((measure.N_PROMPT + measure.N_STEPS, 600), np.float32)
            np.savez(command[command.index("--expected") + 1], logits=rows, digest="")
        return "ok", ""

    monkeypatch.setattr(tool, "_process", process)
    assert all("600" in MODELS[model].options for model, _ in LOGITS.values())  # so few tokens
    n_bytes = tool.prepare(tmp_path / "inputs")
    assert n_bytes == sum(p.stat().st_size for p in (tmp_path / "inputs").iterdir()) < 1_000_000
    assert len(made) == len({model for model, _ in LOGITS.values()})
    prepared = json.loads((tmp_path / "inputs" / tool.PREPARED).read_text())
    assert [c["name"] for c in prepared["checks"]] == [c.name for c in CHECKS]
    assert prepared["kernels"] == Package.installed().files
    assert {p.name for p in (tmp_path / "inputs").iterdir()} == {
        tool.PREPARED, *(f"logits-{case}.npz" for case in LOGITS)
    }  # fmt: skip
    monkeypatch.setattr(tool, "MOST_PREPARED", n_bytes - 1)
    with pytest.raises(SystemExit, match="more than"):
        tool.prepare(tmp_path / "inputs")


@pytest.mark.slow  # makes a model of 60 MB
def test_prepared_logits_are_those_of_a_run(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool.prepare(tmp_path / "inputs", ("dense",))
    check = [c for c in CHECKS if c.name == "logits/dense"]
    assert call(check, "--trial", "--inputs", str(tmp_path / "inputs"), unmet=device_checks.unmet) == 0
    assert records(tmp_path) == [("logits/dense", "ok")]
    path = tmp_path / "inputs" / "logits-dense.npz"
    saved = dict(np.load(path))
    np.savez(path, logits=saved["logits"][:, ::-1], digest=saved["digest"])
    assert call(check, "--trial", "--inputs", str(tmp_path / "inputs"), "--only", "logits") == 1
    np.savez(path, logits=saved["logits"], digest="another")
    assert call(check, "--trial", "--inputs", str(tmp_path / "inputs"), "--only", "logits") == 1


# --- kernels ---------------------------------------------------------------------------------------------------------
def test_kernels_that_changed_name_their_tests(tmp_path: Path) -> None:
    path, files = tmp_path / "digests.json", {"attn_mla": "1", "layer_recurrent": "2", "layer_moe": "3", "util": "4"}
    known = {"test_cuda_layers.py": {"layer_moe": "3"}, "test_cuda_attention.py": {"attn_mla": "0"},
             "test_cuda_attention_kv.py": {"attn_mla": "1"}}  # fmt: skip
    path.write_text(json.dumps({"device": "", "tests": known}))
    assert measure.changed(files, path) == {
        "test_cuda_attention.py": ("attn_mla",),
        "test_cuda_layers_moe.py": ("layer_moe",),
        "test_cuda_recurrent.py": ("layer_recurrent",),
    }
    measure.passed("test_cuda_attention.py", "a GPU", path)
    now = {
        name: digest
        for name, digest in Package.installed().files.items()
        if "test_cuda_attention.py" in measure.covering(name)
    }
    assert json.loads(path.read_text()) == {"device": "a GPU", "tests": {**known, "test_cuda_attention.py": now}}
    assert "test_cuda_attention.py" not in measure.changed(path=path)
    assert len(measure.changed(path=path)["test_cuda_attention_kv.py"]) == len(now)  # each test counts on its own


def test_every_kernel_has_tests_that_exist() -> None:
    """Those of `util` and `roof` are run by benchmarks/gpu.py."""
    files = Package.installed().files
    assert {name for name in files if not measure.covering(name)} == {"util", "roof"}
    assert all((ROOT / "tests" / name).is_file() for name in measure.test_files())
    assert {f"kernels/{name.removesuffix('.py')}" for name in measure.test_files()} == {
        c.name for c in CHECKS if c.item == "kernels"
    }
    for test, kernels in measure.read_digests().items():
        assert test in measure.test_files() and set(kernels) <= set(files)


def test_tests_that_fail_leave_the_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "digests.json"
    path.write_text(json.dumps({"device": "", "tests": {}}))
    done = {"code": 1, "out": "1 failed, 2 passed in 3 s\n"}

    def run(command: list[str], **settings: Any) -> Any:
        assert (
            settings["env"]["IK_TEST_GPU"] == "1"
            and "not slow" not in command
            and command[-1] == "tests/test_cuda_layers.py"
        )
        return type("Done", (), {"returncode": done["code"], "stdout": done["out"], "stderr": ""})

    monkeypatch.setattr(measure.subprocess, "run", run)
    monkeypatch.setattr(measure.driver, "devices", lambda: [EmulatedDevice().info])
    for code, out in ((1, "1 failed, 2 passed in 3 s\n"), (0, "5 skipped in 1 s\n")):  # skipped is not passed
        done |= {"code": code, "out": out}
        assert not measure.tests("test_cuda_layers.py", path)[1]
        assert measure.read_digests(path) == {}
    done |= {"code": 0, "out": "5 passed in 1 s\n"}
    assert measure.tests("test_cuda_layers.py", path)[1]
    assert measure.read_digests(path)["test_cuda_layers.py"]["layer_moe"] == Package.installed().files["layer_moe"]


# --- measurements ----------------------------------------------------------------------------------------------------
@pytest.fixture
def opener(monkeypatch: pytest.MonkeyPatch) -> Opener:
    opener = Opener()
    monkeypatch.setattr(gpus, "open_devices", opener)
    return opener


@needs_emulation
def test_logits_are_compared(opener: Opener, tmp_path: Path) -> None:
    path = written(tmp_path, "llama")
    wanted = measure.expect(path, 3)
    found, ok = measure.logits(config(path, mla=3), wanted)
    assert ok and found["devices"] == ["emulated H200"] and found["same_top_token"] == 1.0


def test_logits_that_differ_are_found() -> None:
    wanted = np.random.default_rng(1).standard_normal((23, 600)).astype(np.float32)
    assert measure.difference(wanted + np.float32(0.01), wanted)[1]
    assert not measure.difference(wanted[:, ::-1], wanted)[1]
    assert not measure.difference(wanted[:, :-1], wanted)[1]
    one, nan = wanted.copy(), wanted.copy()
    one[22, 7] += 1  # a single row
    nan[3, 5] = np.nan
    assert not measure.difference(one, wanted)[1] and not measure.difference(nan, wanted)[1]


@needs_emulation
@pytest.mark.slow  # emulates several tokens
def test_turns(opener: Opener, tmp_path: Path) -> None:
    found, ok = measure.turns(config(written(tmp_path, "deepseek2"), override_tensor=("exps=CPU",)), n=2)
    assert ok and found["round_trips"] == found["turns_beside_cpu"] == 2  # layers with experts, shared ones beside them
    spent = found["us_cpu"] + found["us_waiting"] + found["us_queueing"]
    assert 0 < spent <= found["us_per_token"] and found["us_kernels_gpu"] > 0


@needs_emulation
@pytest.mark.slow  # emulates prompts
def test_streamed_weights(opener: Opener, tmp_path: Path) -> None:
    run = config(
        written(tmp_path, "deepseek2"), override_tensor=("exps=CPU",), n_ubatch=64, n_ctx=64, offload_min_batch=2
    )
    found, ok = measure.stream(run, runs=1)
    assert ok and found["weights"] == 3 and 0 < found["pinned_mib"] <= found["streamed_mib"]
    assert found["pinned_seconds"] > 0 and found["buffered_seconds"] > 0
    assert not measure.stream(replace(run, offload_policy=(("ALL", False),)), runs=1)[1]


class Costly(EmulatedDevice):
    """A device of which kernels and graphs take memory that nobody allocated."""

    taken = 0

    def memory(self) -> tuple[int, int]:
        free, total = super().memory()
        return free - self.taken, total

    def capture(self, stream: Any, work: Callable[[], None]) -> Any:
        Costly.taken += 100 << 20
        return super().capture(stream, work)


@needs_emulation
@pytest.mark.slow  # emulates steps of several sizes
def test_memory_of_graphs_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Costly, "taken", 0)
    monkeypatch.setattr(gpus, "open_devices", lambda config: {"CUDA0": Costly()})
    found, ok = measure.memory(config(written(tmp_path, "llama"), n_ctx=256), EmulatedDevice(), (1, 2))
    assert found["graphs"] == 2 and found["code_mib"] == 0 and found["code_and_graphs_mib"] == pytest.approx(200)
    assert ok and found["reserve_mib"] == RESERVE_BYTES / 2**20 == 256
    monkeypatch.setattr(Costly, "taken", 0)
    assert not measure.memory(config(written(tmp_path, "llama"), n_ctx=256), EmulatedDevice(), (1, 2, 3))[1]


@pytest.mark.slow  # opens a model
def test_a_run_without_a_gpu_measures_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="uses no GPU"):
        measure.turns(config(written(tmp_path, "llama"), n_gpu_layers=0))
