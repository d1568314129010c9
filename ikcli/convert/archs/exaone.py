"""EXAONE 3 and 4, and K-EXAONE with experts."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k


def _exaone(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU, keys=k.ACTIVATION_KEYS)
    k.sizes(m)
    k.rope(m)
    m.key("attention.layer_norm_rms_epsilon", c.number("layer_norm_epsilon", "rms_norm_eps"))
    k.head_dim(m)
    c.ignore("attention_bias", "mlp_bias", "vocab_size")


def _finish_exaone(m: b.Build) -> None:
    c = m.config
    k.put_llama3(m, c.integer("head_dim", default=k.embd(m) // c.integer("num_attention_heads")))
    k.tied(m)


def _exaone4(m: b.Build) -> None:
    _exaone4_keys(m)
    m.config.ignore("sliding_window_pattern")


def _exaone4_keys(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m)
    k.rope(m)
    k.rms_eps(m)
    k.head_dim(m)
    if c.get("sliding_window") is not None:
        m.key("attention.sliding_window", c.integer("sliding_window"))
        pattern = c.get("sliding_window_pattern")  # LLLG, or its length
        period = len(pattern) if isinstance(pattern, str) else c.integer("sliding_window_pattern", default=4, least=1)
        k.windows(m, period, 4)
    elif c.items("layer_types") and set(c.items("layer_types") or ()) != {"full_attention"}:
        raise c.refuse("layer_types", "full_attention without sliding_window")
    k.biases(m)


def _exaone_moe(m: b.Build) -> None:
    """Write the keys of K-EXAONE, whose layers without a window do not rotate."""
    c = m.config
    _exaone4_keys(m)
    k.experts(m, "num_experts")
    shared = c.integer("num_shared_experts", default=1)
    m.key("expert_shared_count", shared)
    m.key("expert_shared_feed_forward_length", shared * c.integer("moe_intermediate_size"))
    m.key("leading_dense_block_count", k.dense_lead(m, usual=1))
    m.key("expert_weights_norm", c.flag("norm_topk_prob", default=True))
    m.key("expert_weights_scale", c.number("routed_scaling_factor", default=2.5))
    m.key("expert_gating_func", 2)
    groups = c.integer("n_group", default=1, least=1)
    m.key("expert_group_count", groups)
    m.key("expert_group_used_count", c.integer("topk_group", default=1, least=1))
    c.expect("scoring_func", "sigmoid")
    c.ignore(
        "sliding_window_pattern",
        "num_nextn_predict_layers",
        "topk_method",
        "first_last_k_dense_replace",
        "is_moe_layer",
    )


def _finish_exaone4(m: b.Build) -> None:
    k.put_llama3(m, m.config.integer("head_dim", default=k.head_width(m)))
    k.tied(m)


ARCHITECTURES = (
    b.Architecture("exaone", ("ExaoneForCausalLM",), _exaone, finish=_finish_exaone, strip="transformer."),
    b.Architecture(
        "exaone4",
        ("Exaone4ForCausalLM", "Exaone4_5_ForConditionalGeneration"),
        _exaone4,
        finish=_finish_exaone4,
        drop=r"(^|\.)visual\.|^mtp\.",
    ),
    b.Architecture(
        "exaone-moe",
        ("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"),
        _exaone_moe,
        finish=_finish_exaone4,
        drop=r"^mtp\.",
        names="glm4moe",
        table={
            "layers.*.post_attention_layernorm": "blk.*.ffn_norm",
            "layers.*.mlp.gate.e_score_correction.bias": "blk.*.exp_probs_b.bias",
        },
    ),
)
