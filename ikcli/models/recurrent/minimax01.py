"""MiniMax-Text-01, MiniMax-M1: linear attention with a fixed decay per head, softmax attention in every eighth layer.

A residual is the normed input of a part, times a factor, not what it was before the norm. Linear attention applies SiLU
to q, k and v, a norm to the results of all heads together, and a gate. Corresponds to `MiniMaxForCausalLM` of
transformers.
"""

from __future__ import annotations

from ikcli.graph import Graph, HeadSlice, Node
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import feed_forward
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights

LINEAR_EPS = 1e-6  # of the norm behind linear attention; files do not store it
_SLACK = 1e-5  # keeps the slopes of the last layer above 0


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    return expected.with_blocks(hp, block_shapes)


def block_shapes(hp: HParams, il: int) -> TensorSpecs:
    """Return the expected tensors of block il."""
    if not hp.is_recurrent(il):
        specs = expected.attention_specs(hp, il, bias=None)
    else:
        n_embd, width = hp.n_embd, hp.n_head * hp.head_dim_k
        shapes = {
            "attn_norm": (n_embd,), "attn_qkv": (n_embd, 3 * width), "attn_norm_2": (width,),
            "attn_gate": (n_embd, width), "attn_output": (width, n_embd), "ffn_norm": (n_embd,),
        }  # fmt: skip
        specs = expected.in_block(il, {f"{name}.weight": TensorSpec(shape) for name, shape in shapes.items()})
    return specs | expected.feed_forward_specs(hp, il)


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    softmax = blocks.attention_block(g, hp, w, cfg, neox=True)
    x = blocks.embedded(g, hp, w)
    for il in range(hp.n_layer):
        g.il = il
        layer = w.layer(il)
        x = blocks.normed(g, hp, x, layer, "attn_norm")
        cur = linear_attention(g, hp, x, layer) if hp.is_recurrent(il) else softmax(x, layer)
        if il == hp.n_layer - 1:
            cur, x = g.select_outputs(cur, "last_attn"), g.select_outputs(x, "last_inp")
        x = g.add(g.scale(x, hp.residual_scale, "attn_residual"), cur, "ffn_inp")
        x = blocks.normed(g, hp, x, layer, "ffn_norm")
        cur = feed_forward(g, hp, cfg, x, layer)
        x = g.layer_out(g.add(g.scale(x, hp.residual_scale, "ffn_residual"), cur, "l_out"))
    g.il = -1
    return blocks.output(g, hp, w, x)


def linear_attention(g: Graph, hp: HParams, x: Node, layer: LayerWeights) -> Node:
    """Record linear attention; its state holds a matrix per head."""
    d = hp.head_dim_k
    qkv = g.activate(g.mul_mat(layer.attn_qkv, x, "qkv"), "silu", "qkv_silu")
    q, k, v = (HeadSlice(qkv, i * d, d, 3 * d) for i in range(3))
    state = g.state("linear", hp.n_head * d * d)
    y = g.linear_attention(state, q, k, v, "linear_attn", slopes=slopes(hp, layer.il))
    gate = g.mul_mat(layer.attn_gate, x, "attn_gate")
    y = g.gated_norm(y, layer.attn_norm_2, gate, LINEAR_EPS, "attn_gated", activation="sigmoid")
    return g.mul_mat(layer.attn_output, y, "attn_out")


def slopes(hp: HParams, il: int) -> tuple[float, ...]:
    """Return by how much the logarithm of a weight falls from token to token, by head; later layers forget less."""
    depth = 1 - il / (hp.n_layer - 1 + _SLACK) + _SLACK
    return tuple(depth * 2 ** (-8 * (h + 1) / hp.n_head) for h in range(hp.n_head))
