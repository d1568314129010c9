"""Rules between settings, and the parts of the machine the defaults come from."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ikcli import hostinfo
from ikcli.engine.plan.graph_rules import check_cache_types
from ikcli.engine.plan.model_rules import check_ser
from ikcli.errors import UsageError
from ikcli.settings import run as config_module
from ikcli.settings.rules import padded_ctx, resolve, sequences_per_batch
from ikcli.settings.run import RunConfig

BASE = RunConfig(command="sweep-bench", n_threads=1, n_threads_batch=1)


def resolved(**changes: object) -> tuple[RunConfig, list[str]]:
    return resolve(replace(BASE, **changes))  # type: ignore[arg-type]


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        BASE.n_ctx = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("n_ctx", "flash_attn", "cells"),
    [(41000, True, 41216), (41000, False, 41024), (512, True, 512), (1, True, 256), (1, False, 32), (0, True, 0)],
)
def test_context_padding(n_ctx, flash_attn, cells) -> None:
    assert padded_ctx(n_ctx, flash_attn) == cells


def test_batches_are_limited_by_the_context() -> None:
    config, warnings = resolved(n_ctx=1024)
    assert (config.n_batch, config.n_ubatch, warnings) == (1024, 512, [])
    config, _ = resolved(n_ctx=256, n_ubatch=4096)
    assert (config.n_batch, config.n_ubatch) == (256, 256)
    config, _ = resolved(n_ctx=0)
    assert (config.n_ctx, config.n_batch) == (0, 2048)
    config, _ = resolve(BASE, n_ctx_train=1024)
    assert (config.n_ctx, config.n_batch) == (1024, 1024)


@pytest.mark.parametrize(
    ("n_ctx", "n_batch", "n_seq", "limited"), [(512, 2048, 4, 2048), (600, 2048, 3, 1800), (4096, 2048, 1, 2048)]
)
def test_perplexity_counts_all_sequences(n_ctx, n_batch, n_seq, limited) -> None:
    config = replace(BASE, command="perplexity", n_ctx=n_ctx, n_batch=n_batch)
    assert sequences_per_batch(config) == n_seq
    assert resolve(config)[0].n_batch == limited


def test_warnings() -> None:
    assert "does not divide" in resolved(n_batch=2560, n_ubatch=2048)[1][0]
    assert resolved(n_ubatch=4096, n_ctx=8192)[1][0] == "-ub 4096 is limited by -b 2048; add -b 4096"
    assert not resolved(n_ubatch=4096, n_ctx=1024)[1] and not resolved(n_batch=128)[1]
    assert "more than the 128 tokens" in resolve(replace(BASE, n_ctx=256), n_ctx_train=128)[1][0]
    _, warnings = resolved(n_threads=10**6)
    assert len(warnings) == 1 and warnings[0].startswith("-t 1000000: more threads than the")
    assert resolved()[1] == []


def test_repacking_turns_mmap_off_and_says_so() -> None:
    config, warnings = resolved(run_time_repack=True)
    assert not config.mmap and warnings == ["-rtr rewrites weights while loading, so mmap is off"]
    assert resolved(run_time_repack=True, mmap=False)[1] == []


def test_verbosity_is_verbose() -> None:
    assert resolved(verbosity=1)[0].verbose and not resolved()[0].verbose


def test_demo_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "DATA_DIR", tmp_path)
    for find, name in ((config_module.default_model, "demo.gguf"), (config_module.default_text, "demo.txt")):
        with pytest.raises(UsageError, match="name a"):
            find()
        (tmp_path / name).touch()
        assert find() == tmp_path / name


def cpu_tree(root: Path, cores: dict[int, tuple[int, int]]) -> Path:
    for cpu, (package, core) in cores.items():
        folder = root / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{core}\n")
    return root


def test_physical_cores_ignore_siblings_and_respect_affinity(tmp_path: Path) -> None:
    root = cpu_tree(tmp_path, {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1), 4: (0, 0), 5: (0, 1), 6: (1, 0), 7: (1, 1)})
    assert hostinfo.count_physical(set(range(8)), root) == 4
    assert hostinfo.count_physical({0, 4}, root) == 1
    assert hostinfo.count_physical({0, 2, 9}, root) == 3  # no topology: logical count


def test_efficiency_cores_are_recognised(tmp_path: Path) -> None:
    """Intel's hybrid processors list them; on ARM the capacity tells; siblings of fast cores are not cores."""
    # 2 fast cores with two threads each, 4 slow cores
    places = {0: (0, 0), 1: (0, 0), 2: (0, 1), 3: (0, 1), **{cpu: (0, cpu) for cpu in range(4, 8)}}
    root = cpu_tree(tmp_path / "devices/system/cpu", places)
    cpus = set(range(8))
    assert hostinfo.efficiency_cpus(cpus, root) == set() and hostinfo.performance_count(cpus, root) == 6
    for name, text in (("cpu_core", "0-3"), ("cpu_atom", "4-5\n"), ("cpu_lowpower", "6,7\n")):
        (tmp_path / "devices" / name).mkdir()
        (tmp_path / "devices" / name / "cpus").write_text(text)
    assert hostinfo.efficiency_cpus(cpus, root) == {4, 5, 6, 7} and hostinfo.performance_count(cpus, root) == 2
    assert hostinfo.efficiency_cpus({4, 5}, root) == set()  # all that the process may use are alike
    arm = cpu_tree(tmp_path / "arm/devices/system/cpu", {cpu: (0, cpu) for cpu in range(4)})
    for cpu, capacity in enumerate((1024, 1000, 400, 400)):
        (arm / f"cpu{cpu}" / "cpu_capacity").write_text(f"{capacity}\n")
    assert hostinfo.efficiency_cpus(set(range(4)), arm) == {2, 3}


