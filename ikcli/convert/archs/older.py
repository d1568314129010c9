"""Models of 2019 to 2023, and those with code of their own: GPT-2, BLOOM, MPT, Falcon, StarCoder, InternLM 2, ..."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ikcli.convert.archs.layernorm import head_by_head
from ikcli.convert.archs.llama import PAIRS, finish, llama_keys
from ikcli.convert.build import Architecture, Build, Found, Rule, Table, drop, in_pairs, rotated_pairs
from ikcli.convert.common import (
    GELU_TANH,
    LLAMA,
    SILU,
    activation,
    head_dim,
    layer_eps,
    put_llama3,
    rms_eps,
    rope,
    sizes,
    tied,
)
from ikcli.convert.pieces import Matrix, Order, TensorRows, turn
from ikcli.errors import FormatError

ACTIVATION_KEYS = ("activation_function", "hidden_act", "activation")


def _turned(name: str) -> Rule:
    """A matrix that is stored the other way round; a bias as it is."""

    def rule(m: Build, found: Found) -> None:
        full = f"{name.replace('*', str(found.block))}{found.suffix}"
        if len(found.shape) == 1:
            m.plain(found, full)
            return
        n_in, n_out = found.matrix()
        m.add(full, (Matrix(found.name, n_out, n_in, 0, n_in, turn),))

    return rule


GPT2: Table = {
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_f": "output_norm",
    "lm_head": "output",
    "h.*.ln_1": "blk.*.attn_norm",
    "h.*.ln_2": "blk.*.ffn_norm",
    "h.*.attn.c_attn": _turned("blk.*.attn_qkv"),
    "h.*.attn.c_proj": _turned("blk.*.attn_output"),
    "h.*.mlp.c_fc": _turned("blk.*.ffn_up"),
    "h.*.mlp.c_proj": _turned("blk.*.ffn_down"),
    "h.*.attn.bias": drop,
    "h.*.attn.masked_bias": drop,
}
STARCODER: Table = GPT2 | {
    "h.*.attn.c_attn": "blk.*.attn_qkv",
    "h.*.attn.c_proj": "blk.*.attn_output",
    "h.*.mlp.c_fc": "blk.*.ffn_up",
    "h.*.mlp.c_proj": "blk.*.ffn_down",
}
BLOOM: Table = {
    "word_embeddings": "token_embd",
    "word_embeddings_layernorm": "token_embd_norm",
    "ln_f": "output_norm",
    "lm_head": "output",
    "h.*.input_layernorm": "blk.*.attn_norm",
    "h.*.post_attention_layernorm": "blk.*.ffn_norm",
    "h.*.self_attention.query_key_value": head_by_head,
    "h.*.self_attention.dense": "blk.*.attn_output",
    "h.*.mlp.dense_h_to_4h": "blk.*.ffn_up",
    "h.*.mlp.dense_4h_to_h": "blk.*.ffn_down",
}
MPT: Table = {
    "wte": "token_embd",
    "norm_f": "output_norm",
    "lm_head": "output",
    "blocks.*.norm_1": "blk.*.attn_norm",
    "blocks.*.norm_2": "blk.*.ffn_norm",
    "blocks.*.attn.Wqkv": "blk.*.attn_qkv",
    "blocks.*.attn.out_proj": "blk.*.attn_output",
    "blocks.*.ffn.up_proj": "blk.*.ffn_up",
    "blocks.*.ffn.down_proj": "blk.*.ffn_down",
}
FALCON: Table = {
    "word_embeddings": "token_embd",
    "ln_f": "output_norm",
    "lm_head": "output",
    "h.*.input_layernorm": "blk.*.attn_norm",
    "h.*.ln_mlp": "blk.*.attn_norm_2",
    "h.*.ln_attn": "blk.*.attn_norm",
    "h.*.self_attention.query_key_value": lambda m, t: m.plain(
        t, f"blk.{t.block}.attn_qkv{t.suffix}", order=_falcon_order(m, t.shape[0])
    ),
    "h.*.self_attention.dense": "blk.*.attn_output",
    "h.*.mlp.dense_h_to_4h": "blk.*.ffn_up",
    "h.*.mlp.dense_4h_to_h": "blk.*.ffn_down",
}
EXAONE: Table = {
    "wte": "token_embd",
    "ln_f": "output_norm",
    "lm_head": "output",
    "h.*.ln_1": "blk.*.attn_norm",
    "h.*.ln_2": "blk.*.ffn_norm",
    "h.*.attn.attention.q_proj": "blk.*.attn_q",
    "h.*.attn.attention.k_proj": "blk.*.attn_k",
    "h.*.attn.attention.v_proj": "blk.*.attn_v",
    "h.*.attn.attention.out_proj": "blk.*.attn_output",
    "h.*.mlp.c_fc_0": "blk.*.ffn_gate",
    "h.*.mlp.c_fc_1": "blk.*.ffn_up",
    "h.*.mlp.c_proj": "blk.*.ffn_down",
    "h.*.attn.attention.rotary.inv_freq": drop,
}
QWEN: Table = {
    "wte": "token_embd",
    "ln_f": "output_norm",
    "lm_head": "output",
    "h.*.ln_1": "blk.*.attn_norm",
    "h.*.ln_2": "blk.*.ffn_norm",
    "h.*.attn.c_attn": "blk.*.attn_qkv",
    "h.*.attn.c_proj": "blk.*.attn_output",
    "h.*.mlp.w1": "blk.*.ffn_up",
    "h.*.mlp.w2": "blk.*.ffn_gate",
    "h.*.mlp.c_proj": "blk.*.ffn_down",
    "rotary_emb.inv_freq": drop,
}
CHATGLM: Table = {
    "embedding.word_embeddings": "token_embd",
    "encoder.final_layernorm": "output_norm",
    "output_layer": "output",
    "rotary_pos_emb.inv_freq": drop,
    "encoder.layers.*.input_layernorm": "blk.*.attn_norm",
    "encoder.layers.*.post_attention_layernorm": "blk.*.ffn_norm",
    "encoder.layers.*.self_attention.query_key_value": "blk.*.attn_qkv",
    "encoder.layers.*.self_attention.dense": "blk.*.attn_output",
    "encoder.layers.*.mlp.dense_h_to_4h": "blk.*.ffn_up",
    "encoder.layers.*.mlp.dense_4h_to_h": "blk.*.ffn_down",
}


def _qkv_in_pairs(m: Build, found: Found) -> None:
    """Baichuan: queries, keys and values one after the other, ordered for a rotation of adjacent columns."""
    n = found.shape[0] // 3
    order = rotated_pairs()(m, n)
    for i, name in enumerate(("attn_q", "attn_k", "attn_v")):
        rows = i * n + (np.arange(n) if name == "attn_v" else order)
        m.add(f"blk.{found.block}.{name}.weight", (TensorRows(found.name, n, found.shape[1], order=rows),))


def _qkv_by_group(m: Build, found: Found) -> None:
    """InternLM 2: per key head its queries, the key and the value."""
    c = m.config
    n_head = c.integer("num_attention_heads", least=1)
    n_kv = c.integer("num_key_value_heads", default=n_head, least=1)
    width = found.shape[0] // (n_head + 2 * n_kv)
    if n_head % n_kv or width % 2 or width * (n_head + 2 * n_kv) != found.shape[0]:
        raise c.fail(
            "num_attention_heads", f"is {n_head}, which does not fit the {found.shape[0]} rows of {found.name}"
        )
    rows = np.arange(found.shape[0]).reshape(n_kv, n_head // n_kv + 2, width)
    parts = {"attn_q": rows[:, :-2].reshape(-1), "attn_k": rows[:, -2].reshape(-1), "attn_v": rows[:, -1].reshape(-1)}
    for name, order in parts.items():
        if name != "attn_v":
            heads = n_head if name == "attn_q" else n_kv
            order = in_pairs(order.reshape(heads, width))
        m.add(f"blk.{found.block}.{name}.weight", (TensorRows(found.name, len(order), found.shape[1], order=order),))


BAICHUAN: Table = LLAMA | {"layers.*.self_attn.W_pack": _qkv_in_pairs}
INTERNLM2: Table = LLAMA | {
    "tok_embeddings": "token_embd",
    "output": "output",
    "layers.*.attention_norm": "blk.*.attn_norm",
    "layers.*.ffn_norm": "blk.*.ffn_norm",
    "layers.*.attention.wqkv": _qkv_by_group,
    "layers.*.attention.wo": "blk.*.attn_output",
    "layers.*.feed_forward.w1": "blk.*.ffn_gate",
    "layers.*.feed_forward.w3": "blk.*.ffn_up",
    "layers.*.feed_forward.w2": "blk.*.ffn_down",
}


def _embd(m: Build) -> int:
    return m.config.integer("hidden_size", "n_embd", "d_model", least=1)


def old_sizes(m: Build, n_ff: int, n_kv: int | None = None) -> None:
    c = m.config
    n_head = c.integer("num_attention_heads", "n_head", "n_heads", least=1)
    m.key("block_count", m.n_layer)
    names = ("n_positions", "n_ctx", "seq_length", "max_seq_len", "max_position_embeddings")
    m.key("context_length", c.integer(*names, default=2048, least=1))
    m.key("embedding_length", _embd(m))
    m.key("feed_forward_length", n_ff)
    m.key("attention.head_count", n_head)
    m.key("attention.head_count_kv", n_kv or n_head)
    c.ignore("vocab_size")


def _gpt2(m: Build) -> None:
    c = m.config
    activation(m, *GELU_TANH, keys=ACTIVATION_KEYS)
    old_sizes(m, c.integer("n_inner", default=4 * _embd(m)))
    layer_eps(m)
    c.expect("scale_attn_weights", True)
    c.expect("scale_attn_by_inverse_layer_idx", False)
    c.ignore("reorder_and_upcast_attn", "n_ctx")


def _starcoder(m: Build) -> None:
    c = m.config
    activation(m, *GELU_TANH, keys=ACTIVATION_KEYS)
    old_sizes(m, c.integer("n_inner", default=4 * _embd(m)), 1)
    layer_eps(m)
    c.expect("multi_query", True)
    c.expect("scale_attn_weights", True)


def _bloom(m: Build) -> None:
    c = m.config
    old_sizes(m, 4 * _embd(m))
    layer_eps(m)
    c.expect("apply_residual_connection_post_layernorm", False)
    c.ignore("slow_but_exact", "masked_softmax_fusion", "bias_dropout_fusion", "skip_bias_add", "skip_bias_add_qkv")
    c.ignore("unk_token_id", "attention_softmax_in_fp32", "offset_alibi", "n_inner")


def _mpt(m: Build) -> None:
    c = m.config
    attn = c.inner("attn_config")
    for key, known in (("alibi", True), ("qk_ln", False), ("softmax_scale", None), ("rope", False)):
        if attn.get(key) not in (known, None):
            raise c.refuse("attn_config", f"{key} {known}")
    old_sizes(m, int(_embd(m) * c.number("expansion_ratio", default=4)), attn.get("kv_n_heads"))
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


def _falcon_kv(m: Build) -> int:
    c = m.config
    n_head = c.integer("num_attention_heads", "n_head", least=1)
    if c.flag("new_decoder_architecture"):
        return c.integer("num_kv_heads", "n_head_kv", default=n_head, least=1)
    return 1 if c.flag("multi_query", default=True) else n_head


def _falcon_order(m: Build, n: int) -> Order:
    """Per key head its queries, the key and the value; then all queries, all keys, all values."""
    n_head, n_kv = m.config.integer("num_attention_heads", "n_head"), _falcon_kv(m)
    if n_head % n_kv or n % (n_head + 2 * n_kv):
        raise m.config.fail(
            "num_attention_heads", f"is {n_head}, which does not fit {n} rows of queries, keys and values"
        )
    rows = np.arange(n).reshape(n_kv, n_head // n_kv + 2, -1)
    return np.concatenate([rows[:, :-2].reshape(-1), rows[:, -2].reshape(-1), rows[:, -1].reshape(-1)])


def _falcon(m: Build) -> None:
    c = m.config
    old_sizes(m, c.integer("ffn_hidden_size", default=4 * _embd(m)), _falcon_kv(m))
    activation(m, *GELU_TANH, keys=("activation",))
    layer_eps(m)
    rope(m)
    c.expect("parallel_attn", True)
    c.expect("alibi", False)
    c.ignore("bias", "num_ln_in_parallel_attn", "num_kv_heads", "n_head_kv", "multi_query", "max_position_embeddings")


def _finish_falcon(m: Build) -> None:
    """With two norms, that of attention is the second one."""
    tied(m, True)
    second = [name for name in m.tensors if ".attn_norm_2." in name]
    for name in second:
        first = name.replace("attn_norm_2", "attn_norm")
        if first not in m.tensors:
            raise FormatError(f"{m.config.path.parent}: {name} is there, and {first} is not")
        a, b = m.tensors[first], m.tensors[name]
        m.tensors[first] = replace(b, name=first)
        m.tensors[name] = replace(a, name=name)


def _exaone(m: Build) -> None:
    c = m.config
    activation(m, *SILU, keys=ACTIVATION_KEYS)
    sizes(m)
    rope(m)
    m.key("attention.layer_norm_rms_epsilon", c.number("layer_norm_epsilon", "rms_norm_eps"))
    head_dim(m)
    c.ignore("attention_bias", "mlp_bias", "vocab_size")


def _finish_exaone(m: Build) -> None:
    c = m.config
    put_llama3(m, c.integer("head_dim", default=_embd(m) // c.integer("num_attention_heads")))
    tied(m)


def _internlm2(m: Build) -> None:
    c = m.config
    activation(m, *SILU)
    sizes(m)
    rope(m)
    rms_eps(m)
    c.expect("bias", False)
    c.ignore("vocab_size")


def _baichuan(m: Build) -> None:
    c = m.config
    activation(m, *SILU)
    sizes(m)
    rms_eps(m)
    if m.n_layer != 40:  # the larger one has ALiBi
        rope(m)
    m.key("rope.dimension_count", _embd(m) // c.integer("num_attention_heads"))
    c.ignore("model_max_length", "z_loss_weight", "vocab_size")


def _minicpm(m: Build) -> None:
    c = m.config
    llama_keys(m)
    m.key("embedding_scale", c.number("scale_emb", default=1.0))
    m.key("residual_scale", c.number("scale_depth", default=1.0) / math.sqrt(m.n_layer))
    m.key("logit_scale", _embd(m) / c.number("dim_model_base", default=1.0))
    c.ignore("attention_bias", "rope_interleaved")


def _xverse(m: Build) -> None:
    llama_keys(m)
    m.config.ignore("max_tokenizer_truncation", "model_max_length")


def _orion(m: Build) -> None:
    c = m.config
    activation(m, *SILU)
    sizes(m)
    rope(m)
    m.key("attention.layer_norm_epsilon", c.number("rms_norm_eps"))
    c.ignore("vocab_size", "attention_bias")


def _qwen(m: Build) -> None:
    c = m.config
    sizes(m)
    rope(m)
    m.key("attention.layer_norm_rms_epsilon", c.number("layer_norm_epsilon"))
    m.key("rope.dimension_count", _embd(m) // c.integer("num_attention_heads"))
    c.ignore("seq_length", "use_dynamic_ntk", "use_logn_attn", "kv_channels", "no_bias", "scale_attn_weights")
    c.ignore("vocab_size", "use_cache_quantization", "use_cache_kernel", "softmax_in_fp32", "rotary_pct")
    c.expect("rotary_pct", 1.0)


def _chatglm(m: Build) -> None:
    c = m.config
    n_head = c.integer("num_attention_heads", least=1)
    multi = c.flag("multi_query_attention")
    m.key("block_count", m.n_layer)
    m.key("context_length", c.integer("seq_length", least=1))
    m.key("embedding_length", _embd(m))
    m.key("feed_forward_length", c.integer("ffn_hidden_size", default=4 * _embd(m)))
    m.key("attention.head_count", n_head)
    m.key("attention.head_count_kv", c.integer("multi_query_group_num", least=1) if multi else n_head)
    m.key("attention.layer_norm_rms_epsilon", c.number("layernorm_epsilon", default=1e-5))
    width = c.integer("kv_channels", default=_embd(m) // n_head)
    m.key("rope.dimension_count", width // 2)
    m.key("rope.freq_base", 10000.0 * c.number("rope_ratio", default=1.0))
    c.expect("rmsnorm", True)
    c.expect("apply_residual_connection_post_layernorm", False)
    c.expect("post_layer_norm", True)
    c.expect("original_rope", True)
    c.ignore("add_bias_linear", "add_qkv_bias", "padded_vocab_size", "vocab_size", "multi_query_group_num")
    c.ignore("bias_dropout_fusion", "fp32_residual_connection", "apply_query_key_layer_scaling", "pre_seq_len")
    c.ignore("prefix_projection", "quantization_bit")


_TRANSFORMER = "transformer."
ARCHITECTURES = (
    Architecture("gpt2", ("GPT2LMHeadModel",), _gpt2, GPT2, lambda m: tied(m, True), strip=_TRANSFORMER),
    Architecture(
        "starcoder", ("GPTBigCodeForCausalLM",), _starcoder, STARCODER, lambda m: tied(m, True), strip=_TRANSFORMER
    ),
    Architecture("bloom", ("BloomForCausalLM",), _bloom, BLOOM, lambda m: tied(m, True), strip=_TRANSFORMER),
    Architecture("mpt", ("MPTForCausalLM", "MptForCausalLM"), _mpt, MPT, lambda m: tied(m, True), strip=_TRANSFORMER),
    Architecture("falcon", ("FalconForCausalLM", "RWForCausalLM"), _falcon, FALCON, _finish_falcon, strip=_TRANSFORMER),
    Architecture("exaone", ("ExaoneForCausalLM",), _exaone, EXAONE, _finish_exaone, strip=_TRANSFORMER),
    Architecture("internlm2", ("InternLM2ForCausalLM",), _internlm2, INTERNLM2, tied),
    Architecture("baichuan", ("BaichuanForCausalLM", "BaiChuanForCausalLM"), _baichuan, BAICHUAN, tied),
    Architecture("minicpm", ("MiniCPMForCausalLM",), _minicpm, LLAMA | PAIRS, finish),
    Architecture("xverse", ("XverseForCausalLM",), _xverse, LLAMA | PAIRS, tied),
    Architecture("orion", ("OrionForCausalLM",), _orion, LLAMA, tied),
    Architecture("qwen", ("QWenLMHeadModel",), _qwen, QWEN, tied, strip=_TRANSFORMER),
    Architecture(
        "chatglm", ("ChatGLMModel", "ChatGLMForConditionalGeneration"), _chatglm, CHATGLM, tied, strip=_TRANSFORMER
    ),
)
