"""KL divergence of files made from one model: importance matrix and base probabilities once, then file after file.

Everything runs in this process, so that kernels are loaded once. Used by quants_quality.py and by
benchmarks/divergence.py.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ikcli.engine.run.session import Session
from ikcli.imatrix import matrix as imatrix_eval
from ikcli.measure import kl_divergence, perplexity
from ikcli.measure.kld_file import BaseReader, BaseWriter
from ikcli.measure.protocol import SessionLike, TokenIds
from ikcli.settings.run import RunConfig


@dataclass(frozen=True, slots=True)
class Settings:
    """Tokens per window, threads, and the number of windows to evaluate (-1: all)."""

    n_ctx: int
    n_threads: int
    chunks: int = -1


def halves(text: str) -> tuple[str, str]:
    """Cut the text after the first paragraph that ends past its middle."""
    middle = text.find("\n\n", len(text) // 2) + 2
    return text[:middle], text[middle:]


def _config(model: Path, s: Settings) -> RunConfig:
    return RunConfig(
        command="perplexity",
        model=model,
        n_ctx=s.n_ctx,
        n_threads=s.n_threads,
        n_threads_batch=s.n_threads,
        warmup=False,
    )


def _tokens(session: SessionLike, text: str) -> TokenIds:
    return np.asarray(session.tokenizer.encode(text, add_special=True), dtype=np.int32)


def importance(model: Path, text: str, s: Settings, covariance_limit: int = 0) -> imatrix_eval.ImatrixResult:
    """Collect the importance matrix of the model on the whole text; second moments if a limit (bytes) is given."""
    config = replace(_config(model, s), n_batch=s.n_ctx, mla=1)
    params = imatrix_eval.ImatrixParams(s.n_ctx, ppl=False, n_threads=s.n_threads, covariance_limit=covariance_limit)
    with closing(Session.open(config, n_ctx=s.n_ctx)) as session:
        return imatrix_eval.collect(session, _tokens(session, text), params)


def store_base(model: Path, text: str, path: Path, s: Settings) -> perplexity.PerplexityResult:
    """Evaluate the unchanged model and keep its log-probabilities in `path`."""
    params = perplexity.PerplexityParams(n_ctx=s.n_ctx, chunks=s.chunks, n_threads=s.n_threads)
    with closing(perplexity.open_window_session(_config(model, s), s.n_ctx, params.n_batch)) as session:
        tokens = _tokens(session, text)
        windows = perplexity.plan(tokens, params, perplexity.bos_of(session))
        with BaseWriter(path, windows.tokens, session.n_vocab, s.n_threads) as writer:
            return perplexity.run(session, tokens, params, on_rows=writer.add)


def compare(model: Path, base: BaseReader, s: Settings) -> kl_divergence.KlResult:
    """Return the divergence of a file from the base."""
    params = kl_divergence.KlParams(n_threads=s.n_threads)
    with closing(perplexity.open_window_session(_config(model, s), s.n_ctx, params.n_batch)) as session:
        return kl_divergence.run(session, base, params)
