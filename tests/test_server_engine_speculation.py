"""Speculation never changes the text; drafters guess what they should; n-gram files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_client import GREEDY, Call, by_hand, request, serving
from factories import tiny_model
from gguf_files import write_model

from ikcli.drafting.drafters import TextDrafter
from ikcli.drafting.ngram_cache import NgramCache, merge, read_counts, write_counts
from ikcli.drafting.ngrams import NgramMap, NgramMapValues, NgramPool, Pool, Suffix
from ikcli.drafting.policy import COMPARES, DECISIONS, Decision, Policy
from ikcli.engine.run.batch import Batch
from ikcli.errors import FormatError
from ikcli.sampling.params import SamplerParams
from ikcli.server.slots import steps
from ikcli.server.slots.engine import Engine
from ikcli.server.slots.messages import Bans, Final, Speculation
from ikcli.server.slots.slot import GENERATION
from ikcli.settings.records import SpecStage
from ikcli.settings.run import DATA_DIR
from ikcli.settings.sampling import SamplingConfig
from ikcli.settings.values import parse_spec_type

TEXT = "import os\nimport sys\nimport os\nimport sys\nimport os\nimport"
FIXED = {"spec_autotune": False}  # drafts do not depend on times
SAMPLING = (GREEDY, SamplerParams(temperature=0.8, seed=11), replace(GREEDY, repeat_penalty=1.3))
TYPES = (
    "ngram-simple:ngram_size_n=2",
    "ngram-map-k:ngram_size_n=2,ngram_min_hits=2",
    "ngram-map-k4v:ngram_size_n=2,ngram_size_m=3",
    "ngram-mod:ngram_size_n=3",
    "ngram-cache",
    "suffix:suffix_min_match_len=2",
    "draft:p_min=0.1",
)


def answers(e: Engine) -> list[Final]:
    """Two slots at once, with every kind of sampling."""
    out = []
    for sampling in SAMPLING:
        prompts = (e.tokenizer.encode(TEXT), e.tokenizer.encode("x = 1\ny = 1\nz = 1\n"))
        calls = [
            Call(e, request(p, 48, sampling=sampling, cache_prompt=False, id_slot=i)) for i, p in enumerate(prompts)
        ]
        out += [c.final for c in calls]
        assert all(c.streamed == c.final.text for c in calls)
    return out


@pytest.fixture(scope="module")
def plain() -> list[Final]:
    with serving(2, n_ctx=512) as e:
        return answers(e)


@pytest.mark.parametrize("spec", TYPES)
def test_the_text_is_the_same(spec: str, plain: list[Final]) -> None:
    draft = DATA_DIR / "demo.gguf" if spec.startswith("draft") else None
    with serving(2, n_ctx=512, server=FIXED | {"spec_type": parse_spec_type(spec), "model_draft": draft}) as e:
        found = answers(e)
        metrics = e.metrics()
    assert [(f.text, f.stop_type, f.tokens) for f in found] == [(f.text, f.stop_type, f.tokens) for f in plain]
    drafted, accepted = (sum(getattr(f.timings, n) for f in found) for n in ("draft_n", "draft_n_accepted"))
    assert 0 < accepted <= drafted
    assert (metrics.draft_tokens_total, metrics.draft_tokens_accepted_total) == (drafted, accepted)
    by_position = metrics.accepted_by_position
    assert sum(by_position.values()) == accepted and sorted(by_position) == list(range(len(by_position)))
    assert by_position[0] <= metrics.drafts_total <= drafted


def test_every_step_has_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without being asked, lengths are chosen; metrics and the log of a request tell how."""
    log: list[dict[str, Any]] = []
    monkeypatch.setattr(steps, "log_timings", lambda log_, ids, timings, **more: log.append(more))
    with serving(1, n_ctx=512, server={"spec_type": parse_spec_type(TYPES[0])}) as e:
        finals = [Call(e, request(e.tokenizer.encode(TEXT), n, cache_prompt=False)).final for n in (40, 90)]
        metrics = e.metrics()
    assert [t["n_drafted"] for t in log] == [f.timings.draft_n for f in finals]
    for total, n in zip(log, (40, 90), strict=True):
        n_steps = n - 1 - total["n_accepted"]  # the first token comes from the prompt
        assert sum(total["decisions"].values()) == n_steps
        assert total["n_per_step"] == round(n / (n_steps + 1), 3)
    assert sum(metrics.draft_decisions.values()) == sum(sum(t["decisions"].values()) for t in log)
    assert set(metrics.draft_decisions) <= set(DECISIONS)


