"""Compute what a command asks of its session: cells, sequences, tokens of a step. No other place computes this."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ikcli.engine.plan.bench_cases import batched_tests, bench_tests
from ikcli.models import MediaConfig, Outputs
from ikcli.settings.drafts import HEAD_TYPES
from ikcli.settings.rules import padded_ctx
from ikcli.settings.run import RunConfig

SPARE = 256  # cells of a window layer beside those that are seen and those of a micro-batch
LEAST_CHOICES = 4  # texts of HellaSwag and similar tasks side by side
DEFAULT_WINDOW = 512  # tokens of a window of perplexity and imatrix without -c


@dataclass(frozen=True, slots=True)
class Sizes:
    """The tokens that the cache has room for, the sequences that share it evenly, and the most tokens of a step (0:
    one).

    `outputs`: what is computed for the tokens. `media`: of images among them.
    """

    n_ctx: int
    n_seq: int = 1
    n_step: int = 0
    outputs: Outputs = Outputs.LOGITS
    media: MediaConfig | None = None

    def cells(self, flash_attn: bool) -> int:
        """Return the cells of the cache: padded for the kernels, then to a multiple of the sequences."""
        cells = padded_ctx(self.n_ctx, flash_attn)
        return cells + -cells % self.n_seq


def uses_heads(config: RunConfig) -> bool:
    """Return whether the session must have heads that predict further tokens; otherwise they are not even loaded."""
    if config.command == "perplexity":
        return config.perplexity.mtp
    if config.command == "sweep-bench":
        return config.sweep.mtp
    return any(stage.type in HEAD_TYPES for stage in config.server.spec_type)


def measures_heads(config: RunConfig) -> bool:
    """Return whether the session has heads where the model has some that can run: an importance matrix covers them."""
    plain = config.fleet.stages == 1 and not config.server.only_embeds
    return config.command == "imatrix" and config.imatrix.mtp and plain


def window_cells(window: int, n_ubatch: int, n_ctx: int) -> int:
    """Return the cells of a sequence of n_ctx positions in layers that see `window` of them.

    0 means all cells, where a smaller cache would save nothing.
    """
    cells = -(-(window + n_ubatch + SPARE) // SPARE) * SPARE
    return cells if window > 0 and cells < n_ctx else 0


def session_of(config: RunConfig) -> tuple[RunConfig, Sizes]:
    """Return settings and sizes of the session that the command opens."""
    if config.command == "perplexity" and config.perplexity.scores_choices:
        return choices_session(config)
    if config.command == "perplexity":
        return windows_session(config, config.n_ctx or DEFAULT_WINDOW, config.perplexity.stride)
    if config.command == "imatrix":
        return imatrix_session(config)
    if config.command == "bench":
        return bench_session(config)
    if config.command == "batched-bench":
        return batched_session(config)
    if config.command == "embed":
        return config, Sizes(config.n_ctx or config.n_ubatch, outputs=Outputs.EMBEDDINGS)
    if config.command == "serve" or (config.command in ("plan", "warmup") and config.n_parallel > 1):
        outputs = Outputs.EMBEDDINGS if config.server.only_embeds else Outputs.BOTH  # also when generating
        return config, Sizes(config.n_ctx, config.n_parallel, config.n_parallel, outputs)
    if config.command == "chat":
        return config, Sizes(config.n_ctx, 1, 1)
    return config, Sizes(config.n_ctx, outputs=Outputs.alone(config.server.only_embeds))


def bench_session(config: RunConfig) -> tuple[RunConfig, Sizes]:
    """Size the session for the longest test; every test warms up separately."""
    tests = bench_tests(config)
    n_ctx = max((t.n_cells for t in tests), default=1)
    return replace(config, n_ctx=n_ctx, warmup=False), Sizes(n_ctx, n_step=int(any(t.drafts for t in tests)))


def batched_session(config: RunConfig) -> tuple[RunConfig, Sizes]:
    """Size the session for the test with most cells and the test with most sequences.

    A sequence is at most as long as the longest one of the tests.
    """
    tests = batched_tests(config).fitting
    cells, n_seq = max(t.n_cells for t in tests), max(t.pl for t in tests)
    return replace(config, n_ctx=max(1, *(t.pp + t.tg for t in tests))), Sizes(max(cells, 1), n_seq, n_seq)


def windows_session(config: RunConfig, n_ctx: int, stride: int = 0) -> tuple[RunConfig, Sizes]:
    """Size the session for windows of n_ctx tokens, as many side by side as a batch holds.

    With a stride, one window gets all cells.
    """
    n_seq = max(1, config.n_batch // n_ctx)
    config = replace(config, n_ctx=n_ctx, n_batch=min(config.n_batch, n_seq * n_ctx))
    return config, Sizes(n_seq * n_ctx + stride // 2, 1 if stride else n_seq)


def choices_session(config: RunConfig) -> tuple[RunConfig, Sizes]:
    """Size the session for texts of at most n_ctx tokens: four side by side, or as many as a batch holds."""
    n_ctx = config.n_ctx or DEFAULT_WINDOW
    n_seq = max(LEAST_CHOICES, config.n_batch // n_ctx)
    return replace(config, n_ctx=n_ctx, n_batch=min(config.n_batch, n_seq * n_ctx)), Sizes(n_seq * n_ctx, n_seq)


def imatrix_session(config: RunConfig) -> tuple[RunConfig, Sizes]:
    """Size the session for one window at a time.

    With MLA it uses the mode that multiplies with every matrix of the file.
    """
    n_ctx = config.n_ctx or DEFAULT_WINDOW
    outputs = Outputs.alone(config.server.only_embeds)
    return replace(config, n_ctx=n_ctx, n_batch=min(config.n_batch, n_ctx), mla=1), Sizes(n_ctx, outputs=outputs)
