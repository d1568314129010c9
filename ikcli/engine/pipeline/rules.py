"""What goes together with `--stages`, before anything is opened."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ikcli.engine.pipeline.place import LOCAL, Pipeline
from ikcli.errors import UsageError
from ikcli.settings.run import RunConfig

_PLACEMENT = {
    "n_gpu_layers": "-ngl", "override_tensor": "-ot", "tensor_split": "-ts", "device": "-dev", "fit": "--fit",
    "cpu_moe": "--cpu-moe", "n_cpu_moe": "--n-cpu-moe", "n_cpu_ffn": "--n-cpu-ffn", "no_kv_offload": "-nkvo",
}  # fmt: skip
_UNITS = {
    "fleet.workers": "--workers", "fleet.ray_workers": "--ray-workers", "fleet.journal": "--journal",
    "fleet.ray_node": "--ray-node", "server.replicas": "--replicas", "bench.compare": "--compare",
}  # fmt: skip
_WHOLE = ("sweep-bench", "batched-bench", "chat", "plan", "warmup")  # work that is not divided otherwise
_COMMANDS = ("perplexity", "sweep-bench", "bench", "batched-bench", "chat", "serve", "plan", "warmup")


def check_stages(config: RunConfig, given: Collection[str] = (), pipeline: Pipeline = LOCAL) -> RunConfig:
    """Settings of a run in stages, which computes on CPUs; UsageError for what cannot be done so."""
    fleet = config.fleet
    if fleet.stages == 1:
        if fleet.stage_split:
            raise UsageError("--stage-split is about --stages N; add it")
        if fleet.ray is not None and config.command in _WHOLE:
            raise UsageError(f"--ray is for a model over several machines here: add --stages N to ik {config.command}")
        return config
    if config.command not in _COMMANDS:
        raise UsageError(f"ik {config.command} cannot be used with --stages: it looks into the layers of one process")
    units = [option for name, option in _UNITS.items() if name in given]
    if units:
        raise UsageError(f"--stages divides the model, {units[0]} is about dividing the work; use one of them")
    for name, switch in (("profile", "--profile"), ("self_test", "--self-test")):
        if getattr(config, name):
            raise UsageError(f"{switch} cannot be used with --stages: it looks into the layers of one process")
    wrong = [option for name, option in _PLACEMENT.items() if name in given and getattr(config, name)]
    if wrong:
        raise UsageError(f"{wrong[0]} cannot be used with --stages, which compute on CPUs; leave one of them out")
    if fleet.ray not in (None, "local") and not fleet.stage_split:
        fleet = replace(fleet, stage_split=pipeline.shares(fleet))
    return replace(config, n_gpu_layers=0, fleet=fleet)
