"""The cache of experts in VRAM: the same logits whatever is resident, and faults; on an emulated GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_emulation import EmulatedDevice, needs_emulation
from cuda_sessions import Opener, assert_close, config, tokens, written

from ikcli import main
from ikcli.backends.cuda.device import OutOfMemory
from ikcli.engine.experts.cache import ExpertCache
from ikcli.engine.experts.cache_trial import AGAIN, PATIENCE, PAUSE, PLAIN, WINDOW, CacheTrial
from ikcli.engine.experts.residency import places_now, uses_now
from ikcli.engine.plan import cache_slots
from ikcli.engine.run import gpus
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.session import Session
from ikcli.errors import IkError, NonFiniteError

SLOT = 49152  # bytes of an expert of the model "qwen3moe"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def opener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    opener = Opener()
    monkeypatch.setattr(gpus, "open_devices", opener)
    yield opener


def steps(session: Session, n: int = 12) -> Any:
    """Logits of a prompt, then of single tokens."""
    session.clear()
    ids = tokens(9 + n, 5)
    rows = [np.array(session.decode(Batch.single(ids[:9], logits="all")))]
    rows += [np.array(session.decode(Batch.single(ids[i : i + 1], i))) for i in range(9, 9 + n)]
    return np.concatenate(rows)


def cache_of(session: Session) -> ExpertCache:
    """The cache, used from the next step on and never judged."""
    cache = session.runner.expert_cache
    assert cache is not None
    cache.trial.on = True
    cache.trial.saw = lambda used, seconds: False  # type: ignore[method-assign]
    return cache


def n_resident(cache: ExpertCache) -> int:
    return sum(len(cache.resident(x.il)) for x in cache.slots.layers)


def open_cached(path: Path, monkeypatch: pytest.MonkeyPatch, n_bytes: int, **changes: Any) -> Session:
    """A session whose --expert-cache is given in bytes, without the memory of transfers."""
    monkeypatch.setattr(cache_slots, "MIB", 1)
    monkeypatch.setattr(cache_slots.Transfer, "device_bytes", staticmethod(lambda weights: 0))
    return Session.open(config(path, cpu_moe=True, expert_cache=n_bytes, **changes))


SIZES = {"none": SLOT - 1, "one": SLOT, "one each": 2 * SLOT, "half": 8 * SLOT, "odd": 11 * SLOT, "all": 10**9}


@pytest.mark.slow  # an emulated GPU
@needs_emulation
@pytest.mark.parametrize("size", SIZES)
def test_logits_do_not_depend_on_what_is_resident(folder, opener, monkeypatch, size: str) -> None:
    path = written(folder, "qwen3moe")
    with Session.open(config(path, cpu_moe=True)) as session:
        wanted = steps(session)
    with open_cached(path, monkeypatch, SIZES[size]) as session:
        if size == "none":
            assert session.runner.expert_cache is None
            assert "has no effect: a slot takes" in "".join(session.run_plan.warnings)
            return
        cache = cache_of(session)
        found = steps(session)
        assert_close(found, wanted, 1e-3)
        np.testing.assert_array_equal(found[:10], wanted[:10])  # prompts bypass it; the first step finds it empty
        n_slots = sum(x.n_slots for x in cache.slots.layers)
        assert n_slots == min(SIZES[size] // SLOT, 16)
        assert 0 < n_resident(cache) <= n_slots
        assert cache.counts.uses == 12 * 3 * len(cache.slots.layers) and 0 < cache.counts.hits < cache.counts.uses
        again = steps(session)
        assert_close(again, wanted, 1e-3)
        uses = cache.counts.uses
        session.decode(Batch.single(tokens(9), 21))
        assert cache.counts.uses == uses
        assert session.memory()["CUDA0"]["expert cache"] == n_slots * SLOT


@pytest.mark.slow  # an emulated GPU
@needs_emulation
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3moe-q8_0", {}),
        ("qwen3moe-q8_0", {"run_time_repack": True}),
        ("qwen3moe-q8_0", {"fmoe": False}),
        ("deepseek2", {"tensor_split": (1.0, 1.0)}),
        ("deepseek3", {"ser": (1, 0.5)}),
        ("deepseek3", {"profile": True}),
    ],
    ids=["q8_0", "interleaved", "unfused", "two-gpus", "ser", "profile"],
)
def test_models_and_options(folder, opener, monkeypatch, name: str, changes: dict[str, Any]) -> None:
    path = written(folder, name)
    with Session.open(config(path, cpu_moe=True, **changes)) as session:
        wanted = steps(session)
    with open_cached(path, monkeypatch, 10**9, **changes) as session:
        cache = cache_of(session)
        assert_close(steps(session), wanted, 0.02)
        assert cache.counts.hits > 0
        assert {x.device for x in cache.slots.layers} == set(opener.devices)


@pytest.mark.slow  # an emulated GPU
@needs_emulation
def test_several_sequences_in_a_step(folder, opener, monkeypatch) -> None:
    path = written(folder, "qwen3moe")

    def run(session: Session) -> Any:
        prompts = [tokens(9, seed) for seed in (1, 2, 3)]
        for seq, ids in enumerate(prompts):
            session.decode(Batch.single(ids, 0, seq))
        rows = []
        for i in range(6):
            t = np.array([int(p[i % 9]) for p in prompts], np.int32)
            batch = Batch(t, np.full(3, 9 + i, np.int32), np.arange(3, dtype=np.int32), np.ones(3, bool))
            rows.append(np.array(session.decode(batch)))
        return np.concatenate(rows)

    monkeypatch.setattr(cache_slots, "MIB", 1)
    found = []
    for n_bytes in (0, 10**9):
        with Session.open(config(path, cpu_moe=True, expert_cache=n_bytes), n_seq_max=3) as session:
            if n_bytes:
                cache = cache_of(session)
            found.append(run(session))
    assert_close(found[1], found[0], 1e-3)
    assert cache.counts.hits > 0 and cache.counts.uses == 6 * 3 * 2 * 3


@pytest.mark.slow  # an emulated GPU
@needs_emulation
def test_places_of_experts_at_the_moment(folder, opener, monkeypatch, capsys) -> None:
    with open_cached(written(folder, "qwen3moe"), monkeypatch, 4 * SLOT, profile=True) as session:
        cache = cache_of(session)
        where = (session.model, session.run_plan.placement.buffer_of, session.runner)
        assert [p.n_experts for p in places_now(*where) if p.place == "CUDA0 slots"] == [0, 0]
        steps(session)
        session.decode(Batch.single(tokens(1), 21))
        found = {(p.il, p.place): (p.n_experts, p.n_bytes) for p in places_now(*where)}
        assert found == {
            (il, place): value
            for il in (0, 1)
            for place, value in (("RAM", (8, 8 * SLOT)), ("CUDA0 slots", (2, 2 * SLOT)))
        }
        assert uses_now(session.runner) == {"vram": (cache.counts.uses, cache.counts.hits)}
        capsys.readouterr()
    assert (
        "experts of each layer from 0 to 1: 8 in RAM (0.38 MiB), 2 in CUDA0 slots (0.09 MiB)" in capsys.readouterr().err
    )


# --- faults -----------------------------------------------------------------------------------------------------------
@pytest.mark.slow  # an emulated GPU
@needs_emulation
def test_a_stale_slot_ends_the_step_with_a_sentence(folder, opener, monkeypatch) -> None:
    with open_cached(written(folder, "qwen3moe"), monkeypatch, 10**9) as session:
        cache = cache_of(session)
        steps(session)
        k = int(np.flatnonzero(cache._slot >= 0)[0])
        cache._held[cache._first_slot[cache._layer[k]] + cache._slot[k]] = k + 1
        with pytest.raises(IkError, match=r"expert \d+ of layer 0 is not in the slot that its table names"):
            session.decode(Batch.single(tokens(1), 21))


@pytest.mark.slow  # an emulated GPU
@needs_emulation
def test_experts_on_their_way_are_not_read(folder, opener, monkeypatch) -> None:
    """An expert enters the table when the device says so; if the device lies, the emulation's poison is read."""
    path = written(folder, "qwen3moe")
    with Session.open(config(path, cpu_moe=True)) as session:
        wanted = steps(session)
    with open_cached(path, monkeypatch, 10**9) as session:
        cache, device, said = cache_of(session), opener.devices["CUDA0"], []
        real = device.done

        def late(event: Any) -> bool:
            if any(event is pending[1] for pending in cache._pending):
                said.append(n_resident(cache))
                return len(said) > 40 and real(event)
            return real(event)

        monkeypatch.setattr(device, "done", late)
        assert_close(steps(session), wanted, 1e-3)
        assert (said and max(said) == 0) or cache.counts.hits
    with open_cached(path, monkeypatch, 10**9) as session:
        cache, device = cache_of(session), opener.devices["CUDA0"]
        real = device.done
        monkeypatch.setattr(device, "done", lambda event: any(event is p[1] for p in cache._pending) or real(event))
        with pytest.raises(NonFiniteError):
            steps(session)


