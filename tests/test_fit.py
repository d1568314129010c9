"""`--fit`: everything fits with the margin, as few experts as possible stay in RAM, and the printed options say so."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from deepseek_shapes import LITE, V3, expert_types
from header_models import qwen3_235b, write_deepseek, write_header

from ikcli import log, main
from ikcli.cli.parser import parse
from ikcli.engine.plan.devices import described_machine
from ikcli.engine.plan.fit import Fit, fit, with_cache
from ikcli.engine.plan.planner import Planner
from ikcli.gguf.reader import open_gguf
from ikcli.models import HParams
from ikcli.settings.run import RunConfig
from ikcli.settings.values import parse_device_spec

MIB = 2**20
BASE = replace(RunConfig(command="plan"), n_threads=1, n_threads_batch=1, n_ctx=4096, n_ubatch=64, fit=True)


@pytest.fixture(scope="module")
def lite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_deepseek(tmp_path_factory.mktemp("lite") / "lite.gguf", LITE, expert_types("q4_0", "q4_0"))


def planner_for(path: Path, spec: str) -> Planner:
    file = open_gguf(path, header_only=True)
    hp = HParams.from_gguf(file.metadata, file.tensors, str(path))
    return Planner(file, hp, described_machine(parse_device_spec(spec), None))


def check(planner: Planner, found: Fit, before: RunConfig = BASE) -> Fit:
    """The result fits with the margin, and its options written behind those before give the same placement."""
    assert found.plan.memory.gpus_fit(before.fit_margin * MIB)
    options = parse("plan", shlex.split(found.options)).config
    again = replace(
        before,
        fit=False,
        n_gpu_layers=options.n_gpu_layers,
        tensor_split=options.tensor_split or before.tensor_split,
        n_cpu_moe=options.n_cpu_moe,
        override_tensor=(*before.override_tensor, *options.override_tensor),
    )
    assert planner.place(again).buffer_of == found.plan.placement.buffer_of
    return found


def test_everything_on_the_gpu_if_it_fits(lite: Path) -> None:
    planner = planner_for(lite, "cuda:24GiB")
    found = check(planner, fit(planner, BASE))
    assert found.options == "-ngl 99" and found.config.n_gpu_layers == 28
    two = planner_for(lite, "2*cuda:24GiB")
    assert check(two, fit(two, BASE)).options == "-ngl 99"  # divided by free memory


def test_fewest_experts_stay_in_ram(lite: Path) -> None:
    planner = planner_for(lite, "cuda:6GiB")
    found = check(planner, fit(planner, BASE))
    n = found.config.n_cpu_moe
    assert 1 < n < 27 and f"--n-cpu-moe {n}" in found.options
    one_more = replace(found.config, n_cpu_moe=n - 1)
    assert not planner.plan(one_more).memory.gpus_fit(1024 * MIB)
    placed = found.plan.placement.buffer_of
    half = [placed[f"blk.{n - 1}.ffn_{part}_exps.weight"] for part in ("gate", "up", "down")]
    margin = found.plan.memory.free["CUDA0"] - found.plan.memory.total("CUDA0") - 1024 * MIB
    down = planner.gpu_weights(BASE)["blk.5.ffn_down_exps.weight"]
    assert half in (["CUDA0", "CUDA0", "CPU"], ["CPU", "CPU", "CUDA0"], ["CPU"] * 3)
    assert 0 <= margin < 3 * down and (half != ["CPU"] * 3 or margin < down)


@pytest.mark.slow  # places a model many times
def test_margin(lite: Path) -> None:
    planner = planner_for(lite, "cuda:6GiB")
    more = fit(planner, replace(BASE, fit_margin=0)).plan.on_gpus()
    less = fit(planner, replace(BASE, fit_margin=3000)).plan.on_gpus()
    assert more - less > 2500 * MIB


def test_several_gpus_are_filled_one_after_the_other(lite: Path) -> None:
    planner = planner_for(lite, "cuda:4GiB,cuda:3GiB,cuda:3GiB")
    found = check(planner, fit(planner, BASE))
    counts = [found.plan.placement.split.count(i) for i in range(3)]
    assert sum(counts) == 27 and found.plan.placement.split.output == 2 and min(counts) > 0
    assert found.options.startswith(f"-ngl 99 -ts {counts[0]},{counts[1]},{counts[2] + 1}")
    assert "--n-cpu-moe" in found.options


def test_a_given_split_stays(lite: Path) -> None:
    planner = planner_for(lite, "2*cuda:4GiB")
    before = replace(BASE, tensor_split=(2.0, 1.0))
    found = check(planner, fit(planner, before), before)
    assert found.config.tensor_split == (2.0, 1.0) and "-ts" not in found.options
    assert r"_exps\.=CPU" in found.options  # blocks in the middle, which --n-cpu-moe cannot name


def test_rules_and_ngl_are_kept(lite: Path) -> None:
    planner = planner_for(lite, "cuda:6GiB")
    before = replace(BASE, override_tensor=(r"blk\.2\.=CUDA0", "shexp=CPU"), n_gpu_layers=20)
    found = check(planner, fit(planner, before), before)
    placed = found.plan.placement.buffer_of
    assert found.config.n_gpu_layers == 20 and found.options.startswith("-ngl 20")
    assert placed["blk.2.ffn_up_exps.weight"] == "CUDA0" and placed["blk.20.ffn_up_shexp.weight"] == "CPU"
    assert placed["output.weight"] == "CPU"


@pytest.mark.slow  # places a model a dozen times
def test_small_gpus_get_some_blocks_or_none(lite: Path) -> None:
    planner = planner_for(lite, "cuda:2304MiB")
    found = check(planner, fit(planner, BASE))
    assert 0 < found.config.n_gpu_layers < 27 and found.config.n_cpu_moe > 0
    nothing = planner_for(lite, "cuda:1GiB")
    assert check(nothing, fit(nothing, BASE)).options == "-ngl 0"


@pytest.mark.slow  # places a model many times
def test_without_cache_on_the_gpu_more_fits(lite: Path) -> None:
    planner = planner_for(lite, "cuda:6GiB")
    config = replace(BASE, n_ctx=65536)
    with_cache = fit(planner, config).config.n_cpu_moe
    assert fit(planner, replace(config, no_kv_offload=True)).config.n_cpu_moe < with_cache


@pytest.mark.slow  # places a large model a dozen times
def test_671b_on_one_card(tmp_path: Path) -> None:
    path = write_deepseek(tmp_path / "v3.gguf", V3, expert_types("iq2_k_r4", "iq3_k_r4"))
    planner = planner_for(path, "cuda:24GiB")
    config = replace(BASE, type_k="q8_0", n_ubatch=128)
    found = check(planner, fit(planner, config), config)
    # Attention and dense parts take 17774 MiB, the experts of one block 3668: one block fits, half of another does not.
    assert found.options == "-ngl 99 --n-cpu-moe 60"


@pytest.mark.slow  # places a large model a dozen times
def test_qwen3_235b_on_four_cards(tmp_path: Path) -> None:
    path = write_header(tmp_path / "q.gguf", *qwen3_235b("q4_0"))
    planner = planner_for(path, "4*cuda:24GiB")
    found = check(planner, fit(planner, BASE))
    n = found.config.n_cpu_moe
    per_block = 3 * 128 * 4096 * 1536 * 18 / 32
    assert (94 - n) * per_block < 4 * 22.5 * 2**30 < (94 - n + 6) * per_block + 8 * 2**30


def test_the_command_prints_options_to_copy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, lite: Path
) -> None:
    monkeypatch.setattr(log, "utf8_streams", lambda: None)
    line = ["plan", "-m", str(lite), "-c", "4096", "-ub", "64", "-t", "1"]
    assert main.main([*line, "--fit", "--device-spec", "cuda:6GiB,cpu:64GiB"]) == 0
    out, err = capsys.readouterr()
    (chosen,) = [text for text in err.splitlines() if text.startswith("--fit chose: ")]
    assert main.main([*line, *shlex.split(chosen.removeprefix("--fit chose: ")), "--device-spec", "cuda:6GiB"]) == 0
    wanted = [text for text in out.splitlines() if "CUDA0" in text]
    assert [text for text in capsys.readouterr().out.splitlines() if "CUDA0" in text] == wanted
    assert main.main([*line, "--fit", "--device-spec", "cpu:64GiB"]) == 0
    assert "--fit has no effect without a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "spec", "share"),
    [
        (["--cpu-moe"], "cuda:6GiB", "some"),
        (["-ot", "exps=CPU", "-ts", "1,1"], "2*cuda:4GiB", "some"),
        (["--cpu-moe"], "cuda:24GiB", "all"),
        (["--cpu-moe", "--expert-cache", "0"], "cuda:6GiB", "none"),
        (["--cpu-moe", "--expert-ram", "4"], "cuda:6GiB", "none"),
    ],
)
def test_the_rest_is_for_the_cache_of_experts(capsys, lite: Path, options: list[str], spec: str, share: str) -> None:
    line = ["plan", "-m", str(lite), "-c", "4096", "-ub", "64", "-t", "1", "--device-spec", f"{spec},cpu:64GiB"]
    assert main.main([*line, *options, "--fit"]) == 0
    out, err = capsys.readouterr()
    (chosen,) = [text for text in err.splitlines() if text.startswith("--fit chose: ")]
    assert ("--expert-cache" in chosen) == (share in ("some", "all"))
    assert ("expert cache: " in out) == (share != "none")
    assert ("1664 of 1664 experts of 26 layers" in out) == (share == "all")
    if share == "some":
        margins = [float(text.split("margin ")[1].split()[0]) for text in out.splitlines() if "fits: CUDA" in text]
        slot = 3 * 2048 * 1408 * 18 / 32 / MIB
        assert 1024 <= min(margins) < 1026 + slot


def test_too_little_is_left_for_a_slot_in_each_layer(lite: Path) -> None:
    planner = planner_for(lite, "cuda:6GiB")
    found = fit(planner, replace(BASE, cpu_moe=True))
    memory = found.plan.memory
    left = memory.free["CUDA0"] - memory.total("CUDA0")
    assert with_cache(planner, found, left - 50 * MIB) is found
    more = with_cache(planner, found, left - 300 * MIB)
    assert more.config.expert_cache and more.plan.memory.gpus_fit(left - 300 * MIB)
