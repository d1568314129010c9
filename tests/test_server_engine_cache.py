"""What slots keep: prompt reuse, rows copied between slots, the prompt cache, context shift, slot files."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engine_client import Call, Pause, ask, request, serving, until
from factories import tiny_deepseek2, tiny_model
from gguf_files import write_model

from ikcli.engine.run.batch import Batch
from ikcli.engine.run.saved_sequence import SavedSequence
from ikcli.engine.run.session import Session
from ikcli.errors import IkError
from ikcli.server.http.metrics import prometheus_text
from ikcli.server.http.users import Users
from ikcli.server.slots.engine import Engine
from ikcli.server.slots.states import EngineError
from ikcli.settings.run import RunConfig

LONG = "import os\nimport sys\n\n\ndef main(argv):\n    parser = argparse.ArgumentParser()\n"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with serving(2, n_ctx=1024) as e:
        yield e


# --- rows of the cache ------------------------------------------------------------------------------------------------
LAYOUTS = [
    ("deepseek2", {"mla": mla, "flash_attn": fa, "type_k": k})
    for mla, fa, k in ((0, True, "q8_0"), (1, False, "f16"), (2, True, "q8_0"), (3, True, "bf16"), (1, True, "f32"))
] + [
    ("llama", {"flash_attn": fa, "type_k": k, "type_v": v})
    for fa, k, v in ((True, "f16", "f16"), (False, "f16", "f16"), (False, "q8_0", "f32"), (True, "q8_0", "q8_0"))
]


@pytest.mark.parametrize(("name", "changes"), LAYOUTS)
def test_rows_move_between_sequences_and_sessions(name: str, changes: dict[str, object], tmp_path: Path) -> None:
    model = tiny_deepseek2() if name == "deepseek2" else tiny_model("llama")
    path = write_model(model, tmp_path / "model.gguf")
    config = RunConfig(command="serve", model=path, n_threads=1, n_threads_batch=1, warmup=False, **changes)  # type: ignore[arg-type]
    ids = np.random.default_rng(1).integers(0, 96, 30).astype(np.int32)
    with Session.open(config, n_ctx=512, n_seq_max=2) as s, Session.open(config, n_ctx=1024, n_seq_max=4) as t:
        s.decode(Batch.single(ids[:29], 0, 1))
        rows = s.sequences.save(1, 29)
        s.sequences.copy(1, 0, 0, 20)
        s.decode(Batch.single(ids[20:29], 20, 0))
        t.sequences.load(3, rows)
        t.sequences.load(2, rows, 28)
        t.decode(Batch.single(ids[28:29], 28, 2))
        wanted = s.decode(Batch.single(ids[29:], 29, 1)).copy()
        assert (t.decode(Batch.single(ids[29:], 29, 3)) == wanted).all()
        for other, seq in ((s, 0), (t, 2)):
            found = other.decode(Batch.single(ids[29:], 29, seq))
            assert np.abs(found - wanted).max() < 0.1 * wanted.std()
        with pytest.raises(IkError, match="another model"):
            t.sequences.load(0, SavedSequence(29, rows.parts[1:]))
        with pytest.raises(IkError, match="30 cached"):
            t.sequences.load(0, rows, 30)
        with pytest.raises(IkError, match="not 31"):
            s.sequences.save(1, 31)


# --- reuse ------------------------------------------------------------------------------------------------------------
def test_a_prompt_that_goes_on_is_not_computed_again(engine: Engine) -> None:
    first = ask(engine, LONG, 8, cache_prompt=False, id_slot=0)
    n = len(engine.tokenizer.encode(LONG))
    assert (first.timings.cache_n, first.timings.prompt_n) == (0, n)
    again = ask(engine, LONG, 8, id_slot=0)
    assert (again.timings.cache_n, again.timings.prompt_n, again.text) == (n - 1, 1, first.text)
    ids = [*engine.tokenizer.encode(LONG), *(t.id for t in first.tokens)]
    more = ask(engine, [*ids, 5, 6], 8)
    assert (more.id_slot, more.timings.cache_n, more.timings.prompt_n) == (0, n + 7, 3)
    assert ask(engine, LONG, 8, id_slot=0, cache_prompt=False).timings.cache_n == 0


def test_the_least_recently_used_slot_is_taken_for_something_else(engine: Engine) -> None:
    ask(engine, LONG, 2, id_slot=1, cache_prompt=False)
    ask(engine, "The quick brown fox", 2, id_slot=0, cache_prompt=False)
    assert ask(engine, [7, 8, 9, 10], 2).id_slot == 1
    assert ask(engine, [11, 12, 13], 2).id_slot == 0


def test_rows_of_a_busy_slot_are_copied() -> None:
    with serving(2, n_ctx=1024, server={"cache_ram": 0}) as e:
        alone = ask(e, LONG, 12, cache_prompt=False, id_slot=1)
        ask(e, "something quite different from all the rest of these texts", 2, cache_prompt=False, id_slot=1)
        pause = Pause()
        Call(e, request(e.tokenizer.encode(LONG), 400, id_slot=0), pause)
        pause.wait()
        call = Call(e, request(e.tokenizer.encode(LONG), 12, id_slot=1))
        pause.end()
        other = call.final
        n = len(e.tokenizer.encode(LONG))
        assert (other.timings.cache_n, other.text) == (n - 1, alone.text)


def test_an_evicted_prompt_comes_back_from_ram() -> None:
    with serving(1, n_ctx=512) as e:
        first = ask(e, LONG, 8)
        ask(e, "The quick brown fox jumps over the lazy dog, and then it sleeps.", 8)
        assert e.metrics().prompt_cache_entries == 1 < e.metrics().prompt_cache_bytes
        again = ask(e, LONG, 8)
        assert again.text == first.text and again.timings.prompt_n == 1
    with serving(1, n_ctx=512, server={"cache_ram": 0}) as e:
        ask(e, LONG, 8)
        ask(e, "The quick brown fox jumps over the lazy dog, and then it sleeps.", 8)
        assert e.metrics().prompt_cache_entries == 0 and ask(e, LONG, 8).timings.cache_n <= 1


def test_conversations_in_turns_cost_their_distinct_tokens() -> None:
    """One text, then another with several ends, in one slot: the first is still whole, each end is computed alone."""
    first, second = ([k + i % 400 for i in range(300)] for k in (100, 600))
    with serving(1, n_ctx=1024, server={"cache_ram": 8, "cache_explain": True}) as e:
        assert e._worker is not None
        store, lines = e._worker._reuse.store, []
        e._worker._log = lambda level, function, message, fields: lines.append((message, fields))
        per_token = sum(a * b for a, b in e._worker.session.sequences.shapes(1, 1)) + 4
        store.limit = 420 * per_token + 300 * per_token
        ask(e, first, 1)
        computed = [ask(e, [*second, *range(1100 + 20 * k, 1120 + 20 * k)], 1).timings.prompt_n for k in range(5)]
        assert computed == [320, 20, 20, 20, 20]
        again = ask(e, [*first, 7], 1)
        assert (again.timings.cache_ram_n, again.timings.cache_n, again.timings.prompt_n) == (300, 300, 1)
        assert store.n_bytes == (300 + 300 + 5 * 20) * per_token
        found = e.metrics(reset=False)
        assert (found.prompt_tokens_slot_total, found.prompt_tokens_ram_total) == (4 * 300, 300)
    text = prometheus_text(found, Users()).decode()
    assert "llamacpp:prompt_tokens_from_ram_total 300.0" in text
    reused = [fields for message, fields in lines if message == "prompt tokens reused"]
    assert reused[2]["missed_at"] == 300 and (reused[2]["token"], reused[2]["cached_token"]) == (1120, 1100)
    assert any(message.startswith("prompt cache: 6 texts") for message, _ in lines)


# --- context full -----------------------------------------------------------------------------------------------------
def test_the_context_is_shifted() -> None:
    """What follows a shift is what the model says to the tokens that are left: see the tests of single steps."""
    with serving(1, n_ctx=256, type_k="f32") as e:
        final = ask(e, e.tokenizer.encode(LONG), 300, n_keep=4, n_discard=100)
        assert final.truncated and final.stop_type == "limit" and final.timings.predicted_n == 300
        assert final.timings.n_past < 256


def test_without_shift_the_answer_ends_with_the_context() -> None:
    with serving(1, n_ctx=256, server={"context_shift": False}) as e:
        prompt = e.tokenizer.encode(LONG)
        final = ask(e, prompt, 300)
        assert (final.stop_type, final.truncated) == ("limit", True)
        assert final.timings.predicted_n == 256 - len(prompt) == len(final.tokens)
        assert ask(e, prompt, 4).timings.cache_n == len(prompt) - 1


def test_n_predict_minus_2_fills_the_context(engine: Engine) -> None:
    final = ask(engine, LONG, -2)
    assert final.truncated and final.timings.n_past + 1 == engine.model.n_ctx_slot
    again = ask(engine, LONG, 10_000, within_context=True)
    assert again.truncated and (again.stop_type, again.timings.n_past) == ("limit", final.timings.n_past)
    assert ask(engine, LONG, 3, within_context=True).timings.predicted_n == 3


# --- slot files -------------------------------------------------------------------------------------------------------
def test_a_slot_survives_on_disk(engine: Engine, tmp_path: Path) -> None:
    n = len(engine.tokenizer.encode(LONG))
    first = ask(engine, LONG, 8, id_slot=0, cache_prompt=False)
    saved = engine.slot_action(0, "save", tmp_path / "a.bin").result(30)
    assert saved.n_tokens == n + 7 and saved.n_bytes == (tmp_path / "a.bin").stat().st_size
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]
    assert engine.slot_action(0, "erase").result(30).n_tokens == n + 7
    assert engine.slots()[0].n_past == 0
    with serving(3, n_ctx=1536) as other:
        restored = other.slot_action(2, "restore", tmp_path / "a.bin").result(30)
        assert (restored.id_slot, restored.n_tokens, restored.n_bytes) == (2, n + 7, saved.n_bytes)
        again = ask(other, LONG, 8)
        assert (again.id_slot, again.text, again.timings.prompt_n) == (2, first.text, 1)
    empty = engine.slot_action(0, "save", tmp_path / "empty.bin").result(30)
    assert empty.n_tokens == 0 == engine.slot_action(1, "restore", tmp_path / "empty.bin").result(30).n_tokens


def refused(engine: Engine, path: Path) -> EngineError:
    before = engine.slots()[1].n_past
    error = engine.slot_action(1, "restore", path).exception(30)
    assert isinstance(error, EngineError) and engine.slots()[1].n_past == before
    return error


def test_files_that_are_no_saved_slots_are_refused(engine: Engine, tmp_path: Path) -> None:
    good = tmp_path / "good.bin"
    ask(engine, LONG, 4, id_slot=0)
    engine.slot_action(0, "save", good).result(30)
    data = good.read_bytes()
    assert refused(engine, tmp_path / "missing.bin").status == 404
    assert refused(engine, tmp_path).status == 404
    n_header = struct.unpack_from("<I", data, 12)[0]
    header = json.loads(data[16 : 16 + n_header])
    rest = data[16 + n_header :]

    def with_header(**changes: object) -> bytes:
        text = json.dumps(header | changes).encode()
        return data[:12] + struct.pack("<I", len(text)) + text + rest

    cases = {
        b"": "not a saved slot",
        b"GGUF" * 100: "not a saved slot",
        data[:40]: "not a saved slot",
        data[:200]: "damaged",
        data[:-1]: "damaged",
        data[:-40] + bytes([data[-40] ^ 1]) + data[-39:]: "checksum",
        data[: 16 + n_header] + bytes([data[16 + n_header] ^ 1]) + data[17 + n_header :]: "checksum",
        data[:8] + struct.pack("<I", 9) + data[12:]: "version 9",
        data[:12] + b"\xff\xff\xff\x7f" + data[16:]: "header",
        data[:16] + b"[" * n_header + rest: "header",
        with_header(n_tokens=-1): "header",
        with_header(n_tokens="x"): "header",
        with_header(n_tokens=10**9): "tokens",
        with_header(model="0" * 64): "another model",
        with_header(layout=header["layout"][1:]): "cache settings",
    }
    for i, (content, words) in enumerate(cases.items()):
        path = tmp_path / f"bad{i}.bin"
        path.write_bytes(content)
        error = refused(engine, path)
        assert error.status == 400 and words in error.message and path.name in error.message, error.message
        assert str(tmp_path) not in error.message


def test_a_file_for_other_cache_settings_is_refused(engine: Engine, tmp_path: Path) -> None:
    engine.slot_action(0, "save", tmp_path / "f16.bin").result(30)
    with serving(2, n_ctx=512, mla=0) as other:
        assert "-ctk" in refused(other, tmp_path / "f16.bin").message


def test_a_file_with_more_tokens_than_a_slot_is_refused(engine: Engine, tmp_path: Path) -> None:
    ask(engine, [5 + i % 50 for i in range(400)], 1, id_slot=0)
    engine.slot_action(0, "save", tmp_path / "long.bin").result(30)
    with serving(2, n_ctx=512) as other:
        assert "larger -c" in refused(other, tmp_path / "long.bin").message


def test_a_folder_that_cannot_be_written(engine: Engine, tmp_path: Path) -> None:
    error = engine.slot_action(0, "save", tmp_path / "none" / "a.bin").exception(30)
    assert isinstance(error, EngineError) and error.status == 500


def test_actions_wait_for_the_slot_and_are_checked(engine: Engine, tmp_path: Path) -> None:
    started = threading.Event()
    call = Call(engine, request(engine.tokenizer.encode(LONG), 200, id_slot=1), lambda e: started.set())
    assert started.wait(30)
    future = engine.slot_action(1, "save", tmp_path / "later.bin")
    assert future.result(30).n_tokens == call.final.timings.n_past
    for id_slot, action, path in ((2, "erase", None), (-1, "erase", None), (0, "save", None), (0, "burn", tmp_path)):
        error = engine.slot_action(id_slot, action, path).exception(30)
        assert isinstance(error, EngineError) and error.status == 400
    until(lambda: not any(s.is_processing for s in engine.slots()))
