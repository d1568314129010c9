"""What a command asks of its session: cells, sequences, tokens of a step. The one place where this is computed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ikcli.config import RunConfig, padded_ctx

DEFAULT_WINDOW = 512  # tokens of a window of perplexity and imatrix without -c


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens that the cache has room for, the sequences that share it evenly, most tokens of a step (0: one)."""

    n_ctx: int
    n_seq: int = 1
    n_step: int = 0

    def cells(self, flash_attn: bool) -> int:
        """Cells of the cache: padded for the kernels, then to a multiple of the sequences."""
        cells = padded_ctx(self.n_ctx, flash_attn)
        return cells + -cells % self.n_seq


def session_of(config: RunConfig) -> tuple[RunConfig, Sizes]:
    """Settings and sizes of the session that the command opens."""
    if config.command == "perplexity":
        return windows_session(config, config.n_ctx or DEFAULT_WINDOW, config.perplexity.stride)
    if config.command == "imatrix":
        return imatrix_session(config)
    if config.command == "serve" or config.n_parallel > 1:
        return config, Sizes(config.n_ctx, config.n_parallel, config.n_parallel)
    return config, Sizes(config.n_ctx)


def windows_session(config: RunConfig, n_ctx: int, stride: int = 0) -> tuple[RunConfig, Sizes]:
    """For windows of n_ctx tokens, as many side by side as a batch holds; with a stride one gets all the cells."""
    n_seq = max(1, config.n_batch // n_ctx)
    config = replace(config, n_ctx=n_ctx, n_batch=min(config.n_batch, n_seq * n_ctx))
    return config, Sizes(n_seq * n_ctx + stride // 2, 1 if stride else n_seq)


def imatrix_session(config: RunConfig) -> tuple[RunConfig, Sizes]:
    """One window at a time; with MLA in the mode that multiplies with every matrix of the file."""
    n_ctx = config.n_ctx or DEFAULT_WINDOW
    return replace(config, n_ctx=n_ctx, n_batch=min(config.n_batch, n_ctx), mla=1), Sizes(n_ctx)
