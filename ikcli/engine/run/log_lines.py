"""Format the log lines about a loaded model and its context, with the arithmetic behind them. Plain data in, text out.

Sizes are bytes; MiB and GiB are powers of two, "B" parameters 1e9. The lines have the form that log readers written for
llama.cpp expect (src/llama.cpp: llm_load_print_meta, llama_new_context_with_model).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ikcli.gguf.types import TYPES
from ikcli.graph import Cache, Per
from ikcli.log import shown_size

MIB = 1024.0 * 1024.0
_TRAITS = {traits.name: traits for traits in TYPES.values()}
_NON_REPEATING = ("token_embd.weight", "output.weight", "output_norm.weight")


@dataclass(frozen=True, slots=True)
class TensorRow:
    """The attributes of a tensor that the report needs: shape in ggml order (ne0 first), type name, bytes."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    n_bytes: int

    @property
    def n_elements(self) -> int:
        count = 1
        for ne in self.shape:
            count *= ne
        return count


@dataclass(frozen=True, slots=True)
class KVSize:
    """Bytes of the cache. With `latent`, K is the MLA row and V the transposed copy, if there is one."""

    k_bytes: int
    v_bytes: int
    latent: bool
    state_bytes: int = 0

    @property
    def total(self) -> int:
        return self.k_bytes + self.v_bytes + self.state_bytes


def kv_size(caches: Mapping[Cache, int]) -> KVSize:
    """Return the bytes of cache tensors by content."""
    sizes: dict[str, int] = {}
    for cache, n_bytes in caches.items():
        kind = "state" if cache.per is Per.SEQUENCE else cache.content
        sizes[kind] = sizes.get(kind, 0) + n_bytes
    k, v, state = (
        sum(sizes.get(kind, 0) for kind in kinds)
        for kinds in (("k", "kv", "k_cross"), ("v", "kv_t", "v_cross"), ("state",))
    )
    return KVSize(k, v, "kv" in sizes, state)


def kv_lines(size: KVSize, n_ctx: int, type_k: str, type_v: str, buffers: Mapping[str, int]) -> list[str]:
    """Return `KV buffer size` per device and the `KV self size` line, which also shows n_ctx."""
    lines = [f"llama_kv_cache_init: {name:>10} KV buffer size = {_mib(n)} MiB" for name, n in buffers.items()]
    head = f"llama_new_context_with_model: KV self size  = {size.total / MIB:7.2f} MiB, "
    if size.latent:
        copy = f"kv^T ({type_v}): {size.v_bytes / MIB:7.2f} MiB" if size.v_bytes else "kv^T: not used"
        text = f"c^KV ({type_k}): {size.k_bytes / MIB:7.2f} MiB, {copy}"
    else:
        text = f"K ({type_k}): {size.k_bytes / MIB:7.2f} MiB, V ({type_v}): {size.v_bytes / MIB:7.2f} MiB"
    if size.state_bytes:
        text += f", states: {size.state_bytes / MIB:7.2f} MiB"
    return [*lines, f"{head}{text}, n_ctx = {n_ctx}"]


def type_histogram(tensors: Sequence[TensorRow]) -> dict[str, int]:
    """Return the number of tensors per type, in the order of the type ids."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        counts[tensor.type_name] = counts.get(tensor.type_name, 0) + 1
    return {name: counts[name] for name in _TRAITS if name in counts}


def type_lines(tensors: Sequence[TensorRow]) -> list[str]:
    """Return the `- type` lines of the loader."""
    return [
        f"llama_model_loader: - type {name:>4}: {count:4d} tensors" for name, count in type_histogram(tensors).items()
    ]


def loaded_line(n_kv: int, n_tensors: int, path: str, version: int = 3) -> str:
    """Return the loader's line with counts, path and file version."""
    label = f"GGUF V{version}{' (latest)' if version == 3 else ''}"
    return (
        f"llama_model_loader: loaded meta data with {n_kv} key-value pairs and {n_tensors} tensors "
        f"from {path} (version {label})"
    )


