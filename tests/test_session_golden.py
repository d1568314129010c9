"""A session against golden data of ik_llama.cpp: divergences in every mode, and a perplexity."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from test_session import config

from ikcli.engine.run.session import Session
from ikcli.measure.kl_divergence import KlParams
from ikcli.measure.kl_divergence import run as run_kl
from ikcli.measure.kld_file import BaseReader
from ikcli.measure.perplexity import PerplexityParams
from ikcli.measure.perplexity import run as run_perplexity
from ikcli.measure.text import tokenize
from ikcli.settings.run import PerplexityConfig, RunConfig

Array = npt.NDArray[Any]
PLAIN = ["stories260K-d256.f32", "tiny-llama.f16", "tiny-qwen3.f16", "tiny-qwen3moe.f16"]
MLA = ["tiny-deepseek2.f16", "tiny-deepseek2-mainline.f16", "tiny-deepseek3.f16"]
GOLDEN = [(n, 3, fa) for n in PLAIN for fa in (True, False)] + [
    (n, mla, fa) for n in MLA for mla in range(4) for fa in (True, False)
]
GOLDEN_FAST = [(n, 3, fa) for n in PLAIN + MLA for fa in (True, False)]


def golden_config(folder: Path, name: str, **changes: Any) -> RunConfig:
    return config(folder / f"{name}.gguf", n_threads=2, n_threads_batch=2, **changes)


def divergences(folder: Path, name: str, chunks: int, **changes: Any) -> Array:
    """KL divergence at every scored position."""
    base = BaseReader(folder / f"{name}.kld")
    with Session.open(golden_config(folder, name, n_ctx=base.n_ctx, **changes)) as session:
        return run_kl(session, base, KlParams(n_batch=base.n_ctx, chunks=chunks)).positions.kld


def check_golden(shared: Path, name: str, mla: int, flash: bool, chunks: int) -> None:
    kld = divergences(shared / "golden" / "models", name, chunks, mla=mla, flash_attn=flash)
    assert np.median(kld) <= 5e-6
    assert np.percentile(kld, 99) <= (1e-4 if name.startswith("stories") else 5e-5)


@pytest.mark.parametrize(("name", "mla", "flash"), GOLDEN_FAST)
def test_golden_first_chunk(shared_dir: Path, name: str, mla: int, flash: bool) -> None:
    check_golden(shared_dir, name, mla, flash, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mla", "flash"), GOLDEN)
def test_golden_all_chunks(shared_dir: Path, name: str, mla: int, flash: bool) -> None:
    check_golden(shared_dir, name, mla, flash, -1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mla"), [(n, None) for n in PLAIN] + [(n, mla) for n in MLA for mla in range(4)])
def test_golden_with_q8_0_cache(shared_dir: Path, name: str, mla: int | None) -> None:
    """No more loss from the cache type than the reference has in the same mode."""
    expected = json.loads((shared_dir / "golden" / "expected.json").read_text())["kld_of_reference"][name]
    reference = expected["-ctk q8_0 -ctv q8_0" if mla is None else f"-mla {mla} -ctk q8_0"]
    kld = divergences(shared_dir / "golden" / "models", name, -1, mla=mla or 0, type_k="q8_0", type_v="q8_0")
    assert np.median(kld) <= 1.5 * reference["median"]
    assert kld.mean() <= 2 * reference["mean"]


@pytest.mark.slow
def test_perplexity_of_the_story_model(shared_dir: Path) -> None:
    golden = shared_dir / "golden"
    name = "stories260K-d256.f32"
    with Session.open(replace(golden_config(golden / "models", name), perplexity=PerplexityConfig())) as session:
        text = (golden / "tinystories.txt").read_text(encoding="utf-8")
        result = run_perplexity(session, tokenize(session, text), PerplexityParams(n_batch=512, chunks=8))
    assert result.ppl == pytest.approx(4.205, abs=0.002)
