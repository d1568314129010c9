"""Memory of a run before it reads weights: bytes of weights, KV cache, output and compute buffers per device.

Weights, cache and output are exact (tensors made at load time included); the compute buffer is the peak of the recorded
graph's values for one ubatch, without the scratch space of single kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ikcli import models
from ikcli.config import padded_ctx, sequences_per_batch
from ikcli.engine import report
from ikcli.engine.placement import CPU, placement_sentence
from ikcli.engine.startup import Startup
from ikcli.gguf.constants import TYPE_TRAITS, file_type_label, row_n_bytes, tensor_n_bytes
from ikcli.graph import Graph, Lifetime, Node, Rows, assign_offsets
from ikcli.models import GraphConfig, Weights, check_tensors
from ikcli.models.mla import DerivedSpec, derived_specs
from ikcli.models.tensors import TensorLike
from ikcli.quant.decode import dequantize

_TYPES = {traits.name: type for type, traits in TYPE_TRAITS.items()}
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes per device and part ("weights", "KV", "output", "compute"), and the numbers behind the log lines."""

    parts: dict[str, dict[str, int]]
    weights: dict[str, int]
    n_ctx: int
    kv: report.KVSize
    n_nodes: int

    @property
    def total(self) -> int:
        return sum(sum(part.values()) for part in self.parts.values())


def make_plan(startup: Startup) -> MemoryPlan:
    """Record the graphs of the run and add up their memory."""
    config, file, n_vocab = startup.config, startup.file, startup.hparams.n_vocab
    n_seq = sequences_per_batch(config) if config.command in ("perplexity", "imatrix") else 1
    cells = padded_ctx(config.n_ctx * n_seq, config.flash_attn)
    graphs, derived = _record(startup, cells)
    weights = {CPU: sum(tensor_n_bytes(spec.type, spec.shape) for spec in derived.values())}
    for name, tensor in file.tensors.items():
        buffer = startup.placement.buffer_of[name]
        weights[buffer] = weights.get(buffer, 0) + tensor.n_bytes
    kv = _kv_size(graphs[0], cells)
    n_outputs = config.n_ubatch if config.command == "perplexity" else 1
    compute = max(activation_bytes(graph, config.n_ubatch, n_outputs, cells) for graph in graphs)
    parts = {name: {"weights": n_bytes} for name, n_bytes in weights.items()}
    parts[CPU] |= {"KV": kv.total, "output": report.output_buffer_bytes(n_outputs, n_vocab), "compute": compute}
    return MemoryPlan(parts, weights, cells, kv, len(graphs[0].nodes))


def _record(startup: Startup, cells: int) -> tuple[list[Graph], dict[str, DerivedSpec]]:
    """The prompt and the generation graph, and the tensors that will be made at load time."""
    config, hp, file = startup.config, startup.hparams, startup.file
    source = str(file.paths[0])
    graph_config = GraphConfig(
        mla=config.mla, flash_attn=config.flash_attn, amb=config.amb, fmoe=config.fmoe, ser=config.ser,
        type_k=_TYPES[config.type_k], type_v=_TYPES[config.type_v], n_ctx=cells, n_ubatch=config.n_ubatch,
    )  # fmt: skip
    module = models.find(hp.arch, source)
    check_tensors(module.tensor_shapes(hp), file.tensors, source)
    derived = derived_specs(file.tensors, hp, graph_config)
    infos: dict[str, TensorLike] = {**file.tensors, **derived}

    def small(name: str) -> npt.NDArray[np.float32]:
        # Recording reads rotation factors and the like, never a weight matrix.
        return dequantize(file.data(name), file.tensors[name].type, file.tensors[name].shape)

    graphs: list[Graph] = []
    for expand in (True, False):
        graph = Graph()
        module.build(graph, hp, Weights(infos, source, small), replace(graph_config, expand=expand))
        graphs.append(graph)
    return graphs, derived


def _kv_size(graph: Graph, cells: int) -> report.KVSize:
    k_bytes = v_bytes = 0
    for cache in graph.caches.values():
        n = (
            cache.cols * row_n_bytes(cache.type, cells)
            if cache.transposed
            else cells * row_n_bytes(cache.type, cache.cols)
        )
        if cache.kind in ("k", "kv"):
            k_bytes += n
        else:
            v_bytes += n
    return report.KVSize(k_bytes, v_bytes, any(cache.kind == "kv" for cache in graph.caches.values()))


def activation_bytes(graph: Graph, n_tokens: int, n_outputs: int, n_kv: int) -> int:
    """Peak bytes of the values of a graph when buffers are reused by lifetime."""
    rows = {Rows.TOKENS: n_tokens, Rows.OUTPUTS: n_outputs, Rows.KV: n_kv}
    last = {node.index: node.index for node in graph.nodes}
    for node in graph.nodes:
        for source in node.inputs:
            if isinstance(source, Node):
                last[source.index] = max(last[source.index], node.index)
    width = {"f32": 4, "i32": 4, "i64": 8, "f16": 2}
    lifetimes = [
        Lifetime(rows[node.rows.symbol] * node.rows.factor * node.cols * width.get(node.dtype, 4), node.index,
                 last[node.index])
        for node in graph.nodes
    ]  # fmt: skip
    return assign_offsets(lifetimes)[1]


def available_memory(path: Path = _MEMINFO) -> int | None:
    """Bytes of RAM available to new programs, or None where the system does not say."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def plan_lines(startup: Startup, plan: MemoryPlan, free: int | None) -> list[str]:
    """The report of `ik plan`: model, cache, devices, and what would help if it does not fit."""
    file, config = startup.file, startup.config
    tensors = [report.TensorRow(t.name, t.shape, TYPE_TRAITS[t.type].name, t.n_bytes) for t in file.tensors.values()]
    ftype = file.get("general.file_type")
    lines = [report.loaded_line(len(file.metadata), len(tensors), str(file.paths[0]), file.version)]
    lines += report.type_lines(tensors)
    lines += report.model_size_lines(tensors, file_type_label(int(ftype)) if ftype is not None else "")
    lines += report.weight_buffer_lines(plan.weights)
    lines += report.context_lines(
        {
            "n_ctx": plan.n_ctx, "n_batch": config.n_batch, "n_ubatch": config.n_ubatch,
            "flash_attn": int(config.flash_attn), "mla_attn": config.mla, "attn_max_b": config.amb,
            "fused_moe": int(config.fmoe), "ser": report.ser_text(config.ser),
        }
    )  # fmt: skip
    lines += report.kv_lines(plan.kv, plan.n_ctx, config.type_k, config.type_v, {CPU: plan.kv.total})
    lines += report.compute_lines({CPU: plan.parts[CPU]["output"]}, {CPU: plan.parts[CPU]["compute"]}, plan.n_nodes, 1)
    sentence = placement_sentence(startup.placement.buffer_of)
    lines += [sentence] if sentence else []
    lines += report.total_lines(plan.parts, {CPU: free} if free is not None else None)
    if free is not None and plan.total > free:
        lines.append(advice(plan, free, config.n_ctx))
    return lines


def advice(plan: MemoryPlan, free: int, n_ctx: int) -> str:
    """What to lower when the run does not fit."""
    short = plan.total - free
    parts = plan.parts[CPU]
    text = f"does not fit: {short / report.MIB:.2f} MiB too much"
    if parts["KV"] > short and n_ctx:
        text += f"; -c {int(n_ctx * (1 - short / parts['KV'])) // 256 * 256} would fit, or -ctk q8_0 may"
    elif parts["compute"] > short:
        text += "; a smaller -ub would fit"
    else:
        text += "; use a smaller quantization of the model"
    return text
