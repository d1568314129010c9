"""Weights, cache and work memory by device of full-size models, planned from their headers, against known numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from deepseek_shapes import LITE, V3, V25, Dims, expert_types
from header_models import qwen3_235b, qwen3next_80b, write_deepseek, write_header

from ikcli.engine.plan.device_plan import _PaperDevice, described_info, planning_device
from ikcli.engine.plan.devices import GpuFacts, Machine, described_machine
from ikcli.engine.plan.missing_parts import assume_missing
from ikcli.engine.plan.planner import Planner
from ikcli.engine.plan.sizes import Sizes, session_of
from ikcli.engine.plan.startup import prepare
from ikcli.engine.run import gpus
from ikcli.engine.run.log_lines import TensorRow
from ikcli.engine.run.session import Session
from ikcli.errors import FormatError, UnsupportedError
from ikcli.gguf.reader import open_gguf
from ikcli.models import HParams
from ikcli.settings.run import RunConfig
from ikcli.settings.values import parse_device_spec

MIB = 2**20
BASE = replace(RunConfig(command="plan"), n_threads=1, n_threads_batch=1, n_ctx=4096, n_ubatch=64, n_gpu_layers=99)
IQ2_K = expert_types("iq2_k_r4", "iq3_k_r4")
IQ4_K = expert_types("iq4_k_r4", "iq5_k_r4")
DQ4_K = expert_types("q4_k_r4", "q6_k_r4")


def v25_iq3_xxs(name: str) -> str:
    if name == "output.weight":
        return "q5_K"
    return "iq3_s" if name == "token_embd.weight" or "attn_output" in name else "iq3_xxs"


def r1_q2_k(name: str) -> str:
    if name == "output.weight":
        return "q6_K"
    if "attn_k_b" in name:
        return "iq4_nl"
    return "q3_K" if "attn_output" in name or "ffn_down" in name else "q2_K"


class Files:
    """Headers written once, and planners for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[tuple[object, ...], Path] = {}

    def planner(self, d: Dims, types: Callable[[str], str], spec: str, layout: str = "ik") -> Planner:
        key = (d, types, layout)
        if key not in self.made:
            self.made[key] = write_deepseek(self.folder / f"{len(self.made)}.gguf", d, types, layout)
        return planner_for(self.made[key], spec)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("headers"))


def planner_for(path: Path, spec: str) -> Planner:
    file = open_gguf(path, header_only=True)
    hp = HParams.from_gguf(file.metadata, file.tensors, str(path))
    return Planner(file, hp, described_machine(parse_device_spec(spec), None))


def weights(planner: Planner, config: RunConfig) -> dict[str, float]:
    """MiB of the tensors as the file has them, by device; derived ones included."""
    placed, model = planner.place(config), planner.model(config)
    sizes = dict.fromkeys(("CPU", *planner.machine.names), 0.0)
    for name, buffer in placed.buffer_of.items():
        sizes[buffer] += model.n_bytes([name]) / MIB
    return sizes


def cache(planner: Planner, config: RunConfig) -> list[float]:
    """MiB of the cache, CPU first."""
    placed = planner.place(config)
    sizes = dict.fromkeys(("CPU", *planner.machine.names), 0.0)
    for il, n_bytes in planner.gpu_cache(config).items():
        sizes[placed.cache[il]] += n_bytes / MIB
    return list(sizes.values())


@pytest.mark.parametrize(
    ("types", "rules", "cpu", "gpu"),
    [
        (IQ2_K, ("exps=CPU",), 212744.00, 17743.986),
        (IQ4_K, ("exps=CPU",), 376768.00, 17743.986),
        (IQ2_K, (r"blk\.(3)\.ffn_.*=CUDA0", "exps=CPU"), 209076.00, 21412.02 - 0.030),
        (IQ4_K, (r"blk\.(3)\.ffn_.*=CUDA0", "exps=CPU"), 370272.00, 24240.02 - 0.030),
        (DQ4_K, ("exps=CPU", "attn_kv_b=CPU"), 405413.00, 16707.02 - 0.030),
    ],
)
def test_experts_of_v3_in_ram(files: Files, types, rules, cpu, gpu) -> None:
    sizes = weights(files.planner(V3, types, "cuda:32GiB"), replace(BASE, override_tensor=rules))
    assert sizes["CPU"] == pytest.approx(cpu + 938.98, abs=0.006)  # and the token embeddings
    assert sizes["CUDA0"] == pytest.approx(gpu, abs=0.006)


