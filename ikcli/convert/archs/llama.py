"""Llama and its kin: Mistral, Mixtral."""

from __future__ import annotations

from ikcli.convert.build import Architecture, Build, Table, rotated_pairs, to
from ikcli.convert.common import (
    LLAMA,
    SILU,
    activation,
    expert_names,
    experts,
    head_dim,
    no_window,
    put_llama3,
    rms_eps,
    rope,
    sizes,
    tied,
)

PAIRS = {
    "layers.*.self_attn.q_proj": to("blk.*.attn_q", order=rotated_pairs()),
    "layers.*.self_attn.k_proj": to("blk.*.attn_k", order=rotated_pairs("num_key_value_heads")),
}
"""Rows of queries and keys, ordered for a rotation of adjacent columns."""

TABLE: Table = LLAMA | PAIRS | expert_names() | expert_names("block_sparse_moe", names="w1 w3 w2")


def llama_keys(m: Build) -> None:
    """All but experts."""
    activation(m, *SILU)
    sizes(m)
    rope(m)
    rms_eps(m)
    width = head_dim(m)
    m.key("vocab_size", m.config.integer("vocab_size", least=1))
    m.key("rope.dimension_count", width)


def _keys(m: Build) -> None:
    c = m.config
    llama_keys(m)
    if c.get("num_local_experts"):
        experts(m, "num_local_experts", width=False)
    no_window(m)
    for key in ("attention_bias", "mlp_bias"):
        c.get(key)


def finish(m: Build) -> None:
    """Factors of the rotation, and the matrix of the output."""
    put_llama3(m, m.metadata[f"{m.arch}.rope.dimension_count"])
    tied(m)


ARCHITECTURES = (
    Architecture("llama", ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"), _keys, TABLE, finish),
)
