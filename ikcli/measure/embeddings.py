"""Compute embedding vectors of texts, for `ik embed`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ikcli.engine.plan.planner import Planner
from ikcli.engine.run.embedder import embed
from ikcli.engine.run.opening import open_session
from ikcli.engine.run.pooling import Pooling, pooling_of
from ikcli.errors import IkError, UsageError
from ikcli.models import Outputs
from ikcli.settings.run import RunConfig
from ikcli.tokenizer import Tokenizer

FloatRows = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TextVectors:
    """`rows` holds one vector per text; without pooling one row per token, with rank the scores of the labels."""

    pooling: Pooling
    rows: tuple[FloatRows, ...]
    n_tokens: int
    seconds: float

    @property
    def all_rows(self) -> FloatRows:
        """The rows of all texts, concatenated."""
        return np.concatenate(self.rows)


def split_texts(text: str, separator: str) -> list[str]:
    """Split at separators; UsageError for a text that is empty."""
    if not separator:
        return [text]
    texts = text.split(separator)
    if len(texts) > 1 and not texts[-1].strip():  # the end of the last line
        texts.pop()
    empty = [i for i, part in enumerate(texts) if not part]
    if empty:
        raise UsageError(f"text {empty[0] + 1} of {len(texts)} is empty; separate texts once, or with --embd-separator")
    return texts


def measure(config: RunConfig, texts: Sequence[str], planner: Planner) -> TextVectors:
    """Open the model with as much context as the longest text needs (or -c), and embed the texts."""
    pooling = pooling_of(config.embed.pooling, planner.file.metadata, planner.hp.arch, Pooling.NONE)
    source = str(planner.file.paths[0])
    tokenizer = Tokenizer.from_metadata(planner.file.metadata, source)
    tokens = [tokenizer.encode(text) for text in texts]
    for i, ids in enumerate(tokens):
        if not ids:
            raise IkError(f"text {i + 1} of {len(texts)} has no tokens, and the model adds none")
        if config.n_ctx and len(ids) > config.n_ctx:
            raise UsageError(f"text {i + 1} has {len(ids)} tokens, more than -c {config.n_ctx}; raise -c")
        if 0 < planner.hp.n_positions < len(ids):
            most = planner.hp.n_positions
            raise UsageError(f"text {i + 1} has {len(ids)} tokens, and the model reads {most} at most; shorten it")
    shared = min(config.n_ubatch, planner.hp.n_ctx_train)
    config = replace(config, n_ctx=config.n_ctx or max(shared, *map(len, tokens)))
    with open_session(config, outputs=Outputs.EMBEDDINGS, planner=planner) as session:
        start = time.perf_counter()
        rows = embed(session, tokens, pooling, config.embed.normalize)
        seconds = time.perf_counter() - start
    return TextVectors(pooling, tuple(rows), sum(map(len, tokens)), seconds)
