"""Checkpoints whose layers differ, or that only their authors' code runs: keys, places of tensors, and a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import drawn, write_checkpoint

from ikcli.convert.tool import OpenCheckpoint, open_checkpoint
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.errors import UnsupportedError
from ikcli.models import GraphConfig

SIZES = {"vocab_size": 320, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 128,
         "rms_norm_eps": 1e-5, "tie_word_embeddings": False}  # fmt: skip
ENDS = {"model.embed_tokens.weight": (320, 64), "model.norm.weight": (64,), "lm_head.weight": (320, 64)}


def dense(il: int, kv: int, n_ff: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a Llama layer with so many columns of keys; 0: without attention, or without a feed-forward part."""
    own: dict[str, tuple[int, ...]] = {}
    if kv:
        own |= {"input_layernorm": (64,), "self_attn.q_proj": (64, 64), "self_attn.o_proj": (64, 64)}
        own |= {"self_attn.k_proj": (kv, 64), "self_attn.v_proj": (kv, 64)}
    if n_ff:
        own |= {"post_attention_layernorm": (64,), "mlp.gate_proj": (n_ff, 64)}
        own |= {"mlp.up_proj": (n_ff, 64), "mlp.down_proj": (64, n_ff)}
    return {f"model.layers.{il}.{name}.weight": shape for name, shape in own.items()}