def test_experts_of_v25_in_ram(files: Files) -> None:
    planner = files.planner(V25, v25_iq3_xxs, "cuda:16GiB", "legacy")
    config = replace(BASE, override_tensor=("exps=CPU",))
    model = planner.model(config)
    derived = model.n_bytes(model.derived) / MIB  # k_b and v_b, which the number does not count
    assert derived == pytest.approx(60 * (8.5 + 3.0625), abs=0.01)
    assert weights(planner, config)["CUDA0"] - derived == pytest.approx(5109.97, abs=0.006)
    assert sum(weights(planner, BASE).values()) - derived == pytest.approx(84.604 * 1024, abs=0.6)


def test_blocks_of_r1_on_four_gpus(files: Files) -> None:
    sizes = weights(files.planner(V3, r1_q2_k, "15*cuda:24GiB"), replace(BASE, tensor_split=(42, *[25] * 13, 40)))
    on_gpus = list(sizes.values())[1:]
    assert on_gpus[0] == pytest.approx(16607.09, abs=0.02)  # 3 dense blocks + 4 with experts
    assert on_gpus[1] == pytest.approx(15965.27, abs=0.02) and on_gpus[3] == pytest.approx(11973.95, abs=0.02)
    assert on_gpus[14] == pytest.approx(20681.56, abs=0.02)  # 5 blocks and the output
    assert sizes["CPU"] == pytest.approx(289.98, abs=0.006)


@pytest.mark.parametrize(
    ("spec", "changes", "expected"),
    [
        ("2*cuda:24GiB", {"n_ctx": 41216, "type_k": "q8_0", "tensor_split": (32, 30)}, [0, 769.78, 697.62]),
        ("2*cuda:24GiB", {"n_ctx": 163840, "type_k": "q8_0", "tensor_split": (32, 30)}, [0, 3060.0, 2773.125]),
        ("3*cuda:24GiB", {"n_ctx": 153600, "type_k": "q8_0"}, [0, 1882.62, 1882.62, 1703.32]),
        ("4*cuda:24GiB", {"n_ctx": 8192, "n_gpu_layers": 27, "tensor_split": (17, 20, 21, 45)}, [306, 45, 45, 54, 99]),
        ("cuda:24GiB", {"n_ctx": 32768}, [0, 2196.0]),
        ("cuda:24GiB", {"n_ctx": 32768, "type_k": "q8_0"}, [0, 1166.625]),
        ("cuda:24GiB", {"n_ctx": 32768, "type_k": "q8_0", "no_kv_offload": True}, [1166.625, 0]),
        ("cuda:24GiB", {"n_ctx": 41000, "mla": 1}, [0, 2762.16]),
        ("cuda:24GiB,cuda:8GiB", {"n_ctx": 8192, "split_mode": "none", "main_gpu": 1}, [0, 0, 549.0]),
        ("cuda:24GiB", {"n_ctx": 2048, "mla": 0}, [0, 4880 * 2048 / 1024]),
    ],
)
def test_cache_of_v3_follows_its_blocks(files: Files, spec, changes, expected) -> None:
    found = cache(files.planner(V3, IQ2_K, spec), replace(BASE, **changes))
    assert found == pytest.approx(expected, abs=0.006)


def test_cache_of_fifteen_gpus(files: Files) -> None:
    shares = (38, 26, *[24] * 7, 25, *[24] * 4, 33)
    found = cache(files.planner(V3, r1_q2_k, "15*cuda:24GiB"), replace(BASE, n_ctx=51200, tensor_split=shares))
    counts = (7, 4, 4, 3, 4, 4, 4, 4, 4, 4, 4, 3, 4, 4, 4)
    assert found == pytest.approx([0, *(56.25 * n for n in counts)])


def test_equal_gpus_get_equal_shares(files: Files) -> None:
    placed = files.planner(V3, IQ2_K, "2*cuda:24GiB").place(BASE)
    assert (placed.split.count(0), placed.split.count(1), placed.split.output) == (31, 30, 1)


def test_derived_tensors_live_with_their_source(files: Files) -> None:
    planner = files.planner(V3, IQ2_K, "2*cuda:24GiB", "mainline")
    rules = (r"blk\.5\.attn_k_b=CPU", r"blk\.6\.attn_kv_b=CUDA1", "exps=CPU")
    placed = planner.place(replace(BASE, override_tensor=rules))
    kv_b = {il: placed.buffer_of[f"blk.{il}.attn_kv_b.weight"] for il in range(61)}
    assert (kv_b[0], kv_b[5], kv_b[6], kv_b[60]) == ("CUDA0", "CPU", "CUDA1", "CUDA1")
    whole = weights(planner, replace(BASE, override_tensor=("exps=CPU",)))
    assert whole["CUDA0"] + whole["CUDA1"] == pytest.approx(17743.986, abs=0.006)  # with 1037 MiB of kv_b