@pytest.mark.skipif(sys.platform == "darwin", reason="the size comes from sysctl there")
def test_size_of_the_first_data_cache(tmp_path: Path) -> None:
    assert hostinfo.first_level_bytes(tmp_path) is None
    caches = (("1", "Instruction", "64K"), ("1", "Data", "48K"), ("2", "Unified", "1024K"), ("3", "Unified", "32M"))
    for i, texts in enumerate(caches):
        folder = tmp_path / f"cpu0/cache/index{i}"
        folder.mkdir(parents=True)
        for name, text in zip(("level", "type", "size"), texts, strict=True):
            (folder / name).write_text(f"{text}\n")
    assert hostinfo.first_level_bytes(tmp_path) == 48 << 10
    (tmp_path / "cpu0/cache/index1/size").unlink()
    assert hostinfo.first_level_bytes(tmp_path) is None


def test_performance_cores_alone_count_on_apple_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = {"hw.perflevel0.logicalcpu": 6, "hw.perflevel1.logicalcpu": 4}
    monkeypatch.setattr(hostinfo, "sysctl", reported.get)
    monkeypatch.setattr(hostinfo, "visible_cpus", lambda: set(range(10)))
    monkeypatch.setattr(hostinfo, "cgroup_limit", lambda: None)
    assert hostinfo.physical_cores.__wrapped__() == 6
    reported.clear()  # another system: every core of those that are visible
    monkeypatch.setattr(hostinfo, "count_physical", len)
    assert hostinfo.physical_cores.__wrapped__() == 10


@pytest.mark.parametrize(
    ("text", "limit"), [("max 100000\n", None), ("400000 100000\n", 4), ("150000 100000\n", 2), ("1000 100000\n", 1)]
)
def test_cgroup_quota(tmp_path: Path, text, limit) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert hostinfo.cgroup_limit(tmp_path) == limit


def test_cgroup_version_1_and_none(tmp_path: Path) -> None:
    assert hostinfo.cgroup_limit(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    for quota, limit in (("-1\n", None), ("300000\n", 3)):
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota)
        assert hostinfo.cgroup_limit(tmp_path) == limit


def test_cache_types() -> None:
    without = replace(BASE, flash_attn=False, type_v="q8_0")
    with pytest.raises(UsageError, match="needs flash attention; add -fa, or use -ctv f16"):
        check_cache_types(without, 0)
    with pytest.raises(UsageError, match="transposed; use -ctv f16, or add -fa"):
        check_cache_types(without, 1)
    for mla in (2, 3):
        check_cache_types(without, mla)
    check_cache_types(replace(without, type_v="bf16", type_k="q8_0"), 1)
    check_cache_types(replace(without, flash_attn=True), 0)


def test_ser_against_the_model() -> None:
    six = replace(BASE, ser=(6, 1.0))
    assert check_ser(six, 64, 8) == (six, [])
    for n_used in (6, 5):
        changed, warnings = check_ser(six, 64, n_used)
        assert changed == BASE and f"uses all {n_used} experts" in warnings[0]
    changed, warnings = check_ser(six, 0, 0)
    assert changed == BASE and "no experts" in warnings[0]
    assert check_ser(BASE, 64, 6) == (BASE, [])
