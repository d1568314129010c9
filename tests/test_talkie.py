"""Talkie: a converted checkpoint against its published forward pass, written out in NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import bf16, build, drawn, values, write_checkpoint

from ikcli.convert.tool import open_checkpoint, plan_convert
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.session import Session
from ikcli.errors import FormatError, UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.quant.quantizer import run
from ikcli.quant.recipes import RecipeOptions
from ikcli.quant.tool import ToolOptions
from ikcli.settings.run import RunConfig

Array = np.ndarray
N, D, HEADS, FF, LAYERS, VOCAB = 64, 16, 4, 96, 3, 320
CONFIG: dict[str, Any] = {
    "architectures": ["TalkieForCausalLM"], "model_type": "talkie", "hidden_size": N, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "head_dim": D, "intermediate_size": FF, "max_position_embeddings": 512,
    "rope_theta": 5000.0, "vocab_size": VOCAB, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip
PARTS = {
    "attn.attn_query.weight": (N, N), "attn.attn_key.weight": (N, N), "attn.attn_value.weight": (N, N),
    "attn.attn_resid.weight": (N, N), "mlp.mlp_gate.weight": (FF, N), "mlp.mlp_linear.weight": (FF, N),
    "mlp.mlp_resid.weight": (N, FF),
}  # fmt: skip


def checkpoint() -> dict[str, Array]:
    rng = np.random.default_rng(8)
    found = {"model.embed.weight": drawn("embed", (VOCAB, N)), "lm_head": drawn("head", (VOCAB, N)),
             "lm_head_gain.w_g": np.float32([0.7])}  # fmt: skip
    for il in range(LAYERS):
        for name, shape in PARTS.items():
            found[f"model.blocks.{il}.{name}"] = (rng.normal(0, 1.5 * shape[1] ** -0.5, shape)).astype(np.float32)
        for name, n in (("attn.head_gain.head_g", HEADS), ("attn_gain.a_g", 1), ("mlp_gain.a_g", 1)):
            found[f"model.blocks.{il}.{name}"] = rng.uniform(0.4, 1.6, n).astype(np.float32)
        found[f"model.blocks.{il}.embed_skip.a_g"] = rng.normal(0, 0.5, 1).astype(np.float32)
    return found


def normed(x: Array) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.finfo(np.float32).eps)


def forward(t: dict[str, Array], tokens: Array) -> Array:
    """Logits as the published code computes them."""
    t = {name: x.astype(np.float64) for name, x in t.items()}
    n = len(tokens)
    angles = np.arange(n)[:, None] * 5000.0 ** (-np.arange(0, D, 2) / D)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def turned(x: Array) -> Array:
        a, b = x[..., : D // 2], x[..., D // 2 :]
        return np.concatenate([a * cos + b * sin, b * cos - a * sin], axis=-1)

    x = first = normed(t["model.embed.weight"][tokens])
    for il in range(LAYERS):
        w = {name.removeprefix(f"model.blocks.{il}."): v for name, v in t.items()}
        y = normed(x)
        q, k, v = ((y @ w[f"attn.attn_{name}.weight"].T).reshape(n, HEADS, D) for name in ("query", "key", "value"))
        q, k = normed(turned(q)) * w["attn.head_gain.head_g"][:, None], normed(turned(k))
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(D)
        scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        attn = np.einsum("hij,jhd->ihd", weights / weights.sum(axis=-1, keepdims=True), v).reshape(n, N)
        x = x + w["attn_gain.a_g"] * (attn @ w["attn.attn_resid.weight"].T)
        y = normed(x)
        gate = y @ w["mlp.mlp_gate.weight"].T
        par = gate / (1 + np.exp(-gate)) * (y @ w["mlp.mlp_linear.weight"].T)
        x = x + w["mlp_gain.a_g"] * (par @ w["mlp.mlp_resid.weight"].T) + w["embed_skip.a_g"] * first
    return normed(x) @ (t["lm_head"] * t["lm_head_gain.w_g"]).T


def test_a_converted_checkpoint_computes_what_the_published_code_does(tmp_path: Path) -> None:
    tensors, tokens = checkpoint(), np.random.default_rng(2).integers(0, VOCAB, 40)
    wanted = forward(tensors, tokens)
    found = open_checkpoint(write_checkpoint(tmp_path / "model", CONFIG, tensors))
    out = tmp_path / "m.gguf"
    run(plan_convert(found, out, RecipeOptions(0), ToolOptions(n_threads=1)).job)
    config = RunConfig(model=out, n_ctx=256, n_threads=1, warmup=False, type_k="f32", type_v="f32")
    with Session.open(config) as session:
        logits = [np.array(session.decode(Batch.single(tokens[:33], logits="all")))]
        logits += [np.array(session.decode(Batch.single(tokens[i : i + 1], i))) for i in range(33, 40)]
    np.testing.assert_allclose(np.concatenate(logits), wanted, atol=2e-4 * wanted.std())


def test_half_of_the_columns_of_queries_and_keys_change_their_sign(tmp_path: Path) -> None:
    config = CONFIG | {"hidden_size": 8, "num_attention_heads": 2, "head_dim": 4, "num_hidden_layers": 1}
    signs = np.float32([1, 1, -1, -1] * 2)[:, None]
    x = np.random.default_rng(3).normal(size=(8, 8)).astype(np.float32)
    gains = np.float32([0.5, 2.0])
    half, short = x.astype(np.float16), bf16(x)
    rounded = (short.astype(np.uint32) << 16).view(np.float32)
    for stored, type_, exact in ((x, GGMLType.F32, x), (half, GGMLType.F16, half), (short, GGMLType.BF16, rounded)):
        m = build(tmp_path, config, {
            "model.blocks.0.attn.attn_query.weight": stored, "model.blocks.0.attn.head_gain.head_g": gains,
        })  # fmt: skip
        assert m.tensors["blk.0.attn_q.weight"].type is type_
        np.testing.assert_array_equal(values(m, "blk.0.attn_q.weight"), exact * signs)
        assert m.tensors["blk.0.attn_q_norm.weight"].shape == (1, 2)
        assert (m.metadata["talkie.logit_scale"], m.metadata["talkie.rope.dimension_count"]) == (1.0, 4)
    with pytest.raises(FormatError, match="head_dim is 6, which does not fit 8 rows"):
        build(tmp_path, config | {"head_dim": 6}, {"model.blocks.0.attn.attn_key.weight": x})
    scaled = {"rope_type": "yarn", "factor": 2.0}
    with pytest.raises(UnsupportedError, match="key rope_parameters is"):
        build(tmp_path, config | {"rope_parameters": scaled}, {})
