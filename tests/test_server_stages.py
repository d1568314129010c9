"""A server whose model is in stages: the texts of one process with many micro-batches under way; lost stages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from adapter_files import write_control_vector
from engine_client import Call, ask, request, serving, until
from gguf_files import write_model
from stage_threads import Threads
from tiny_architectures import tiny

from ikcli.engine.pipeline import supervisor
from ikcli.engine.pipeline.driver import StagedRunner
from ikcli.gguf.reader import open_gguf
from ikcli.server.slots.engine import Engine
from ikcli.server.slots.messages import Delta, Final, PromptProgress
from ikcli.server.slots.staged_worker import StagedWorker
from ikcli.server.slots.states import EngineError
from ikcli.server.slots.vectors import VectorChange
from ikcli.settings.adapters import AdapterConfig
from ikcli.settings.fleet import BatchConfig
from ikcli.settings.run import default_model

PROMPTS = ("import os\n", "The class " * 40, "def main(argv):\n    " * 20, "Return the value of ", "x = 1\n" * 60)


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LocalSupervisor", Threads)


@pytest.fixture(scope="module")
def wanted() -> Iterator[list[Final]]:
    with serving(5, n_ctx=5120, n_ubatch=64, n_threads=1, n_threads_batch=1) as e:
        yield [ask(e, e.tokenizer.encode(p), 24, cache_prompt=False) for p in PROMPTS]


def staged(n: int = 3) -> dict[str, object]:
    return {
        "n_ctx": 5120, "n_ubatch": 64, "n_threads": n, "n_threads_batch": n, "fleet": BatchConfig(stages=n),
    }  # fmt: skip


def worker(engine: Engine) -> StagedWorker:
    assert isinstance(engine._worker, StagedWorker)
    return engine._worker


def texts(finals: list[Final]) -> list[list[int]]:
    return [[t.id for t in f.tokens] for f in finals]


def test_slots_share_the_stages(wanted: list[Final]) -> None:
    """Prompts and generation of five slots in between each other, some of them cancelled: what one slot says alone."""
    with serving(5, **staged()) as e:
        most = 0

        def count(event: object) -> None:
            nonlocal most
            most = max(most, worker(e).session.under_way)

        prompts = [e.tokenizer.encode(p) for p in PROMPTS]
        gone = [Call(e, request(p, 200, cache_prompt=False)) for p in prompts]
        for call in gone:
            call.wait_for(bool)
            call.ticket.cancel()
        calls = [Call(e, request(p, 24, cache_prompt=False, report_progress=True), on_event=count) for p in prompts]
        assert texts([c.final for c in calls]) == texts(wanted)
        progress = [x.processed for x in calls[1].events if isinstance(x, PromptProgress)]
        assert progress == sorted(set(progress)) and progress[-1] == len(prompts[1])
        assert most >= 2
        until(lambda: all(s.state == "idle" for s in e.slots()))


def test_control_vectors_of_stages(tmp_path: Path) -> None:
    """Scales of those of the command line change in all stages; others cannot be loaded."""
    width = open_gguf(default_model()).metadata["deepseek2.embedding_length"]
    rng = np.random.default_rng(1)
    path = write_control_vector(tmp_path / "v.gguf", {f"direction.{il}": rng.normal(0, 5, width) for il in (1, 5)})
    adapters = AdapterConfig(control_vector=(path,), control_vector_path=tmp_path)
    said = []
    for more in ({"n_threads": 1, "n_threads_batch": 1}, staged(2)):
        with serving(1, **({"n_ctx": 1024} | more | {"adapters": adapters})) as e:
            found = []
            for scale in (1.0, 0.0, -0.5):
                e.vectors.apply([VectorChange(0, scale)])
                found.append(ask(e, e.tokenizer.encode(PROMPTS[2]), 16).text)
            said.append(found)
    assert said[0] == said[1] and len(set(said[0])) == 3
    with serving(1, **(staged(2) | {"adapters": adapters})) as e, pytest.raises(EngineError, match="only their scales"):
        e.vectors.load("v.gguf", path, 1.0, None, None)


def test_a_cached_prompt_is_used_and_a_saved_slot_comes_back(tmp_path: Path) -> None:
    """With recurrent states, which go back to checkpoints only."""
    model = tiny("qwen35moe")
    keys = {"tokenizer.ggml.model": "none", "qwen35moe.context_length": 2048}
    path = write_model(model, tmp_path / "model.gguf", model.metadata | keys)
    prompt = [(7 * i) % 90 for i in range(100)]
    answers = []
    for more in ({"n_threads": 1, "n_threads_batch": 1}, staged(2) | {"n_ctx": 1024, "n_ubatch": 32}):
        with serving(2, model=path, **({"n_ctx": 1024, "n_ubatch": 32} | more)) as e:
            first = ask(e, prompt, 12, id_slot=0)
            again = ask(e, [*prompt, 5, 6], 12, id_slot=0)
            e.slot_action(0, "save", tmp_path / "slot").result(60)
            e.slot_action(1, "restore", tmp_path / "slot").result(60)
            other = ask(e, [*prompt, 5, 6], 12, id_slot=1)
            assert [t.id for t in other.tokens] == [t.id for t in again.tokens]
            answers.append((texts([first, again]), again.timings.cache_n > 0))
    assert answers[0] == answers[1] and answers[0][1]


def test_a_lost_stage_is_a_pause(wanted: list[Final]) -> None:
    with serving(5, **staged()) as e:
        runner = worker(e).session.runner
        assert isinstance(runner, StagedRunner)
        supervisors = [runner.supervisor]
        calls = [Call(e, request(e.tokenizer.encode(p), 24, cache_prompt=False)) for p in PROMPTS]
        calls[0].wait_for(lambda events: len(events) > 3)
        known = [event for event in calls[0].events if isinstance(event, Delta)]
        runner.cut()
        ends = [c.final for c in calls]
        until(lambda: runner.supervisor not in (None, *supervisors))
        assert [len(f.tokens) for f in ends] == [24] * 5
        n = sum(len(d.tokens) for d in known)  # from there on computed in larger pieces, so perhaps other last bits
        assert n >= 2 and texts(ends[:1])[0][:n] == texts(wanted[:1])[0][:n]
        assert texts([ask(e, e.tokenizer.encode(PROMPTS[3]), 24, cache_prompt=False)]) == texts(wanted[3:4])


def test_a_stage_that_does_not_come_back_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(2, **staged(2)) as e:
        runner = worker(e).session.runner
        assert isinstance(runner, StagedRunner)
        call = Call(e, request(e.tokenizer.encode(PROMPTS[0]), 900, cache_prompt=False))
        call.wait_for(lambda events: len(events) > 3)
        monkeypatch.setattr("ikcli.engine.pipeline.driver.of_model", lambda file: "changed meanwhile")
        runner.cut()
        assert call.failure.status == 503
        until(lambda: e.state == "failed")
        assert "is another file" in str(e.load_error)
        assert Call(e, request([1], 1)).failure.status == 500
