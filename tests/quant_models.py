"""A small model file with exact, portable weights, for tests of the commands that convert files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ikcli.gguf.constants import GGMLType
from ikcli.gguf.writer import GGUFWriter, NewTensor
from ikcli.quant.encode import quantize

SHAPES: dict[str, tuple[int, ...]] = {
    "token_embd.weight": (256, 48),
    "blk.0.attn_norm.weight": (256,),
    "blk.0.attn_q.weight": (256, 64),
    "blk.0.attn_k.weight": (256, 16),
    "blk.0.attn_v.weight": (256, 16),
    "blk.0.attn_output.weight": (256, 64),
    "blk.0.ffn_gate_inp.weight": (256, 4),
    "blk.0.ffn_up_exps.weight": (256, 32, 4),
    "blk.0.ffn_gate_exps.weight": (256, 32, 4),
    "blk.0.ffn_down_exps.weight": (32, 256, 4),
    "output_norm.weight": (256,),
    "output.weight": (256, 48),
}
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.file_type": 1,
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 256,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 64,
    "llama.expert_count": 4,
    "llama.expert_used_count": 2,
    "llama.vocab_size": 48,
}


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Whole numbers over 1024 that look irregular and are the same everywhere."""
    n = int(np.prod(shape))
    i = np.arange(n, dtype=np.uint64) + np.uint64(7919 * (1 + list(SHAPES).index(name)))
    mixed = i * np.uint64(2654435761) % np.uint64(1 << 32) >> np.uint64(20)
    return ((mixed.astype(np.float32) - 2048) / 1024).reshape(shape[::-1])


def write_model(path: Path, splits: list[int] | None = None, **changed: np.ndarray) -> Path:
    """Write the model (matrices f16, the rest f32) and return its path, of the first part if it is split."""
    specs = [
        NewTensor(n, s, GGMLType.F32 if len(s) == 1 or "gate_inp" in n else GGMLType.F16) for n, s in SHAPES.items()
    ]
    with GGUFWriter(path, METADATA, specs, splits=splits) as writer:
        for s in specs:
            writer.write_tensor(s.name, quantize(changed.get(s.name, values(s.name, s.shape)), s.type))
    return writer.paths[0]
