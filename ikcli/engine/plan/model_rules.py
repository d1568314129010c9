"""Rules between options and the model they apply to."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ikcli.engine.plan.devices import Machine
from ikcli.engine.plan.sizes import DEFAULT_WINDOW
from ikcli.errors import UnsupportedError, UsageError
from ikcli.models import HParams
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


def settle_streams(config: RunConfig, hp: HParams, machine: Machine, notices: list[str]) -> RunConfig:
    """Keep models with streams of a residual on the CPU, with a notice; GPUs have no kernels for them.

    Raises UnsupportedError where the command line wants layers on a GPU, or stages, which pass on one stream.
    """
    if not hp.n_stream:
        return config
    if config.fleet.stages > 1:
        raise UnsupportedError(f"{hp.source}: {hp.arch} models are computed by one process; leave out --stages")
    if not machine.gpus:
        return config
    if config.n_gpu_layers:
        raise UnsupportedError(f"{hp.source}: {hp.arch} models are computed on the CPU; use -ngl 0")
    if config.n_gpu_layers is None:
        notices.append(f"{hp.arch} models are computed on the CPU")
    if config.fit:
        notices.append("--fit has no effect: nothing goes to a GPU")
    return replace(config, n_gpu_layers=0, fit=False)


def settle_mla(config: RunConfig, hp: HParams, given: Collection[str], notices: list[str]) -> RunConfig:
    """Turn `-mla` off for models without latent attention; add notices on options without effect."""
    if hp.kv_lora_rank:
        if config.v_hadamard and config.mla:
            notices.append(f"-vhad has no effect with -mla {config.mla}, which keeps no V cache of heads; use -khad")
        return config
    if "mla" in given and config.mla:
        notices.append(f"-mla {config.mla} is ignored: {hp.arch} models have no multi-head latent attention")
    return replace(config, mla=0)


INDEXED = ("deepseek32", "glm-dsa", "minimax-m3")
"""Architectures with an indexer, which a file may lack."""
_INDEXER_OPTIONS = {"dsa": "--dsa", "dsa_top_k": "-dsatk", "type_index": "-ictk"}


def settle_indexer(
    config: RunConfig, hp: HParams, machine: Machine, given: Collection[str], notices: list[str]
) -> RunConfig:
    """Turn sparse attention off where it cannot run, with a notice that says what changes.

    Raises UnsupportedError for stages of a model whose layers share chosen positions.
    """
    if not hp.index_top_k:
        notices += [
            f"{option} has no effect: {'the model' if hp.arch in INDEXED else f'{hp.arch} models'} "
            f"{'has' if hp.arch in INDEXED else 'have'} no indexer"
            for field, option in _INDEXER_OPTIONS.items()
            if field in given
        ]
        if hp.arch in INDEXED:
            notices.append(
                f"attention covers all positions: {hp.source} has no indexer, with which {hp.arch} models are "
                "trained; convert the checkpoint again to keep it"
            )
        return config
    if not config.dsa:
        return config
    if machine.gpus and config.n_gpu_layers != 0:
        notices.append(
            f"attention covers all positions, as with --no-dsa: GPUs have no kernels for the indexer, which keeps "
            f"{hp.index_top_k} of them; results differ in longer contexts (-ngl 0 runs the model as it was trained)"
        )
        return replace(config, dsa=False)
    if config.fleet.stages > 1 and len(hp.index_owners) < hp.n_layer and not hp.index_block:
        raise UnsupportedError(
            f"{hp.source}: layers share the positions that they attend to, and cannot be divided by --stages; use "
            "--no-dsa to attend to all positions"
        )
    return config


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
