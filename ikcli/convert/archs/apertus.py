"""Apertus, and models of 2023 to 2025 over common blocks: DeciLM, Nemotron (NAS), OpenELM, Jais 1, SmallThinker."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.archs.gpt2 import turned
from ikcli.convert.archs.llama import finish, llama_keys
from ikcli.convert.pieces import as_float32

_XIELU = ("alpha_p", "alpha_n", "beta", "eps")
_EPS = -1e-6


def _number(name: str) -> b.Rule:
    """Return a rule that collects a number of every layer in a key, in the order of layers."""

    def rule(m: b.Build, found: b.Found) -> None:
        value = as_float32(m.source.read(found.name).reshape(-1), m.source.dtype(found.name))
        m.metadata.setdefault(f"xielu.{name}", [math.nan] * m.n_layer)[found.block] = float(value[0])

    return rule


def _apertus(m: b.Build) -> None:
    k.activation(m, "xielu")
    k.sizes(m)
    k.rope(m)
    k.rms_eps(m)
    m.key("rope.dimension_count", k.head_dim(m))
    k.biases(m)
    m.config.expect("qk_norm", True)
    m.config.expect("post_norm", False)


def _text_embeddings(m: b.Build, found: b.Found) -> None:
    """Keep the embeddings of tokens that have an output; the others, which come last, stand for images and sounds."""
    n = m.config.integer("output_vocab_size", default=found.shape[0], least=1)
    if n < found.shape[0]:
        m.notes.append(f"tokens from {n} on, of images and sounds, are left out")
    m.part(found, "token_embd.weight", 0, min(n, found.shape[0]))


def _finish_apertus(m: b.Build) -> None:
    finish(m)
    m.metadata.setdefault("xielu.beta", [0.5] * m.n_layer)  # buffers, which some checkpoints leave out
    m.metadata.setdefault("xielu.eps", [_EPS] * m.n_layer)


APERTUS: b.Table = {
    "layers.*.attention_layernorm": "blk.*.attn_norm",
    "layers.*.feedforward_layernorm": "blk.*.ffn_norm",
} | {f"layers.*.mlp.act_fn.{name}": _number(name) for name in _XIELU}


# --- DeciLM ---------------------------------------------------------------------------------------------------------
def _deci(m: b.Build) -> None:
    """Write heads and widths by layer; a layer that lost its attention or feed-forward part has none of them."""
    c = m.config
    llama_keys(m)
    k.no_window(m)
    n_head, n_embd = c.integer("num_attention_heads", least=1), k.embd(m)
    listed, layers = c.items("num_key_value_heads_per_layer"), c.items("block_configs")
    c.ignore("attention_bias", "mlp_bias", "block_configs", "num_key_value_heads_per_layer")
    if listed is not None:
        m.key("attention.head_count_kv", listed)
    if layers is None:
        return
    heads, heads_kv, widths = [], [], []
    for layer in layers:
        attn, ffn = layer["attention"], layer["ffn"]
        group = attn.get("n_heads_in_group")
        heads_kv.append(n_head // group if group else 0)
        heads.append(n_head if group or attn.get("replace_with_linear") else 0)
        widths.append(_width(ffn, n_embd))
    m.key("attention.head_count", heads)
    m.key("attention.head_count_kv", heads_kv)
    m.key("feed_forward_length", widths)


def _width(ffn: dict[str, Any], n_embd: int) -> int:
    """Return two thirds of a multiple of the model's width, rounded up to 256; 0 without a feed-forward part."""
    if ffn.get("intermediate_size") is not None:
        return int(ffn["intermediate_size"])
    return -(-int(2 * ffn["ffn_mult"] * n_embd / 3) // 256) * 256 if ffn.get("ffn_mult") else 0


def _k_pairs(m: b.Build, n: int) -> b.Order:
    """Return an order of the rows of keys, whose heads differ in number from layer to layer but not in width."""
    width = k.embd(m) // m.config.integer("num_attention_heads", least=1)
    return b.in_pairs(np.arange(n).reshape(-1, m.config.integer("head_dim", default=width)))


DECI: b.Table = b.PAIRS | {
    "layers.*.self_attn.k_proj": b.to("blk.*.attn_k", order=_k_pairs),
    "layers.*.self_attn.linear_attn": "blk.*.attn_output",
}


# --- OpenELM --------------------------------------------------------------------------------------------------------
def _openelm(m: b.Build) -> None:
    c = m.config
    n_embd, divisor, width = (
        c.integer("model_dim", least=1),
        c.integer("ffn_dim_divisor", least=1),
        c.integer("head_dim"),
    )
    m.key("block_count", m.n_layer)
    m.key("context_length", c.integer("max_context_length", least=1))
    m.key("embedding_length", n_embd)
    m.key("feed_forward_length", [_rounded(x * n_embd, divisor) for x in c.items("ffn_multipliers") or ()])
    m.key("attention.head_count", c.items("num_query_heads"))
    m.key("attention.head_count_kv", c.items("num_kv_heads"))
    m.key("rope.freq_base", c.number("rope_freq_constant", default=10000.0))
    m.key("attention.layer_norm_rms_epsilon", 1e-6)
    for name in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
        m.key(name, width)
    c.expect("activation_fn_name", "swish")
    c.expect("normalization_layer_name", "rms_norm")
    c.expect("ffn_with_glu", True)
    c.expect("normalize_qk_projections", True)
    c.ignore("num_gqa_groups", "qkv_multipliers", "rope_max_length", "share_input_output_layers", "vocab_size")


def _rounded(x: float, divisor: int) -> int:
    """Return the multiple of the divisor that is closest, but not more than a tenth below."""
    found = max(divisor, int(x + divisor / 2) // divisor * divisor)
    return found + divisor if found < 0.9 * x else found


OPENELM: b.Table = {"layers.*.ffn.proj_1": b.split("blk.*.ffn_gate", "blk.*.ffn_up")}


# --- Jais 1 ---------------------------------------------------------------------------------------------------------
def _jais(m: b.Build) -> None:
    c = m.config
    c.expect("activation_function", "swiglu")
    c.expect("position_embedding_type", "alibi")
    c.expect("scale_attn_weights", True)
    k.old_sizes(m, c.integer("n_inner", least=1))
    k.layer_eps(m)
    m.key("attention.max_alibi_bias", 8.0)
    c.expect("mup_scale_qk_dot_by_d", True)
    c.expect("scale_qk_dot_by_d", True)
    c.ignore("n_ctx", "reorder_and_upcast_attn", "alibi_scaling")


def _embeddings_scale(m: b.Build) -> float:
    return m.config.number("mup_embeddings_scale", "embeddings_scale")


def _width_scale(m: b.Build) -> float:
    c = m.config
    if "mup_output_alpha" in c:
        return c.number("mup_output_alpha") * c.number("mup_width_scale")
    return c.number("width_scale")


def _slopes(m: b.Build, found: b.Found) -> None:
    """Write the greatest exponent of the slopes, which the checkpoint stores."""
    first = as_float32(m.source.read(found.name).reshape(-1), m.source.dtype(found.name))[0]
    n_head = m.config.integer("n_head", "num_attention_heads", least=1)
    m.key("attention.max_alibi_bias", float(-round(math.log2(float(first)) * 2 ** math.floor(math.log2(n_head)))))


def _own_output(m: b.Build) -> None:
    """Store the output matrix, which has another factor than the embeddings, even if the checkpoint ties them."""
    if "output.weight" not in m.tensors:
        name = "transformer.wte.weight"
        b.scaled("output", _width_scale)(m, b.Found(name, m.source.shape(name), ".weight", -1, -1))
    m.config.ignore("tie_word_embeddings")


JAIS: b.Table = {
    "wte": b.scaled("token_embd", _embeddings_scale),
    "lm_head": b.scaled("output", _width_scale),
    "h.*.attn.c_attn": turned("blk.*.attn_qkv"),
    "h.*.attn.c_proj": turned("blk.*.attn_output"),
    "h.*.mlp.c_fc": turned("blk.*.ffn_up"),
    "h.*.mlp.c_fc2": turned("blk.*.ffn_gate"),
    "h.*.mlp.c_proj": turned("blk.*.ffn_down"),
    "h.*.attn.bias": b.drop,
    "relative_pe.slopes": _slopes,
}


# --- SmallThinker ---------------------------------------------------------------------------------------------------
def _smallthinker(m: b.Build) -> None:
    c = m.config
    width = c.integer("moe_ffn_hidden_size", least=1)
    k.sizes(m, n_ff=False)
    k.rope(m)
    k.rms_eps(m)
    k.head_dim(m)
    m.key("feed_forward_length", width)
    m.key("expert_feed_forward_length", width)
    m.key("expert_count", c.integer("moe_num_primary_experts", least=1))
    m.key("expert_used_count", c.integer("moe_num_active_primary_experts", least=1))
    m.key("expert_gating_func", 1 if c.flag("moe_primary_router_apply_softmax") else 2)
    c.expect("norm_topk_prob", True)
    c.expect("moe_enable_early_router", True)
    c.expect("moe_enable_secondary_experts", False)
    windows, rotated = c.items("sliding_window_layout") or [0] * m.n_layer, c.items("rope_layout")
    if any(windows):
        m.key("attention.sliding_window", c.integer("sliding_window_size", least=1))
        if windows != [int(i % 4 != 0) for i in range(m.n_layer)]:
            m.key("attention.sliding_window_pattern", [bool(w) for w in windows])
    if rotated is not None and rotated != (windows if any(windows) else [1] * m.n_layer):
        raise c.refuse("rope_layout", "rotation in layers with windows, or in all without any")
    c.ignore("sliding_window_size", "moe_layer_layout", "attention_bias", "vocab_size", "moe_num_secondary_experts")


SMALLTHINKER: b.Table = {
    "layers.*.block_sparse_moe.primary_router": "blk.*.ffn_gate_inp",
    "layers.*.block_sparse_moe.experts.#.gate": b.expert("blk.*.ffn_gate_exps"),
    "layers.*.block_sparse_moe.experts.#.up": b.expert("blk.*.ffn_up_exps"),
    "layers.*.block_sparse_moe.experts.#.down": b.expert("blk.*.ffn_down_exps"),
}

ARCHITECTURES = (
    b.Architecture("apertus", ("ApertusForCausalLM",), _apertus, APERTUS, _finish_apertus),
    b.Architecture(
        "apertus",
        ("Apertus1p5TextForCausalLM", "Apertus1p5ForConditionalGeneration"),
        _apertus,
        APERTUS | {"embed_tokens": _text_embeddings},
        _finish_apertus,
        r"vision_tokenizer|audio_tokenizer",
    ),
    b.Architecture("deci", ("DeciLMForCausalLM",), _deci, DECI, finish),
    b.Architecture("openelm", ("OpenELMForCausalLM",), _openelm, OPENELM, k.tied_by_default, strip="transformer."),
    b.Architecture("jais", ("JAISLMHeadModel",), _jais, JAIS, _own_output, strip="transformer."),
    b.Architecture("smallthinker", ("SmallThinkerForCausalLM",), _smallthinker, SMALLTHINKER, k.tied),
)
