"""Experts on disk: the same logits from any number of slots, what stays in RAM, and faults of disks and slots."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import tiny_model
from gguf_files import write_model

from ikcli.engine.plan.devices import Machine
from ikcli.engine.plan.expert_slots import BLOCK, ExpertLayer, ExpertMatrix, slots_for
from ikcli.engine.plan.planner import Planner
from ikcli.engine.plan.sizes import Sizes
from ikcli.engine.run import expert_reader, expert_steps
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.expert_rates import UseRates
from ikcli.engine.run.expert_store import ExpertStore
from ikcli.engine.run.session import Session
from ikcli.errors import IkError, UsageError
from ikcli.hostinfo import cgroup_memory_room
from ikcli.settings.rules import check_stages
from ikcli.settings.run import RunConfig
from ikcli.settings.values import parse_gib

N_EXPERT, N_LAYER = 8, 3
EXPERTS: dict[str, Any] = {"expert_count": N_EXPERT, "expert_used_count": 3, "block_count": N_LAYER}
SLOT = 3 * (3 * BLOCK + BLOCK)  # three matrices of 48 x 64 floats
LAYER = N_EXPERT * SLOT
ONE = np.ones(2, np.int64)


@pytest.fixture(scope="module")
def moe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("qwen3moe", expert_feed_forward_length=48, **EXPERTS)
    return write_model(model, tmp_path_factory.mktemp("m") / "moe.gguf")


def config(path: Path, **changes: Any) -> RunConfig:
    base = RunConfig(command="perplexity", model=path, n_ctx=64, n_ubatch=24, n_threads=2, n_threads_batch=2)
    return replace(base, type_k="f32", type_v="f32", warmup=False, **changes)


def logits(session: Session) -> np.ndarray:
    """Of a prompt in two micro-batches, then of tokens one by one."""
    ids = np.random.default_rng(3).integers(0, 96, 46).astype(np.int32)
    prompt = Batch(ids[:40], np.arange(40, dtype=np.int32), np.zeros(40, np.int32), np.ones(40, bool))
    rows = [session.decode(prompt).copy()]
    rows += [session.decode(Batch.single([int(ids[40 + i])], 40 + i)).copy() for i in range(6)]
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def wanted(moe_file: Path) -> np.ndarray:
    with Session.open(config(moe_file), n_ctx=64) as session:
        assert session.runner.cpu.experts is None
        return logits(session)


@pytest.mark.parametrize("defer", [False, True], ids=["filled", "deferred"])
@pytest.mark.parametrize("n_bytes", [LAYER, LAYER + 5 * SLOT, 2 * LAYER, 3 * LAYER - SLOT, 4 * LAYER])
def test_logits_do_not_depend_on_what_is_resident(
    moe_file: Path, wanted: np.ndarray, n_bytes: int, defer: bool
) -> None:
    with Session.open(config(moe_file, expert_ram=n_bytes, defer_experts=defer), n_ctx=64) as session:
        steps = session.runner.cpu.experts
        assert steps is not None
        np.testing.assert_array_equal(logits(session), wanted)
        store = steps.store
        assert store is not None
        resident = sum(int(store.resident(il).sum()) for il in range(N_LAYER))
        assert resident <= min(n_bytes // SLOT, N_LAYER * N_EXPERT)
        if n_bytes > 3 * LAYER and not defer:
            assert store.complete
            assert store.counts.uses == 0  # no step had to ask
        else:
            assert store.counts.uses > 0
            assert 0 <= store.counts.hits <= store.counts.uses


def test_observers_and_profiles_see_the_same(moe_file: Path, wanted: np.ndarray) -> None:
    with Session.open(config(moe_file, expert_ram=LAYER, profile=True), n_ctx=64) as session:
        np.testing.assert_array_equal(logits(session), wanted)


def test_rtr_leaves_experts_as_they_are_on_disk(moe_file: Path, wanted: np.ndarray) -> None:
    with Session.open(config(moe_file, expert_ram=LAYER, run_time_repack=True), n_ctx=64) as session:
        found = logits(session)
    assert np.abs(found - wanted).max() < 1e-3 * np.abs(wanted).max()


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_that_are_read_by_row_stay_on_disk(tmp_path: Path, tied: bool) -> None:
    """Also without mmap; not those that are the output matrix, too."""
    model = tiny_model("qwen3moe", tied=tied, expert_feed_forward_length=48, **EXPERTS)
    path = write_model(model, tmp_path / "moe.gguf")
    with Session.open(config(path, expert_ram=LAYER, mmap=False), n_ctx=64) as session:
        names = {name for graph, _ in session.graphs.values() for name in graph.weights}
        experts = {name for name in names if "_exps." in name}
        assert set(session.model.mapped(names)) - experts == (set() if tied else {"token_embd.weight"})
        assert session.runner.cpu.experts is not None
        line = session.runner.cpu.experts.slots.line()
        assert ("the others and rows of embeddings (0.00 GiB) are read from disk" in line) == (not tied)


# --- faults -----------------------------------------------------------------------------------------------------------
def test_slow_disks_and_short_reads_change_nothing(
    moe_file: Path, wanted: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, rng, sizes = os.preadv, np.random.default_rng(1), []

    def preadv(fd: int, into: list[memoryview], offset: int) -> int:
        time.sleep(float(rng.uniform(0, 0.001)))
        n = max(int(rng.integers(1, len(into[0]) + 1)), 1)
        sizes.append(n)
        return real(fd, [into[0][: n - n % BLOCK or n]], offset)

    monkeypatch.setattr(expert_reader.os, "preadv", preadv)
    with Session.open(config(moe_file, expert_ram=LAYER + SLOT), n_ctx=64) as session:
        np.testing.assert_array_equal(logits(session), wanted)
    assert len(sizes) > N_LAYER * N_EXPERT


def test_direct_reads_that_fail_are_repeated_through_the_page_cache(
    moe_file: Path, wanted: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = os.preadv, []

    def preadv(fd: int, into: list[memoryview], offset: int) -> int:
        if expert_reader_flags(fd) & os.O_DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, "no direct reads here")
        return real(fd, into, offset)

    monkeypatch.setattr(expert_reader.os, "preadv", preadv)
    with Session.open(config(moe_file, expert_ram=LAYER), n_ctx=64) as session:
        np.testing.assert_array_equal(logits(session), wanted)


def expert_reader_flags(fd: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_GETFL)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda: 0, r"moe\.gguf: the file ends at byte \d+, but an expert needs bytes up to \d+"),
        (
            lambda: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")),
            r"moe\.gguf: reading at byte .* failed",
        ),
    ],
    ids=["truncated", "broken"],
)
def test_a_fault_of_the_disk_ends_the_step_with_a_sentence(
    moe_file: Path, fault: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Session.open(config(moe_file, expert_ram=LAYER), n_ctx=64) as session:
        monkeypatch.setattr(expert_reader.os, "preadv", lambda fd, into, offset: fault())
        with pytest.raises(IkError, match=message):
            logits(session)
        session.clear()
        with pytest.raises(IkError, match=message):  # it stays so, instead of computing with what is in the slots
            session.decode(Batch.single([1], 0))


def test_a_stale_slot_is_noticed(moe_file: Path) -> None:
    with Session.open(config(moe_file, expert_ram=LAYER), n_ctx=64) as session:
        steps = session.runner.cpu.experts
        assert steps is not None
        assert steps.store is not None
        logits(session)
        session.clear()
        held = steps.store._held
        keys = list(held)
        values = [held[key] for key in keys]
        held.update(dict(zip(keys, values[1:] + values[:1], strict=True)))
        with pytest.raises(IkError, match=r"internal error: expert \d of layer \d is not in the slot"):
            logits(session)


# --- the store --------------------------------------------------------------------------------------------------------
class Disk:
    """A file of layers whose experts are full of their own number."""

    def __init__(self, path: Path, n_layer: int, n_expert: int, n_bytes: int = 5000) -> None:
        numbers = np.repeat(np.arange(2 * n_layer * n_expert, dtype=np.uint8), n_bytes)
        path.write_bytes(b"x" * 100 + numbers.tobytes())
        size = n_expert * n_bytes
        self.n_bytes, self.layers = n_bytes, tuple(
            ExpertLayer(il, n_expert, tuple(
                ExpertMatrix(f"{part}{il}", path, 100 + (2 * il + i) * size, n_bytes) for i, part in enumerate("ud")
            ))
            for il in range(n_layer)
        )  # fmt: skip
        self.path = path

    def check(self, store: ExpertStore, il: int, experts: list[int]) -> None:
        """Everything a layer waited for is where its table says."""
        for i, m in enumerate(self.layers[il].matrices):
            for e in experts:
                address = int(store._tables[m.name][e])
                data = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * self.n_bytes).from_address(address))
                assert (data == (2 * il + i) * self.layers[il].n_expert + e).all()


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "experts", 4, 8)


@pytest.fixture
def half(disk: Disk) -> Iterator[ExpertStore]:
    store = ExpertStore(slots_for(disk.layers, 18 * disk.layers[0].slot), 2)
    store.fill(lambda n: None)
    yield store
    store.close()


def test_random_steps_find_their_experts(disk: Disk, half: ExpertStore, rng: np.random.Generator) -> None:
    for _ in range(60):
        prompt = rng.random() < 0.3
        for il in range(4):
            n = 8 if prompt else 2
            experts = np.sort(rng.choice(8, n, replace=False))
            guess = np.sort(rng.choice(8, 2, replace=False))
            half.request(
                il, experts, np.full(len(experts), 5 if prompt else 1), 40 if prompt else 1, lambda guess=guess: guess
            )
            half.wait(il, [f"u{il}"])
            half.wait(il, [f"d{il}"])
            disk.check(half, il, experts.tolist())
            assert sum(int(half.resident(k).sum()) for k in range(4)) <= 18


def test_prompts_leave_each_layer_its_share(tmp_path: Path) -> None:
    disk, everything = Disk(tmp_path / "experts", 8, 8), np.arange(8)
    store = ExpertStore(slots_for(disk.layers, 36 * disk.layers[0].slot), 2)
    before = 0
    try:
        store.fill(lambda n: None)
        for _ in range(4):
            before = store.counts.n_bytes
            for il in range(8):
                store.request(il, everything, np.full(8, 12), 50)
                store.wait(il, [f"u{il}", f"d{il}"])
                disk.check(store, il, everything.tolist())
        read = (store.counts.n_bytes - before) / (2 * disk.n_bytes)
    finally:
        store.close()
    # Two layers have all experts, the one at work and the next; the six others share 20 slots. A rule that drops what
    # was used longest ago would read all 64 again.
    assert read <= 64 - 8


def test_single_tokens_keep_what_was_used_last(half: ExpertStore) -> None:
    missed = []
    for _ in range(3):
        before = half.counts.uses - half.counts.hits
        for il in range(4):
            half.request(il, np.array([1, 6]), ONE, 1)
            half.wait(il, [f"u{il}", f"d{il}"])
        missed.append(half.counts.uses - half.counts.hits - before)
    assert missed[0] > 0
    assert missed[1:] == [0, 0]


def test_guesses_are_read_before_they_are_wanted(disk: Disk) -> None:
    store = ExpertStore(slots_for(disk.layers, 18 * disk.layers[0].slot), 2)
    try:
        store.request(0, np.array([0]), ONE[:1], 1, lambda: np.array([3, 5]))
        store.wait(0, ["u0", "d0"])
        for _ in range(1000):
            if store.resident(1)[[3, 5]].all():
                break
            time.sleep(0.005)
        assert store.resident(1)[[3, 5]].all()
        hits = store.counts.hits
        store.request(1, np.array([3, 5]), ONE, 1)
        assert store.counts.hits == hits + 2
    finally:
        store.close()


def test_guesses_that_have_not_begun_when_a_layer_chooses_are_forgotten(disk: Disk) -> None:
    gate, reads = threading.Event(), []

    def read(fd: int, into: memoryview, offset: int) -> int:
        reads.append(offset)
        assert gate.wait(10)
        return os.preadv(fd, [into], offset)

    store = ExpertStore(slots_for(disk.layers, 18 * disk.layers[0].slot), 4, read)
    try:
        store.expect(1, np.array([2, 3, 4, 5, 6, 7]))
        for _ in range(1000):
            if len(reads) == 2:
                break
            time.sleep(0.002)
        assert len(reads) == 2  # half of the threads take guesses, and others stay free for what is wanted
        store.request(1, np.array([0, 7]), ONE, 1)
        gate.set()
        store.wait(1, ["u1", "d1"])
        disk.check(store, 1, [0, 7])
        assert len(reads) == 2 + 4
        assert not store.resident(1)[3:7].any()
    finally:
        store.close()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="a file of Linux")
def test_slots_are_memory_that_gets_huge_pages(half: ExpertStore) -> None:
    """Shared memory, Python's default, gets none on most systems."""
    at = next(iter(half._pool.values())).address
    kinds = [
        fields[1]
        for fields in (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
        if int(fields[0].split("-")[0], 16) <= at < int(fields[0].split("-")[1], 16)
    ]
    assert kinds == ["rw-p"]


def test_what_is_read_in_vain_is_counted(disk: Disk) -> None:
    store = ExpertStore(slots_for(disk.layers, 8 * disk.layers[0].slot), 2)
    try:
        store.expect(1, np.array([3, 5]))
        for _ in range(1000):
            if store.resident(1)[[3, 5]].all():
                break
            time.sleep(0.002)
        store.request(1, np.array([3]), ONE[:1], 1)
        store.request(2, np.arange(8), np.full(8, 2), 4)
        store.wait(2, ["u2", "d2"])
        disk.check(store, 2, list(range(8)))
        assert store.counts.in_vain == 2 * disk.n_bytes  # expert 5
        assert "in vain" in store.counts.line()
    finally:
        store.close()


def test_experts_that_a_prompt_used_most_stay(disk: Disk) -> None:
    store = ExpertStore(slots_for(disk.layers, 20 * disk.layers[0].slot), 2)
    uses = np.array([1, 1, 30, 1, 1, 40, 1, 1])
    try:
        for _ in range(2):
            for il in range(4):
                store.request(il, np.arange(8), uses, 50)
                store.wait(il, [f"u{il}", f"d{il}"])
                disk.check(store, il, list(range(8)))
        hits = store.counts.hits
        for il in range(4):
            store.request(il, np.array([2, 5]), ONE, 1)
            store.wait(il, [f"u{il}", f"d{il}"])
        assert store.counts.hits == hits + 8
    finally:
        store.close()


def test_prompts_read_ahead_what_they_probably_use(disk: Disk) -> None:
    store, uses = ExpertStore(slots_for(disk.layers, 12 * disk.layers[0].slot), 2), np.full(5, 10)
    try:
        for turn in range(8):
            before = store.counts.n_bytes
            for il in range(4):
                experts = np.arange(il, il + 5) % 8 if turn else np.arange(8)
                store.request(il, np.sort(experts), uses if turn else np.ones(8, np.int64), 50 if turn else 1)
                store.wait(il, [f"u{il}", f"d{il}"])
                disk.check(store, il, experts.tolist())
            for _ in range(1000):  # what is read ahead for the first layer
                with store._changed:
                    if not store._reading() and not store._ahead:
                        break
                time.sleep(0.001)
        assert store.counts.n_bytes - before <= 4 * 5 * 2 * disk.n_bytes
        rates = UseRates(np.zeros(4))
        assert rates.likely(8).tolist() == [0, 1, 2, 3]
        rates.add(np.array([1, 2]), np.array([2, 8]), 8)
        assert rates.likely(8).tolist() == [2, 1]
        assert rates.likely(1).tolist() == [2]
    finally:
        store.close()


def test_values_weigh_the_last_tokens_and_all() -> None:
    rates = UseRates(np.zeros(10))
    for t in range(400):
        rates.add(np.array([t % 8]), ONE[:1], 1)
    for _ in range(5):
        rates.add(np.array([8]), ONE[:1], 1)
    assert rates.value.argmax() == 8  # used lately
    assert rates.value.argmin() == 9
    for _ in range(40):
        rates.add(np.array([], np.int64), np.array([], np.int64), 1)
    assert set(np.argsort(-rates.value)[:8].tolist()) == set(range(8))  # forgotten slowly
    once, split = UseRates(np.zeros(2)), UseRates(np.zeros(2))
    once.add(np.array([1]), np.array([6]), 6)
    for _ in range(6):
        split.add(np.array([1]), ONE[:1], 1)
    np.testing.assert_allclose(once.value, split.value, rtol=1e-12)


def test_too_little_ram_is_refused(disk: Disk) -> None:
    with pytest.raises(UsageError, match="is too little: prompts use all experts of a layer at once"):
        slots_for(disk.layers, 7 * disk.layers[0].slot)
    with pytest.raises(UsageError, match=r"^--prefetch-experts: 0 GiB is too little"):
        slots_for(disk.layers, 0, "--prefetch-experts: ")
    assert slots_for(disk.layers, 8 * disk.layers[0].slot).n_slots == 8
    assert slots_for(disk.layers, 1 << 40).complete
    assert "all 32 in 4 layers" in slots_for(disk.layers, 1 << 40).line()


def test_layers_of_other_sizes_have_slots_of_their_own(tmp_path: Path) -> None:
    small, large = Disk(tmp_path / "a", 2, 4, 3000), Disk(tmp_path / "b", 2, 4, 9000)
    layers = (*small.layers, *(ExpertLayer(x.il + 2, x.n_expert, x.matrices) for x in large.layers))
    found = slots_for(layers, 4 * (layers[0].slot + layers[2].slot) + layers[2].slot * 3)
    assert found.counts[layers[0].slot] >= 4
    assert found.counts[layers[2].slot] >= 4
    assert found.n_bytes <= 4 * (layers[0].slot + layers[2].slot) + layers[2].slot * 3


# --- plans and options ------------------------------------------------------------------------------------------------
def test_plans_count_slots(moe_file: Path) -> None:
    planner = Planner.of_file(config(moe_file))
    sizes = Sizes(64, 1, 0)
    whole = planner.prepare(config(moe_file), sizes).plan.memory.parts["CPU"]["weights"]
    part = planner.prepare(config(moe_file, expert_ram=2 * LAYER), sizes)
    names = part.runner.cpu.experts.slots.on_disk if part.runner.cpu.experts else frozenset()
    assert len(names) == 3 * N_LAYER + 1 and "token_embd.weight" in names
    assert part.plan.memory.parts["CPU"]["weights"] == whole - part.model.n_bytes(names) + 2 * LAYER
    assert "16 of 24 in 3 layers stay in RAM" in part.runner.notes([])[0]


def test_models_without_experts_say_that_nothing_happens(tmp_path: Path) -> None:
    path = write_model(tiny_model("llama"), tmp_path / "dense.gguf")
    found = Planner.of_file(config(path)).prepare(config(path, expert_ram=1 << 20), Sizes(64, 1, 0))
    assert found.runner.cpu.experts is None
    assert "--expert-ram has no effect: no routed experts stay in RAM" in found.plan.warnings


@pytest.mark.parametrize("ram", [3 << 20, 4 << 20, 1 << 34])
def test_prefetch_experts_takes_what_is_free(moe_file: Path, ram: int) -> None:
    planner = Planner.of_file(config(moe_file)).on(Machine((), ram))
    wanted = config(moe_file, prefetch_experts=True)
    slots = planner.expert_slots(wanted)
    assert slots is not None
    others = planner.static_bytes(wanted)["CPU"] - slots.n_bytes
    assert slots.n_bytes + others <= 0.95 * ram
    assert slots.complete or slots.n_bytes + others > 0.7 * ram


def test_more_slots_than_free_memory_are_refused(moe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_steps, "available_memory", lambda: LAYER // 2)
    session = Session.plan(config(moe_file, expert_ram=LAYER), n_ctx=64)
    with pytest.raises(IkError, match="lower --expert-ram"):
        session.load()


def test_stages_are_refused() -> None:
    fleet = replace(RunConfig().fleet, stages=2)
    with pytest.raises(UsageError, match="--expert-ram cannot be used with --stages"):
        check_stages(RunConfig(command="perplexity", expert_ram=1, fleet=fleet))


def test_sizes_are_in_gib() -> None:
    assert parse_gib("1.5") == 3 << 29
    assert parse_gib("300MiB") == 300 << 20
    with pytest.raises(ValueError, match="GiB"):
        parse_gib("-1")


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    own = tmp_path / "own"

    def write(folder: Path, limit: str, used: int, stat: str, names: tuple[str, str]) -> None:
        folder.mkdir(parents=True)
        for name, text in zip((*names, "memory.stat"), (limit, str(used), stat), strict=True):
            (folder / name).write_text(text)

    own.write_text("0::/a/b\n")
    write(
        tmp_path / "v2/a/b",
        "1000",
        900,
        "anon 600\ninactive_file 200\nactive_file 100\n",
        ("memory.max", "memory.current"),
    )
    assert cgroup_memory_room(tmp_path / "v2", own) == 400
    write(tmp_path / "v2/c", "max", 900, "anon 600\n", ("memory.max", "memory.current"))
    own.write_text("0::/c\n")
    assert cgroup_memory_room(tmp_path / "v2", own) is None
    own.write_text("4:memory:/x\n1:cpu:/\n0::/\n")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    write(tmp_path / "v1/memory/x", "1000", 900, "total_inactive_file 50\ntotal_active_file 0\n", names)
    assert cgroup_memory_room(tmp_path / "v1", own) == 150
