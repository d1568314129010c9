"""PLaMo 1 to 3."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.pieces import Floats, Order


def _plamo_heads(m: b.Build) -> tuple[int, int]:
    """Return the numbers of query and key heads; query head i uses key head i % n_kv."""
    c = m.config
    n_head, shared = c.integer("num_attention_heads", least=1), c.integer("n_shared_head", default=8, least=1)
    if n_head % shared:
        raise c.fail("n_shared_head", f"is {shared}, which does not divide {n_head} heads")
    return n_head, n_head // shared


def _grouped(rotated: bool) -> Callable[[b.Build, int], Order]:
    """Return an order that groups query heads by key head and, if `rotated`, makes rotated pairs adjacent."""

    def order(m: b.Build, n: int) -> Order:
        n_head, n_kv = _plamo_heads(m)
        if n % (2 * n_head):
            raise m.config.fail("num_attention_heads", f"is {n_head}, which does not fit {n} rows")
        heads = np.arange(n).reshape(n_head // n_kv, n_kv, n // n_head).swapaxes(0, 1).reshape(n_head, -1)
        return b.in_pairs(heads) if rotated else heads.reshape(-1)

    return order


def _plamo_keys_order(m: b.Build, n: int) -> Order:
    n_kv = _plamo_heads(m)[1]
    if n % (2 * n_kv):
        raise m.config.fail("n_shared_head", f"leaves {n_kv} key heads, which do not fit {n} rows")
    return b.in_pairs(np.arange(n).reshape(n_kv, -1))


PLAMO: b.Table = {
    "layers.layers.*.self_attn.q_proj": b.to("blk.*.attn_q", order=_grouped(True)),
    "layers.layers.*.self_attn.k_proj": b.to("blk.*.attn_k", order=_plamo_keys_order),
    "layers.layers.*.self_attn.o_proj": b.to("blk.*.attn_output", columns=_grouped(False)),
}


def _plamo(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    m.key("block_count", m.n_layer)
    m.key("context_length", c.integer("max_position_embeddings", default=4096, least=1))
    m.key("embedding_length", c.integer("hidden_size", least=1))
    m.key("feed_forward_length", c.integer("intermediate_size", least=1))
    n_head, n_kv = _plamo_heads(m)
    m.key("attention.head_count", n_head)
    m.key("attention.head_count_kv", n_kv)
    k.rope(m)
    k.rms_eps(m, 1e-6)
    for key in ("vocab_size", "num_key_value_heads"):  # the latter is the number of query heads here
        c.given(key)


def _plus(offset: float) -> Callable[[Floats], Floats]:
    """Return what adds the usual value of a norm's weights, from which the checkpoint stores differences."""
    return lambda x: x + np.float32(offset)


def _without_dimension(m: b.Build, found: b.Found) -> None:
    """Store the taps of a convolution."""
    m.plain(found, f"blk.{found.block}.ssm_conv1d.weight", (found.shape[0], found.shape[-1]))


_NORMS: b.Table = {
    "norm": b.to("output_norm", value=_plus(1)),
    "layers.layers.*.pre_mixer_norm": b.to("blk.*.attn_norm", value=_plus(1)),
    "layers.layers.*.post_mixer_norm": b.to("blk.*.post_attention_norm!", value=_plus(1 / 5)),
    "layers.layers.*.pre_mlp_norm": b.to("blk.*.ffn_norm", value=_plus(1)),
    "layers.layers.*.post_mlp_norm": b.to("blk.*.post_ffw_norm!", value=_plus(1 / 5**1.5)),
}  # names without ending are llama.cpp's
PLAMO2: b.Table = _NORMS | {
    "layers.layers.*.mixer.q_weight": b.to("blk.*.attn_q_norm.weight"),
    "layers.layers.*.mixer.k_weight": b.to("blk.*.attn_k_norm.weight"),
    "layers.layers.*.mixer.conv1d": _without_dimension,
    "layers.layers.*.mixer.dt_bias": b.to("blk.*.ssm_dt.bias"),
    "layers.layers.*.mixer.A_log": b.to("blk.*.ssm_a!", value=b.minus_exp),
    "layers.layers.*.mixer.D": b.to("blk.*.ssm_d!"),
    **{f"layers.layers.*.mixer.{x}_norm_weight": b.to(f"blk.*.ssm_{x.lower()}_norm!") for x in ("dt", "B", "C")},
}
PLAMO3: b.Table = _NORMS | {
    "layers.layers.*.mixer.q_norm": b.to("blk.*.attn_q_norm", value=_plus(1)),
    "layers.layers.*.mixer.k_norm": b.to("blk.*.attn_k_norm", value=_plus(1)),
}


