"""Activation covariances from random tokens instead of a text (`--covariance self`): they need no data.

The correlations within the input of a matrix are mostly determined by the weights before it. Covariances from tokens
drawn uniformly from the vocabulary serve GPTQ/LDLQ error feedback nearly as well as those from a text. Only the mean
squares, which matter most, are better taken from a text, with an importance matrix.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from ikcli.engine.plan.missing_parts import assume_missing
from ikcli.engine.plan.placement import CPU
from ikcli.engine.plan.planner import Planner
from ikcli.engine.plan.sizes import DEFAULT_WINDOW, imatrix_session
from ikcli.engine.run.opening import open_session
from ikcli.errors import IkError
from ikcli.imatrix.collect import watch
from ikcli.imatrix.matrix import ChunkDone, collect, params_of
from ikcli.log import log, progress
from ikcli.measure.protocol import TokenIds
from ikcli.quant.covariance_file import RANDOM_TOKENS, write_covariance
from ikcli.quant.imatrix_file import Imatrix
from ikcli.settings.run import ImatrixConfig, RunConfig
from ikcli.tokenizer.tokenizer import Tokenizer
from ikcli.tokenizer.vocab import Attr

_OUTPUT = "output.weight"
_PLENTY = 1 << 20  # rows, as if every expert saw some


def random_tokens(tokenizer: Tokenizer, n: int) -> TokenIds:
    """Draw n ids (int32) uniformly from the normal tokens of a vocabulary, the same ones every time."""
    vocab = tokenizer.vocab
    normal = np.flatnonzero([a & Attr.NORMAL != 0 for a in vocab.attrs]).astype(np.int32)
    if not len(normal):
        raise IkError(f"{vocab.source}: the vocabulary has no normal token to draw from; use a text")
    return np.random.default_rng(0).choice(normal, n)


def _settings(model: Path, out: Path, n_threads: int, overrides: tuple[str, ...]) -> RunConfig:
    return RunConfig(
        model=model,
        command="imatrix",
        n_threads=n_threads,
        n_threads_batch=n_threads,
        override_kv=overrides,
        warmup=False,
        imatrix=ImatrixConfig(covariance=out, ppl=False, process_output=True, output_tensor_name=_OUTPUT),
    )


def planned(model: Path, overrides: tuple[str, ...]) -> tuple[int, Imatrix]:
    """Return what `write_self_covariance` would need and cover, without reading weights; raise its errors.

    Memory is in bytes, covariances excluded; the matrix has the entries to come, all of them 1.
    """
    config, sizes = imatrix_session(_settings(model, model, 1, overrides))
    planner = Planner.of_file(config, header_only=True)
    assume_missing(planner.file, planner.hp)
    prepared = planner.prepare(config, sizes)
    collector = watch([graph for graph, _ in prepared.graphs.values()], output_name=_OUTPUT)
    for stream in collector.all_streams():
        stream.sums.fill(_PLENTY)
        stream.counts.fill(_PLENTY)
    imatrix = collector.take().imatrix(0, DEFAULT_WINDOW, (RANDOM_TOKENS,))
    return prepared.plan.memory.total(CPU), replace(imatrix, path="--covariance self")


def write_self_covariance(model: Path, out: Path, n_tokens: int, n_threads: int, overrides: tuple[str, ...]) -> None:
    """Run a model on random tokens on the CPU and write the covariances of its inputs to `out`.

    UnsupportedError if the architecture does not run, IkError if the model or its covariances do not fit into memory.
    """
    config = _settings(model, out, n_threads, overrides)
    settings, sizes = imatrix_session(config)
    n_chunk = -(-n_tokens // DEFAULT_WINDOW)
    started = time.monotonic()
    with closing(open_session(settings, n_ctx=sizes.n_ctx)) as session:
        tokens = random_tokens(session.tokenizer, n_chunk * DEFAULT_WINDOW)
        with progress("second moments of random tokens", n_chunk) as advance:

            def done(chunk: ChunkDone) -> None:
                advance(1)

            result = collect(session, tokens, params_of(config), on_chunk=done)
    write_covariance(out, result.moments, n_chunks=n_chunk, datasets=(RANDOM_TOKENS,))
    log(
        f"covariance: second moments of {len(result.moments)} inputs from {n_chunk * DEFAULT_WINDOW} random tokens in "
        f"{time.monotonic() - started:.1f} s"
    )
