"""Mamba 2, and Granite 4 and Bamba, which have its layers beside attention."""

from __future__ import annotations

import numpy as np

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.archs.granite import GRANITE_MOE, factors
from ikcli.convert.archs.llama import finish, llama_keys
from ikcli.convert.archs.recurrent.mamba import CONTEXT, conv_taps
from ikcli.convert.pieces import Array, Matrix, Order


def _column(name: str, value: b.Value | None = None) -> b.Rule:
    """Return a rule for a vector with one number per head, stored as rows of one number."""

    def rule(m: b.Build, found: b.Found) -> None:
        n = found.shape[0]
        piece = Matrix(found.name, n, 1, 0, 1, lambda rows: rows.reshape(n, 1))
        m.add(b.place(name, found).removesuffix("!"), (piece,), (1, n), value)

    return rule


def _norm(m: b.Build, found: b.Found) -> None:
    """Store the norm as one row per group."""
    groups = int(m.metadata[f"{m.arch}.ssm.group_count"])

    def make(rows: Array) -> Array:
        return rows.reshape(groups, -1)

    width = found.shape[0] // groups
    m.add(f"blk.{found.block}.ssm_norm.weight", (Matrix(found.name, groups, width, 0, 1, make),), (width, groups))


def mixer(part: str) -> b.Table:
    """Return the table of a mixer that checkpoints call `part`."""
    return {
        f"layers.*.{part}.conv1d": conv_taps,
        f"layers.*.{part}.A_log": _column("blk.*.ssm_a!", b.minus_exp),
        f"layers.*.{part}.D": _column("blk.*.ssm_d!"),
        f"layers.*.{part}.dt_bias": b.to("blk.*.ssm_dt.bias"),
        f"layers.*.{part}.norm": _norm,
    }


def sizes(m: b.Build, conv: str, state: str, groups: str, heads: int, width: int) -> None:
    """Write the sizes of the scan; the names are those of config.json."""
    c = m.config
    m.key("ssm.conv_kernel", c.integer(conv, default=4, least=2))
    m.key("ssm.state_size", c.integer(state, default=128, least=1))
    m.key("ssm.group_count", c.integer(groups, default=1, least=1))
    m.key("ssm.inner_size", heads * width)
    m.key("ssm.time_step_rank", heads)


def no_limits(m: b.Build, key: str) -> None:
    """Refuse limits of the step; the scan has none."""
    limits = m.config.items(key)
    none = (float("inf"), "Infinity", {"__float__": "Infinity"})
    if limits is not None and (len(limits) != 2 or limits[0] or limits[1] not in none):
        raise m.config.refuse(key, "0 and infinity")


