"""Refact."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k

REFACT: b.Table = {
    "h.*.attn.q": "blk.*.attn_q",
    "h.*.attn.kv": b.split("blk.*.attn_k", "blk.*.attn_v"),
    "h.*.mlp.gate_up_proj": b.split("blk.*.ffn_gate", "blk.*.ffn_up"),
}


def _refact(m: b.Build) -> None:
    """Write the keys, with the epsilon of LayerNorm (correct) and of RMS norm (which other programs read)."""
    c = m.config
    inner = c.integer("n_inner", default=4 * c.integer("hidden_size", "n_embd"))
    k.old_sizes(m, -(-(2 * inner // 3) // 256) * 256, 1)
    m.key("attention.layer_norm_rms_epsilon", c.number("layer_norm_epsilon", default=1e-5))
    k.layer_eps(m, 1e-5)
    c.expect("multi_query", True)
    c.ignore("attention_bias_in_fp32", "activation_function", "scale_attn_weights")
    m.notes.append("norms of Refact subtract the mean; other programs do not")


ARCHITECTURES = (
    b.Architecture("refact", ("GPTRefactForCausalLM",), _refact, REFACT, k.own_output, strip="transformer."),
)
