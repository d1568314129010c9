"""What sessions offer, with an emulated GPU: sequences, cache rows, observers, profile, graphs, memory, errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_emulation import EmulatedDevice, emulation_only, needs_emulation
from cuda_sessions import Opener, assert_close, config, tokens, transcript, written
from factories import tiny_model
from gguf_files import write_model

from ikcli.backends.cuda import backend
from ikcli.backends.cuda.device import CudaError, NoGraphMemory
from ikcli.engine.run import gpus
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.run_device import RESERVE_BYTES
from ikcli.engine.run.session import Session
from ikcli.errors import NonFiniteError

pytestmark = needs_emulation


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def opener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    opener = Opener()
    monkeypatch.setattr(gpus, "open_devices", opener)
    yield opener


def single(session: Session, ids: Any, seq: int = 0, **more: Any) -> Any:
    return np.array(session.decode(Batch.single(ids, session.sequences.n_past[seq], seq, **more)))


def batch_of(pairs: list[tuple[int, int, int]]) -> Batch:
    """(token, position, sequence) each, all with logits."""
    t, p, s = (np.array(column, np.int32) for column in zip(*pairs, strict=True))
    return Batch(t, p, s, np.ones(len(pairs), np.bool_))


# --- repetition -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("changes", [{}, {"cpu_moe": True}])
def test_repetition_gives_the_same_bits(folder, opener, changes) -> None:
    """Launch by launch, captured, and in another session whose blocks run in another order."""
    path = written(folder, "deepseek3")
    with Session.open(config(path, **changes)) as session:
        first = transcript(session)
        programs = session.programs["decode"].parts["CUDA0"]
        assert not all(programs.graphs.values())  # what ran once is not captured
        second = transcript(session)
        third = transcript(session)
        assert all(len(graphs) == len(programs.spans) for graphs in programs.graphs.values())
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, third)


def test_a_step_allocates_nothing_and_is_one_graph(folder, opener, monkeypatch) -> None:
    with Session.open(config(written(folder, "llama"))) as session:
        session.decode(Batch.single(tokens(4)))
        for _ in range(2):
            single(session, [3])
        calls: Counter[str] = Counter()
        device = opener.devices["CUDA0"]
        for name in ("alloc", "pinned", "free", "launch", "capture", "replay", "upload", "download"):
            original = getattr(device, name)

            def counted(*args: Any, _name: str = name, _call: Any = original) -> Any:
                calls[_name] += 1
                return _call(*args)

            monkeypatch.setattr(device, name, counted)
        for _ in range(3):
            single(session, [5])
        assert calls == {"replay": 3, "upload": 3}


def test_old_graphs_are_dropped(folder, opener, monkeypatch) -> None:
    monkeypatch.setattr("ikcli.backends.cuda.backend.MAX_BUCKETS", 2)
    with Session.open(config(written(folder, "llama"))) as session:
        rows = [transcript(session, n, 2) for n in (2, 3, 4, 2, 3, 4)]
        assert len(session.programs["decode"].parts["CUDA0"].graphs) == 2
    for a, b in zip(rows[:3], rows[3:], strict=True):
        np.testing.assert_array_equal(a, b)


# --- sequences and cache rows -----------------------------------------------------------------------------------------
def test_steps_of_several_sequences(folder, opener) -> None:
    """One token of each sequence together is, to the last bit, each alone."""
    with Session.open(config(written(folder, "deepseek2")), n_ctx=384, n_seq_max=3, n_step=4) as session:
        alone = []
        for together in (False, True):
            session.clear()
            for seq, n in enumerate((3, 9, 5)):
                session.decode(Batch.single(tokens(n, seq), 0, seq))
            batch = [(10 + s, session.sequences.n_past[s], s) for s in range(3)]
            if together:
                found = np.array(session.step(batch_of(batch)))
            else:
                alone = [np.array(session.step(batch_of([item])))[0] for item in batch]
        np.testing.assert_array_equal(found, np.stack(alone))


@pytest.mark.parametrize(
    ("name", "changes"),
    [("deepseek2", {"type_k": "q8_0"}), ("llama", {"type_k": "f16", "type_v": "q8_0"}),
     ("deepseek2", {"mla": 1, "flash_attn": False})],
)  # fmt: skip
def test_cache_rows_go_out_and_in(folder, opener, name, changes) -> None:
    path = written(folder, name)
    ids = tokens(14)
    with Session.open(config(path, **changes), n_ctx=512, n_seq_max=2) as session:
        single(session, ids[:12], 0)
        wanted = single(session, ids[12:13], 0)
        rows = session.sequences.save(0, 12)
        session.sequences.load(1, rows)
        np.testing.assert_array_equal(single(session, ids[12:13], 1), wanted)
        session.truncate(0, 0)
        session.sequences.copy(1, 0, 0, 12)
        np.testing.assert_array_equal(single(session, ids[12:13], 0), wanted)
        again = session.sequences.save(0, 12)
        assert all((a == b).all() for a, b in zip(rows.parts, again.parts, strict=True))
    with Session.open(config(path, n_gpu_layers=0, **changes), n_ctx=512, n_seq_max=2) as session:
        session.sequences.load(1, rows)  # of the GPU, on the CPU
        found = single(session, ids[12:13], 1)
    np.testing.assert_allclose(found, wanted, atol=0.05 * wanted.std())


def test_the_cache_can_be_divided_anew(folder, opener) -> None:
    with Session.open(config(written(folder, "llama")), n_ctx=256) as session:
        wanted = transcript(session)
        session.sequences.divide(4)
        single(session, tokens(5), 3)
        session.sequences.divide(1)
        np.testing.assert_array_equal(transcript(session), wanted)


def test_more_logits_than_planned(folder, opener) -> None:
    with Session.open(config(written(folder, "llama"))) as session:
        alone = [single(session, [t]) for t in tokens(6)]
        session.clear()
        together = single(session, tokens(6), logits="all")
        assert together.shape == (6, 96)
        session.clear()
        assert single(session, tokens(6), logits="none").shape == (0, 96)
    np.testing.assert_allclose(together, np.concatenate(alone), atol=0.02 * together.std())


# --- looking inside ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("changes", [{}, {"cpu_moe": True, "n_gpu_layers": 2}])
def test_an_observer_sees_every_node_once(folder, opener, changes) -> None:
    path = written(folder, "deepseek3")
    exact = {"type_k": "f32", "type_v": "f32"}

    def values(**more: Any) -> tuple[dict[str, Any], Any, Any]:
        seen: dict[str, Any] = {}
        with Session.open(config(path, **exact, **more)) as session:
            plain = single(session, tokens(5), logits="all")
            session.clear()

            def look(node: Any, value: Any) -> None:
                assert node.name not in seen
                seen[node.name] = np.array(value)

            session.observer = look
            observed = single(session, tokens(5), logits="all")
            names = {node.name for node in session.graphs["decode"][0].nodes if node.cols}
        assert set(seen) == names
        np.testing.assert_array_equal(plain, observed)
        return seen, plain, observed

    found, *_ = values(**changes)
    wanted, *_ = values(n_gpu_layers=0)
    for name, value in wanted.items():
        if "plan" in name or "topk" in name or "ffn_moe_gate_up" in name or "ffn_moe_down" in name:
            continue  # tables of experts, and rows in their order
        assert found[name].shape == value.shape, name
        scale = np.abs(value).max() + 1e-30
        assert np.median(np.abs(found[name] - value).max(axis=1) / scale) < 0.02, name


def test_profile_lists_the_kernels_of_both(folder, opener) -> None:
    with Session.open(config(written(folder, "deepseek3"), cpu_moe=True, profile=True)) as session:
        wanted = transcript(session)
        lines = session.profile.lines()
        phase = session.profile.phases["generation"]
        kernels = {kernel for _, kernel in phase.groups}
    assert any("layer_norm" in k for k in kernels) and any("make_up_gate" in k for k in kernels)
    assert any(g.n_bytes for (place, k), g in phase.groups.items() if k.startswith("mv_")), lines
    with Session.open(config(written(folder, "deepseek3"), cpu_moe=True)) as session:
        np.testing.assert_array_equal(transcript(session), wanted)


def test_the_node_that_is_not_finite_is_named(opener, tmp_path: Path) -> None:
    model = tiny_model("llama")
    values = model.values("blk.1.ffn_up.weight").copy()
    values[3, 5] = np.nan
    model.set("blk.1.ffn_up.weight", values)
    path = write_model(model, tmp_path / "m.gguf")
    with Session.open(config(path)) as session, pytest.raises(NonFiniteError, match=r"blk\.1\.ffn_up\.weight"):
        session.decode(Batch.single([1, 2, 3]))


# --- memory -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("changes", [{}, {"override_tensor": ("exps=CPU",)}, {"tensor_split": (1.0, 1.0)}])
def test_planned_memory_is_what_is_allocated(folder, opener, changes) -> None:
    with Session.open(config(written(folder, "deepseek3"), **changes)) as session:
        transcript(session)
        planned = session.memory()
        assert set(planned) == {"CPU", *opener.devices}
        assert session.gpus == tuple(device.info.name for device in opener.devices.values())
        for name, device in opener.devices.items():
            owners = device.owners()
            assert owners["weights"] == planned[name]["weights"]
            assert owners["KV cache"] == pytest.approx(planned[name]["KV"], rel=0.02)
            assert 0 <= owners["compute"] - planned[name]["compute"] <= 4096
        device.check()


def test_experts_on_disk_beside_a_gpu(folder, opener) -> None:
    """Attention on the GPU, experts in slots of RAM: the bits of a run that keeps all of them in RAM."""
    path = written(folder, "deepseek3")
    logits = []
    for changes in ({}, {"expert_ram": 400_000}):
        with Session.open(config(path, override_tensor=("exps=CPU",), **changes)) as session:
            if changes:
                steps = session.runner.cpu.experts
                assert steps is not None and steps.store is not None and not steps.store.complete
            logits.append(transcript(session))
    np.testing.assert_array_equal(logits[0], logits[1])


def test_everything_is_given_back(folder, opener) -> None:
    for changes in ({}, {"n_gpu_layers": 1}):
        with Session.open(config(written(folder, "llama"), **changes)) as session:
            transcript(session)
        device = opener.devices["CUDA0"]
        assert not device.owners() and not device.events and not device.n_streams
        session.close()  # again


def test_too_little_memory_is_said_before_anything_is_copied(folder, opener, monkeypatch) -> None:
    monkeypatch.setattr(EmulatedDevice, "memory", lambda self: (100_000, 200_000))
    with pytest.raises(CudaError, match=r"out of memory.*the run") as caught:
        Session.open(config(written(folder, "llama")))
    assert "-ngl" in str(caught.value) and not opener.devices["CUDA0"].owners()


def test_memory_is_left_for_kernels_and_graphs(folder, opener, monkeypatch) -> None:
    """Exactly what is planned is not enough."""
    with Session.open(config(written(folder, "llama"))) as session:
        planned = sum(session.memory()["CUDA0"].values())
    for more, fits in ((RESERVE_BYTES - 1, False), (RESERVE_BYTES, True)):
        monkeypatch.setattr(EmulatedDevice, "memory", lambda self, n=planned + more: (n, 2 * n))
        if fits:
            Session.open(config(written(folder, "llama"))).close()
            continue
        with pytest.raises(CudaError, match=r"0\.25 GiB kernels and captured graphs"):
            Session.open(config(written(folder, "llama")))


def test_without_memory_for_graphs_kernels_are_launched_one_by_one(folder, opener, monkeypatch, capsys) -> None:
    """All graphs are dropped, that bucket is run without, others try again; one line says so."""
    with Session.open(config(written(folder, "deepseek3"), cpu_moe=True)) as session:
        wanted = [transcript(session) for _ in range(3)]
    capture, free_graph, failures = EmulatedDevice.capture, EmulatedDevice.free_graph, iter([False, False, True])
    alive: list[Any] = []
    left: list[int] = []  # graphs that are there when one is captured, after the failure

    def refusing(self: EmulatedDevice, stream: Any, work: Any) -> Any:
        failed = next(failures, None)
        if failed:
            assert len(alive) == 2
            raise NoGraphMemory("no memory")
        left.extend([len(alive)] if failed is None else [])
        alive.append(capture(self, stream, work))
        return alive[-1]

    def freeing(self: EmulatedDevice, graph: Any) -> None:
        alive.remove(graph)
        free_graph(self, graph)

    monkeypatch.setattr(EmulatedDevice, "capture", refusing)
    monkeypatch.setattr(EmulatedDevice, "free_graph", freeing)
    capsys.readouterr()
    with Session.open(config(written(folder, "deepseek3"), cpu_moe=True)) as session:
        found = [transcript(session) for _ in range(3)]
    np.testing.assert_array_equal(found, wanted)
    assert left[0] == 0 and not alive
    lines = [x for x in capsys.readouterr().err.splitlines() if "no memory for captured graphs" in x]
    assert len(lines) == 1 and "launched kernel by kernel" in lines[0]


def test_a_graph_without_memory_takes_the_others_with_it(folder, opener, monkeypatch) -> None:
    """Of all programs: they have the memory that is missing."""

    def refusing(self: EmulatedDevice, stream: Any, work: Any) -> Any:
        raise NoGraphMemory("no memory")

    with Session.open(config(written(folder, "llama"))) as session:
        programs = session.runner.parts["CUDA0"]._programs

        def n_graphs() -> int:
            return sum(len(graphs) for program in programs for graphs in program.graphs.values())

        for _ in range(2):  # launch by launch, then captured
            single(session, tokens(1))
        assert n_graphs() == 1
        monkeypatch.setattr(EmulatedDevice, "capture", refusing)
        for _ in range(2):
            single(session, tokens(2))
        assert n_graphs() == 0


def test_timed_runs_and_streamed_weights_free_their_events(folder, opener) -> None:
    settings = {"cpu_moe": True, "offload_min_batch": 1, "profile": True}
    with Session.open(config(written(folder, "qwen3moe"), **settings)) as session:
        device = opener.devices["CUDA0"]
        single(session, tokens(5))
        assert device.registered
        events, streams = len(device.events), device.n_streams
        for n in (1, 5):
            single(session, tokens(n))
        assert (len(device.events), device.n_streams) == (events, streams)
    assert not device.events and not device.n_streams and not device.registered


def test_without_gpu_layers_no_gpu_is_opened(folder, opener) -> None:
    with Session.open(config(written(folder, "llama"), n_gpu_layers=0)) as session:
        assert not opener.devices and not session.gpus


def test_rtr_leaves_tensors_of_the_gpu_alone(folder, opener, tmp_path: Path) -> None:
    from ikcli.gguf.constants import GGMLType

    model = tiny_model("llama", type_=GGMLType.Q8_0)
    path = write_model(model, tmp_path / "m.gguf")
    with Session.open(config(path, n_gpu_layers=1)) as session:
        wanted = transcript(session)
    with Session.open(config(path, run_time_repack=True, n_gpu_layers=1)) as session:
        repacked = set(session.model.repacked)
        found = transcript(session)
    assert repacked and not any(name.startswith("blk.1.") for name in repacked)
    np.testing.assert_allclose(found, wanted, atol=0.05 * wanted.std())


# --- weights in RAM, used on the GPU ----------------------------------------------------------------------------------
def kernels_of(opener: Opener, call: Any) -> Counter[str]:
    device = opener.devices["CUDA0"]
    device.launches.clear()
    call()
    return Counter(device.launches)


def test_large_batches_use_experts_in_ram_on_the_gpu(folder, opener, capsys) -> None:
    """From --offload-min-batch * n_expert / n_used tokens on (here 4 * 8 / 3, so 11), and not below."""
    with Session.open(config(written(folder, "qwen3moe"), cpu_moe=True, offload_min_batch=4)) as session:
        session.clear()
        few = kernels_of(opener, lambda: single(session, tokens(10)))
        session.clear()
        many = kernels_of(opener, lambda: single(session, tokens(11)))
        first = single(session, tokens(11))
        session.clear()
        single(session, tokens(11))
        np.testing.assert_array_equal(single(session, tokens(11)), first)
        opener.devices["CUDA0"].check()
    assert "offload: from 11 tokens on 3 weights in RAM" in capsys.readouterr().err
    assert not few["upload_rows"] and many["upload_rows"] == 3  # tensors of the first layer; the last has one row
    assert sum(many.values()) > sum(few.values()) + 3


@pytest.mark.slow  # an emulated GPU
def test_measured_times_overrule_the_rule(folder, opener, capsys) -> None:
    """By default, from 32 * 8 / 3 = 86 tokens on; here 40 are so slow on the CPU that they are copied, too."""
    now = [0.0]
    with Session.open(config(written(folder, "qwen3moe"), cpu_moe=True, n_ubatch=86)) as session:
        trial = session.runner._offload.trial
        assert trial is not None and trial.least == 86
        trial._clock = lambda: now[0]
        real = trial.end

        def end() -> None:
            now[0] += 1.0 if trial._copied else 9.0
            real()

        trial.end = end  # type: ignore[method-assign]
        found: list[Any] = []
        counts = []
        for n in (40, 40, 86, 86, 40):
            session.clear()
            ids = tokens(n, 1)
            counts.append(kernels_of(opener, lambda ids=ids: found.append(single(session, ids)))["upload_rows"])
        assert_close(found[4], found[0], 1e-2)
    assert counts == [0, 0, 3, 3, 3]
    assert "offload: 40 tokens are computed with experts copied to the GPU" in capsys.readouterr().err


def test_large_steps_are_not_captured(folder, opener, monkeypatch) -> None:
    monkeypatch.setattr(backend, "MAX_GRAPH_TOKENS", 8)
    with Session.open(config(written(folder, "llama"))) as session:
        for n, captured in ((8, True), (9, False)):
            for _ in range(3):
                session.clear()
                single(session, tokens(n))
            graphs = [p.graphs for p in session.runner.parts["CUDA0"]._programs]
            assert any(counts.n_tokens >= n for found in graphs for counts in found) == captured


def test_weights_repacked_in_ram_are_used_on_the_gpu(folder, opener) -> None:
    """The device gets the same rows; the last layer's experts are multiplied on the CPU, in another order of sums."""
    found = []
    for repack, kernel in ((False, "upload_rows"), (True, "upload_groups")):
        settings = {"cpu_moe": True, "offload_min_batch": 1, "run_time_repack": repack, "mmap": not repack}
        with Session.open(config(written(folder, "qwen3moe-q8_0"), **settings)) as session:
            launches = kernels_of(opener, lambda: found.append(single(session, tokens(12), logits="all")))
            planned = session.memory()["CUDA0"]["compute"]
            assert abs(opener.devices["CUDA0"].owners()["compute"] - planned) <= 4096
        assert launches[kernel] == 3
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-5)


