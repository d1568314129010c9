"""A small DeepSeek V4: a layer of each kind, experts by token in the first, and layers that choose entries."""

from __future__ import annotations

from typing import Any

import numpy as np
from factories import N_VOCAB, MemoryModel, MemoryTensor, tiny_model

from ikcli.gguf.constants import GGMLType

KEYS: dict[str, Any] = {
    "block_count": 4, "context_length": 512, "attention.head_count_kv": 1, "attention.key_length": 32,
    "attention.value_length": 32, "rope.dimension_count": 16, "attention.q_lora_rank": 32,
    "attention.output_group_count": 2, "attention.output_lora_rank": 32, "attention.sliding_window": 16,
    "attention.compress_ratios": np.array([0, 4, 8, 4]), "attention.compress_rope_freq_base": 160000.0,
    "hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": 5, "hyper_connection.epsilon": 1e-6,
    "hash_layer_count": 1, "expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32,
    "expert_shared_count": 1, "expert_weights_scale": 1.5, "expert_gating_func": 4,
    "swiglu_clamp_exp": np.array([10.0] * 4), "attention.indexer.head_count": 4, "attention.indexer.key_length": 32,
    "attention.indexer.top_k": 6, "feed_forward_length": None,
}  # fmt: skip


def tiny_deepseek4(**changes: Any) -> MemoryModel:
    """The model with these keys replaced."""
    model = tiny_model("deepseek4", optional=("exp_probs_b.bias",), **(KEYS | changes))
    for name, tensor in model.tensors.items():
        if name.endswith("tid2eid.weight"):
            ids = np.random.default_rng(0).permuted(np.tile(np.arange(8), (N_VOCAB, 1)), axis=1)
            table = np.ascontiguousarray(ids[:, : tensor.shape[0]], np.int32)
            model.tensors[name] = MemoryTensor(GGMLType.I32, tensor.shape, table.view(np.uint8).reshape(-1))
    return model
