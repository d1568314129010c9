"""Headers of full-size models: metadata and tensor infos as a real file has them, without the tensor data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepseek_shapes import LITE, TYPES, V3, V25, Dims, rows

from ikcli.engine.run.log_lines import TensorRow
from ikcli.gguf.types import tensor_n_bytes
from ikcli.gguf.writer import GGUFWriter, NewTensor

__all__ = ["LITE", "V3", "V25", "deepseek_metadata", "qwen3_235b", "qwen3next_80b", "write_deepseek", "write_header"]


def deepseek_metadata(d: Dims) -> dict[str, Any]:
    """Keys of a DeepSeek-V2/V3 file of these sizes, in the layouts with per-head lengths (legacy and ik)."""
    values: dict[str, Any] = {
        "block_count": d.n_layer,
        "context_length": 163840,
        "embedding_length": d.n_embd,
        "feed_forward_length": d.n_ff,
        "attention.head_count": d.n_head,
        "attention.head_count_kv": d.n_head,
        "attention.key_length": 192,
        "attention.value_length": 128,
        "attention.kv_lora_rank": 512,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": 64,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 40.0,
        "rope.scaling.original_context_length": 4096,
        "rope.scaling.yarn_log_multiplier": 0.1,
        "expert_count": d.n_expert,
        "expert_used_count": 8 if d.n_expert == 256 else 6,
        "expert_shared_count": d.n_shared,
        "expert_feed_forward_length": d.n_ff_exp,
        "expert_weights_scale": 2.5 if d.has_bias else 16.0,
        "expert_weights_norm": d.has_bias,
        "expert_gating_func": 2 if d.has_bias else 1,
        "leading_dense_block_count": d.n_dense,
        "vocab_size": d.n_vocab,
    }
    if d.q_lora:
        values["attention.q_lora_rank"] = d.q_lora
    return {"general.architecture": "deepseek2", **{f"deepseek2.{key}": value for key, value in values.items()}}


def write_deepseek(
    path: Path, d: Dims, type_of: Callable[[str], str], layout: str = "ik", splits: Sequence[int] | None = None
) -> Path:
    """A DeepSeek header; returns the path of the (first) file."""
    return write_header(path, deepseek_metadata(d), rows(d, layout, type_of), splits)


def write_header(
    path: Path, metadata: Mapping[str, Any], tensors: Sequence[TensorRow], splits: Sequence[int] | None = None
) -> Path:
    """Write only the header of every part."""
    specs = [NewTensor(t.name, t.shape, TYPES[t.type_name]) for t in tensors]
    writer = GGUFWriter(path, metadata, specs, splits=splits)
    first = 0
    for no, (part, count) in enumerate(zip(writer.paths, splits or [len(specs)], strict=True)):
        part.write_bytes(writer._header(no, specs[first : first + count]))
        first += count
    return writer.paths[0]


def qwen3_235b(type_name: str = "q8_0") -> tuple[dict[str, Any], list[TensorRow]]:
    """Metadata and tensors of Qwen3-235B-A22B: 94 layers, 128 experts, 64 heads on 4 key/value heads."""
    n_layer, n_embd, n_ff_exp, n_vocab = 94, 4096, 1536, 151936
    values: dict[str, Any] = {
        "block_count": n_layer,
        "context_length": 40960,
        "embedding_length": n_embd,
        "feed_forward_length": 12288,
        "attention.head_count": 64,
        "attention.head_count_kv": 4,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
        "expert_count": 128,
        "expert_used_count": 8,
        "expert_feed_forward_length": n_ff_exp,
        "vocab_size": n_vocab,
    }
    shapes: list[tuple[str, tuple[int, ...]]] = [("token_embd.weight", (n_embd, n_vocab))]
    for il in range(n_layer):
        block: list[tuple[str, tuple[int, ...]]] = [
            ("attn_norm", (n_embd,)), ("attn_q", (n_embd, 8192)), ("attn_q_norm", (128,)), ("attn_k", (n_embd, 512)),
            ("attn_k_norm", (128,)), ("attn_v", (n_embd, 512)), ("attn_output", (8192, n_embd)),
            ("ffn_norm", (n_embd,)), ("ffn_gate_inp", (n_embd, 128)), ("ffn_gate_exps", (n_embd, n_ff_exp, 128)),
            ("ffn_down_exps", (n_ff_exp, n_embd, 128)), ("ffn_up_exps", (n_embd, n_ff_exp, 128)),
        ]  # fmt: skip
        shapes += [(f"blk.{il}.{name}.weight", shape) for name, shape in block]
    shapes += [("output_norm.weight", (n_embd,)), ("output.weight", (n_embd, n_vocab))]
    out = []
    for name, shape in shapes:
        kind = "f32" if "_norm" in name or "gate_inp" in name else type_name
        out.append(TensorRow(name, shape, kind, tensor_n_bytes(TYPES[kind], shape)))
    named = {f"qwen3moe.{key}": value for key, value in values.items()}
    return {"general.architecture": "qwen3moe", **named}, out


def qwen3next_80b(type_name: str = "q4_K") -> tuple[dict[str, Any], list[TensorRow]]:
    """Metadata and tensors of Qwen3-Next-80B-A3B, matrices of one type."""
    n_embd, n_vocab, n_layer, n_ff, n_expert = 2048, 151936, 48, 512, 512
    values = {
        "block_count": n_layer, "context_length": 262144, "embedding_length": n_embd, "feed_forward_length": 5120,
        "attention.head_count": 16, "attention.head_count_kv": 2, "attention.key_length": 256,
        "attention.value_length": 256, "attention.layer_norm_rms_epsilon": 1e-6, "rope.dimension_count": 64,
        "rope.freq_base": 1e7, "expert_count": n_expert, "expert_used_count": 10, "expert_feed_forward_length": n_ff,
        "expert_shared_feed_forward_length": n_ff, "full_attention_interval": 4, "ssm.conv_kernel": 4,
        "ssm.state_size": 128, "ssm.group_count": 16, "ssm.time_step_rank": 32, "ssm.inner_size": 4096,
        "vocab_size": n_vocab,
    }  # fmt: skip
    recurrent = [
        ("attn_qkv.weight", (n_embd, 8192)), ("attn_gate.weight", (n_embd, 4096)), ("ssm_conv1d.weight", (4, 8192)),
        ("ssm_dt.bias", (32,)), ("ssm_a", (32,)), ("ssm_ba.weight", (n_embd, 64)), ("ssm_norm.weight", (128,)),
        ("ssm_out.weight", (4096, n_embd)),
    ]  # fmt: skip
    attention = [
        ("attn_q.weight", (n_embd, 8192)), ("attn_q_norm.weight", (256,)), ("attn_k.weight", (n_embd, 512)),
        ("attn_k_norm.weight", (256,)), ("attn_v.weight", (n_embd, 512)), ("attn_output.weight", (4096, n_embd)),
    ]  # fmt: skip
    every = [
        ("attn_norm.weight", (n_embd,)), ("post_attention_norm.weight", (n_embd,)),
        ("ffn_gate_inp.weight", (n_embd, n_expert)), ("ffn_gate_exps.weight", (n_embd, n_ff, n_expert)),
        ("ffn_up_exps.weight", (n_embd, n_ff, n_expert)), ("ffn_down_exps.weight", (n_ff, n_embd, n_expert)),
        ("ffn_gate_shexp.weight", (n_embd, n_ff)), ("ffn_up_shexp.weight", (n_embd, n_ff)),
        ("ffn_down_shexp.weight", (n_ff, n_embd)), ("ffn_gate_inp_shexp.weight", (n_embd, 1)),
    ]  # fmt: skip
    shapes: list[tuple[str, tuple[int, ...]]] = [("token_embd.weight", (n_embd, n_vocab))]
    for il in range(n_layer):
        block: list[tuple[str, tuple[int, ...]]] = [*(recurrent if (il + 1) % 4 else attention), *every]
        shapes += [(f"blk.{il}.{name}", shape) for name, shape in block]
    shapes += [("output_norm.weight", (n_embd,)), ("output.weight", (n_embd, n_vocab))]
    out = []
    for name, shape in shapes:
        is_f32 = len(shape) == 1 or "gate_inp" in name or "conv1d" in name
        kind = "f32" if is_f32 else type_name
        out.append(TensorRow(name, shape, kind, tensor_n_bytes(TYPES[kind], shape)))
    named = {f"qwen3next.{key}": value for key, value in values.items()}
    return {"general.architecture": "qwen3next", **named}, out