@pytest.mark.slow  # an emulated GPU
@needs_emulation
def test_without_memory_a_run_goes_on_without_the_cache(folder, opener, monkeypatch, capsys) -> None:
    path = written(folder, "qwen3moe")
    with Session.open(config(path, cpu_moe=True)) as session:
        wanted = steps(session)
    real = EmulatedDevice.alloc

    def alloc(self: EmulatedDevice, n_bytes: int, owner: str) -> Any:
        if owner == "expert cache":
            raise OutOfMemory("GPU", owner, n_bytes, 0, n_bytes, {})
        return real(self, n_bytes, owner)

    monkeypatch.setattr(EmulatedDevice, "alloc", alloc)
    with open_cached(path, monkeypatch, 10**9) as session:
        cache = cache_of(session)
        np.testing.assert_array_equal(steps(session), wanted)
        assert not cache.usable and not cache.counts.uses
    assert "no memory is left for --expert-cache" in capsys.readouterr().err


# --- time -------------------------------------------------------------------------------------------------------------
@pytest.mark.slow  # an emulated GPU
@needs_emulation
def test_a_cache_that_is_slower_is_left_alone(folder, opener, monkeypatch, capsys) -> None:
    path = written(folder, "qwen3moe")
    now, cost = [0.0], {True: 2.0, False: 1.0}
    with Session.open(config(path, cpu_moe=True)) as session:
        wanted = steps(session, 60)
    with open_cached(path, monkeypatch, 10**9) as session:
        cache = session.runner.expert_cache
        assert cache is not None
        cache._clock = lambda: now[0]
        real = cache.begin

        def begin(n_tokens: int) -> bool:
            use = real(n_tokens)
            now[0] += cost[use]
            return use

        monkeypatch.setattr(cache, "begin", begin)
        found = steps(session, 60)
        np.testing.assert_array_equal(found[: 9 + PLAIN], wanted[: 9 + PLAIN])
        assert cache.counts.uses == WINDOW * 2 * 3, "one window"
        assert_close(found, wanted, 1e-3)
        assert not cache.trial.on and cache.trial.pause
    assert "expert cache: not used for 512 steps, because a step takes 2000.00 ms with it, 1000.00 ms without" in (
        capsys.readouterr().err
    )


