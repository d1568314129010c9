"""sweep-bench with a stand-in session: which tokens are decoded at which depth, and the exact lines printed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from factories import add_heads
from fake_session import FakeSession
from gguf_files import write_model
from tiny_architectures import tiny

import ikcli
from ikcli.bench import environment, memory
from ikcli.bench import sweep as sweep_bench
from ikcli.bench.sweep import SweepParams, SweepRow, depths, params_of, run
from ikcli.cli.parser import ModelRun, parse
from ikcli.commands import sweep_bench as command
from ikcli.commands._sweep_table import RunInfo, SweepPrinter
from ikcli.engine.run.mtp import Continuation
from ikcli.engine.run.session import Session
from ikcli.errors import UsageError
from ikcli.gguf.reader import open_gguf
from ikcli.native import isa
from ikcli.settings.bench import SweepConfig
from ikcli.settings.run import RunConfig, default_model

PARAMS = SweepParams(pp=16, tg=4, step=16, warmup=False)


def session(n_ctx: int = 64, n_batch: int = 64) -> FakeSession:
    return FakeSession(np.zeros((8, 8), dtype=np.float32), n_ctx=n_ctx, n_batch=n_batch)


@pytest.mark.parametrize(
    ("changes", "n_ctx", "expected"),
    [
        ({}, 64, [0, 16, 32, 48]),
        ({}, 63, [0, 16, 32]),
        ({"pp": 1024, "tg": 256, "step": 1024}, 1536, [0]),
        ({"tg": 20}, 64, [0, 16, 32]),
        ({"pp": 40}, 64, [0, 16]),
        ({"pp": 5}, 64, [0, 16, 32, 48]),
        ({"stride": 2}, 96, [0, 32, 64]),
        ({"start_depth": 24}, 64, [24, 40]),
        ({"max_depth": 16}, 64, [0, 16]),
        ({"pp": 128}, 64, []),
    ],
)
def test_depths(changes: dict[str, int], n_ctx: int, expected: list[int]) -> None:
    assert depths(replace(PARAMS, **changes), n_ctx) == expected


def test_each_row_generates_first_and_fills_the_cache_for_the_next() -> None:
    fake = session(n_ctx=48)
    rows = run(fake, PARAMS)
    expected = [("rm", -1, 0)]
    for depth in (0, 16, 32):
        expected += [("rm", 0, depth)] + [("decode", 1, depth + i) for i in range(4)]
        expected += [("rm", 0, depth), ("decode", 16, depth)]
    assert fake.log == expected
    assert [(r.n_kv, r.pp, r.tg) for r in rows] == [(0, 16, 4), (16, 16, 4), (32, 16, 4)]
    assert all(r.t_pp > 0 and r.t_tg > 0 for r in rows)


def test_start_depth_and_stride_fill_what_is_not_measured() -> None:
    fake = session(n_ctx=128, n_batch=20)
    run(fake, replace(PARAMS, start_depth=50, stride=2))
    prompts = [(n, pos) for kind, n, pos in fake.log if kind == "decode" and n > 1]
    assert prompts == [(20, 0), (20, 20), (10, 40), (16, 50), (16, 66), (16, 82)]


def test_prompt_longer_than_the_step_is_cut_back() -> None:
    fake = session(n_ctx=64)
    run(fake, replace(PARAMS, pp=30))
    prompts = [(n, pos) for kind, n, pos in fake.log if kind == "decode" and n > 1]
    assert prompts == [(30, 0), (30, 16), (30, 32)]


def test_short_prompts_are_filled_up_between_rows() -> None:
    fake = session(n_ctx=48)
    run(fake, replace(PARAMS, pp=5))
    prompts = [(n, pos) for kind, n, pos in fake.log if kind == "decode" and n > 1]
    assert prompts == [(5, 0), (11, 5), (5, 16), (11, 21), (5, 32)]


def test_only_the_first_row_is_repeated() -> None:
    fake = session(n_ctx=32)
    run(fake, replace(PARAMS, repetitions=3))
    assert [e for e in fake.log if e[0] == "decode" and e[1] > 1] == [("decode", 16, 0)] * 3 + [("decode", 16, 16)]
    assert sum(e[0] == "decode" and e[1] == 1 for e in fake.log) == 3 * 4 + 4


def test_warm_up_runs_prompt_and_generation_and_is_forgotten() -> None:
    fake = session(n_ctx=16)
    run(fake, replace(PARAMS, warmup=True, warmup_batch=True))
    end = fake.log.index(("rm", -1, 0))
    warm = [e[1] for e in fake.log[:end] if e[0] == "decode"]
    assert warm.count(1) == 1 + sweep_bench.WARMUP_TG and warm[-1] == fake.n_ubatch
    assert fake.log[end + 1 : end + 3] == [("rm", 0, 0), ("decode", 1, 0)]


ROW = SweepRow(2048, 512, 0, 15.29, 28.471)


def config(**sweep: object) -> RunConfig:
    return RunConfig(
        command="sweep-bench",
        n_ctx=32768,
        n_batch=4096,
        n_ubatch=2048,
        n_gpu_layers=63,
        n_threads=30,
        n_threads_batch=30,
        sweep=SweepConfig(**sweep),  # type: ignore[arg-type]
    )


def printed(settings: RunConfig, row: SweepRow, capsys: pytest.CaptureFixture[str]) -> list[str]:
    printer = SweepPrinter(settings, RunInfo(32768, 4096, 2048))
    printer.header()
    printer.row(row)
    return capsys.readouterr().out.split("\n")


def test_table_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(config(), ROW, capsys) == [
        "",
        "main: n_kv_max = 32768, n_batch = 4096, n_ubatch = 2048, flash_attn = 1, n_gpu_layers = 63, "
        "n_threads = 30, n_threads_batch = 30",
        "",
        "|    PP |     TG |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |",
        "|-------|--------|--------|----------|----------|----------|----------|",
        "|  2048 |    512 |      0 |   15.290 |   133.94 |   28.471 |    17.98 |",
        "",
    ]


def test_table_with_memory(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(config(memory=True), replace(ROW, rss_hwm_mib=1234.56), capsys)
    assert lines[3].endswith("| S_TG t/s |    RSS HWM | VRAM delta |")
    assert lines[4].endswith("|----------|------------|------------|")
    assert lines[5].endswith("|    17.98 |     1234.6 |          - |")
    assert len({len(line) for line in lines[3:6]}) == 1


def test_jsonl(capsys: pytest.CaptureFixture[str]) -> None:
    settings = (
        '{"n_kv_max": 32768, "n_batch": 4096, "n_ubatch": 2048, "flash_attn": 1, "n_gpu_layers": 63, '
        '"n_threads": 30, "n_threads_batch": 30, "pp": 2048, "tg": 512, "n_kv": 0, "t_pp": 15.290000, '
    )
    lines = printed(config(output_format="jsonl"), ROW, capsys)
    assert lines == [settings + '"speed_pp": 133.943754, "t_tg": 28.471000, "speed_tg": 17.983211 }', ""]
    with_memory = printed(config(output_format="jsonl", memory=True), replace(ROW, rss_hwm_mib=1.5), capsys)[0]
    assert with_memory.endswith('17.983211, "rss_hwm_mib": 1.500, "vram_delta_mib": null }')
    assert json.loads(with_memory)["vram_delta_mib"] is None


def test_jsonl_full_starts_with_all_settings(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(replace(config(output_format="jsonl-full"), override_tensor=("exps=CPU",)), ROW, capsys)
    settings = json.loads(lines[0])["config"]
    assert settings["override_tensor"] == ["exps=CPU"] and settings["n_kv_max"] == 32768 and settings["mla"] == 3
    assert json.loads(lines[1])["pp"] == 2048 and len(lines) == 3


class Opener:
    """Stands in for the engine's session class."""

    def __init__(self) -> None:
        self.sessions: list[FakeSession] = []
        self.interrupt_at: int | None = None

    def open(
        self, settings: RunConfig, *, n_ctx: int | None = None, n_seq_max: int = 1, planner: object = None
    ) -> FakeSession:
        fake = session(n_ctx=settings.n_ctx)
        fake.n_ubatch = settings.n_ubatch
        self.sessions.append(fake)
        if self.interrupt_at is not None:
            inner, limit = fake.decode, self.interrupt_at

            def decode(batch):  # type: ignore[no-untyped-def]
                if batch.pos[0] >= limit:
                    raise KeyboardInterrupt
                return inner(batch)

            fake.decode = decode  # type: ignore[method-assign]
        return fake