def test_drafts_that_are_not_used_are_compared_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """No draft is checked here; what of each would have been right, in full, the text itself shows."""
    judged: list[tuple[int, int]] = []
    monkeypatch.setattr(Policy, "decide", lambda self, options, n: Decision((0,) * len(options), COMPARES))
    monkeypatch.setattr(Policy, "looked", lambda *_: 0)
    monkeypatch.setattr(Policy, "judged", lambda self, text, kind, asked, found, right: judged.append((asked, right)))
    with serving(1, n_ctx=512, server={"spec_type": parse_spec_type(TYPES[0]), "spec_autotune": True}) as e:
        f = Call(e, request(e.tokenizer.encode(TEXT), 60, cache_prompt=False)).final
        assert f.timings.draft_n == 0 and judged
        assert all(0 <= right <= asked for asked, right in judged)
        # every one begins after the one before ended, or showed an error
        assert sum(min(right + 1, asked) for asked, right in judged) <= 60
        assert max(right for _, right in judged) >= 4, "the text repeats itself"


@pytest.mark.slow("an engine for each kind of draft")
@pytest.mark.parametrize("spec", TYPES)
def test_the_text_is_the_same_with_chosen_lengths(spec: str, plain: list[Final]) -> None:
    draft = DATA_DIR / "demo.gguf" if spec.startswith("draft") else None
    server = {"spec_type": parse_spec_type(spec), "model_draft": draft, "spec_autotune": True, "spec_explain": True}
    with serving(2, n_ctx=512, server=server) as e:
        found = answers(e)
    assert [(f.text, f.stop_type, f.tokens) for f in found] == [(f.text, f.stop_type, f.tokens) for f in plain]


def test_the_same_model_as_draft_is_always_right() -> None:
    stage = parse_spec_type("draft:p_min=0")
    with serving(1, n_ctx=512, server=FIXED | {"spec_type": stage, "model_draft": DATA_DIR / "demo.gguf"}) as e:
        t = Call(e, request(e.tokenizer.encode(TEXT), 40)).final.timings
        assert t.draft_n == t.draft_n_accepted >= 30
        off = Call(e, request(e.tokenizer.encode(TEXT), 40, speculation=Speculation(n_max=0))).final.timings
        assert off.draft_n == 0


def test_shift_stop_and_ban_with_drafts(plain: list[Final]) -> None:
    server = FIXED | {"spec_type": parse_spec_type("suffix:suffix_min_match_len=1")}
    fields = {"stop": ("sys",), "bans": Bans(("path",))}
    results = []
    for settings in ({}, server):
        with serving(1, n_ctx=256, server=settings) as e:
            prompt = e.tokenizer.encode(TEXT)
            shifted = Call(e, request(prompt, 300, n_keep=4)).final
            other = Call(e, request(prompt, 60, **fields)).final
            results.append((shifted.text, shifted.truncated, other.text, other.stop_type))
    assert results[0] == results[1]


def tiny_file(folder: Path) -> Path:
    model = tiny_model("llama", context_length=2048)
    return write_model(model, folder / "m.gguf", model.metadata | {"tokenizer.ggml.model": "none"})


def test_drafts_fit_the_batch_the_answer_and_the_slot(tmp_path: Path) -> None:
    """Together at most as many rows as are exact; none beyond the context, and none that the limit cuts off."""
    path = tiny_file(tmp_path)
    spec = parse_spec_type("ngram-simple:ngram_size_n=1")
    server = FIXED | {"spec_type": spec, "draft_max": 100, "context_shift": False}
    with by_hand(path, 3, n_ctx=768, server=server) as hand:
        session, slots = hand.worker.session, hand.worker.slots
        sevens = type("Sevens", (), {"draft": lambda self, text, n_max: [7] * 99})()
        hand.worker._speculator._drafters = [TextDrafter(lambda: sevens)]
        step, sizes, shares = session.step, list[int](), list[list[int]]()

        wrong: list[object] = []  # what is raised in a step ends a request, not the test

        def look(batch: Batch) -> object:
            sizes.append(len(batch))
            drafts = {s.id: len(s.draft) for s in slots if s.state == GENERATION and s.draft}
            left = {i: g.n_remain for i in drafts if (g := slots[i].generation) and g.n_remain >= 0}
            good = len(batch) <= session.n_exact and batch.pos.max() < 256 and sum(drafts.values()) < len(batch)
            if not good or any(drafts[i] >= n for i, n in left.items()):
                wrong.append((len(batch), batch.pos.tolist(), drafts, left))
            shares.append(sorted(drafts.values()))
            return step(batch)

        session.step = look  # type: ignore[method-assign, assignment]
        again = SamplerParams(temperature=0, logit_bias=((7, 1e4),))  # the same token for ever
        calls = [
            hand.post([7] * n, most, id_slot=i, sampling=again)
            for i, (n, most) in enumerate(((9, 20), (254, -1), (5, 33)))
        ]
        hand.until(lambda: all(call.final for call in calls))
        assert not wrong
        found = [call.final.timings for call in calls if call.final]
        assert [t.predicted_n for t in found] == [20, 2, 33] and [t.n_past for t in found] == [28, 255, 37]
        assert [t.draft_n - t.draft_n_accepted for t in found] == [0, 1, 0], "the full slot ends at one that is right"
        assert max(sizes) == session.n_exact
        assert max(n[-1] - n[0] for n in shares if len(n) == 3) <= 1 < max(map(max, shares)), "all get their share"
        m = hand.worker.metrics(reset=False)
        assert (m.draft_tokens_total, m.n_tokens_max) == (sum(t.draft_n for t in found), 256)