def run_trial(trial: CacheTrial, n: int, plain: float, cached: float) -> float:
    """The mean time of n steps."""
    total = 0.0
    for _ in range(n):
        used = trial.on
        total += cached if used else plain
        trial.saw(used, cached if used else plain)
    return total / n


@pytest.mark.parametrize("ratio", [1.01, 1.05, 2.0])
def test_a_slower_cache_costs_little(ratio: float) -> None:
    trial = CacheTrial()
    assert run_trial(trial, 20_000, 1.0, ratio) < 1 + 0.02 * min(ratio, 1.5)
    assert trial.defeats > 2


def test_a_faster_cache_is_used_nearly_always() -> None:
    trial = CacheTrial()
    mean = run_trial(trial, 20_000, 1.0, 0.7)
    assert trial.defeats == 0 and mean < 0.7 + 0.3 * 1.1 * PLAIN / (PLAIN + AGAIN * WINDOW)


def test_a_cache_gets_time_to_fill_if_it_is_hardly_slower() -> None:
    trial = CacheTrial()
    run_trial(trial, PLAIN + (PATIENCE - 1) * WINDOW, 1.0, 1.015)
    assert trial.on and not trial.defeats
    run_trial(trial, WINDOW, 1.0, 1.015)
    assert not trial.on and trial.pause == PAUSE


def test_steps_that_ran_otherwise_do_not_count() -> None:
    trial = CacheTrial()
    for _ in range(PLAIN * 3):
        trial.saw(True, 9.0)
    assert not trial.on and trial.plain == 0


# --- options ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--expert-ram", "1"], "--expert-cache takes experts from RAM, but with --expert-ram some are on disk"),
        (["--stages", "2"], "--expert-cache cannot be used with --stages"),
    ],
)
def test_what_cannot_be_combined(folder, capsys, options: list[str], message: str) -> None:
    argv = ["plan", "-m", str(written(folder, "qwen3moe")), "--expert-cache", "1", "-ngl", "99", "--cpu-moe", "-t", "1"]
    assert main.main([*argv, "-c", "256", "--device-spec", "cuda:1GiB,cpu:1GiB", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cpu-moe", "-ngl", "0"], "no layer with experts in RAM has its other weights on a GPU (-ngl)"),
        (["-ngl", "99"], "no routed experts stay in RAM"),
    ],
)
def test_a_cache_without_effect_is_a_warning(folder, capsys, options: list[str], message: str) -> None:
    argv = ["plan", "-m", str(written(folder, "qwen3moe")), "--expert-cache", "1", "-t", "1", "-c", "256"]
    assert main.main([*argv, "--device-spec", "cuda:1GiB,cpu:1GiB", *options]) == 0
    assert f"--expert-cache has no effect: {message}" in capsys.readouterr().err


def test_a_plan_names_slots_and_counts_their_memory(folder, capsys) -> None:
    argv = ["plan", "-m", str(written(folder, "qwen3moe")), "-ngl", "99", "--cpu-moe", "-t", "1", "-c", "256"]
    spec = ["--device-spec", "cuda:1GiB,cpu:1GiB"]
    assert main.main([*argv, *spec, "--expert-cache", "1"]) == 0
    out = capsys.readouterr().out
    assert "expert cache: 16 of 16 experts of 2 layers in RAM have slots in 0.75 MiB of CUDA0" in out
    assert "+ expert cache 0.75" in out
    assert "experts of each layer from 0 to 1: 8 in RAM (0.38 MiB), 8 in CUDA0 slots (0.38 MiB)" in out
    small = ["--device-spec", "cuda:514MiB,cpu:1GiB"]
    assert main.main([*argv, *small, "--expert-cache", "1"]) == 1
