"""Metadata keys that several architectures share: sizes, epsilons, heads, windows, experts and the output matrix."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ikcli.convert.build import Build
from ikcli.convert.rope import RopeSettings, llama3_factors, put_rope, read_rope
from ikcli.errors import UnsupportedError


def sizes(m: Build, *, n_ff: bool = True, further: bool = False) -> None:
    """Write the numbers of blocks and heads, the context length and the widths.

    `further`: the architecture may have layers that predict further tokens, which count as blocks.
    """
    c = m.config
    if further:
        m.count_heads()
        c.ignore("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
        m.key("nextn_predict_layers", m.n_further or None)
    m.key("block_count", m.n_layer + m.n_further)
    m.key("context_length", c.integer("max_position_embeddings", "n_ctx", "n_positions", "max_seq_len", "seq_length"))
    m.key("embedding_length", c.integer("hidden_size", "n_embd", "d_model", least=1))
    if n_ff:
        m.key("feed_forward_length", c.integer("intermediate_size", "ffn_hidden_size", "n_inner", least=1))
    n_head = c.integer("num_attention_heads", "n_head", "n_heads", least=1)
    m.key("attention.head_count", n_head)
    m.key("attention.head_count_kv", c.integer("num_key_value_heads", default=n_head, least=1))


def rms_eps(m: Build, default: float | None = None) -> None:
    """Write the epsilon of RMS norms."""
    m.key("attention.layer_norm_rms_epsilon", m.config.number("rms_norm_eps", "layer_norm_eps", default=default))


def layer_eps(m: Build, default: float | None = None) -> None:
    """Write the epsilon of layer norms."""
    names = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    m.key("attention.layer_norm_epsilon", m.config.number(*names, default=default))


def head_dim(m: Build) -> int:
    """Return the columns of a head; write them as keys if config.json states them."""
    c = m.config
    width = c.get("head_dim")
    if width is None:
        return c.integer("hidden_size") // c.integer("num_attention_heads")
    m.key("attention.key_length", c.integer("head_dim", least=1))
    m.key("attention.value_length", c.integer("head_dim", least=1))
    return c.integer("head_dim")


def activation(m: Build, *known: str, keys: tuple[str, ...] = ("hidden_act", "hidden_activation")) -> None:
    """Refuse activations other than `known`."""
    for key in keys:
        m.config.expect(key, *known)


SILU = ("silu", "swish")
GELU_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu")


def experts(m: Build, *count: str, width: bool = True) -> None:
    """Write the number of experts, of experts per token, and the width of an expert."""
    c = m.config
    m.key("expert_count", c.integer(*(count or ("num_experts", "num_local_experts", "n_routed_experts")), least=1))
    m.key("expert_used_count", c.integer("num_experts_per_tok", "num_experts_per_token", least=1))
    if width:
        m.key("expert_feed_forward_length", c.integer("moe_intermediate_size", least=1))


def indexer(m: Build) -> None:
    """Write the sizes of an indexer, and how many positions (or entries) it chooses."""
    c = m.config
    m.key("attention.indexer.head_count", c.integer("index_n_heads", least=1))
    m.key("attention.indexer.key_length", c.integer("index_head_dim", least=1))
    m.key("attention.indexer.top_k", c.integer("index_topk", least=1))


def rope(m: Build, kind: str = "full_attention") -> RopeSettings:
    """Write the keys of the rotation and return it."""
    found = read_rope(m.config, kind)
    put_rope(m, found)
    return found


def put_llama3(m: Build, n_rot: int) -> None:
    """Add the tensor `rope_freqs` if the rotation is that of Llama 3."""
    found = read_rope(m.config)
    if found.type == "llama3":
        m.constant("rope_freqs.weight", llama3_factors(m, found, n_rot))


def long_rope(m: Build, found: RopeSettings) -> None:
    """Write the original context and the factor on cosine and sine of LongRoPE; refuse other scalings."""
    c = m.config
    if found.type not in ("default", "longrope"):
        raise UnsupportedError(
            f"{c.path}: rope_type {found.type} is not known for {m.arch}, which has default and longrope"
        )
    scales = {found.values[key] for key in ("short_mscale", "long_mscale") if key in found.values}
    if scales and (m.arch != "phimoe" or len(scales) > 1):
        raise c.refuse("rope_scaling", "no short_mscale and long_mscale" if m.arch != "phimoe" else "equal mscales")
    whole = c.integer("max_position_embeddings", least=2)
    original = int(found.positive("original_max_position_embeddings", whole))
    m.key("rope.scaling.original_context_length", original)
    if found.type == "longrope":
        scale = whole / original
        factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        m.key("rope.scaling.attn_factor", found.number("attention_factor", *(scales or (factor,))))


def put_long_rope(m: Build) -> None:
    """Add the factors of LongRoPE if the checkpoint has them: for contexts up to the original one, and beyond."""
    found = read_rope(m.config)
    if found.type != "longrope":
        return
    n = m.metadata[f"{m.arch}.rope.dimension_count"] // 2
    for name in ("long", "short"):
        factors = found.values.get(f"{name}_factor")
        if not isinstance(factors, list) or len(factors) != n:
            raise m.config.fail("rope_scaling", f"should have {n} numbers as {name}_factor")
        m.constant(f"rope_factors_{name}.weight", np.array(factors, np.float32))


def tied(m: Build, default: bool = False) -> None:
    """Drop the output matrix if config.json ties it to the embeddings; otherwise require one.

    Embedding models (of sentence-transformers) have none, whatever config.json says.
    """
    says = m.config.flag("tie_word_embeddings", default=default)
    if m.config.raw.get("tie_word_embeddings", says) != says:  # text part and whole disagree: the tensors decide
        says = "output.weight" not in m.tensors
    if says:
        if m.tensors.pop("output.weight", None) is not None:
            m.dropped.append("lm_head.weight")
        return
    missing = "output.weight" not in m.tensors and "token_embd.weight" in m.tensors
    if missing and not (m.config.path.parent / "modules.json").exists():
        raise m.config.fail("tie_word_embeddings", "is false, and the checkpoint has no lm_head.weight")


def no_window(m: Build) -> None:
    """Refuse windows, for architectures without a key for them."""
    c = m.config
    kinds: Any = c.items("layer_types")
    if c.flag("use_sliding_window") or (kinds and set(kinds) - {"full_attention"}):
        raise c.refuse("layer_types" if kinds else "use_sliding_window", "full_attention in all layers")
    c.ignore("sliding_window", "max_window_layers")


def windows(m: Build, period: int, usual: int | None = None, kinds: list[Any] | None = None) -> list[bool]:
    """Return which layers have a window, and write them as a key unless the architecture implies them.

    Without a list in the checkpoint every `period`-th layer has none. `usual` is the period that the architecture
    implies, if it differs; 0 leaves the key to the caller.
    """
    c = m.config
    kinds = kinds or c.items("layer_types")
    if kinds is None:
        is_window = [(i + 1) % period != 0 for i in range(m.n_layer)]
    elif len(kinds) != m.n_layer or set(kinds) - {"sliding_attention", "full_attention"}:
        raise c.refuse("layer_types", "sliding_attention or full_attention for every layer")
    else:
        is_window = [kind == "sliding_attention" for kind in kinds]
    usual = period if usual is None else usual
    if usual and is_window != [(i + 1) % usual != 0 for i in range(m.n_layer)]:
        m.key("attention.sliding_window_pattern", is_window)
    return is_window


def dense_lead(m: Build, key: str = "first_k_dense_replace", usual: int = 0) -> int:
    """Return the number of leading layers without experts."""
    kinds = m.config.items("mlp_layer_types")
    if kinds is None:
        return m.config.integer(key, default=usual)
    m.config.given(key)
    lead = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    if len(kinds) != m.n_layer or set(kinds[lead:]) - {"sparse"} or set(kinds[:lead]) - {"dense"}:
        raise m.config.refuse("mlp_layer_types", "dense in the first layers, then sparse")
    return lead


def biases(m: Build) -> None:
    """Ignore keys that say which modules have biases; the tensors tell."""
    m.config.ignore("attention_bias", "mlp_bias", "use_bias", "attention_out_bias", "vocab_size")


def plain(m: Build) -> None:
    """Write the keys of a plain transformer."""
    activation(m, *SILU)
    sizes(m)
    rope(m)
    rms_eps(m)
    head_dim(m)
    biases(m)


def own_output(m: Build) -> None:
    """Store an output matrix even if it is that of the embeddings, as readers of the architecture expect."""
    if "output.weight" not in m.tensors and "token_embd.weight" in m.tensors:
        if not m.config.flag("tie_word_embeddings", default=True):
            raise m.config.fail("tie_word_embeddings", "is false, and the checkpoint has no lm_head.weight")
        embedding = m.tensors["token_embd.weight"]
        m.add("output.weight", embedding.pieces)
    m.config.ignore("tie_word_embeddings")


def partial_rope(m: Build, width: int) -> None:
    """Write the keys of a rotation of a part of each head."""
    m.key("rope.dimension_count", int(width * rope(m).partial))


def head_width(m: Build) -> int:
    """Return the width of the model divided by the number of heads."""
    return m.config.integer("hidden_size") // m.config.integer("num_attention_heads", "n_head")


def base(m: Build) -> None:
    """Write the keys of a plain transformer without its rotation."""
    activation(m, *SILU)
    sizes(m)
    rms_eps(m)
    head_dim(m)
    m.config.ignore("attention_bias", "mlp_bias", "vocab_size")


ACTIVATION_KEYS = ("activation_function", "hidden_act", "activation")


def embd(m: Build) -> int:
    """Return the width of the model."""
    return m.config.integer("hidden_size", "n_embd", "d_model", least=1)


def old_sizes(m: Build, n_ff: int, n_kv: int | None = None) -> None:
    """Write the sizes of models whose config.json predates common names."""
    c = m.config
    n_head = c.integer("num_attention_heads", "n_head", "n_heads", least=1)
    m.key("block_count", m.n_layer)
    names = ("n_positions", "n_ctx", "seq_length", "max_seq_len", "max_position_embeddings")
    m.key("context_length", c.integer(*names, default=2048, least=1))
    m.key("embedding_length", embd(m))
    m.key("feed_forward_length", n_ff)
    m.key("attention.head_count", n_head)
    m.key("attention.head_count_kv", n_kv or n_head)
    c.ignore("vocab_size")


def tied_by_default(m: Build) -> None:
    """Use the embeddings as output matrix unless the checkpoint says otherwise."""
    tied(m, True)
