"""Slots that draft with the model's own heads answer as without, whatever becomes of their sequences."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_answers import PROMPTS, answers, check_answers, helped
from engine_client import Call, request, serving, until
from factories import MemoryModel, add_heads, tiny_deepseek2, tiny_model
from gguf_files import write_model
from head_models import HEAD_MODELS
from stage_threads import Threads
from tiers import some
from tiny_architectures import tiny

from ikcli.drafting.policy import RESTS, Decision, Option, Policy
from ikcli.engine.pipeline import supervisor
from ikcli.engine.pipeline.driver import PipelineRunner
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.mtp import Continuation, Draft, Heads
from ikcli.engine.run.session import Session
from ikcli.errors import IkError
from ikcli.sampling.params import SamplerParams
from ikcli.server.slots import speculative
from ikcli.server.slots.engine import Engine
from ikcli.server.slots.worker import Worker
from ikcli.settings.fleet import BatchConfig
from ikcli.settings.run import RunConfig
from ikcli.settings.server import ServerConfig
from ikcli.settings.values import parse_spec_type

MODELS = {
    "qwen35": lambda: add_heads(tiny("qwen35", context_length=2048)),
    "deepseek2": lambda: add_heads(tiny_deepseek2(context_length=2048)),
    "mimo2": lambda: add_heads(tiny("mimo2", context_length=2048), 2, dense=True),
}
ENDLESS = SamplerParams(temperature=0, ignore_eos=True)
SPEC: dict[str, Any] = {"spec_type": parse_spec_type("mtp:p_min=0"), "spec_autotune": False}


def written(model: MemoryModel, folder: Path) -> Path:
    return write_model(model, folder / "m.gguf", model.metadata | {"tokenizer.ggml.model": "none"})


@pytest.fixture(params=some(list(MODELS), ["qwen35"]))
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return written(MODELS[request.param](), tmp_path)


def test_answers_are_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"model": path, "n_ctx": 1024, "n_ubatch": 32}
    check_answers(SPEC, settings, monkeypatch)


def long_answers(e: Engine, n_slots: int, folder: Path) -> Iterator[list[int]]:
    """Answers of 256 tokens, then of slots whose text is partly theirs: continued, taken back, saved and restored."""

    def ask(i_slot: int, prompt: Sequence[int], n: int) -> Call:
        return Call(e, request(prompt, n, id_slot=i_slot, sampling=ENDLESS))

    def tokens(call: Call) -> list[int]:
        assert call.final.stop_type == "limit"
        return [t.id for t in call.final.tokens]

    prompts = [PROMPTS[i % 3][i:] for i in range(n_slots)]
    calls = [ask(i, p, 256) for i, p in enumerate(prompts)]
    first = [tokens(c) for c in calls]
    yield from first
    n_reused = []
    for cut, more in ((256, PROMPTS[2][:5]), (120, PROMPTS[1][:9]), (126, [])):  # the last one is near a checkpoint
        calls = [ask(i, [*p, *t[:cut], *more], 40) for i, (p, t) in enumerate(zip(prompts, first, strict=True))]
        yield from map(tokens, calls)
        n_reused += [c.final.timings.cache_n for c in calls]
    assert sum(n_reused) > 0
    last = n_slots - 1
    before = tokens(ask(0, [*prompts[0], *first[0][:50]], 30))
    yield before
    saved = e.slot_action(0, "save", folder / "slot.bin").result(60)
    e.slot_action(last, "erase").result(60)
    assert e.slot_action(last, "restore", folder / "slot.bin").result(60).n_tokens == saved.n_tokens > 100
    call = ask(last, [*prompts[0], *first[0][:50], *before], 60)
    yield tokens(call)
    assert call.final.timings.cache_n > 0


def lengths_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let lengths, rests and drafts that are only compared be chosen at random, and heads keep no states at rest."""
    rng = random.Random(0)

    def decide(self: Policy, options: Sequence[Option], n_texts: int) -> Decision:
        free, lengths = max((o.n_most for o in options), default=0), []
        for o in options:
            n = rng.choice((0, 0, min(rng.randint(1, 4), free, o.n_most)))
            lengths.append(n)
            free -= n
        if any(lengths):
            return Decision(tuple(lengths), "at random")
        compared = tuple(min(rng.randint(0, 4), o.n_most) for o in options) if rng.random() < 0.3 else ()
        return Decision(tuple(lengths), "at random", rest=rng.randrange(12), compared=compared)

    monkeypatch.setattr(Policy, "decide", decide)
    monkeypatch.setattr(Policy, "looked", lambda *_: 0)
    monkeypatch.setattr(speculative, "SHARE", -1.0)


