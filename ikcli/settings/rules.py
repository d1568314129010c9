"""Rules between options that need no model: defaults, limits and impossible combinations."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ikcli.errors import UsageError
from ikcli.hostinfo import count_physical, physical_cores, visible_cpus
from ikcli.settings.run import RunConfig
from ikcli.settings.thread_curve import best_threads, remembered

_PLACEMENT = {
    "n_gpu_layers": "-ngl", "override_tensor": "-ot", "tensor_split": "-ts", "device": "-dev", "fit": "--fit",
    "cpu_moe": "--cpu-moe", "n_cpu_moe": "--n-cpu-moe", "n_cpu_ffn": "--n-cpu-ffn", "no_kv_offload": "-nkvo",
}  # fmt: skip
_UNITS = {
    "fleet.workers": "--workers", "fleet.ray_workers": "--ray-workers", "fleet.journal": "--journal",
    "fleet.ray_node": "--ray-node", "server.replicas": "--replicas", "bench.compare": "--compare",
}  # fmt: skip
_WHOLE = ("sweep-bench", "batched-bench", "chat", "plan", "warmup")  # work that is not divided otherwise
_STAGED = ("perplexity", "sweep-bench", "bench", "batched-bench", "chat", "serve", "plan", "warmup")
_OF_SEVERAL = ("server.models_autoload", "server.models_max")


def complete(config: RunConfig, given: Collection[str]) -> RunConfig:
    """Fill in defaults that depend on the command or on other options. Raise UsageError for impossible settings.

    `given` holds the options (field paths) that the user wrote.
    """
    if tuple(name.lower() for name in config.device) == ("none",):
        config = replace(config, device=(), n_gpu_layers=0)
    asked = config.n_threads if "n_threads" in given else 0
    cores = asked or default_threads(config.cpus)
    n_threads = asked or generation_threads(cores, config)
    n_batch_threads = config.n_threads_batch if "n_threads_batch" in given else cores
    n_ctx = 512 if config.command in ("perplexity", "imatrix") and "n_ctx" not in given else config.n_ctx
    if config.split_mode not in ("none", "layer"):
        raise UsageError(f"-sm {config.split_mode} is not supported; use -sm layer (whole blocks per GPU) or -sm none")
    if config.fit and config.n_cpu_moe:
        raise UsageError("--fit and --n-cpu-moe exclude each other: --fit decides itself which experts stay on the CPU")
    return replace(config, n_threads=n_threads, n_threads_batch=n_batch_threads or cores, n_ctx=n_ctx)


def default_threads(cpus: frozenset[int]) -> int:
    """Return the number of physical cores among these CPUs or, if empty, among those available to this process."""
    return min(physical_cores(), max(count_physical(visible_cpus() & cpus), 1)) if cpus else physical_cores()


def generation_threads(cores: int, config: RunConfig) -> int:
    """Return the threads that read memory fastest, as far as `ik doctor` measured it, at most `cores`."""
    curve = {} if config.cpus or config.numa else remembered()
    return min(best_threads(curve), cores) if curve else cores


def padded_ctx(n_ctx: int, flash_attn: bool) -> int:
    """Return the KV cells for `n_ctx` tokens: a multiple of 256 with flash attention, of 32 without."""
    step = 256 if flash_attn else 32
    return -(-n_ctx // step) * step


def sequences_per_batch(config: RunConfig) -> int:
    """Return the number of chunks that perplexity and imatrix evaluate side by side: max(1, n_batch/n_ctx)."""
    return max(1, config.n_batch // config.n_ctx) if config.n_ctx > 0 else 1


def resolve(config: RunConfig, n_ctx_train: int = 0) -> tuple[RunConfig, list[str]]:
    """Apply the rules between settings; return the final config and the warnings, one sentence each.

    `n_ctx_train` (from the model file) replaces `-c 0`; without it the context does not limit the batch.
    """
    warnings: list[str] = []
    n_ctx = config.n_ctx or n_ctx_train
    if n_ctx_train and n_ctx > n_ctx_train:
        warnings.append(f"-c {n_ctx} is more than the {n_ctx_train} tokens the model was trained with")
    config = replace(config, n_ctx=n_ctx)
    if n_ctx:
        config = _limit_batch(config)
    if config.n_ubatch > config.n_batch:
        config = replace(config, n_ubatch=config.n_batch)
    if config.n_batch % config.n_ubatch:
        warnings.append(
            f"-ub {config.n_ubatch} does not divide -b {config.n_batch}: the last piece of every batch has only "
            f"{config.n_batch % config.n_ubatch} tokens"
        )
    warnings += _thread_warnings(config) + _mmap_notices(config)
    if (config.run_time_repack or config.hugetlb or config.numa == "mirror") and config.mmap:
        config = replace(config, mmap=False)
    return replace(config, verbose=config.verbose or config.verbosity > 0), warnings


def _limit_batch(config: RunConfig) -> RunConfig:
    cells = config.n_ctx
    if config.command in ("perplexity", "imatrix"):
        cells *= sequences_per_batch(config)
    else:
        cells = padded_ctx(cells, config.flash_attn)
        cells *= max(config.batched.npl) if config.command == "batched-bench" else 1
    return replace(config, n_batch=min(config.n_batch, cells)) if config.n_batch > cells else config


def _thread_warnings(config: RunConfig) -> list[str]:
    cores = physical_cores()
    given = {"-t": config.n_threads, "-tb": config.n_threads_batch}
    over = [f"{name} {count}" for name, count in given.items() if count > cores]
    if not over:
        return []
    return [f"{' and '.join(over)}: more threads than the {cores} physical cores visible here, which is usually slower"]


def _mmap_notices(config: RunConfig) -> list[str]:
    notices: list[str] = []
    if config.run_time_repack and config.mmap:
        notices.append("-rtr rewrites weights while loading, so mmap is off")
    return notices


def check_devices(config: RunConfig) -> None:
    """Raise UsageError for described devices, unless the run only plans."""
    if config.device_spec and not config.only_plans:
        raise UsageError("--device-spec describes devices for planning; add --dry-run, or use ik plan")


def check_stages(config: RunConfig, given: Collection[str] = ()) -> RunConfig:
    """Return the settings of a pipeline-parallel run, which computes on CPUs.

    Raise UsageError for options that do not work with pipeline stages.
    """
    fleet = config.fleet
    if fleet.stages == 1:
        if fleet.stage_split:
            raise UsageError("--stage-split needs --stages N; add it")
        if fleet.ray is not None and config.command in _WHOLE:
            raise UsageError(f"--ray here splits a model over several machines: add --stages N to ik {config.command}")
        return config
    if config.command not in _STAGED:
        raise UsageError(f"ik {config.command} cannot be used with --stages: it needs the layers in one process")
    units = [option for name, option in _UNITS.items() if name in given]
    if units:
        raise UsageError(f"--stages divides the model, {units[0]} divides the work; use one of them")
    for name, switch in (("expert_ram", "--expert-ram"), ("expert_cache", "--expert-cache"),
                         ("prefetch_experts", "--prefetch-experts"),
                         ("profile", "--profile"), ("self_test", "--self-test")):  # fmt: skip
        if getattr(config, name):
            raise UsageError(f"{switch} cannot be used with --stages: it needs the layers in one process")
    if config.numa == "mirror":
        raise UsageError("--numa mirror cannot be used with --stages; bind each stage to a node with numactl")
    wrong = [option for name, option in _PLACEMENT.items() if name in given and getattr(config, name)]
    if wrong:
        raise UsageError(f"{wrong[0]} cannot be used with --stages, which compute on CPUs; leave one of them out")
    return replace(config, n_gpu_layers=0)


def check_server(config: RunConfig, given: Collection[str]) -> list[str]:
    """Return notices about the options of a server of one model. Raise UsageError for conflicts between them."""
    server, fleet = config.server, config.fleet
    if fleet.ray_node and fleet.ray is None:
        raise UsageError("--ray-node names nodes of Ray; add --ray ADDRESS")
    if serves_replicas(config):
        if server.sleep_idle_seconds > 0:
            raise UsageError("--sleep-idle-seconds cannot be used with replicas, which stay loaded; drop it")
        if "," in fleet.ray_node:
            raise UsageError(f"--ray-node {fleet.ray_node}: only ik bench takes several; name one")
        if server.first_slot:
            raise UsageError("--first-slot cannot be used with --replicas, which number their slots themselves")
        return []
    if server.replica_gpus:
        raise UsageError("--replica-gpus is for --replicas; a single server uses the GPUs of CUDA_VISIBLE_DEVICES")
    names = [path.removeprefix("server.").replace("_", "-") for path in _OF_SEVERAL if path in given]
    return [f"--{name} has no effect with one model" for name in names]


def serves_replicas(config: RunConfig) -> bool:
    """Return whether several processes serve the model, here or on a cluster."""
    return config.server.replicas > 1 or (config.fleet.ray is not None and config.fleet.stages == 1)
