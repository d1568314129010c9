"""Encoders: BERT (also RoBERTa, XLM-RoBERTa, DistilBERT), nomic-bert, jina-bert-v2, and rerankers made from them."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k

_RANK = 4  # the pooling type of rerankers
_TRAINED = 2048  # context of nomic-bert in training; checkpoints state a longer one
_HARMLESS = frozenset(
    [
        "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "output_past",
        "pooler_size_per_head", "pooler_type", "sbert_ce_default_activation_function", "sentence_transformers",
        "attn_implementation", "emb_pooler", "model_max_length", "model_max_positions", "with_flash_attn",
        "layer_norm_type", "dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "pad_vocab_size_multiple",
        "use_xentropy",
    ]
)  # fmt: skip


def _encoder(m: b.Build) -> None:
    k.sizes(m)
    k.layer_eps(m, 1e-12)
    m.key("attention.causal", False)
    m.metadata["tokenizer.ggml.token_type_count"] = m.config.integer("type_vocab_size", default=2)
    m.config.ignore("vocab_size", "tie_word_embeddings")


def _bert(m: b.Build) -> None:
    k.activation(m, "gelu")
    _encoder(m)
    m.config.expect("position_embedding_type", "absolute")


def _roberta(m: b.Build) -> None:
    """Write the keys of BERT without the first positions, which belong to padding."""
    _bert(m)
    m.key("context_length", m.config.integer("max_position_embeddings") - _padding(m))


def _padding(m: b.Build) -> int:
    return m.config.integer("pad_token_id", default=1) + 1


def _behind_padding(m: b.Build, found: b.Found) -> None:
    m.part(found, "position_embd.weight", _padding(m), found.shape[0])


def _distilbert(m: b.Build) -> None:
    c = m.config
    k.activation(m, "gelu", keys=("activation",))
    m.key("block_count", m.n_layer)
    m.key("context_length", c.integer("max_position_embeddings"))
    m.key("embedding_length", c.integer("dim", "hidden_size", least=1))
    m.key("feed_forward_length", c.integer("hidden_dim", least=1))
    m.key("attention.head_count", c.integer("n_heads", "num_attention_heads", least=1))
    m.key("attention.layer_norm_epsilon", 1e-12)
    m.key("attention.causal", False)
    c.expect("sinusoidal_pos_embds", False)
    c.ignore("vocab_size", "tie_word_embeddings", "tie_weights_")


def _jina(m: b.Build) -> None:
    k.activation(m, "gelu")
    _encoder(m)
    m.config.expect("position_embedding_type", "alibi")
    m.config.expect("feed_forward_type", "geglu")


def _nomic(m: b.Build) -> None:
    c = m.config
    k.activation(m, "silu", "swish")
    k.activation(m, "swiglu", keys=("activation_function",))
    _encoder(m)
    for key, known in (
        *(("causal", False), ("prenorm", False), ("qkv_proj_bias", False), ("mlp_fc1_bias", False)),
        *(("mlp_fc2_bias", False), ("rotary_emb_fraction", 1.0), ("rotary_emb_interleaved", False)),
        *(("rotary_emb_scale_base", None), ("use_rms_norm", False), ("parallel_block", False)),
        ("scale_attn_weights", True),
    ):
        c.expect(key, known)
    m.key("context_length", min(c.integer("n_positions", "max_position_embeddings"), _TRAINED))
    if "rotary_emb_base" in c:
        m.key("rope.freq_base", c.number("rotary_emb_base"))
    else:
        k.rope(m)
    c.ignore("head_dim")
    for key in ("max_trained_positions", "rotary_scaling_factor"):  # they concern positions beyond training
        c.given(key)


def _one_matrix(m: b.Build) -> None:
    """Join separate q, k and v of transformers checkpoints, as the other checkpoints have them in one matrix."""
    for il in range(m.n_layer):
        names = [f"blk.{il}.attn_{part}.weight" for part in "qkv"]
        if all(name in m.tensors for name in names):
            m.add(f"blk.{il}.attn_qkv.weight", [p for name in names for p in m.tensors.pop(name).pieces])


def _ranks(m: b.Build) -> None:
    """Write the pooling type of rerankers and the labels of their scores."""
    m.key("pooling_type", _RANK)
    labels = m.config.inner("id2label")
    names = [str(labels[key]) for key in sorted(labels, key=int)] if all(str(key).isdecimal() for key in labels) else []
    if names and names != ["LABEL_0"]:
        m.key("classifier.output_labels", names)


_EMBEDDINGS: b.Table = {
    "embeddings.position_ids": b.drop,
    "pooler.dense": b.drop,
}
BERT: b.Table = _EMBEDDINGS | {
    f"{name}.LayerNorm.{old}": f"{place}.{new}"
    for name, place in (
        ("embeddings", "token_embd_norm"),
        ("encoder.layer.*.attention.output", "blk.*.attn_output_norm"),
        ("encoder.layer.*.output", "blk.*.layer_output_norm"),
    )
    for old, new in (("gamma", "weight"), ("beta", "bias"))
}
"""Old checkpoints call weight and bias of norms gamma and beta."""
ROBERTA: b.Table = BERT | {"embeddings.position_embeddings": _behind_padding}
JINA: b.Table = _EMBEDDINGS | {
    "encoder.layer.*.mlp.gated_layers": b.split("blk.*.ffn_gate", "blk.*.ffn_up"),
    "encoder.layer.*.mlp.up_gated_layer": b.split("blk.*.ffn_up", "blk.*.ffn_gate"),
}  # fmt: skip
NOMIC: b.Table = _EMBEDDINGS | {
    "layers.*.self_attn.q_proj": "blk.*.attn_q",
    "layers.*.self_attn.k_proj": "blk.*.attn_k",
    "layers.*.self_attn.v_proj": "blk.*.attn_v",
    "layers.*.post_attention_layernorm": "blk.*.attn_output_norm",
    "layers.*.post_mlp_layernorm": "blk.*.layer_output_norm",
}
_RANKING: b.Table = {"pooler.dense": "cls", "classifier": "cls.output"}
_HEAD: b.Table = {"classifier.dense": "cls", "classifier.out_proj": "cls.output"}
_MASKED = r"^cls\.(predictions|seq_relationship)\."  # heads of pre-training


ARCHITECTURES = (
    b.Architecture(
        "bert", ("BertModel", "BertForMaskedLM", "BertForPreTraining"), _bert, BERT, drop=_MASKED, harmless=_HARMLESS,
        strip="bert.",
    ),
    b.Architecture(
        "bert", ("BertForSequenceClassification",), _bert, BERT | _RANKING, _ranks, harmless=_HARMLESS, strip="bert."
    ),
    b.Architecture(
        "bert",
        ("RobertaModel", "RobertaForMaskedLM", "XLMRobertaModel", "XLMRobertaForMaskedLM", "CamembertModel"),
        _roberta, ROBERTA, drop=r"^lm_head\.", harmless=_HARMLESS, strip="roberta.",
    ),
    b.Architecture(
        "bert", ("RobertaForSequenceClassification", "XLMRobertaForSequenceClassification"), _roberta, ROBERTA | _HEAD,
        _ranks, harmless=_HARMLESS, strip="roberta.",
    ),
    b.Architecture(
        "bert", ("DistilBertModel", "DistilBertForMaskedLM"), _distilbert, _EMBEDDINGS, drop=r"^vocab_",
        harmless=_HARMLESS | {"qa_dropout", "seq_classif_dropout"}, strip="distilbert.",
    ),
    b.Architecture(
        "jina-bert-v2", ("JinaBertModel", "JinaBertForMaskedLM"), _jina, JINA, drop=_MASKED, harmless=_HARMLESS,
        strip="bert.",
    ),
    b.Architecture(
        "jina-bert-v2", ("JinaBertForSequenceClassification",), _jina, JINA | _RANKING, _ranks, harmless=_HARMLESS,
        strip="bert.",
    ),
    b.Architecture(
        "nomic-bert", ("NomicBertModel", "NomicBertForMaskedLM", "NomicBertForPreTraining"), _nomic, NOMIC, _one_matrix,
        drop=_MASKED, harmless=_HARMLESS, strip="bert.",
    ),
)  # fmt: skip