@pytest.mark.slow("long answers of every architecture")
@pytest.mark.parametrize("n_slots", [1, 4])
@pytest.mark.parametrize("name", [*HEAD_MODELS, "qwen35-mtp.gguf", "glm4moe-mtp.gguf"])
def test_long_answers(
    name: str, n_slots: int, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, with drafts, of fixed lengths and of any, and without: the same tokens.

    Whatever roll-back, prompt cache, slot files and rests of the heads do.
    """
    if name.endswith(".gguf"):
        path: Path = request.getfixturevalue("shared_dir") / "golden" / "arch" / name
    else:
        path = written(HEAD_MODELS[name](context_length=2048), tmp_path)
    settings: dict[str, Any] = {"model": path, "n_ctx": 640 * n_slots, "n_ubatch": 32}
    with serving(n_slots, **settings) as e:
        plain = list(long_answers(e, n_slots, tmp_path))
    helped(plain, monkeypatch)
    with serving(n_slots, server=SPEC, **settings) as e:
        assert list(long_answers(e, n_slots, tmp_path)) == plain
        metrics = e.metrics()
        rejected = metrics.draft_tokens_total - metrics.draft_tokens_accepted_total
        assert metrics.draft_tokens_accepted_total > 50 * n_slots and rejected > 50 * n_slots
    lengths_at_random(monkeypatch)
    with serving(n_slots, server=SPEC | {"spec_autotune": True}, **settings) as e:
        assert list(long_answers(e, n_slots, tmp_path)) == plain
        metrics = e.metrics()
        assert metrics.draft_tokens_accepted_total > 10 * n_slots and metrics.draft_decisions[RESTS] > 50


@pytest.mark.slow("compiles attention kernels with windows and sinks")
def test_heads_that_are_far_behind(tmp_path: Path) -> None:
    """Later heads run only where drafts get that far; then more rows are due than a micro-batch holds."""
    path = written(HEAD_MODELS["mimo2"](context_length=2048), tmp_path)
    config = RunConfig(model=path, n_ubatch=8, n_ctx=256, n_threads=1, warmup=False, server=ServerConfig(**SPEC))
    tokens = np.array(PROMPTS[2], np.int32)

    def drafted(session: Session, n: int, lengths: Sequence[int]) -> list[int]:
        assert session.heads is not None
        for length in lengths:
            draft = Draft(0, tokens[: n + 1], length, 0.0, [], [])
            session.heads.draft([draft])
        return draft.found

    with Session.open(config, n_step=8) as session:
        for at in range(0, 40, 8):
            session.decode(Batch.single(tokens[at : at + 8], at, logits="none"))
        wanted = drafted(session, 40, (7,))
    for behind in (7, 8, 9, 17):
        with Session.open(config, n_step=8) as session:
            for at in range(40):
                session.decode(Batch.single(tokens[at : at + 1], at, logits="none"))
                if at + 1 >= 40 - behind:
                    drafted(session, at + 1, (1,))  # the first head alone
            assert drafted(session, 40, (7,)) == wanted


def test_a_failing_draft_ends_no_answer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Heads, wanted: Sequence[Continuation]) -> None:
        raise ValueError("broken")

    with serving(2, model=path, n_ctx=1024, n_ubatch=32) as e:
        plain = list(answers(e))
    monkeypatch.setattr(Heads, "draft", broken)
    with serving(2, model=path, server=SPEC, n_ctx=1024, n_ubatch=32) as e:
        assert list(answers(e)) == plain and e.state == "ready"


def test_no_request_waits_for_an_engine_that_broke(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Worker) -> None:
        raise ValueError("broken")

    with serving(1, model=path, n_ctx=256, n_ubatch=32) as e:
        monkeypatch.setattr(Worker, "step", broken)
        calls = [Call(e, request(PROMPTS[0], 4)) for _ in range(3)]
        messages = [call.failure.message for call in calls]
        assert messages[0] == "internal error: ValueError: broken" and all(messages)
        until(lambda: e.load_error is not None)
        assert e.state == "failed"


@pytest.mark.parametrize("n_stages", [pytest.param(2, marks=pytest.mark.slow("as three stages")), 3])
def test_answers_of_stages_are_the_same(n_stages: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads run in the last stage, with the embeddings of the first; the driver keeps their states."""
    monkeypatch.setattr(supervisor, "LocalSupervisor", Threads)
    settings: dict[str, Any] = {"model": path, "n_ctx": 1024, "n_ubatch": 32, "server": SPEC}
    drafts: list[list[tuple[int, ...]]] = []
    draft = Heads.draft

    def noted(self: Heads, wanted: Sequence[Continuation]) -> None:
        draft(self, wanted)
        drafts[-1] += [tuple(w.found) for w in wanted]

    monkeypatch.setattr(Heads, "draft", noted)
    found = []
    for n in (1, n_stages):
        drafts.append([])
        with serving(1, **settings, n_threads=n, n_threads_batch=n, fleet=BatchConfig(stages=n)) as e:
            calls = [Call(e, request(p, 8)) for p in (PROMPTS[2], PROMPTS[0], PROMPTS[0][:20])]
            found.append([[t.id for t in c.final.tokens] for c in calls])
    assert found[0] == found[1] and drafts[0] == drafts[1] and len(drafts[0]) > 10


@pytest.mark.slow("long answers of stages")
@pytest.mark.parametrize("kinds", [["mtp:p_min=0"], ["draft:p_min=0"], ["ngram-simple:ngram_size_n=1", "mtp:p_min=0"]],
                         ids="-".join)  # fmt: skip
def test_slots_of_stages_answer_as_without_drafts(
    kinds: list[str], path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a draft model, which runs in the driver's process."""
    monkeypatch.setattr(supervisor, "LocalSupervisor", Threads)
    (tmp_path / "small").mkdir()
    small = written(tiny_model("llama", context_length=2048), tmp_path / "small")
    stages: dict[str, Any] = {"fleet": BatchConfig(stages=2), "n_threads": 2, "n_threads_batch": 2}
    settings: dict[str, Any] = {"model": path, "n_ctx": 1024, "n_ubatch": 32} | stages
    with serving(2, **settings) as e:
        plain = list(answers(e))
    helped([*PROMPTS, *plain], monkeypatch)
    spec = SPEC | {"spec_type": tuple(s for kind in kinds for s in parse_spec_type(kind))}
    if kinds[0].startswith("draft"):
        spec["model_draft"] = small
    with serving(2, server=spec, **settings) as e:
        assert list(answers(e)) == plain
        assert e.metrics().draft_tokens_total > 20


@pytest.mark.slow("loads a model again")
def test_heads_go_on_after_a_stage_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LocalSupervisor", Threads)
    stages: dict[str, Any] = {"fleet": BatchConfig(stages=2), "n_threads": 2, "n_threads_batch": 2}
    settings: dict[str, Any] = {"model": written(MODELS["qwen35"](), tmp_path), "n_ctx": 512, "n_ubatch": 32} | stages
    with serving(1, server=SPEC, **settings) as e:
        runner = e._worker.session.runner
        assert isinstance(runner, PipelineRunner)
        before = [t.id for t in Call(e, request(PROMPTS[0], 20, cache_prompt=False)).final.tokens]
        supervised = runner.supervisor
        call = Call(e, request(PROMPTS[1], 300, cache_prompt=False, sampling=ENDLESS))
        until(lambda: e._worker.slots[0].n_past > 60)
        runner.disconnect()
        assert len(call.final.tokens) == 300 and runner.supervisor not in (None, supervised)
        assert [t.id for t in Call(e, request(PROMPTS[0], 20, cache_prompt=False)).final.tokens] == before


def test_a_model_without_heads_is_refused(tmp_path: Path) -> None:
    path = written(tiny("qwen35", context_length=2048), tmp_path)
    with (
        pytest.raises(AssertionError, match="no layers that predict further tokens"),
        serving(1, model=path, server=SPEC),
    ):
        raise IkError("not reached")