def test_the_architecture_is_looked_at_before_its_keys(tmp_path: Path) -> None:
    metadata = {"general.architecture": "nobody", "nobody.block_count": 2, "nobody.attention.head_count": 0}
    path = write_header(tmp_path / "m.gguf", metadata, [TensorRow("token_embd.weight", (32, 8), "f32", 1024)])
    with pytest.raises(UnsupportedError, match=r"m\.gguf: architecture 'nobody' is not supported; known: "):
        Planner.of_file(replace(BASE, model=path), header_only=True)


def test_qwen3_235b(tmp_path: Path) -> None:
    planner = planner_for(write_header(tmp_path / "q.gguf", *qwen3_235b()), "cuda:48GiB")
    config = replace(BASE, override_tensor=("exps=CPU",), n_ctx=32768)
    sizes = weights(planner, config)
    assert sum(sizes.values()) / 1024 == pytest.approx(232.77, abs=0.006)
    assert cache(planner, config) == [0, 188 * 32768 / 1024]
    assert cache(planner, replace(config, type_k="q8_0", type_v="q8_0")) == [0, 6016 * 34 / 64]


def test_qwen3_next(tmp_path: Path) -> None:
    """12 layers with a cache, 36 with states: those of a convolution of 8192 columns, and 32 heads of 128 x 128."""
    metadata, rows = qwen3next_80b()
    assert sum(int(np.prod(row.shape)) for row in rows) == pytest.approx(79.67e9, rel=1e-3)
    planner = planner_for(write_header(tmp_path / "q.gguf", metadata, rows), "cuda:16GiB")
    config = replace(BASE, override_tensor=("exps=CPU",), n_ctx=32768)
    states = 36 * 4 * (3 * 8192 + 32 * 128 * 128) / MIB
    assert cache(planner, config) == [0, 12 * 2 * 2 * 256 * 2 * 32768 / MIB + states]
    assert cache(planner, replace(config, n_ctx=4096)) == [0, 12 * 2 * 2 * 256 * 2 * 4096 / MIB + states]


def test_work_memory_of_v3_on_one_gpu(files: Files) -> None:
    planner = files.planner(V3, IQ2_K, "cuda:24GiB:cc=8.9")
    plan = planner.plan(replace(BASE, cpu_moe=True, n_ubatch=512))
    gpu, cpu = plan.memory.parts["CUDA0"], plan.memory.parts["CPU"]
    # Rows of 16-byte aligned planes are a little larger than in the file, those of k_b with 4 blocks most of all.
    assert 17743.9 < gpu["weights"] / MIB < 17743.9 + 61 * 0.5 + 1
    assert gpu["KV"] / MIB == 274.5 and cpu["KV"] == 0
    most = 4096 * 32768 * 4  # kv_b times the latent rows of the cache, all heads
    assert 512 * 18432 * 4 < gpu["compute"] < most + 512 * MIB
    assert cpu["output"] == 129280 * 4 and cpu["compute"] > 512 * 7168 * 4
    assert plan.n_splits > 58


def fake_gpu(monkeypatch: pytest.MonkeyPatch, device: GpuFacts) -> None:
    class Paper(_PaperDevice):
        def memory(self) -> tuple[int, int]:
            return device.free, device.total

        def close(self) -> None: ...

    monkeypatch.setattr(gpus, "open_devices", lambda config: {device.name: Paper(described_info(device))})


@pytest.mark.parametrize(
    "changes",
    [{"n_gpu_layers": 0}, {}, {"n_cpu_moe": 2}, {"n_gpu_layers": 1, "no_kv_offload": True}, {"command": "serve",
     "n_parallel": 3}, {"mla": 1, "flash_attn": False, "n_gpu_layers": 0}],
)  # fmt: skip
@pytest.mark.parametrize("name", ["tiny-deepseek2.f16.gguf", "tiny-llama.f16.gguf"])
def test_a_session_allocates_what_was_planned(
    monkeypatch: pytest.MonkeyPatch, shared_dir: Path, name: str, changes: dict[str, object]
) -> None:
    path = shared_dir / "golden" / "models" / name
    config = replace(BASE, **({"model": path, "n_ctx": 512} | changes))
    device = GpuFacts("CUDA0", 2**33, 2**33)
    fake_gpu(monkeypatch, device)
    file = open_gguf(path)
    hp = HParams.from_gguf(file.metadata, file.tensors, str(path))
    planned = Planner(file, hp, Machine((device,), None)).plan(config).memory.parts
    n_seq = config.n_parallel
    _, sizes = session_of(config)
    session = Session.plan(config, n_seq_max=n_seq, n_step=sizes.n_step, outputs=sizes.outputs)
    allocated = session.memory()
    session.runner.cpu.close()
    strip = {d: {k: n for k, n in parts.items() if n} for d, parts in planned.items()}
    assert strip == {d: {k: n for k, n in parts.items() if n} for d, parts in allocated.items()}


