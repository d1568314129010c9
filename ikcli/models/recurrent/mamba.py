"""Mamba, FalconMamba: every layer is a short convolution and a selective scan; no attention, no feed-forward part."""

from __future__ import annotations

from ikcli.graph import Graph, HeadSlice, Node
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    specs = expected.base_specs(hp)
    for il in range(hp.n_layer):
        specs |= mixer_specs(hp, il)
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    return blocks.one_part_layers(g, hp, w, lambda x, layer: mixer(g, hp, x, layer))


def mixer_specs(hp: HParams, il: int) -> TensorSpecs:
    """Return the tensors of `mixer` and the norm before it."""
    width, n_state, rank = hp.ssm_d_inner, hp.ssm_d_state, hp.ssm_dt_rank
    block = {
        "attn_norm.weight": (hp.n_embd,),
        "ssm_in.weight": (hp.n_embd, 2 * width),
        "ssm_conv1d.weight": (hp.ssm_d_conv, width),
        "ssm_conv1d.bias": (width,),
        "ssm_x.weight": (width, rank + 2 * n_state),
        "ssm_dt.weight": (rank, width),
        "ssm_dt.bias": (width,),
        "ssm_a": (n_state, width),
        "ssm_d": (width,),
        "ssm_out.weight": (width, hp.n_embd),
    }
    if hp.arch == "jamba":
        block |= {"ssm_dt_norm.weight": (rank,), "ssm_b_norm.weight": (n_state,), "ssm_c_norm.weight": (n_state,)}
    return expected.in_block(il, {name: TensorSpec(shape) for name, shape in block.items()})


def mixer(g: Graph, hp: HParams, x: Node, layer: LayerWeights) -> Node:
    """Record the block; its states are two tensors per layer, "conv" and "scan"."""
    width, n_state, rank = hp.ssm_d_inner, hp.ssm_d_state, hp.ssm_dt_rank
    inner = g.mul_mat(layer.ssm_in.rows(0, width), x, "ssm_inner")
    gate = g.mul_mat(layer.ssm_in.rows(width, width), x, "ssm_gate")
    state = g.state("conv", (hp.ssm_d_conv - 1) * width)
    inner = g.short_conv(state, [inner], [layer.ssm_conv1d], "conv_output_silu", biases=[layer.ssm_conv1d_bias])
    chosen = g.mul_mat(layer.ssm_x, inner, "ssm_dt_b_c")
    parts = [blocks.columns(g, chosen, 0, rank, "ssm_dt_low")]
    b, c = (HeadSlice(chosen, rank + at, n_state, 0) for at in (0, n_state))
    norms = [layer.get(f"ssm_{name}_norm") for name in ("dt", "b", "c")]
    if hp.ssm_norm_eps or norms[0] is not None:
        parts += [blocks.columns(g, chosen, part.offset, n_state, f"ssm_{name}") for name, part in (("b", b), ("c", c))]
        eps = hp.ssm_norm_eps or hp.eps
        parts = [
            g.norm(part, w, eps, f"{part.name.split('-')[0]}_normed", kind="rms")
            for part, w in zip(parts, norms, strict=True)
        ]
        b, c = (HeadSlice(part, 0, n_state, 0) for part in parts[1:])
    y = g.selective_scan(
        g.state("scan", width * n_state),
        inner,
        g.mul_mat(layer.ssm_dt, parts[0], "ssm_dt"),
        b,
        c,
        "selective_scan",
        a=layer.tensor("ssm_a"),
        d=layer.tensor("ssm_d"),
        dt_bias=layer.ssm_dt_bias,
    )
    return g.mul_mat(layer.ssm_out, g.swiglu(gate, y, "ssm_gated"), "ssm_out")
