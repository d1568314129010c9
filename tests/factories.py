"""Small seeded models in memory, one per architecture and variant; they look like an opened GGUF file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli import models
from ikcli.gguf.constants import GGMLType
from ikcli.models import HParams
from ikcli.models.heads import mtp
from ikcli.models.tensors import TensorSpecs
from ikcli.quant.decode import dequantize
from ikcli.quant.encode import quantize

N_VOCAB = 96


@dataclass(frozen=True)
class MemoryTensor:
    """Type, shape (GGUF order) and bytes of a tensor."""

    type: GGMLType
    shape: tuple[int, ...]
    bytes: npt.NDArray[np.uint8]


@dataclass
class MemoryModel:
    """What sessions need of a file: metadata, tensors, data."""

    metadata: dict[str, Any]
    tensors: dict[str, MemoryTensor] = field(default_factory=dict)
    paths: list[Path] = field(default_factory=lambda: [Path("tiny.gguf")])

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        return self.tensors[name].bytes

    def values(self, name: str) -> npt.NDArray[np.float32]:
        """Float32 values in NumPy order."""
        t = self.tensors[name]
        return dequantize(t.bytes, t.type, t.shape)

    def set(self, name: str, values: npt.NDArray[Any], type_: GGMLType = GGMLType.F32) -> None:
        """Store values (NumPy order) as a tensor."""
        array = np.ascontiguousarray(values, np.float32)
        self.tensors[name] = MemoryTensor(type_, array.shape[::-1], quantize(array, type_))


def base_metadata(arch: str, **keys: Any) -> dict[str, Any]:
    """Keys every architecture has; `keys` (with _ for .) are added or replace them, None removes."""
    values: dict[str, Any] = {
        "block_count": 2,
        "context_length": 128,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "vocab_size": N_VOCAB,
    }
    values |= keys
    whole = ("xielu.",)  # of keys without the architecture in front
    named = {k if k.startswith(whole) else f"{arch}.{k}": v for k, v in values.items() if v is not None}
    return {"general.architecture": arch, **named}


def tiny_model(
    arch: str = "llama",
    *,
    seed: int = 1,
    optional: tuple[str, ...] = (),
    tied: bool = False,
    type_: GGMLType = GGMLType.F32,
    **keys: Any,
) -> MemoryModel:
    """A random model; `optional`: endings of optional tensors to add; tied: without an output matrix."""
    model = MemoryModel(base_metadata(arch, **keys))
    hp = HParams.from_gguf(model.metadata, {}, "tiny.gguf")
    fill(model, models.find(arch).tensor_shapes(hp), np.random.default_rng(seed), optional, tied=tied, type_=type_)
    return model


def add_heads(model: MemoryModel, n: int = 1, *, dense: bool = False, own: bool = False, seed: int = 5) -> MemoryModel:
    """Add heads that predict further tokens to a model; `dense`: without experts; `own`: with embeddings and matrix."""
    arch = model.metadata["general.architecture"]
    blocks, further = f"{arch}.block_count", f"{arch}.nextn_predict_layers"
    n_layer = model.metadata[blocks] - model.metadata.get(further, 0)
    model.metadata |= {blocks: n_layer + n, further: n}
    blocks_of_heads, kinds = range(n_layer, n_layer + n), ("ffn_gate" if dense else "ffn_gate_inp", "nextn.eh_proj")
    tensor = next(iter(model.tensors.values()))
    named = {f"blk.{il}.{kind}.weight": tensor for il in blocks_of_heads for kind in kinds}
    hp = mtp.read_further(model.metadata, model.tensors | named, "tiny.gguf")
    module: Any = models.find(arch)
    optional = ("attn_kv_b.weight", "shared_head_norm.weight", "sinks.weight", "exp_probs_b.bias")
    optional += ("embed_tokens.weight", "head_head.weight") if own else ()
    fill(model, mtp.tensor_shapes(module, hp, named), np.random.default_rng(seed), optional)
    return model


def fill(
    model: MemoryModel,
    specs: TensorSpecs,
    rng: np.random.Generator,
    optional: tuple[str, ...] = (),
    *,
    tied: bool = False,
    type_: GGMLType = GGMLType.F32,
) -> None:
    """Add random tensors; see `tiny_model`."""
    decays = 1 if any(key.endswith("kda.gate_lower_bound") for key in model.metadata) else -1
    for name, spec in specs.items():
        if not (spec.required or (name == "output.weight" and not tied) or name.endswith(optional)):
            continue
        shape = spec.shape[::-1]
        if name.endswith("norm.weight"):
            model.set(name, 1 + 0.1 * rng.standard_normal(shape))
        elif name.endswith("ssm_a"):  # logarithms of decays, or what they are multiplied with
            model.set(name, decays * np.exp(rng.standard_normal(shape)))
        elif name == "rope_freqs.weight":
            model.set(name, 1 + 7 * rng.random(shape))
        elif name.endswith(".bias"):
            model.set(name, 0.2 * rng.standard_normal(shape))
        elif name.endswith("ffn_gate_inp.weight"):
            model.set(name, rng.standard_normal(shape) / np.sqrt(shape[-1]))
        else:
            gain = 3.0 if ".attn_" in name else 1.5
            model.set(name, gain * rng.standard_normal(shape) / np.sqrt(shape[-1]), type_)


def tiny_deepseek2(layout: str = "legacy", *, n_head: int = 4, seed: int = 2, **keys: Any) -> MemoryModel:
    """A DeepSeek-like model with MLA of rank 64, rotated part 32, heads 64/32.

    layout: "legacy" (kv_b), "mainline" (k_b, v_b in 3-D and the keys of the absorbed form), "ik" (all three, 2-D).
    """
    defaults: dict[str, Any] = {
        "block_count": 3,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head,
        "attention.kv_lora_rank": 64,
        "attention.q_lora_rank": 48,
        "attention.key_length": 64,
        "attention.value_length": 32,
        "rope.dimension_count": 32,
        "leading_dense_block_count": 1,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 32,
        "expert_shared_count": 2,
        "expert_gating_func": 1,
        "expert_weights_scale": 1.5,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 40.0,
        "rope.scaling.original_context_length": 64,
        "rope.scaling.yarn_log_multiplier": 0.0707,
    }
    model = tiny_model("deepseek2", seed=seed, optional=("kv_b.weight", "exp_probs_b.bias"), **(defaults | keys))
    rank, nope, dv = 64, 32, 32
    for il in range(3):
        kv = model.values(f"blk.{il}.attn_kv_b.weight").reshape(n_head, nope + dv, rank)
        k_b, v_b = kv[:, :nope].transpose(0, 2, 1), kv[:, nope:]
        if layout == "ik":
            k_b, v_b = k_b.reshape(-1, nope), v_b.reshape(-1, rank)
        if layout != "legacy":
            model.set(f"blk.{il}.attn_k_b.weight", k_b)
            model.set(f"blk.{il}.attn_v_b.weight", v_b)
        if layout == "mainline":
            del model.tensors[f"blk.{il}.attn_kv_b.weight"]
    if layout == "mainline":
        prefix = "deepseek2.attention."
        model.metadata |= {f"{prefix}head_count_kv": 1, f"{prefix}key_length": 96, f"{prefix}value_length": 64}
        model.metadata |= {f"{prefix}key_length_mla": 64, f"{prefix}value_length_mla": 32}
    return model
