"""PLaMo 2: layers with a scan of one decay per head or with attention, and norms before and after each part.

Its input matrix has the rows of the gate and of x in turns, head by head; b, c and the steps come from a further matrix
and are normed. Attention normalises heads with weights of their own.
"""

from __future__ import annotations

from functools import partial

from ikcli.graph import Graph, HeadSlice, Node
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import fused_dense_ffn
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    specs = expected.base_specs(hp)
    for il in range(hp.n_layer):
        if hp.is_recurrent(il):
            specs |= mixer_specs(hp, il)
        else:
            specs |= expected.attention_specs(hp, il, bias=False)
            specs |= expected.norms_of_all_heads(hp, il, each=True)
        specs[f"blk.{il}.ffn_norm.weight"] = TensorSpec((hp.n_embd,))
        specs |= expected.fused_dense_specs(hp, il)
        specs |= expected.without_ending(expected.post_norm_specs(hp, il))
    return specs


def mixer_specs(hp: HParams, il: int) -> TensorSpecs:
    """Return the tensors of `mixer` and the norm before it."""
    inner, heads, n_state, low = hp.ssm_d_inner, hp.ssm_dt_rank, hp.ssm_d_state, _step_rank(hp)
    shapes = {
        "attn_norm.weight": (hp.n_embd,),
        "ssm_in.weight": (hp.n_embd, 2 * inner),
        "ssm_conv1d.weight": (hp.ssm_d_conv, inner),
        "ssm_x.weight": (inner, 2 * n_state + low),
        "ssm_dt.weight": (low, heads),
        "ssm_dt.bias": (heads,),
        "ssm_a": (heads,),
        "ssm_d": (heads,),
        "ssm_out.weight": (inner, hp.n_embd),
    }
    norms = {"ssm_b_norm.weight": n_state, "ssm_c_norm.weight": n_state, "ssm_dt_norm.weight": low}
    specs = expected.without_ending({name: TensorSpec((n,)) for name, n in norms.items()})
    return expected.in_block(il, {name: TensorSpec(shape) for name, shape in shapes.items()} | specs)


def _step_rank(hp: HParams) -> int:
    """Return the columns that the steps of all heads are made from; files do not say."""
    return max(64, hp.n_embd // 16)


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    attention = blocks.attention_block(g, hp, w, cfg, neox=True)

    def part(x: Node, layer: LayerWeights) -> Node:
        return mixer(g, hp, x, layer) if hp.is_recurrent(layer.il) else attention(x, layer)

    attn = blocks.normed_after(g, part, "post_attention_norm", hp.eps, "post_attn_norm")
    ffn = blocks.normed_after(g, partial(fused_dense_ffn, g, hp), "post_ffw_norm", hp.eps, "post_ffw_norm")
    return blocks.transformer(g, hp, w, attn, ffn)


def mixer(g: Graph, hp: HParams, x: Node, layer: LayerWeights) -> Node:
    """Record the block; its states are two tensors per layer, "conv" and "scan"."""
    inner, heads, n_state, low = hp.ssm_d_inner, hp.ssm_dt_rank, hp.ssm_d_state, _step_rank(hp)
    width = inner // heads
    both = g.mul_mat(layer.ssm_in, x, "ssm_gate_x")
    gate, inputs = (
        g.concat_heads([HeadSlice(both, at, width, 2 * width)], heads, name)
        for name, at in (("ssm_gate", 0), ("ssm_x", width))
    )
    state = g.state("conv", (hp.ssm_d_conv - 1) * inner)
    inputs = g.short_conv(state, [inputs], [layer.ssm_conv1d], "conv_output_silu")
    chosen, parts, start = g.mul_mat(layer.ssm_x, inputs, "ssm_b_c_dt"), [], 0
    for name, n in (("b", n_state), ("c", n_state), ("dt", low)):
        cur = blocks.columns(g, chosen, start, n, f"ssm_{name}_low")
        parts.append(g.rms_norm(cur, layer.with_ending_or_not(f"ssm_{name}_norm"), hp.eps, f"ssm_{name}_normed"))
        start += n
    b, c, steps = parts
    y = g.mamba2_scan(
        g.state("scan", inner * n_state),
        HeadSlice(inputs, 0, width, width),
        g.mul_mat(layer.ssm_dt, steps, "ssm_dt"),
        HeadSlice(b, 0, n_state, n_state),
        HeadSlice(c, 0, n_state, n_state),
        "mamba2_scan",
        a=layer.tensor("ssm_a"),
        d=layer.tensor("ssm_d"),
        dt_bias=layer.ssm_dt_bias,
        n_head=heads,
        n_group=1,
    )
    return g.mul_mat(layer.ssm_out, g.swiglu(gate, y, "ssm_gated"), "ssm_out")
