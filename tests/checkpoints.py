"""Small checkpoints as the hub has them: config.json, safetensors files, a byte-level vocabulary."""

from __future__ import annotations

import itertools
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ikcli.convert.archs import architecture_of
from ikcli.convert.build import Build, convert_tensors
from ikcli.convert.config import Config
from ikcli.convert.source import SafetensorsSource
from ikcli.gguf.heads import Heads

N_VOCAB = 320
Arrays = Mapping[str, Any]  # arrays; what NumPy has no type for is a pair of its name in safetensors and an array
_DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "uint16": "BF16",
    "uint8": "U8",
    "int8": "I8",
    "int32": "I32",
    "int64": "I64",
}


def bf16(x: np.ndarray) -> np.ndarray:
    """Values rounded to bfloat16, as the uint16 that stands for it in NumPy."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_safetensors(path: Path, tensors: Arrays) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position, pairs = 0, {n: x if isinstance(x, tuple) else (_DTYPES[x.dtype.name], x) for n, x in tensors.items()}
    for name, (dtype, x) in pairs.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(x.shape),
            "data_offsets": [position, position + x.nbytes],
        }
        position += x.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for _, x in pairs.values():
            f.write(np.ascontiguousarray(x).tobytes())


def write_checkpoint(directory: Path, config: dict[str, Any], tensors: Arrays, shards: int = 1) -> Path:
    """A directory with all that a conversion reads; with `shards`, an index and so many files."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    _vocabulary(directory)
    if shards == 1:
        write_safetensors(directory / "model.safetensors", tensors)
        return directory
    names = list(tensors)
    where: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[i::shards]
        write_safetensors(directory / file, {name: tensors[name] for name in mine})
        where |= dict.fromkeys(mine, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return directory


def _vocabulary(directory: Path) -> None:
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=N_VOCAB,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(["the theory of the other weather there"], trainer)
    fast.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": N_VOCAB,
    "rms_norm_eps": 1e-5,
}
MOE: dict[str, Any] = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "head_dim": 64,
    "norm_topk_prob": True,
}


def llama_tensors(c: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors of a Llama, or of a Qwen3-MoE where the configuration has experts."""
    rng = np.random.default_rng(seed)
    n, ff, dim = (
        c["hidden_size"],
        c["intermediate_size"],
        c.get("head_dim", c["hidden_size"] // c["num_attention_heads"]),
    )
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim

    def matrix(*shape: int) -> np.ndarray:
        return rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)

    def norm(width: int) -> np.ndarray:
        return rng.normal(1, 0.1, width).astype(np.float32)

    found = {"model.embed_tokens.weight": matrix(c["vocab_size"], n), "lm_head.weight": matrix(c["vocab_size"], n)}
    for il in range(c["num_hidden_layers"]):
        layer = {"input_layernorm.weight": norm(n), "post_attention_layernorm.weight": norm(n)}
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            layer[f"self_attn.{name}_proj.weight"] = matrix(rows, n)
        layer["self_attn.o_proj.weight"] = matrix(n, q)
        parts = [("mlp", ff)]
        if "num_experts" in c:
            layer["mlp.gate.weight"] = matrix(c["num_experts"], n)
            layer |= {f"self_attn.{name}_norm.weight": norm(dim) for name in "qk"}
            parts = [(f"mlp.experts.{e}", c["moe_intermediate_size"]) for e in range(c["num_experts"])]
        for part, width in parts:
            layer[f"{part}.gate_proj.weight"] = matrix(width, n)
            layer[f"{part}.up_proj.weight"] = matrix(width, n)
            layer[f"{part}.down_proj.weight"] = matrix(n, width)
        found |= {f"model.layers.{il}.{name}": x for name, x in layer.items()}
    return found | {"model.norm.weight": norm(n)}


def as_bf16(tensors: Arrays) -> dict[str, np.ndarray]:
    return {name: bf16(x) for name, x in tensors.items()}


def drawn(name: str, shape: Sequence[int]) -> np.ndarray:
    """Random values that depend on the name of the tensor alone, of a size that keeps a model lively."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if "tid2eid" in name:  # experts of tokens, of which there are 8
        ids = rng.permuted(np.tile(np.arange(8), (shape[0], 1)), axis=1)
        return np.ascontiguousarray(ids[:, : shape[1]])
    if name.endswith("act_fn.eps"):
        return np.full(tuple(shape), -1e-6, np.float32)
    x = rng.standard_normal(tuple(shape))
    if len(shape) > 1:
        return (x * 1.5 / np.sqrt(2 if "conv1d" in name else shape[-1])).astype(np.float32)
    is_norm = any(part in name for part in ("norm", "ln_", ".scale")) and not name.endswith("bias")
    return np.asarray(0.1 * x + is_norm, np.float32)


BASE: dict[str, Any] = {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 16,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip


def build(tmp_path: Path, config: dict[str, Any], tensors: Arrays, heads: Heads = Heads.KEPT) -> Build:
    """Keys and tensors of a checkpoint that need not be whole."""
    (tmp_path / "config.json").write_text(json.dumps(BASE | config))
    write_safetensors(tmp_path / "model.safetensors", tensors)
    read = Config(tmp_path)
    architecture = architecture_of(read)
    m = Build(read, SafetensorsSource(tmp_path), architecture.name, heads=heads)
    architecture.keys(m)
    convert_tensors(m, architecture)
    return m


def values(m: Build, name: str) -> np.ndarray:
    """A new tensor in NumPy's order of dimensions, read in two slabs where it has several rows."""
    t = m.tensors[name]
    n_rows = int(np.prod(t.shape[1:], dtype=int))
    cuts = sorted({0, n_rows // 3, n_rows})
    slabs = [t.read(m.source, a, b) for a, b in itertools.pairwise(cuts)]
    rows = np.concatenate(slabs)
    return (
        (rows.astype(np.uint32) << 16).view(np.float32).reshape(t.shape[::-1])
        if rows.dtype == np.uint16
        else (rows.reshape(t.shape[::-1]))
    )
