"""The block of recurrent layers: short convolution, gated delta rule, gated norm (Qwen3-Next; KDA of Kimi, Ling).

A layer has two state tensors, "conv" and "delta". Corresponds to `llama-delta-net.cpp` and `llama-kda.cpp` of
ik_llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ikcli.graph import Graph, HeadSlice, Node, Weight
from ikcli.models import expected
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs

L2_EPS = 1e-6  # whatever the epsilon of the other norms


def gated_delta_net(g: Graph, hp: HParams, x: Node, layer: LayerWeights, activation: str = "silu") -> Node:
    """Record Qwen's block: a decay per head; q and k have fewer heads than v. `activation`: of the output gate."""
    qkv, z = _qkv_and_gate(g, hp, x, layer)
    beta, alpha = _beta_and_alpha(g, hp, x, layer)
    decay = g.decay(alpha, layer.ssm_dt_bias, layer.tensor("ssm_a"), "decay")
    fused = layer.get("ssm_ba") is not None
    y = delta_rule(g, hp, [qkv], [layer.ssm_conv1d], decay, beta, tiled=not fused)
    y = g.gated_norm(y, layer.ssm_norm, z, hp.eps, "attn_out_norm", activation=activation)
    return g.mul_mat(layer.ssm_out, y, "linear_attn_out")


def kda(g: Graph, hp: HParams, x: Node, layer: LayerWeights) -> Node:
    """Record Kimi's block: a decay per column of a key; decay and gate may be low-rank products of two matrices."""
    parts = [g.mul_mat(getattr(layer, f"attn_{which}"), x, which) for which in "qkv"]
    convs = [getattr(layer, f"ssm_conv1d_{which}") for which in "qkv"]
    raw, gate = _through(g, x, layer, "ssm_f", "decay_raw"), _through(g, x, layer, "ssm_g", "z")
    decay = g.decay(raw, layer.ssm_dt_bias, layer.tensor("ssm_a"), "decay", bound=hp.kda_lower_bound)
    y = delta_rule(g, hp, parts, convs, decay, g.mul_mat(layer.ssm_beta, x, "beta"), tiled=False)
    y = g.gated_norm(y, layer.ssm_norm, gate, hp.eps, "attn_out_norm", activation="sigmoid")
    return g.mul_mat(layer.attn_output, y, "linear_attn_out")


def _through(g: Graph, x: Node, layer: LayerWeights, name: str, result: str) -> Node:
    """Multiply x by one matrix (`name` or `name_a`), or by `name_a` and `name_b`."""
    second = layer.get(f"{name}_b")
    if second is not None:
        return g.mul_mat(second, g.mul_mat(getattr(layer, f"{name}_a"), x, f"{result}_a"), result)
    return g.mul_mat(layer.get(f"{name}_a") or getattr(layer, name), x, result)


def delta_rule(
    g: Graph, hp: HParams, parts: Sequence[Node], convs: Sequence[Weight], decay: Node, beta: Node, *, tiled: bool
) -> Node:
    """Record the convolution of rows [q | k | v], norms of q and k heads, and the delta rule: [rows, value width]."""
    dk, keys, cols = hp.ssm_d_state, hp.ssm_d_state * hp.ssm_n_group, sum(p.cols for p in parts)
    state = g.state("conv", (hp.ssm_d_conv - 1) * cols)
    mixed = g.short_conv(state, parts, convs, "conv_output_silu")
    qk = g.l2_norm(mixed, dk, L2_EPS, "qk_conv_normed", cols=2 * keys)
    dv = hp.ssm_d_inner // hp.ssm_dt_rank
    return g.delta_net(
        g.state("delta", dk * hp.ssm_d_inner),
        HeadSlice(qk, 0, dk, dk),
        HeadSlice(qk, keys, dk, dk),
        HeadSlice(mixed, 2 * keys, dv, dv),
        decay,
        beta,
        "delta_net",
        n_head=hp.ssm_dt_rank,
        n_head_k=hp.ssm_n_group,
        scale=1.0 / math.sqrt(dk),
        tiled=tiled,
    )


