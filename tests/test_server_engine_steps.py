"""The engine's worker step by step: what is computed again, what is counted, what comes before what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_client import GREEDY, ByHand, by_hand
from factories import tiny_deepseek2, tiny_model
from gguf_files import write_model

from ikcli.engine.pipeline.driver import StageLostError
from ikcli.engine.run import embedder
from ikcli.engine.run.adapters import NOTHING, Added
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.sequences import Keeping
from ikcli.sampling.params import SamplerParams
from ikcli.server.slots.actions import Action
from ikcli.server.slots.checkpoints import keeping, places
from ikcli.server.slots.embeddings import EmbeddingTask
from ikcli.server.slots.messages import Bans, EmbeddingRequest, Failure
from ikcli.server.slots.scheduler import prompt_pieces
from ikcli.server.slots.slot import EMBEDDING, GENERATION, IDLE, PROMPT, Slot
from ikcli.server.slots.states import Counters
from ikcli.settings.server import ServerConfig

IDS = np.random.default_rng(5).integers(3, 96, 400).tolist()
WILD = SamplerParams(temperature=1.5, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("llama")
    keys: Any = model.metadata | {"tokenizer.ggml.model": "none", "llama.context_length": 4096}
    return write_model(model, tmp_path_factory.mktemp("steps") / "llama.gguf", keys)


@pytest.fixture
def two(path: Path) -> Iterator[ByHand]:
    with by_hand(path, 2) as hand:
        yield hand


# --- a full context ---------------------------------------------------------------------------------------------------
CACHES: list[Any] = [
    ("llama", {"type_k": "f32", "type_v": "f32"}, 0.002),
    ("llama", {"flash_attn": False, "type_k": "f16", "type_v": "f16"}, 0.01),
    pytest.param(
        "llama",
        {"type_k": "q8_0", "type_v": "q8_0"},
        0.1,
        marks=pytest.mark.slow("compiles kernels for caches of this type and width"),
    ),
    ("deepseek2", {"mla": 1, "type_k": "f32"}, 0.01),
    ("deepseek2", {"mla": 3, "type_k": "q8_0"}, 0.1),
    ("deepseek2", {"mla": 0, "type_k": "f16"}, 0.01),
]


@pytest.mark.parametrize(("name", "changes", "tolerance"), CACHES)
def test_logits_after_a_shift_are_those_of_what_is_left(
    name: str, changes: dict[str, Any], tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_deepseek2() if name == "deepseek2" else tiny_model("llama")
    keys: Any = model.metadata | {
        "tokenizer.ggml.model": "none",
        f"{model.metadata['general.architecture']}.context_length": 4096,
    }
    path = write_model(model, tmp_path / "model.gguf", keys)
    with by_hand(path, 2, n_ctx=512, **changes) as hand:
        seen = hand.repeated(monkeypatch)
        n_ctx = hand.worker.slots[0].n_ctx
        assert n_ctx == 256 == hand.worker.session.n_ctx_seq
        call = hand.post(IDS[:240], 80, n_keep=10, n_discard=37, id_slot=0, sampling=WILD)
        hand.until(lambda: call.final)
        assert call.final is not None and call.final.truncated
        text = IDS[:240] + [t.id for t in call.final.tokens]
        assert len(set(text[240:])) > 30, "not repetitive"
        left = [*text[:10], *text[47:257]]  # full: 256 tokens in the cache and the one that was taken last
        more = [*left[:10], *left[47:], *text[257 : 257 + 37]]
        assert [tokens for tokens, _ in seen] == [left, more]
        for tokens, logits in seen:
            hand.check_same(tokens, logits, tolerance)


def test_what_a_shift_keeps_and_drops(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """n_keep: that many tokens, -1 the prompt, never so many that nothing can be dropped; without n_discard half."""
    for n_keep, n_discard, kept, dropped in (
        (0, 0, 0, 128), (10, 0, 10, 123), (-1, 20, 40, 20), (9999, 0, 252, 2), (9999, 9999, 252, 4), (3, 9999, 3, 253),
    ):  # fmt: skip
        with by_hand(path, 2) as hand:
            seen = hand.repeated(monkeypatch)
            call = hand.post(IDS[:40], 217 + 1, n_keep=n_keep, n_discard=n_discard, id_slot=0, sampling=WILD)
            hand.until(lambda: call.final)  # noqa: B023
            assert call.final is not None and call.final.truncated
            text = IDS[:40] + [t.id for t in call.final.tokens]
            assert [tokens for tokens, _ in seen] == [[*text[:kept], *text[kept + dropped : 257]]], (n_keep, n_discard)


def test_an_answer_that_just_fits_is_neither_shifted_nor_cut(path: Path) -> None:
    """A slot is shifted when it is full; where that may not be, the answer ends one token before."""
    for n, server, n_predict, wanted in (
        (240, {}, 17, (17, False, 256)),
        (240, {"context_shift": False}, 16, (16, False, 255)),
        (240, {"context_shift": False}, 17, (16, True, 255)),
        (240, {}, -2, (16, True, 255)),
        (255, {"context_shift": False}, 5, (1, True, 255)),
    ):
        with by_hand(path, 2, server=server) as hand:
            call = hand.post(IDS[:n], n_predict, id_slot=0, sampling=WILD)
            hand.until(lambda: call.final)  # noqa: B023
            assert call.final is not None and call.final.stop_type == "limit"
            found = call.final
            assert (found.timings.predicted_n, found.truncated, found.timings.n_past) == wanted, (n, server, n_predict)


def test_a_shift_does_not_wait_for_others_without_continuous_batching(path: Path) -> None:
    """Only prompts do; a slot that computes its own text again goes on."""
    with by_hand(path, 2, server={"cont_batching": False}) as hand:
        first, second = (hand.post(IDS[i : i + 30], 300, id_slot=i, sampling=WILD) for i in range(2))
        slots = hand.worker.slots
        hand.until(lambda: all(s.state == GENERATION for s in slots))
        slots[1].repeat_from(0, slots[1].text_tokens())
        hand.worker.session.truncate(1, 0)
        hand.step()
        assert [s.state for s in slots] == [GENERATION, GENERATION]
        first.task.cancelled = True
        third = hand.post(IDS[50:60], 4, id_slot=0)
        hand.step(20)
        assert slots[0].state == PROMPT and not third.events, "a prompt waits"
        second.task.cancelled = True
        hand.until(lambda: third.final, 20)


def test_an_endless_answer_ends_with_the_context_of_the_training(tmp_path: Path) -> None:
    model = tiny_model("llama", context_length=300)
    path = write_model(model, tmp_path / "m.gguf", model.metadata | {"tokenizer.ggml.model": "none"})
    with by_hand(path, 2) as hand:
        call = hand.post(IDS[:40], -1, id_slot=0, sampling=WILD)
        hand.until(lambda: call.final)
        assert call.final is not None and call.final.timings.predicted_n == 260 and call.final.truncated


# --- taken back -------------------------------------------------------------------------------------------------------
def test_logits_after_a_banned_text_are_those_of_what_is_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with by_hand(path, 2) as hand:
        seen = hand.repeated(monkeypatch)
        output: list[Any] = []

        def removed(g: Any) -> int:
            """Takes back three tokens once, as a banned text of three tokens would."""
            if output or len(g.output.tokens) != 9:
                return 0
            output.extend(t.id for t in g.output.tokens)
            g.output.rewind(6)
            g.sampler.rollback(3)
            del g.history[-3:]
            return 3

        monkeypatch.setattr("ikcli.server.slots.generation.Generation.rewind_banned", removed)
        call = hand.post(IDS[:50], 40, id_slot=0, sampling=WILD, bans=Bans(("never",)))
        hand.until(lambda: call.final)
        ((tokens, logits),) = seen
        assert tokens == IDS[:50] + output[:6]
        hand.check_same(tokens, logits, 0.01)
        assert hand.worker.slots[0].n_past == hand.worker.session.sequences.n_past[0]


def test_wrong_drafts_of_recurrent_models_are_taken_back_cheaply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a checkpoint just before the draft: only what was accepted is computed again."""
    from ikcli import models

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setitem(models.ARCHITECTURES, "recurrent", "outside.recurrent")
    model = tiny_model("recurrent", context_length=2048)
    keys: Any = model.metadata | {"tokenizer.ggml.model": "none"}
    path = write_model(model, tmp_path / "recurrent.gguf", keys)
    with by_hand(path, 1, type_k="f32", type_v="f32") as hand:
        session, computed = hand.worker.session, list[int]()
        compute = session.compute

        def count(batch: Batch) -> Any:
            computed.append(len(batch))
            return compute(batch)

        monkeypatch.setattr(session, "compute", count)
        speculator = hand.worker._speculator
        monkeypatch.setattr(type(speculator), "__bool__", lambda self: True)
        monkeypatch.setattr(speculator, "rest", 0)
        monkeypatch.setattr(speculator, "propose", lambda slots: [setattr(s, "draft", [1, 2]) or s for s in slots])
        call = hand.post(IDS[:100], 20, sampling=WILD)
        hand.until(lambda: call.final)
        assert call.final is not None and call.final.timings.draft_n == 38
        assert computed == [95, 5]  # the rest by the program for single steps