def _mamba2(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    width = c.integer("hidden_size", "d_model", least=1)
    m.key("context_length", CONTEXT)
    m.key("embedding_length", width)
    m.key("feed_forward_length", 0)
    m.key("attention.head_count", 0)
    m.key("block_count", m.n_layer)
    head = c.integer("head_dim", default=64, least=1)
    heads = c.integer("num_heads", default=2 * width // head, least=1)
    sizes(m, "conv_kernel", "state_size", "n_groups", heads, head)
    m.key("attention.layer_norm_rms_epsilon", c.number("layer_norm_epsilon", "rms_norm_eps", default=1e-5))
    no_limits(m, "time_step_limit")
    c.expect("use_bias", False)
    c.expect("use_conv_bias", True)
    c.expect("rms_norm", True)
    c.expect("norm_before_gate", False)
    c.ignore("vocab_size", "expand", "intermediate_size", "pad_vocab_size_multiple")


def _granitehybrid(m: b.Build) -> None:
    c = m.config
    kinds = c.items("layer_types")
    if kinds is None or len(kinds) != m.n_layer or set(kinds) - {"attention", "mamba"} or "mamba" not in kinds:
        raise c.refuse("layer_types", "attention or mamba for every layer, with mamba among them")
    if not c.get("num_local_experts"):
        c.ignore("intermediate_size")
    llama_keys(m)
    factors(m)
    heads = c.integer("num_key_value_heads", least=1)
    m.key("attention.head_count_kv", [heads if kind == "attention" else 0 for kind in kinds])
    rotates = c.get("position_embedding_type", default="nope") == "rope"
    c.expect("position_embedding_type", "nope", "rope")
    m.key("rope.scaling.finetuned", rotates)
    shared = c.integer("shared_intermediate_size", least=1)
    if c.get("num_local_experts"):
        k.experts(m, "num_local_experts", width=False)
        m.key("expert_shared_feed_forward_length", shared)
    else:
        m.key("feed_forward_length", shared)
        c.ignore("num_experts_per_tok", "num_local_experts")
    width = c.integer("mamba_n_heads", least=1), c.integer("mamba_d_head", least=1)
    sizes(m, "mamba_d_conv", "mamba_d_state", "mamba_n_groups", *width)
    c.expect("mamba_conv_bias", True)
    c.expect("mamba_proj_bias", False)
    c.expect("normalization_function", "rmsnorm")
    k.biases(m)
    c.ignore("mamba_expand")


def _bamba(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m)
    k.rms_eps(m)
    k.partial_rope(m, k.head_dim(m))
    attends = c.items("attn_layer_indices") or []
    heads = c.integer("num_key_value_heads", least=1)
    m.key("attention.head_count_kv", [heads if il in attends else 0 for il in range(m.n_layer)])
    m.key("rope.scaling.finetuned", True)
    sizes(
        m, "mamba_d_conv", "mamba_d_state", "mamba_n_groups", *(c.integer(f"mamba_{n}") for n in ("n_heads", "d_head"))
    )
    no_limits(m, "time_step_limit")
    c.expect("mamba_conv_bias", True)
    c.expect("mamba_proj_bias", False)
    k.biases(m)
    c.ignore("mamba_expand", "num_logits_to_keep", "z_loss_coefficient")


def _part_in_pairs(heads: str) -> b.Rule:
    """Return the rule of a matrix of queries or keys of which a part of each head rotates."""

    def order(m: b.Build, n: int) -> Order:
        rows = np.arange(n).reshape(m.config.integer(heads, least=1), -1)
        rotated = rows[:, : m.metadata[f"{m.arch}.rope.dimension_count"]]
        rotated[...] = b.in_pairs(rotated).reshape(rotated.shape)
        return rows.reshape(-1)

    return b.to(f"blk.*.attn_{'q' if heads == 'num_attention_heads' else 'k'}", order=order)


def _shared(which: str) -> b.Rule:
    """Return the rule of a matrix of the shared expert, which without experts is the feed-forward part."""

    def rule(m: b.Build, found: b.Found) -> None:
        suffix = "_shexp" if m.config.get("num_local_experts") else ""
        places = {"input": ("gate", "up"), "output": ("down",)}[which]
        b.split(*(f"blk.*.ffn_{place}{suffix}" for place in places))(m, found)

    return rule


_HARMLESS = frozenset(
    {
        "rescale_prenorm_residual", "residual_in_fp32", "time_step_floor", "time_step_max", "time_step_min",
        "time_step_rank", "chunk_size", "fused_add_norm", "time_step_init_scheme", "time_step_scale",
        "mamba_chunk_size", "init_method", "output_router_logits", "router_aux_loss_coef",
    }
)  # fmt: skip

ARCHITECTURES = (
    b.Architecture(
        "mamba2", ("Mamba2ForCausalLM",), _mamba2, mixer("mixer"), k.tied_by_default, harmless=_HARMLESS,
        strip="backbone.",
    ),
    b.Architecture(
        "granitehybrid", ("GraniteMoeHybridForCausalLM",), _granitehybrid,
        GRANITE_MOE | mixer("mamba") | {
            "layers.*.shared_mlp.input_linear": _shared("input"),
            "layers.*.shared_mlp.output_linear": _shared("output"),
        },
        finish, harmless=_HARMLESS,
    ),
    b.Architecture(
        "granitehybrid", ("BambaForCausalLM",), _bamba,
        mixer("mamba") | {
            "layers.*.self_attn.q_proj": _part_in_pairs("num_attention_heads"),
            "layers.*.self_attn.k_proj": _part_in_pairs("num_key_value_heads"),
        },
        k.tied, harmless=_HARMLESS,
    ),
)  # fmt: skip
