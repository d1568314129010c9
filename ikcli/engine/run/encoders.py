"""Runs of encoders: what they are for, where they are computed, and how long texts can be."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ikcli.engine.plan.devices import Machine
from ikcli.engine.plan.sizes import DEFAULT_WINDOW
from ikcli.errors import UnsupportedError, UsageError
from ikcli.models import HParams
from ikcli.settings.run import RunConfig

COMMANDS = ("embed", "imatrix", "plan", "serve", "warmup")
"""That can do something with a model without a next token."""


def settle(config: RunConfig, hp: HParams, machine: Machine, given: Collection[str], notices: list[str]) -> RunConfig:
    """The settings with which a model is run if it is an encoder, and notices; UnsupportedError if it cannot.

    A text is read at once, so without -ub a micro-batch is as large as a batch. A server only embeds, and one slot is
    enough, as texts of all requests share micro-batches. An importance matrix comes without perplexity.
    """
    if hp.causal:
        return config
    if config.command not in COMMANDS:
        raise hp.no_next_token()
    if config.fleet.stages > 1 or (config.command == "imatrix" and config.fleet.wanted):
        options = "--stages" if config.fleet.stages > 1 else "--workers, --ray and --journal"
        raise UnsupportedError(f"{hp.source}: {hp.arch} models are computed by one process; leave out {options}")
    if config.command == "imatrix":
        n_ctx = config.n_ctx or min(DEFAULT_WINDOW, hp.n_ctx_train)
        if hp.n_positions and n_ctx > hp.n_positions:
            raise UsageError(f"{hp.source}: -c {n_ctx}: the model reads {hp.n_positions} tokens at most")
        config = replace(config, n_ctx=n_ctx, imatrix=replace(config.imatrix, ppl=False))
    if machine.gpus:
        if config.n_gpu_layers:
            raise UnsupportedError(f"{hp.source}: {hp.arch} models are computed on the CPU; use -ngl 0")
        if config.n_gpu_layers is None:
            notices.append(f"{hp.arch} models are computed on the CPU")
        if config.fit:
            notices.append("--fit has no effect: nothing goes to a GPU")
        config = replace(config, n_gpu_layers=0, fit=False)
    if "n_ubatch" not in given:
        config = replace(config, n_ubatch=max(config.n_ubatch, config.n_batch))
    config = replace(config, n_batch=max(config.n_ubatch, config.n_batch))
    if config.n_parallel > 1:
        notices.append(f"-np {config.n_parallel} has no effect: texts of all requests share micro-batches")
    server = config.server if config.server.reranking else replace(config.server, embeddings=True)
    return replace(config, server=server, n_parallel=1)


def longest_text(hp: HParams, n_ctx: int, n_ubatch: int) -> int:
    """Return the most tokens of a text: encoders read it in one micro-batch, and know only so many positions."""
    return n_ctx if hp.causal else min(n_ctx, n_ubatch, hp.n_positions or n_ctx)


def way_out(hp: HParams, n_ctx: int, n_ubatch: int) -> str:
    """Return what to do about a text that is longer."""
    if hp.causal:
        return "raise -c"
    return "shorten it" if longest_text(hp, n_ctx, n_ubatch) == hp.n_positions else "shorten it, or raise -c and -ub"
