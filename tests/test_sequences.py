"""Sequence states: a recurrent architecture of another package gives equal logits, however a position was reached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_client import Call, ask, by_hand, request, serving
from factories import tiny_model
from gguf_files import write_model
from sequence_memory import CELLS, STATES, TRANSPOSED, WINDOW, WINDOWS, Shelf

from ikcli import models
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.engine.run.saved_sequence import CacheKind, Checkpoint
from ikcli.engine.run.sequences import Keeping, Sequences
from ikcli.engine.run.session import Session
from ikcli.errors import IkError
from ikcli.gguf.constants import GGMLType
from ikcli.models import GraphConfig
from ikcli.sampling.params import SamplerParams
from ikcli.settings.run import RunConfig
from ikcli.settings.values import parse_spec_type

IDS = np.random.default_rng(1).integers(1, 96, 60).astype(np.int32)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # where workers that compile find the package
    monkeypatch.setitem(models.ARCHITECTURES, "recurrent", "outside.recurrent")
    model = tiny_model("recurrent", context_length=2048)
    metadata: Any = model.metadata | {"tokenizer.ggml.model": "none"}
    yield write_model(model, tmp_path / "recurrent.gguf", metadata)


def opened(path: Path, n_ctx: int = 512, n_seq: int = 2) -> Session:
    config = RunConfig(
        model=path, n_ctx=n_ctx, n_threads=2, n_threads_batch=2, warmup=False, type_k="f32", type_v="f32"
    )
    return Session.open(config, n_ctx=n_ctx, n_seq_max=n_seq)


def add(session: Session, start: int, stop: int, seq: int = 0) -> np.ndarray:
    """Logits of IDS[start:stop], computed in one go."""
    return np.array(session.decode(Batch.single(IDS[start:stop], start, seq, logits="all")))


def test_logits_are_those_of_the_reference(path: Path) -> None:
    """Two sequences in turns, pieces of different sizes; a sequence that begins again begins with zeros."""
    reference = ReferenceSession(path, GraphConfig(n_ctx=512, type_k=GGMLType.F32, type_v=GGMLType.F32), n_seq_max=2)
    with opened(path) as session:
        assert not session.sequences.kind.is_free
        for seq, start, stop in ((0, 0, 20), (1, 0, 7), (0, 20, 21), (1, 7, 40), (0, 21, 30)):
            wanted = reference.decode(Batch.single(IDS[start:stop], start, seq, logits="all"))
            found = add(session, start, stop, seq)
            assert np.abs(found - wanted).max() < 0.01 * wanted.std(), (seq, start)
        first = add(session, 40, 50, 1)
        session.clear()
        for start, stop in ((0, 7), (7, 40)):
            add(session, start, stop, 1)
        assert np.array_equal(add(session, 40, 50, 1), first)


def test_a_sequence_goes_back_to_checkpoints_only(path: Path) -> None:
    with opened(path) as session:
        add(session, 0, 20)
        session.checkpoint(0)
        first = add(session, 20, 30)
        assert session.truncate(0, 40) == 30, "nothing to forget"
        assert session.truncate(0, 25) == 20 == session.sequences.n_past[0]
        assert np.array_equal(add(session, 20, 30), first)
        session.checkpoint(0)
        add(session, 30, 50)
        assert [session.sequences.reach(0, n) for n in (10, 20, 29, 30, 49, 50)] == [0, 20, 20, 30, 30, 50]
        assert session.truncate(0, 19) == 0
        assert session.sequences.reach(0, 30) == 0, "checkpoints behind are gone"
        add(session, 0, 20)
        assert np.array_equal(add(session, 20, 30), first)


def test_restore(path: Path) -> None:
    with opened(path) as session:
        add(session, 0, 20)
        checkpoint = session.sequences.checkpoint(0)
        first = add(session, 20, 30)
        session.sequences.restore(0, checkpoint)
        assert np.array_equal(add(session, 20, 30), first)
        session.truncate(0, 0)
        with pytest.raises(IkError, match="cannot roll back to 20"):
            session.sequences.restore(0, checkpoint)


def test_passing_checkpoints_replace_each_other_and_the_oldest_goes(path: Path) -> None:
    with opened(path) as session:
        sequences = session.sequences
        add(session, 0, 5)
        sequences.checkpoint(0)
        for n in (6, 7, 8):
            add(session, n - 1, n)
            sequences.checkpoint(0, passing=True)
        assert [sequences.reach(0, n) for n in (6, 7)] == [5, 5]
        sequences.checkpoint(0)  # the passing one stays
        for n in range(9, 9 + Keeping().most):
            add(session, n - 1, n)
            sequences.checkpoint(0)
        assert sequences.reach(0, 8) == 0
        assert [sequences.reach(0, n) for n in (9, 12)] == [9, 12]


def test_which_checkpoints_are_kept() -> None:
    def kept(keeping: Keeping, *places: int, likely: int = 0) -> list[int]:
        known = [Checkpoint(n, (np.zeros((1, 100), np.uint8),), 0, n == likely) for n in places]
        keeping.trim(known)
        return [c.n_tokens for c in known]

    assert kept(Keeping(3), 10, 20, 30, 40, 50) == [30, 40, 50]
    assert kept(Keeping(3, spread=True), 100, 110, 120, 200, 300) == [100, 200, 300]
    assert kept(Keeping(4, spread=True), 100, 200, 300, 310, 320) == [100, 200, 300, 320]
    assert kept(Keeping(4, spread=True), 100, 200, 300, 310, 320, likely=310) == [100, 200, 310, 320]
    assert kept(Keeping(8, n_bytes=200), 1, 2, 3) == [2, 3] == kept(Keeping(8, n_bytes=299), 1, 2, 3)
    assert kept(Keeping(8, n_bytes=199), 1, 2, 3) == [3] and kept(Keeping(8, n_bytes=50), 1, 2, 3) == [3]


def test_save_load_and_copy(path: Path) -> None:
    with opened(path) as session, opened(path, n_ctx=1024, n_seq=4) as other:
        add(session, 0, 20)
        session.checkpoint(0)
        add(session, 20, 33)
        saved = session.sequences.save(0, 33)
        assert session.sequences.layout() == other.sequences.layout() and saved.reach(32) == 20
        assert session.sequences.copy(0, 1, 0, 33) == 33
        assert other.sequences.load(2, saved) == 33 and other.sequences.load(3, saved, 30) == 20
        wanted = add(session, 33, 50)
        assert np.array_equal(add(session, 33, 50, 1), wanted)
        assert np.array_equal(add(other, 33, 50, 2), wanted)
        add(other, 20, 33, 3)
        assert np.array_equal(add(other, 33, 50, 3), wanted)
        assert session.sequences.copy(0, 1, 33, 45) == 33, "its own beginning reaches as far"
        assert np.array_equal(add(session, 33, 50, 1), wanted)
        with pytest.raises(IkError, match="another model"):
            other.sequences.load(0, type(saved)(33, saved.parts, (Checkpoint(33, ()),), CacheKind(True)))
        with pytest.raises(IkError, match="cannot be divided between 3"):
            session.sequences.divide(3)


# --- what is kept, row by row -----------------------------------------------------------------------------------------
KINDS: list[Any] = [(CELLS, TRANSPOSED), (CELLS, WINDOWS), (CELLS, TRANSPOSED, STATES), (CELLS, WINDOWS, STATES)]


@pytest.mark.parametrize("caches", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_done_a_sequence_has_what_its_next_token_needs(caches: Any, seed: int) -> None:
    """Two sessions of different sizes, from one to the other and back, in any order."""
    rng = np.random.default_rng(seed)
    shelves = [Shelf(*caches), Shelf(*caches, n_ctx=300, n_seq=3, n_window=128)]
    most, kinds = 0, ["add"] * 12 + ["one", "truncate", "a bit", "checkpoint", "passing", "load", "copy"]
    for _ in range(400):
        shelf = shelves[rng.integers(2)]
        sequences = shelf.sequences
        seq, other = (int(i) for i in rng.permutation(sequences.n_seq)[:2])
        n = len(shelf.texts[seq]) - (int(rng.integers(len(shelf.texts[seq]) + 1)) if rng.random() < 0.3 else 0)
        what = rng.choice(kinds)
        if what in ("add", "one"):
            room = sequences.n_ctx - len(shelf.texts[seq])
            shelf.add(seq, rng.integers(0, 3, min(room, int(rng.integers(1, 16)) if what == "add" else 1)).tolist())
            shelf.holds(seq, shelf.texts[seq])
        elif what == "truncate":
            assert shelf.truncate(seq, n) <= n
        elif what == "a bit":
            n = max(len(shelf.texts[seq]) - 3, 0)
            assert shelf.truncate(seq, n) <= n
        elif what == "load":
            saved, text = sequences.save(seq, n), shelf.texts[seq]
            target = shelves[rng.integers(2)]
            to = int(rng.integers(target.sequences.n_seq))
            m = min(n, target.sequences.n_ctx) if rng.integers(2) else int(rng.integers(n + 1))
            if m <= target.sequences.n_ctx:
                reached = saved.reach(m)
                assert target.sequences.load(to, saved, m) == reached
                target.holds(to, text[:reached])
        elif what == "copy":
            a, b = shelf.texts[seq], shelf.texts[other]
            same = next((i for i in range(min(len(a), len(b))) if a[i] != b[i]), min(len(a), len(b)))
            kept = sequences.copy(seq, other, min(same, n), n)
            shelf.holds(other, a[:kept])
            shelf.holds(seq, a)
        else:
            found = shelf.checkpoint(seq, passing=what == "passing")
            assert found.n_tokens == len(shelf.texts[seq])
        most = max(most, shelf.first(seq))
    assert (most > 0) == (WINDOWS in caches), "windows were moved"


def test_windows_reach_back_to_the_last_position_whose_rows_are_all_there() -> None:
    """And not one further; a checkpoint is needed beyond."""
    shelf = Shelf(CELLS, WINDOWS)
    for start in range(0, 160, 8):
        shelf.add(1, range(start, start + 8))
    first, sequences = shelf.first(1), shelf.sequences
    assert 160 - 96 <= first < 160 - WINDOW - 8
    saved = sequences.save(1, 160)
    reached = {n: n if n >= first + WINDOW - 1 else 0 for n in range(161)}
    assert {n: sequences.reach(1, n) for n in reached} == reached == {n: saved.reach(n) for n in reached}
    assert saved.reach(400) == 160, "no more than it has"
    for n in (160, first + WINDOW - 1):
        assert sequences.load(0, saved, n) == n
        shelf.holds(0, tuple(range(n)))
        assert sequences.copy(1, 0, 0, n) == n
        shelf.holds(0, tuple(range(n)))
    assert sequences.load(0, saved, first + WINDOW - 2) == 0 == sequences.copy(1, 0, 0, first + WINDOW - 2)
    early = sequences.save(1, first - 5)
    assert (early.n_tokens, early.reach(first - 5)) == (first - 5, 0)
    assert sequences.copy(1, 0, 0, first - 5) == 0
    assert shelf.truncate(1, first + WINDOW - 1) == first + WINDOW - 1


def test_rejected_drafts_cost_nothing_with_windows() -> None:
    """Behind a move of the window to its front, too: 64 positions before it stay."""
    shelf = Shelf(CELLS, WINDOWS)
    for n in range(200):
        shelf.add(0, [n])
        assert shelf.first(0) == 0 or shelf.sequences.reach(0, n + 1 - 64) == n + 1 - 64
    assert shelf.first(0) > 0 and shelf.checkpoint(0, passing=True).parts == (), "so that nothing is copied for them"


def test_windows_of_a_session_with_less_room() -> None:
    """The last rows are taken, as many as fit; of a shorter beginning its own last ones."""
    wide, narrow = Shelf(CELLS, WINDOWS, n_window=200), Shelf(CELLS, WINDOWS, n_window=80)
    wide.add(0, range(150))
    saved = wide.sequences.save(0, 150)
    for n in (150, 120, 80, 79):
        assert narrow.sequences.load(1, saved, n) == n
        narrow.holds(1, tuple(range(n)))
        assert narrow.first(1) == max(n - 80, 0)


def test_checkpoints_of_a_text_that_is_gone_are_gone() -> None:
    for forget in ("truncate", "clear", "divide", "load", "copy"):
        shelf = Shelf(CELLS, WINDOWS, STATES)
        sequences = shelf.sequences
        for n in range(0, 150, 10):
            shelf.add(0, range(n, n + 10))
        shelf.checkpoint(0)
        shelf.add(0, [1] * 10)
        if forget == "truncate":
            assert shelf.truncate(0, 149) == 0
        elif forget == "clear":
            sequences.clear()
        elif forget == "divide":
            sequences.divide(2)
        elif forget == "load":
            sequences.load(0, sequences.save(1, 0))
        else:
            sequences.copy(1, 0, 0, 0)
        shelf.holds(0, ())
        assert shelf.first(0) == 0
        for _ in range(17):
            shelf.add(0, [2] * 10)
        assert sequences.reach(0, 160) == 0, forget


def test_what_is_saved_has_the_checkpoints_of_its_positions() -> None:
    shelf = Shelf(CELLS, STATES)
    for n in (10, 10, 10):
        shelf.add(0, range(n))
        shelf.checkpoint(0)
    shelf.add(0, [5] * 3)
    places = {n: [c.n_tokens for c in shelf.sequences.save(0, n).checkpoints] for n in (33, 32, 30, 29, 20, 9)}
    assert places == {33: [10, 20, 30, 33], 32: [10, 20, 30], 30: [10, 20, 30], 29: [10, 20], 20: [10, 20], 9: []}
    saved = shelf.sequences.save(0, 33)
    shelf.sequences.keeping = Keeping(2)
    assert shelf.sequences.load(1, saved, 30) == 30
    assert [shelf.sequences.reach(1, n) for n in (30, 29, 19)] == [30, 20, 0], "two of them are kept"


def test_passing_checkpoints_take_the_place_of_passing_ones_only() -> None:
    shelf = Shelf(CELLS, STATES)
    sequences = shelf.sequences
    shelf.add(0, range(5))
    shelf.checkpoint(0, passing=True)
    shelf.checkpoint(0)  # now it stays
    shelf.add(0, range(3))
    shelf.checkpoint(0, passing=True)
    shelf.add(0, range(2))
    shelf.checkpoint(0, passing=True)
    shelf.add(0, range(1))
    assert [sequences.reach(0, n) for n in (10, 9, 8, 5)] == [10, 5, 5, 5]
    saved = sequences.save(0, 11)  # what comes from elsewhere stays as well
    assert sequences.load(0, saved, 10) == 10
    shelf.holds(0, shelf.texts[0][:10])
    shelf.add(0, range(2))
    shelf.checkpoint(0, passing=True)
    shelf.add(0, range(2))
    assert [sequences.reach(0, n) for n in (13, 12, 11, 9)] == [12, 12, 10, 5]
    shelf = Shelf(CELLS, STATES)
    for n in range(10):  # a place that is named twice takes no second one
        shelf.add(0, [n])
        if n in (0, 9):
            for _ in range(Keeping().most):
                shelf.checkpoint(0)
    assert shelf.sequences.reach(0, 5) == 1


def test_a_sequence_holds_as_many_positions_as_it_has_room_for() -> None:
    shelf = Shelf(CELLS, n_ctx=20, n_seq=3)
    sequences = shelf.sequences
    sequences.check_next(1, 0, 20)
    sequences.check_each([0, 1], [0, 0])
    for seq in (0, 1):
        shelf.add(seq, range(19))
    sequences.check_each([0, 1], [19, 19])
    shelf.add(1, [1])
    for call in (
        lambda: sequences.check_next(2, 0, 21), lambda: sequences.check_next(1, 20, 1),
        lambda: sequences.check_each([0, 1], [19, 20]), lambda: sequences.check_each([1], [20]),
    ):  # fmt: skip
        with pytest.raises(IkError, match="do not fit its context of 20"):
            call()
    with pytest.raises(IkError, match="sequence 3 does not exist"):
        sequences.check_each([0, 3], [19, 0])
    with pytest.raises(IkError, match="position 18 does not follow the 19 cached"):
        sequences.check_each([2, 0], [0, 18])


def test_saved_sequences_of_other_sizes_and_kinds_are_refused() -> None:
    shelf = Shelf(CELLS, WINDOWS)
    shelf.add(0, range(41))
    saved = shelf.sequences.save(0, 41)
    assert Shelf(CELLS, WINDOWS, n_ctx=41).sequences.load(0, saved) == 41
    with pytest.raises(IkError, match="41 cached tokens do not fit sequence 0, whose context is 40"):
        Shelf(CELLS, WINDOWS, n_ctx=40).sequences.load(0, saved)
    other = Shelf(CELLS, WINDOWS, window=WINDOW + 1)
    with pytest.raises(IkError, match="of another model"):
        other.sequences.load(0, saved)
    layouts = [s.sequences.layout() for s in (shelf, other, Shelf(CELLS, WINDOWS, n_ctx=40, n_seq=5, n_window=120))]
    assert layouts[0] != layouts[1] and layouts[0] == layouts[2]
    for caches in KINDS:
        rotated = [Sequences(Shelf(*caches).arrays, caches, 9, 1, text, 7, 8).layout() for text in ("00", "10")]
        assert [a != b for a, b in zip(*rotated, strict=True)] == [c is not STATES for c in caches]


# --- the server -------------------------------------------------------------------------------------------------------
def test_the_server_reuses_what_it_can_and_answers_the_same(path: Path, tmp_path: Path) -> None:
    """Slots in parallel, prompts with a common beginning, a saved slot after a restart, context shift."""
    settings: dict[str, Any] = {"model": path, "n_ctx": 1024, "n_ubatch": 16, "type_k": "f32", "type_v": "f32"}
    prompts = [IDS[:50].tolist(), [*IDS[:50].tolist(), 7, 8, 9], [*IDS[:49].tolist(), 3], IDS[10:40].tolist()]

    def tokens(call: Call) -> list[int]:
        return [t.id for t in call.final.tokens]

    with serving(4, **settings) as engine:
        fresh = [tokens(Call(engine, request(p, 20, cache_prompt=False, id_slot=0))) for p in prompts]
        calls = [Call(engine, request(p, 20, cache_prompt=False)) for p in prompts]
        assert [tokens(c) for c in calls] == fresh
    with serving(1, **settings) as engine:
        n_cached = []
        for prompt, wanted in zip(prompts, fresh, strict=True):
            final = ask(engine, prompt, 20)
            assert [t.id for t in final.tokens] == wanted
            n_cached.append(final.timings.cache_n)
        assert n_cached == [0, 50, 45, 0], "from checkpoints shortly before the end of a prompt and at its end"
        ask(engine, prompts[0], 20)
        engine.slot_action(0, "save", tmp_path / "slot.bin").result(30)
    with serving(2, **settings) as engine:
        restored = engine.slot_action(1, "restore", tmp_path / "slot.bin").result(30)
        final = ask(engine, prompts[1], 20, id_slot=1)
        assert restored.n_tokens >= 50 and final.timings.cache_n == 50
        assert [t.id for t in final.tokens] == fresh[1]


def test_conversations_on_disk(path: Path, tmp_path: Path) -> None:
    """With their checkpoints, without which nothing of them could be used."""
    settings: dict[str, Any] = {"model": path, "n_ctx": 1024, "type_k": "f32", "type_v": "f32"}
    other = [*IDS[:49].tolist(), 3]
    with serving(1, **settings) as engine:
        fresh = [t.id for t in ask(engine, other, 10).tokens]
    for n_cached in (0, 45):
        with serving(1, server={"cache_disk": tmp_path / "cache"}, **settings) as engine:
            final = ask(engine, other if n_cached else IDS[:50].tolist(), 10)
            assert final.timings.cache_n == n_cached
    assert [t.id for t in final.tokens] == fresh


@pytest.mark.parametrize(
    ("server", "turns", "n_cached"),
    [
        ({"ctx_checkpoints_interval": 16}, (), 32),
        ({"ctx_checkpoints_interval": 0}, (37,), 37),
        ({"ctx_checkpoints_interval": 0}, (), 0),
        ({"ctx_checkpoints": 0}, (37,), 0),
    ],
)
def test_a_prompt_whose_end_changed_is_computed_from_a_checkpoint(
    path: Path, server: dict[str, Any], turns: tuple[int, ...], n_cached: int
) -> None:
    settings: dict[str, Any] = {"model": path, "n_ctx": 1024, "type_k": "f32", "type_v": "f32"}
    other = [*IDS[:40].tolist(), 5, 6, 7, 8]
    with serving(1, **settings) as engine:
        wanted = ask(engine, other, 20)
    with serving(1, server=server, **settings) as engine:
        ask(engine, IDS[:50].tolist(), 4, turns=turns)
        final = ask(engine, other, 20)
    assert final.timings.cache_n == n_cached
    assert [t.id for t in final.tokens] == [t.id for t in wanted.tokens]


def test_drafts_that_were_wrong_leave_no_trace(path: Path) -> None:
    settings: dict[str, Any] = {"model": path, "n_ctx": 1024, "type_k": "f32", "type_v": "f32"}
    prompt = np.tile(IDS[:6], 6).tolist()
    spec = {"spec_type": parse_spec_type("ngram-simple:ngram_size_n=1"), "spec_autotune": False}
    with serving(1, **settings) as plain, serving(1, server=spec, **settings) as engine:
        wanted, found = ask(plain, prompt, 60), ask(engine, prompt, 60)
    assert found.timings.draft_n > found.timings.draft_n_accepted
    assert [t.id for t in found.tokens] == [t.id for t in wanted.tokens]


def test_logits_after_a_shift_are_those_of_what_is_left(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And after a text was taken back, though states cannot be cut."""
    with by_hand(path, 2, n_ubatch=16, type_k="f32", type_v="f32") as hand:
        seen = hand.repeated(monkeypatch)
        wild = SamplerParams(temperature=1.5, seed=3)
        call = hand.post(IDS[:50].tolist(), 230, n_keep=8, n_discard=60, id_slot=0, sampling=wild)
        hand.until(lambda: call.final)
        assert call.final is not None and call.final.truncated
        text = IDS[:50].tolist() + [t.id for t in call.final.tokens]
        assert [tokens for tokens, _ in seen] == [[*text[:8], *text[68:257]]]
        slot = hand.worker.slots[0]
        other = hand.post(IDS[:40].tolist(), 30, id_slot=0, sampling=wild)
        hand.until(lambda: slot.n_past == 60)
        kept = slot.cached[:53].tolist()
        hand.worker._rewind(slot, 8)
        hand.until(lambda: other.final)
        assert seen[1][0] == kept
        for tokens, logits in seen:
            hand.check_same(tokens, logits, 0.002)
