"""Cohere: Command R, Command A, and the models with experts."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k


def _cohere(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m)
    k.rope(m)
    k.layer_eps(m)
    m.key("logit_scale", c.number("logit_scale"))
    k.head_dim(m)
    c.ignore("attention_bias", "vocab_size", "use_qk_norm", "use_parallel_block", "use_gated_activation")
    c.ignore("use_embedding_sharing")
    c.expect("use_parallel_block", True)
    c.expect("use_gated_activation", True)


def _commandr(m: b.Build) -> None:
    _cohere(m)
    m.key("rope.scaling.type", "none")


def _cohere2(m: b.Build) -> None:
    c = m.config
    _cohere(m)
    m.key("attention.sliding_window", c.integer("sliding_window", least=1))
    m.key("vocab_size", c.integer("vocab_size"))
    period = c.integer("sliding_window_pattern", "_sliding_window_pattern", default=4, least=1)
    k.windows(m, period, 4)
    c.expect("use_qk_norm", False)
    m.key(
        "rope.dimension_count",
        int(c.number("rotary_pct", default=1.0) * c.integer("head_dim", default=k.head_width(m))),
    )
    c.ignore("order_of_interleaved_layers", "position_embedding_type", "layer_switch")
    c.expect("position_embedding_type", "rope_gptj")
    c.expect("order_of_interleaved_layers", "local_attn_first")
    c.expect("layer_switch", 4)
    c.ignore("rotary_pct")


COHERE: b.Table = {"lm_head": "output"}  # gguf lacks it; dropped if the embeddings are tied


def _cohere2moe(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m, n_ff=False)
    k.head_dim(m)
    m.key("feed_forward_length", c.integer("prefix_dense_intermediate_size", default=c.integer("intermediate_size")))
    if c.get("rms_norm_eps") is not None:
        k.rms_eps(m)
    else:
        k.layer_eps(m)
    k.rope(m)
    m.key("vocab_size", c.integer("vocab_size"))
    m.key("logit_scale", c.number("logit_scale"))
    m.key("rope.dimension_count", c.integer("head_dim"))
    m.key("rope.scaling.type", "none")
    m.key("attention.sliding_window", c.integer("sliding_window", least=1))
    m.key("attention.sliding_window_pattern", k.windows(m, c.integer("sliding_window_pattern", default=4), 0))
    m.key("leading_dense_block_count", k.dense_lead(m))
    m.key("expert_count", c.integer("num_experts", least=1))
    m.key("expert_used_count", c.integer("num_experts_per_tok", least=1))
    width, n_shared = c.integer("intermediate_size"), c.integer("num_shared_experts", default=0)
    m.key("expert_feed_forward_length", width)
    if n_shared:
        m.key("expert_shared_count", n_shared)
        m.key("expert_shared_feed_forward_length", n_shared * width)
        c.expect("shared_expert_combination_strategy", "average")
    c.ignore("shared_expert_combination_strategy")
    m.key("expert_weights_norm", c.flag("norm_topk_prob"))
    c.expect("expert_selection_fn", "sigmoid", "softmax")
    m.key("expert_gating_func", 2 if c.get("expert_selection_fn") == "sigmoid" else 1)
    c.ignore("prefix_dense_sliding_window_pattern", "attention_bias", "use_qk_norm", "use_parallel_block")
    c.expect("use_qk_norm", False)
    c.expect("use_parallel_block", True)


ARCHITECTURES = (
    b.Architecture("command-r", ("CohereForCausalLM",), _commandr, COHERE, k.tied_by_default),
    b.Architecture(
        "cohere2", ("Cohere2ForCausalLM",), _cohere2, COHERE, k.tied_by_default, "",
        frozenset({"cache_implementation"}),
    ),
    b.Architecture("cohere2_moe", ("Cohere2MoeForCausalLM",), _cohere2moe, finish=k.tied_by_default, names="deepseek"),
)  # fmt: skip
