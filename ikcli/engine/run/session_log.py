"""The lines that a session logs while it opens a model and sets up its context; `log_lines.py` formats them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ikcli.engine.experts.residency import expert_places, place_lines, places_now
from ikcli.engine.plan.placement import offload_lines
from ikcli.engine.run import log_lines as report
from ikcli.gguf.constants import file_type_label
from ikcli.gguf.types import TYPES, tensor_n_bytes
from ikcli.log import log
from ikcli.settings.run import RunConfig

if TYPE_CHECKING:
    from ikcli.engine.plan.planner import PreparedRun
    from ikcli.engine.run.model import Model
    from ikcli.engine.run.profile import Profile
    from ikcli.engine.run.runner import DividedProgram, Runner
    from ikcli.gguf.reader import GGUFFile
    from ikcli.graph import Cache
    from ikcli.models import GraphConfig, HParams


@dataclass(slots=True)
class Timings:
    """Seconds and tokens since the session was opened.

    Batches of several tokens count as prompts, others as generation.
    """

    t_load: float = 0.0
    t_prompt: float = 0.0
    n_prompt: int = 0
    t_eval: float = 0.0
    n_eval: int = 0

    def add(self, n_tokens: int, seconds: float) -> None:
        """Count one decode call."""
        if n_tokens > 1:
            self.n_prompt += n_tokens
            self.t_prompt += seconds
        else:
            self.n_eval += n_tokens
            self.t_eval += seconds


def model_lines(file: GGUFFile, hp: HParams, config: RunConfig) -> None:
    """Return the loader's lines on the file and its contents."""
    if len(file.paths) > 1:
        log(f"llama_model_loader: additional {len(file.paths) - 1} GGUFs metadata loaded.")
    log(report.loaded_line(len(file.metadata), len(file.tensors), str(file.paths[0]), file.version))
    rows = [report.TensorRow(t.name, tuple(t.shape), TYPES[t.type].name, t.n_bytes) for t in file.tensors.values()]
    if config.verbose:
        for line in report.kv_pair_lines([(k, *_pair(file, k)) for k in file.metadata]):
            log(line)
    for line in report.type_lines(rows):
        log(line)
    ftype = file.get("general.file_type")
    label = file_type_label(int(ftype)) if ftype is not None else ""
    for line in report.model_size_lines(rows, label):
        log(line)
    rope = hp.rope
    if rope.scaling != "none":
        log(
            f"llm_load_print_meta: rope scaling     = {rope.scaling} x{rope.factor:g} of {rope.n_ctx_orig} tokens "
            f"(off: --override-kv {hp.arch}.rope.scaling.type=str:none)"
        )


def _pair(file: GGUFFile, key: str) -> tuple[str, str]:
    value_type = file.value_types[key]
    value = file.metadata[key]
    if value_type.name == "ARRAY":
        items = ", ".join(str(v) for v in list(value[:8]))
        return f"arr[{file.item_types[key].name.lower()},{len(value)}]", f"[{items}]"
    names = {"STRING": "str", "UINT32": "u32", "INT32": "i32", "FLOAT32": "f32"}
    return names.get(value_type.name, value_type.name.lower()), str(value)


def context_lines(prepared: PreparedRun) -> None:
    """Log the context of a run: settings, cache, buffers, totals."""
    plan, model, runner = prepared.plan, prepared.model, prepared.runner
    lines = setup_lines(plan.config, model, plan.graph_config, plan.config.n_batch)
    if runner.gpus:
        lines += offload_lines(model.hp.n_layer, -1 if plan.config.n_gpu_layers is None else plan.config.n_gpu_layers)
    n_ctx = plan.graph_config.n_ctx
    lines += buffer_lines(plan.config, plan.caches, n_ctx, plan.memory.parts, plan.n_nodes, plan.n_splits)
    programs = list(prepared.programs.values())
    lines += [*streamed_lines(programs, model), *runner.notes(programs)]
    slots = runner.cpu.experts.slots if runner.cpu.experts is not None else None
    lines += place_lines(expert_places(model, plan.placement.buffer_of, slots, plan.vram))
    for line in lines:
        log(line)


def expert_lines(runner: Runner) -> list[str]:
    """Return what the owners of experts report at the end."""
    owners = (runner.cpu.experts, runner.expert_cache)
    return [line for owner in owners if owner is not None for line in owner.lines()]


def profile_lines(profile: Profile | None, model: Model, buffer_of: Mapping[str, str], runner: Runner) -> list[str]:
    """Return the table of `--profile`, if it was asked for, and where experts are at its end."""
    return [] if profile is None else [*profile.lines(), *place_lines(places_now(model, buffer_of, runner))]


