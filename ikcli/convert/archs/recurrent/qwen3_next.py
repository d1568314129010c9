"""Qwen3-Next and Qwen3.5: layers with a gated delta net between layers with attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.archs.qwen import base_keys, every_layer, sections
from ikcli.convert.pieces import Order, TensorRows


def _heads(m: b.Build) -> tuple[int, int, int, int]:
    """Return the number of key heads and their columns, then the same of value heads."""
    c = m.config
    n_k, d_k = c.integer("linear_num_key_heads", least=1), c.integer("linear_key_head_dim", least=1)
    n_v, d_v = c.integer("linear_num_value_heads", least=1), c.integer("linear_value_head_dim", least=1)
    if n_v % n_k:
        raise c.fail("linear_num_value_heads", f"is {n_v}, no multiple of the {n_k} key heads")
    return n_k, d_k, n_v, d_v


def recurrent_sizes(m: b.Build) -> None:
    """Write the sizes of the delta net."""
    n_k, d_k, n_v, d_v = _heads(m)
    m.key("ssm.conv_kernel", m.config.integer("linear_conv_kernel_dim", least=2))
    m.key("ssm.state_size", d_k)
    m.key("ssm.group_count", n_k)
    m.key("ssm.time_step_rank", n_v)
    m.key("ssm.inner_size", n_v * d_v)


def recurrent_keys(m: b.Build) -> None:
    """Write the sizes of the delta net and the layers that have one."""
    c = m.config
    recurrent_sizes(m)
    interval = c.integer("full_attention_interval", default=4, least=1)
    kinds = c.items("layer_types")
    if kinds is None:
        kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(m.n_layer)]
    if strange := set(kinds) - {"linear_attention", "full_attention"}:
        raise c.fail("layer_types", f"has {min(strange)}; known are linear_attention and full_attention")
    if len(kinds) != m.n_layer:
        raise c.fail("layer_types", f"has {len(kinds)} values for {m.n_layer} layers")
    recurrent = [kind == "linear_attention" for kind in kinds]
    m.key("attention.recurrent_layers", recurrent + [False] * m.n_further)
    m.key("full_attention_interval", interval)


def _rotation(m: b.Build) -> None:
    from ikcli.convert.rope import read_rope

    partial = read_rope(m.config).partial
    m.key("rope.dimension_count", int(m.config.integer("head_dim") * partial))


def _next_keys(m: b.Build) -> None:
    base_keys(m, further=True)
    every_layer(m)
    k.experts(m)
    m.key("expert_shared_feed_forward_length", m.config.integer("shared_expert_intermediate_size"))
    m.config.expect("norm_topk_prob", True)
    recurrent_keys(m)
    _rotation(m)


def _dense_keys(m: b.Build) -> None:
    base_keys(m, further=True)
    sections(m)
    recurrent_keys(m)
    _rotation(m)


def _moe_keys(m: b.Build) -> None:
    base_keys(m, n_ff=m.config.given("intermediate_size") is not None, further=True)
    sections(m)
    k.experts(m)
    m.key("expert_shared_feed_forward_length", m.config.integer("shared_expert_intermediate_size"))
    recurrent_keys(m)
    _rotation(m)


def _split_qkvz(m: b.Build, found: b.Found) -> None:
    """Split (query, key, values, gates) of each key head into attn_qkv and attn_gate."""
    n_k, d_k, n_v, d_v = _heads(m)
    per = n_v // n_k * d_v
    if found.shape[0] != n_k * (2 * d_k + 2 * per):
        raise m.config.fail(
            "linear_num_key_heads", f"is {n_k}, which does not fit {found.shape[0]} rows of {found.name}"
        )
    rows = np.arange(found.shape[0]).reshape(n_k, 2 * d_k + 2 * per)
    cuts = np.split(rows, (d_k, 2 * d_k, 2 * d_k + per), axis=1)
    qkv = np.concatenate([part.reshape(-1) for part in cuts[:3]])
    gate = cuts[3].reshape(-1)
    for name, order in (("attn_qkv", qkv), ("attn_gate", gate)):
        piece = TensorRows(found.name, len(order), found.shape[1], order=order)
        m.add(f"blk.{found.block}.{name}.weight", (piece,))


def _value_heads(width: int = 0) -> Any:
    """Return an order of value heads: the first of each key head, then the second of each, and so on.

    A head has `width` rows (0: its columns).
    """

    def order(m: b.Build, n: int) -> Order:
        n_k, _, n_v, d_v = _heads(m)
        per = width or d_v
        lead = n - n_v * per  # rows of queries and keys come first
        if lead < 0:
            raise m.config.fail("linear_num_value_heads", f"is {n_v}, which does not fit {n} rows")
        heads = np.arange(n_v * per).reshape(n_k, n_v // n_k, per).swapaxes(0, 1).reshape(-1)
        return np.concatenate([np.arange(lead), lead + heads])

    return order


def _conv(reorder: bool) -> b.Rule:
    def rule(m: b.Build, found: b.Found) -> None:
        order = _value_heads()(m, found.shape[0]) if reorder else None
        m.plain(found, f"blk.{found.block}.ssm_conv1d.weight", (found.shape[0], found.shape[-1]), order=order)

    return rule


_NORMS: b.Table = {
    "norm": b.to("output_norm", value=b.plus_one),
    "layers.*.input_layernorm": b.to("blk.*.attn_norm", value=b.plus_one),
    "layers.*.post_attention_layernorm": b.to("blk.*.post_attention_norm", value=b.plus_one),
    "layers.*.self_attn.q_norm": b.to("blk.*.attn_q_norm", value=b.plus_one),
    "layers.*.self_attn.k_norm": b.to("blk.*.attn_k_norm", value=b.plus_one),
    "layers.*.enorm": b.to("blk.*.nextn.enorm", value=b.plus_one),
    "layers.*.hnorm": b.to("blk.*.nextn.hnorm", value=b.plus_one),
    "layers.*.shared_head.norm": b.to("blk.*.nextn.shared_head_norm", value=b.plus_one),
}
NEXT: b.Table = _NORMS | {
    "layers.*.linear_attn.A_log": b.to("blk.*.ssm_a", value=b.minus_exp),
    "layers.*.linear_attn.dt_bias": b.to("blk.*.ssm_dt.bias"),
    "layers.*.linear_attn.conv1d": _conv(False),
    "layers.*.linear_attn.in_proj_qkvz": _split_qkvz,
}  # fmt: skip
QWEN35: b.Table = _NORMS | {
    "layers.*.linear_attn.A_log": b.to("blk.*.ssm_a", value=b.minus_exp, order=_value_heads(1)),
    "layers.*.linear_attn.dt_bias": b.to("blk.*.ssm_dt.bias", order=_value_heads(1)),
    "layers.*.linear_attn.conv1d": _conv(True),
    "layers.*.linear_attn.in_proj_a": b.to("blk.*.ssm_alpha", order=_value_heads(1)),
    "layers.*.linear_attn.in_proj_b": b.to("blk.*.ssm_beta", order=_value_heads(1)),
    "layers.*.linear_attn.in_proj_qkv": b.to("blk.*.attn_qkv", order=_value_heads()),
    "layers.*.linear_attn.in_proj_z": b.to("blk.*.attn_gate", order=_value_heads()),
    "layers.*.linear_attn.out_proj": b.to("blk.*.ssm_out", columns=_value_heads()),
}
_DROP = r"(^|\.)visual\."


ARCHITECTURES = (
    b.Architecture("qwen3next", ("Qwen3NextForCausalLM",), _next_keys, NEXT, k.tied, _DROP),
    b.Architecture(
        "qwen35", ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "MiniCPMV4_6ForConditionalGeneration"),
        _dense_keys, QWEN35, k.tied, rf"{_DROP}|(^|\.)(vision_tower|merger)\.",
        frozenset({"mtp_use_dedicated_embeddings", "attn_output_gate", "mamba_ssm_dtype"}),
    ),
    b.Architecture(
        "qwen35moe", ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"), _moe_keys,
        QWEN35, k.tied, _DROP,
        frozenset({"mtp_use_dedicated_embeddings", "attn_output_gate", "mamba_ssm_dtype"}),
    ),
)  # fmt: skip
