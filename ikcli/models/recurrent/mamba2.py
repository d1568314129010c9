"""Mamba 2: every layer is a short convolution and a scan with one decay per head; also models that mix such layers.

Granite 4 has layers with this mixer or attention, each with a feed-forward part; Falcon-H1 has both mixers side by side
in every layer; a layer of Nemotron-H is one of mixer, attention and feed-forward part.
"""

from __future__ import annotations

from ikcli.graph import Graph, HeadSlice, Node
from ikcli.graph.activations import Glu
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import feed_forward, mlp, moe_ffn
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights

_SQUARED = Glu("relu_sqr")  # of Nemotron-H, whose feed-forward parts have no gate


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    specs = expected.base_specs(hp)
    for il in range(hp.n_layer):
        both = hp.arch == "falcon-h1"
        if hp.is_recurrent(il):
            specs |= mixer_specs(hp, il)
        if both or not (hp.is_recurrent(il) or _is_feed_forward(hp, il)):
            specs |= expected.attention_specs(hp, il, bias=None, ffn_norm=None, fused=False)
        if hp.arch.startswith("nemotron_h"):
            specs |= _ungated_specs(hp, il) if _is_feed_forward(hp, il) else {}
        elif hp.arch != "mamba2":
            specs |= expected.feed_forward_specs(hp, il)
            specs[f"blk.{il}.ffn_norm.weight"] = TensorSpec((hp.n_embd,), required=not both)
        if both:  # llama.cpp's name lacks the ending
            specs[f"blk.{il}.ffn_norm"] = TensorSpec((hp.n_embd,), unless=f"blk.{il}.ffn_norm.weight")
    return specs


