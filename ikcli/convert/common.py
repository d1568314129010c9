"""Names of tensors and keys that most architectures share."""

from __future__ import annotations

from typing import Any

from ikcli.convert.build import Build, Rule, drop, expert, fused_experts
from ikcli.convert.rope import RopeSettings, llama3_factors, put_rope, read_rope

LLAMA: dict[str, str | Rule] = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "layers.*.input_layernorm": "blk.*.attn_norm",
    "layers.*.self_attn.q_proj": "blk.*.attn_q",
    "layers.*.self_attn.k_proj": "blk.*.attn_k",
    "layers.*.self_attn.v_proj": "blk.*.attn_v",
    "layers.*.self_attn.o_proj": "blk.*.attn_output",
    "layers.*.self_attn.rotary_emb.inv_freq": drop,
    "layers.*.post_attention_layernorm": "blk.*.ffn_norm",
    "layers.*.mlp.gate_proj": "blk.*.ffn_gate",
    "layers.*.mlp.up_proj": "blk.*.ffn_up",
    "layers.*.mlp.down_proj": "blk.*.ffn_down",
}
"""Llama and most that came after it."""

HEAD_NORMS: dict[str, str | Rule] = {
    "layers.*.self_attn.q_norm": "blk.*.attn_q_norm",
    "layers.*.self_attn.k_norm": "blk.*.attn_k_norm",
}


def expert_names(
    part: str = "mlp", gate: str = "gate", names: str = "gate_proj up_proj down_proj"
) -> dict[str, str | Rule]:
    """Router and experts one by one, or all in tensors of three dimensions."""
    prefix = f"layers.*.{part}"
    gate_name, up, down = names.split()
    return {
        f"{prefix}.{gate}": "blk.*.ffn_gate_inp",
        f"{prefix}.experts.#.{gate_name}": expert("blk.*.ffn_gate_exps"),
        f"{prefix}.experts.#.{up}": expert("blk.*.ffn_up_exps"),
        f"{prefix}.experts.#.{down}": expert("blk.*.ffn_down_exps"),
        f"{prefix}.experts.gate_up_proj": fused_experts("blk.*.ffn_gate_exps.weight", "blk.*.ffn_up_exps.weight"),
        f"{prefix}.experts.down_proj": fused_experts("blk.*.ffn_down_exps.weight"),
    }


def shared_expert_names(part: str = "mlp.shared_experts") -> dict[str, str | Rule]:
    """The expert that all tokens have."""
    prefix = f"layers.*.{part}"
    return {
        f"{prefix}.gate_proj": "blk.*.ffn_gate_shexp",
        f"{prefix}.up_proj": "blk.*.ffn_up_shexp",
        f"{prefix}.down_proj": "blk.*.ffn_down_shexp",
    }


CHOICE_BIAS = "blk.*.exp_probs_b.bias"


def sizes(m: Build, *, n_ff: bool = True, n_further: int = 0) -> None:
    """Blocks, context, widths, heads and epsilon."""
    c = m.config
    m.key("block_count", c.integer("num_hidden_layers", "n_layers", "n_layer", "num_layers", least=1) + n_further)
    m.key("context_length", c.integer("max_position_embeddings", "n_ctx", "n_positions", "max_seq_len", "seq_length"))
    m.key("embedding_length", c.integer("hidden_size", "n_embd", "d_model", least=1))
    if n_ff:
        m.key("feed_forward_length", c.integer("intermediate_size", "ffn_hidden_size", "n_inner", least=1))
    n_head = c.integer("num_attention_heads", "n_head", "n_heads", least=1)
    m.key("attention.head_count", n_head)
    m.key("attention.head_count_kv", c.integer("num_key_value_heads", default=n_head, least=1))


def rms_eps(m: Build, default: float | None = None) -> None:
    """The epsilon of norms by the root of the mean square."""
    m.key("attention.layer_norm_rms_epsilon", m.config.number("rms_norm_eps", "layer_norm_eps", default=default))


def layer_eps(m: Build, default: float | None = None) -> None:
    """The epsilon of norms around the mean."""
    names = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    m.key("attention.layer_norm_epsilon", m.config.number(*names, default=default))


def head_dim(m: Build) -> int:
    """Columns of a head, which is a key where the checkpoint says it."""
    c = m.config
    width = c.get("head_dim")
    if width is None:
        return c.integer("hidden_size") // c.integer("num_attention_heads")
    m.key("attention.key_length", c.integer("head_dim", least=1))
    m.key("attention.value_length", c.integer("head_dim", least=1))
    return c.integer("head_dim")


def activation(m: Build, *known: str, keys: tuple[str, ...] = ("hidden_act", "hidden_activation")) -> None:
    """UnsupportedError if the activation is another one than the architecture has."""
    for key in keys:
        m.config.expect(key, *known)


SILU = ("silu", "swish")
GELU_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu")


def experts(m: Build, *count: str, width: bool = True) -> None:
    """Number of experts, of those that a token has, and their width."""
    c = m.config
    m.key("expert_count", c.integer(*(count or ("num_experts", "num_local_experts", "n_routed_experts")), least=1))
    m.key("expert_used_count", c.integer("num_experts_per_tok", "num_experts_per_token", least=1))
    if width:
        m.key("expert_feed_forward_length", c.integer("moe_intermediate_size", least=1))


def rope(m: Build, kind: str = "full_attention") -> RopeSettings:
    """The keys of the rotation; factors of Llama 3 become a tensor."""
    found = read_rope(m.config, kind)
    put_rope(m, found)
    return found


def put_llama3(m: Build, n_rot: int) -> None:
    """`rope_freqs`, if the rotation is that of Llama 3."""
    found = read_rope(m.config)
    if found.type == "llama3":
        m.constant("rope_freqs.weight", llama3_factors(m, found, n_rot))


def tied(m: Build, default: bool = False) -> None:
    """Without a matrix for the output that of the embeddings is used, and only if the checkpoint says so."""
    says = m.config.flag("tie_word_embeddings", default=default)
    if m.config.raw.get("tie_word_embeddings", says) != says:  # text part and whole disagree: as the tensors are
        says = "output.weight" not in m.tensors
    if says:
        if m.tensors.pop("output.weight", None) is not None:
            m.dropped.append("lm_head.weight")
    elif "output.weight" not in m.tensors and "token_embd.weight" in m.tensors:
        raise m.config.fail("tie_word_embeddings", "is false, and the checkpoint has no lm_head.weight")


def no_window(m: Build) -> None:
    """UnsupportedError if layers have a window that the architecture has no key for."""
    c = m.config
    kinds: Any = c.items("layer_types")
    if c.flag("use_sliding_window") or (kinds and set(kinds) - {"full_attention"}):
        raise c.refuse("layer_types" if kinds else "use_sliding_window", "full_attention in all layers")
    c.ignore("sliding_window", "max_window_layers")


def windows(m: Build, period: int, usual: int | None = None, kinds: list[Any] | None = None) -> list[bool]:
    """Which layers have a window; a key says so unless that is what the architecture has anyway (every n-th has none).

    `period`: of so many layers the last one has no window, where the checkpoint has no list. `usual`: that of the
    architecture, if another one. 0: the key is written by the caller.
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
