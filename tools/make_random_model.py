#!/usr/bin/env python3
"""Write a GGUF model with random weights and real geometry, for speed measurements and smoke tests.

Weights are streamed: float types are N(0, 0.02); block types get random codes and sub-block scales with the scale of
the block (or row) chosen so that the decoded weights have the same spread, which keeps activations finite. Norms,
biases and routers are F32. The tokenizer is an SPM-like one of byte tokens, ASCII characters and filler words up to the
vocabulary size.

Such a model uses few of its experts: its embeddings are small, so that all tokens have nearly the states that attention
makes. With `--router-skew` embeddings are N(0, 1), tokens differ, and they use experts as Zipf's law of this exponent
says (0: all alike).
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli import models
from ikcli.errors import IkError, UsageError
from ikcli.gguf.constants import FILE_TYPES, GGMLType, GGUFValueType
from ikcli.gguf.reader import TensorInfo
from ikcli.gguf.types import TYPES, TensorType
from ikcli.gguf.values import Typed
from ikcli.gguf.writer import GGUFWriter, NewTensor
from ikcli.models import HParams
from ikcli.models.heads import mtp
from ikcli.quant.custom_rules import parse_custom_rules
from ikcli.quant.decode import decodable_types, dequantize
from ikcli.quant.encode import quantize
from ikcli.quant.formats import format_by_name, row_size
from ikcli.quant.recipes import RecipeOptions, choose_types

Keys = dict[str, Any]
STD = 0.02
_CHUNK_ELEMENTS = 1 << 23


@dataclass(frozen=True, slots=True)
class Preset:
    """A model by its architecture and keys, with fewer layers than the real one.

    `optional`: suffixes of the tensors that it has beside those that the architecture needs.
    """

    arch: str
    keys: Mapping[str, Any]
    optional: tuple[str, ...] = ()
    n_vocab: int = 32000
    n_heads: int = 0  # that predict further tokens (MTP), as blocks after the layers

    def changed(self, layers: int | None, vocab: int | None, experts: int | None, heads: int = 0) -> Preset:
        """Return the preset with another number of layers, tokens, or routed experts if it has any, and with heads."""
        keys = dict(self.keys)
        if layers:
            keys["block_count"] = layers
        if experts and "expert_count" in keys:
            keys |= {"expert_count": experts, "expert_used_count": min(keys["expert_used_count"], experts)}
        if heads:
            keys |= {"block_count": keys["block_count"] + heads, "nextn_predict_layers": heads}
        return replace(self, keys=keys, n_vocab=vocab or self.n_vocab, n_heads=heads)

    def with_keys(self, assignments: Sequence[str]) -> Preset:
        """Return the preset with other whole numbers, each given as KEY=N; raise UsageError for a key it lacks."""
        keys = dict(self.keys)
        for text in assignments:
            key, _, value = text.partition("=")
            if not isinstance(keys.get(key), int) or not value.isdecimal():
                known = ", ".join(sorted(k for k, v in keys.items() if isinstance(v, int)))
                raise UsageError(f"--set {text}: expected KEY=N with one of {known}")
            keys[key] = int(value)
        return replace(self, keys=keys)


def _geometry(layers: int, width: int, ff: int, heads: int, heads_kv: int, head: int = 128, base: float = 1e6) -> Keys:
    return {
        "block_count": layers, "context_length": 32768, "embedding_length": width, "feed_forward_length": ff,
        "attention.head_count": heads, "attention.head_count_kv": heads_kv, "attention.key_length": head,
        "attention.value_length": head, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": base,
        "rope.dimension_count": head,
    }  # fmt: skip


def _experts(n: int, used: int, ff: int, **more: Any) -> Keys:
    return {"expert_count": n, "expert_used_count": used, "expert_feed_forward_length": ff, **more}


def _delta_net(keys: int, values: int) -> Keys:
    """Return the keys of delta-net heads of 128 columns."""
    return {
        "rope.dimension_count": 64, "rope.dimension_sections": np.array([11, 11, 10, 0], np.int32),
        "ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": keys, "ssm.time_step_rank": values,
        "ssm.inner_size": 128 * values,
    }  # fmt: skip


def _mamba2(heads: int) -> Keys:
    """Return the keys of Mamba 2's mixer with heads of 64 columns."""
    return {
        "ssm.conv_kernel": 4, "ssm.inner_size": 64 * heads, "ssm.state_size": 128, "ssm.time_step_rank": heads,
        "ssm.group_count": 1,
    }  # fmt: skip