def test_a_draft_model_keeps_within_its_own_context(tmp_path: Path) -> None:
    """Near its end there are no drafts, and the answer goes on to the end of the slot."""
    path = tiny_file(tmp_path)
    server = FIXED | {"spec_type": parse_spec_type("draft:p_min=0"), "model_draft": path, "context_shift": False}
    for n_ctx, n in ((256, 240), (256, 241), (256, 242), (256, 243), (512, 240)):
        with by_hand(path, 1, n_ctx=512, server=server | {"draft_ctx": n_ctx, "draft_max": 4}) as hand:
            call = hand.post((list(range(3, 93)) * 3)[:n], -1, sampling=GREEDY)
            hand.until(lambda: call.final)  # noqa: B023
            assert call.final is not None and call.final.timings.n_past == 511
            t = call.final.timings
            assert t.draft_n > 0 and (t.draft_n < 20 if n_ctx == 256 else t.draft_n > 150), t


def test_images_are_neither_drafted_nor_seen_by_a_draft_model(tmp_path: Path) -> None:
    """Their positions have negative ids in the text."""
    path = tiny_file(tmp_path)
    history = [7, 8, 9, -5, -6, 7]
    request = SimpleNamespace(speculation=Speculation(), pictures=())
    generation = SimpleNamespace(request=request, n_remain=-1, history=history)
    text = np.array([3, 4, 5], np.int32)
    for spec, with_image in (("ngram-simple:ngram_size_n=1", [8, 9]), ("draft:p_min=0", [])):
        server = FIXED | {"spec_type": parse_spec_type(spec), "model_draft": path if "draft" in spec else None}
        with by_hand(path, 1, server=server) as hand:
            slot: Any = SimpleNamespace(id=0, n_ctx=64, n_past=2, generation=generation, text_tokens=lambda: text)
            drafts = []
            for request.pictures in ((), ("a picture",)):
                slot.draft = ()
                hand.worker._speculator.begins(slot)
                hand.worker._speculator.propose([slot])
                drafts.append(list(slot.draft))
            assert drafts[0] and drafts[1] == with_image


def test_drafts_may_have_a_least_length(tmp_path: Path) -> None:
    """Shorter ones are not worth it, but where there is room for no more."""
    path = tiny_file(tmp_path)
    again = SamplerParams(temperature=0, logit_bias=((7, 1e4),))
    found = []
    for n_min, n_predict in ((0, 8), (3, 8), (3, 3), (99, 8)):
        server = FIXED | {"spec_type": parse_spec_type("ngram-simple:ngram_size_n=1,ngram_size_m=2"), "draft_max": 5}
        with by_hand(path, 1, server=server) as hand:
            call = hand.post([7] * 9, n_predict, sampling=again, speculation=Speculation(n_min=n_min))
            hand.until(lambda: call.final)  # noqa: B023
            assert call.final is not None
            found.append(call.final.timings.draft_n)
    assert found == [3, 1, 1, 1]


def test_a_draft_model_is_named_and_fits(tmp_path: Path) -> None:
    for server, words in (
        ({"spec_type": (SpecStage("draft"),)}, "-md"),
        ({"model_draft": tmp_path / "none.gguf"}, "none.gguf"),
    ):
        with pytest.raises(AssertionError, match=words), serving(1, server=server):
            pass


def test_the_dynamic_file_learns(tmp_path: Path) -> None:
    path = tmp_path / "ngrams.bin"
    for known in (False, True):
        assert path.exists() == known
        with serving(1, n_ctx=512, sampling=SamplingConfig(lookup_cache_dynamic=path)) as e:
            e.tokenizer.encode(TEXT)
            Call(e, request(e.tokenizer.encode(TEXT), 20)).final  # noqa: B018
    assert any(len(g) == 4 for g in read_counts(path))


