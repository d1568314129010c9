"""Qwen3-Next, Qwen3.5, Qwen3.6 (dense, experts): three layers with a gated delta net to one with gated attention.

Weights of norms are stored as they are multiplied (1 + w of the trained ones). Experts: softmax, renormalised, and a
gated shared one.
"""

from __future__ import annotations

from ikcli.graph import Graph, Node
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import feed_forward
from ikcli.models.hparams import HParams
from ikcli.models.recurrent import delta_net
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights

FFN_NORM = "post_attention_norm"


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    return expected.with_blocks(hp, block_shapes)


def block_shapes(hp: HParams, il: int) -> TensorSpecs:
    """Return the expected tensors of block il."""
    if hp.is_recurrent(il):
        specs = delta_net.gated_delta_net_specs(hp, il, FFN_NORM)
    else:
        specs = expected.attention_specs(hp, il, bias=False, qk_norm=True, ffn_norm=FFN_NORM, fused=False)
        specs[f"blk.{il}.attn_q.weight"] = TensorSpec((hp.n_embd, 2 * hp.n_head * hp.head_dim_k))
    specs |= expected.feed_forward_specs(hp, il)
    if hp.n_ff_shexp and hp.has_experts(il):
        specs[f"blk.{il}.ffn_gate_inp_shexp.weight"] = TensorSpec((hp.n_embd, 1))
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    own = layers(g, hp, w, cfg)
    return blocks.transformer(g, hp, w, own.attn, own.ffn, own.ffn_norm)


def layers(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig, only: int | None = None) -> blocks.Layers:
    """Return the layers, after what they share has been recorded."""
    tables = blocks.rope_tables(g, hp, w, cfg, only)

    def attn(x: Node, layer: LayerWeights) -> Node:
        if hp.is_recurrent(layer.il):
            return delta_net.gated_delta_net(g, hp, x, layer)
        return blocks.self_attention(g, hp, cfg, x, layer, tables[layer.il], neox=True, gated=True)

    def ffn(x: Node, layer: LayerWeights) -> Node:
        return feed_forward(g, hp, cfg, x, layer)

    return blocks.Layers(attn, ffn, FFN_NORM)
