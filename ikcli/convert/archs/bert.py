"""Encoders of texts: BERT (RoBERTa and DistilBERT, too), nomic-bert, jina-bert-v2, and the rerankers made of them."""

from __future__ import annotations

from ikcli.convert.build import Architecture, Build, Found, Table, drop, split, to
from ikcli.convert.common import activation, layer_eps, rope, sizes

_RANK = 4  # of pooling types
_TRAINED = 2048  # positions of nomic-bert, whatever the checkpoint says
_HARMLESS = frozenset(
    [
        "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "output_past",
        "pooler_size_per_head", "pooler_type", "sbert_ce_default_activation_function", "sentence_transformers",
        "attn_implementation", "emb_pooler", "model_max_length", "model_max_positions", "with_flash_attn",
        "layer_norm_type", "dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "pad_vocab_size_multiple",
        "use_xentropy",
    ]
)  # fmt: skip


def _encoder(m: Build) -> None:
    sizes(m)
    layer_eps(m, 1e-12)
    m.key("attention.causal", False)
    m.metadata["tokenizer.ggml.token_type_count"] = m.config.integer("type_vocab_size", default=2)
    m.config.ignore("vocab_size", "tie_word_embeddings")


def _bert(m: Build) -> None:
    activation(m, "gelu")
    _encoder(m)
    m.config.expect("position_embedding_type", "absolute")


def _roberta(m: Build) -> None:
    """The first positions belong to padding."""
    _bert(m)
    m.key("context_length", m.config.integer("max_position_embeddings") - _padding(m))


def _padding(m: Build) -> int:
    return m.config.integer("pad_token_id", default=1) + 1


def _behind_padding(m: Build, found: Found) -> None:
    m.part(found, "position_embd.weight", _padding(m), found.shape[0])


def _distilbert(m: Build) -> None:
    c = m.config
    activation(m, "gelu", keys=("activation",))
    m.key("block_count", m.n_layer)
    m.key("context_length", c.integer("max_position_embeddings"))
    m.key("embedding_length", c.integer("dim", "hidden_size", least=1))
    m.key("feed_forward_length", c.integer("hidden_dim", least=1))
    m.key("attention.head_count", c.integer("n_heads", "num_attention_heads", least=1))
    m.key("attention.layer_norm_epsilon", 1e-12)
    m.key("attention.causal", False)
    c.expect("sinusoidal_pos_embds", False)
    c.ignore("vocab_size", "tie_word_embeddings", "tie_weights_")


def _jina(m: Build) -> None:
    activation(m, "gelu")
    _encoder(m)
    m.config.expect("position_embedding_type", "alibi")
    m.config.expect("feed_forward_type", "geglu")


def _nomic(m: Build) -> None:
    c = m.config
    activation(m, "silu", "swish")
    activation(m, "swiglu", keys=("activation_function",))
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
        rope(m)
    c.ignore("head_dim")
    for key in ("max_trained_positions", "rotary_scaling_factor"):  # beyond the positions it was trained with
        c.given(key)


def _one_matrix(m: Build) -> None:
    """q, k and v of checkpoints in the form of transformers become one matrix, as in others."""
    for il in range(m.n_layer):
        names = [f"blk.{il}.attn_{part}.weight" for part in "qkv"]
        if all(name in m.tensors for name in names):
            m.add(f"blk.{il}.attn_qkv.weight", [p for name in names for p in m.tensors.pop(name).pieces])


def _ranks(m: Build) -> None:
    """How a reranker makes scores, and what they are called."""
    m.key("pooling_type", _RANK)
    labels = m.config.inner("id2label")
    names = [str(labels[key]) for key in sorted(labels, key=int)] if all(str(k).isdecimal() for k in labels) else []
    if names and names != ["LABEL_0"]:
        m.key("classifier.output_labels", names)


