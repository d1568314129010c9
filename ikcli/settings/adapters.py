"""Options that change a model while it runs: LoRA adapters, control vectors, rotary positions."""

# ruff: noqa: RUF009  (`opt` makes dataclass fields)
# fmt: off

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ikcli.settings.option import opt
from ikcli.settings.records import ScaledFile
from ikcli.settings.values import (
    parse_layer_range,
    parse_path_item,
    parse_scaled_file,
)

# One partial per topic, with the values that its options share.
_context = partial(opt, topic="context")
_model = partial(opt, topic="model", bench_list=False)


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """LoRA adapters and control vectors, applied while the model runs."""

    lora: tuple[Path, ...] = _model((), "--lora", "custom", form="FILE[,FILE...]", example="--lora adapter.gguf",
        parse=parse_path_item, repeat=True, help="low-rank adapter (GGUF) to apply; repeatable")
    lora_scaled: tuple[ScaledFile, ...] = _model((), "--lora-scaled", "custom", form="FILE SCALE",
        example="--lora-scaled adapter.gguf 0.5", parse=parse_scaled_file, repeat=True, n_values=2,
        help="low-rank adapter to apply with a separate scale; repeatable, numbered after those of --lora")
    lora_init_without_apply: bool = opt(False, "--lora-init-without-apply", "switch", topic="model", commands="S",
        example="--lora-init-without-apply",
        help="load adapters with scale 0; requests and POST /lora-adapters set the scale")
    control_vector: tuple[Path, ...] = _model((), "--control-vector", "custom", form="FILE",
        example="--control-vector happy.gguf", parse=parse_path_item, repeat=True,
        help="control vector (GGUF) to add to the outputs of layers; repeatable")
    control_vector_scaled: tuple[ScaledFile, ...] = _model((), "--control-vector-scaled", "custom", form="FILE SCALE",
        example="--control-vector-scaled happy.gguf 0.8", parse=parse_scaled_file, repeat=True, n_values=2,
        help="control vector with a scale; repeatable")
    control_vector_path: Path | None = opt(None, "--control-vector-path", "path", topic="model", commands="S",
        form="DIR", example="--control-vector-path vectors",
        help="folder of control vectors that POST /control-vectors/load may load while the server runs")
    control_vector_layer_range: tuple[int, int] | None = _model(None, "--control-vector-layer-range", "custom",
        form="FIRST LAST", example="--control-vector-layer-range 10 20", parse=parse_layer_range, n_values=2,
        help="first and last layer that control vectors change; default: all")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding, where it differs from the model file."""

    scaling: str = _context("", "--rope-scaling", "choice", form="none|linear|yarn", example="--rope-scaling yarn",
        choices=("none", "linear", "yarn"), env="LLAMA_ARG_ROPE_SCALING_TYPE",
        help="how rotation frequencies are scaled: none, linear, or yarn; default: as in the model file")
    scale: float = _context(0.0, "--rope-scale", "float", form="F", example="--rope-scale 4", minimum=0,
        env="LLAMA_ARG_ROPE_SCALE", help="factor by which the context is extended; 0 = as in the model file")
    freq_scale: float = _context(0.0, "--rope-freq-scale", "float", form="F", example="--rope-freq-scale 0.25",
        minimum=0, env="LLAMA_ARG_ROPE_FREQ_SCALE", help="factor on the frequencies: 1/N is --rope-scale N")
    freq_base: float = _context(0.0, "--rope-freq-base", "float", form="F", example="--rope-freq-base 1000000",
        minimum=0, env="LLAMA_ARG_ROPE_FREQ_BASE",
        help="base of the frequencies (NTK-aware scaling); 0 = as in the model file")
    orig_ctx: int = _context(0, "--yarn-orig-ctx", "int", form="N", example="--yarn-orig-ctx 32768", minimum=0,
        env="LLAMA_ARG_YARN_ORIG_CTX",
        help="YaRN: training context of the model before its extension; 0 = as in the model file")
    ext_factor: float = _context(-1.0, "--yarn-ext-factor", "float", form="F", example="--yarn-ext-factor 1",
        env="LLAMA_ARG_YARN_EXT_FACTOR",
        help="YaRN: share of the original frequencies where they are kept; 0 = interpolation only, below 0 = 1 with "
        "--rope-scaling yarn, else 0")
    attn_factor: float = _context(-1.0, "--yarn-attn-factor", "float", form="F", example="--yarn-attn-factor 1",
        env="LLAMA_ARG_YARN_ATTN_FACTOR",
        help="YaRN: factor on the magnitude of rotated heads, in addition to that of the model file; below 0 = none")
    beta_slow: float = _context(-1.0, "--yarn-beta-slow", "float", form="F", example="--yarn-beta-slow 1",
        env="LLAMA_ARG_YARN_BETA_SLOW",
        help="YaRN: frequencies with fewer rotations over the original context are interpolated; below 0 = as in the "
        "model file")
    beta_fast: float = _context(-1.0, "--yarn-beta-fast", "float", form="F", example="--yarn-beta-fast 32",
        env="LLAMA_ARG_YARN_BETA_FAST",
        help="YaRN: frequencies with more rotations over the original context are kept; below 0 = as in the model file")
