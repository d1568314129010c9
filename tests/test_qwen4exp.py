"""Qwen4-Exp: sessions against NumPy, states of n-grams and of entries through roll-backs and copies, keys, conversion.

Logits of torch are in `test_convert_answers.py`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import build, drawn
from gguf_files import write_model
from tiny_architectures import tiny

from ikcli.engine.plan.graph_rules import check_media
from ikcli.engine.plan.model_rules import check_indexer, check_streams
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.engine.run.session import Session
from ikcli.errors import FormatError, IkError, UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.models import GraphConfig, HParams, MediaConfig
from ikcli.models.sparse import taps
from ikcli.settings.run import RunConfig

END = 7  # behind which n-grams begin anew
TOKENS = np.random.default_rng(3).integers(0, 96, 150)
TOKENS[[30, 31, 60, 101, 103]] = END
OTHER = np.random.default_rng(5).integers(0, 96, 150)
ANSWERS = json.loads((Path(__file__).parent / "data" / "convert_answers.json").read_text())
CONFIG = next(m for m in ANSWERS["models"] if m["name"] == "qwen4exp")["config"]
slow = pytest.mark.slow("compiles the kernels of entries, of streams and of lists of positions")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tiny("qwen4exp"), tmp_path_factory.mktemp("models") / "tiny.gguf")


def config(path: Path, **changes: Any) -> RunConfig:
    settings = {"n_threads": 2, "n_threads_batch": 2, "type_k": "f32", "type_v": "f32", "type_index": "f32"}
    return RunConfig(model=path, n_ctx=256, warmup=False, **(settings | changes))


def reference(path: Path, tokens: np.ndarray = TOKENS, **changes: Any) -> np.ndarray:
    f32 = GGMLType.F32
    cfg = GraphConfig(n_ctx=256, type_k=f32, type_v=f32, type_index=f32, **changes)
    return ReferenceSession(path, cfg).decode(Batch.single(tokens, logits="all"))


def check(found: Any, wanted: np.ndarray) -> None:
    """Almost all rows are equal: experts and entries that tie up to rounding may be chosen differently."""
    assert (np.abs(np.array(found) - wanted).max(axis=1) < 2e-3).mean() > 0.97


@slow
def test_prompts_and_single_tokens(path: Path) -> None:
    """Prompts of one and of several micro-batches, then single tokens, with and without the choice of entries."""
    sparse, dense = reference(path), reference(path, index_top_k=0)
    assert np.abs(sparse - dense)[40:].max() > 0.1 > 1e-6 > np.abs(sparse - dense)[:27].max()
    for changes, wanted in (
        ({}, sparse), ({"n_ubatch": 64, "n_batch": 64}, sparse), ({"n_ubatch": 7, "n_batch": 7}, sparse),
        ({"k_hadamard": True}, sparse), ({"dsa": False}, dense), ({"flash_attn": False}, sparse),
        ({"dsa_top_k": 41}, reference(path, index_top_k=44)), ({"n_threads": 1, "n_threads_batch": 1}, sparse),
    ):  # fmt: skip
        with Session.open(config(path, **changes)) as session:
            found = [np.array(session.decode(Batch.single(TOKENS[:20], logits="all")))]
            found.append(np.array(session.decode(Batch.single(TOKENS[20:121], 20, logits="all"))))
            found += [np.array(session.decode(Batch.single(TOKENS[i : i + 1], i))) for i in range(121, 150)]
        check(np.concatenate(found), wanted)


@slow
def test_roll_backs_and_copies(path: Path) -> None:
    """A sequence goes on as if nothing had happened: after a roll-back, or after its states were saved and loaded."""
    wanted = reference(path)
    with Session.open(config(path, n_ubatch=32, n_batch=32)) as session:

        def go_on(tokens: np.ndarray, first: int, end: int, wanted: np.ndarray) -> None:
            check(session.decode(Batch.single(tokens[first:end], first, logits="all")), wanted[first:end])

        go_on(TOKENS, 0, 91, wanted)
        session.checkpoint(0)
        session.decode(Batch.single(OTHER[:5], 91, logits="all"))
        assert session.truncate(0, 91) == 91
        go_on(TOKENS, 91, 102, wanted)
        saved = session.sequences.save(0, 102)
        assert session.truncate(0, 0) == 0
        go_on(OTHER, 0, 60, reference(path, OTHER))
        session.sequences.load(0, saved)
        go_on(TOKENS, 102, 130, wanted)
        kept = session.truncate(0, 40)
        go_on(TOKENS, kept, 60, wanted)


@slow
def test_sequences_of_one_batch(path: Path) -> None:
    """Two texts share micro-batches, and each computes what it does alone."""
    texts = {0: TOKENS, 1: OTHER}
    wanted = {i: reference(path, text) for i, text in texts.items()}
    with Session.open(config(path, n_ubatch=64, n_batch=64), n_ctx=512, n_seq_max=2) as session:
        for a0, a1, b0, b1 in ((0, 50, 0, 71), (50, 51, 71, 72), (51, 83, 72, 103)):
            parts = ((0, a0, a1), (1, b0, b1))
            tokens = np.concatenate([texts[i][first:end] for i, first, end in parts]).astype(np.int32)
            pos = np.concatenate([np.arange(first, end) for _, first, end in parts]).astype(np.int32)
            seq = np.repeat([0, 1], [a1 - a0, b1 - b0]).astype(np.int32)
            found = np.array(session.decode(Batch(tokens, pos, seq, np.ones(len(pos), bool))))
            check(found, np.concatenate([wanted[0][a0:a1], wanted[1][b0:b1]]))


@slow
def test_pages_of_a_shorter_text(path: Path) -> None:
    """Cells of a prefix, saved while the sequence was no longer, serve one that goes on (as prompt caches do)."""
    wanted = reference(path)
    with Session.open(config(path)) as session:
        session.decode(Batch.single(TOKENS[:50]))
        first = session.sequences.read(0, 0, 50)
        session.decode(Batch.single(TOKENS[50:102], 50))
        second, known = session.sequences.read(0, 50, 52), session.sequences.save(0, 102)
        session.clear()
        session.decode(Batch.single(OTHER[:100]))
        session.sequences.load(0, known)
        session.sequences.write(0, 0, first)
        session.sequences.write(0, 50, second)
        check(session.decode(Batch.single(TOKENS[102:130], 102, logits="all")), wanted[102:130])


def test_n_grams_depend_on_the_tokens_since_the_last_end(path: Path) -> None:
    """The first tokens of a text have the n-grams of those behind an end; a longer past makes no difference."""
    first = reference(path, TOKENS[:1])
    file = open_gguf(path)
    hp = HParams.from_gguf(file.metadata, file.tensors, "m")
    assert hp.ngrams is not None
    grams = hp.ngrams.grams
    assert grams.end == END and grams.n_before == 2
    changed = tiny("qwen4exp")
    name = "per_layer_token_embd.weight"
    values, (a, b) = changed.values(name).copy(), (int(TOKENS[0]), END)
    m = [int(x) for x in grams.multipliers]
    two, three = a * m[0] ^ b * m[1], a * m[0] ^ b * m[1] ^ b * m[2]
    rows = [h % s + o for h, s, o in zip((two, two, three, three), grams.sizes, grams.offsets, strict=True)]
    others = np.setdiff1d(np.arange(len(values)), rows)
    values[others] = 0
    changed.set(name, values)
    f32 = GGMLType.F32
    session = ReferenceSession(changed, GraphConfig(n_ctx=64, type_k=f32, type_v=f32, type_index=f32))
    np.testing.assert_array_equal(session.decode(Batch.single(TOKENS[:1], logits="all")), first)
    values[rows[2]] += 1
    changed.set(name, values)
    session = ReferenceSession(changed, GraphConfig(n_ctx=64, type_k=f32, type_v=f32, type_index=f32))
    assert np.abs(session.decode(Batch.single(TOKENS[:1], logits="all")) - first).max() > 1e-3


def test_numbers_of_the_file(path: Path) -> None:
    """Kinds of layers follow from the keys; numbers that do not fit are refused. Files may have no n-grams."""
    file = open_gguf(path)
    hp = HParams.from_gguf(file.metadata, file.tensors, "m")
    assert hp.ngrams is not None and (hp.ngrams.layer, hp.ngrams.n_rows) == (2, 420)
    assert (hp.n_stream, hp.stream_rank, hp.index_top_k) == (4, 32, 24)
    assert [hp.at(il).pool_ratio for il in range(4)] == [0, 4, 0, 4] and hp.index_owners == {1, 3}
    assert taps.derived_shapes(hp)["blk.2.ple_conv1d_spread"] == (10, 256)
    for key, value, why in (
        ("hyper_connection.count", 1, "is 1, outside 2"), ("attention.compress_ratios", [0, 1, 0, 1], "entries of 2"),
        ("ple.layers", [1], "a layer with attention"), ("ple.layers", [0, 2], "supported is one"),
        ("ple.layer_multipliers", np.array([1, 2], np.uint64), "should be 3 whole numbers"),
        ("ple.layer_multipliers", np.array([1, 1 << 62, 3], np.uint64), "whole numbers up to"),
        ("ple.head_offsets", np.array([0, 101, 204, 400], np.uint64), "rows up to 509, but .* has 420"),
        ("ple.conv_kernel", 7, "supported are convolutions over 16 tokens"), ("ple.eos_token_id", 96, "outside"),
    ):  # fmt: skip
        with pytest.raises(IkError, match=why):
            HParams.from_gguf(file.metadata | {f"qwen4exp.{key}": value}, file.tensors, "m")
    without = {k: v for k, v in file.metadata.items() if ".ple." not in k and not k.endswith("compress_ratios")}
    plain, notices = HParams.from_gguf(without, {}, "m.gguf"), list[str]()
    assert plain.ngrams is None and plain.index_top_k == 0
    check_indexer(config(path), plain, (), notices)
    assert notices and "m.gguf has no indexer, with which qwen4exp models are trained" in notices[0]


def test_where_it_does_not_run(path: Path) -> None:
    """Stages pass on one stream, and n-grams need the tokens of a text."""
    file = open_gguf(path)
    hp = HParams.from_gguf(file.metadata, file.tensors, "m.gguf")
    with pytest.raises(UnsupportedError, match="leave out --stages"):
        check_streams(config(path, fleet=replace(config(path).fleet, stages=2)), hp)
    with pytest.raises(UnsupportedError, match="read texts only"):
        check_media(MediaConfig(), hp)


def test_hashing_of_a_checkpoint(tmp_path: Path) -> None:
    """Numbers that the checkpoint has are stored as they are; without them they follow from the configuration."""
    prefix = "model.layers.2.ple.ple_embedding."
    tensors = {f"{prefix}ngram_embedding.shard_{i}.weight": drawn(f"{i}", (4, 16)) for i in (1, 0)}
    given = {
        "layer_multipliers": np.array([(1 << 53) + 1, 3, 5]), "ngram_heads_vocab_sizes": np.array([3, 1, 2, 2]),
        "ngram_heads_offsets": np.array([0, 3, 4, 6]),
    }  # fmt: skip
    keys = CONFIG | {"tie_word_embeddings": True}
    m = build(tmp_path, keys, tensors | {prefix + name: x for name, x in given.items()})
    for name, key in (("layer_multipliers", "layer_multipliers"), ("ngram_heads_vocab_sizes", "head_vocab_sizes")):
        assert m.metadata[f"qwen4exp.ple.{key}"].tolist() == given[name].tolist()
        assert m.metadata[f"qwen4exp.ple.{key}"].dtype == np.uint64
    table = m.tensors["per_layer_token_embd.weight"]
    assert table.shape == (16, 8)
    np.testing.assert_array_equal(
        table.read(m.source, 0, 8), np.concatenate([drawn("0", (4, 16)), drawn("1", (4, 16))])
    )
    computed = build(tmp_path, keys, {})
    assert computed.metadata["qwen4exp.ple.head_vocab_sizes"].tolist() == [101, 103, 107, 109]
    assert computed.metadata["qwen4exp.ple.head_offsets"].tolist() == [0, 101, 204, 311]
    large = {"vocab_size": 248320, "ngram_vocab_size_base": 20_000_000, "heads_per_ngram": 8}  # of Qwen3.8-Flash-Next
    released = build(tmp_path, keys | large, {}).metadata
    assert released["qwen4exp.ple.layer_multipliers"].tolist() == [23703573157769, 20109073645365, 8052911324071]
    assert released["qwen4exp.ple.head_vocab_sizes"].tolist()[::15] == [20000003, 20000171]
    with pytest.raises(FormatError, match="has 1 parts, not 2"):
        build(tmp_path, keys, dict(list(tensors.items())[1:]))
    with pytest.raises(FormatError, match="should be 4 whole numbers of 64 bits"):
        build(tmp_path, keys, {prefix + "layer_multipliers": given["layer_multipliers"]})
    for changes, why in (
        ({"ple_layer_ids": [1, 3]}, "one layer"), ({"output_gate_type": "silu"}, "known is .sigmoid"),
        ({"layer_types": ["full_attention", "other"] * 2}, "linear_attention or one of"),
    ):  # fmt: skip
        with pytest.raises(UnsupportedError, match=why):
            build(tmp_path, keys | changes, {})