_MLA = {
    "context_length": 163840, "attention.key_length": 192, "attention.value_length": 128, "rope.dimension_count": 64,
    "rope.freq_base": 10000.0, "attention.kv_lora_rank": 512, "attention.q_lora_rank": 1536,
    "leading_dense_block_count": 1, "expert_shared_count": 2, "expert_weights_scale": 1.0, "rope.scaling.type": "yarn",
    "rope.scaling.factor": 40.0, "rope.scaling.original_context_length": 4096,
    "rope.scaling.yarn_log_multiplier": 0.0707,
}  # fmt: skip
_QKV_BIAS = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
_YARN_32 = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096,
}  # fmt: skip
PRESETS = {
    "llama": Preset("llama", _geometry(8, 2048, 5632, 16, 4, base=10000.0)),
    "qwen2": Preset("qwen2", _geometry(8, 1536, 8960, 12, 2), _QKV_BIAS),
    "qwen3": Preset("qwen3", _geometry(8, 2048, 6144, 16, 8)),
    "qwen3moe": Preset("qwen3moe", _geometry(4, 2048, 6144, 32, 4) | _experts(32, 8, 768)),
    "qwen35": Preset("qwen35", _geometry(8, 2048, 6144, 8, 2, 256, 1e7) | _delta_net(16, 32)),
    "qwen35moe": Preset(
        "qwen35moe",
        _geometry(4, 2048, 512, 16, 2, 256, 1e7) | _delta_net(16, 32)
        | _experts(32, 8, 512, expert_shared_feed_forward_length=512),
    ),
    "deepseek2": Preset(
        "deepseek2", _geometry(4, 2048, 5632, 16, 16) | _experts(16, 6, 1408) | _MLA, ("attn_kv_b.weight",), 102400
    ),
    "glm-dsa": Preset(
        "glm-dsa",
        _geometry(2, 6144, 12288, 64, 64) | _experts(16, 8, 2048) | _MLA
        | {"attention.key_length": 256, "attention.value_length": 256, "attention.q_lora_rank": 2048,
           "expert_shared_count": 1, "attention.indexer.head_count": 32, "attention.indexer.key_length": 128,
           "attention.indexer.top_k": 2048, "attention.indexer.types": np.ones(2, np.bool_)},
        ("attn_kv_b.weight", "exp_probs_b.bias"), 32768,
    ),
    "deepseek4": Preset(
        "deepseek4",
        _geometry(4, 4096, 2048, 64, 1, 512, 10000.0) | _experts(16, 6, 2048)
        | {"rope.dimension_count": 64, "attention.q_lora_rank": 1024, "attention.output_group_count": 8,
           "attention.output_lora_rank": 1024, "attention.sliding_window": 128,
           "attention.compress_ratios": np.array([0, 4, 128, 4]), "attention.compress_rope_freq_base": 160000.0,
           "hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": 20, "hyper_connection.epsilon": 1e-6,
           "expert_shared_count": 1, "expert_weights_scale": 1.5, "expert_gating_func": 4,
           "swiglu_clamp_exp": np.full(4, 10.0, np.float32), "attention.indexer.head_count": 64,
           "attention.indexer.key_length": 128, "attention.indexer.top_k": 512},
        ("exp_probs_b.bias",), 32768,
    ),
    "openpangu": Preset(
        "openpangu",
        _geometry(3, 2560, 9216, 48, 48, base=6400000.0) | _experts(16, 8, 1024)
        | {"attention.key_length": 192, "attention.value_length": 128, "rope.dimension_count": 64,
           "attention.q_lora_rank": 1024, "attention.kv_lora_rank": 512, "leading_dense_block_count": 1,
           "expert_shared_count": 1, "expert_weights_scale": 2.5, "expert_weights_norm": True,
           "attention.indexer.head_count": 24, "attention.indexer.key_length": 128, "attention.indexer.top_k": 2048,
           "mhc_num_stream": 4, "mhc_recur_norm": 20, "param_sink_number": 128,
           "swa_layers": np.array([0, 1], np.uint32), "sliding_window_list": np.array([512, 512], np.uint32)},
        ("attn_k_b.weight", "attn_v_b.weight", "exp_probs_b.bias"), 32768,
    ),
    "qwen4exp": Preset(
        "qwen4exp",
        _geometry(4, 2560, 640, 24, 2, 256, 1e7) | _delta_net(16, 48)
        | _experts(32, 10, 640, expert_shared_feed_forward_length=640)
        | {"hyper_connection.count": 4, "hyper_connection.low_rank": 320,
           "attention.compress_ratios": np.array([0, 0, 0, 4]), "attention.indexer.head_count": 4,
           "attention.indexer.key_length": 128, "attention.indexer.top_k": 2048, "ple.layers": np.array([1]),
           "ple.ngram_size": 3, "ple.heads_per_ngram": 8, "ple.conv_kernel": 4, "ple.eos_token_id": 2,
           "embedding_length_per_layer_input": 160,
           "ple.layer_multipliers": np.array([23703573157769, 20109073645365, 8052911324071], np.uint64),
           "ple.head_vocab_sizes": np.full(16, 20011, np.uint64),
           "ple.head_offsets": np.arange(16, dtype=np.uint64) * np.uint64(20011)},
        (), 32000,
    ),
    "glm4moe": Preset(
        "glm4moe",
        _geometry(3, 4096, 10944, 96, 8)
        | _experts(16, 8, 1408, expert_shared_count=1, leading_dense_block_count=1, expert_weights_scale=1.0)
        | {"rope.dimension_count": 64},
        (*_QKV_BIAS, "exp_probs_b.bias"),
    ),
    "gpt-oss": Preset(
        "gpt-oss",
        _geometry(4, 2880, 2880, 64, 8, 64, 150000.0) | _experts(16, 4, 2880) | _YARN_32
        | {"attention.sliding_window": 128},
        (*_QKV_BIAS, "attn_output.bias", "attn_sinks.weight", "ffn_gate_inp.bias", "ffn_gate_exps.bias",
         "ffn_up_exps.bias", "ffn_down_exps.bias"),
    ),
    "minimax-m2": Preset(
        "minimax-m2", _geometry(3, 3072, 1536, 48, 8) | _experts(16, 8, 1536) | {"rope.dimension_count": 64},
        ("exp_probs_b.bias",),
    ),
    "mixtral": Preset("llama", _geometry(2, 4096, 14336, 32, 8) | _experts(8, 2, 14336)),
    "ernie4_5-moe": Preset(
        "ernie4_5-moe",
        _geometry(4, 2560, 12288, 20, 4, base=500000.0)
        | _experts(16, 6, 1536, expert_shared_count=2, leading_dense_block_count=1, interleave_moe_layer_step=1,
                   expert_shared_feed_forward_length=3072),
        ("exp_probs_b.bias",),
    ),
    "cohere2": Preset(
        "cohere2",
        _geometry(4, 4096, 14336, 32, 8, base=50000.0)
        | {"attention.sliding_window": 4096, "logit_scale": 0.25, "attention.layer_norm_epsilon": 1e-5},
    ),
    "mamba": Preset(
        "mamba",
        {
            "block_count": 8, "context_length": 1 << 20, "embedding_length": 2560, "feed_forward_length": 0,
            "attention.head_count": 0, "attention.layer_norm_rms_epsilon": 1e-5, "ssm.conv_kernel": 4,
            "ssm.inner_size": 5120, "ssm.state_size": 16, "ssm.time_step_rank": 160,
        },
        (), 50280,
    ),
    "mamba2": Preset(
        "mamba2",
        {"block_count": 8, "context_length": 1 << 20, "embedding_length": 2560, "feed_forward_length": 0,
         "attention.head_count": 0, "attention.layer_norm_rms_epsilon": 1e-5} | _mamba2(80),
        (), 50288,
    ),
    "granitehybrid": Preset(
        "granitehybrid",
        _geometry(6, 1536, 512, 12, 4, base=10000.0) | _experts(16, 6, 512, expert_shared_feed_forward_length=1024)
        | _mamba2(48)
        | {"attention.head_count_kv": np.array([0, 0, 0, 0, 0, 4], np.int32), "attention.scale": 1 / 128,
           "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 6.0, "rope.scaling.finetuned": False},
    ),
    "gemma3": Preset(
        "gemma3", _geometry(6, 2560, 10240, 8, 4, 256) | {"attention.sliding_window": 1024}
    ),
}  # fmt: skip


def vocabulary(n_vocab: int) -> dict[str, Any]:
    """Return the tokenizer keys of an SPM-like vocabulary with byte fallback."""
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


def metadata(p: Preset, file_type: int) -> dict[str, Any]:
    """Return all key-value pairs of the model."""
    general = {
        "general.architecture": p.arch,
        "general.name": f"random {p.arch}",
        "general.file_type": Typed(file_type, GGUFValueType.UINT32),
    }
    keys = {f"{p.arch}.{k}": v for k, v in p.keys.items()} | {f"{p.arch}.vocab_size": p.n_vocab}
    return general | keys | vocabulary(p.n_vocab)


def shapes(p: Preset) -> dict[str, tuple[int, ...]]:
    """Return tensor names and GGUF-order shapes: those that the architecture needs and those that the preset adds."""
    keys = metadata(p, 1)
    hp, module = HParams.from_gguf(keys, {}, p.arch), models.find(p.arch)
    specs = dict(module.tensor_shapes(hp))
    if p.n_heads:
        if not isinstance(module, mtp.HasLayers):
            raise UsageError(f"{p.arch} models with heads that predict further tokens (MTP) are not supported")
        further = mtp.read_further(keys, {}, p.arch)
        specs |= mtp.tensor_shapes(module, further, [f"blk.{hp.n_layer + i}.ffn_up.weight" for i in range(p.n_heads)])
    wanted = ("output.weight", *p.optional)
    return {name: spec.shape for name, spec in specs.items() if spec.required or name.endswith(wanted)}


def tensor_type(name: str, shape: tuple[int, ...], type: GGMLType) -> GGMLType:
    """Return F32 for vectors, norms, biases, routers, convolutions, learned rows, weights of streams and entries.

    Others get `type`, or its fallback if the rows do not divide.
    """
    kept = any(part in name for part in ("ffn_gate_inp", "conv", "_mhc_", "param_sink", "hc_", "_ape.", "ssm_norm"))
    if len(shape) == 1 or name.endswith(("bias", "ssm_a", "ssm_d")) or kept:
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
    """Return n blocks with random codes and block scale d * U(0.75, 1.25), of either sign where encoders use both."""
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
    """Return n rows of k random codes, with row scale d * U(0.75, 1.25) of either sign."""
    row_bytes = row_size(fmt.type, k)
    rows = np.frombuffer(bytearray(rng.bytes(n * row_bytes)), np.uint8).reshape(n, row_bytes)
    scale = rng.uniform(0.75, 1.25, (n, 1)) * rng.choice([-d, d], (n, 1))
    rows[:, : fmt.row_meta_size] = scale.astype(f"<f{fmt.row_meta_size}").view(np.uint8)
    return rows


@cache
def _unit_rms(type: GGMLType) -> float:
    """Return the root mean square of the weights of random blocks, or rows, with d = 1."""
    fmt, rng = TYPES[type], np.random.default_rng(0)
    if fmt.row_meta_size:
        values = dequantize(random_rows(fmt, 64, 2048, 1.0, rng), type, (2048, 64))
    else:
        values = dequantize(random_blocks(fmt, 512, 1.0, rng), type, (512 * fmt.block_size,))
    return float(np.sqrt(np.mean(values.astype(np.float64) ** 2)))


def router_scales(n_expert: int, n_used: int, skew: float, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Return factors of a router's rows, in random order, so that tokens choose experts like Zipf's law of this skew.

    Logits of random rows are normal: an expert is chosen if its logit passes a threshold t that is about the same for
    all tokens, so the factor s of an expert of probability p solves P(s * z > t) = p. At most 0.45 of the tokens choose
    one expert, because no factor makes it more than half.
    """
    ranks = np.arange(1, n_expert + 1) ** -skew
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(middle * ranks, 0.45).sum() < n_used else (low, middle)
    threshold = [NormalDist().inv_cdf(1 - p) for p in np.minimum(low * ranks, 0.45).tolist()]
    scales = 1 / np.array(threshold, np.float32)
    return rng.permutation(scales / np.median(scales))


def tensor_data(
    spec: NewTensor,
    rng: np.random.Generator,
    std: float = STD,
    row_scales: npt.NDArray[np.float32] | None = None,
) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the bytes of one tensor in chunks; `row_scales` multiply the rows of a float matrix."""
    n = int(np.prod(spec.shape, dtype=np.int64))
    fmt, k = TYPES[spec.type], spec.shape[0]
    per_chunk = max(1, _CHUNK_ELEMENTS // k) * k
    for start in range(0, n, per_chunk):
        count = min(per_chunk, n - start)
        if fmt.kind == "float":
            values = rng.standard_normal(count, np.float32) * np.float32(std)
            if spec.name.endswith("norm.weight"):
                values += np.float32(1)
            elif spec.name.endswith("ssm_a"):  # below 0, so that states decay
                values -= np.float32(1)
            if row_scales is not None:
                values = (values.reshape(-1, k) * row_scales[start // k : (start + count) // k, None]).reshape(-1)
            yield quantize(values, spec.type)
            continue
        d = std / _unit_rms(spec.type)
        if fmt.row_meta_size:
            yield random_rows(fmt, count // k, k, d, rng).reshape(-1)
        else:
            yield random_blocks(fmt, count // fmt.block_size, d, rng).reshape(-1)


def _can_be_filled(type: TensorType) -> bool:
    """Return whether only scales of blocks or of rows have to be chosen with care."""
    row_scale = type.kind == "codes" and type.row_meta_size in (2, 4)
    return type.rows == 1 and (type.kind == "float" or row_scale or bool(type.scales))


@cache
def check_type(name: str) -> GGMLType:
    """Return a type by name that this script can fill with random weights."""
    fmt = format_by_name(name)
    usable = [t for t in TYPES.values() if t.type in decodable_types() and _can_be_filled(t)]
    if fmt not in usable:
        names = ", ".join(t.name for t in usable)
        raise UsageError(f"random weights of type {fmt.name} cannot be made directly; use one of {names}")
    return fmt.type


def tensors_of(p: Preset, name: str, custom: Sequence[str] = ()) -> tuple[int, list[NewTensor]]:
    """Return the file type and all tensors, of one type or as `ik quantize` mixes types for a preset such as Q4_K_M."""
    found = shapes(p)
    preset = next((f.number for f in FILE_TYPES.values() if name.upper() in f.names), None)
    is_type = any(name.lower() == t.name.lower() for t in TYPES.values())
    if not custom and (is_type or preset is None):
        type = check_type(name)
        number = next((f.number for f in FILE_TYPES.values() if f.type == type), 0)
        return number, [NewTensor(n, shape, tensor_type(n, shape, type)) for n, shape in found.items()]
    if preset is None:
        raise UsageError(f"--custom-q changes the mix of a preset of ik quantize, and {name} is none")
    options = RecipeOptions(preset, ignore_imatrix_rules=True, custom=parse_custom_rules(custom))
    before = [TensorInfo(n, s, tensor_type(n, s, GGMLType.F16), 0, math.prod(s), 0) for n, s in found.items()]
    chosen = choose_types(before, metadata(p, preset), options)
    return preset, [NewTensor(c.name, c.shape, check_type(TYPES[c.new].name)) for c in chosen]


def main() -> int:
    parser = argparse.ArgumentParser(description="Write a GGUF model with random weights.")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="llama")
    parser.add_argument(
        "--type", default="F16", help="weight type, or a preset of ik quantize: F16, Q8_0, Q4_K, Q4_K_M, ..."
    )
    parser.add_argument("--custom-q", default="", metavar="RE=TYPE,...", help="as in ik quantize, with a preset")
    parser.add_argument("--layers", type=int, help="number of layers instead of the preset's")
    parser.add_argument("--vocab", type=int, help="vocabulary size instead of the preset's")
    parser.add_argument("--experts", type=int, help="number of routed experts instead of the preset's")
    parser.add_argument(
        "--router-skew", type=float, metavar="S", help="tokens differ, and use experts unequally (0: alike)"
    )
    parser.add_argument("--set", default="", metavar="KEY=N,...", help="other sizes, such as embedding_length=1024")
    parser.add_argument("--heads", type=int, default=0, help="heads that predict further tokens (MTP)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    start = time.perf_counter()
    try:
        p = PRESETS[args.preset].with_keys([text for text in args.set.split(",") if text])
        p = p.changed(args.layers, args.vocab, args.experts, args.heads)
        file_type, tensors = tensors_of(p, args.type, [args.custom_q] if args.custom_q else ())
        rng = np.random.Generator(np.random.SFC64(args.seed))
        with GGUFWriter(args.output, metadata(p, file_type), tensors) as writer:
            for t in tensors:
                std, scales = STD, None
                if args.router_skew is not None and t.name.endswith("ffn_gate_inp.weight"):
                    scales = router_scales(t.shape[1], p.keys["expert_used_count"], args.router_skew, rng)
                elif args.router_skew is not None and t.name == "token_embd.weight":
                    std = 1.0
                writer.write_tensor(t.name, tensor_data(t, rng, std, scales))
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
