"""The encoder of T5, alone or (with the decoder left out) of a whole model."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k


def _encoder(m: b.Build) -> None:
    c = m.config
    gated = c.get("feed_forward_proj", default="relu")
    if gated not in ("relu", "gated-gelu"):
        raise c.refuse("feed_forward_proj", "relu or gated-gelu")
    m.key("block_count", m.n_layer)
    m.key("context_length", c.integer("n_positions", default=512))
    m.key("embedding_length", k.embd(m))
    m.key("feed_forward_length", c.integer("d_ff", least=1))
    m.key("attention.head_count", c.integer("num_heads", "num_attention_heads", least=1))
    m.key("attention.key_length", c.integer("d_kv", least=1))
    m.key("attention.value_length", c.integer("d_kv", least=1))
    m.key("attention.causal", False)
    m.key("attention.layer_norm_epsilon", c.number("layer_norm_epsilon", default=1e-6))
    m.key("attention.layer_norm_rms_epsilon", c.number("layer_norm_epsilon", default=1e-6))
    m.key("attention.relative_buckets_count", c.integer("relative_attention_num_buckets", default=32))
    c.expect("relative_attention_max_distance", 128)
    c.expect("dense_act_fn", "relu", "gelu_new")
    c.ignore("vocab_size", "is_gated_act", "num_decoder_layers", "tie_word_embeddings", "decoder_start_token_id")


def _embeddings(m: b.Build, found: b.Found) -> None:
    """Take the first of the embeddings, which checkpoints store under up to three names."""
    if "token_embd.weight" in m.tensors:
        m.dropped.append(found.name)
    else:
        m.plain(found, "token_embd.weight")


def _norm(m: b.Build, found: b.Found) -> None:
    """Name the norm before attention (part 0 of a block) or before the feed-forward part (part 1)."""
    m.plain(found, f"enc.blk.{found.block}.{'ffn_norm' if found.expert else 'attn_norm'}.weight")


_PARTS = {
    "SelfAttention.q": "attn_q", "SelfAttention.k": "attn_k", "SelfAttention.v": "attn_v", "SelfAttention.o": "attn_o",
    "SelfAttention.relative_attention_bias": "attn_rel_b", "DenseReluDense.wi": "ffn_up",
    "DenseReluDense.wi_0": "ffn_gate", "DenseReluDense.wi_1": "ffn_up", "DenseReluDense.wo": "ffn_down",
}  # fmt: skip
T5: b.Table = {
    "shared": _embeddings,
    "encoder.embed_tokens": _embeddings,
    "encoder.final_layer_norm": "enc.output_norm",
    "encoder.block.*.layer.#.layer_norm": _norm,
    **{f"encoder.block.*.layer.#.{old}": f"enc.blk.*.{new}" for old, new in _PARTS.items()},
}

ARCHITECTURES = (
    b.Architecture(
        "t5encoder",
        ("T5EncoderModel", "MT5EncoderModel", "UMT5EncoderModel"),
        _encoder,
        T5,
        drop=r"^(decoder|lm_head)\.",
        harmless=frozenset({"task_specific_params", "n_positions", "classifier_dropout", "dense_act_fn"}),
    ),
)
