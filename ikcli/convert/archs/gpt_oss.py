"""gpt-oss."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k

GPT_OSS: b.Table = {
    "layers.*.mlp.experts.gate_up_proj": b.fused_experts(
        "blk.*.ffn_gate_exps.weight", "blk.*.ffn_up_exps.weight", transposed=True, interleaved=True
    ),
    "layers.*.mlp.experts.gate_up_proj_bias": b.fused_experts(
        "blk.*.ffn_gate_exps.bias", "blk.*.ffn_up_exps.bias", interleaved=True
    ),
    "layers.*.mlp.experts.down_proj": b.fused_experts("blk.*.ffn_down_exps.weight", transposed=True),
    "layers.*.mlp.experts.down_proj_bias": b.fused_experts("blk.*.ffn_down_exps.bias"),
}


def _gpt_oss(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m)
    k.rope(m)
    k.rms_eps(m)
    k.experts(m, "num_local_experts", width=False)
    k.head_dim(m)
    m.key("attention.sliding_window", c.integer("sliding_window", least=1))
    k.windows(m, 2, 2)
    m.key("expert_feed_forward_length", c.integer("intermediate_size"))
    c.expect("swiglu_limit", 7.0)
    c.expect("swiglu_alpha", 1.702)
    c.expect("attention_bias", True)
    c.ignore("vocab_size", "experts_per_token", "initial_context_length")


ARCHITECTURES = (b.Architecture("gpt-oss", ("GptOssForCausalLM",), _gpt_oss, GPT_OSS, k.tied),)
