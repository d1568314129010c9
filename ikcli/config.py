"""Every runtime setting of a model run, declared once: field, spellings, value form, help and the commands using it.

`RunConfig` is what all model-running commands receive; options of one command only live in the groups (`sweep`,
`bench`, ...). `resolve()` applies the rules between settings and returns them with its warnings.
"""

# ruff: noqa: E501, RUF009  (one option per line reads as a table; `opt` makes dataclass fields)

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ikcli.config_embed import EmbedConfig
from ikcli.config_fleet import BatchConfig
from ikcli.config_groups import (
    AdapterConfig,
    BatchedBenchConfig,
    BenchConfig,
    ChatConfig,
    ImatrixConfig,
    PerplexityConfig,
    PromptConfig,
    RopeConfig,
    SamplingConfig,
    ServerConfig,
    SweepConfig,
    UpstreamConfig,
)
from ikcli.config_hub import HubConfig
from ikcli.config_values import (
    DeviceSpec,
    parse_cpu_list,
    parse_cpu_mask,
    parse_device_spec,
    parse_devices,
    parse_layers,
    parse_margin,
    parse_numa,
    parse_offload_policy,
    parse_override_kv,
    parse_parallel,
    parse_rules,
    parse_ser,
    parse_split,
    parse_threads,
)
from ikcli.errors import UsageError
from ikcli.hostinfo import physical_cores
from ikcli.options import group, opt

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q8_KV", "q6_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
DATA_DIR = Path(__file__).resolve().parent / "data"


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Settings of one run. Sizes in tokens, `amb` in MiB; 0 for `n_ctx` means the context length of the model."""

    # fmt: off
    command: str = ""
    model: Path | None = opt(None, "-m --model", "path", "GGUF file; of a split model the first shard. Default: the bundled demo model", topic="model", form="FILE", example="-m model.gguf", bench_list=False, env="LLAMA_ARG_MODEL")
    mmap: bool = opt(True, "--mmap -mmp", "optswitch", "map the file into memory instead of reading it; --no-mmap reads it into RAM", topic="model", negative="--no-mmap", example="-mmp 0", env="LLAMA_ARG_MMAP")
    mlock: bool = opt(False, "--mlock", "switch", "lock the weights in RAM (the system limits how much: ulimit -l)", topic="model", example="--mlock", env="LLAMA_ARG_MLOCK")
    thp: bool = opt(False, "-thp --transparent-huge-pages", "optswitch", "ask for transparent huge pages (Linux) for the cache, for buffers, and with --no-mmap or -rtr for weights", topic="model", example="-thp")
    run_time_repack: bool = opt(False, "-rtr --run-time-repack", "optswitch", "repack weights in host memory to interleaved types while loading; turns mmap off. Beside a GPU it costs prompt speed: interleaved types in RAM are not copied to it, so their prompt work stays on the CPU", topic="model", example="-rtr")
    check_tensors: bool = opt(False, "--check-tensors -vq --validate-quants", "switch", "scan the weights for NaN and Inf while loading and name the tensors", topic="model", example="--check-tensors")
    override_kv: tuple[str, ...] = opt((), "-okv --override-kv", "custom", "replace a metadata value; TYPE is int, float, bool or str", topic="model", form="KEY=TYPE:VALUE[,...]", example="--override-kv deepseek2.expert_used_count=int:6", parse=parse_override_kv, repeat=True, bench_list=False)
    dry_run: bool = opt(False, "-dr --dry-run", "switch", "stop before reading weights and print the memory plan", topic="model", example="--dry-run")
    self_test: bool = opt(False, "--self-test", "switch", "before the run, compare the ops of the first layers on the devices that compute them with NumPy; name the first one that is wrong", topic="model", example="--self-test")
    warmup: bool = opt(True, "--warmup", "optswitch", "run once before measuring or answering", topic="model", negative="--no-warmup", example="--no-warmup")

    n_ctx: int = opt(0, "-c --ctx-size", "int", "context size in tokens; 0 = as stated in the model file", topic="context", form="N", example="-c 32768", minimum=0, env="LLAMA_ARG_CTX_SIZE")
    n_batch: int = opt(2048, "-b --batch-size", "int", "logical batch: most tokens handed over at once", topic="context", form="N", example="-b 2048", minimum=1, env="LLAMA_ARG_BATCH")
    n_ubatch: int = opt(512, "-ub --ubatch-size", "int", "physical batch: tokens computed at once", topic="context", form="N", example="-ub 512", minimum=1, env="LLAMA_ARG_UBATCH")
    n_parallel: int = opt(1, "-np --parallel", "custom", "number of slots; each gets ctx/N tokens", topic="context", form="N", example="-np 4", commands="SL", parse=parse_parallel, env="LLAMA_ARG_N_PARALLEL")
    n_predict: int = opt(-1, "-n --predict --n-predict", "int", "tokens to generate, for serve the most a request gets; -1 = no limit, -2 = until the context is full; in sweep-bench the TG tokens of a row (default ubatch/4)", topic="context", form="N", example="-n 128", commands="CSW", minimum=-2, env="LLAMA_ARG_N_PREDICT")
    type_k: str = opt("f16", "-ctk --cache-type-k", "type", "type of the K cache", topic="context", form="TYPE", example="-ctk q8_0", choices=KV_TYPES, env="LLAMA_ARG_CACHE_TYPE_K")
    type_v: str = opt("f16", "-ctv --cache-type-v", "type", "type of the V cache; unused when MLA keeps one latent row", topic="context", form="TYPE", example="-ctv q8_0", choices=KV_TYPES, env="LLAMA_ARG_CACHE_TYPE_V")
    k_hadamard: bool | None = opt(None, "-khad --k-cache-hadamard", "optswitch", "rotate K (Hadamard transform of every head, with MLA of the latent row) before it is quantised, which loses much less. Default: on for types of less than 8 bits", topic="context", negative="-no-khad --no-k-cache-hadamard", example="-ctk q8_0 -khad", env="LLAMA_ARG_K_CACHE_HADAMARD")
    v_hadamard: bool = opt(False, "-vhad --v-cache-hadamard", "optswitch", "rotate V before it is quantised; no effect when MLA keeps one latent row", topic="context", negative="-no-vhad --no-v-cache-hadamard", example="-ctv q4_0 -vhad", env="LLAMA_ARG_V_CACHE_HADAMARD")
    swa_full: bool = opt(False, "--swa-full", "switch", "keep all positions in the caches of window layers, not only those that are still seen: more memory, and a sequence can be cut anywhere", topic="context", negative="--swa-compress", example="--swa-full", env="LLAMA_ARG_SWA_FULL")
    no_kv_offload: bool = opt(False, "-nkvo --no-kv-offload", "optswitch", "keep the KV cache in host memory and attend to it on the CPU", topic="context", negative="-kvo --kv-offload", example="-nkvo")

    n_threads: int = opt(0, "-t --threads", "custom", "threads for generation; auto = physical cores visible to this process", topic="compute", form="N", example="-t 16", parse=parse_threads, factory=physical_cores, env="LLAMA_ARG_THREADS")
    n_threads_batch: int = opt(0, "-tb --threads-batch", "custom", "threads for prompts; default as -t", topic="compute", form="N", example="-tb 32", parse=parse_threads, factory=physical_cores)
    numa: str | None = opt(None, "--numa", "custom", "distribute: spread threads over the nodes; isolate: stay on the starting node; numactl: obey an outer numactl", topic="compute", form="distribute|isolate|numactl", example="--numa distribute", parse=parse_numa, env="LLAMA_ARG_NUMA")
    cpu_mask: tuple[int, ...] = opt((), "-C --cpu-mask", "custom", "CPUs that threads may use, as bits of a hexadecimal number; 0 = all", topic="compute", form="HEX", example="-C 0xff", parse=parse_cpu_mask, bench_list=False)
    cpu_range: tuple[int, ...] = opt((), "-Cr --cpu-range", "custom", "CPUs that threads may use, beside those of --cpu-mask", topic="compute", form="LO-HI[,...]", example="-Cr 0-7", parse=parse_cpu_list, bench_list=False)
    cpu_strict: bool = opt(False, "--cpu-strict", "optswitch", "one CPU for every thread, instead of any of those", topic="compute", example="--cpu-strict 1")
    flash_attn: bool = opt(True, "-fa --flash-attn", "optswitch", "flash attention", topic="compute", negative="-no-fa --no-fa --no-flash-attn", example="-fa on", env="LLAMA_ARG_FLASH_ATTN")
    mla: int = opt(3, "-mla --mla-use --mla-attn", "choice", "how multi-head latent attention is computed; 0 keeps the full K and V cache", topic="compute", form="0|1|2|3", example="-mla 3", choices=("0", "1", "2", "3"))
    amb: int = opt(256, "-amb --attention-max-batch --attn-max-batch", "int", "upper bound in MiB for attention work buffers; 0 = no bound", topic="compute", form="MIB", example="-amb 512", minimum=0)
    fmoe: bool = opt(True, "-fmoe --fused-moe", "optswitch", "compute up, gate and activation of routed experts in one step", topic="compute", negative="-no-fmoe --no-fmoe --no-fused-moe", example="-fmoe")
    ser: tuple[int, float] | None = opt(None, "-ser --smart-expert-reduction", "custom", "keep the Kmin best experts, later ones only if their probability is at least t times the best", topic="compute", form="Kmin,t", example="-ser 6,1", parse=parse_ser, bench_list=False)

    n_gpu_layers: int | None = opt(None, "-ngl --gpu-layers --n-gpu-layers", "custom", "last N blocks on the GPU; N above the block count adds the output, all (or -1) is everything. Token embeddings always stay in host memory. Default (auto): all if there is a GPU", topic="placement", form="N|all|auto", example="-ngl 99", parse=parse_layers, env="LLAMA_ARG_N_GPU_LAYERS")
    override_tensor: tuple[str, ...] = opt((), "-ot --override-tensor", "custom", "tensors whose name matches RE go to BUF (CPU, CUDA0, ...); the first matching rule wins. @FILE: one rule per line", topic="placement", form="RE=BUF[,RE=BUF...]", example='-ot "exps=CPU"', parse=parse_rules, repeat=True, bench_list=False, env="LLAMA_ARG_OVERRIDE_TENSOR")
    cpu_moe: bool = opt(False, "-cmoe --cpu-moe", "switch", "all routed experts on the CPU, after all -ot rules", topic="placement", example="--cpu-moe", env="LLAMA_ARG_CPU_MOE")
    n_cpu_moe: int = opt(0, "-ncmoe --n-cpu-moe", "int", "routed experts of blocks 0..N-1 on the CPU", topic="placement", form="N", example="--n-cpu-moe 10", minimum=0, env="LLAMA_ARG_N_CPU_MOE")
    n_cpu_ffn: int = opt(0, "-ncffn --n-cpu-ffn", "int", "dense feed-forward weights of blocks 0..N-1 on the CPU", topic="placement", form="N", example="--n-cpu-ffn 10", minimum=0, env="LLAMA_ARG_N_CPU_FFN")
    tensor_split: tuple[float, ...] = opt((), "-ts --tensor-split", "custom", "share of the blocks each GPU gets; default by free memory", topic="placement", form="F,F,... or F/F/...", example="-ts 3,1", parse=parse_split, bench_list=False, env="LLAMA_ARG_TENSOR_SPLIT")
    split_mode: str = opt("layer", "-sm --split-mode", "choice", "none: one GPU; layer: whole blocks per GPU", topic="placement", form="none|layer", example="-sm layer", choices=("none", "layer", "row", "tensor", "graph", "attn"), env="LLAMA_ARG_SPLIT_MODE")
    main_gpu: int = opt(0, "-mg --main-gpu", "int", "the GPU of -sm none", topic="placement", form="I", example="-mg 0", minimum=0, env="LLAMA_ARG_MAIN_GPU")
    device: tuple[str, ...] = opt((), "-dev --device", "custom", "GPUs to use and to accept in -ot; none = no GPU; default all visible ones", topic="placement", form="CUDA0,CUDA1", example="-dev CUDA0", parse=parse_devices, bench_list=False, env="LLAMA_ARG_DEVICE")
    device_spec: tuple[DeviceSpec, ...] = opt((), "--device-spec", "custom", "plan for these devices instead of those of this machine: [N*]cuda:SIZE[:cc=X.Y] for GPUs, cpu:SIZE for RAM. For plan and --dry-run", topic="placement", form="cuda:24GiB[,...]", example="--device-spec 2*cuda:24GiB,cpu:256GiB", parse=parse_device_spec, bench_list=False)
    offload_policy: tuple[tuple[str, bool], ...] = opt((), "-op --offload-policy", "custom", "which operations on host-resident weights may be computed on the GPU: names or numbers 26, 27, 28, 29, -1", topic="placement", form="OP,0|1[,OP,0|1...]", example="-op MUL_MAT_ID=off", parse=parse_offload_policy, repeat=True, bench_list=False)
    offload_min_batch: int = opt(32, "--offload-min-batch", "int", "batch from which host-resident weights are computed on the GPU (experts: times n_expert/n_used)", topic="placement", form="N", example="--offload-min-batch 32", minimum=1)
    fit: bool = opt(False, "-fit --fit", "optswitch", "choose -ngl, -ts and --n-cpu-moe so that as many tensors as possible fit into GPU memory, and print them", topic="placement", example="--fit", env="LLAMA_ARG_FIT")
    fit_margin: int = opt(1024, "--fit-margin -fitt --fit-target", "custom", "memory that --fit leaves free on every GPU; of several values the largest", topic="placement", form="MIB", example="--fit-margin 1024", parse=parse_margin, env="LLAMA_ARG_FIT_TARGET")
    strict: bool = opt(False, "--strict", "switch", "placement rules that match nothing are errors; otherwise there is a warning that names them", topic="placement", example="--strict")

    seed: int = opt(-1, "-s --seed", "int", "random seed; -1 = random", topic="general", form="N", example="-s 1234")
    verbose: bool = opt(False, "-v --verbose --log-verbose", "switch", "log every tensor placement and more", topic="general", example="-v")
    verbosity: int = opt(0, "--verbosity", "int", "log level; above 0 as -v", topic="general", form="N", example="--verbosity 1")
    log_file: Path | None = opt(None, "--log-file", "path", "append all messages to this file, too", topic="general", form="FILE", example="--log-file ik.log", bench_list=False, env="LLAMA_ARG_LOG_FILE")
    profile: bool = opt(False, "--profile", "switch", "at the end print a table of operations and kernels with their time, GB/s of weights and GOP/s; the run itself is a little slower", topic="general", commands="SCWBPIDE", example="--profile")
    # fmt: on

    hub: HubConfig = group(HubConfig)
    adapters: AdapterConfig = group(AdapterConfig)
    rope: RopeConfig = group(RopeConfig)
    prompt: PromptConfig = group(PromptConfig)
    chat: ChatConfig = group(ChatConfig)
    sampling: SamplingConfig = group(SamplingConfig)
    server: ServerConfig = group(ServerConfig)
    sweep: SweepConfig = group(SweepConfig)
    bench: BenchConfig = group(BenchConfig)
    batched: BatchedBenchConfig = group(BatchedBenchConfig)
    perplexity: PerplexityConfig = group(PerplexityConfig)
    imatrix: ImatrixConfig = group(ImatrixConfig)
    embed: EmbedConfig = group(EmbedConfig)
    fleet: BatchConfig = group(BatchConfig)
    upstream: UpstreamConfig = group(UpstreamConfig)

    @property
    def cpus(self) -> frozenset[int]:
        """CPUs that threads are to use; empty for any."""
        return frozenset(self.cpu_mask + self.cpu_range)


def default_model() -> Path:
    """The bundled demo model, used when `-m` is missing."""
    path = DATA_DIR / "demo.gguf"
    if not path.is_file():
        raise UsageError("no model given and this installation has no demo model; name a GGUF file with -m FILE")
    return path


def default_text() -> Path:
    """The bundled text for `perplexity` without `-f`."""
    path = DATA_DIR / "demo.txt"
    if not path.is_file():
        raise UsageError("no text given and this installation has no demo text; name a text file with -f FILE")
    return path


def padded_ctx(n_ctx: int, flash_attn: bool) -> int:
    """Cells the KV cache gets for `n_ctx` tokens: a multiple of 256 with flash attention, of 32 without."""
    step = 256 if flash_attn else 32
    return -(-n_ctx // step) * step


def sequences_per_batch(config: RunConfig) -> int:
    """Chunks that perplexity and imatrix evaluate side by side: max(1, n_batch/n_ctx)."""
    return max(1, config.n_batch // config.n_ctx) if config.n_ctx > 0 else 1


def resolve(config: RunConfig, n_ctx_train: int = 0) -> tuple[RunConfig, list[str]]:
    """Apply the rules between settings; returns the config to run with and the warnings, one sentence each.

    `n_ctx_train` (from the model file) replaces `-c 0`; without it the batch is not limited by the context.
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
    if config.run_time_repack and config.mmap:
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