@pytest.fixture
def opener(monkeypatch: pytest.MonkeyPatch) -> Opener:
    fake = Opener()
    monkeypatch.setattr(command, "open_session", fake.open)
    return fake


def execute(config: RunConfig) -> int:
    return command.run(ModelRun(config, planner=None))  # type: ignore[arg-type]


def small(**sweep: object) -> RunConfig:
    return replace(config(**sweep), n_ctx=64, n_batch=64, n_ubatch=16)


def test_command(opener: Opener, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(small(memory=True)) == 0
    rows = re.findall(r"^\|    16 \|      4 \|\s+(\d+) \|.*\| +[\d.]+ \|          - \|$", capsys.readouterr().out, re.M)
    assert rows == ["0", "16", "32", "48"] and opener.sessions[0].closed
    assert execute(replace(small(pp=8), n_predict=2)) == 0
    assert len(re.findall(r"^\|     8 \|      2 \|", capsys.readouterr().out, re.M)) == 4


def test_interrupt_keeps_the_rows_so_far(opener: Opener, capsys: pytest.CaptureFixture[str]) -> None:
    opener.interrupt_at = 32
    assert execute(small(output_format="jsonl")) == 130
    out = capsys.readouterr().out
    assert [json.loads(line)["n_kv"] for line in out.splitlines()] == [0, 16] and out.endswith("}\n")
    assert opener.sessions[0].closed


def test_nothing_to_measure_and_bad_values(opener: Opener, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(small(start_depth=60)) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 5 and "raise -c" in err
    with pytest.raises(UsageError, match="--start-depth"):
        execute(small(start_depth=-1))


def test_memory_of_this_process() -> None:
    hwm = memory.rss_hwm_mib()
    assert hwm is None or 10 < hwm < 1e6


def test_warm_up_covers_both_phases_unless_turned_off(opener: Opener) -> None:
    for argv, expected in (
        ([], [1] * (1 + sweep_bench.WARMUP_TG) + [16]),
        (["--no-warmup-batch"], [1] * (1 + sweep_bench.WARMUP_TG)),
        (["--no-warmup"], []),
        (["--no-warmup", "-wb"], []),
    ):
        settings = parse("sweep-bench", [*argv, "-c", "64", "-b", "64", "-ub", "16"]).config
        assert execute(settings) == 0
        log = opener.sessions[-1].log
        assert [n for kind, n, _ in log[: log.index(("rm", -1, 0))] if kind == "decode"] == expected


def test_jsonl_full_records_where_it_ran(opener: Opener, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(small(output_format="jsonl-full")) == 0
    recorded = json.loads(capsys.readouterr().out.splitlines()[0])["config"]
    assert recorded["sweep"]["warmup_batch"] is True and recorded["model_file"] is None
    assert recorded["hardware"]["isa"] == isa.current().name and recorded["hardware"]["physical_cores"] >= 1
    assert recorded["hardware"]["cpu"] and recorded["hardware"]["memory_bytes"] > 2**28
    assert recorded["software"]["ik"] == ikcli.__version__ and recorded["software"]["numba"]


def test_model_file_and_processor_are_described(tmp_path: Path) -> None:
    described = environment.model_file(open_gguf(default_model()))
    assert described["file"] == default_model().name and described["architecture"] == "deepseek2"
    assert sum(described["types"].values()) == len(open_gguf(default_model()).tensors)
    assert described["tensor_bytes"] < default_model().stat().st_size
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some  CPU @ 2 GHz\n")
    (tmp_path / "meminfo").write_text("MemFree:  1 kB\nMemTotal:       2048 kB\n")
    assert environment.cpu_name(tmp_path / "cpuinfo") == "Some CPU @ 2 GHz"
    assert environment.memory_bytes(tmp_path / "meminfo") == 2 << 20


def test_plot_option(opener: Opener, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert execute(small(plot=tmp_path / "all.png")) == 0
    assert (tmp_path / "all.png").read_bytes()[:4] == b"\x89PNG" and "all.png" in capsys.readouterr().err
    opener.interrupt_at = 32
    assert execute(small(plot=tmp_path / "some.svg")) == 130
    assert "<svg" in (tmp_path / "some.svg").read_text()
    with pytest.raises(UsageError, match="does not exist"):
        execute(small(plot=tmp_path / "absent" / "x.png"))
    assert len(opener.sessions) == 2


def test_drafts_of_a_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_model(add_heads(tiny("qwen35")), tmp_path / "m.gguf")
    config = RunConfig(
        model=path, command="sweep-bench", n_ctx=96, n_ubatch=32, n_predict=4, n_threads=1, n_threads_batch=1,
        warmup=False, sweep=SweepConfig(mtp=True, max_depth=64),
    )  # fmt: skip
    with Session.open(config) as session:
        assert session.heads is not None
        guessed: list[tuple[int, int]] = []
        draft = session.heads.draft

        def noted(wanted: Sequence[Continuation]) -> None:
            draft(wanted)
            guessed.extend((len(w.text), len(w.found)) for w in wanted)

        session.heads.draft = noted  # type: ignore[method-assign]
        printer = SweepPrinter(config, RunInfo(96, 96, 32))
        printer.header()

        def shown(row: SweepRow) -> None:
            printer.row(replace(row, t_pp=1.0, t_tg=1.0, t_mtp=1.0))  # a tiny model may be too fast for the columns

        rows = run(session, params_of(config, 32), on_row=shown)
    assert guessed == [(depth + i + 1, 1) for depth in (0, 32, 64) for i in range(5) if depth or i]
    assert all(row.t_mtp is not None and row.t_mtp > 0 and row.speed_mtp > 0 for row in rows)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert lines[0].endswith("| S_TG t/s |  T_MTP s | S_MTP t/s |") and len(lines) == 5
    assert len({len(line) for line in lines}) == 1
    SweepPrinter(replace(config, sweep=SweepConfig(mtp=True, output_format="jsonl")), RunInfo(96, 96, 32)).row(rows[0])
    found = json.loads(capsys.readouterr().out)
    assert found["speed_mtp"] == pytest.approx(4 / found["t_mtp"], rel=0.1)
