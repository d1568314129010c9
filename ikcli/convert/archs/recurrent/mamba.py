"""Mamba and FalconMamba: a short convolution and a selective scan in every layer."""

from __future__ import annotations

import math

from ikcli.convert import build as b
from ikcli.convert import keys as k

CONTEXT = 1 << 20  # as llama.cpp writes; the model has no limit


def conv_taps(m: b.Build, found: b.Found) -> None:
    """Store the taps of the convolution without the dimension of 1."""
    name = f"blk.{found.block}.ssm_conv1d{found.suffix}"
    m.plain(found, name, (found.shape[0], found.shape[-1]) if found.suffix == ".weight" else None)


MAMBA: b.Table = {
    "layers.*.mixer.conv1d": conv_taps,
    "layers.*.mixer.A_log": b.to("blk.*.ssm_a", value=b.minus_exp),
    "layers.*.mixer.D": b.to("blk.*.ssm_d"),
}


def _keys(m: b.Build) -> None:
    """Write the keys, from the names of transformers or of the authors' package."""
    c = m.config
    own = c.get("ssm_cfg")
    if own:
        raise c.refuse("ssm_cfg", "empty")
    k.activation(m, *k.SILU)
    width = c.integer("hidden_size", "d_model", least=1)
    m.key("block_count", m.n_layer)
    m.key("context_length", CONTEXT)
    m.key("embedding_length", width)
    m.key("feed_forward_length", 0)
    m.key("attention.head_count", 0)
    m.key("ssm.conv_kernel", c.integer("conv_kernel", default=4, least=2))
    m.key("ssm.inner_size", c.integer("intermediate_size", default=2 * width, least=1))
    m.key("ssm.state_size", c.integer("state_size", default=16, least=1))
    rank = c.get("time_step_rank")
    m.key("ssm.time_step_rank", math.ceil(width / 16) if rank in (None, "auto") else c.integer("time_step_rank"))
    normed = m.config.model_type == "falcon_mamba"
    m.key("ssm.dt_b_c_rms", normed)
    eps = c.number("layer_norm_epsilon", "rms_norm_eps", default=1e-5)
    if normed and (own_eps := c.number("mixer_rms_eps", default=1e-6)) != eps:
        m.key("ssm.dt_b_c_rms_epsilon", own_eps)  # other programs use the epsilon of the layers
    m.key("attention.layer_norm_rms_epsilon", eps)
    c.expect("use_bias", False)
    c.expect("use_conv_bias", True)
    c.expect("rms_norm", True)
    c.ignore("vocab_size", "expand", "d_inner", "pad_vocab_size_multiple")


_HARMLESS = frozenset(
    {
        "rescale_prenorm_residual", "residual_in_fp32", "time_step_floor", "time_step_init_scheme", "time_step_max",
        "time_step_min", "time_step_scale", "use_mambapy", "use_associative_scan", "use_falcon_mambapy",
        "fused_add_norm",
    }
)  # fmt: skip


ARCHITECTURES = (
    b.Architecture(
        "mamba", ("MambaForCausalLM", "MambaLMHeadModel", "FalconMambaForCausalLM"), _keys, MAMBA, k.tied_by_default,
        harmless=_HARMLESS, strip="backbone.",
    ),
)  # fmt: skip
