"""Hy 4, under the names of the released checkpoint, and those of transformers and of the files that it saves.

Rotated rows stay in the order of the checkpoint, whose pairs are adjacent, as in the files of llama.cpp.
"""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.archs.deepseek import MLA, index_owners, mla_keys, routing, scaled_rope

HY_V4: b.Table = MLA | {
    "layers.*.post_attention_layernorm": "blk.*.ffn_norm",
    **{f"layers.*.self_attn.{name}": "blk.*.attn_gate" for name in ("linear_gate", "gate_proj")},
    **{f"layers.*.self_attn.{name}": "blk.*.attn_sinks.weight" for name in ("learnable_sink_param", "sinks")},
    "layers.*.self_attn.indexer.wq_b": "blk.*.indexer.attn_q_b",
    "layers.*.self_attn.indexer.wk": "blk.*.indexer.attn_k",
    "layers.*.self_attn.indexer.k_norm": "blk.*.indexer.k_norm",
    "layers.*.self_attn.indexer.weights_proj": "blk.*.indexer.proj",
    "layers.*.mlp.gate.e_score_correction": "blk.*.exp_probs_b",
    **{f"layers.*.{name}{part}": f"blk.*.hc_{which}_{part}.weight"
       for which, names in (("attn", ("hc_attn_layer.hc_pre.hc_", "attn_hc.", "hc_pre.hc_attn_layer.hc_")),
                            ("ffn", ("hc_mlp_layer.hc_pre.hc_", "ffn_hc.", "hc_pre.hc_mlp_layer.hc_")))
       for name in names for part in ("fn", "base", "scale")},
    **{f"{name}{part}": f"output_hc_{part}.weight"
       for name in ("hc_head.hc_head_", "hc_head.hc_", "hc_pre.hc_head.hc_head_") for part in ("fn", "base", "scale")},
    "layers.*.mlp.linear_gate": "blk.*.ffn_gate",
    "layers.*.mlp.shared_experts.linear_gate": "blk.*.ffn_gate_shexp",
}  # fmt: skip


def _hy_v4(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m)
    scaled_rope(m)
    k.rms_eps(m)
    mla_keys(m)
    routing(m, gating=2)
    m.key("vocab_size", c.integer("vocab_size", least=1))
    limit = c.number("swiglu_limit", default=0.0)
    if limit > 0:
        m.key("swiglu_clamp_exp", [limit] * m.n_layer)
    m.key("hyper_connection.count", c.integer("hc_mult", least=1))
    m.key("hyper_connection.epsilon", c.number("hc_eps", default=1e-6))
    m.key("hyper_connection.magnitude", c.number("hc_magnitude", default=2.0))
    k.indexer(m)
    owners = index_owners(m)
    if owners is None:
        raise c.fail("indexer_types", "is missing; it says which layers choose positions")
    m.key("attention.indexer.types", owners)
    for key in ("enable_ihc", "learnable_sink", "gated_mla"):
        c.expect(key, True)
    c.expect("gating_type", "elementwise")
    c.ignore("layer_types", "learnable_sink_init")


# Heads for further tokens (MTP) are left out.
_HARMLESS = frozenset({"num_nextn_predict_layers", "enable_lm_head_fp32"})

ARCHITECTURES = (
    b.Architecture("hy_v4", ("HYV4ForCausalLM",), _hy_v4, HY_V4, k.tied, r"mtp_layers\.", _HARMLESS, names="deepseek2"),
)
