"""The architecture: llama with the op in its feed-forward part."""

from __future__ import annotations

from ikcli.graph import Graph, Node
from ikcli.models import blocks, llama
from ikcli.models.config import GraphConfig
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, Weights
from outside.op import ReluSquaredGlu

tensor_shapes = llama.tensor_shapes
SHIFT = 0.0


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph; returns the logits of the output rows."""
    tables = blocks.rope_tables(g, hp, w, cfg)

    def attn(x: Node, layer: LayerWeights) -> Node:
        return blocks.self_attention(g, hp, cfg, x, layer, tables[layer.il], neox=False)

    def ffn(x: Node, layer: LayerWeights) -> Node:
        gate, up = g.mul_mat(layer.ffn_gate, x, "ffn_gate"), g.mul_mat(layer.ffn_up, x, "ffn_up")
        return g.mul_mat(layer.ffn_down, g.record(ReluSquaredGlu(gate, up, SHIFT), "ffn_par"), "ffn_out")

    return blocks.transformer(g, hp, w, attn, ffn)