def test_a_failure_of_several_slots_costs_none_that_is_not_guilty(two: ByHand, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was computed together counts for nothing; each goes on from where it was."""
    session = two.worker.session
    alone = [two.post(IDS[i : i + 20], 12, id_slot=i, sampling=WILD) for i in range(2)]
    for call in alone:
        two.until(lambda: call.final)  # noqa: B023
    real, failed = session.step_each, []

    def fail(tokens: Any, *rest: Any) -> Any:
        found = real(tokens, *rest)
        if len(tokens) == 2 and len(failed) < 3:
            failed.append(1)
            raise ValueError("together")
        return found

    monkeypatch.setattr(session, "step_each", fail)
    again = [two.post(IDS[i : i + 20], 12, id_slot=i, sampling=WILD) for i in range(2)]
    two.until(lambda: all(call.final for call in again))
    assert len(failed) == 3
    for a, b in zip(alone, again, strict=True):
        assert a.final is not None and b.final is not None and a.final.tokens == b.final.tokens


def test_after_a_failure_a_slot_holds_nothing(two: ByHand, monkeypatch: pytest.MonkeyPatch) -> None:
    call = two.post(IDS[:60], 30, id_slot=0, sampling=WILD)
    two.until(lambda: two.worker.slots[0].n_past > 65)
    monkeypatch.setattr(two.worker.session, "step_each", lambda *_: 1 / 0)
    two.step()
    assert isinstance(call.events[-1], Failure) and two.worker.slots[0].n_past == 0
    monkeypatch.undo()
    other = two.post(IDS[100:160], 3, id_slot=0)
    two.until(lambda: other.final)
    assert two.worker.metrics(reset=False).prompt_cache_entries == 0


# --- order and choice -------------------------------------------------------------------------------------------------
def test_a_slot_is_chosen_for_what_it_holds(path: Path) -> None:
    """More than `-sps` of the prompt, with the same adapters; else the one that was not used for longest."""
    with by_hand(path, 3, server={"slot_prompt_similarity": 0.5}, n_ctx=768) as hand:
        slots = hand.worker.slots
        for i, used in enumerate((3.0, 2.0, 1.0)):
            slots[i].adopt(np.array(IDS[:10], np.int32) if i == 0 else np.array([], np.int32))
            slots[i].t_used = used

        def chosen(n_same: int, **fields: Any) -> int:
            task = hand.post([*IDS[:n_same], *[1] * (10 - n_same)], **fields).task
            slot = hand.worker._choose_slot(task, {0, 1, 2})
            hand.worker._inbox.clear()
            assert slot is not None
            return slot.id

        assert [chosen(n) for n in (4, 5, 6, 10)] == [2, 2, 0, 0]
        assert chosen(10, cache_prompt=False) == 2 and chosen(10, id_slot=1) == 1
        slots[0].added = Added((0.5,))
        assert chosen(10) == 2


@dataclass
class Work:
    """A slot as the scheduler sees it."""

    n_whole: int
    t_served: int = 0
    wants_prompt_logits: bool = False
    n_at_once: int = 0


def test_pieces_of_prompts_in_a_step() -> None:
    """Whole micro-batches, the one that was served longest ago first; who comes after it does not overtake it."""

    def sizes(n_ubatch: int, *waiting: Work) -> list[tuple[int, int]]:
        return [(waiting.index(p.slot), p.n_tokens) for p in prompt_pieces(waiting, n_ubatch)]

    assert sizes(32, Work(100)) == [(0, 32)] and sizes(32, Work(32)) == [(0, 32)] and sizes(32) == []
    assert sizes(32, Work(20, 3), Work(12, 1), Work(1, 2)) == [(1, 12), (2, 1)]
    assert sizes(32, Work(20, 3), Work(12, 1), Work(1, 5)) == [(1, 12), (0, 20)]
    assert sizes(32, Work(20, 1), Work(20, 2), Work(5, 3)) == [(0, 20)]
    assert sizes(512, Work(100, 1, True), Work(448, 2), Work(1, 3)) == [(0, 64), (1, 448)]
    assert sizes(32, Work(100, 1, True)) == [(0, 32)]


def test_requests_that_wait_keep_their_order_when_a_stage_is_lost(two: ByHand, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = two.post(IDS[:5], 50, id_slot=1)
    two.step()
    calls = [two.post(IDS[:5], 2, id_slot=i) for i in (1, 1, 0, 1)]
    two.worker._receive()

    def lost(slot: Slot, task: Any) -> None:
        raise StageLostError("lost")

    with monkeypatch.context() as patched, pytest.raises(StageLostError):
        patched.setattr(two.worker, "_begin", lost)
        two.worker._launch()
    assert list(two.worker._queue) == [call.task for call in calls]
    assert not busy.final


def test_who_has_cancelled_hears_nothing_more(two: ByHand) -> None:
    calls = [two.post(IDS[i : i + 5], 50, report_progress=True) for i in range(3)]
    two.worker._receive()
    two.worker._launch()
    assert [task for task, _ in two.worker._outbox] == [call.task for call in calls[:2]]
    assert list(two.worker._queue) == [calls[2].task]
    for call in calls:
        call.task.cancelled = True
    two.worker._deliver()
    two.worker._receive()
    assert [s.state for s in two.worker.slots] == [IDLE, IDLE] and not two.worker._queue
    two.step(3)
    assert not any(call.events for call in calls)


def test_a_prompt_that_is_not_to_be_cached_does_not_cost_the_one_before(two: ByHand) -> None:
    counted = []
    for prompt, cache in ((IDS[:60], True), (IDS[100:140], False), (IDS[:60], True)):
        call = two.post(prompt, 2, id_slot=0, cache_prompt=cache)
        two.until(lambda: call.final)  # noqa: B023
        assert call.final is not None
        counted.append(call.final.timings.cache_n)
    assert counted == [0, 0, 59]


# --- what is kept elsewhere -------------------------------------------------------------------------------------------
def test_what_is_worth_keeping(path: Path) -> None:
    """16 tokens or more, once, by what was added to the model when they were computed."""
    with by_hand(path, 1) as hand:
        slot, reuse, session = hand.worker.slots[0], hand.worker._reuse, hand.worker.session
        session.decode(Batch.single(IDS[:60]))
        slot.adopt(np.array(IDS[:60], np.int32))
        for n, added, n_kept in ((45, NOTHING, 0), (44, NOTHING, 1), (0, NOTHING, 1), (0, Added((0.5,)), 2)):
            slot.added = added
            assert reuse.replace(slot, n) == n
            assert len(reuse.store) == n_kept, (n, added)
        text = np.array(IDS[:60], np.int32)
        assert [reuse.store.find(text, Added(x)).n for x in ((), (0.5,), (0.7,))] == [60, 60, 0]


@pytest.mark.parametrize(
    ("own", "other", "stored", "wanted", "where"),
    [
        (0, 50, 40, 50, "copy"), (0, 40, 50, 50, "arrive"), (34, 50, 40, 34, ""), (33, 50, 40, 50, "copy"),
        (34, 20, 50, 34, ""), (33, 20, 50, 50, "arrive"), (0, 0, 0, 0, ""),
    ],
)  # fmt: skip
def test_a_prompt_comes_from_where_most_of_it_is(
    own: int, other: int, stored: int, wanted: int, where: str, two: ByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own slot, another one or RAM; no trouble is taken for 16 tokens or fewer, nor across adapters."""
    slots, reuse, session = two.worker.slots, two.worker._reuse, two.worker.session
    used: list[str] = []

    def hold(slot: Slot, n: int) -> None:
        """The slot computes n tokens of the prompt and then others."""
        tokens = np.array([*IDS[:n], *[1] * (70 - n)], np.int32)
        session.truncate(slot.id, 0)
        session.decode(Batch.single(tokens, 0, slot.id))
        slot.adopt(tokens)

    def note(name: str) -> None:
        real = getattr(session.sequences, name)
        monkeypatch.setattr(session.sequences, name, lambda *args: (used.append(name), real(*args))[1])

    hold(slots[0], stored)
    reuse.replace(slots[0], 0)
    hold(slots[0], own)
    hold(slots[1], other)
    for name in ("copy", "arrive"):
        note(name)
    prompt = np.array(IDS[:60], np.int32)
    assert reuse.fetch(slots[0], prompt, NOTHING).n == wanted and "".join(used) == where
    slots[1].added = slots[0].added = Added((0.5,))
    assert reuse.fetch(slots[0], prompt, Added((0.7,))).n == 0


def test_all_but_the_last_token_of_a_prompt_is_reused(two: ByHand) -> None:
    for first, second, wanted in ((IDS[:60], IDS[:60], 59), (IDS[:60], IDS[:61], 60), (IDS[:60], IDS[:30], 29)):
        for _ in range(2):
            call = two.post(first, 1, id_slot=0)
            two.until(lambda: call.final)  # noqa: B023
        call = two.post(second, 2, id_slot=1)
        two.until(lambda: call.final)  # noqa: B023
        assert call.final is not None and (call.final.timings.cache_n, call.final.timings.prompt_n) == (
            wanted,
            len(second) - wanted,
        )


def test_where_checkpoints_are_made() -> None:
    """Turns, every `interval` tokens of the whole prompt, a few before its end, the end; True: likely to go on from."""
    config = ServerConfig(ctx_checkpoints_interval=32, ctx_checkpoints_tolerance=5)
    assert places(config, 0, 100, (40, 64)) == {32: False, 40: True, 64: True, 95: True, 96: False, 100: True}
    assert places(config, 40, 100, (40, 64)) == {64: True, 95: True, 96: False, 100: True}
    assert list(places(config, 63, 100, ())) == [64, 95, 96, 100] == [*places(config, 32, 100, ())]
    assert list(places(config, 99, 100, ())) == [100] and places(config, 100, 100, (100,)) == {}
    assert places(config, 0, 64, ()) == {32: False, 59: True, 64: False}
    assert list(places(replace(config, ctx_checkpoints_interval=0, ctx_checkpoints_tolerance=0), 0, 9, (4,))) == [4, 9]
    assert keeping(replace(config, ctx_checkpoints=3), 77) == Keeping(3, 77, spread=True)
    assert not keeping(replace(config, ctx_checkpoints_eviction="fifo"), 77).spread


# --- numbers ----------------------------------------------------------------------------------------------------------
def test_counters(two: ByHand) -> None:
    """Tokens that were computed, slots that were busy, the most tokens that a slot ever held."""
    short = two.post(IDS[200:230], 1, id_slot=1)
    two.until(lambda: short.final)
    m = two.worker.metrics(reset=False)
    assert (m.n_tokens_max, m.n_decode_total, m.tokens_predicted_total) == (30, 1, 1)
    two.worker.counters = Counters()
    first = two.post(IDS[:40], 5, id_slot=0)
    two.until(lambda: first.final)
    m = two.worker.metrics(reset=False)
    assert (m.prompt_tokens_total, m.tokens_predicted_total, m.n_tokens_max) == (40, 5, 44)
    assert (m.n_decode_total, m.n_busy_slots_total) == (1 + 4, 1 + 4)
    again = two.post(IDS[:40], 5, id_slot=0)
    two.until(lambda: again.final)
    m = two.worker.metrics(reset=False)
    assert (m.prompt_tokens_total, m.tokens_predicted_total, m.n_tokens_max) == (41, 10, 44)
    both = [two.post(IDS[100:110], 4, id_slot=i) for i in range(2)]
    two.until(lambda: all(call.final for call in both))
    m = two.worker.metrics(reset=True)
    assert (m.n_decode_total, m.n_busy_slots_total) == (10 + 2 + 3, 10 + 2 + 6)
    assert m.n_tokens_max == 44 and m.predicted_tokens_seconds > 0 < m.tokens_predicted_seconds_total
    m = two.worker.metrics(reset=False)
    assert (m.predicted_tokens_seconds, m.prompt_tokens_seconds) == (0, 0) and m.tokens_predicted_total == 18


def test_rates_are_of_all_requests_since_the_last_reset(two: ByHand) -> None:
    c = two.worker.counters
    for n, seconds in ((10, 1.0), (30, 1.0)):
        c.prompt(n, seconds)
        c.predicted(2 * n, seconds)
    m = two.worker.metrics(reset=False)
    assert (m.prompt_tokens_seconds, m.predicted_tokens_seconds) == (20, 40)
    assert two.worker.metrics(reset=False).predicted_tokens_seconds == 40, "reading alone resets nothing"
    assert (m.prompt_seconds_total, m.tokens_predicted_seconds_total) == (2, 2)


def test_progress_is_of_the_prompt_alone(two: ByHand) -> None:
    """And not of a text that is computed again."""
    call = two.post(IDS[:20], 30, id_slot=0, report_progress=True, sampling=WILD)
    two.until(lambda: two.worker.slots[0].n_past > 25)
    n = len(call.events)
    slot = two.worker.slots[0]
    slot.repeat_from(0, slot.text_tokens())
    two.worker.session.truncate(0, 0)
    two.until(lambda: call.final)
    assert (n, len(call.events)) == (2, 3) and call.final


# --- embeddings beside ------------------------------------------------------------------------------------------------
def embedding(hand: ByHand, id: int, *texts: Sequence[int]) -> list[Any]:
    """Posts a request for embeddings; its events."""
    events: list[Any] = []
    hand.worker.post(EmbeddingTask(id, EmbeddingRequest(tuple(map(tuple, texts))), events.append))
    return events


@pytest.mark.parametrize("id_embedding", [0, 2])
def test_the_last_slot_goes_to_whoever_came_first(path: Path, id_embedding: int) -> None:
    with by_hand(path, 1) as hand:
        call = hand.post(IDS[:9], 5)
        call.task.id = 1
        events = embedding(hand, id_embedding, IDS[:9])
        hand.worker._receive()
        hand.worker._launch()
        assert hand.worker.slots[0].state == (EMBEDDING if id_embedding == 0 else PROMPT)
        hand.until(lambda: call.final and events)
        assert len(events) == 1 and not isinstance(events[0], Failure)


def test_embeddings_take_the_slot_that_loses_least_and_keep_what_it_held(two: ByHand) -> None:
    held = [two.post(IDS[i : i + n], 2, id_slot=i) for i, n in ((0, 60), (1, 30))]
    two.until(lambda: all(call.final for call in held))
    assert (m := two.worker.metrics(reset=False)).prompt_cache_entries == 0 and m.prompt_tokens_total == 90
    events = embedding(two, 5, IDS[:9], IDS[:20])
    two.worker._receive()
    two.worker._launch()
    assert [s.state for s in two.worker.slots] == [IDLE, EMBEDDING]
    assert two.worker.metrics(reset=False).requests_processing == 1
    two.until(lambda: events)
    m = two.worker.metrics(reset=False)
    assert (m.prompt_cache_entries, m.prompt_tokens_total, two.worker.slots[1].n_past) == (1, 119, 0)
    assert events[0].timings.prompt_n == 29 and [r.shape[0] for r in events[0].rows] == [1, 1]
    again = two.post(IDS[1:31], 2, id_slot=1)
    two.until(lambda: again.final)
    assert again.final is not None and again.final.timings.cache_n == 29


def test_texts_as_long_as_a_slot_are_embedded(two: ByHand) -> None:
    check = two.worker.check
    assert check(EmbeddingRequest(((5,) * 256,))) is None
    refused = [check(EmbeddingRequest((text,))) for text in ((5,) * 257, (), (5, 96), (-1,))]
    assert [f.type if f else "" for f in refused] == ["exceed_context_size_error"] + ["invalid_request_error"] * 3
    events = embedding(two, 0, [5] * 256)
    two.until(lambda: events)
    assert not isinstance(events[0], Failure)


def test_texts_share_micro_batches_as_far_as_a_slot_has_room(two: ByHand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a micro-batch would take more; others wait, in order."""
    sizes, states = list[list[int]](), embedder.states

    def look(session: Any, seq: int, texts: Any, *rest: Any) -> Any:
        sizes.append([len(text) for text in texts])
        return states(session, seq, texts, *rest)

    monkeypatch.setattr(embedder, "states", look)
    assert two.worker.session.n_ubatch == 512
    events = embedding(two, 0, *(IDS[:n] for n in (100, 156, 1, 200, 57, 10)))
    two.until(lambda: events)
    assert sizes == [[100, 156], [1, 200], [57, 10]]


# --- the end ----------------------------------------------------------------------------------------------------------
def test_the_end_answers_actions_as_well(two: ByHand, tmp_path: Path) -> None:
    call, waiting = two.post(IDS[:5], 50, id_slot=0), [two.post(IDS[:5], 5, id_slot=0) for _ in range(2)]
    two.step()
    future: Any = Future()
    two.worker.post(Action(0, "save", tmp_path / "slot.bin", future))
    two.step()
    two.worker.stop(False)
    two.worker.stop(True)
    two.worker.run()  # ends at once, though asked to drain afterwards
    assert future.cancelled() and not list(tmp_path.iterdir())
    assert [type(c.events[-1]) for c in (call, *waiting)] == [Failure] * 3


def test_draining_includes_embeddings(path: Path) -> None:
    with by_hand(path, 1) as hand:
        call, events = hand.post(IDS[:5], 5), embedding(hand, 7, [1, 2, 3])
        hand.worker.stop(True)
        hand.worker.run()
        assert call.final and len(events) == 1 and not isinstance(events[0], Failure)


def test_a_restored_slot_has_what_is_added_now(two: ByHand, tmp_path: Path) -> None:
    """Whatever its slot was used with before."""
    call = two.post(IDS[:40], 2, id_slot=0)
    two.until(lambda: call.final)
    two.worker.slots[1].added = Added((0.5,))
    for id_slot, action in ((0, "save"), (1, "restore")):
        future: Any = Future()
        two.worker.post(Action(id_slot, action, tmp_path / "slot.bin", future))
        two.worker._receive()
        assert future.result(0).n_tokens == 41
    assert two.worker.slots[1].added == NOTHING
    again = two.post(IDS[:40], 2, id_slot=1, sampling=GREEDY)
    two.until(lambda: again.final)
    assert again.final is not None and again.final.timings.cache_n == 39