def new_profile() -> Profile:
    """Return a new collector for the table of `--profile`; without the option nothing of it is imported."""
    from ikcli.engine.run.profile import Profile

    return Profile()


def streamed_lines(programs: Sequence[DividedProgram], model: Model) -> list[str]:
    """Return lines on the token counts from which GPUs use weights in RAM."""
    found = {least: p.streamed for program in programs for least, p in program.variants}
    return [
        f"offload: from {least} tokens on {len(names)} weights in RAM ({model.n_bytes(names) / 2**20:.2f} MiB) are "
        "copied to the GPU for every micro-batch"
        for least, names in sorted(found.items())
    ]


def setup_lines(config: RunConfig, model: Model, cfg: GraphConfig, n_batch: int) -> list[str]:
    """Return lines on tensors derived for the attention mode and on the settings of the context."""
    hp, lines = model.hp, []
    if model.derived:
        n_bytes = sum(tensor_n_bytes(d.type, d.shape) for d in model.derived.values())
        kinds = sorted({n.split(".")[2].removeprefix("attn_") for n in model.derived})
        types = ", ".join(sorted({TYPES[d.type].name for d in model.derived.values()}))
        lines.append(
            f"llm_prepare_mla: computing {len(model.derived)} {'/'.join(kinds)} tensors ({types}, "
            f"{n_bytes / 2**20:.2f} MiB) that {f'-mla {config.mla}' if hp.kv_lora_rank else 'the graph'} needs and the "
            "file does not hold"
        )
    lines += report.context_lines(
        {
            "n_ctx": cfg.n_ctx, "n_batch": n_batch, "n_ubatch": cfg.n_ubatch, "flash_attn": int(config.flash_attn),
            "mla_attn": config.mla if hp.kv_lora_rank else 0, "attn_max_b": config.amb, "fused_moe": int(config.fmoe),
            "ser": report.ser_text(config.ser), "freq_base": f"{hp.rope.freq_base:.1f}",
            "freq_scale": f"{1 / hp.rope.factor:g}",
        }
    )  # fmt: skip
    if cfg.k_hadamard:
        why = "" if config.k_hadamard else f", because {config.type_k} has few levels; -no-khad switches it off"
        lines.append(f"llama_new_context_with_model: k_hadamard = 1 (K is rotated before it is quantised{why})")
    return lines


def buffer_lines(
    config: RunConfig,
    caches: Mapping[Cache, int],
    n_ctx: int,
    parts: Mapping[str, Mapping[str, int]],
    n_nodes: int,
    n_splits: int = 1,
    free: Mapping[str, int] | None = None,
) -> list[str]:
    """Return the bytes of `caches`, of each device and part (`weights`, `KV`, `compute`, `output`), and totals."""

    def by_device(part: str) -> dict[str, int]:
        return {device: sizes[part] for device, sizes in parts.items() if sizes.get(part)}

    lines = report.weight_buffer_lines(by_device("weights"))
    lines += report.kv_lines(report.kv_size(caches), n_ctx, config.type_k, config.type_v, by_device("KV"))
    lines += report.compute_lines(by_device("output"), by_device("compute"), n_nodes, n_splits)
    return lines + report.total_lines(parts, free)


def timing_lines(t: Timings) -> list[str]:
    """Return the `llama_print_timings` lines; none if nothing was computed."""
    if not t.n_prompt and not t.n_eval:
        return []
    head = "llama_print_timings:"
    return [
        f"{head}        load time = {1e3 * t.t_load:10.2f} ms",
        f"{head} prompt eval time = {rate_text(1e3 * t.t_prompt, t.n_prompt, 'tokens')}",
        f"{head}        eval time = {rate_text(1e3 * t.t_eval, t.n_eval, 'runs  ')}",
        f"{head}       total time = {1e3 * (t.t_prompt + t.t_eval):10.2f} ms / {t.n_prompt + t.n_eval:5d} tokens",
    ]


def rate(ms: float, n: int) -> tuple[float, float]:
    """Return milliseconds per token and tokens per second; 0 where nothing was computed."""
    return (ms / n, 1e3 * n / ms) if n and ms > 0 else (0.0, 0.0)


def rate_text(ms: float, n: int, unit: str) -> str:
    """Return the time of `n` tokens in the form of llama.cpp's timing lines."""
    per_token, per_second = rate(ms, n)
    return f"{ms:10.2f} ms / {n:5d} {unit} ({per_token:8.2f} ms per token, {per_second:8.2f} tokens per second)"
