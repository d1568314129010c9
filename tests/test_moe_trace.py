"""Traces of experts against what layers choose, the file, and the simulator's policies on sequences with known hits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from benchmark_scripts import load
from factories import tiny_model
from gguf_files import write_model

from ikcli.engine.run.batch import Batch
from ikcli.engine.run.session import Session
from ikcli.errors import FormatError, UsageError
from ikcli.graph import Node
from ikcli.measure.moe_trace import ExpertTrace, TraceRecorder, check, read_trace
from ikcli.settings.measure import PerplexityConfig
from ikcli.settings.run import RunConfig

EXPERTS: dict[str, Any] = {"expert_count": 8, "expert_used_count": 3, "block_count": 3}


def opened(path: Path) -> Session:
    config = RunConfig(command="perplexity", model=path, n_ctx=64, n_ubatch=16, n_threads=1, n_threads_batch=1)
    return Session.open(replace(config, type_k="f32", type_v="f32", warmup=False), n_ctx=64)


@pytest.fixture(scope="module")
def moe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("qwen3moe", expert_feed_forward_length=48, **EXPERTS)
    return write_model(model, tmp_path_factory.mktemp("m") / "moe.gguf")


def test_a_trace_is_what_layers_choose_and_would_have_chosen(moe_file: Path) -> None:
    wanted = np.zeros(40, bool)
    wanted[20:39] = True
    batch = Batch(np.arange(40, dtype=np.int32) % 96, np.arange(40, dtype=np.int32), np.zeros(40, np.int32), wanted)
    with opened(moe_file) as session:
        recorder = TraceRecorder(session, Path())
        values: dict[str, list[np.ndarray]] = {}

        def both(node: Node, value: np.ndarray) -> None:
            values.setdefault(node.name, []).append(value.copy())
            recorder(node, value)

        session.observer = both
        session.decode(batch)
        norms = [session.model.values(f"blk.{il}.ffn_norm.weight").reshape(-1) for il in range(3)]
        routers = [session.model.values(f"blk.{il}.ffn_gate_inp.weight").reshape(8, -1) for il in range(3)]
        trace = recorder.trace(40)
    assert trace.experts.shape == (40, 3, 3)
    for il in range(2):
        logits = np.concatenate(values[f"ffn_moe_logits-{il}"])
        np.testing.assert_array_equal(trace.experts[:, il], np.argsort(-logits, axis=1, kind="stable")[:, :3])
    # The last layer sees the rows whose logits are wanted; the guess for it exists for all of them.
    assert (trace.experts[~wanted, 2] == -1).all()
    last = np.concatenate([v for v in values["ffn_moe_logits-2"] if len(v)])
    np.testing.assert_array_equal(trace.experts[wanted, 2], np.argsort(-last, axis=1, kind="stable")[:, :3])
    for il in (1, 2):
        hidden = np.concatenate(values[f"ffn_norm-{il - 1}"]) / norms[il - 1]
        logits = (hidden * norms[il]) @ routers[il].T
        np.testing.assert_array_equal(np.sort(trace.guessed[:, il]), np.sort(np.argsort(-logits)[:, :3]))
    assert (trace.guessed[:, 0] == -1).all()


def test_files_are_read_as_written(tmp_path: Path, rng: np.random.Generator) -> None:
    for n_expert in (200, 300):
        ids = rng.integers(-1, n_expert, (2, 7, 3, 4)).astype(np.int32)
        trace = ExpertTrace(
            "deepseek2 x", np.arange(3, dtype=np.int32), n_expert, ids[0], ids[1], np.zeros(1, np.int64)
        )
        trace.save(tmp_path / "trace")
        found = read_trace(tmp_path / "trace")
        assert (found.model, found.n_expert) == ("deepseek2 x", n_expert)
        np.testing.assert_array_equal(found.experts, ids[0])
        np.testing.assert_array_equal(found.guessed, ids[1])


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    path.write_bytes(b"no archive")
    with pytest.raises(FormatError, match=r"trace\.npz: not an expert trace"):
        read_trace(path)
    np.savez(path, format="something")
    with pytest.raises(FormatError, match="its format is 'something'"):
        read_trace(path)


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    path = write_model(tiny_model("llama"), tmp_path / "dense.gguf")
    with opened(path) as session, pytest.raises(UsageError, match="has no experts"):
        TraceRecorder(session, Path())


@pytest.mark.parametrize("option", ["hellaswag", "kl_divergence", "stride"])
def test_other_measurements_are_refused(option: str) -> None:
    options = replace(PerplexityConfig(), moe_trace=Path("x"), **{option: 1})
    with pytest.raises(UsageError, match="--moe-trace"):
        check(RunConfig(command="perplexity", perplexity=options))


# --- simulator --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def simulator() -> ModuleType:
    return load("expert_cache")


def trace_of(ids: np.ndarray, guessed: np.ndarray | None = None, n_expert: int = 8) -> ExpertTrace:
    ids = ids.astype(np.int32)
    guessed = np.full_like(ids, -1) if guessed is None else guessed.astype(np.int32)
    return ExpertTrace("m", np.arange(ids.shape[1], dtype=np.int32), n_expert, ids, guessed, np.zeros(1, np.int64))


def test_a_cycle_defeats_lru_but_not_a_kept_part(simulator: ModuleType) -> None:
    trace = trace_of(np.arange(400).reshape(-1, 1, 1) % 8)
    found = simulator.policies(trace, 6, 64, 1)
    assert found["LRU"].hits == 0
    assert found["LRU"].loads == 1
    assert found["static"].hits == 0.75
    assert found["best"].hits == 0.75


def test_repeated_experts_stay(simulator: ModuleType) -> None:
    trace = trace_of(np.repeat(np.arange(40), 10).reshape(-1, 1, 1) % 8)
    found = simulator.policies(trace, 2, 4, 1)
    assert found["LRU"].hits == pytest.approx(0.9)
    assert found["best"].hits >= found["LRU"].hits
    assert found["static"].hits == 0.2  # of experts 0 and 1


def test_rates_keep_what_is_used_often_and_what_was_used_last(simulator: ModuleType) -> None:
    others = np.arange(2, 8).reshape(3, 2)  # between two uses of the experts 0 and 1: as many as the cache holds
    often = np.array([row for t in range(60) for row in ([0, 1], others[2 * t % 3], others[(2 * t + 1) % 3])])
    found = simulator.policies(trace_of(often[:, None]), 4, 64, 1)
    assert found["LRU"].hits == 0
    assert found["rates"].hits >= 0.3
    lasting = simulator.policies(trace_of(np.repeat(np.arange(40), 10).reshape(-1, 1, 1) % 8), 2, 4, 1)
    assert lasting["rates"].hits == lasting["LRU"].hits


def test_guesses_are_loaded_up_to_the_cap(simulator: ModuleType) -> None:
    ids = np.stack([np.arange(200) % 8, (np.arange(200) + 1) % 8], axis=1).reshape(-1, 1, 2)
    perfect = trace_of(ids, ids)
    assert simulator.recall(perfect) == 1
    assert simulator.policies(perfect, 3, 8, 2)["guess"].hits == 1
    fresh = np.arange(400).reshape(-1, 1, 2) % 8
    assert simulator.policies(trace_of(fresh, fresh), 2, 8, 1)["guess"].hits == 0.5
    assert "guess" not in simulator.policies(trace_of(ids), 3, 8, 2)


def test_all_sizes_reach_their_ends(simulator: ModuleType) -> None:
    trace = simulator.Random(16, 3, 2, 120, 0.5, 0.5, 0.9).trace()
    assert all(x.hits == 0 and x.loads == 0 for x in simulator.policies(trace, 0, 8, 2).values())
    whole = simulator.policies(trace, 16, 8, 2)
    assert all(x.hits > 0.98 for name, x in whole.items() if name != "static")
    assert 0 < simulator.of_batch(trace, 8) < 1
    assert len(np.unique(trace.experts[0, 0])) == 3


def test_the_table_has_a_row_per_size(
    simulator: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulator.Random(16, 3, 2, 60, 0.5, 0.5, 0.9).trace().save(tmp_path / "t")
    assert simulator.main([str(tmp_path / "t"), "--sizes", "2,4", "--random", "8,2,0.5,0.5,0.5", "--tokens", "40"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines if line.startswith("| ")].count("2 (12 %)") == 1
    with pytest.raises(SystemExit, match="give EXPERTS"):
        simulator.main(["--random", "1,2"])
