"""Tensor lists of small made-up models, for tests of which type each tensor gets."""

from __future__ import annotations

from typing import Any

from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import TensorInfo
from ikcli.gguf.types import tensor_n_bytes


def info(name: str, *shape: int, type: GGMLType = GGMLType.F16) -> TensorInfo:
    n = 1
    for ne in shape:
        n *= ne
    return TensorInfo(name, shape, type, tensor_n_bytes(type, shape), n, 0)


def model(
    arch: str = "llama",
    n_layer: int = 32,
    n_head_kv: int = 8,
    n_expert: int = 0,
    output: bool = True,
    n_vocab: int = 32000,
    n_ff: int = 256,
    fused_qkv: bool = False,
    shared: bool = False,
) -> tuple[list[TensorInfo], dict[str, Any]]:
    """Tensors in file order and metadata of a model with 8 heads and rows of 256."""
    keys: dict[str, Any] = {
        "block_count": n_layer,
        "context_length": 512,
        "embedding_length": 256,
        "feed_forward_length": n_ff,
        "attention.head_count": 8,
        "attention.head_count_kv": n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.dimension_count": 32,
        "vocab_size": n_vocab,
    }
    if n_expert:
        keys |= {"expert_count": n_expert, "expert_used_count": 2}
    f32 = GGMLType.F32
    out = [info("token_embd.weight", 256, 64), info("output_norm.weight", 256, type=f32)]
    if output:
        out.append(info("output.weight", 256, 64))
    for i in range(n_layer):
        b = f"blk.{i}."
        out.append(info(b + "attn_norm.weight", 256, type=f32))
        for part in ("qkv",) if fused_qkv else ("q", "k", "v"):
            out.append(info(f"{b}attn_{part}.weight", 256, 8))
        out.append(info(b + "attn_output.weight", 256, 8))
        if n_expert:
            out.append(info(b + "ffn_gate_inp.weight", 256, n_expert, type=f32))
            out += [info(f"{b}ffn_{kind}_exps.weight", 256, 8, n_expert) for kind in ("gate", "up", "down")]
            if shared:
                out += [info(f"{b}ffn_{kind}_shexp.weight", n_ff, 8) for kind in ("gate", "up", "down")]
        else:
            out += [info(f"{b}ffn_{kind}.weight", n_ff, 8) for kind in ("down", "up", "gate")]
    return out, {"general.architecture": arch} | {f"{arch}.{k}": v for k, v in keys.items()}


MODELS: dict[str, dict[str, Any]] = {
    "mha": {},
    "gqa2": {"n_head_kv": 4, "output": False},
    "gqa4-large-vocab": {"n_head_kv": 2, "n_vocab": 128256},
    "70b": {"n_layer": 80, "n_head_kv": 1, "n_vocab": 128256},
    "moe": {"n_layer": 27, "n_head_kv": 2, "n_expert": 8, "shared": True},
    "two-experts": {"n_layer": 12, "n_expert": 2},
    "narrow": {"n_layer": 9, "n_ff": 160},
    "falcon": {"arch": "falcon", "n_layer": 20, "n_head_kv": 1, "fused_qkv": True},
}


def run_lengths(types: dict[str, str]) -> dict[str, str]:
    """Types by kind of tensor, in block order, equal neighbours counted: {"attn_v": "q6_K*4 q4_K*2 ..."}."""
    kinds: dict[str, list[str]] = {}
    for name, type in types.items():
        kind = name.removesuffix(".weight")
        kinds.setdefault(kind.split(".", 2)[2] if kind.startswith("blk.") else kind, []).append(type)
    out: dict[str, str] = {}
    for kind, found in kinds.items():
        pieces: list[list[Any]] = []
        for type in found:
            if pieces and pieces[-1][0] == type:
                pieces[-1][1] += 1
            else:
                pieces.append([type, 1])
        out[kind] = " ".join(t if n == 1 else f"{t}*{n}" for t, n in pieces)
    return out