def kv_pair_lines(pairs: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return `- kv` lines from (key, type text, value text); long values are cut at 40 characters."""
    lines: list[str] = []
    for index, (key, type_text, value) in enumerate(pairs):
        text = value.replace("\n", "\\n")
        text = text if len(text) <= 40 else text[:37] + "..."
        lines.append(f"llama_model_loader: - kv {index:3d}: {key:>42} {type_text:<16} = {text}")
    return lines


def count_text(n_elements: int) -> str:
    """Return a parameter count as the loader prints it: `672.050 B`, `15.706 M`."""
    for limit, scale, unit in ((1e12, 1e-12, "T"), (1e9, 1e-9, "B"), (1e6, 1e-6, "M")):
        if n_elements >= limit:
            return f"{n_elements * scale:.3f} {unit}"
    return f"{n_elements * 1e-3:.3f} K"


def size_text(n_bytes: int, n_elements: int) -> str:
    """Return `226.003 GiB (2.889 BPW)`; sizes below one GiB are in MiB."""
    return f"{shown_size(n_bytes, 3, least=2**20)} ({n_bytes * 8.0 / max(1, n_elements):.3f} BPW)"


def model_size_lines(tensors: Sequence[TensorRow], ftype: str = "") -> list[str]:
    """Return the lines on file type, parameters, size and repeating layers of a model."""
    lines = [f"llm_load_print_meta: model ftype      = {ftype}"] if ftype else []
    n_bytes, n_elements = _totals(tensors)
    lines.append(f"llm_load_print_meta: model params     = {count_text(n_elements)}")
    lines.append(f"llm_load_print_meta: model size       = {size_text(n_bytes, n_elements)} ")
    repeating = [tensor for tensor in tensors if tensor.name not in _NON_REPEATING]
    rep_bytes, rep_elements = _totals(repeating)
    if 0 < rep_bytes < n_bytes:
        size = size_text(rep_bytes, rep_elements).removesuffix(")")
        lines.append(f"llm_load_print_meta: repeating layers = {size}, {count_text(rep_elements)} parameters)")
    return lines


def _totals(tensors: Sequence[TensorRow]) -> tuple[int, int]:
    return sum(tensor.n_bytes for tensor in tensors), sum(tensor.n_elements for tensor in tensors)


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / MIB:8.2f}"


def weight_buffer_lines(buffers: Mapping[str, int]) -> list[str]:
    """Return the weight bytes per device (exact tensor bytes, synthesised tensors included)."""
    return [f"llm_load_tensors: {name:>10} buffer size = {_mib(n)} MiB" for name, n in buffers.items()]


def context_lines(settings: Mapping[str, object]) -> list[str]:
    """Return one line per context setting, in the given order (`n_ctx`, `n_batch`, ..., `ser`)."""
    return [f"llama_new_context_with_model: {key:<10} = {value}" for key, value in settings.items()]


def ser_text(ser: tuple[int, float] | None) -> str:
    """Return `6, 1`, or `-1, 0` when off."""
    return f"{ser[0]}, {ser[1]:g}" if ser else "-1, 0"


def compute_lines(
    output: Mapping[str, int], compute: Mapping[str, int], n_nodes: int, n_splits: int, n_copies: int = 1
) -> list[str]:
    """Return output and compute buffers per device, then graph nodes and splits."""
    head = "llama_new_context_with_model:"
    lines = [f"{head} {name:>10}  output buffer size = {_mib(n)} MiB" for name, n in output.items()]
    lines += [f"{head} {name:>10} compute buffer size = {_mib(n)} MiB" for name, n in compute.items()]
    lines += [f"{head} graph nodes  = {n_nodes}", f"{head} graph splits = {n_splits}"]
    if n_copies > 1:
        lines.append(f"{head} pipeline parallelism enabled (n_copies={n_copies})")
    return lines


def total_lines(parts: Mapping[str, Mapping[str, int]], free: Mapping[str, int] | None = None) -> list[str]:
    """Return `TOTAL` per device: its parts, their sum, and the rest if the free memory is known."""
    lines: list[str] = []
    for device, sizes in parts.items():
        total = sum(sizes.values())
        detail = " + ".join(f"{name} {n / MIB:.2f}" for name, n in sizes.items())
        line = f"{device:>10} TOTAL = {total / MIB:.2f} MiB ({detail})"
        if free is not None and device in free:
            line += f", {free[device] / MIB:.2f} MiB free, margin {(free[device] - total) / MIB:.2f} MiB"
        lines.append(line)
    return lines