def test_ngram_files_round_trip_and_are_checked(tmp_path: Path) -> None:
    counts = {(1,): {2: 3, 4: 5}, (1, 2, 3, 4): {7: 1}}
    path = tmp_path / "n.bin"
    write_counts(counts, path)
    assert read_counts(path) == counts and path.stat().st_size == 4 * (5 + 4 + 5 + 2)
    data = path.read_bytes()
    for bad in (data[:-1], data[:-4], data[:12], b"GGUF" * 9, data[:16] + b"\0\0\0\0"):
        path.write_bytes(bad)
        with pytest.raises(FormatError, match=r"n\.bin"):
            read_counts(path)


def grow(drafter: object, text: Sequence[int], n_max: int = 8) -> list[int]:
    """Drafts after every token; returns the last one."""
    out: list[int] = []
    for end in range(1, len(text) + 1):
        out = drafter.draft(list(text[:end]), n_max)  # type: ignore[attr-defined]
    return out


def test_what_drafters_guess() -> None:
    text = [1, 2, 3, 4, 5, 9, 1, 2, 3]
    assert grow(NgramMap(3, 2, 1), text) == [4, 5]
    assert grow(NgramMap(3, 9, 1), text, 3) == [4, 5, 9]
    assert grow(NgramMap(4, 2, 1), text) == [] == grow(NgramMap(3, 2, 2), text)
    assert grow(NgramMap(2, 1, 2), [1, 2, 7, 1, 2, 8, 1, 2]) == [8]
    assert grow(NgramMapValues(2, 1, 1), [1, 2, 7, 1, 2, 7, 1, 2, 8, 1, 2]) == [7]
    assert grow(NgramMapValues(2, 1, 3), [1, 2, 7, 1, 2, 7, 1, 2, 8, 1, 2]) == []
    assert grow(Suffix(2, 8), [1, 2, 3, 7, 9, 5, 2, 3, 8, 1, 2, 3]) == [7, 9, 5]
    pool = Pool(2)
    assert grow(NgramPool(pool), [1, 2, 3, 4]) == []
    assert NgramPool(pool).draft([1, 2], 8) == [3, 4], "other texts use what one has taught"
    small = Pool(1, most=2)
    grow(NgramPool(small), range(9))
    assert len(small.next) <= 2
    assert grow(NgramCache({}, {}), [1, 2, 3, 1, 2, 3, 1])[:2] == [2, 3]
    assert NgramCache({(5,): {6: 4}}, {}).draft([5], 1) == [6]
    assert NgramCache({(5,): {6: 2, 7: 2}}, {}).draft([5], 1) == []
    assert NgramCache({}, {(4, 5): {6: 2}}).draft([4, 5], 1) == [6]
    assert grow(NgramMapValues(2, 1, 1), [1, 2, 7, 1, 2, 8, 1, 2, 9, 1, 2]) == [], "others together are as many"


def test_what_counts_of_ngrams_have_to_be() -> None:
    """Of files more than of the text itself, of short ones more than of long ones; static counts weigh in."""
    text = [3, 4, 5, 6]
    for n, least in ((1, 4), (2, 3), (3, 2), (4, 2)):
        found = [NgramCache({tuple(text[-n:]): {9: k}}, {}).draft(text, 1) for k in (least - 1, least)]
        assert found == [[], [9]], n
    assert NgramCache({(6,): {9: 3, 8: 1}}, {}).draft([6], 1) == [9], "75 percent"
    assert NgramCache({(6,): {9: 5, 8: 2}}, {}).draft([6], 1) == []
    seen = [4, 5, 6, 4, 5, 7, 4, 5]
    assert grow(NgramCache({}, {}), seen, 1) == [6] and grow(NgramCache({}, {(4, 5): {7: 3}}), seen, 1) == [7]
    known = {(1,): {2: 3}}
    merge(known, {(1,): {2: 4, 5: 1}, (2,): {1: 1}})
    assert known == {(1,): {2: 7, 5: 1}, (2,): {1: 1}}


def test_drafters_follow_a_text_that_was_taken_back() -> None:
    for drafter in (NgramMap(1, 1, 1), NgramMapValues(1, 1, 1), Suffix(1, 4), NgramPool(Pool(1)), NgramCache({}, {})):
        grow(drafter, [1, 2, 3, 1, 2, 3])
        assert drafter.draft([1, 9, 1], 1) in ([9], []) and drafter.draft([1, 9, 1, 9, 1], 1) == [9]
    with pytest.raises(ValueError, match="names magic"):
        parse_spec_type("magic")
    for bad in ("draft:n_max=x", "draft:n_max=-1", "draft:size=3", "draft:p_min=nan"):
        with pytest.raises(ValueError, match=r"n_max|size|p_min"):
            parse_spec_type(bad)
