#!/usr/bin/env python3
"""Write a GGUF model with random weights and real geometry, for speed measurements and smoke tests.

Weights are streamed: float types are N(0, 0.02); block types get random codes and sub-block scales with the scale of
the block (or row) chosen so that the decoded weights have the same spread, which keeps activations finite. Norms,
biases and routers are F32. The tokenizer is an SPM-like one of byte tokens, ASCII characters and filler words up to the
vocabulary size.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.errors import IkError, UsageError
from ikcli.gguf.constants import FILE_TYPES, GGMLType, GGUFValueType
from ikcli.gguf.types import TYPES, TensorType
from ikcli.gguf.values import Typed
from ikcli.gguf.writer import GGUFWriter, NewTensor
from ikcli.quant.decode import decodable_types, dequantize
from ikcli.quant.encode import quantize
from ikcli.quant.formats import format_by_name, row_size

STD = 0.02
_CHUNK_ELEMENTS = 1 << 23


@dataclass(frozen=True, slots=True)
class Preset:
    """Geometry of a model; fields of other architectures are 0. With `heads_delta` most layers are recurrent."""

    arch: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    n_vocab: int
    head_dim: int = 128
    n_expert: int = 0
    n_expert_used: int = 0
    n_ff_exp: int = 0
    n_expert_shared: int = 0
    n_layer_dense: int = 0
    q_lora: int = 0
    kv_lora: int = 0
    n_rot: int = 128
    freq_base: float = 10000.0
    heads_delta: tuple[int, int] = (0, 0)  # of keys and of values, 128 columns each

    def is_recurrent(self, il: int) -> bool:
        """Whether a layer has a gated delta net."""
        return self.heads_delta[0] > 0 and (il + 1) % 4 != 0


PRESETS = {
    "llama": Preset("llama", 8, 2048, 5632, 16, 4, 32000),
    "qwen2": Preset("qwen2", 8, 1536, 8960, 12, 2, 32000, freq_base=1e6),
    "qwen3": Preset("qwen3", 8, 2048, 6144, 16, 8, 32000, freq_base=1e6),
    "qwen3moe": Preset(
        "qwen3moe", 4, 2048, 6144, 32, 4, 32000, n_expert=32, n_expert_used=8, n_ff_exp=768, freq_base=1e6
    ),
    "qwen35": Preset("qwen35", 8, 2048, 6144, 8, 2, 32000, 256, n_rot=64, freq_base=1e7, heads_delta=(16, 32)),
    "deepseek2": Preset(
        "deepseek2",
        4,
        2048,
        5632,
        16,
        16,
        102400,
        head_dim=192,
        n_expert=16,
        n_expert_used=6,
        n_ff_exp=1408,
        n_expert_shared=2,
        n_layer_dense=1,
        q_lora=1536,
        kv_lora=512,
        n_rot=64,
    ),
}


def vocabulary(n_vocab: int) -> dict[str, Any]:
    """Tokenizer keys of an SPM-like vocabulary with byte fallback."""
    special = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    chars = ["\u2581", *(chr(c) for c in range(33, 127))]
    n_filler = n_vocab - len(special) - len(bytes_) - len(chars)
    if n_filler < 0:
        raise UsageError(f"a vocabulary of {n_vocab} is too small, {n_vocab - n_filler} tokens are needed")
    tokens = special + bytes_ + chars + [f"\u2581w{i}" for i in range(n_filler)]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(chars) + n_filler)
    scores = np.zeros(n_vocab, np.float32)
    scores[259:] = -np.arange(n_vocab - 259, dtype=np.float32)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": True,
    }


def metadata(p: Preset, type: GGMLType) -> dict[str, Any]:
    """All key-value pairs of the model."""
    file_type = next((f.number for f in FILE_TYPES.values() if f.type == type), 0)
    keys: dict[str, Any] = {
        "block_count": p.n_layer,
        "context_length": 163840 if p.kv_lora else 32768,
        "embedding_length": p.n_embd,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "vocab_size": p.n_vocab,
        "feed_forward_length": p.n_ff,
        "attention.head_count": p.n_head,
        "attention.head_count_kv": p.n_head_kv,
        "rope.freq_base": p.freq_base,
        "rope.dimension_count": p.n_rot,
        "attention.key_length": p.head_dim,
        "attention.value_length": p.head_dim if p.heads_delta[0] else 128,
    }
    if p.heads_delta[0]:
        keys |= {
            "rope.dimension_sections": np.array([11, 11, 10, 0], np.int32),
            "ssm.conv_kernel": 4,
            "ssm.state_size": 128,
            "ssm.group_count": p.heads_delta[0],
            "ssm.time_step_rank": p.heads_delta[1],
            "ssm.inner_size": 128 * p.heads_delta[1],
        }
    if p.n_expert:
        keys |= {
            "expert_count": p.n_expert,
            "expert_used_count": p.n_expert_used,
            "expert_feed_forward_length": p.n_ff_exp,
        }
    if p.kv_lora:
        keys |= {
            "leading_dense_block_count": p.n_layer_dense,
            "attention.kv_lora_rank": p.kv_lora,
            "attention.q_lora_rank": p.q_lora,
            "expert_shared_count": p.n_expert_shared,
            "expert_weights_scale": 1.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 40.0,
            "rope.scaling.original_context_length": 4096,
            "rope.scaling.yarn_log_multiplier": 0.0707,
        }
    general = {
        "general.architecture": p.arch,
        "general.name": f"random {p.arch}",
        "general.file_type": Typed(file_type, GGUFValueType.UINT32),
    }
    return general | {f"{p.arch}.{k}": v for k, v in keys.items()} | vocabulary(p.n_vocab)


def _attention(p: Preset) -> dict[str, tuple[int, ...]]:
    if p.kv_lora:
        return {
            "attn_q_a": (p.n_embd, p.q_lora),
            "attn_q_a_norm": (p.q_lora,),
            "attn_q_b": (p.q_lora, p.n_head * p.head_dim),
            "attn_kv_a_mqa": (p.n_embd, p.kv_lora + p.n_rot),
            "attn_kv_a_norm": (p.kv_lora,),
            "attn_kv_b": (p.kv_lora, p.n_head * (p.head_dim - p.n_rot + 128)),
            "attn_output": (p.n_head * 128, p.n_embd),
        }
    shapes: dict[str, tuple[int, ...]] = {
        "attn_q": (p.n_embd, p.n_head * p.head_dim * (2 if p.heads_delta[0] else 1)),
        "attn_k": (p.n_embd, p.n_head_kv * p.head_dim),
        "attn_v": (p.n_embd, p.n_head_kv * p.head_dim),
        "attn_output": (p.n_head * p.head_dim, p.n_embd),
    }
    if p.arch.startswith("qwen3"):
        shapes |= {"attn_q_norm": (p.head_dim,), "attn_k_norm": (p.head_dim,)}
    return shapes


def _delta_net(p: Preset) -> dict[str, tuple[int, ...]]:
    keys, values = (128 * n for n in p.heads_delta)
    return {
        "attn_qkv": (p.n_embd, 2 * keys + values),
        "attn_gate": (p.n_embd, values),
        "ssm_conv1d": (4, 2 * keys + values),
        "ssm_alpha": (p.n_embd, p.heads_delta[1]),
        "ssm_beta": (p.n_embd, p.heads_delta[1]),
        "ssm_norm": (128,),
        "ssm_out": (values, p.n_embd),
    }


def _ffn(p: Preset, il: int) -> dict[str, tuple[int, ...]]:
    if not p.n_expert or il < p.n_layer_dense:
        return {"ffn_gate": (p.n_embd, p.n_ff), "ffn_up": (p.n_embd, p.n_ff), "ffn_down": (p.n_ff, p.n_embd)}
    shapes: dict[str, tuple[int, ...]] = {
        "ffn_gate_inp": (p.n_embd, p.n_expert),
        "ffn_gate_exps": (p.n_embd, p.n_ff_exp, p.n_expert),
        "ffn_up_exps": (p.n_embd, p.n_ff_exp, p.n_expert),
        "ffn_down_exps": (p.n_ff_exp, p.n_embd, p.n_expert),
    }
    if p.n_expert_shared:
        n_ff = p.n_ff_exp * p.n_expert_shared
        shapes |= {"ffn_gate_shexp": (p.n_embd, n_ff), "ffn_up_shexp": (p.n_embd, n_ff)}
        shapes |= {"ffn_down_shexp": (n_ff, p.n_embd)}
    return shapes


def shapes(p: Preset) -> dict[str, tuple[int, ...]]:
    """Tensor names and GGUF-order shapes in file order."""
    out: dict[str, tuple[int, ...]] = {"token_embd.weight": (p.n_embd, p.n_vocab)}
    for il in range(p.n_layer):
        ffn_norm = "post_attention_norm" if p.heads_delta[0] else "ffn_norm"
        mixer = _delta_net(p) if p.is_recurrent(il) else _attention(p)
        layer = {"attn_norm": (p.n_embd,), ffn_norm: (p.n_embd,)} | mixer | _ffn(p, il)
        out |= {f"blk.{il}.{name}.weight": shape for name, shape in layer.items()}
        if p.is_recurrent(il):
            out |= {f"blk.{il}.{name}": (p.heads_delta[1],) for name in ("ssm_a", "ssm_dt.bias")}
        if p.arch == "qwen2":
            out |= {f"blk.{il}.{n}.bias": layer[n][1:] for n in ("attn_q", "attn_k", "attn_v")}
    return out | {"output_norm.weight": (p.n_embd,), "output.weight": (p.n_embd, p.n_vocab)}


def tensor_type(name: str, shape: tuple[int, ...], type: GGMLType) -> GGMLType:
    """F32 for vectors, routers and convolutions, else `type` or its fallback when the row length does not divide."""
    if len(shape) == 1 or "ffn_gate_inp" in name or "conv1d" in name:
        return GGMLType.F32
    if shape[0] % TYPES[type].block_size == 0:
        return type
    fallback = TYPES[type].fallback
    if fallback is None or shape[0] % TYPES[fallback].block_size:
        raise UsageError(f"tensor {name} has rows of {shape[0]}, which {TYPES[type].name} cannot hold")
    return fallback


def _fill_sub_scales(blocks: npt.NDArray[np.uint8], type: GGMLType, rng: np.random.Generator) -> None:
    """Make the minimum of every sub-block equal its scale, so that dmin = d * mean code centres the weights."""
    n = len(blocks)
    if type == GGMLType.Q2_K:
        blocks[:, :16] = rng.integers(8, 16, (n, 16), np.uint8) * np.uint8(17)
    elif type in (GGMLType.Q4_K, GGMLType.Q5_K):
        sc = rng.integers(32, 64, (n, 8), np.uint8)
        low, high = sc[:, :4], sc[:, 4:]
        blocks[:, 4:8] = blocks[:, 8:12] = low | high >> 4 << 6
        blocks[:, 12:16] = (high & 15) * np.uint8(17)
    elif type == GGMLType.Q6_K:
        blocks[:, 192:208] = rng.integers(64, 128, (n, 16), np.uint8)


def random_blocks(fmt: TensorType, n: int, d: float, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """n blocks with random codes and block scale d * U(0.75, 1.25), of either sign where encoders use both."""
    blocks = np.frombuffer(bytearray(rng.bytes(n * fmt.type_size)), np.uint8).reshape(n, fmt.type_size)
    _fill_sub_scales(blocks, fmt.type, rng)
    scale = (rng.random(n, np.float32) * np.float32(0.5) + np.float32(0.75)) * np.float32(d)
    minimum = {GGMLType.Q2_K: 1.5, GGMLType.Q4_K: 7.5, GGMLType.Q5_K: 15.5, GGMLType.Q4_1: -7.5, GGMLType.Q5_1: -15.5}
    if fmt.type != GGMLType.Q8_0 and fmt.type not in minimum:  # codes reach one further below zero than above
        scale *= rng.choice(np.array([-1, 1], np.float32), n)
    factors = (1.0, minimum.get(fmt.type, 0.0))
    for offset, factor in zip(fmt.scales, factors, strict=False):
        blocks[:, offset : offset + 2] = (scale * np.float32(factor)).astype("<f2").view(np.uint8).reshape(n, 2)
    return blocks


def random_rows(fmt: TensorType, n: int, k: int, d: float, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """n rows of k random codes, with row scale d * U(0.75, 1.25) of either sign."""
    row_bytes = row_size(fmt.type, k)
    rows = np.frombuffer(bytearray(rng.bytes(n * row_bytes)), np.uint8).reshape(n, row_bytes)
    scale = rng.uniform(0.75, 1.25, (n, 1)) * rng.choice([-d, d], (n, 1))
    rows[:, : fmt.row_meta_size] = scale.astype(f"<f{fmt.row_meta_size}").view(np.uint8)
    return rows


@cache
def _unit_rms(type: GGMLType) -> float:
    """Root mean square of the weights of random blocks, or rows, with d = 1."""
    fmt, rng = TYPES[type], np.random.default_rng(0)
    if fmt.row_meta_size:
        values = dequantize(random_rows(fmt, 64, 2048, 1.0, rng), type, (2048, 64))
    else:
        values = dequantize(random_blocks(fmt, 512, 1.0, rng), type, (512 * fmt.block_size,))
    return float(np.sqrt(np.mean(values.astype(np.float64) ** 2)))


def tensor_data(spec: NewTensor, rng: np.random.Generator) -> Iterator[npt.NDArray[np.uint8]]:
    """Chunks of the bytes of one tensor."""
    n = int(np.prod(spec.shape, dtype=np.int64))
    fmt, k = TYPES[spec.type], spec.shape[0]
    per_chunk = max(1, _CHUNK_ELEMENTS // k) * k
    for start in range(0, n, per_chunk):
        count = min(per_chunk, n - start)
        if fmt.kind == "float":
            values = rng.standard_normal(count, np.float32) * np.float32(STD)
            if spec.name.endswith("norm.weight"):
                values += np.float32(1)
            elif spec.name.endswith("ssm_a"):  # below 0, so that states fade
                values -= np.float32(1)
            yield quantize(values, spec.type)
            continue
        d = STD / _unit_rms(spec.type)
        if fmt.row_meta_size:
            yield random_rows(fmt, count // k, k, d, rng).reshape(-1)
        else:
            yield random_blocks(fmt, count // fmt.block_size, d, rng).reshape(-1)


def _can_be_filled(type: TensorType) -> bool:
    """Whether nothing but scales of blocks or of rows is to be chosen with care."""
    row_scale = type.kind == "codes" and type.row_meta_size in (2, 4)
    return type.rows == 1 and (type.kind == "float" or row_scale or bool(type.scales))


def check_type(name: str) -> GGMLType:
    """A type this script can fill with random weights, by name."""
    fmt = format_by_name(name)
    usable = [t for t in TYPES.values() if t.type in decodable_types() and _can_be_filled(t)]
    if fmt not in usable:
        names = ", ".join(t.name for t in usable)
        raise UsageError(f"random weights of type {fmt.name} cannot be made directly; use one of {names}")
    return fmt.type


def main() -> int:
    parser = argparse.ArgumentParser(description="Write a GGUF model with random weights.")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="llama")
    parser.add_argument("--type", default="F16", help="weight type, e.g. F16, Q8_0, Q4_0, Q4_K, Q6_K")
    parser.add_argument("--layers", type=int, help="number of layers instead of the preset's")
    parser.add_argument("--vocab", type=int, help="vocabulary size instead of the preset's")
    parser.add_argument("--experts", type=int, help="number of routed experts instead of the preset's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    p = PRESETS[args.preset]
    p = replace(p, n_layer=args.layers or p.n_layer, n_vocab=args.vocab or p.n_vocab)
    if args.experts and p.n_expert:
        p = replace(p, n_expert=args.experts, n_expert_used=min(p.n_expert_used, args.experts))
    start = time.perf_counter()
    try:
        type = check_type(args.type)
        tensors = [NewTensor(n, s, tensor_type(n, s, type)) for n, s in shapes(p).items()]
        rng = np.random.Generator(np.random.SFC64(args.seed))
        with GGUFWriter(args.output, metadata(p, type), tensors) as writer:
            for t in tensors:
                writer.write_tensor(t.name, tensor_data(t, rng))
    except IkError as e:
        print(f"error: {e}", file=sys.stderr)
        return e.exit_code
    n_bytes = sum(t.n_bytes for t in tensors)
    n_weights = sum(int(np.prod(t.shape, dtype=np.int64)) for t in tensors)
    seconds = time.perf_counter() - start
    print(f"{args.output}: {len(tensors)} tensors, {n_weights / 1e6:.1f} M weights, {n_bytes / 2**20:.1f} MiB")
    print(f"written in {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
