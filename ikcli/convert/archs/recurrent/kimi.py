"""Kimi Linear: Kimi delta attention between layers with latent attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.archs.deepseek import MLA, mla_keys
from ikcli.convert.pieces import Value
from ikcli.convert.rope import read_rope
from ikcli.errors import FormatError


def conv(name: str) -> b.Rule:
    """Store the taps of a convolution with three dimensions."""

    def rule(m: b.Build, found: b.Found) -> None:
        m.plain(found, f"blk.{found.block}.{name}.weight", (found.shape[0], 1, found.shape[-1]))

    return rule


def decay(value: Value) -> b.Rule:
    """Store `value` of one logarithm per head, whose tensor may have further dimensions of 1."""

    def rule(m: b.Build, found: b.Found) -> None:
        n = max(found.shape)
        if int(np.prod(found.shape)) != n:
            raise FormatError(f"{m.config.path.parent}: tensor {found.name} has the shape {list(found.shape)}")
        m.plain(found, f"blk.{found.block}.ssm_a", (n, 1), value=value)

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


def _kimi_linear(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
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


ARCHITECTURES = (b.Architecture("kimi-linear", ("KimiLinearForCausalLM",), _kimi_linear, KIMI_LINEAR, k.tied),)
