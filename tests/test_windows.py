"""Caches of windows: the same logits however a position was reached, and memory that does not grow with the context."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_client import ask, by_hand, serving
from factories import tiny_model
from gguf_files import write_model

from ikcli.engine.plan.sizes import SPARE, window_cells
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.engine.run.session import Session
from ikcli.gguf.constants import GGMLType
from ikcli.graph import Per
from ikcli.models import GraphConfig
from ikcli.sampling.params import SamplerParams
from ikcli.server.slots import slot_file
from ikcli.server.slots.states import EngineError
from ikcli.settings.run import RunConfig
from ikcli.settings.values import parse_spec_type

WINDOW, N_CTX, UBATCH = 40, 4096, 16
CELLS = window_cells(WINDOW, UBATCH, N_CTX)
IDS = np.random.default_rng(1).integers(1, 96, 1500).astype(np.int32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    keys: dict[str, Any] = {"attention.sliding_window": WINDOW, "context_length": N_CTX, "block_count": 2}
    model = tiny_model("gemma2", **keys)
    metadata: Any = model.metadata | {"tokenizer.ggml.model": "none"}
    yield write_model(model, tmp_path_factory.mktemp("windows") / "gemma2.gguf", metadata)


def opened(path: Path, n_seq: int = 1, **changes: Any) -> Session:
    config = RunConfig(model=path, n_ctx=N_CTX, n_ubatch=UBATCH, n_threads=1, n_threads_batch=1, warmup=False,
                       type_k="f32", type_v="f32", **changes)  # fmt: skip
    return Session.open(config, n_ctx=N_CTX * n_seq, n_seq_max=n_seq)


def add(session: Session, start: int, stop: int, seq: int = 0) -> np.ndarray:
    """Logits of the last of IDS[start:stop]."""
    return np.array(session.decode(Batch.single(IDS[start:stop], start, seq)))


def window_rows(session: Session) -> set[int]:
    """Rows of the tensors of windows."""
    return {session.runner.cache_rows(c) for c in session.cache_bytes() if c.per is Per.WINDOW}


def test_cells() -> None:
    assert CELLS == 2 * SPARE and window_cells(WINDOW, UBATCH, CELLS) == 0, "nothing is saved"
    assert window_cells(0, UBATCH, N_CTX) == 0
    assert window_cells(4096, 512, 131072) == 4096 + 512 + SPARE


def test_logits_are_those_of_the_reference(path: Path) -> None:
    """Prompts in pieces of any size and single tokens, past several moves of the window to its front."""
    cfg = GraphConfig(n_ctx=N_CTX * 2, n_ubatch=N_CTX, type_k=GGMLType.F32, type_v=GGMLType.F32)
    reference = ReferenceSession(path, cfg, n_seq_max=2)
    with opened(path, 2) as session:
        assert window_rows(session) == {2 * CELLS}
        for seq, start, stop in ((0, 0, 20), (1, 0, 700), (0, 20, 21), (1, 700, 701), (0, 21, 600), (1, 701, 730)):
            wanted = reference.decode(Batch.single(IDS[start:stop], start, seq))
            found = add(session, start, stop, seq)
            assert np.abs(found - wanted).max() < 0.01 * wanted.std(), (seq, start)


def test_windows_change_nothing_but_memory(path: Path) -> None:
    with opened(path) as session, opened(path, swa_full=True) as full:
        assert window_rows(session) == {CELLS} and window_rows(full) == set()
        assert sum(session.cache_bytes().values()) < 0.6 * sum(full.cache_bytes().values())
        for start, stop in ((0, 1), (1, 1000), *((n, n + 1) for n in range(1000, 1300))):
            assert np.array_equal(add(session, start, stop), add(full, start, stop)), start


def test_a_sequence_goes_back_as_far_as_its_window_reaches_or_to_checkpoints(path: Path) -> None:
    with opened(path) as session:
        sequences = session.sequences
        add(session, 0, 200)
        assert [sequences.reach(0, n) for n in (0, 1, 30, 199, 200)] == [0, 1, 30, 199, 200], "all is still there"
        session.checkpoint(0)
        first = add(session, 200, 230)
        add(session, 230, 900)
        assert sequences.reach(0, 899) == 899 and sequences.reach(0, 400) == 200 and sequences.reach(0, 100) == 0
        wanted = add(session, 900, 910)
        assert session.truncate(0, 900) == 900
        assert np.array_equal(add(session, 900, 910), wanted)
        assert session.truncate(0, 400) == 200
        assert np.array_equal(add(session, 200, 230), first)
        assert session.truncate(0, 0) == 0
        add(session, 0, 200)
        assert np.array_equal(add(session, 200, 230), first)


def test_save_load_and_copy(path: Path) -> None:
    with opened(path, 2) as session, opened(path, 3) as other:
        add(session, 0, 300)
        session.checkpoint(0)
        add(session, 300, 1000)
        saved = session.sequences.save(0, 1000)
        assert saved.reach(1000) == 1000 and saved.reach(500) == 300 and saved.reach(200) == 0
        cells = sum(p.nbytes for p in saved.parts)
        assert saved.n_bytes > cells and cells < 0.8 * 2 * 1000 * saved.parts[0].shape[1] * 2
        assert session.sequences.copy(0, 1, 0, 1000) == 1000
        assert other.sequences.load(2, saved) == 1000 and other.sequences.load(1, saved, 700) == 300
        wanted = add(session, 1000, 1020)
        assert np.array_equal(add(session, 1000, 1020, 1), wanted)
        assert np.array_equal(add(other, 1000, 1020, 2), wanted)
        add(other, 300, 1000, 1)
        assert np.array_equal(add(other, 1000, 1020, 1), wanted)


def test_a_slot_file_holds_all_of_a_sequence(path: Path, tmp_path: Path) -> None:
    """Positions, rows of windows with where they begin, checkpoints with theirs; a slot of just this size takes it."""
    with opened(path) as session:
        add(session, 0, 300)
        session.checkpoint(0)
        add(session, 300, 1000)
        wanted, tokens, file = session.sequences.save(0, 1000), IDS[:1000], tmp_path / "slot.bin"
        assert 0 < wanted.first < 1000 - WINDOW and [(c.n_tokens, c.first) for c in wanted.checkpoints] == [(300, 261)]
        n_bytes = slot_file.save(session, 0, tokens, file)
        found_tokens, found, size = slot_file.load(session, file, 1000)
        assert n_bytes == size == file.stat().st_size and np.array_equal(found_tokens, tokens)
        assert (found.n_tokens, found.first, found.kind) == (1000, wanted.first, wanted.kind)
        pairs = [(found, wanted), *zip(found.checkpoints, wanted.checkpoints, strict=True)]
        for a, b in pairs:
            assert (a.n_tokens, a.first) == (b.n_tokens, b.first)
            assert all(np.array_equal(x, y) for x, y in zip(a.parts, b.parts, strict=True))
        with pytest.raises(EngineError, match="holds 1000 tokens, but a slot takes 999"):
            slot_file.load(session, file, 999)
        data = file.read_bytes()
        (n_header,) = struct.unpack_from("<I", data, 12)
        header = json.loads(data[16 : 16 + n_header])
        for changes in (
            {"first": 1001}, {"first": -1}, {"checkpoints": [[300, 301]]}, {"checkpoints": [[1001, 261]]},
            {"checkpoints": [[300, 261], [300, 261]]}, {"checkpoints": [[0, 0]]}, {"checkpoints": [[300, -1]]},
            {"first": 0.5}, {"checkpoints": [[300]]},
        ):  # fmt: skip
            text = json.dumps(header | changes).encode()
            file.write_bytes(data[:12] + struct.pack("<I", len(text)) + text + data[16 + n_header :])
            with pytest.raises(EngineError, match="header cannot be read"):
                slot_file.load(session, file, 1000)


def test_the_server_reuses_what_it_can_and_answers_the_same(path: Path, tmp_path: Path) -> None:
    """Prompts whose end changes, a slot that is saved and restored, wrong drafts."""
    settings: dict[str, Any] = {"model": path, "n_ctx": N_CTX, "n_ubatch": UBATCH, "type_k": "f32", "type_v": "f32"}
    prompt = IDS[:1200].tolist()
    other = [*prompt[:600], 5, 6, 7]
    with serving(1, **settings) as engine:
        fresh = [[t.id for t in ask(engine, p, 20, cache_prompt=False).tokens] for p in (prompt, other)]
    with serving(2, server={"ctx_checkpoints_interval": 256}, **settings | {"n_ctx": 2 * N_CTX}) as engine:
        assert [t.id for t in ask(engine, prompt, 20, id_slot=0).tokens] == fresh[0]
        final = ask(engine, other, 20, id_slot=0)
        assert [t.id for t in final.tokens] == fresh[1] and final.timings.cache_n == 512
        engine.slot_action(0, "save", tmp_path / "slot.bin").result(30)
        assert engine.slot_action(1, "restore", tmp_path / "slot.bin").result(30).n_tokens >= 600
        final = ask(engine, other, 20, id_slot=1)
        assert [t.id for t in final.tokens] == fresh[1] and final.timings.cache_n >= 590
    spec = {"spec_type": parse_spec_type("ngram-simple:ngram_size_n=1"), "spec_autotune": False}
    repeated = np.tile(IDS[:6], 100).tolist()
    with serving(1, **settings) as plain, serving(1, server=spec, **settings) as engine:
        wanted, found = ask(plain, repeated, 60), ask(engine, repeated, 60)
        assert [t.id for t in found.tokens] == [t.id for t in wanted.tokens] and found.timings.draft_n


def test_logits_after_a_shift_are_those_of_what_is_left(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the windows are long past what is kept."""
    changes: dict[str, Any] = {"n_ctx": 2048, "n_ubatch": UBATCH, "type_k": "f32", "type_v": "f32"}
    with by_hand(path, 2, **changes) as hand:
        assert window_rows(hand.worker.session) == {2 * CELLS}
        seen = hand.repeated(monkeypatch)
        wild = SamplerParams(temperature=1.5, seed=3)
        call = hand.post(IDS[:1000].tolist(), 40, n_keep=8, n_discard=100, id_slot=0, sampling=wild)
        hand.until(lambda: call.final)
        assert call.final is not None and call.final.truncated
        text = IDS[:1000].tolist() + [t.id for t in call.final.tokens]
        ((tokens, logits),) = seen
        assert tokens == [*text[:8], *text[108:1025]]
        session = hand.worker.session
        session.truncate(1, 0)
        wanted = np.array(session.decode(Batch.single(tokens, 0, 1)))[0]
        assert np.abs(logits - wanted).max() < 0.002 * wanted.std()
        other = session.truncate(1, 0)
        wrong = np.array(session.decode(Batch.single([*tokens[:-20], *tokens[-19:]], other, 1)))[0]
        assert np.abs(logits - wrong).max() > 0.1 * wanted.std()
