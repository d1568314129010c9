"""`ik perplexity --mtp` and `ik imatrix` run the heads that predict further tokens along a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import add_heads
from gguf_files import write_model
from tiny_architectures import tiny

from ikcli.engine.run.batch import Batch
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.engine.run.session import Session
from ikcli.gguf.constants import GGMLType
from ikcli.imatrix.matrix import ImatrixParams, Measurer
from ikcli.measure.heads import HeadScores, result_line
from ikcli.measure.perplexity import PerplexityParams, plan, run
from ikcli.models import GraphConfig
from ikcli.settings.measure import ImatrixConfig, PerplexityConfig
from ikcli.settings.run import RunConfig

RUN: dict[str, Any] = {"n_threads": 2, "n_threads_batch": 2, "warmup": False, "type_k": "f32", "type_v": "f32"}
TOKENS = np.random.default_rng(3).integers(0, 96, 80).astype(np.int32)
N = 40


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model = add_heads(tiny("qwen35"))
    return write_model(model, tmp_path / "m.gguf", model.metadata | {"tokenizer.ggml.model": "none"})


def reference(path: Path, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits of the model, and of its head for all positions but the last."""
    cfg = GraphConfig(n_ctx=256, type_k=GGMLType.F32, type_v=GGMLType.F32, n_heads=1)
    session = ReferenceSession(path, cfg)
    logits = session.decode(Batch.single(tokens, logits="all"))
    return logits, session.head(0, Batch.single(tokens[1:], logits="all"), session.states[:-1])


@pytest.mark.parametrize("n_ubatch", [64, 7])
def test_perplexity_of_a_head(n_ubatch: int, path: Path) -> None:
    nll, agreed = [], []
    for row in TOKENS.reshape(2, N):
        model, head = reference(path, row)
        for target in range(N // 2 + 1, N):  # positions that the model is scored for
            x = head[target - 2].astype(np.float64)
            nll.append(np.log(np.exp(x - x.max()).sum()) + x.max() - x[row[target]])
            agreed.append(x.argmax() == model[target - 1].argmax())
    config = RunConfig(
        model=path, command="perplexity", perplexity=PerplexityConfig(mtp=True), n_ctx=2 * N, n_ubatch=n_ubatch, **RUN
    )
    params = PerplexityParams(n_ctx=N, n_batch=2 * N)
    with Session.open(config, n_seq_max=2) as session:
        assert session.heads is not None
        windows = plan(TOKENS, params, None)
        scores = HeadScores(session.heads, windows)
        with_heads = run(session, TOKENS, params, watcher=scores)
        (found,) = scores.results()
    assert found.n == len(nll) == with_heads.n_tokens
    assert found.ppl == pytest.approx(np.exp(np.mean(nll)), rel=1e-4)
    assert found.accepted == pytest.approx(np.mean(agreed))
    assert result_line(found).startswith("MTP head 1: PPL = ")
    with Session.open(RunConfig(model=path, n_ctx=2 * N, n_ubatch=n_ubatch, **RUN), n_seq_max=2) as session:
        assert run(session, TOKENS, params).ppl == with_heads.ppl


def test_an_importance_matrix_covers_heads(path: Path) -> None:
    found = {}
    for mtp in (True, False):
        config = RunConfig(model=path, command="imatrix", imatrix=ImatrixConfig(mtp=mtp), n_ctx=N, n_ubatch=16, **RUN)
        with Session.open(config) as session:
            measurer = Measurer(session, ImatrixParams(n_ctx=N), None)
            measurer.window(TOKENS[:N])
            found[mtp] = measurer.take().imatrix(1, N).entries
            measurer.close()
    mine = {name for name in found[True] if name not in found[False]}
    assert all(".nextn." in name or name.startswith("blk.4.") for name in mine)
    block = next(name for name in mine if "eh_proj" in name).split(".")[1]
    assert {f"blk.{block}.{part}.weight" for part in ("nextn.eh_proj", "attn_q", "attn_output")} <= mine
    for name, entry in found[False].items():
        np.testing.assert_array_equal(found[True][name].sums, entry.sums)
    assert found[True][f"blk.{block}.nextn.eh_proj.weight"].counts.tolist() == [N - 2]
