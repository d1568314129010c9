"""LFM2 (dense, experts) and Jamba: layers with a recurrent mixer or attention, each with a feed-forward part.

LFM2's mixer is a short convolution between two gates. Jamba's is Mamba's, with norms of what controls the scan; its
attention does not rotate.
"""

from __future__ import annotations

from ikcli.graph import Graph, Node
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import feed_forward
from ikcli.models.hparams import HParams
from ikcli.models.recurrent import mamba
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file; LFM2's last norm usually is called the norm of embeddings."""
    specs, conv = expected.base_specs(hp), hp.arch != "jamba"
    if conv:
        specs["token_embd_norm.weight"] = TensorSpec((hp.n_embd,), required=False)
        specs["output_norm.weight"] = TensorSpec((hp.n_embd,), unless="token_embd_norm.weight")
    for il in range(hp.n_layer):
        if hp.is_recurrent(il):
            specs |= short_conv_specs(hp, il) if conv else mamba.mixer_specs(hp, il)
        else:
            specs |= expected.attention_specs(hp, il, bias=False, qk_norm=conv, ffn_norm=None, fused=False)
        specs[f"blk.{il}.ffn_norm.weight"] = TensorSpec((hp.n_embd,))
        specs |= expected.feed_forward_specs(hp, il)
    return specs


def short_conv_specs(hp: HParams, il: int) -> TensorSpecs:
    """Return the tensors of `short_conv` and the norm before it."""
    n = hp.n_embd
    shapes = {
        "attn_norm.weight": (n,),
        "shortconv.conv.weight": (hp.ssm_d_conv, n),
        "shortconv.in_proj.weight": (n, 3 * n),
        "shortconv.out_proj.weight": (n, n),
    }
    return expected.in_block(il, {name: TensorSpec(shape) for name, shape in shapes.items()})


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    attention = blocks.attention_block(g, hp, w, cfg, neox=True)
    recurrent = short_conv if hp.arch != "jamba" else mamba.mixer

    def attn(x: Node, layer: LayerWeights) -> Node:
        return recurrent(g, hp, x, layer) if hp.is_recurrent(layer.il) else attention(x, layer)

    return blocks.transformer(g, hp, w, attn, lambda x, layer: feed_forward(g, hp, cfg, x, layer))


def short_conv(g: Graph, hp: HParams, x: Node, layer: LayerWeights) -> Node:
    """Record a gate, a convolution without activation, and another gate; the state is "conv"."""
    matrix, n = layer.tensor("shortconv.in_proj.weight"), hp.n_embd
    before, after, inner = (
        g.mul_mat(matrix.rows(i * n, n), x, f"conv_{name}") for i, name in enumerate(("gate_in", "gate_out", "inner"))
    )
    state, taps = g.state("conv", (hp.ssm_d_conv - 1) * n), layer.tensor("shortconv.conv.weight")
    y = g.short_conv(state, [g.gate(inner, before, "conv_gated", "product")], [taps], "conv_output", linear=True)
    return g.mul_mat(
        layer.tensor("shortconv.out_proj.weight"), g.gate(y, after, "conv_gated_out", "product"), "conv_out"
    )
