"""States of sequences: a recurrent architecture of another package gives the same logits whatever way led there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_client import Call, ask, request, serving
from factories import tiny_model
from gguf_files import write_model

from ikcli import models
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.engine.run.saved_sequence import CacheKind, Checkpoint
from ikcli.engine.run.sequences import Keeping
from ikcli.engine.run.session import Session
from ikcli.errors import IkError
from ikcli.gguf.constants import GGMLType
from ikcli.models import GraphConfig
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
        with pytest.raises(IkError, match="cannot go back to 20"):
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
    assert kept(Keeping(8, n_bytes=250), 1, 2, 3) == [2, 3] and kept(Keeping(8, n_bytes=50), 1, 2, 3) == [3]


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
        with serving(1, server={"sessions": tmp_path / "sessions"}, **settings) as engine:
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
    spec = {"spec_type": parse_spec_type("ngram-simple:ngram_size_n=1")}
    with serving(1, **settings) as plain, serving(1, server=spec, **settings) as engine:
        wanted, found = ask(plain, prompt, 60), ask(engine, prompt, 60)
    assert found.timings.draft_n > found.timings.draft_n_accepted
    assert [t.id for t in found.tokens] == [t.id for t in wanted.tokens]


def test_context_shift(path: Path) -> None:
    settings: dict[str, Any] = {"model": path, "n_ctx": 256, "n_ubatch": 16, "type_k": "f32", "type_v": "f32"}
    with serving(1, server={"context_shift": True}, **settings) as engine:
        final = ask(engine, IDS[:50].tolist(), 300, n_keep=8)
    assert final.truncated and len(final.tokens) == 300
