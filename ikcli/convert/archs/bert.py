"""Encoders: BERT (also RoBERTa, XLM-RoBERTa, DistilBERT), nomic-bert, jina-bert, NeoBERT, and their rerankers."""

from __future__ import annotations

import numpy as np

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.pieces import Matrix, TensorRows, turn
from ikcli.convert.rope import read_rope

JINA_3 = "JinaEmbeddingsV3Model"
"""jina-embeddings-v3 was first published with the class of XLM-RoBERTa."""
NOMIC_WITH_EXPERTS = "NomicBertModelWithExperts"
"""nomic-embed-text 2 has the class of version 1."""
_FIRST, _RANK = (
    2,
    4,
)  # the pooling type of encoders whose first token stands for the text, and the pooling type of rerankers
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

_JINA_3_HARMLESS = _HARMLESS | {
    "lora_adaptations", "lora_alpha", "lora_dropout_p", "lora_main_params_trainable", "lora_rank",
    "load_trained_adapters", "matryoshka_dimensions", "task_instructions", "truncate_dim",
}  # fmt: skip
_NEO_HARMLESS = _HARMLESS | {
    "base_scale", "classifier_init_range", "decoder_init_range", "embedding_init_range", "flash_attention",
    "kwargs", "trust_remote_code",
}  # fmt: skip
_MODERN_HARMLESS = _HARMLESS | {
    "deterministic_flash_attn", "embedding_dropout", "mlp_dropout", "initializer_cutoff_factor",
    "repad_logits_with_grad", "decoder_bias", "reference_compile", "sparse_pred_ignore_index", "sparse_prediction",
    "compile", "cls_token_id", "sep_token_id",
}  # fmt: skip


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