def _qkv_and_gate(g: Graph, hp: HParams, x: Node, layer: LayerWeights) -> tuple[Node, Node]:
    """Return rows [q | k | v] and the output gate; older files keep all four in one matrix, key head by key head."""
    fused = layer.get("ssm_in")
    if fused is None:
        return g.mul_mat(layer.attn_qkv, x, "qkv_mixed"), g.mul_mat(layer.attn_gate, x, "z")
    cur = g.mul_mat(fused, x, "linear_attn_mixed_qkvz")
    dk, n, v = hp.ssm_d_state, hp.ssm_n_group, hp.ssm_d_inner // hp.ssm_n_group
    stride = 2 * dk + 2 * v
    widths = (("q", 0, dk), ("k", dk, dk), ("v", 2 * dk, v), ("z", 2 * dk + v, v))
    q, k, v_, z = (g.concat_heads([HeadSlice(cur, at, width, stride)], n, name) for name, at, width in widths)
    return g.concat([q, k, v_], "qkv_mixed"), z


def _beta_and_alpha(g: Graph, hp: HParams, x: Node, layer: LayerWeights) -> tuple[Node, Node]:
    """Return the inputs of beta and the decay, one column per head of v."""
    fused = layer.get("ssm_ba")
    if fused is None:
        return g.mul_mat(layer.ssm_beta, x, "beta"), g.mul_mat(layer.ssm_alpha, x, "alpha")
    cur = g.mul_mat(fused, x, "linear_attn_mixed_ba")
    n = hp.ssm_dt_rank // hp.ssm_n_group
    beta, alpha = (
        g.concat_heads([HeadSlice(cur, at, n, 2 * n)], hp.ssm_n_group, name) for name, at in (("beta", 0), ("alpha", n))
    )
    return beta, alpha


def gated_delta_net_specs(hp: HParams, il: int, ffn_norm: str) -> TensorSpecs:
    """Return the tensors of `gated_delta_net`; recording the graph decides between the two layouts."""
    keys, values, heads = hp.ssm_d_state * hp.ssm_n_group, hp.ssm_d_inner, hp.ssm_dt_rank
    optional = {
        "attn_qkv.weight": (hp.n_embd, 2 * keys + values),
        "attn_gate.weight": (hp.n_embd, values),
        "ssm_in.weight": (hp.n_embd, 2 * keys + 2 * values),
        "ssm_ba.weight": (hp.n_embd, 2 * heads),
        "ssm_beta.weight": (hp.n_embd, heads),
        "ssm_alpha.weight": (hp.n_embd, heads),
    }
    if hp.arch != "qwen3next":
        del optional["ssm_in.weight"], optional["ssm_ba.weight"]
    required = {
        "attn_norm.weight": (hp.n_embd,),
        "ssm_conv1d.weight": (hp.ssm_d_conv, 2 * keys + values),
        "ssm_dt.bias": (heads,),
        "ssm_a": (heads,),
        "ssm_norm.weight": (values // heads,),
        "ssm_out.weight": (values, hp.n_embd),
        f"{ffn_norm}.weight": (hp.n_embd,),
    }
    specs = {name: TensorSpec(shape) for name, shape in required.items()}
    specs |= {name: TensorSpec(shape, required=hp.arch != "qwen3next") for name, shape in optional.items()}
    return expected.in_block(il, specs)


def kda_specs(hp: HParams, il: int) -> TensorSpecs:
    """Return the tensors of `kda`."""
    width, n_head, rank = hp.ssm_d_inner, hp.ssm_dt_rank, hp.ssm_d_state
    specs = {
        f"ssm_conv1d_{which}.weight": TensorSpec((hp.ssm_d_conv, 1, width), also=((hp.ssm_d_conv, width),))
        for which in "qkv"
    }
    specs |= {f"attn_{which}.weight": TensorSpec((hp.n_embd, width)) for which in "qkv"}
    specs |= {
        "attn_norm.weight": TensorSpec((hp.n_embd,)),
        "ssm_beta.weight": TensorSpec((hp.n_embd, n_head)),
        "ssm_dt.bias": TensorSpec((width,)),
        "ssm_a": TensorSpec((n_head,) if hp.arch == "kimi-k3" else (1, n_head), also=((n_head,), (1, n_head))),
        "ssm_norm.weight": TensorSpec((rank,)),
        "attn_output.weight": TensorSpec((width, hp.n_embd)),
        "ffn_norm.weight": TensorSpec((hp.n_embd,)),
    }
    for name in ("ssm_f", "ssm_g"):
        if hp.arch == "bailingmoe3":
            specs[f"{name}.weight"] = specs[f"{name}_a.weight"] = TensorSpec((hp.n_embd, width), required=False)
        elif hp.arch == "kimi-k3" and name == "ssm_g":
            specs[f"{name}.weight"] = TensorSpec((hp.n_embd, width))
        else:
            specs[f"{name}_a.weight"] = TensorSpec((hp.n_embd, rank))
            specs[f"{name}_b.weight"] = TensorSpec((rank, width))
    return expected.in_block(il, specs)
