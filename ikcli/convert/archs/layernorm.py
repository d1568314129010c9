"""Norms around the mean: Cohere, StarCoder2, StableLM, Phi-1 to Phi-2, Nemotron, GPT-NeoX."""

from __future__ import annotations

import numpy as np

from ikcli.convert.archs.deltanet import plus_one
from ikcli.convert.build import Architecture, Build, Found, Table, drop, expert, to
from ikcli.convert.common import (
    GELU_TANH,
    HEAD_NORMS,
    LLAMA,
    SILU,
    activation,
    head_dim,
    layer_eps,
    rope,
    sizes,
    tied,
    windows,
)


def _partial(m: Build, width: int) -> None:
    m.key("rope.dimension_count", int(width * rope(m).partial))


def _width(m: Build) -> int:
    return m.config.integer("hidden_size") // m.config.integer("num_attention_heads", "n_head")


def _cohere(m: Build) -> None:
    c = m.config
    activation(m, *SILU)
    sizes(m)
    rope(m)
    layer_eps(m)
    m.key("logit_scale", c.number("logit_scale"))
    head_dim(m)
    c.ignore("attention_bias", "vocab_size", "use_qk_norm", "use_parallel_block", "use_gated_activation")
    c.ignore("use_embedding_sharing")
    c.expect("use_parallel_block", True)
    c.expect("use_gated_activation", True)


def _commandr(m: Build) -> None:
    _cohere(m)
    m.key("rope.scaling.type", "none")


def _cohere2(m: Build) -> None:
    c = m.config
    _cohere(m)
    m.key("attention.sliding_window", c.integer("sliding_window", least=1))
    m.key("vocab_size", c.integer("vocab_size"))
    period = c.integer("sliding_window_pattern", "_sliding_window_pattern", default=4, least=1)
    windows(m, period, 4)
    c.expect("use_qk_norm", False)
    m.key("rope.dimension_count", int(c.number("rotary_pct", default=1.0) * c.integer("head_dim", default=_width(m))))
    c.ignore("order_of_interleaved_layers", "position_embedding_type", "layer_switch")
    c.expect("position_embedding_type", "rope_gptj")
    c.expect("order_of_interleaved_layers", "local_attn_first")
    c.expect("layer_switch", 4)
    c.ignore("rotary_pct")


def _starcoder2(m: Build) -> None:
    c = m.config
    activation(m, *GELU_TANH)
    sizes(m)
    rope(m)
    layer_eps(m)
    if c.get("sliding_window"):
        m.key("attention.sliding_window", c.integer("sliding_window"))
    c.ignore("use_bias")
    c.expect("norm_type", "layer_norm")
    c.expect("mlp_type", "default")
    c.ignore("vocab_size")


def _stablelm(m: Build) -> None:
    c = m.config
    activation(m, *SILU)
    sizes(m)
    _partial(m, _width(m))
    layer_eps(m)
    m.key("use_parallel_residual", c.flag("use_parallel_residual"))
    c.ignore("vocab_size", "use_qkv_bias", "qk_layernorm")
    c.expect("use_norm_bias", True)
    c.ignore("rope_pct")


def _phi2(m: Build) -> None:
    c = m.config
    activation(m, *GELU_TANH)
    sizes(m)
    _partial(m, _width(m))
    layer_eps(m)
    c.expect("qk_layernorm", False)
    c.ignore("vocab_size")


def _nemotron(m: Build) -> None:
    c = m.config
    activation(m, "relu2")
    sizes(m)
    m.key("vocab_size", c.integer("vocab_size"))
    layer_eps(m)
    width = c.integer("head_dim", default=_width(m))
    if width != _width(m):
        m.key("attention.key_length", width)
        m.key("attention.value_length", width)
    _partial(m, width)
    c.ignore("attention_bias", "mlp_bias", "kv_channels")


def _gptneox(m: Build) -> None:
    c = m.config
    activation(m, *GELU_TANH)
    sizes(m)
    _partial(m, _width(m))
    layer_eps(m)
    m.key("attention.head_count_kv", c.integer("num_attention_heads"))
    m.key("use_parallel_residual", c.flag("use_parallel_residual", default=True))
    c.ignore("vocab_size", "attention_bias")


def head_by_head(m: Build, found: Found) -> None:
    """Query, key and value of each head become those of all heads."""
    n_head = m.config.integer("num_attention_heads", "n_head")
    if found.shape[0] % (3 * n_head):
        raise m.config.fail("num_attention_heads", f"is {n_head}, which does not fit {found.shape[0]} rows")
    order = np.arange(found.shape[0]).reshape(n_head, 3, -1).swapaxes(0, 1).reshape(-1)
    m.plain(found, f"blk.{found.block}.attn_qkv{found.suffix}", order=order)


COHERE: Table = LLAMA | HEAD_NORMS
STARCODER2: Table = LLAMA | {
    "layers.*.mlp.c_fc": "blk.*.ffn_up",
    "layers.*.mlp.c_proj": "blk.*.ffn_down",
}
STABLELM: Table = LLAMA | {
    "layers.*.self_attn.q_layernorm.norms.#": expert("blk.*.attn_q_norm"),
    "layers.*.self_attn.k_layernorm.norms.#": expert("blk.*.attn_k_norm"),
}
PHI2: Table = LLAMA | {
    "layers.*.self_attn.dense": "blk.*.attn_output",
    "layers.*.mlp.fc1": "blk.*.ffn_up",
    "layers.*.mlp.fc2": "blk.*.ffn_down",
    "final_layernorm": "output_norm",
}
NEMOTRON: Table = LLAMA | {
    "norm.weight": to("output_norm", value=plus_one),
    "layers.*.input_layernorm.weight": to("blk.*.attn_norm", value=plus_one),
    "layers.*.post_attention_layernorm.weight": to("blk.*.ffn_norm", value=plus_one),
}
GPTNEOX: Table = {
    "embed_in": "token_embd",
    "final_layer_norm": "output_norm",
    "embed_out": "output",
    "layers.*.input_layernorm": "blk.*.attn_norm",
    "layers.*.post_attention_layernorm": "blk.*.ffn_norm",
    "layers.*.attention.query_key_value": head_by_head,
    "layers.*.attention.dense": "blk.*.attn_output",
    "layers.*.mlp.dense_h_to_4h": "blk.*.ffn_up",
    "layers.*.mlp.dense_4h_to_h": "blk.*.ffn_down",
    "layers.*.attention.bias": drop,
    "layers.*.attention.masked_bias": drop,
    "layers.*.attention.rotary_emb.inv_freq": drop,
}

ARCHITECTURES = (
    Architecture("command-r", ("CohereForCausalLM",), _commandr, COHERE, lambda m: tied(m, True)),
    Architecture(
        "cohere2", ("Cohere2ForCausalLM",), _cohere2, COHERE, lambda m: tied(m, True), "",
        frozenset({"cache_implementation"}),
    ),
    Architecture("starcoder2", ("Starcoder2ForCausalLM",), _starcoder2, STARCODER2, lambda m: tied(m, True)),
    Architecture("stablelm", ("StableLmForCausalLM", "StableLMEpochForCausalLM"), _stablelm, STABLELM, tied),
    Architecture("phi2", ("PhiForCausalLM",), _phi2, PHI2, tied),
    Architecture("nemotron", ("NemotronForCausalLM",), _nemotron, NEMOTRON, tied),
    Architecture("gptneox", ("GPTNeoXForCausalLM",), _gptneox, GPTNEOX, tied, strip="gpt_neox."),
)  # fmt: skip
