"""BLOOM."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.archs.gptneox import head_by_head

BLOOM: b.Table = {
    "h.*.self_attention.query_key_value": head_by_head,
}


def _bloom(m: b.Build) -> None:
    c = m.config
    k.old_sizes(m, 4 * k.embd(m))
    k.layer_eps(m)
    c.expect("apply_residual_connection_post_layernorm", False)
    c.ignore("slow_but_exact", "masked_softmax_fusion", "bias_dropout_fusion", "skip_bias_add", "skip_bias_add_qkv")
    c.ignore("unk_token_id", "attention_softmax_in_fp32", "offset_alibi", "n_inner")


ARCHITECTURES = (
    b.Architecture("bloom", ("BloomForCausalLM",), _bloom, BLOOM, k.tied_by_default, strip="transformer."),
)
