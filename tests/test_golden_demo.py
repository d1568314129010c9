"""The bundled model against log-probabilities of ik_llama.cpp: no other file is needed, so every clone checks itself.

`data/demo.kld` was made by its llama-perplexity from the first 3000 bytes of the bundled text: `-c 64 --chunks 2
--kl-divergence-base`, AVX-512 build with bfloat16 products. Both round activations to bfloat16, each in its own places.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikcli.engine.run.batch import Batch
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.engine.run.session import Session
from ikcli.gguf.reader import open_gguf
from ikcli.measure.kl_divergence import KlParams, run
from ikcli.measure.kld_file import BaseReader, split_rows
from ikcli.models import GraphConfig
from ikcli.settings.run import RunConfig, default_model

BASE = Path(__file__).parent / "data" / "demo.kld"
MODES = [(mla, flash) for mla in range(4) for flash in (True, False)]


def check(kld: np.ndarray) -> None:
    assert len(kld) == 62  # of two windows the second halves
    assert np.median(kld) <= 2e-5
    assert kld.max() <= 3e-4


@pytest.mark.parametrize(("mla", "flash"), MODES)
def test_cpu(mla: int, flash: bool) -> None:
    config = RunConfig(
        command="perplexity", model=default_model(), n_ctx=64, n_batch=64, n_threads=2, warmup=False,
        mla=mla, flash_attn=flash,
    )  # fmt: skip
    with Session.open(config) as session:
        check(run(session, BaseReader(BASE), KlParams(n_batch=64)).positions.kld)


@pytest.mark.parametrize(("mla", "flash"), [(0, False), (1, True), (3, True)])
def test_numpy_reference(mla: int, flash: bool) -> None:
    base, file = BaseReader(BASE), open_gguf(default_model())
    session = ReferenceSession(file, GraphConfig(mla=mla, flash_attn=flash))
    found: list[Any] = []
    for chunk in range(base.n_chunk):
        tokens = base.tokens[chunk].copy()
        tokens[0] = file.metadata["tokenizer.ggml.bos_token_id"]
        session.clear()
        logits = session.decode(Batch.single(tokens, logits="all"))[32:-1].astype(np.float64)
        scale, minimum, q = split_rows(base.rows(chunk), logits.shape[1])
        expected = q * scale[:, None].astype(np.float64) + minimum[:, None]
        log_q = logits - np.logaddexp.reduce(logits, axis=1)[:, None]
        found.append((np.exp(expected) * (expected - log_q)).sum(axis=1))
    check(np.concatenate(found))
