"""Assign tensors to devices: `-ngl`, `-ts`, `-mg` and `-sm` for whole blocks, then `-ot` and the expert options.

All functions are pure and work on tensor names. GPUs are named `CUDA0`, `CUDA1`, ...; everything else is on `CPU`. The
block arithmetic is float32, as in llama.cpp, so that splits agree to the block.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ikcli.engine.plan.tensor_rules import (
    RuleMatches,
    check_rules,
    cpu_rules,
    match_rules,
    parse_rule,
    rule_lines,
)
from ikcli.errors import UsageError
from ikcli.graph.split import NodePlaces
from ikcli.settings.run import RunConfig

CPU = "CPU"
MAX_RULE_LINES = 20
WITH_OUTPUT = ("output", "per_layer_model_proj", "per_layer_proj_norm", "altup_proj", "altup_unembd_proj")
"""Tensors outside of blocks; others stay in RAM."""
_BLOCK = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """The device index of every block and of the output (-1 = CPU)."""

    blocks: tuple[int, ...]
    output: int

    def count(self, device: int) -> int:
        """Return the number of blocks on a device."""
        return self.blocks.count(device)


@dataclass(frozen=True, slots=True)
class Placement:
    """The device of every tensor, how the rules were used, and the notices for the user.

    `home` is the device of every block, which also computes nodes without weights. `cache` is the device of its KV
    cache, which is the CPU with `-nkvo`. `devices` are the GPUs in use.
    """

    buffer_of: dict[str, str]
    split: LayerSplit
    rules: RuleMatches
    notices: tuple[str, ...]
    warnings: tuple[str, ...]
    devices: tuple[str, ...] = ()
    home: tuple[str, ...] = ()
    cache: tuple[str, ...] = ()

    def places(self) -> NodePlaces:
        """Return the devices for dividing graphs; the CPU computes what belongs to no block."""
        return NodePlaces(
            weight=lambda node, weight: self.buffer_of[weight.name],
            cache=lambda il: self.cache[il],
            home=lambda il: self.home[il] if 0 <= il < len(self.home) else CPU,
        )


def split_layers(n_layer: int, n_gpu_layers: int, shares: Sequence[float]) -> LayerSplit:
    """Assign the last `n_gpu_layers` blocks to devices in proportion to `shares`; the output follows if ngl > n_layer.

    A negative `n_gpu_layers` means all blocks. Without devices (`shares` empty) everything is on the CPU.
    """
    if n_gpu_layers < 0:
        n_gpu_layers = n_layer + 1
    if not shares or n_gpu_layers == 0:
        return LayerSplit((-1,) * n_layer, -1)
    start = max(n_layer - n_gpu_layers, 0)
    active = min(n_gpu_layers, n_layer + 1)
    limits = np.cumsum(np.asarray(shares, np.float32), dtype=np.float32)
    limits = (limits / limits[-1]).astype(np.float32)

    def device(step: int) -> int:
        position = np.float32(step) / np.float32(active)
        return min(int(np.searchsorted(limits, position, side="right")), len(limits) - 1)

    blocks = (-1,) * start + tuple(device(block - start) for block in range(start, n_layer))
    return LayerSplit(blocks, device(active - 1) if n_gpu_layers > n_layer else -1)


def device_shares(config: RunConfig, n_devices: int, free_bytes: Sequence[int] = ()) -> tuple[float, ...]:
    """Return the share of each device.

    `-sm none` puts everything on `-mg`; `-ts` gives the shares; otherwise they follow free memory (equal if unknown).
    """
    if n_devices == 0:
        return ()
    if config.split_mode == "none":
        if config.main_gpu >= n_devices:
            raise UsageError(f"-mg {config.main_gpu}: this GPU does not exist; the last one is {n_devices - 1}")
        return tuple(float(index == config.main_gpu) for index in range(n_devices))
    if config.tensor_split:
        if len(config.tensor_split) > n_devices:
            raise UsageError(f"-ts names {len(config.tensor_split)} shares, but the number of GPUs is {n_devices}")
        shares = config.tensor_split + (0.0,) * (n_devices - len(config.tensor_split))
        if not any(shares):
            raise UsageError("-ts has only zeros; give at least one GPU a share above 0")
        return shares
    return tuple(float(free) for free in free_bytes) if any(free_bytes) else (1.0,) * n_devices


def place(
    names: Sequence[str],
    n_layer: int,
    config: RunConfig,
    devices: Sequence[str] = (),
    free_bytes: Sequence[int] = (),
    n_bytes: Mapping[str, int] | None = None,
    sources: Mapping[str, str] | None = None,
    n_heads: int = 0,
) -> Placement:
    """Place all tensors of a model on the GPUs `devices` (`CUDA0`, ...), which have `free_bytes` of free memory.

    `sources` names the tensors that are derived from others, which must be in `names` too. A derived tensor is on the
    device of its source unless a rule says otherwise. `n_heads`: blocks after the last one that predict further tokens;
    they are where the output is.
    """
    present, free = usable_devices(config, devices, free_bytes)
    rules = [parse_rule(text, (CPU, *present) if present else None) for text in config.override_tensor]
    rules += cpu_rules(config.cpu_moe, min(config.n_cpu_moe, n_layer), min(config.n_cpu_ffn, n_layer))
    matches = match_rules(rules, names)
    warnings = check_rules(matches, names, config.strict)
    notices = [no_device_notice(config)] if not present and no_device_notice(config) else []
    notices += _rule_notices(matches, config, n_bytes) + _idle_devices(config, present)
    ngl = -1 if config.n_gpu_layers is None else config.n_gpu_layers
    split = split_layers(n_layer, ngl, device_shares(config, len(present), free))
    split = replace(split, blocks=split.blocks + (split.output,) * n_heads)
    buffers = {name: matches.buffer_of.get(name) or _buffer_by_split(name, split, present) for name in names}
    for name, source in (sources or {}).items():
        buffers[name] = matches.buffer_of.get(name) or buffers[source]
    if not present:
        buffers = dict.fromkeys(names, CPU)
    home = tuple(CPU if index < 0 else present[index] for index in split.blocks)
    cache = (CPU,) * len(home) if config.no_kv_offload else home
    return Placement(buffers, split, matches, tuple(notices), tuple(warnings), tuple(present), home, cache)


def usable_devices(config: RunConfig, devices: Sequence[str], free_bytes: Sequence[int]) -> tuple[list[str], list[int]]:
    """Return the GPUs that `-dev` selects and their free memory; raise UsageError for a GPU that does not exist."""
    unknown = [name for name in config.device if name not in devices]
    if devices and unknown:
        raise UsageError(f"-dev {','.join(config.device)}: {unknown[0]} is missing; present are {', '.join(devices)}")
    kept = [index for index, name in enumerate(devices) if not config.device or name in config.device]
    return [devices[index] for index in kept], [free_bytes[index] for index in kept if index < len(free_bytes)]


def _idle_devices(config: RunConfig, present: Sequence[str]) -> list[str]:
    """Hint at idle GPUs: rules name some of several GPUs and not others (three rules `=CUDA0` on three GPUs)."""
    named = {rule.rpartition("=")[2].strip() for rule in config.override_tensor} - {CPU}
    idle = [name for name in present if name not in named]
    if not named or not idle or config.tensor_split:
        return []
    has = "has" if len(idle) == 1 else "have"
    return [f"{', '.join(idle)} {has} no -ot rule, only the blocks that -ngl and -ts give"]


def _rule_notices(matches: RuleMatches, config: RunConfig, n_bytes: Mapping[str, int] | None) -> list[str]:
    """Return the first MAX_RULE_LINES rules; with -v all of them and a line per tensor that a rule moved."""
    lines = rule_lines(matches, dict(n_bytes) if n_bytes is not None else None)
    if not (config.verbose or config.verbosity > 0):
        more = len(lines) - MAX_RULE_LINES
        return lines if more <= 0 else [*lines[:MAX_RULE_LINES], f"... and {more} more rules (-v shows all)"]
    for name, buffer in matches.buffer_of.items():
        size = f" (size = {n_bytes[name] / 2**20:.2f} MiB)" if n_bytes is not None else ""
        lines.append(f"Tensor {name}{size} buffer type overridden to {buffer}")
    return lines


def _buffer_by_split(name: str, split: LayerSplit, devices: Sequence[str]) -> str:
    block = _BLOCK.match(name)
    if name.endswith(".nextn.embed_tokens.weight"):  # single rows are read from it
        index = -1
    elif block is not None:
        index = split.blocks[int(block[1])] if int(block[1]) < len(split.blocks) else -1
    else:
        index = split.output if name.startswith(WITH_OUTPUT) else -1
    return CPU if index < 0 else devices[index]


def no_device_notice(config: RunConfig) -> str:
    """Return one line for GPU options on a machine without a usable GPU; empty if there are no such options."""
    parts: list[str] = []
    if config.n_gpu_layers is not None and config.n_gpu_layers != 0:
        parts.append(f"-ngl {config.n_gpu_layers}")
    if config.tensor_split:
        parts.append("-ts")
    if config.device:
        parts.append(f"-dev {','.join(config.device)}")
    n_rules = sum(not rule.rpartition("=")[2].strip().startswith(CPU) for rule in config.override_tensor)
    if n_rules:
        parts.append(f"{n_rules} CUDA rule{'s' if n_rules > 1 else ''}")
    if not parts:
        return ""
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    has = "has" if len(parts) == 1 and not parts[0].endswith("s") else "have"
    return f"no CUDA device: {listed} {has} no effect, everything runs on the CPU"


def offload_lines(n_layer: int, n_gpu_layers: int) -> list[str]:
    """Return the log lines on offloaded layers for the `-ngl` value as given."""
    ngl = n_layer + 1 if n_gpu_layers < 0 else n_gpu_layers
    lines = [f"llm_load_tensors: offloading {min(ngl, n_layer)} repeating layers to GPU"]
    if ngl > n_layer:
        lines.append("llm_load_tensors: offloading non-repeating layers to GPU")
    lines.append(f"llm_load_tensors: offloaded {min(ngl, n_layer + 1)}/{n_layer + 1} layers to GPU")
    return lines


def placement_sentence(buffer_of: Mapping[str, str]) -> str:
    """Return `attention 61/61 layers, shared experts 58/58, routed experts 0/58 on GPU` without absent groups."""
    groups = (("attention", "layers", ".attn_"), ("shared experts", "", "_shexp."), ("routed experts", "", "_exps."))
    parts: list[str] = []
    for title, unit, mark in groups:
        blocks: dict[str, bool] = {}
        for name, buffer in buffer_of.items():
            block = _BLOCK.match(name)
            if block is not None and mark in name:
                blocks[block[1]] = blocks.get(block[1], True) and buffer != CPU
        if blocks:
            parts.append(f"{title} {sum(blocks.values())}/{len(blocks)} {unit}".rstrip())
    return ", ".join(parts) + " on GPU" if parts else ""


OFFLOAD_MIN_BATCH = 32  # --offload-min-batch


def offload_threshold(min_batch: int | None, n_expert: int, n_expert_used: int) -> float:
    """Return the ubatch tokens from which expert operations on weights in RAM may run on the GPU."""
    min_batch = min_batch or OFFLOAD_MIN_BATCH
    return min_batch * n_expert / n_expert_used if n_expert_used else float(min_batch)