def _plamo2(m: b.Build) -> None:
    c = m.config
    width, heads = c.integer("hidden_size_per_head", default=128, least=1), c.integer("mamba_num_heads", default=64)
    step, n_layer = c.integer("mamba_step", default=2, least=1), m.n_layer
    few = n_layer <= step // 2
    scans = [il != n_layer - 1 if few else il % step != step // 2 for il in range(n_layer)]
    if not c.flag("mamba_enabled", default=True):
        raise c.refuse("mamba_enabled", "true")
    for name, default in (("num_attention_heads", 32), ("num_key_value_heads", 4)):
        n = c.integer(name, default=default, least=1)
        key = "attention.head_count" + ("_kv" if "key" in name else "")
        m.key(key, [0 if scan else n for scan in scans])
    m.key("block_count", n_layer)
    m.key("vocab_size", c.integer("vocab_size", least=1))
    m.key("context_length", c.integer("max_position_embeddings", default=2048))
    m.key("embedding_length", k.embd(m))
    m.key("feed_forward_length", c.integer("intermediate_size", least=1))
    m.key("attention.key_length", width)
    m.key("attention.value_length", width)
    k.rms_eps(m, 1e-6)
    m.key("rope.freq_base", c.number("rope_theta", default=10000.0))
    m.key("ssm.state_size", c.integer("mamba_d_state", default=64))
    m.key("ssm.conv_kernel", c.integer("mamba_d_conv", default=4))
    m.key("ssm.time_step_rank", heads)
    m.key("ssm.inner_size", heads * width)
    m.key("ssm.group_count", 0)
    window, everywhere = c.integer("attention_window_size", default=2048), c.items("full_attention_idx") or []
    seen = [not scan and il not in everywhere for il, scan in enumerate(scans)]
    if window < c.integer("max_position_embeddings", default=2048) and any(seen):
        m.key("attention.sliding_window", window)  # llama.cpp has no windows here
        m.key("attention.sliding_window_pattern", seen)
    c.expect("linear_type", "normal", "fp8")  # the latter rounds products, not weights
    c.ignore(
        "head_dim",
        "sliding_window",
        "capacity_factor",
        "expert_dropout",
        "n_expert",
        "k_expert",
        "shared_intermediate_size",
    )


def _plamo3(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m)
    k.rms_eps(m, 1e-6)
    width = c.integer("head_dim", default=128, least=1)
    for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        m.key(name, width)
    m.key("vocab_size", c.integer("vocab_size", least=1))
    m.key("rope.freq_base", c.number("rope_theta", default=1000000.0))
    m.key("rope.freq_base_swa", c.number("rope_local_theta", default=10000.0))
    factor = c.get("rope_scaling_factor")
    window = c.integer("sliding_window", "window_size", default=2048)
    m.key("attention.sliding_window", window - (factor is not None))  # later models count the query itself
    m.key("attention.sliding_window_pattern", c.integer("sliding_window_pattern", default=8, least=1))
    if factor is not None and (ratio := c.number("rope_scaling_factor")) != 1:
        m.key("rope.scaling.type", "yarn")
        m.key("rope.scaling.factor", ratio)
        m.key("rope.scaling.original_context_length", c.integer("initial_context_length", least=1))
        m.key("rope.scaling.yarn_truncate", False)
    c.expect("scale_embedding", False)
    c.expect("linear_type", "normal")
    c.ignore("initial_context_length", "window_size", "interleaved_sliding_window", "layer_types")


_HARMLESS = frozenset(
    {"mamba_chunk_size", "eval_attention_n_bit", "eval_mlp_n_bit", "fp8_accum_dtype", "image_feature_size",
     "image_proj_type", "use_predefined_initial_state"}
)  # fmt: skip

ARCHITECTURES = (
    b.Architecture("plamo", ("PlamoForCausalLM",), _plamo, PLAMO, k.tied),
    b.Architecture(
        "plamo2", ("Plamo2ForCausalLM", "PLaMo2ForCausalLM"), _plamo2, PLAMO2, k.tied_by_default, harmless=_HARMLESS
    ),
    b.Architecture(
        "plamo3", ("Plamo3ForCausalLM", "PLaMo3ForCausalLM"), _plamo3, PLAMO3, k.tied_by_default, harmless=_HARMLESS
    ),
)
