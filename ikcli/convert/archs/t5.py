"""T5, MT5 and UMT5: whole models, and their encoders alone or (with the decoder left out) of a whole model."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.errors import UnsupportedError


def _keys(m: b.Build) -> None:
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
    m.key("attention.layer_norm_epsilon", c.number("layer_norm_epsilon", default=1e-6))
    m.key("attention.layer_norm_rms_epsilon", c.number("layer_norm_epsilon", default=1e-6))
    m.key("attention.relative_buckets_count", c.integer("relative_attention_num_buckets", default=32))
    c.expect("relative_attention_max_distance", 128)
    c.expect("dense_act_fn", "relu", "gelu_new")
    c.ignore("vocab_size", "is_gated_act", "num_decoder_layers", "tie_word_embeddings", "decoder_start_token_id")
    c.ignore("scale_decoder_outputs")


def _encoder(m: b.Build) -> None:
    _keys(m)
    m.key("attention.causal", False)


def _whole(m: b.Build) -> None:
    _keys(m)
    m.key("decoder_block_count", m.config.integer("num_decoder_layers", default=m.n_layer, least=1))
    m.key("decoder_start_token_id", m.config.integer("decoder_start_token_id", "pad_token_id", default=0))


def _output(m: b.Build) -> None:
    """Store an output matrix, unless it is that of the embeddings and reads scaled states: then files have none."""
    scaled = m.config.given("scale_decoder_outputs")
    if scaled is None:
        scaled = m.config.given("tie_word_embeddings") is not False
    if not scaled and "output.weight" not in m.tensors:
        m.add("output.weight", m.tensors["token_embd.weight"].pieces)
    elif scaled and m.tensors.pop("output.weight", None) is not None:
        m.dropped.append("lm_head.weight")


def _embeddings(m: b.Build, found: b.Found) -> None:
    """Take the first of the embeddings, which checkpoints store under up to three names."""
    if "token_embd.weight" in m.tensors:
        m.dropped.append(found.name)
    else:
        m.plain(found, "token_embd.weight")


def _norm(m: b.Build, found: b.Found) -> None:
    """Name the norm before a part of a block: attention, in decoders also to the encoder, and the feed-forward part."""
    side = "enc" if found.name.startswith("encoder.") else "dec"
    parts = ("attn", "ffn") if side == "enc" else ("attn", "cross_attn", "ffn")
    if found.expert >= len(parts):
        raise UnsupportedError(f"tensor {found.name} has no place: blocks have {len(parts)} parts")
    m.plain(found, f"{side}.blk.{found.block}.{parts[found.expert]}_norm.weight")


_PARTS = {
    "SelfAttention.q": "attn_q", "SelfAttention.k": "attn_k", "SelfAttention.v": "attn_v", "SelfAttention.o": "attn_o",
    "SelfAttention.relative_attention_bias": "attn_rel_b", "DenseReluDense.wi": "ffn_up",
    "DenseReluDense.wi_0": "ffn_gate", "DenseReluDense.wi_1": "ffn_up", "DenseReluDense.wo": "ffn_down",
}  # fmt: skip
_CROSS = {f"EncDecAttention.{part}": f"cross_attn_{part}" for part in "qkvo"} | {
    "EncDecAttention.relative_attention_bias": "cross_attn_rel_b"  # old files have it, and nothing reads it
}
T5: b.Table = {
    "shared": _embeddings,
    "encoder.embed_tokens": _embeddings,
    "decoder.embed_tokens": _embeddings,
    "lm_head": "output",
    "encoder.final_layer_norm": "enc.output_norm",
    "decoder.final_layer_norm": "dec.output_norm",
    "decoder.block.*.layer.#.layer_norm": _norm,
    **{f"decoder.block.*.layer.#.{old}": f"dec.blk.*.{new}" for old, new in (_PARTS | _CROSS).items()},
    "encoder.block.*.layer.#.layer_norm": _norm,
    **{f"encoder.block.*.layer.#.{old}": f"enc.blk.*.{new}" for old, new in _PARTS.items()},
}

_HARMLESS = frozenset(
    [
        "task_specific_params", "n_positions", "classifier_dropout", "dense_act_fn", "dropout_rate",
        "initializer_factor", "output_past", "scalable_attention",
    ]
)  # fmt: skip
ARCHITECTURES = (
    b.Architecture(
        "t5",
        (
            "T5ForConditionalGeneration",
            "T5WithLMHeadModel",
            "MT5ForConditionalGeneration",
            "UMT5ForConditionalGeneration",
        ),
        _whole,
        T5,
        _output,
        harmless=_HARMLESS,
    ),
    b.Architecture(
        "t5encoder",
        ("T5EncoderModel", "MT5EncoderModel", "UMT5EncoderModel"),
        _encoder,
        T5,
        drop=r"^(decoder|lm_head)\.",
        harmless=_HARMLESS,
    ),
)
