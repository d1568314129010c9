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
from ikcli.convert.rope import read_rope

PAIRS: Table = {
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
    c.ignore("attention_bias", "mlp_bias")


def _mistral3(m: Build) -> None:
    """Queries beyond the original context are scaled by position in Ministral 3."""
    c = m.config
    llama_keys(m)
    no_window(m)
    found = read_rope(c)
    if found.type == "yarn":
        scale, whole = found.number("mscale", 0.0), found.number("mscale_all_dim", 0.0)
        if scale and whole:  # what the file says is taken for mscale_all_dim beside an mscale of 1
            if scale not in (1.0, whole):
                raise c.fail(
                    "rope_parameters",
                    f"has mscale {scale} and mscale_all_dim {whole}; known are equal ones, and mscale 1",
                )
            m.key("rope.scaling.yarn_log_multiplier", 1.0 if scale == whole else whole)
    if "llama_4_scaling_beta" in found.values:
        m.key("attention.temperature_scale", found.number("llama_4_scaling_beta"))


def finish(m: Build) -> None:
    """Factors of the rotation, and the matrix of the output."""
    put_llama3(m, m.metadata[f"{m.arch}.rope.dimension_count"])
    tied(m)


ARCHITECTURES = (
    Architecture("llama", ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"), _keys, TABLE, finish),
    Architecture(
        "mistral3", ("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"), _mistral3, TABLE, finish,
        r"vision_tower|multi_modal_projector|vision_encoder|patch_merger",
    ),
)  # fmt: skip
