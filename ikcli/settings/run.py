"""Settings of a model run, each declared once: field, spellings, value form, help and the commands that use it.

All commands that run a model receive a `RunConfig`. Options of a single command are in the groups (`sweep`, `bench`,
...). `resolve()` applies the rules between settings and returns the settings with its warnings.
"""

# ruff: noqa: RUF009  (`opt` makes dataclass fields)
# fmt: off


from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ikcli.errors import UsageError
from ikcli.hostinfo import physical_cores
from ikcli.settings.adapters import AdapterConfig, RopeConfig
from ikcli.settings.bench import BatchedBenchConfig, BenchConfig, SweepConfig
from ikcli.settings.embed import EmbedConfig
from ikcli.settings.fleet import BatchConfig
from ikcli.settings.hub import HubConfig
from ikcli.settings.measure import ImatrixConfig, PerplexityConfig
from ikcli.settings.option import group, opt
from ikcli.settings.prompt import ChatConfig, PromptConfig
from ikcli.settings.records import DeviceSpec
from ikcli.settings.sampling import SamplingConfig
from ikcli.settings.server import ServerConfig
from ikcli.settings.upstream import UpstreamConfig
from ikcli.settings.values import (
    parse_cpu_list,
    parse_cpu_mask,
    parse_device_spec,
    parse_devices,
    parse_gib,
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
from ikcli.settings.vision import VisionConfig

# One partial per topic, with the values that its options share.
_compute = partial(opt, topic="compute")
_context = partial(opt, topic="context")
_general = partial(opt, topic="general")
_model = partial(opt, topic="model")
_placement = partial(opt, topic="placement")

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q8_KV", "q6_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
DATA_DIR = Path(__file__).resolve().parents[1] / "data"


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Settings of one run. Sizes are in tokens, `amb` in MiB; `n_ctx` 0 means the model's context length."""
    command: str = ""
    model: Path | None = _model(None, "-m --model", "path", form="FILE", example="-m model.gguf", bench_list=False,
        env="LLAMA_ARG_MODEL", help="GGUF file, or the first shard of a split model. Default: the bundled demo model")
    mmap: bool = _model(True, "--mmap -mmp", "optswitch", negative="--no-mmap", example="-mmp 0", env="LLAMA_ARG_MMAP",
        help="map the file into memory instead of reading it; --no-mmap reads it into RAM")
    mlock: bool = _model(False, "--mlock", "switch", example="--mlock", env="LLAMA_ARG_MLOCK",
        help="lock the weights in RAM (the system limits how much: ulimit -l)")
    thp: bool | None = _model(None, "-thp --transparent-huge-pages", "optswitch", example="-thp",
        help="transparent huge pages (Linux) for the cache, buffers and weights. Default: weights that are mapped from "
        "the file move into them beside a longer generation, if RAM is plentiful and it pays; on: while the model is "
        "loaded; off: none are requested")
    hugetlb: str = _model("", "--hugetlb", "choice", form="2M|1G", example="--hugetlb 1G", choices=("2M", "1G"),
        bench_list=False, help="read the weights into huge pages of this size, reserved by the administrator (Linux); "
        "turns mmap off")
    run_time_repack: bool = _model(False, "-rtr --run-time-repack", "optswitch", example="-rtr",
        help="repack weights in host memory to interleaved types while loading; turns mmap off")
    expert_ram: int = _model(0, "--expert-ram", "custom", form="GIB", example="--expert-ram 24", parse=parse_gib,
        help="keep so much of the routed experts in RAM and read the others from disk when they are used, the next "
        "layer's ahead of time; 0 = all are mapped with the file")
    prefetch_experts: bool = _model(False, "--prefetch-experts", "switch", example="--prefetch-experts",
        help="the same as --expert-ram with the RAM that is free, for models larger than RAM")
    prefetch_experts_threads: int = _model(0, "--prefetch-experts-threads", "int", form="N", minimum=0,
        example="--prefetch-experts-threads 8", help="threads that read experts; 0 = 4")
    defer_experts: bool = _model(False, "--defer-experts", "switch", example="--defer-experts",
        help="read no experts while loading, only when they are used; this is always so without --expert-ram and "
        "--prefetch-experts")
    expert_cache: int | None = _model(None, "--expert-cache", "int", form="MIB", minimum=0,
        example="--expert-cache 4096",
        help="memory of every GPU for experts of its layers that are in RAM: for a few tokens, the GPU computes those "
        "that it has while the CPU computes the others; 0 = none. Default: what --fit leaves free, none without --fit")
    check_tensors: bool = _model(False, "--check-tensors -vq --validate-quants", "switch", example="--check-tensors",
        help="scan the weights for NaN and Inf while loading and name the tensors")
    override_kv: tuple[str, ...] = _model((), "-okv --override-kv", "custom", form="KEY=TYPE:VALUE[,...]",
        example="--override-kv deepseek2.expert_used_count=int:6", parse=parse_override_kv, repeat=True,
        bench_list=False, help="replace a metadata value; TYPE is int, float, bool or str")
    dry_run: bool = _model(False, "-dr --dry-run", "switch", example="--dry-run",
        help="stop before reading weights and print the memory plan")
    self_test: bool = _model(False, "--self-test", "switch", example="--self-test",
        help="before the run, compare the ops of the first layers on their devices with NumPy, and name the first "
        "wrong one")
    warmup: bool = _model(True, "--warmup", "optswitch", negative="--no-warmup", example="--no-warmup",
        help="run once before measuring or answering")

    n_ctx: int = _context(0, "-c --ctx-size", "int", form="N", example="-c 32768", minimum=0, env="LLAMA_ARG_CTX_SIZE",
        help="context size in tokens; 0 = as in the model file")
    n_batch: int = _context(2048, "-b --batch-size", "int", form="N", example="-b 2048", minimum=1,
        env="LLAMA_ARG_BATCH", help="logical batch: most tokens submitted at once")
    n_ubatch: int = _context(512, "-ub --ubatch-size", "int", form="N", example="-ub 512", minimum=1,
        env="LLAMA_ARG_UBATCH", help="physical batch: tokens computed at once")
    n_parallel: int = _context(1, "-np --parallel", "custom", form="N", example="-np 4", commands="SL",
        parse=parse_parallel, env="LLAMA_ARG_N_PARALLEL", help="number of slots; each gets ctx/N tokens")
    n_predict: int = _context(-1, "-n --predict --n-predict", "int", form="N", example="-n 128", commands="CSW",
        minimum=-2, env="LLAMA_ARG_N_PREDICT",
        help="tokens to generate, for serve the most per request; -1 = no limit, -2 = until the context is full; in "
        "sweep-bench the TG tokens of a row (default ubatch/4)")
    type_k: str = _context("f16", "-ctk --cache-type-k", "type", form="TYPE", example="-ctk q8_0", choices=KV_TYPES,
        env="LLAMA_ARG_CACHE_TYPE_K", help="type of the K cache")
    type_v: str = _context("f16", "-ctv --cache-type-v", "type", form="TYPE", example="-ctv q8_0", choices=KV_TYPES,
        env="LLAMA_ARG_CACHE_TYPE_V", help="type of the V cache; unused when MLA keeps one latent row")
    k_hadamard: bool | None = _context(None, "-khad --k-cache-hadamard", "optswitch",
        negative="-no-khad --no-k-cache-hadamard", example="-ctk q8_0 -khad", env="LLAMA_ARG_K_CACHE_HADAMARD",
        help="rotate K (Hadamard transform of every head, with MLA of the latent row) before it is quantised, which "
        "loses much less. Default: on for types of less than 8 bits")
    dsa: bool = _context(True, "-dsa --dsa", "optswitch", negative="-no-dsa --no-dsa", example="--no-dsa",
        help="sparse attention of models with an indexer (DeepSeek V3.2, GLM-5, MiniMax-M3): a query attends only to "
        "the positions that the indexer prefers, as in training; --no-dsa attends to all")
    dsa_top_k: int = _context(-1, "-dsatk --dsa-top-k", "int", form="N", example="-dsatk 1024", minimum=-1,
        help="positions that a query attends to with --dsa, whole blocks of MiniMax-M3; 0 = all, -1 = as the model "
        "says")
    type_index: str = _context("f16", "-ictk --indexer-cache-type-k", "type", form="TYPE", example="-ictk q8_0",
        choices=KV_TYPES, help="type of the cache of index keys, with --dsa")
    v_hadamard: bool = _context(False, "-vhad --v-cache-hadamard", "optswitch",
        negative="-no-vhad --no-v-cache-hadamard", example="-ctv q4_0 -vhad", env="LLAMA_ARG_V_CACHE_HADAMARD",
        help="rotate V before it is quantised; no effect when MLA keeps one latent row")
    swa_full: bool = _context(False, "--swa-full", "switch", negative="--swa-compress", example="--swa-full",
        env="LLAMA_ARG_SWA_FULL",
        help="keep all positions in the caches of window layers, not only the visible ones: this takes more memory, "
        "and a sequence can roll back to any position")
    no_kv_offload: bool = _context(False, "-nkvo --no-kv-offload", "optswitch", negative="-kvo --kv-offload",
        example="-nkvo", help="keep the KV cache in host memory and attend to it on the CPU")

    n_threads: int = _compute(0, "-t --threads", "custom", form="N", example="-t 16", parse=parse_threads,
        factory=physical_cores, env="LLAMA_ARG_THREADS",
        help="threads for generation; auto = physical cores visible to this process, or fewer if ik doctor found that "
        "these read faster")
    n_threads_batch: int = _compute(0, "-tb --threads-batch", "custom", form="N", example="-tb 32", parse=parse_threads,
        factory=physical_cores, help="threads for prompts; default: same as -t")
    numa: str | None = _compute(None, "--numa", "custom", form="distribute|isolate|mirror|numactl",
        example="--numa distribute", parse=parse_numa, env="LLAMA_ARG_NUMA",
        help="distribute: spread threads, buffers and (with --no-mmap or -rtr) weights over the nodes, experts whole; "
        "isolate: stay on the starting node; mirror: a copy of the weights on every node; numactl: obey an outer "
        "numactl")
    cpu_mask: tuple[int, ...] = _compute((), "-C --cpu-mask", "custom", form="HEX", example="-C 0xff",
        parse=parse_cpu_mask, bench_list=False,
        help="CPUs that threads may use, as bits of a hexadecimal number; 0 = all")
    cpu_range: tuple[int, ...] = _compute((), "-Cr --cpu-range", "custom", form="LO-HI[,...]", example="-Cr 0-7",
        parse=parse_cpu_list, bench_list=False, help="CPUs that threads may use, in addition to --cpu-mask")
    cpu_strict: bool = _compute(False, "--cpu-strict", "optswitch", example="--cpu-strict 1",
        help="pin every thread to one CPU, instead of any of those")
    flash_attn: bool = _compute(True, "-fa --flash-attn", "optswitch", negative="-no-fa --no-fa --no-flash-attn",
        example="-fa on", env="LLAMA_ARG_FLASH_ATTN", help="flash attention")
    mla: int = _compute(3, "-mla --mla-use --mla-attn", "choice", form="0|1|2|3", example="-mla 3",
        choices=("0", "1", "2", "3"),
        help="how multi-head latent attention is computed; 0 keeps the full K and V cache")
    amb: int = _compute(256, "-amb --attention-max-batch --attn-max-batch", "int", form="MIB", example="-amb 512",
        minimum=0, help="upper bound in MiB for attention work buffers; 0 = no bound")
    fmoe: bool = _compute(True, "-fmoe --fused-moe", "optswitch", negative="-no-fmoe --no-fmoe --no-fused-moe",
        example="-fmoe", help="compute up, gate and activation of routed experts in one step")
    ser: tuple[int, float] | None = _compute(None, "-ser --smart-expert-reduction", "custom", form="Kmin,t",
        example="-ser 6,1", parse=parse_ser, bench_list=False,
        help="keep the Kmin best experts, later ones only if their probability is at least t times the best")

    n_gpu_layers: int | None = _placement(None, "-ngl --gpu-layers --n-gpu-layers", "custom", form="N|all|auto",
        example="-ngl 99", parse=parse_layers, env="LLAMA_ARG_N_GPU_LAYERS",
        help="last N blocks on the GPU; N above the block count adds the output; all (or -1) is everything. Token "
        "embeddings always stay in host memory. Default (auto): all if there is a GPU")
    override_tensor: tuple[str, ...] = _placement((), "-ot --override-tensor", "custom", form="RE=BUF[,RE=BUF...]",
        example='-ot "exps=CPU"', parse=parse_rules, repeat=True, bench_list=False, env="LLAMA_ARG_OVERRIDE_TENSOR",
        help="tensors whose name matches RE go to BUF (CPU, CUDA0, ...); the first matching rule wins. @FILE: one "
        "rule per line")
    cpu_moe: bool = _placement(False, "-cmoe --cpu-moe", "switch", example="--cpu-moe", env="LLAMA_ARG_CPU_MOE",
        help="all routed experts on the CPU, after all -ot rules")
    n_cpu_moe: int = _placement(0, "-ncmoe --n-cpu-moe", "int", form="N", example="--n-cpu-moe 10", minimum=0,
        env="LLAMA_ARG_N_CPU_MOE", help="routed experts of blocks 0..N-1 on the CPU")
    n_cpu_ffn: int = _placement(0, "-ncffn --n-cpu-ffn", "int", form="N", example="--n-cpu-ffn 10", minimum=0,
        env="LLAMA_ARG_N_CPU_FFN", help="dense feed-forward weights of blocks 0..N-1 on the CPU")
    tensor_split: tuple[float, ...] = _placement((), "-ts --tensor-split", "custom", form="F,F,... or F/F/...",
        example="-ts 3,1", parse=parse_split, bench_list=False, env="LLAMA_ARG_TENSOR_SPLIT",
        help="share of the blocks for each GPU; default: by free memory")
    split_mode: str = _placement("layer", "-sm --split-mode", "choice", form="none|layer", example="-sm layer",
        choices=("none", "layer", "row", "tensor", "graph", "attn"), env="LLAMA_ARG_SPLIT_MODE",
        help="none: one GPU; layer: whole blocks per GPU")
    main_gpu: int = _placement(0, "-mg --main-gpu", "int", form="I", example="-mg 0", minimum=0,
        env="LLAMA_ARG_MAIN_GPU", help="the GPU of -sm none")
    device: tuple[str, ...] = _placement((), "-dev --device", "custom", form="CUDA0,CUDA1", example="-dev CUDA0",
        parse=parse_devices, bench_list=False, env="LLAMA_ARG_DEVICE",
        help="GPUs to use and to accept in -ot; none = no GPU; default: all visible ones")
    device_spec: tuple[DeviceSpec, ...] = _placement((), "--device-spec", "custom", form="cuda:24GiB[,...]",
        example="--device-spec 2*cuda:24GiB,cpu:256GiB", parse=parse_device_spec, bench_list=False,
        help="plan for these devices instead of those of this machine: [N*]cuda:SIZE[:cc=X.Y][:tops=N][:bus=GB/s] for "
        "GPUs, cpu:SIZE[:tops=N][:read=GB/s] for RAM. For plan and --dry-run")
    offload_policy: tuple[tuple[str, bool], ...] = _placement((), "-op --offload-policy", "custom",
        form="OP,0|1[,OP,0|1...]", example="-op MUL_MAT_ID=off", parse=parse_offload_policy, repeat=True,
        bench_list=False,
        help="which operations on host-resident weights may be computed on the GPU: names or numbers 26, 27, 28, 29, "
        "-1")
    offload_min_batch: int | None = _placement(None, "--offload-min-batch", "int", form="N",
        example="--offload-min-batch 32", minimum=1,
        help="batch from which host-resident weights are computed on the GPU (experts: times n_expert/n_used). "
        "Default: 32; for experts, measured times of prompts may overrule it")
    fit: bool = _placement(False, "-fit --fit", "optswitch", example="--fit", env="LLAMA_ARG_FIT",
        help="choose -ngl, -ts, --n-cpu-moe and --expert-cache so that as much as possible fits into GPU memory, and "
        "print them")
    fit_margin: int = _placement(1024, "--fit-margin -fitt --fit-target", "custom", form="MIB",
        example="--fit-margin 1024", parse=parse_margin, env="LLAMA_ARG_FIT_TARGET",
        help="memory that --fit leaves free on every GPU; of several values the largest")
    strict: bool = _placement(False, "--strict", "switch", example="--strict",
        help="treat placement rules that match nothing as errors; otherwise a warning names them")

    seed: int = _general(-1, "-s --seed", "int", form="N", example="-s 1234", help="random seed; -1 = random")
    verbose: bool = _general(False, "-v --verbose --log-verbose", "switch", example="-v",
        help="log every tensor placement and more")
    verbosity: int = _general(0, "--verbosity", "int", form="N", example="--verbosity 1",
        help="log level; above 0 is the same as -v")
    log_file: Path | None = _general(None, "--log-file", "path", form="FILE", example="--log-file ik.log",
        bench_list=False, env="LLAMA_ARG_LOG_FILE", help="also append all messages to this file")
    profile: bool = _general(False, "--profile", "switch", commands="SCWBPIDE", example="--profile",
        help="print a table of operations and kernels at the end, with time, GB/s of weights, GOP/s, and the part of "
        "what the processor and its memory can do; the run is a little slower")

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
    vision: VisionConfig = group(VisionConfig)
    upstream: UpstreamConfig = group(UpstreamConfig)

    @property
    def only_plans(self) -> bool:
        """Whether the run ends before it reads weights."""
        return self.dry_run or self.command == "plan"

    @property
    def cpus(self) -> frozenset[int]:
        """CPUs that threads may use; empty means any."""
        return frozenset(self.cpu_mask + self.cpu_range)


def default_model() -> Path:
    """Return the bundled demo model, which is used when `-m` is missing."""
    path = DATA_DIR / "demo.gguf"
    if not path.is_file():
        raise UsageError("no model given and this installation has no demo model; name a GGUF file with -m FILE")
    return path


def default_text() -> Path:
    """Return the bundled text, which `perplexity` uses without `-f`."""
    path = DATA_DIR / "demo.txt"
    if not path.is_file():
        raise UsageError("no text given and this installation has no demo text; name a text file with -f FILE")
    return path