def test_gpus_that_are_described_with_little(files: Files) -> None:
    machine = described_machine(parse_device_spec("cuda:8GiB,cuda:8GiB:cc=7.5,cuda:8GiB:cc=12.1"), None)
    infos = [described_info(gpu) for gpu in machine.gpus]
    assert [info.cc for info in infos] == [(8, 9), (7, 5), (12, 1)]
    assert [info.n_sm for info in infos] == [128, 108, 170]
    assert planning_device(machine.gpus[0]).limits.max_shared == 99 * 1024


def test_parts_of_a_split_file_may_lack_data(tmp_path: Path) -> None:
    whole = write_deepseek(tmp_path / "whole.gguf", LITE, expert_types("q4_0", "q4_0"))
    first = write_deepseek(tmp_path / "m.gguf", LITE, expert_types("q4_0", "q4_0"), splits=[100, 200, 131])
    config = replace(BASE, cpu_moe=True)
    assert weights(planner_for(first, "cuda:8GiB"), config) == weights(planner_for(whole, "cuda:8GiB"), config)
    with pytest.raises(FormatError, match="the file ends at"):
        open_gguf(first)
    file = open_gguf(first, header_only=True)
    assert not any(file.has_data(name) for name in file.tensors)
    with pytest.raises(FormatError, match="is not in the file"):
        file.data("token_embd.weight")


def test_missing_parts_are_assumed_to_be_alike(tmp_path: Path) -> None:
    types = expert_types("q4_0", "q5_0")
    whole = write_deepseek(tmp_path / "whole.gguf", LITE, types)
    first = write_deepseek(tmp_path / "m.gguf", LITE, types, splits=[60, 200, 171])
    for part in (2, 3):
        (tmp_path / f"m-0000{part}-of-00003.gguf").unlink()
    file = open_gguf(first, header_only=True)
    hp = HParams.from_gguf(file.metadata, file.tensors, str(first))
    (notice,) = assume_missing(file, hp)
    assert "2 parts are missing (m-00002-of-00003.gguf, ...): 371 tensors are assumed" in notice
    expected = open_gguf(whole, header_only=True)
    assert {n: (t.type, t.n_bytes) for n, t in file.tensors.items()} == {
        n: (t.type, t.n_bytes) for n, t in expected.tensors.items()
    }
    assert not file.has_data("output.weight") and assume_missing(expected, hp) == []
    config = replace(BASE, cpu_moe=True)
    machine = described_machine(parse_device_spec("cuda:8GiB"), None)
    assert weights(Planner(file, hp, machine), config) == weights(planner_for(whole, "cuda:8GiB"), config)


def test_a_part_without_blocks_is_not_enough(tmp_path: Path) -> None:
    first = write_deepseek(tmp_path / "m.gguf", LITE, expert_types("q4_0", "q4_0"), splits=[0, 431])
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    file = open_gguf(first, header_only=True)
    hp = HParams.from_gguf(file.metadata, file.tensors, str(first))
    with pytest.raises(FormatError, match=r"00002-of-00002\.gguf is missing.*at least the header"):
        assume_missing(file, hp)


@pytest.mark.parametrize("command", ["plan", "sweep-bench"])
def test_fit_holds_for_runs_on_gpus_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, shared_dir: Path, command: str
) -> None:
    path = shared_dir / "golden" / "models" / "tiny-deepseek2.f16.gguf"
    config = replace(BASE, command=command, model=path, n_ctx=512, fit=True, fit_margin=1, n_gpu_layers=None)
    fake_gpu(monkeypatch, GpuFacts("CUDA0", 266 * MIB, 266 * MIB))
    startup = prepare(config)
    (chosen,) = [text for text in startup.notices if text.startswith("--fit chose:")]
    assert "CUDA device" not in " ".join(startup.notices) and not startup.config.fit
    session = Session.plan(startup.config)
    parts = session.memory()["CUDA0"]
    session.runner.cpu.close()
    assert 5 * MIB < sum(parts.values()) <= 10 * MIB and startup.config.n_cpu_moe == 2
    assert chosen.startswith(f"--fit chose: -ngl {startup.config.n_gpu_layers}")


def test_cells_are_shared_evenly() -> None:
    """What was asked for at least, padded for the kernels, and a multiple of the sequences."""
    for flash_attn in (True, False):
        for n_ctx in (1, 256, 500, 512, 513):
            for n_seq in (1, 3, 4, 7):
                cells = Sizes(n_ctx, n_seq).cells(flash_attn)
                assert cells % n_seq == 0 and n_ctx <= cells < n_ctx + 256 + n_seq, (n_ctx, n_seq)