def opened(directory: Path, config: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> OpenCheckpoint:
    found = open_checkpoint(write_checkpoint(directory, config, {n: drawn(n, s) for n, s in tensors.items()}))
    session = ReferenceSession(found.file, GraphConfig(n_ctx=64))
    assert np.isfinite(session.decode(Batch.single([1, 7, 30, 300], logits="all"))).all()
    return found


def test_deci_layers_lack_parts(tmp_path: Path) -> None:
    def block(group: int | None, mult: float | None, linear: bool = False) -> dict[str, Any]:
        return {"attention": {"n_heads_in_group": group, "replace_with_linear": linear}, "ffn": {"ffn_mult": mult}}

    layers = [block(2, 2.0), block(None, 2.0, linear=True), block(None, 3.0), block(1, None)]
    config = SIZES | {"architectures": ["DeciLMForCausalLM"], "num_hidden_layers": 4, "intermediate_size": 256,
                      "block_configs": layers, "hidden_act": "silu"}  # fmt: skip
    tensors = ENDS | dense(0, 32, 256) | dense(1, 0, 256) | dense(2, 0, 256) | dense(3, 64, 0)
    tensors |= {"model.layers.1.input_layernorm.weight": (64,), "model.layers.1.self_attn.linear_attn.weight": (64, 64)}
    keys = opened(tmp_path, config, tensors).file.metadata
    assert list(keys["deci.attention.head_count"]) == [4, 4, 0, 4]
    assert list(keys["deci.attention.head_count_kv"]) == [2, 0, 0, 4]
    assert list(keys["deci.feed_forward_length"]) == [256, 256, 256, 0]


def test_openelm_heads_and_widths_differ(tmp_path: Path) -> None:
    config = {"architectures": ["OpenELMForCausalLM"], "num_transformer_layers": 2, "model_dim": 64, "head_dim": 16,
              "max_context_length": 128, "ffn_multipliers": [0.5, 1.5], "ffn_dim_divisor": 32,
              "num_query_heads": [4, 8], "num_kv_heads": [2, 4], "vocab_size": 320}  # fmt: skip
    tensors: dict[str, tuple[int, ...]] = {"transformer.token_embeddings.weight": (320, 64)}
    tensors["transformer.norm.weight"] = (64,)
    for il, (q, kv, n_ff) in enumerate(((4, 2, 32), (8, 4, 96))):
        own = {
            "attn.qkv_proj": ((q + 2 * kv) * 16, 64),
            "attn.q_norm": (16,),
            "attn.k_norm": (16,),
            "attn_norm": (64,),
            "attn.out_proj": (64, q * 16),
            "ffn.proj_1": (2 * n_ff, 64),
            "ffn.proj_2": (64, n_ff),
            "ffn_norm": (64,),
        }
        tensors |= {f"transformer.layers.{il}.{name}.weight": shape for name, shape in own.items()}
    found = opened(tmp_path, config, tensors)
    assert list(found.file.metadata["openelm.feed_forward_length"]) == [32, 96]
    assert found.file.tensors["blk.1.ffn_up.weight"].shape == (64, 96)


def test_jais_scales_its_embeddings(tmp_path: Path) -> None:
    config = {"architectures": ["JAISLMHeadModel"], "n_layer": 1, "n_embd": 64, "n_head": 4, "n_inner": 96,
              "n_positions": 128, "activation_function": "swiglu", "position_embedding_type": "alibi",
              "layer_norm_epsilon": 1e-5, "mup_embeddings_scale": 3.0, "mup_output_alpha": 2.0, "mup_width_scale": 0.25,
              "mup_scale_qk_dot_by_d": True, "vocab_size": 320}  # fmt: skip
    own = {"ln_1.weight": (64,), "ln_1.bias": (64,), "attn.c_attn.weight": (64, 192), "attn.c_attn.bias": (192,),
           "attn.c_proj.weight": (64, 64), "attn.c_proj.bias": (64,), "ln_2.weight": (64,), "ln_2.bias": (64,),
           "mlp.c_fc.weight": (64, 96), "mlp.c_fc.bias": (96,), "mlp.c_fc2.weight": (64, 96), "mlp.c_fc2.bias": (96,),
           "mlp.c_proj.weight": (96, 64), "mlp.c_proj.bias": (64,)}  # fmt: skip
    tensors: dict[str, tuple[int, ...]] = {f"transformer.h.0.{name}": shape for name, shape in own.items()}
    tensors |= {"transformer.wte.weight": (320, 64), "transformer.ln_f.weight": (64,), "transformer.ln_f.bias": (64,)}
    found = opened(tmp_path, config, tensors)
    embd, out = (found.file.data(f"{n}.weight").view(np.float32) for n in ("token_embd", "output"))
    np.testing.assert_allclose(embd / 3, out / 0.5, rtol=1e-6)
    gate = found.file.data("blk.0.ffn_gate.weight").view(np.float32).reshape(96, 64)
    np.testing.assert_array_equal(gate, drawn("transformer.h.0.mlp.c_fc2.weight", (64, 96)).T)


SMALL = SIZES | {
    "architectures": ["SmallThinkerForCausalLM"], "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16,
    "moe_ffn_hidden_size": 48, "moe_num_primary_experts": 4, "moe_num_active_primary_experts": 2,
    "norm_topk_prob": True,
    "moe_primary_router_apply_softmax": False, "sliding_window_layout": [0, 1], "sliding_window_size": 8,
    "rope_layout": [0, 1], "rope_theta": 10000.0,
}  # fmt: skip


def experts(il: int) -> dict[str, tuple[int, ...]]:
    moe = f"model.layers.{il}.block_sparse_moe"
    own = {f"{moe}.experts.{e}.{n}.weight": (64, 48) if n == "down" else (48, 64)
           for e in range(4) for n in ("gate", "up", "down")}  # fmt: skip
    attn = {k: s for k, s in dense(il, 32, 96).items() if ".mlp." not in k}
    return attn | own | {f"{moe}.primary_router.weight": (4, 64)}


def test_smallthinker_routes_by_the_input_of_a_layer(tmp_path: Path) -> None:
    tensors = ENDS | experts(0) | experts(1)
    found = opened(tmp_path / "a", SMALL, tensors)
    assert found.file.metadata["smallthinker.expert_gating_func"] == 2
    assert found.file.tensors["blk.1.ffn_down_exps.weight"].shape == (48, 64, 4)
    with pytest.raises(UnsupportedError, match="rope_layout is"):
        opened(tmp_path / "b", SMALL | {"rope_layout": [1, 1]}, tensors)


def test_ling_1_turns_rotated_pairs(tmp_path: Path) -> None:
    config = SIZES | {"architectures": ["BailingMoeForCausalLM"], "num_hidden_layers": 1, "num_key_value_heads": 2,
                      "intermediate_size": 96, "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2,
                      "num_shared_experts": 1, "hidden_act": "silu", "norm_topk_prob": True}  # fmt: skip
    layer = "model.layers.0"
    own = {f"{layer}.mlp.experts.{e}.{n}_proj.weight": (64, 48) if n == "down" else (48, 64)
           for e in range(4) for n in ("gate", "up", "down")}  # fmt: skip
    own |= {f"{layer}.mlp.shared_experts.{n}_proj.weight": (64, 48) if n == "down" else (48, 64)
            for n in ("gate", "up", "down")}  # fmt: skip
    own |= {f"{layer}.attention.query_key_value.weight": (128, 64), f"{layer}.attention.dense.weight": (64, 64),
            f"{layer}.mlp.gate.weight": (4, 64), f"{layer}.input_layernorm.weight": (64,),
            f"{layer}.post_attention_layernorm.weight": (64,)}  # fmt: skip
    ends = {"model.word_embeddings.weight": (320, 64), "model.norm.weight": (64,), "lm_head.weight": (320, 64)}
    found = opened(tmp_path, config, ends | own)
    rows = found.file.data("blk.0.attn_qkv.weight").view(np.float32).reshape(128, 64)
    source = drawn(f"{layer}.attention.query_key_value.weight", (128, 64))
    np.testing.assert_array_equal(rows[:3], source[[0, 8, 1]])
    np.testing.assert_array_equal(rows[96:], source[96:])
