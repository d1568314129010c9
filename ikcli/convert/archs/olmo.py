"""OLMo 1 to 3, OLMoE and FlexOlmo."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.rope import read_rope


def _olmo(m: b.Build) -> None:
    """Write the keys of OLMo 1. Norms have no weights, and transformers fixes their epsilon."""
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m)
    m.key("attention.layer_norm_epsilon", 1e-5)
    k.rope(m)
    if c.get("clip_qkv") is not None:
        m.key("attention.clamp_kqv", c.number("clip_qkv"))
    k.biases(m)


def _olmo2(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m)
    k.rms_eps(m)
    k.rope(m)
    k.head_dim(m)
    if c.model_type == "olmo3":
        own = read_rope(c, "sliding_attention")
        if own.type not in ("default", read_rope(c).type) or own.theta != read_rope(c).theta:
            raise c.refuse("rope_parameters", "the same base in all layers")
        m.key("attention.sliding_window", c.integer("sliding_window", least=1))
        k.windows(m, 4)
    c.expect("clip_qkv", None)
    k.biases(m)


def _olmoe(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m)
    m.key("expert_feed_forward_length", c.integer("intermediate_size", least=1))
    k.experts(m, "num_experts", width=False)
    m.key("expert_weights_norm", c.flag("norm_topk_prob"))
    k.rms_eps(m, 1e-5)
    k.rope(m)
    c.expect("clip_qkv", None)
    k.no_window(m)
    k.biases(m)


_NORMED_AFTER: b.Table = {
    "layers.*.post_attention_layernorm": "blk.*.post_attention_norm",
    "layers.*.post_feedforward_layernorm": "blk.*.post_ffw_norm",
}

ARCHITECTURES = (
    b.Architecture("olmo", ("OlmoForCausalLM",), _olmo, b.PAIRS, k.tied),
    b.Architecture("olmo2", ("Olmo2ForCausalLM", "Olmo3ForCausalLM"), _olmo2, finish=k.tied),
    b.Architecture("flex-olmo", ("FlexOlmoForCausalLM",), _olmoe, _NORMED_AFTER, k.tied, names="olmoe"),
    b.Architecture("olmoe", ("OlmoeForCausalLM",), _olmoe, finish=k.tied),
)
