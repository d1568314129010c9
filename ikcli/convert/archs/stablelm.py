"""StableLM."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k


def _stablelm(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m)
    k.partial_rope(m, k.head_width(m))
    k.layer_eps(m)
    m.key("use_parallel_residual", c.flag("use_parallel_residual"))
    c.ignore("vocab_size", "use_qkv_bias", "qk_layernorm")
    c.expect("use_norm_bias", True)
    c.ignore("rope_pct")


STABLELM: b.Table = {
    "layers.*.self_attn.q_layernorm.norms.#": b.expert("blk.*.attn_q_norm"),
    "layers.*.self_attn.k_layernorm.norms.#": b.expert("blk.*.attn_k_norm"),
}


ARCHITECTURES = (
    b.Architecture("stablelm", ("StableLmForCausalLM", "StableLMEpochForCausalLM"), _stablelm, STABLELM, k.tied),
)
