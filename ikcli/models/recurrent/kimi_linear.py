"""Kimi Linear, Ling 3 (bailingmoe3): recurrent layers with a decay per column (KDA), others with latent attention.

Kimi uses no RoPE. Ling uses RoPE and gates the attention result per head. Experts are those of DeepSeek-V3.
"""

from __future__ import annotations

from functools import partial

from ikcli.graph import Graph, Node
from ikcli.models import blocks, deepseek2, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import limited_feed_forward
from ikcli.models.hparams import HParams
from ikcli.models.recurrent import delta_net
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    return expected.with_blocks(hp, block_shapes)


def block_shapes(hp: HParams, il: int) -> TensorSpecs:
    """Return the expected tensors of block il."""
    if hp.is_recurrent(il):
        specs = delta_net.kda_specs(hp, il)
    else:
        specs = expected.in_block(il, deepseek2.attention_specs(hp))
        every = (hp.n_embd, hp.n_head * hp.head_dim_v)  # a gate per element
        specs[f"blk.{il}.attn_gate.weight"] = TensorSpec((hp.n_embd, hp.n_head), hp.arch == "bailingmoe3", (every,))
    return specs | expected.feed_forward_specs(hp, il)


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    own = layers(g, hp, w, cfg)
    return blocks.transformer(g, hp, w, own.attn, own.ffn)


def layers(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig, only: int | None = None) -> blocks.Layers:
    """Return the layers, after what they share has been recorded."""
    table = None if hp.arch.startswith("kimi") else deepseek2.rope_table(g, hp)

    def attn(x: Node, layer: LayerWeights) -> Node:
        if hp.is_recurrent(layer.il):
            return delta_net.kda(g, hp, x, layer)
        kqv = deepseek2.attention(g, hp, cfg, x, layer, table)
        gate = layer.get("attn_gate")
        if gate is not None:
            kqv = g.gate(kqv, g.mul_mat(gate, x, "attn_gate"), "kqv_gated")
        return g.mul_mat(layer.attn_output, kqv, "kqv_out")

    return blocks.Layers(attn, partial(limited_feed_forward, g, hp, cfg))
