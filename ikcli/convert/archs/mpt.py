"""MPT."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k


def _mpt(m: b.Build) -> None:
    c = m.config
    attn = c.inner("attn_config")
    for key, known in (("alibi", True), ("qk_ln", False), ("softmax_scale", None), ("rope", False)):
        if attn.get(key) not in (known, None):
            raise c.refuse("attn_config", f"{key} {known}")
    k.old_sizes(m, int(k.embd(m) * c.number("expansion_ratio", default=4)), attn.get("kv_n_heads"))
    m.key("attention.layer_norm_epsilon", c.number("layer_norm_epsilon", default=1e-5))
    if attn.get("clip_qkv") is not None:
        m.key("attention.clamp_kqv", float(attn["clip_qkv"]))
    if attn.get("alibi") is not True:
        raise c.refuse("attn_config", "alibi true")
    m.key("attention.max_alibi_bias", float(attn.get("alibi_bias_max") or 8))
    c.expect("logit_scale", None)
    c.expect("norm_type", "low_precision_layernorm", "layernorm")
    c.ignore("no_bias", "learned_pos_emb", "embedding_fraction", "init_config", "verbose", "ffn_config", "attn_pdrop")
    c.expect("embedding_fraction", 1.0)


ARCHITECTURES = (
    b.Architecture("mpt", ("MPTForCausalLM", "MptForCausalLM"), _mpt, finish=k.tied_by_default, strip="transformer."),
)