_EMBEDDINGS: Table = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.position_ids": drop,
    "embeddings.LayerNorm": "token_embd_norm",
    "pooler.dense": drop,
}
_ATTENTION: Table = {
    "encoder.layer.*.attention.self.query": "blk.*.attn_q",
    "encoder.layer.*.attention.self.key": "blk.*.attn_k",
    "encoder.layer.*.attention.self.value": "blk.*.attn_v",
    "encoder.layer.*.attention.output.dense": "blk.*.attn_output",
    "encoder.layer.*.attention.output.LayerNorm": "blk.*.attn_output_norm",
}
BERT: Table = _EMBEDDINGS | _ATTENTION | {
    "encoder.layer.*.intermediate.dense": "blk.*.ffn_up",
    "encoder.layer.*.output.dense": "blk.*.ffn_down",
    "encoder.layer.*.output.LayerNorm": "blk.*.layer_output_norm",
}  # fmt: skip
BERT |= {
    f"{name}.{old}": to(f"{place}.{new}")
    for name, place in BERT.items()
    if name.endswith("LayerNorm") and isinstance(place, str)
    for old, new in (("gamma", "weight"), ("beta", "bias"))
}
ROBERTA: Table = BERT | {"embeddings.position_embeddings": _behind_padding}
DISTILBERT: Table = _EMBEDDINGS | {
    "transformer.layer.*.attention.q_lin": "blk.*.attn_q",
    "transformer.layer.*.attention.k_lin": "blk.*.attn_k",
    "transformer.layer.*.attention.v_lin": "blk.*.attn_v",
    "transformer.layer.*.attention.out_lin": "blk.*.attn_output",
    "transformer.layer.*.sa_layer_norm": "blk.*.attn_output_norm",
    "transformer.layer.*.ffn.lin1": "blk.*.ffn_up",
    "transformer.layer.*.ffn.lin2": "blk.*.ffn_down",
    "transformer.layer.*.output_layer_norm": "blk.*.layer_output_norm",
}
JINA: Table = _EMBEDDINGS | _ATTENTION | {
    "encoder.layer.*.attention.self.layer_norm_q": "blk.*.attn_q_norm",
    "encoder.layer.*.attention.self.layer_norm_k": "blk.*.attn_k_norm",
    "encoder.layer.*.layer_norm_1": "blk.*.attn_norm_2",
    "encoder.layer.*.layer_norm_2": "blk.*.layer_output_norm",
    "encoder.layer.*.mlp.layernorm": "blk.*.layer_output_norm",
    "encoder.layer.*.mlp.gated_layers": split("blk.*.ffn_gate", "blk.*.ffn_up"),
    "encoder.layer.*.mlp.up_gated_layer": split("blk.*.ffn_up", "blk.*.ffn_gate"),
    "encoder.layer.*.mlp.wo": "blk.*.ffn_down",
    "encoder.layer.*.mlp.down_layer": "blk.*.ffn_down",
}  # fmt: skip
NOMIC: Table = _EMBEDDINGS | {
    "emb_ln": "token_embd_norm",
    "encoder.layers.*.attn.Wqkv": "blk.*.attn_qkv",
    "encoder.layers.*.attn.out_proj": "blk.*.attn_output",
    "encoder.layers.*.norm1": "blk.*.attn_output_norm",
    "encoder.layers.*.mlp.fc11": "blk.*.ffn_up",
    "encoder.layers.*.mlp.fc12": "blk.*.ffn_gate",
    "encoder.layers.*.mlp.fc2": "blk.*.ffn_down",
    "encoder.layers.*.norm2": "blk.*.layer_output_norm",
    "layers.*.self_attn.q_proj": "blk.*.attn_q",
    "layers.*.self_attn.k_proj": "blk.*.attn_k",
    "layers.*.self_attn.v_proj": "blk.*.attn_v",
    "layers.*.self_attn.o_proj": "blk.*.attn_output",
    "layers.*.post_attention_layernorm": "blk.*.attn_output_norm",
    "layers.*.mlp.up_proj": "blk.*.ffn_up",
    "layers.*.mlp.gate_proj": "blk.*.ffn_gate",
    "layers.*.mlp.down_proj": "blk.*.ffn_down",
    "layers.*.post_mlp_layernorm": "blk.*.layer_output_norm",
}
_RANKING: Table = {"pooler.dense": "cls", "classifier": "cls.output"}
_HEAD: Table = {"classifier.dense": "cls", "classifier.out_proj": "cls.output"}
_MASKED = r"^cls\.(predictions|seq_relationship)\."  # of pre-training

ARCHITECTURES = (
    Architecture(
        "bert", ("BertModel", "BertForMaskedLM", "BertForPreTraining"), _bert, BERT, drop=_MASKED, harmless=_HARMLESS,
        strip="bert.",
    ),
    Architecture(
        "bert", ("BertForSequenceClassification",), _bert, BERT | _RANKING, _ranks, harmless=_HARMLESS, strip="bert."
    ),
    Architecture(
        "bert", ("RobertaModel", "RobertaForMaskedLM"), _roberta, ROBERTA, drop=r"^lm_head\.", harmless=_HARMLESS,
        strip="roberta.",
    ),
    Architecture(
        "bert", ("RobertaForSequenceClassification",), _roberta, ROBERTA | _HEAD, _ranks, harmless=_HARMLESS,
        strip="roberta.",
    ),
    Architecture(
        "bert", ("DistilBertModel", "DistilBertForMaskedLM"), _distilbert, DISTILBERT, drop=r"^vocab_",
        harmless=_HARMLESS | {"qa_dropout", "seq_classif_dropout"}, strip="distilbert.",
    ),
    Architecture(
        "jina-bert-v2", ("JinaBertModel", "JinaBertForMaskedLM"), _jina, JINA, drop=_MASKED, harmless=_HARMLESS,
        strip="bert.",
    ),
    Architecture(
        "jina-bert-v2", ("JinaBertForSequenceClassification",), _jina, JINA | _RANKING, _ranks, harmless=_HARMLESS,
        strip="bert.",
    ),
    Architecture(
        "nomic-bert", ("NomicBertModel", "NomicBertForMaskedLM", "NomicBertForPreTraining"), _nomic, NOMIC, _one_matrix,
        drop=_MASKED, harmless=_HARMLESS, strip="bert.",
    ),
)  # fmt: skip
