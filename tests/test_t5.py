"""T5 as an encoder beside a decoder: what torch computes of small checkpoints; texts, plans and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_checkpoint
from test_encoders import drawn

from ikcli.convert.tool import open_checkpoint, plan_convert
from ikcli.engine.plan import startup
from ikcli.engine.plan.planner import Planner
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.encoder_decoder import EncoderTexts
from ikcli.engine.run.runner import Runner
from ikcli.engine.run.sequences import Sequences
from ikcli.engine.run.session import Session
from ikcli.errors import FormatError, IkError, UnsupportedError, UsageError
from ikcli.gguf.reader import open_gguf
from ikcli.graph.micro_batch import Segment
from ikcli.models import HParams
from ikcli.models.t5 import bucket_before
from ikcli.quant.quantizer import run
from ikcli.quant.recipes import RecipeOptions
from ikcli.quant.tool import ToolOptions
from ikcli.settings.run import RunConfig
from ikcli.settings.values import parse_spec_type

ANSWERS: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "t5_answers.json").read_text())
MODELS = {model["name"]: model for model in ANSWERS["models"]}
TEXT, ANSWER = ANSWERS["text"], ANSWERS["answer"]
SLOW = pytest.mark.slow("compiles attention kernels with biases, and across to an encoder")


def converted(name: str, tmp_path: Path, **changes: Any) -> Path:
    out, model = tmp_path / f"{name}.gguf", MODELS[name]
    tensors = {n: drawn(n, s) for n, s in model["tensors"].items()}
    found = open_checkpoint(write_checkpoint(tmp_path / name, model["config"] | changes, tensors))
    run(plan_convert(found, out, RecipeOptions(0), ToolOptions(n_threads=1)).job)
    return out


def opened(path: Path, **changes: Any) -> Session:
    settings: dict[str, Any] = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "warmup": False}
    config = RunConfig(model=path, type_k="f32", type_v="f32", **(settings | changes))
    return Session.open(config, n_seq_max=2, n_step=8)


def logits_of(session: Session, text: list[int], answer: list[int], seq: int = 0) -> np.ndarray:
    """Logits of the decoder: after its first token, then of pieces of an answer."""
    found = [session.decode(Batch.single(text, seq=seq)).copy()]
    done = 0
    for n in (1, 3, 40, len(answer)):
        piece = answer[done : done + n]
        found.append(session.decode(Batch.single(piece, len(text) + done, seq, logits="all")).copy())
        done += len(piece)
    return np.concatenate(found)


# --- against torch ------------------------------------------------------------------------------------------------
@SLOW
@pytest.mark.parametrize("name", MODELS)
def test_a_converted_checkpoint_computes_what_torch_computes(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    with opened(converted(name, tmp_path)) as session:
        logits = logits_of(session, TEXT, ANSWER)
        found = logits[np.ix_(ANSWERS["rows"], ANSWERS["columns"])]
        np.testing.assert_allclose(found, model["logits"], atol=2e-3 * float(np.std(model["logits"])))
        session.clear()
        row, answer = session.decode(Batch.single(TEXT))[0], []
        for i, token in enumerate(model["greedy"]):
            answer.append(int(row.argmax()))
            row = session.step_each([token], [len(TEXT) + i], [0])[0]
        assert answer == model["greedy"]


@SLOW
def test_texts_of_several_sequences_are_encoded_and_decoded_beside_each_other(tmp_path: Path) -> None:
    with opened(converted("t5-gated", tmp_path)) as session:
        texts, answers = (TEXT[:9], TEXT[9:60]), (ANSWER[:4], ANSWER[4:8])
        alone = []
        for text, answer in zip(texts, answers, strict=True):
            session.clear()
            alone.append(session.decode(Batch.single([*text, *answer], logits="none")).copy())
            session.clear()
            alone[-1] = logits_of(session, text, answer)
        session.clear()
        tokens = [np.array([*t, *a], np.int32) for t, a in zip(texts, answers, strict=True)]
        sizes = [len(t) for t in tokens]
        wanted = [np.arange(n) >= len(text) - 1 for n, text in zip(sizes, texts, strict=True)]
        both = Batch(
            np.concatenate(tokens),
            np.concatenate([np.arange(n, dtype=np.int32) for n in sizes]),
            np.repeat(np.arange(2, dtype=np.int32), sizes),
            np.concatenate(wanted),
        )
        np.testing.assert_allclose(session.decode(both), np.concatenate(alone), atol=1e-4)
        session.truncate(0, len(texts[0]) + 1)  # the answer can be cut, the text cannot
        again = session.step(Batch.single(answers[0][1:], len(texts[0]) + 1, 0))
        np.testing.assert_allclose(again, alone[0][2:], atol=1e-4)
        assert session.truncate(0, len(texts[0]) - 1) == 0
        pieces = [session.decode(Batch.single(texts[0][i : i + 4], i, logits="last" if i == 8 else "none")).copy()
                  for i in (0, 4, 8)]  # fmt: skip
        assert [len(piece) for piece in pieces] == [0, 0, 1]
        np.testing.assert_allclose(pieces[2], alone[0][:1], atol=1e-4)
        with pytest.raises(UnsupportedError, match="not saved"):
            session.sequences.save(0, 4)
        session.clear()
        with pytest.raises(IkError, match="no encoded text"):
            session.step_each([5], [0], [0])


# --- without computing --------------------------------------------------------------------------------------------
def texts_of(n_most: int = 8) -> tuple[EncoderTexts, Sequences, list[tuple[list[int], list[Segment]]]]:
    sequences, calls = Sequences(Runner.__new__(Runner), [], 40, 2, ""), []
    return EncoderTexts(sequences, 0, n_most, lambda ids, s: calls.append((ids.tolist(), list(s)))), sequences, calls


def test_a_text_ends_with_the_first_token_whose_logits_are_wanted() -> None:
    texts, sequences, calls = texts_of()
    assert not len(texts.read(Batch.single([5, 6, 7], logits="none"))) and not calls
    batch = Batch(np.array([8, 9, 3], np.int32), np.arange(3, 6, dtype=np.int32), np.zeros(3, np.int32),
                  np.array([False, True, False]))  # fmt: skip
    rest = texts.read(batch)
    assert calls == [([5, 6, 7, 8, 9], [Segment(0, 5, 0, 0)])]
    assert (rest.tokens.tolist(), rest.pos.tolist(), rest.logits.tolist()) == ([0, 3], [4, 5], [True, False])
    segment = texts.segment(Segment(0, 2, 0, 4))
    assert (segment.cell, segment.pos, segment.n_encoded) == (4, 0, 5)
    sequences.n_past[0] = 6
    assert texts.read(Batch.single([4], 6)).tokens.tolist() == [4] and len(calls) == 1
    assert [sequences.truncate(0, n) for n in (6, 5, 4)] == [6, 5, 0]


def test_texts_share_a_micro_batch_where_they_fit() -> None:
    texts, _, calls = texts_of()
    for n, wanted in ((4, 1), (5, 2)):
        tokens = np.arange(2 * n, dtype=np.int32)
        pos, seq = np.tile(np.arange(n, dtype=np.int32), 2), np.repeat(np.arange(2, dtype=np.int32), n)
        texts._sequences.clear()
        calls.clear()
        texts.read(Batch(tokens, pos, seq, pos == n - 1))
        assert len(calls) == wanted
    texts._sequences.clear()
    with pytest.raises(UsageError, match=r"the text \(9 tokens or more\) exceeds the 8 .* raise -c and -ub"):
        texts.read(Batch.single(range(9)))


def test_the_file_has_the_keys_and_names_of_llama_cpp(tmp_path: Path) -> None:
    file = open_gguf(converted("t5-gated", tmp_path))
    keys = {k.removeprefix("t5."): v for k, v in file.metadata.items() if k.startswith("t5.")}
    wanted = {"block_count": 3, "decoder_block_count": 2, "decoder_start_token_id": 0, "context_length": 512,
              "attention.relative_buckets_count": 32, "attention.key_length": 16}  # fmt: skip
    assert {k: int(keys[k]) for k in wanted} == wanted and "attention.causal" not in keys
    block = {n.removeprefix("dec.blk.1.") for n in file.tensors if n.startswith("dec.blk.1.")}
    parts = [f"{side}attn_{x}" for side in ("", "cross_") for x in ("norm", "q", "k", "v", "o")]
    assert block == {f"{x}.weight" for x in (*parts, "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")}
    assert {"enc.output_norm.weight", "dec.output_norm.weight", "output.weight"} <= set(file.tensors)
    assert "output.weight" not in open_gguf(converted("t5", tmp_path)).tensors  # scaled states, as in T5 1.0
    old = converted("t5", tmp_path / "old", scale_decoder_outputs=None, tie_word_embeddings=False)
    assert "output.weight" in open_gguf(old).tensors  # T5 1.1 as it was published


def test_distances_to_earlier_positions_have_all_buckets() -> None:
    assert [bucket_before(d, 32) for d in (5, 0, -1, -15, -16, -18, -19, -127, -500)] == [
        0, 0, 1, 15, 16, 16, 17, 31, 31
    ]  # fmt: skip


def test_a_file_must_say_what_the_decoder_begins_with(tmp_path: Path) -> None:
    file = open_gguf(converted("t5", tmp_path))
    absent = ("t5.decoder_start_token_id", "tokenizer.ggml.bos_token_id")
    keys = {k: v for k, v in file.metadata.items() if k not in absent}
    with pytest.raises(FormatError, match="decoder_start_token_id is missing"):
        HParams.from_gguf(keys, file.tensors, "x")
    assert HParams.from_gguf(keys | {"tokenizer.ggml.bos_token_id": 4}, file.tensors, "x").decoder_start == 4


def test_a_plan_has_caches_of_both_kinds(tmp_path: Path) -> None:
    path = converted("t5-gated", tmp_path)
    plan = Planner.of_file(RunConfig(model=path), header_only=True).plan(RunConfig(model=path, n_ctx=256))
    sizes = {(c.kind, c.il): n for c, n in plan.caches.items()}
    assert sizes == {(kind, il): 256 * 64 * 2 for kind in ("k", "v", "k_cross", "v_cross") for il in (0, 1)}


def test_what_cannot_be_is_refused_at_start(tmp_path: Path) -> None:
    path = converted("t5-gated", tmp_path)
    plain = RunConfig(command="serve", model=path)
    for wanted, config in {
        "one process": replace(plain, fleet=replace(plain.fleet, stages=2)),
        "T5EncoderModel": replace(plain, server=replace(plain.server, embeddings=True)),
        "embeddings; `ik convert`": replace(plain, command="embed"),
        "leave out -md": replace(plain, server=replace(plain.server, model_draft=path)),
        "leave out --spec-type": replace(plain, server=replace(plain.server, spec_type=parse_spec_type("mtp"))),
        "prompt cache": replace(plain, server=replace(plain.server, cache_disk=tmp_path)),
    }.items():
        with pytest.raises(UnsupportedError, match=wanted):
            startup.prepare(config)
    found = startup.prepare(plain).config
    assert (found.n_ubatch, found.server.cache_ram, found.server.context_shift) == (2048, 0, False)
