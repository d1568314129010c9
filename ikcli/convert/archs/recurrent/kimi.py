"""Kimi Linear, Kimi K3: Kimi delta attention between layers with latent attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.archs.deepseek import MLA, mla_keys
from ikcli.convert.float8 import read_floats
from ikcli.convert.pieces import Value
from ikcli.convert.rope import read_rope
from ikcli.errors import FormatError


def conv(name: str) -> b.Rule:
    """Store the taps of a convolution with three dimensions."""

    def rule(m: b.Build, found: b.Found) -> None:
        m.plain(found, f"blk.{found.block}.{name}.weight", (found.shape[0], 1, found.shape[-1]))

    return rule


def decay(value: Value, *, row: bool = False) -> b.Rule:
    """Store `value` of one logarithm per head, whose tensor may have further dimensions of 1; `row`: as a vector."""

    def rule(m: b.Build, found: b.Found) -> None:
        n = max(found.shape)
        if int(np.prod(found.shape)) != n:
            raise FormatError(f"{m.config.path.parent}: tensor {found.name} has the shape {list(found.shape)}")
        m.plain(found, f"blk.{found.block}.ssm_a", (n,) if row else (n, 1), value=value)

    return rule


KIMI_LINEAR: b.Table = MLA | {
    "layers.*.block_sparse_moe.gate_proj": "blk.*.ffn_gate",
    "layers.*.block_sparse_moe.up_proj": "blk.*.ffn_up",
    "layers.*.block_sparse_moe.down_proj": "blk.*.ffn_down",
    "layers.*.self_attn.A_log": decay(b.minus_exp),
    "layers.*.self_attn.dt_bias": b.to("blk.*.ssm_dt.bias"),
    "layers.*.self_attn.q_conv1d": conv("ssm_conv1d_q"),
    "layers.*.self_attn.k_conv1d": conv("ssm_conv1d_k"),
    "layers.*.self_attn.v_conv1d": conv("ssm_conv1d_v"),
}  # fmt: skip


def _score(name: str) -> b.Rule:
    """Store the weights of a norm times those of the projection to a score that follows it."""

    def rule(m: b.Build, found: b.Found) -> None:
        norm, projection = (read_floats(m.source, found.name.replace("_proj.", f"_{x}.")) for x in ("norm", "proj"))
        m.constant(b.place(name, found), (norm.reshape(-1) * projection.reshape(-1)).astype(np.float32))

    return rule


def _gate(m: b.Build, found: b.Found) -> None:
    """Store the gate on the result of a layer, whose name depends on the kind of the layer."""
    m.plain(found, f"blk.{found.block}.{'attn_gate' if found.block + 1 in _full_layers(m) else 'ssm_g'}.weight")


def _full_layers(m: b.Build) -> list[int]:
    """Return the layers with latent attention, counted from 1."""
    full = m.config.inner("linear_attn_config").get("full_attn_layers")
    if not isinstance(full, list) or not all(isinstance(i, int) for i in full):
        raise m.config.fail("linear_attn_config", f"has full_attn_layers {full}, which should be a list of layers")
    return full


KIMI_K3: b.Table = KIMI_LINEAR | {
    "layers.*.self_attn.A_log": decay(b.minus_exp, row=True),
    "layers.*.self_attn.g_proj": _gate,
    "layers.*.block_sparse_moe.routed_expert_down_proj": "blk.*.ffn_routed_down",
    "layers.*.block_sparse_moe.routed_expert_norm": "blk.*.ffn_routed_norm",
    "layers.*.block_sparse_moe.routed_expert_up_proj": "blk.*.ffn_routed_up",
    "layers.*.self_attention_res_norm": b.drop,
    "layers.*.self_attention_res_proj": _score("blk.*.attn_res_score"),
    "layers.*.mlp_res_norm": b.drop,
    "layers.*.mlp_res_proj": _score("blk.*.ffn_res_score"),
    "output_attn_res_norm": b.drop,
    "output_attn_res_proj": _score("output_res_score"),
}  # fmt: skip


def _kimi_linear(m: b.Build) -> None:
    k.activation(m, *k.SILU)
    _keys(m)


def _kimi_k3(m: b.Build) -> None:
    c = m.config
    k.activation(m, "situ")
    _keys(m)
    own = c.inner("linear_attn_config")
    if own.get("use_full_rank_gate") is not True:
        raise c.refuse("linear_attn_config", "an object with use_full_rank_gate true")
    if own.get("gate_lower_bound") is not None:
        m.key("kda.gate_lower_bound", c.inner_number("linear_attn_config", "gate_lower_bound", 0.0))
    full = _full_layers(m)
    m.key("attention.head_count_kv", [int(i + 1 in full) for i in range(m.n_layer)])
    m.key("attn_res.block_size", c.integer("attn_res_block_size", least=1))
    m.key("activation.situ_beta", c.number("activation_situ_beta", default=1.0))
    m.key("activation.situ_linear_beta", c.number("activation_situ_linear_beta", default=0.0))
    m.key("expert_latent_length", c.get("routed_expert_hidden_size"))
    c.ignore("mla_use_output_gate", "latent_moe_use_norm")


def _keys(m: b.Build) -> None:
    """Write the keys of both architectures."""
    c = m.config
    c.ignore("model_max_length")
    k.sizes(m)
    m.key("context_length", c.integer("model_max_length", "max_position_embeddings"))
    k.rms_eps(m)
    mla_keys(m)
    own: Any = c.get("linear_attn_config")
    kinds = c.items("layer_types")
    if isinstance(own, dict):
        full = own.get("full_attn_layers") or []
        kinds = ["full_attention" if i + 1 in full else "linear_attention" for i in range(m.n_layer)]
        taps, width = own.get("short_conv_kernel_size", 4), own.get("head_dim")
        n_head = own.get("num_heads")
    else:
        taps, width = c.integer("linear_conv_kernel_dim"), c.integer("linear_head_dim")
        n_head = c.integer("linear_num_heads")
    if kinds is None or len(kinds) != m.n_layer or set(kinds) - {"full_attention", "linear_attention"}:
        raise c.refuse("layer_types", "full_attention or linear_attention for every layer")
    if n_head != c.integer("num_attention_heads"):
        raise c.refuse("num_attention_heads", f"the {n_head} heads of linear layers")
    m.key("attention.head_count_kv", [c.integer("num_attention_heads") * (kind == "full_attention") for kind in kinds])
    m.key("ssm.conv_kernel", int(taps))
    m.key("kda.head_dim", int(width or 0))
    m.key("rope.freq_base", read_rope(c).theta)
    m.key("leading_dense_block_count", k.dense_lead(m))
    k.experts(m, "num_experts")
    m.key("expert_shared_count", c.integer("num_shared_experts", default=0))
    m.key("expert_weights_scale", c.number("routed_scaling_factor", default=1.0))
    m.key("expert_weights_norm", c.flag("moe_renormalize", default=True))
    m.key("expert_gating_func", 2)
    c.expect("moe_router_activation_func", "sigmoid")
    c.expect("num_expert_group", 1)
    c.expect("mla_use_nope", True)
    c.expect("moe_layer_freq", 1)
    c.ignore("topk_group", "use_grouped_topk", "topk_method", "num_nextn_predict_layers")
    m.key("vocab_size", c.integer("vocab_size"))


ARCHITECTURES = (
    b.Architecture("kimi-linear", ("KimiLinearForCausalLM",), _kimi_linear, KIMI_LINEAR, k.tied),
    b.Architecture(
        "kimi-k3", ("KimiK3ForConditionalGeneration",), _kimi_k3, KIMI_K3, k.tied, r"^(vision_tower|mm_projector)\.",
        names="kimi-linear",
    ),
)  # fmt: skip
