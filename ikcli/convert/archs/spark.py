"""Spark 2.5 (Spark-X2.5)."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.rope import read_rope
from ikcli.errors import UnsupportedError

SPARK: b.Table = {
    "embedding": "token_embd",
    "layers.*.self_attn.q_k_v_proj": "blk.*.attn_qkv",
    "layers.*.self_attn.g_proj": "blk.*.attn_gate",
    "layers.*.self_attn.out_proj": "blk.*.attn_output",
}


def _spark(m: b.Build) -> None:
    c = m.config
    k.activation(m, "gelu")
    k.sizes(m)
    k.rms_eps(m, 1e-6)
    width = k.head_dim(m)
    m.key("attention.sliding_window_pattern", k.windows(m, 4, 0))
    m.key("attention.sliding_window", c.integer("sliding_window", least=1))
    full, own = read_rope(c), read_rope(c, "sliding_attention")
    if (full.type, own.type) != ("default", "default"):
        raise UnsupportedError(f"{c.path}: rope_type {full.type} and {own.type} are not known for spark2_5")
    m.key("rope.freq_base", full.theta)
    m.key("rope.freq_base_swa", own.theta)
    m.key("rope.dimension_count", int(width * full.partial))
    m.key("rope.dimension_count_swa", int(width * own.partial))
    c.expect("headwise_attn_output_gate", True)
    c.expect("gate_attn_act_mode", "sigmoid")
    options = "gsq_int4 hadamard_spin dv_ssq selective_attention_preservation key_value_binding_sharpening"
    for key in ("attention_bias", "mlp_bias", *options.split()):
        c.expect(key, False)
    c.ignore("vocab_size", "kv_focus_factor")


ARCHITECTURES = (b.Architecture("spark2_5", ("Spark2_5ForCausalLM",), _spark, SPARK, k.tied, names="llama"),)
