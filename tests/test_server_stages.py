"""A pipeline-parallel server: the texts of one process with many micro-batches in flight; lost stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import write_control_vector
from engine_client import ENDLESS, ByHand, Call, Pause, Posted, ask, by_hand, request, serving, until
from factories import tiny_model
from gguf_files import write_model
from stage_threads import Threads
from tiny_architectures import tiny

from ikcli.engine.pipeline import supervisor
from ikcli.engine.pipeline.driver import PipelineRunner, StageLostError
from ikcli.gguf.reader import open_gguf
from ikcli.sampling.params import SamplerParams
from ikcli.server.slots.engine import Engine
from ikcli.server.slots.messages import Delta, Event, Final, PromptProgress
from ikcli.server.slots.pipeline_worker import PipelineWorker
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


def worker(engine: Engine) -> PipelineWorker:
    assert isinstance(engine._worker, PipelineWorker)
    return engine._worker


def texts(finals: list[Final]) -> list[list[int]]:
    return [[t.id for t in f.tokens] for f in finals]


# --- step by step -----------------------------------------------------------------------------------------------------
IDS = np.random.default_rng(9).integers(3, 96, 300).tolist()
WILD = SamplerParams(temperature=1.5, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("llama")
    keys: Any = model.metadata | {"tokenizer.ggml.model": "none", "llama.context_length": 2048}
    return write_model(model, tmp_path_factory.mktemp("stages") / "llama.gguf", keys)


def both(path: Path, work: Callable[[ByHand], Any], n_slots: int = 3, **changes: Any) -> tuple[Any, Any]:
    """What comes of some work in one process and in two stages."""
    settings = {"n_ctx": 256 * n_slots, "n_ubatch": 32, "type_k": "f32", "type_v": "f32"} | changes
    found = []
    for n in (1, 2):
        with by_hand(path, n_slots, **settings, n_threads=n, n_threads_batch=n, fleet=BatchConfig(stages=n)) as hand:
            assert isinstance(hand.worker, PipelineWorker) == (n == 2)
            found.append(work(hand))
    return found[0], found[1]


def tokens_of(calls: Sequence[Posted]) -> list[list[int]]:
    assert all(call.final for call in calls), [call.events[-1:] for call in calls]
    return [[t.id for t in call.final.tokens] for call in calls if call.final]


def test_shifted_and_cancelled_slots_say_what_they_say_in_one_process(tiny_file: Path) -> None:
    """More slots than stages, one of which is full before the others; a slot goes to another request at once."""

    def work(hand: ByHand) -> Any:
        gone = [hand.post(IDS[i : i + 50], 300, id_slot=i, sampling=WILD) for i in range(3)]
        hand.step(9)
        for call in gone:
            call.task.cancelled = True
        hand.step()  # what is under way for them lands in slots of others
        calls = [hand.post(IDS[i : i + n], 40, id_slot=i, sampling=WILD) for i, n in enumerate((240, 30, 90))]
        hand.until(lambda: all(call.final for call in calls))
        assert [call.final.truncated for call in calls if call.final] == [True, False, False]
        assert not any(call.final for call in gone)
        m = hand.worker.metrics(reset=False)
        return tokens_of(calls), m.tokens_predicted_total, m.prompt_tokens_total >= 360, m.n_tokens_max

    plain, staged = both(tiny_file, work)
    assert staged == plain and plain[3] == 256


def test_prompts_wait_for_generation_without_continuous_batching(tiny_file: Path) -> None:
    def work(hand: ByHand) -> Any:
        first = hand.post(IDS[:20], 30, id_slot=0, sampling=WILD)
        hand.until(lambda: hand.worker.slots[0].n_past > 22)
        second = hand.post(IDS[100:190], 3, id_slot=1, sampling=WILD)
        hand.until(lambda: first.final)
        assert hand.worker.slots[1].n_past == 0 and not second.events
        hand.until(lambda: second.final)
        return tokens_of([first, second])

    plain, staged = both(tiny_file, work, server={"cont_batching": False})
    assert staged == plain


def test_slots_with_other_things_added_are_not_computed_together(
    tiny_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together: list[set[Any]] = []

    with by_hand(tiny_file, 4, n_ctx=1024, n_threads=2, n_threads_batch=2, fleet=BatchConfig(stages=2)) as hand:
        session, worker = hand.worker.session, hand.worker
        each, applied = session.submit_each, list[Any]()
        monkeypatch.setattr(session, "apply", applied.append)

        def note(tokens: Any, pos: Any, seqs: Any) -> None:
            together.append({worker.slots[i].added for i in seqs} | {applied[-1]})
            each(tokens, pos, seqs)

        monkeypatch.setattr(session, "submit_each", note)
        calls = [hand.post(IDS[:20], 12, id_slot=i, sampling=WILD, lora=(float(i % 2),)) for i in range(4)]
        hand.until(lambda: all(call.final for call in calls))
    assert len(together) > 10 and all(len(added) == 1 for added in together)


@pytest.mark.parametrize("n_steps", [1, 2, 3, 4, 5])
def test_what_is_under_way_for_a_cancelled_request_is_for_nobody(tiny_file: Path, n_steps: int) -> None:
    """Neither the end of its prompt nor a token of it."""

    def work(hand: ByHand) -> Any:
        gone = hand.post(IDS[:40], 50, id_slot=0, sampling=WILD)
        hand.step(n_steps)
        gone.task.cancelled = True
        call = hand.post(IDS[100:190], 9, id_slot=0, sampling=WILD)
        hand.until(lambda: call.final)
        assert not gone.final
        return tokens_of([call])

    plain, staged = both(tiny_file, work, 1)
    assert staged == plain


def test_all_slots_go_on_after_a_stage_was_lost(tiny_file: Path) -> None:
    """In the middle of a prompt with the log-probabilities of its tokens, of an answer, and with nothing to do."""

    def work(hand: ByHand) -> Any:
        idle = hand.post(IDS[100:140], 2, id_slot=2)
        hand.until(lambda: idle.final)
        one = hand.post(IDS[:40], 30, id_slot=0, sampling=WILD)
        hand.until(lambda: hand.worker.slots[0].n_past > 50)
        two = hand.post(IDS[:200], 10, id_slot=1, sampling=WILD, prompt_logprobs=True, cache_prompt=False)
        hand.step(3)
        assert 0 < hand.worker.slots[1].n_past < 200
        if isinstance(hand.worker, PipelineWorker):
            runner = hand.worker.session.runner
            assert isinstance(runner, PipelineRunner)
            runner.disconnect()
            with pytest.raises(StageLostError) as lost:
                hand.step(10)
            hand.worker._recover(lost.value)
            assert [s.n_past for s in hand.worker.slots] == [0, 0, 0]
        hand.until(lambda: one.final and two.final)
        assert two.final is not None
        again = hand.post(IDS[100:140], 2, id_slot=2)
        hand.until(lambda: again.final)
        assert tokens_of([again]) == tokens_of([idle])
        return tokens_of([one, two]), [t.id for t in two.final.prompt_logprobs]

    plain, staged = both(tiny_file, work)
    assert staged == plain and plain[1] == IDS[1:200]


def test_checkpoints_of_prompts_in_stages(tmp_path: Path) -> None:
    """A prompt whose end changed is computed from where a recurrent model can go back to."""
    model = tiny("qwen35moe")
    keys: Any = model.metadata | {"tokenizer.ggml.model": "none", "qwen35moe.context_length": 2048}
    path = write_model(model, tmp_path / "model.gguf", keys)

    def work(hand: ByHand) -> Any:
        calls = []
        for prompt in (IDS[:90], [*IDS[:80], 5, 6, 7]):
            calls.append(hand.post(prompt, 5, id_slot=0, turns=(70,)))
            hand.until(lambda: calls[-1].final)
        return tokens_of(calls), [call.final.timings.cache_n for call in calls if call.final]

    plain, staged = both(path, work, 1)
    assert staged == plain and plain[1] == [0, 70]


# --- an engine --------------------------------------------------------------------------------------------------------
def test_slots_share_the_stages(wanted: list[Final]) -> None:
    """Prompts and generation of five slots in between each other, some of them cancelled: what one slot says alone."""
    with serving(5, **staged()) as e:
        most = 0
        pause = Pause()  # until all are asked

        def count(event: Event) -> None:
            nonlocal most
            most = max(most, worker(e).session.n_in_flight)
            pause(event)

        prompts = [e.tokenizer.encode(p) for p in PROMPTS]
        gone = [Call(e, request(p, ENDLESS, cache_prompt=False)) for p in prompts]
        for call in gone:
            call.wait_for(bool)
            call.ticket.cancel()
        calls = [Call(e, request(p, 24, cache_prompt=False, report_progress=True), on_event=count) for p in prompts]
        pause.end()
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
        assert isinstance(runner, PipelineRunner)
        supervisors = [runner.supervisor]
        pause = Pause()
        known: list[Event] = []

        def fourth(event: Event) -> None:
            known.append(event)
            if len(known) == 4:
                pause(event)

        asked = [request(e.tokenizer.encode(p), 24, cache_prompt=False) for p in PROMPTS]
        calls = [Call(e, asked[0], fourth), *(Call(e, one) for one in asked[1:])]
        pause.wait()
        deltas = [event for event in known if isinstance(event, Delta)]
        runner.disconnect()
        pause.end()
        ends = [c.final for c in calls]
        until(lambda: runner.supervisor not in (None, *supervisors))
        assert [len(f.tokens) for f in ends] == [24] * 5
        n = sum(len(d.tokens) for d in deltas)  # from there on computed in larger pieces, so perhaps other last bits
        assert n >= 2 and texts(ends[:1])[0][:n] == texts(wanted[:1])[0][:n]
        assert texts([ask(e, e.tokenizer.encode(PROMPTS[3]), 24, cache_prompt=False)]) == texts(wanted[3:4])


def test_a_stage_that_does_not_come_back_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(2, **staged(2)) as e:
        runner = worker(e).session.runner
        assert isinstance(runner, PipelineRunner)
        sampling = SamplerParams(temperature=0, ignore_eos=True)
        call = Call(e, request(e.tokenizer.encode(PROMPTS[0]), ENDLESS, sampling=sampling, cache_prompt=False))
        call.wait_for(lambda events: len(events) > 3)
        monkeypatch.setattr("ikcli.engine.pipeline.driver.of_model", lambda file: "changed meanwhile")
        runner.disconnect()
        assert call.failure.status == 503
        until(lambda: e.state == "failed")
        assert "is another file" in str(e.load_error)
        assert Call(e, request([1], 1)).failure.status == 500
