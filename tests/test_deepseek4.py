"""DeepSeek V4: sessions against NumPy, caches of entries through roll-backs and copies, keys, where it runs.

Logits of torch are in `test_convert_answers.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deepseek4_model import tiny_deepseek4
from gguf_files import write_model

from ikcli.engine.plan.model_rules import check_streams
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.engine.run.session import Session
from ikcli.errors import FormatError, UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.graph.core import Rows, RowSpec
from ikcli.graph.ops_streams import StreamWeights
from ikcli.models import GraphConfig, HParams
from ikcli.settings.run import RunConfig

TOKENS = np.random.default_rng(3).integers(0, 96, 200)
slow = pytest.mark.slow("compiles the kernels of entries and of streams")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tiny_deepseek4(), tmp_path_factory.mktemp("models") / "tiny.gguf")


def config(path: Path, **changes: Any) -> RunConfig:
    settings = {"n_threads": 2, "n_threads_batch": 2, "type_k": "f32", "type_v": "f32", "type_index": "f32"}
    return RunConfig(model=path, n_ctx=256, warmup=False, **(settings | changes))


def reference(path: Path, tokens: np.ndarray = TOKENS, **changes: Any) -> np.ndarray:
    f32 = GGMLType.F32
    cfg = GraphConfig(n_ctx=256, type_k=f32, type_v=f32, type_index=f32, **changes)
    return ReferenceSession(path, cfg).decode(Batch.single(tokens, logits="all"))


@slow
def test_prompts_and_single_tokens(path: Path) -> None:
    """Prompts of one and of several micro-batches, then single tokens, with and without the choice of entries."""
    sparse, dense = reference(path), reference(path, index_top_k=0)
    assert np.abs(sparse - dense)[60:].max() > 0.1 > 1e-3 > np.abs(sparse - dense)[:24].max()
    for changes, wanted in (
        ({}, sparse), ({"n_ubatch": 64, "n_batch": 64}, sparse), ({"k_hadamard": True}, sparse),
        ({"dsa": False}, dense), ({"flash_attn": False}, sparse),
    ):  # fmt: skip
        with Session.open(config(path, **changes)) as session:
            found = [np.array(session.decode(Batch.single(TOKENS[:20], logits="all")))]
            found.append(np.array(session.decode(Batch.single(TOKENS[20:150], 20, logits="all"))))
            found += [np.array(session.decode(Batch.single(TOKENS[i : i + 1], i))) for i in range(150, 200)]
        np.testing.assert_allclose(np.concatenate(found), wanted, atol=1e-3)


@slow
def test_roll_backs_and_copies(path: Path) -> None:
    """A sequence goes on as if nothing had happened: after a roll-back inside an entry, or a copy."""
    wanted, other = reference(path), np.random.default_rng(5).integers(0, 96, 200)
    with Session.open(config(path, n_ubatch=64, n_batch=64)) as session:

        def check(tokens: np.ndarray, first: int, end: int, wanted: np.ndarray) -> None:
            found = np.array(session.decode(Batch.single(tokens[first:end], first, logits="all")))
            np.testing.assert_allclose(found, wanted[first:end], atol=1e-3)

        check(TOKENS, 0, 130, wanted)
        session.decode(Batch.single(other[:5], 130, logits="all"))
        kept = session.truncate(0, 130)
        check(TOKENS, kept, 150, wanted)
        saved = session.sequences.save(0, 150)
        assert session.truncate(0, 0) == 0
        check(other, 0, 60, reference(path, other))
        session.sequences.load(0, saved)
        check(TOKENS, 150, 170, wanted)
        kept = session.truncate(0, 40)
        check(TOKENS, kept, 60, wanted)


@slow
def test_sequences_of_one_batch(path: Path) -> None:
    """Two texts share micro-batches, and each computes what it does alone."""
    other = np.random.default_rng(5).integers(0, 96, 200)
    with Session.open(config(path, n_ubatch=64, n_batch=64), n_ctx=512, n_seq_max=2) as session:
        parts = [(TOKENS, 0, 50, 0), (other, 0, 71, 1), (other, 71, 103, 1), (TOKENS, 50, 81, 0)]
        for (a, a0, a1, i), (b, b0, b1, j) in (parts[:2], parts[2:]):
            tokens, pos = np.concatenate([a[a0:a1], b[b0:b1]]), np.concatenate([np.arange(a0, a1), np.arange(b0, b1)])
            seq = np.repeat([i, j], [a1 - a0, b1 - b0])
            batch = Batch(tokens.astype(np.int32), pos.astype(np.int32), seq.astype(np.int32), np.ones(len(pos), bool))
            found = np.array(session.decode(batch))
            np.testing.assert_allclose(found[: a1 - a0], reference(path, a)[a0:a1], atol=1e-3)
            np.testing.assert_allclose(found[a1 - a0 :], reference(path, b)[b0:b1], atol=1e-3)


@slow
def test_pages_of_a_shorter_text(path: Path) -> None:
    """Cells of a prefix, saved while the sequence was no longer, serve one that goes on (as prompt caches do)."""
    wanted = reference(path)
    with Session.open(config(path)) as session:
        session.decode(Batch.single(TOKENS[:50]))
        first = session.sequences.read(0, 0, 50)
        session.decode(Batch.single(TOKENS[50:100], 50))
        second, known = session.sequences.read(0, 50, 50), session.sequences.save(0, 100)
        session.clear()
        session.decode(Batch.single(TOKENS[::-1][:100]))
        session.sequences.load(0, known)
        session.sequences.write(0, 0, first)
        session.sequences.write(0, 50, second)
        found = np.array(session.decode(Batch.single(TOKENS[100:130], 100, logits="all")))
    np.testing.assert_allclose(found, wanted[100:130], atol=1e-3)


def test_weights_of_streams() -> None:
    """Rows and columns of the mixture sum up to 1; without projections all streams go on alike."""

    class Run:
        dtype = np.float64

        def __init__(self, x: np.ndarray) -> None:
            self.x = x

        def value(self, node: Any) -> np.ndarray:
            return self.x

        def weight(self, w: Any) -> np.ndarray:
            return np.ones(w.shape[0]) * (w.shape[0] == 3)

    class Projection:
        rows, cols = RowSpec(Rows.TOKENS), 24

    class Numbers:
        def __init__(self, n: int) -> None:
            self.shape = (n,)

    def weights(x: np.ndarray) -> np.ndarray:
        op = StreamWeights(Projection(), Numbers(3), Numbers(24), 4, 20, 1e-6)  # type: ignore[arg-type]
        return op.compute(Run(x))  # type: ignore[arg-type]

    mixing = weights(np.random.default_rng(0).standard_normal((5, 24)))[:, 8:].reshape(5, 4, 4)
    np.testing.assert_allclose(mixing.sum(axis=1), 1, atol=1e-4)
    np.testing.assert_allclose(mixing.sum(axis=2), 1, atol=1e-4)
    np.testing.assert_allclose(weights(np.zeros((1, 24)))[0], [0.5] * 4 + [1] * 4 + [0.25] * 16, atol=1e-5)


def test_numbers_of_the_file(path: Path) -> None:
    """Kinds of layers follow from the keys, or from the tensors; numbers that do not fit are refused."""
    file = open_gguf(path)
    hp = HParams.from_gguf(file.metadata, file.tensors, "m")
    assert [hp.at(il).pool_ratio for il in range(4)] == [0, 4, 8, 4] and hp.index_owners == {1, 3}
    assert hp.index_top_k == 24 and hp.at(0).rope.freq_base == 10000 and hp.at(2).rope.freq_base == 160000
    ratios, window = "deepseek4.attention.compress_ratios", {"deepseek4.attention.sliding_window": 128}
    without = {k: v for k, v in file.metadata.items() if k != ratios} | window
    found = HParams.from_gguf(without, file.tensors, "m")
    assert [found.at(il).pool_ratio for il in range(4)] == [0, 4, 128, 4]
    for key, value, why in (
        ("attention.sliding_window", 7, "fewer positions than become one entry"),
        ("attention.output_group_count", 3, "does not divide 4 heads"),
        ("attention.head_count_kv", 2, "one row, both key and value"),
        ("attention.compress_ratios", np.array([0, 4, -1, 4]), "numbers of positions"),
    ):
        with pytest.raises(FormatError, match=why):
            HParams.from_gguf(file.metadata | {f"deepseek4.{key}": value}, file.tensors, "m")


def test_stages(path: Path) -> None:
    """Stages pass on one stream."""
    file = open_gguf(path)
    hp = HParams.from_gguf(file.metadata, file.tensors, "m.gguf")
    check_streams(config(path, n_gpu_layers=2), hp)
    with pytest.raises(UnsupportedError, match="leave out --stages"):
        check_streams(config(path, fleet=replace(config(path).fleet, stages=2)), hp)
