"""The engine without HTTP: continuous batching, limits, stop texts, cancelling, failures, shutdown."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from engine_client import ENDLESS, GREEDY, Call, Pause, ask, request, serving, stop, until
from factories import tiny_deepseek2, tiny_model
from gguf_files import write_model

from ikcli.engine.run.session import Session
from ikcli.sampling.params import SamplerParams
from ikcli.sampling.vocab import SamplerVocab
from ikcli.server.slots.engine import Engine
from ikcli.server.slots.generation import Generation, Setting
from ikcli.server.slots.messages import Bans, Delta, Event, Failure, Final, PromptProgress, TokenInfo
from ikcli.server.slots.output import Output
from ikcli.server.slots.patterns import Pattern
from ikcli.server.slots.states import EngineError
from ikcli.settings.run import RunConfig

PROMPTS = ("import os\n", "The class ", "def main(argv):\n    ", "Return the value of ")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with serving(4, n_ctx=2048) as e:
        yield e


# --- parallel equals sequential ---------------------------------------------------------------------------------------
def same_in_parallel(prompts: list[list[int]], n_predict: int, **changes: object) -> None:
    n = len(prompts)
    with serving(n, **changes) as e:
        alone = [ask(e, p, n_predict, id_slot=i, cache_prompt=False) for i, p in enumerate(prompts)]
        calls = [Call(e, request(p, n_predict, id_slot=i, cache_prompt=False)) for i, p in enumerate(prompts)]
        together = [c.final for c in calls]
    assert [[t.id for t in f.tokens] for f in together] == [[t.id for t in f.tokens] for f in alone]
    assert [[t.logprob for t in f.tokens] for f in together] == [[t.logprob for t in f.tokens] for f in alone]


@pytest.mark.parametrize(("mla", "flash_attn"), [(m, fa) for m in range(4) for fa in (True, False)])
def test_four_slots_answer_as_one(engine: Engine, mla: int, flash_attn: bool) -> None:
    prompts = [engine.tokenizer.encode(text * (1 + 9 * i)) for i, text in enumerate(PROMPTS)]
    same_in_parallel(prompts, 24, mla=mla, flash_attn=flash_attn, n_ubatch=64, n_ctx=1024)


MODELS: dict[str, Callable[[], object]] = {
    "llama": lambda: tiny_model("llama"),
    "qwen3moe": lambda: tiny_model("qwen3moe", expert_feed_forward_length=48, expert_count=8, expert_used_count=3),
    "deepseek2": lambda: tiny_deepseek2(),
}


@pytest.mark.parametrize("name", MODELS)
def test_eight_slots_answer_as_one_with_random_weights(name: str, tmp_path: Path) -> None:
    """Random weights: near ties are common, so results have to be equal to the last bit."""
    path = tmp_path / "model.gguf"
    model = MODELS[name]()
    write_model(model, path, model.metadata | {"tokenizer.ggml.model": "none"})  # type: ignore[attr-defined, arg-type]
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, 96, n).tolist() for n in (1, 3, 40, 17, 64, 65, 2, 9)]
    same_in_parallel(prompts, 30, model=path, n_ctx=1024, n_ubatch=32)


def test_golden_models_answer_the_same_in_parallel(shared_dir: Path) -> None:
    for name in ("tiny-deepseek2.f16", "tiny-llama.f16"):
        rng = np.random.default_rng(4)
        prompts = [rng.integers(3, 250, n).tolist() for n in (150, 3, 40, 17)]
        same_in_parallel(prompts, 24, model=shared_dir / "golden" / "models" / f"{name}.gguf", n_ctx=1024)


# --- text, limits, stops ----------------------------------------------------------------------------------------------
def test_events_add_up(engine: Engine) -> None:
    call = Call(engine, request(engine.tokenizer.encode("import "), 30))
    final = call.final
    assert call.streamed == final.text != ""
    tokens = [t for e in call.events if isinstance(e, Delta) for t in e.tokens] + list(final.tail.tokens)
    assert tuple(tokens) == final.tokens and len(tokens) == 30 == final.timings.predicted_n
    assert final.stop_type == "limit" and not final.truncated
    assert engine.tokenizer.decode([t.id for t in tokens]) == final.text
    assert final.timings.predicted_ms > 0 < final.timings.prompt_ms


def test_no_deltas_if_not_wanted(engine: Engine) -> None:
    call = Call(engine, request(engine.tokenizer.encode("import "), 5, deltas=False))
    assert call.final.text == call.final.tail.text and len(call.events) == 1


def test_nothing_is_generated_with_n_predict_0(engine: Engine) -> None:
    final = ask(engine, "import os, sys", 0)
    assert final.text == "" and final.tokens == () and final.timings.predicted_n == 0 and final.stop_type == "limit"
    assert final.timings.n_past == len(engine.tokenizer.encode("import os, sys"))


def test_an_empty_prompt_gives_an_empty_answer(engine: Engine) -> None:
    assert ask(engine, (), 5).text == ""
    until(lambda: not any(s.is_processing for s in engine.slots()))


def test_stop_texts_end_and_are_cut(engine: Engine) -> None:
    whole = ask(engine, PROMPTS[1], 30).text
    word = whole[10:14]
    call = Call(engine, request(engine.tokenizer.encode(PROMPTS[1]), 30, stop=("never seen", word)))
    final = call.final
    assert final.text == whole[: whole.index(word)] == call.streamed
    assert (final.stop_type, final.stopping_word) == ("word", word)
    assert engine.tokenizer.decode([t.id for t in final.tokens]).startswith(final.text[:5])


def test_a_stop_text_that_never_comes_loses_nothing(engine: Engine) -> None:
    whole = ask(engine, PROMPTS[1], 30).text
    call = Call(
        engine, request(engine.tokenizer.encode(PROMPTS[1]), 30, stop=(whole[5:12] + "\x00", whole[-3:] + "\x00"))
    )
    assert call.streamed == call.final.text == whole


def test_characters_are_never_torn(engine: Engine) -> None:
    """A bias towards byte tokens of a three-byte character."""
    ids = engine.tokenizer.encode("\u20ac", add_special=False)
    for n in range(1, len(ids) + 2):
        bias = SamplerParams(temperature=0, logit_bias=tuple((i, 1000.0 + k) for k, i in enumerate(ids[-1:])))
        final = ask(engine, "price: ", n, sampling=bias)
        assert final.text.encode("utf-8")
        assert all(c < "\ud800" or c > "\udfff" for c in final.text)


def test_eos_ends_and_is_not_text(engine: Engine) -> None:
    eos = engine.tokenizer.eos_id
    assert eos is not None
    final = ask(engine, "import ", 10, sampling=SamplerParams(temperature=0, logit_bias=((eos, 1e5),)))
    assert final.stop_type == "eos" and final.text == "" and [t.id for t in final.tokens] == [eos]


def test_lines_with_too_little_indentation_end_the_text(engine: Engine) -> None:
    """Two lines are forced, the second with one blank."""
    text = "a = 1\n b = 2\nc = 3"
    ids = engine.tokenizer.encode(text, add_special=False)
    assert forced(engine, ids, 2).text == "a = 1\n"
    one = forced(engine, ids, 1)
    assert (one.text.rstrip(), one.stop_type, one.has_new_line) == ("a = 1\n b = 2", "limit", True)
    assert forced(engine, ids, 0).text.startswith(text)


def forced(engine: Engine, ids: list[int], n_indent: int) -> Final:
    """A generation that must begin with these tokens."""

    class Forced:
        finished = False

        def __init__(self) -> None:
            self.left = list(ids)

        def mask(self) -> np.ndarray | None:
            bits = np.zeros(32 * -(-engine.model.n_vocab // 32), np.uint8)
            bits[self.left[0] if self.left else engine.tokenizer.eos_id] = 1
            return np.packbits(bits, bitorder="little").view(np.uint32)

        def accept(self, token: int) -> None:
            del self.left[:1]

    return ask(engine, "def f(x):", len(ids) + 1, constraint=Forced, n_indent=n_indent)


def test_t_max_predict_ms_acts_at_line_ends(engine: Engine) -> None:
    newline = engine.tokenizer.encode("\n", add_special=False)[0]
    bias = SamplerParams(temperature=0, logit_bias=((newline, 1e5),))
    final = ask(engine, "import ", 1500, sampling=bias, t_max_predict_ms=1)
    assert final.stop_type == "limit" and final.timings.predicted_n < 1500 and final.has_new_line


def test_the_log_of_a_request_ends_with_its_rates(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    lines: list[tuple[str, dict[str, object]]] = []
    monkeypatch.setattr(
        engine._worker, "_log", lambda level, function, message, fields: lines.append((message, fields))
    )
    final = ask(engine, "def f(x):", 5, cache_prompt=False)
    until(lambda: bool(lines) and "idle" in lines[-1][0])
    of_request = [line for line in lines if line[1].get("id_task") is not None]
    (prompt, a), (generation, b) = of_request[-2:]
    assert prompt.startswith("prompt eval time     = ") and generation.startswith("generation eval time = ")
    assert (a["n_prompt_tokens_processed"], b["n_decoded"]) == (final.timings.prompt_n, 5)
    assert a["n_tokens_second"] == pytest.approx(1e3 * final.timings.prompt_n / final.timings.prompt_ms, rel=1e-2)
    assert float(str(b["n_tokens_second"])) > 0


def test_a_time_limit_does_not_lift_that_of_endless_answers(engine: Engine) -> None:
    """Without `n_predict` an answer ends where prompt and answer have the length that the model was trained on."""
    n_total = 40
    setting = Setting(64, n_total, True, engine.tokenizer, SamplerVocab.from_tokenizer(engine.tokenizer))
    newline = engine.tokenizer.encode("\n", add_special=False)[0]
    generation = Generation(request(engine.tokenizer.encode("a"), -1, t_max_predict_ms=10**9), setting, 0)
    generation.prompt_done()
    while generation.push(TokenInfo(newline, 0.0)):
        assert len(generation.history) < n_total
    assert (len(generation.history), generation.stop_type, generation.truncated) == (n_total, "limit", True)


def test_banned_texts_are_taken_back(engine: Engine) -> None:
    whole = ask(engine, PROMPTS[1], 40)
    bad = whole.text[8:14]
    prompt = engine.tokenizer.encode(PROMPTS[1])
    for bans in (
        Bans((bad.upper(),), counts=False),
        Bans(patterns=(Pattern(re.escape(bad)),), counts=False),
        Bans(patterns=(Pattern(re.escape(bad.upper()), ignore_case=True),), counts=False, buffer=30),
    ):
        call = Call(engine, request(prompt, 40, bans=bans))
        final = call.final
        assert bad.lower() not in final.text.lower() and call.streamed == final.text
        assert final.text[:8] == whole.text[:8] and final.timings.predicted_n == 40 == len(final.tokens)
    counted = ask(engine, prompt, 40, bans=Bans((bad,)))
    assert counted.timings.predicted_n == 40 > len(counted.tokens)
    assert final.text.startswith(counted.text)  # however it is banned


def test_a_weak_ban_gives_up(engine: Engine) -> None:
    whole = ask(engine, PROMPTS[1], 40)
    bad, prompt = whole.text[8:14], engine.tokenizer.encode(PROMPTS[1])
    for bans in Bans((bad,), n_tokens=0), Bans((bad,), bias=-1e-9), Bans((bad,), n_tokens=0, max_rewinds=1):
        call = Call(engine, request(prompt, 80, bans=replace(bans, counts=False)))
        assert call.final.text.startswith(whole.text) and call.streamed == call.final.text
    counts = [ask(engine, prompt, 80, bans=Bans((bad,), n_tokens=0, max_rewinds=n)).timings for n in (1, 3, 9)]
    n = [c.predicted_n for c in counts]  # every attempt takes the tokens of the text again
    assert n[1] - n[0] > 0 and n[2] - n[1] == 3 * (n[1] - n[0])


def banning(engine: Engine, text: str, n_predict: int = 40, **fields: object) -> tuple[Generation, list[int]]:
    """A generation that was given the tokens of a text, and these tokens."""
    worker = engine._worker
    assert worker is not None
    g = Generation(request([5, 6], n_predict, **fields), worker._setting, 0)  # type: ignore[arg-type]
    ids = engine.tokenizer.encode(text, add_special=False)
    for i in ids:
        g.push(TokenInfo(i, 0.0))
    return g, ids


def test_all_tokens_that_led_to_banned_texts_stay_banned(engine: Engine) -> None:
    """At the place where they began; those of later places are forgotten, as other text leads there."""
    g, ids = banning(engine, "x = bad", bans=Bans(("bad", "wrong")))
    one, other = (engine.tokenizer.encode(text, add_special=False) for text in ("x = bad", "x = wrong"))
    at = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    assert g.rewind_banned() == len(ids) - at and g.history == [5, 6, *ids[:at]]
    for i in other[at:]:
        g.push(TokenInfo(i, 0.0))
    assert g.rewind_banned() == len(other) - at and len(g.output.tokens) == at
    assert g._bans == {at: {one[at], other[at]}}
    logits = np.zeros(engine.model.n_vocab, np.float32)
    logits[one[at]], logits[other[at]], logits[7] = 9, 8, 1
    assert g.choose(logits).id == 7
    g._bans[at + 3] = {1}
    for i in one[at:]:
        g.push(TokenInfo(i, 0.0))
    assert g.rewind_banned() and g._bans == {at: {one[at], other[at]}}


def test_how_often_in_a_row_a_text_is_taken_back(engine: Engine) -> None:
    g, ids = banning(engine, "x = bad", bans=Bans(("bad",), max_rewinds=2))
    removed = []
    for _ in range(3):
        removed.append(g.rewind_banned())
        for i in ids[len(g.output.tokens) :]:
            g.push(TokenInfo(i, 0.0))
    assert removed[0] == removed[1] > 0 == removed[2]
    assert g.rewind_banned() == 0, "it was given up"
    for i in engine.tokenizer.encode(" and bad", add_special=False):
        g.push(TokenInfo(i, 0.0))
    assert g.rewind_banned() > 0, "what comes later has its own count"


def test_a_banned_text_at_the_end_is_taken_back_too(engine: Engine) -> None:
    """With the limit that it reached, and with what a constraint saw of it."""
    seen: list[list[int]] = []

    class Recorder:
        finished = False

        def __init__(self) -> None:
            seen.append([])

        def mask(self) -> None:
            return None

        def accept(self, token: int) -> None:
            seen[-1].append(token)

    n = len(engine.tokenizer.encode("x = bad", add_special=False))
    g, ids = banning(engine, "x = bad", n, bans=Bans(("bad",), n_tokens=-1, counts=False), constraint=Recorder)
    assert g.stop_type == "limit"
    removed = g.rewind_banned()
    assert removed > 0 and g.stop_type == "none" and g.n_remain == removed
    assert seen == [ids, ids[: n - removed]]
    assert g._bans == {n - removed: set(ids[n - removed :])}


def test_a_later_banned_text_is_found_after_giving_up(engine: Engine) -> None:
    output = Output(engine.tokenizer, (), Bans(("bad",), patterns=(Pattern("w.rse"),)))
    ids = engine.tokenizer.encode("a bad word", add_special=False)
    for i in ids:
        output.add(TokenInfo(i, 0.0))
    assert output.find_banned() is not None
    output.allow_banned()
    assert output.find_banned() is None
    for i in engine.tokenizer.encode(" and a worse bad one", add_special=False):
        output.add(TokenInfo(i, 0.0))
    n = output.find_banned()
    assert n is not None and n > len(ids)
    output.rewind(n)
    assert output.text.endswith("and a ") or output.text.endswith("and a")


def test_prompt_logprobs_are_those_of_the_model(engine: Engine) -> None:
    prompt = engine.tokenizer.encode(PROMPTS[2] * 12)
    assert len(prompt) > 70
    final = ask(engine, prompt, 1, prompt_logprobs=True)
    with Session.open(RunConfig(command="serve", n_ctx=512, n_threads=2, n_threads_batch=2, warmup=False)) as session:
        from ikcli.engine.run.batch import Batch

        rows = session.decode(Batch.single(prompt, logits="all")).astype(np.float64)
    wanted = [r[t] - np.log(np.exp(r - r.max()).sum()) - r.max() for r, t in zip(rows, prompt[1:], strict=False)]
    assert [t.id for t in final.prompt_logprobs] == prompt[1:]
    assert np.allclose([t.logprob for t in final.prompt_logprobs], wanted, atol=2e-2)
    assert ask(engine, prompt, 1).prompt_logprobs == ()


def test_candidates_come_with_the_tokens(engine: Engine) -> None:
    final = ask(engine, "import ", 3, sampling=replace(GREEDY, n_probs=4))
    assert all(
        len(t.top) == 4 and t.top[0].id == t.id and math.isclose(t.top[0].logprob, t.logprob) for t in final.tokens
    )


def test_constraints_decide(engine: Engine) -> None:
    ids = engine.tokenizer.encode("yes", add_special=False)
    eos = engine.tokenizer.eos_id

    class Only:
        """Allows "yes", then the end."""

        def __init__(self) -> None:
            self.at = 0

        def mask(self) -> np.ndarray:
            bits = np.zeros(32 * -(-engine.model.n_vocab // 32), np.uint8)
            bits[ids[self.at] if self.at < len(ids) else eos] = 1
            return np.packbits(bits, bitorder="little").view(np.uint32)

        def accept(self, token: int) -> None:
            self.at += 1

        @property
        def finished(self) -> bool:
            return self.at >= len(ids)

    final = ask(engine, "import ", 30, constraint=Only)
    assert final.text == "yes" and final.stop_type == "eos"


# --- requests do not disturb each other -------------------------------------------------------------------------------
def test_a_request_leaves_nothing_behind(engine: Engine) -> None:
    before = ask(engine, PROMPTS[0], 20, cache_prompt=False, id_slot=1)
    odd = SamplerParams(temperature=1.5, seed=1, logit_bias=((300, 1e5),), ignore_eos=True, repeat_penalty=1.9, top_k=3)
    ask(engine, PROMPTS[0], 20, sampling=odd, stop=("a", "e", "i"), id_slot=1, n_indent=3, bans=Bans(("x",)))
    after = ask(engine, PROMPTS[0], 20, cache_prompt=False, id_slot=1)
    assert (after.text, after.stop_type) == (before.text, before.stop_type)


def test_seeds_repeat(engine: Engine) -> None:
    hot = SamplerParams(temperature=1.2, seed=42)
    first, second = (ask(engine, PROMPTS[0], 20, sampling=hot, cache_prompt=False).text for _ in range(2))
    other = ask(engine, PROMPTS[0], 20, sampling=replace(hot, seed=43), cache_prompt=False).text
    assert first == second != other


def test_what_is_wrong_with_a_request_is_said(engine: Engine) -> None:
    for bad, status, words in (
        (request([1, 2], id_slot=4), 400, "id_slot 4"),
        (request([1, 2], id_slot=-2), 400, "id_slot -2"),
        (request([1, 5000000]), 400, "vocabulary"),
        (request([1, engine.model.n_vocab]), 400, "vocabulary"),
        (request([1, -1]), 400, "vocabulary"),
    ):
        failure = Call(engine, bad).failure
        assert failure.status == status and words in failure.message
    long = Call(engine, request([5] * 512)).failure
    assert (long.status, long.type) == (400, "exceed_context_size_error")
    assert long.details == {"n_prompt_tokens": 512, "n_ctx": 512}


def test_nothing_left_to_choose_is_the_clients_fault(engine: Engine) -> None:
    bias = tuple((i, -math.inf) for i in range(engine.model.n_vocab))
    call = Call(engine, request([5, 6], sampling=SamplerParams(logit_bias=bias)))
    assert call.failure.status == 400
    assert ask(engine, "import ", 3).timings.predicted_n == 3


def test_non_finite_logits_fail_one_request_only(engine: Engine) -> None:
    """A slot whose cache is spoilt fails, the one beside it goes on, and later requests are right."""
    worker = engine._worker
    assert worker is not None
    good_prompt, bad_prompt = (engine.tokenizer.encode(p) for p in PROMPTS[:2])
    wanted = ask(engine, good_prompt, 300, id_slot=0, cache_prompt=False).text
    pause = Pause()
    bad = Call(engine, request(bad_prompt, 400, id_slot=1, cache_prompt=False), pause)
    good = Call(engine, request(good_prompt, 300, id_slot=0, cache_prompt=False))
    pause.wait()
    session = worker.session
    for rows in session.runner.cpu.caches.values():  # f16 NaN in the first cells of slot 1
        rows.reshape(session.n_ctx, -1)[session.n_ctx_seq + 1] = 0xFF
    pause.end()
    failure = bad.failure
    assert failure.status == 500 and "not finite" in failure.message
    assert good.final.text == wanted
    assert ask(engine, bad_prompt, 10, id_slot=1).timings.cache_n == 0
    assert ask(engine, good_prompt, 300, id_slot=1, cache_prompt=False).text == wanted


def test_an_unexpected_error_does_not_stop_the_engine(engine: Engine) -> None:
    def explode() -> object:
        raise ValueError("boom")

    call = Call(engine, request([5, 6], constraint=explode))
    assert call.failure.status == 500 and "boom" in call.failure.message

    def listener(event: Event) -> None:
        raise RuntimeError("gone")

    Call(engine, request([5, 6], 500), listener)
    until(lambda: not any(s.is_processing for s in engine.slots()))
    assert ask(engine, "import ", 3).timings.predicted_n == 3


# --- cancelling and queueing ------------------------------------------------------------------------------------------
def test_cancelling_frees_the_slot(engine: Engine) -> None:
    wanted = ask(engine, PROMPTS[0], 20, cache_prompt=False).text
    sampling = SamplerParams(temperature=0, ignore_eos=True)
    calls = [Call(engine, request(engine.tokenizer.encode(p), ENDLESS, sampling=sampling)) for p in PROMPTS]
    for c in calls:
        c.wait_for(bool)
        c.ticket.cancel()
        c.ticket.cancel()
    until(lambda: not any(s.is_processing for s in engine.slots()))
    assert not any(isinstance(c.events[-1], Final | Failure) for c in calls)
    assert ask(engine, PROMPTS[0], 20).text == wanted


def test_cancelled_in_the_queue(engine: Engine) -> None:
    pause = Pause()
    busy = [Call(engine, request(engine.tokenizer.encode(p), 200, id_slot=i), pause) for i, p in enumerate(PROMPTS)]
    waiting = Call(engine, request([5, 6, 7], 5))
    waiting.ticket.cancel()
    last = Call(engine, request([5, 6, 7], 5))
    pause.end()
    assert all(c.final.timings.predicted_n for c in busy) and last.final.timings.predicted_n
    assert waiting.events == []


def test_the_queue_is_first_in_first_out() -> None:
    order: list[int] = []
    with serving(1) as e:
        calls = [
            Call(e, request([5, 6, 7 + i], 4), lambda ev, i=i: order.append(i) if isinstance(ev, Final) else None)  # type: ignore[misc]
            for i in range(6)
        ]
        assert all(c.final for c in calls)
    assert order == list(range(6))


def test_waiting_for_a_slot_lets_others_pass(engine: Engine) -> None:
    pause = Pause()
    first = Call(engine, request(engine.tokenizer.encode(PROMPTS[0]), 300, id_slot=2), pause)
    second = Call(engine, request([5, 6, 7], 3, id_slot=2))
    third = Call(engine, request([5, 6, 8], 3))
    pause.end()
    assert third.final.id_slot != 2
    assert second.final.id_slot == 2 and isinstance(first.end, Final)


def test_a_long_prompt_does_not_stall_others() -> None:
    """Between two tokens of the running slot at most one ubatch of the long prompt is computed."""
    with serving(2, n_ctx=2048, n_ubatch=32) as e:
        pause = Pause()
        running = Call(e, request(e.tokenizer.encode("import "), 60), pause)
        pause.wait()
        done: list[tuple[int, int]] = []

        def note(event: Event) -> None:
            if isinstance(event, PromptProgress):
                done.append((event.processed, len(running.events)))

        long = Call(e, request([5 + i % 90 for i in range(640)], 2, report_progress=True), note)
        pause.end()
        assert long.final and running.final
    steps = [(p1 - p0, n1 - n0) for (p0, n0), (p1, n1) in itertools.pairwise(done[1:]) if n1 < 60]
    assert len(done) == 21 and done[0][0] == 0 and steps and all(n_prompt == 32 for n_prompt, _ in steps)
    assert all(n_tokens >= 1 for _, n_tokens in steps[:-1])


def test_several_prompts_take_turns() -> None:
    with serving(2, n_ctx=2048, n_ubatch=32) as e:
        log: list[int] = []
        pause = Pause()

        def note(i: int, event: Event) -> None:
            if isinstance(event, PromptProgress):
                log.append(i)
            pause(event)

        calls = [Call(e, request([5 + i] * 320, 1, report_progress=True), partial(note, i)) for i in range(2)]
        pause.end()
        assert all(c.final for c in calls)
    tail = log[4:-2]
    assert len(log) == 22 and all(abs(tail[:n].count(0) - tail[:n].count(1)) <= 2 for n in range(len(tail)))


# --- life -------------------------------------------------------------------------------------------------------------
def test_draining_finishes_what_was_accepted() -> None:
    with serving(1) as e:
        calls = [Call(e, request([5, 6, 7 + i], 30)) for i in range(3)]
        stop(e, drain=True)
        assert all(isinstance(c.events[-1], Final) for c in calls)
        assert Call(e, request([5, 6])).failure.status == 503 and e.state == "stopped"


def test_stopping_at_once_answers_everybody() -> None:
    with serving(1) as e:
        worker = e._worker
        assert worker is not None
        calls = [
            Call(e, request([5, 6, 7 + i], 900), lambda event: until(lambda: bool(worker._stopping))) for i in range(3)
        ]
        calls[0].wait_for(bool)
        stop(e)
        assert [c.failure.status for c in calls] == [503] * 3


def test_not_ready_and_not_loadable(tmp_path: Path) -> None:
    e = Engine(RunConfig(command="serve", model=tmp_path / "none.gguf"), n_slots=1)
    assert Call(e, request([5])).failure.status == 503
    with pytest.raises(EngineError) as info:
        _ = e.model
    assert info.value.status == 503 and e.slots() == []
    e.start()
    assert not e.wait_loaded(30) and e.state == "failed" and "none.gguf" in str(e.load_error)
    assert Call(e, request([5])).failure.status == 500
    stop(e, drain=True)


def test_states_and_metrics(engine: Engine) -> None:
    before = engine.metrics()
    final = ask(engine, PROMPTS[3], 12, id_slot=3)
    until(lambda: not any(s.is_processing for s in engine.slots()))
    state = engine.slots()[3]
    assert (state.id, state.text, state.n_decoded, state.n_remain) == (3, final.text, 12, 0)
    assert state.n_ctx == 512 == engine.model.n_ctx_slot and state.request is not None
    after = engine.metrics(reset=True)
    assert after.tokens_predicted_total - before.tokens_predicted_total == 12
    assert after.requests_processing == 0 == after.requests_deferred and after.slots_idle == 4
    assert after.predicted_tokens_seconds > 0 == engine.metrics().predicted_tokens_seconds
    assert 0 < after.kv_cache_usage_ratio <= 1 and after.n_busy_slots_per_decode >= 1