class Hasty(EmulatedDevice):
    """Copies of weights run as soon as they are queued: only what they are told to wait for has been done by then."""

    def _queue(self, stream: Any, work: Any) -> None:
        super()._queue(stream, work)
        if self._capturing is None and stream is not self._streams[0]:
            stream.flush()


@emulation_only
def test_weights_are_not_copied_over_what_is_still_used(folder, opener, monkeypatch) -> None:
    """Streamed weights share work memory with values and with each other."""
    settings = {"cpu_moe": True, "offload_min_batch": 1, "n_ubatch": 12}
    with Session.open(config(written(folder, "deepseek2"), **settings)) as session:
        wanted = single(session, tokens(12), logits="all")
    monkeypatch.setattr(gpus, "open_devices", lambda config: {"CUDA0": Hasty()})
    with Session.open(config(written(folder, "deepseek2"), **settings)) as session:
        np.testing.assert_array_equal(single(session, tokens(12), logits="all"), wanted)


@pytest.mark.parametrize(
    ("policy", "copies"), [((("ALL", False),), 0), ((("MOE_FUSED_UP_GATE", False),), 1), ((("MUL_MAT", False),), 3)]
)
def test_the_offload_policy_is_obeyed(folder, opener, policy, copies) -> None:
    settings = {"cpu_moe": True, "offload_min_batch": 1, "offload_policy": policy}
    with Session.open(config(written(folder, "qwen3moe"), **settings)) as session:
        launches = kernels_of(opener, lambda: single(session, tokens(5)))
        planned = session.memory()["CUDA0"]["compute"]
        assert abs(opener.devices["CUDA0"].owners()["compute"] - planned) <= 4096
    assert launches["upload_rows"] == copies


def test_observers_see_offloaded_products(folder, opener) -> None:
    settings = {"cpu_moe": True, "offload_min_batch": 1}
    seen: dict[str, Any] = {}
    with Session.open(config(written(folder, "qwen3moe"), **settings, profile=True)) as session:
        plain = single(session, tokens(5), logits="all")
        session.clear()
        session.observer = lambda node, value: seen.setdefault(node.name, np.array(value))
        np.testing.assert_array_equal(single(session, tokens(5), logits="all"), plain)
    with Session.open(config(written(folder, "qwen3moe"), **settings)) as session:
        session.observer = lambda node, value: np.testing.assert_array_equal(seen[node.name], value)
        np.testing.assert_array_equal(single(session, tokens(5), logits="all"), plain)
