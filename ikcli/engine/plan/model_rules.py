"""Rules between options and the model they apply to."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ikcli.engine.plan.devices import Machine
from ikcli.engine.plan.sizes import DEFAULT_WINDOW
from ikcli.errors import UnsupportedError, UsageError
from ikcli.models import HParams
from ikcli.settings.drafts import HEAD_TYPES
from ikcli.settings.run import RunConfig

_WITHOUT_NEXT_TOKEN = ("embed", "imatrix", "plan", "serve", "warmup")
"""The commands that can use a model without next-token prediction."""


def settle_encoder(
    config: RunConfig, hp: HParams, machine: Machine, given: Collection[str], notices: list[str]
) -> RunConfig:
    """Return the settings for running an encoder, and add notices; raise UnsupportedError if a command cannot run one.

    An encoder reads a text in one micro-batch, so without -ub a micro-batch is as large as a batch. A server only
    embeds, and one slot is enough, as texts of all requests share micro-batches. An importance matrix is collected
    without perplexity.
    """
    if hp.causal:
        return config
    if config.command not in _WITHOUT_NEXT_TOKEN:
        raise hp.no_next_token()
    if config.fleet.stages > 1 or (config.command == "imatrix" and config.fleet.wanted):
        options = "--stages" if config.fleet.stages > 1 else "--workers, --ray and --journal"
        raise UnsupportedError(f"{hp.source}: {hp.arch} models are computed by one process; leave out {options}")
    if config.command == "imatrix":
        n_ctx = config.n_ctx or min(DEFAULT_WINDOW, hp.n_ctx_train)
        if hp.n_positions and n_ctx > hp.n_positions:
            raise UsageError(f"{hp.source}: -c {n_ctx}: the model reads {hp.n_positions} tokens at most")
        config = replace(config, n_ctx=n_ctx, imatrix=replace(config.imatrix, ppl=False))
    config = _large_batches(_on_cpu(config, hp, machine, notices), given)
    if config.n_parallel > 1:
        notices.append(f"-np {config.n_parallel} has no effect: texts of all requests share micro-batches")
    server = config.server if config.server.reranking else replace(config.server, embeddings=True)
    return replace(config, server=server, n_parallel=1)


def settle_encoder_decoder(
    config: RunConfig, hp: HParams, machine: Machine, given: Collection[str], notices: list[str]
) -> RunConfig:
    """Return the settings for running an encoder beside a decoder; raise UnsupportedError for what it cannot do.

    A text is encoded in one micro-batch, as by an encoder alone. What a slot holds cannot be part of another text.
    """
    if not hp.n_layer_dec:
        return config
    server = config.server
    stages = [stage.type for stage in server.spec_type if stage.type in HEAD_TYPES]
    refused = {
        "are computed by one process; leave out --stages": config.fleet.stages > 1,
        "have no embeddings; `ik convert` a checkpoint of the class T5EncoderModel for that": (
            config.command == "embed" or server.only_embeds
        ),
        f"run without a draft model and heads; leave out {'-md' if server.model_draft else '--spec-type'}": (
            server.model_draft is not None or bool(stages)
        ),
        "have no prompt cache; leave out --cache-disk": server.cache_disk is not None,
    }
    for text, holds in refused.items():
        if holds:
            raise UnsupportedError(f"{hp.source}: {hp.arch} models {text}")
    config = _large_batches(_on_cpu(config, hp, machine, notices), given)
    server = replace(server, cache_ram=0, cache_prompt=False, context_shift=False)
    return replace(config, server=server)


def check_streams(config: RunConfig, hp: HParams) -> None:
    """Raise UnsupportedError for stages of a model with streams of a residual: stages pass on one stream."""
    if hp.n_stream and config.fleet.stages > 1:
        raise UnsupportedError(f"{hp.source}: {hp.arch} models are computed by one process; leave out --stages")


def _on_cpu(config: RunConfig, hp: HParams, machine: Machine, notices: list[str]) -> RunConfig:
    """Return the settings without GPUs; raise UnsupportedError if the user asked for some."""
    if not machine.gpus:
        return config
    if config.n_gpu_layers:
        raise UnsupportedError(f"{hp.source}: {hp.arch} models are computed on the CPU; use -ngl 0")
    if config.n_gpu_layers is None:
        notices.append(f"{hp.arch} models are computed on the CPU")
    if config.fit:
        notices.append("--fit has no effect: nothing goes to a GPU")
    return replace(config, n_gpu_layers=0, fit=False)


def _large_batches(config: RunConfig, given: Collection[str]) -> RunConfig:
    """Return the settings with micro-batches as large as batches, unless the user said otherwise."""
    if "n_ubatch" not in given:
        config = replace(config, n_ubatch=max(config.n_ubatch, config.n_batch))
    return replace(config, n_batch=max(config.n_ubatch, config.n_batch))


def settle_mla(config: RunConfig, hp: HParams, given: Collection[str], notices: list[str]) -> RunConfig:
    """Turn `-mla` off for models without latent attention; add notices on options without effect."""
    if hp.kv_lora_rank:
        if config.v_hadamard and config.mla:
            notices.append(f"-vhad has no effect with -mla {config.mla}, which keeps no V cache of heads; use -khad")
        return config
    if "mla" in given and config.mla:
        notices.append(f"-mla {config.mla} is ignored: {hp.arch} models have no multi-head latent attention")
    return replace(config, mla=0)


INDEXED = ("deepseek32", "dots3note", "glm-dsa", "hy_v4", "minimax-m3", "openpangu", "qwen4exp")
"""Architectures with an indexer, which a file may lack."""
_INDEXER_OPTIONS = {"dsa": "--dsa", "dsa_top_k": "-dsatk", "type_index": "-ictk"}


def check_indexer(config: RunConfig, hp: HParams, given: Collection[str], notices: list[str]) -> None:
    """Add notices on options of sparse attention without effect, and on a file without its indexer.

    Raises UnsupportedError for stages of a model whose layers share chosen positions.
    """
    if not hp.index_top_k:
        lacking = "the model has" if hp.arch in INDEXED else f"{hp.arch} models have"
        notices += [
            f"{option} has no effect: {lacking} no indexer"
            for field, option in _INDEXER_OPTIONS.items()
            if field in given
        ]
        if hp.arch in INDEXED:
            notices.append(
                f"attention covers all positions: {hp.source} has no indexer, with which {hp.arch} models are "
                "trained; convert the checkpoint again to keep it"
            )
        return
    alone = hp.index_block or hp.arch == "dots3note"  # layers choose for themselves
    if config.dsa and config.fleet.stages > 1 and len(hp.index_owners) < hp.n_layer and not alone:
        raise UnsupportedError(
            f"{hp.source}: layers share the positions that they attend to, and cannot be divided by --stages; use "
            "--no-dsa to attend to all positions"
        )


def check_ser(
    config: RunConfig, n_expert: int, n_expert_used: int, gating: str = "softmax"
) -> tuple[RunConfig, list[str]]:
    """Drop a `-ser` that changes nothing, with a warning that gives the number of experts in use."""
    if config.ser is not None and gating == "sparsemixer":
        raise UsageError("-ser: the model weighs each expert by itself, so that none can be left out; omit it")
    if config.ser is None or (n_expert and config.ser[0] < n_expert_used):
        return config, []
    why = (
        f"each token uses all {n_expert_used} experts that the model chooses"
        if n_expert
        else "the model has no experts"
    )
    return replace(config, ser=None), [f"-ser {config.ser[0]},{config.ser[1]:g} has no effect: {why}"]