def _nomic_moe(m: b.Build) -> None:
    """Write the keys of nomic-embed-text 2: GELU without gate, biases, experts in every other layer."""
    c = m.config
    k.activation(m, "gelu", keys=("activation_function",))
    _encoder(m)
    for key, known in (
        *(("causal", False), ("prenorm", False), ("rotary_emb_fraction", 1.0), ("rotary_emb_interleaved", False)),
        *(
            ("rotary_emb_scale_base", None),
            ("use_rms_norm", False),
            ("parallel_block", False),
            ("num_shared_experts", 0),
        ),
        *(("scale_attn_weights", True), ("moe_normalize_expert_weights", False), ("expert_choice_router", False)),
        *(("ffn_div", 1), ("router_aux_loss_coef", c.get("router_aux_loss_coef"))),
    ):
        c.expect(key, known)
    m.key("context_length", min(c.integer("n_positions", "max_position_embeddings"), 512))  # that of the training
    m.key("rope.freq_base", c.number("rotary_emb_base", default=10000.0))
    m.key("expert_count", c.integer("num_experts", "num_local_experts", least=1))
    m.key("expert_used_count", c.integer("moe_top_k", least=1))
    m.key("moe_every_n_layers", c.integer("moe_every_n_layers", least=1))
    c.ignore("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "moe_impl", "moe_resid_pdrop", "add_pooling_layer")
    for key in ("max_trained_positions", "rotary_scaling_factor"):
        c.given(key)


def _stacked(name: str, transposed: bool) -> b.Rule:
    """Return a rule for the matrices of all experts, which are below each other."""

    def rule(m: b.Build, found: b.Found) -> None:
        rows, width = found.matrix()
        n = m.config.integer("num_experts", "num_local_experts", least=1)
        if rows % n:
            raise m.config.fail("num_experts", f"is {n}, which does not divide the {rows} rows of {found.name}")
        full = f"blk.{found.block}.{name}.weight"
        if not transposed:
            m.add(full, [TensorRows(found.name, rows, width)], (width, rows // n, n))
            return
        size = rows // n
        parts = [Matrix(found.name, width, size, e * size, (e + 1) * size, turn) for e in range(n)]
        m.add(full, parts, (size, width, n))

    return rule


def _zeros(m: b.Build, found: b.Found) -> None:
    """Leave out the bias behind all experts, which GGUF has no name for."""
    if np.any(m.source.read(found.name)):
        m.notes.append(f"{found.name} is left out: llama.cpp's files have no place for the bias of experts")
    m.dropped.append(found.name)


def _modern(m: b.Build) -> None:
    """Write the keys of ModernBERT: layers with windows have a rotation of their own."""
    c = m.config
    k.sizes(m)
    k.layer_eps(m)
    m.key("attention.causal", False)
    k.activation(m, "gelu", "silu")
    if c.get("hidden_activation", default="gelu") != "gelu":
        m.key("hidden_act", c.get("hidden_activation"))
    for kind, name, old, usual in (
        ("full_attention", "freq_base", "global_rope_theta", 160000.0),
        ("sliding_attention", "freq_base_swa", "local_rope_theta", 10000.0),
    ):
        if c.get("rope_parameters") is None:  # older checkpoints
            m.key(f"rope.{name}", c.number(old, default=usual))
        elif (found := read_rope(c, kind)).type == "default":
            m.key(f"rope.{name}", found.theta)
        else:
            raise c.refuse("rope_parameters", "rope_type default")
    if "local_attention" in c:
        m.key("attention.sliding_window", c.integer("local_attention", least=1))
    every = c.integer("global_attn_every_n_layers", default=3, least=1)
    kinds = c.items("layer_types") or ["sliding_attention" if i % every else "full_attention" for i in range(m.n_layer)]
    if len(kinds) != m.n_layer or set(kinds) - {"sliding_attention", "full_attention"}:
        raise c.refuse("layer_types", "sliding_attention or full_attention for every layer")
    windows = [kind == "sliding_attention" for kind in kinds]
    period = next((n for n in range(1, m.n_layer + 1) if windows == [i % n != 0 for i in range(m.n_layer)]), 0)
    m.key("attention.sliding_window_pattern", period or windows)
    m.key("vocab_size", c.integer("vocab_size", least=1))
    c.expect("position_embedding_type", "absolute")
    c.expect("norm_bias", False)
    c.ignore("tie_word_embeddings", "mlp_bias", "attention_bias", "classifier_bias")
    c.expect("classifier_activation", "gelu")
    c.ignore("classifier_pooling")


def _modern_ranks(m: b.Build) -> None:
    _ranks(m)
    pooling = m.config.get("classifier_pooling", default="cls")
    m.key("classifier.pooling_type", {"mean": 1, "cls": 2}[str(pooling)])


def _jina_3(m: b.Build) -> None:
    """Write the keys of jina-embeddings-v3, published with adapters by task or (by transformers) without."""
    c = m.config
    k.activation(m, "gelu")
    _encoder(m)
    m.key("context_length", c.integer("max_position_embeddings") - _padding(m))
    if c.get("rotary_emb_base") is not None:
        m.key("rope.freq_base", c.number("rotary_emb_base"))
    elif (found := read_rope(c)).type == "default":
        m.key("rope.freq_base", found.theta)
    else:
        raise c.refuse("rope_parameters", "rope_type default")
    c.expect("position_embedding_type", "rotary", None)
    c.ignore("head_dim")
    tasks = c.items("lora_adaptations")
    if tasks:
        m.notes.append(
            f"adapters by task are left out ({', '.join(map(str, tasks))}): the file embeds as without a task"
        )


def _neo(m: b.Build) -> None:
    c = m.config
    m.key("block_count", m.n_layer)
    m.key("context_length", c.integer("max_length", "max_position_embeddings", default=4096, least=1))
    m.key("embedding_length", k.embd(m))
    m.key("attention.head_count", c.integer("num_attention_heads", least=1))
    m.key("attention.layer_norm_rms_epsilon", c.number("norm_eps", default=1e-6))
    m.key("attention.causal", False)
    m.key("rope.freq_base", 10000.0)
    m.key("rope.scaling.type", "none")
    m.key("pooling_type", _FIRST)
    c.ignore("vocab_size", "tie_word_embeddings", "intermediate_size", "dim_head")
    for key, known in (("hidden_act", "SwiGLU"), ("rope", True), ("rms_norm", True), ("ngpt", False)):
        c.expect(key, known)


def _neo_width(m: b.Build, found: b.Found) -> None:
    """Write the width of gates, which the checkpoint rounds in a way of its own, and the matrix."""
    m.key("feed_forward_length", found.matrix()[0] // 2)
    m.plain(found, f"blk.{found.block}.ffn_up.weight")


def _eurobert(m: b.Build) -> None:
    k.plain(m)
    m.key("attention.causal", False)
    m.config.ignore("tie_word_embeddings", "mask_token_id", "classifier_pooling")


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
NOMIC_MOE: b.Table = _EMBEDDINGS | {
    "encoder.layers.*.mlp.experts.mlp.w1": _stacked("ffn_up_exps", False),
    "encoder.layers.*.mlp.experts.mlp.w2": _stacked("ffn_down_exps", True),
    "encoder.layers.*.mlp.experts.bias": _zeros,
    "encoder.layers.*.mlp.router.layer": "blk.*.ffn_gate_inp",
}
_RANKING: b.Table = {"pooler.dense": "cls", "classifier": "cls.output"}
_HEAD: b.Table = {"classifier.dense": "cls", "classifier.out_proj": "cls.output"}
MODERN: b.Table = {
    "layers.*.attn.Wqkv": "blk.*.attn_qkv",
    "layers.*.attn.Wo": "blk.*.attn_output",
    "layers.*.mlp.Wi": "blk.*.ffn_up",
    "layers.*.mlp.Wo": "blk.*.ffn_down",
    "layers.*.attn_norm": "blk.*.attn_norm",
    "layers.*.mlp_norm": "blk.*.ffn_norm",
    "embeddings.norm": "token_embd_norm",
    "embeddings.tok_embeddings": "token_embd",
    "final_norm": "output_norm",
}
_PLAIN, _ADAPTED = "encoder.layers.*.", ".parametrizations.weight.original"
JINA_3_NAMES: b.Table = {
    "layers.*.self_attn.q_proj": "blk.*.attn_q",
    "layers.*.self_attn.k_proj": "blk.*.attn_k",
    "layers.*.self_attn.v_proj": "blk.*.attn_v",
    "layers.*.self_attn.o_proj": "blk.*.attn_output",
    "layers.*.mlp.fc1": "blk.*.ffn_up",
    "layers.*.mlp.fc2": "blk.*.ffn_down",
    "layers.*.post_attention_layernorm": "blk.*.attn_output_norm",
    "layers.*.post_mlp_layernorm": "blk.*.layer_output_norm",
    "embeddings.LayerNorm": "token_embd_norm",
    f"embeddings.word_embeddings{_ADAPTED}": b.to("token_embd.weight"),
    f"embeddings.token_type_embeddings{_ADAPTED}": b.to("token_types.weight"),
    f"{_PLAIN}mixer.Wqkv{_ADAPTED}": b.to("blk.*.attn_qkv.weight"),
    f"{_PLAIN}mixer.out_proj{_ADAPTED}": b.to("blk.*.attn_output.weight"),
    f"{_PLAIN}mlp.fc1{_ADAPTED}": b.to("blk.*.ffn_up.weight"),
    f"{_PLAIN}mlp.fc2{_ADAPTED}": b.to("blk.*.ffn_down.weight"),
}
NEO: b.Table = {"transformer_encoder.*.ffn.w12": _neo_width}
_NEO_HEAD: b.Table = {"dense": "cls", "classifier": "cls.output"}
_MODERN_HEAD: b.Table = {"head.dense": "cls", "head.norm": "cls.norm", "classifier": "cls.output"}
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
        "nomic-bert-moe", (NOMIC_WITH_EXPERTS,), _nomic_moe, NOMIC_MOE, drop=_MASKED, harmless=_HARMLESS, strip="bert."
    ),
    b.Architecture(
        "modern-bert", ("ModernBertModel", "ModernBertForMaskedLM"), _modern, MODERN,
        drop=r"^(head|decoder)\.", harmless=_MODERN_HARMLESS,
    ),
    b.Architecture(
        "modern-bert", ("ModernBertForSequenceClassification",), _modern, MODERN | _MODERN_HEAD, _modern_ranks,
        harmless=_MODERN_HARMLESS,
    ),
    b.Architecture(
        "jina-bert-v3", (JINA_3,), _jina_3, JINA_3_NAMES, drop=r"^(roberta\.)?pooler\.|lora_[AB]$|^lm_head\.",
        harmless=_JINA_3_HARMLESS, strip="roberta.",
    ),
    b.Architecture("neo-bert", ("NeoBERT", "NeoBERTLMHead"), _neo, NEO, drop=r"^decoder\.", harmless=_NEO_HARMLESS),
    b.Architecture(
        "neo-bert", ("NeoBERTForSequenceClassification",), _neo, NEO | _NEO_HEAD, _ranks, harmless=_NEO_HARMLESS
    ),
    b.Architecture("eurobert", ("EuroBertModel", "EuroBertForMaskedLM"), _eurobert, drop=r"^lm_head\."),
    b.Architecture(
        "nomic-bert", ("NomicBertModel", "NomicBertForMaskedLM", "NomicBertForPreTraining"), _nomic, NOMIC, _one_matrix,
        drop=_MASKED, harmless=_HARMLESS, strip="bert.",
    ),
)  # fmt: skip