def mixer_specs(hp: HParams, il: int) -> TensorSpecs:
    """Return the tensors of `mixer` and the norm before it."""
    inner, heads, groups = hp.ssm_d_inner, hp.ssm_dt_rank, hp.ssm_n_group
    conv = inner + 2 * groups * hp.ssm_d_state
    norm = TensorSpec((inner // groups, groups), required=hp.arch != "falcon-h1")
    required = {
        "attn_norm.weight": (hp.n_embd,),
        "ssm_in.weight": (hp.n_embd, inner + conv + heads),
        "ssm_conv1d.weight": (hp.ssm_d_conv, conv),
        "ssm_dt.bias": (heads,),
        "ssm_a": (1, heads),
        "ssm_d": (1, heads),
        "ssm_out.weight": (inner, hp.n_embd),
    }
    specs = {name: TensorSpec(shape) for name, shape in required.items()}
    bias = TensorSpec((conv,), required=False)
    return expected.in_block(il, specs | {"ssm_conv1d.bias": bias, "ssm_norm.weight": norm})


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    attention = blocks.attention_block(g, hp, w, cfg, neox=hp.arch == "falcon-h1") if hp.arch != "mamba2" else None

    def part(x: Node, layer: LayerWeights) -> Node:
        if hp.is_recurrent(layer.il):
            cur = mixer(g, hp, x, layer)
            if hp.arch == "falcon-h1" and attention is not None:
                cur = g.add(attention(x, layer), cur, "attn_ssm")
            return cur
        if _is_feed_forward(hp, layer.il):
            return _ungated(g, hp, cfg, x, layer)
        assert attention is not None
        return attention(x, layer)

    def ffn(x: Node, layer: LayerWeights) -> Node:
        if hp.arch == "falcon-h1" and layer.get("ffn_norm") is None:
            x = blocks.norm(g, hp, x, layer.tensor("ffn_norm"), "ffn_norm")
        return feed_forward(g, hp, cfg, x, layer)

    if hp.arch in ("mamba2", "nemotron_h", "nemotron_h_moe"):
        return blocks.one_part_layers(g, hp, w, part)
    return blocks.transformer(g, hp, w, part, ffn)


def mixer(g: Graph, hp: HParams, x: Node, layer: LayerWeights) -> Node:
    """Record the block; its states are two tensors per layer, "conv" and "scan"."""
    inner, heads, groups, n_state = hp.ssm_d_inner, hp.ssm_dt_rank, hp.ssm_n_group, hp.ssm_d_state
    conv, width = inner + 2 * groups * n_state, inner // heads
    gate = g.mul_mat(layer.ssm_in.rows(0, inner), x, "ssm_gate")
    xbc = g.mul_mat(layer.ssm_in.rows(inner, conv), x, "ssm_xbc")
    dt = g.mul_mat(layer.ssm_in.rows(inner + conv, heads), x, "ssm_dt")
    bias = layer.get("ssm_conv1d_bias")
    state = g.state("conv", (hp.ssm_d_conv - 1) * conv)
    xbc = g.short_conv(state, [xbc], [layer.ssm_conv1d], "conv_output_silu", biases=[] if bias is None else [bias])
    y = g.mamba2_scan(
        g.state("scan", inner * n_state),
        HeadSlice(xbc, 0, width, width),
        dt,
        HeadSlice(xbc, inner, n_state, n_state),
        HeadSlice(xbc, inner + groups * n_state, n_state, n_state),
        "mamba2_scan",
        a=layer.tensor("ssm_a"),
        d=layer.tensor("ssm_d"),
        dt_bias=layer.ssm_dt_bias,
        n_head=heads,
        n_group=groups,
    )
    y = g.swiglu(gate, y, "ssm_gated")
    norm = layer.get("ssm_norm")
    if norm is not None:
        y = g.norm(y, norm, hp.eps, "ssm_normed", kind="rms", width=inner // groups)
    return g.mul_mat(layer.ssm_out, y, "ssm_out")


def _is_feed_forward(hp: HParams, il: int) -> bool:
    """Return whether block il of Nemotron-H is a feed-forward part."""
    return hp.arch.startswith("nemotron_h") and not hp.is_recurrent(il) and hp.at(il).n_ff > 0


def _ungated(g: Graph, hp: HParams, cfg: GraphConfig, x: Node, layer: LayerWeights) -> Node:
    """Record a dense part, or experts beside a shared one, without gates."""
    if layer.get("ffn_gate_inp") is None:
        return mlp(g, x, layer, "relu_sqr")
    down, logits, inputs = layer.get("ffn_latent_down"), None, x
    if down is not None:  # experts work on fewer columns, but are chosen by all
        logits = g.mul_mat(layer.ffn_gate_inp, x, "ffn_moe_logits")
        inputs = g.mul_mat(down, x, "ffn_latent_down")
    experts = moe_ffn(g, hp.at(layer.il), cfg, inputs, layer, act=_SQUARED, logits=logits)
    if down is not None:
        experts = g.mul_mat(layer.ffn_latent_up, experts, "ffn_latent_up")
    return g.add(experts, mlp(g, x, layer, "relu_sqr", "ffn_shexp", "_shexp"), "ffn_out")


def _ungated_specs(hp: HParams, il: int) -> TensorSpecs:
    hp = hp.at(il)
    norm = {f"blk.{il}.attn_norm.weight": TensorSpec((hp.n_embd,))}
    if not hp.n_expert:
        specs = expected.mlp_specs(hp, il)
        return norm | specs | expected.bias_specs(specs, "ffn_up ffn_down", required=False)
    width = hp.n_embd_exp or hp.n_embd
    specs = {
        "ffn_gate_inp.weight": TensorSpec((hp.n_embd, hp.n_expert)),
        "exp_probs_b.bias": TensorSpec((hp.n_expert,), required=False),
        "ffn_up_exps.weight": TensorSpec((width, hp.n_ff_exp, hp.n_expert)),
        "ffn_down_exps.weight": TensorSpec((hp.n_ff_exp, width, hp.n_expert)),
        "ffn_up_shexp.weight": TensorSpec((hp.n_embd, hp.n_ff_shexp)),
        "ffn_down_shexp.weight": TensorSpec((hp.n_ff_shexp, hp.n_embd)),
    }
    if hp.n_embd_exp:
        specs["ffn_latent_down.weight"] = TensorSpec((hp.n_embd, width))
        specs["ffn_latent_up.weight"] = TensorSpec((width, hp.n_embd))
    return norm | expected.in_block(il, specs)
