"""Granite 3, dense and with experts, and Granite with windows."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.archs.llama import finish, llama_keys

GRANITE_MOE: b.Table = b.PAIRS | {
    "layers.*.block_sparse_moe.input_linear": b.fused_experts("blk.*.ffn_gate_exps", "blk.*.ffn_up_exps"),
    "layers.*.shared_mlp.input_linear": b.split("blk.*.ffn_gate_shexp", "blk.*.ffn_up_shexp"),
}


def factors(m: b.Build) -> None:
    """Write the factors on embeddings, branches, K*Q and logits."""
    c = m.config
    m.key("attention.scale", c.number("attention_multiplier", default=1.0))
    m.key("embedding_scale", c.number("embedding_multiplier", default=1.0))
    m.key("residual_scale", c.number("residual_multiplier", default=1.0))
    m.key("logit_scale", c.number("logits_scaling", default=1.0))


def _granite(m: b.Build) -> None:
    llama_keys(m)
    factors(m)
    k.biases(m)


def _granitemoe(m: b.Build) -> None:
    _granite(m)
    k.experts(m, "num_local_experts", width=False)
    if m.config.get("shared_intermediate_size"):
        m.key("expert_shared_feed_forward_length", m.config.integer("shared_intermediate_size"))


_SWA: b.Table = GRANITE_MOE | {
    "layers.*.self_attn.sinks": b.to("blk.*.attn_sinks.weight"),
    "layers.*.block_sparse_moe.router": "blk.*.ffn_gate_inp",
}


def _swa(m: b.Build) -> None:
    c = m.config
    (_granitemoe if c.get("num_local_experts") else _granite)(m)
    kinds = c.items("layer_types") or ["sliding_attention" if i % 4 else "full_attention" for i in range(m.n_layer)]
    m.key("attention.sliding_window", c.integer("sliding_window", default=128, least=1))
    m.key("attention.sliding_window_pattern", k.windows(m, 4, 0, kinds))
    theta = m.metadata[f"{m.arch}.rope.freq_base"]
    bases = c.items("layer_rope_theta") or [theta] * m.n_layer
    if set(bases) - {0, theta}:
        raise c.refuse("layer_rope_theta", f"0 or {theta} for every layer")
    m.key("attention.rope_pattern", [base != 0 for base in bases])


ARCHITECTURES = (
    b.Architecture("granite", ("GraniteForCausalLM",), _granite, b.PAIRS, finish),
    b.Architecture(
        "granite_swa", ("GraniteSWAForCausalLM", "GraniteMoeSWAForCausalLM"), _swa,
        _SWA, finish, names="granite",
    ),
    b.Architecture(
        "granitemoe", ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), _granitemoe, GRANITE_MOE, finish
    ),
)  # fmt: skip
