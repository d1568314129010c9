"""Jamba: Mamba's mixer or attention, with experts in some layers."""

from __future__ import annotations

import math

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.archs.recurrent.mamba import conv_taps


def _keys(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m)
    m.key("vocab_size", c.integer("vocab_size", least=1))
    k.rms_eps(m)
    heads = c.integer("num_key_value_heads", least=1)
    period, offset = c.integer("attn_layer_period", default=8, least=1), c.integer("attn_layer_offset", default=4)
    m.key("attention.head_count_kv", [heads if il % period == offset else 0 for il in range(m.n_layer)])
    width = k.embd(m)
    m.key("ssm.conv_kernel", c.integer("mamba_d_conv", default=4, least=2))
    m.key("ssm.inner_size", c.integer("mamba_expand", default=2, least=1) * width)
    m.key("ssm.state_size", c.integer("mamba_d_state", default=16, least=1))
    rank = c.get("mamba_dt_rank")
    m.key("ssm.time_step_rank", math.ceil(width / 16) if rank in (None, "auto") else c.integer("mamba_dt_rank"))
    if c.integer("num_experts", "num_local_experts", default=1) > 1:
        k.experts(m, "num_experts", "num_local_experts", width=False)
    c.expect("mamba_conv_bias", True)
    c.expect("mamba_proj_bias", False)
    c.expect("mamba_inner_layernorms", True)
    c.expect("sliding_window")
    c.ignore("num_experts_per_tok", "expert_layer_period", "expert_layer_offset")


JAMBA: b.Table = {
    "final_layernorm": "output_norm",
    "layers.*.input_layernorm": "blk.*.attn_norm",
    "layers.*.pre_ff_layernorm": "blk.*.ffn_norm",
    "layers.*.mamba.in_proj": "blk.*.ssm_in",
    "layers.*.mamba.conv1d": conv_taps,
    "layers.*.mamba.x_proj": "blk.*.ssm_x",
    "layers.*.mamba.dt_proj": "blk.*.ssm_dt",
    "layers.*.mamba.A_log": b.to("blk.*.ssm_a!", value=b.minus_exp),
    "layers.*.mamba.D": b.to("blk.*.ssm_d!"),
    "layers.*.mamba.out_proj": "blk.*.ssm_out",
    "layers.*.mamba.dt_layernorm": "blk.*.ssm_dt_norm",
    "layers.*.mamba.b_layernorm": "blk.*.ssm_b_norm",
    "layers.*.mamba.c_layernorm": "blk.*.ssm_c_norm",
    "layers.*.feed_forward.gate_proj": "blk.*.ffn_gate",
    "layers.*.feed_forward.up_proj": "blk.*.ffn_up",
    "layers.*.feed_forward.down_proj": "blk.*.ffn_down",
    "layers.*.feed_forward.router": "blk.*.ffn_gate_inp",
    "layers.*.feed_forward.experts.#.gate_proj": b.expert("blk.*.ffn_gate_exps"),
    "layers.*.feed_forward.experts.#.up_proj": b.expert("blk.*.ffn_up_exps"),
    "layers.*.feed_forward.experts.#.down_proj": b.expert("blk.*.ffn_down_exps"),
}

_HARMLESS = frozenset(
    {"use_mamba_kernels", "use_mambapy", "use_associative_scan", "calc_logits_for_entire_prompt",
     "num_logits_to_keep", "layers_block_type", "n_ctx"}
)  # fmt: skip

ARCHITECTURES = (b.Architecture("jamba", ("JambaForCausalLM",), _keys, JAMBA, k.tied, harmless=_HARMLESS),)
