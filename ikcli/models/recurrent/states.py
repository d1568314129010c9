"""Read the keys of recurrent layers: which layers they are, and their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ikcli.errors import UnsupportedError
from ikcli.models.keys import HasShape, Keys, by_layer, short

DELTA_NET = ("qwen35", "qwen35moe", "qwen3next", "qwen4exp")  # a decay per head
KDA = ("bailingmoe3", "kimi-k3", "kimi-linear")  # a decay per column of a key; the other layers have MLA
SCAN = ("mamba", "mamba2")  # a scan in every layer, and nothing else
MAMBA2 = (
    "falcon-h1",
    "granitehybrid",
    "mamba2",
    "nemotron_h",
    "nemotron_h_moe",
    "plamo2",
)  # layers with Mamba 2's scan
LINEAR = ("minimax-01",)  # layers with linear attention
SHORT_CONV = ("lfm2", "lfm2moe")  # layers of a gated convolution and nothing else
HYBRID = ("granitehybrid", "jamba", "nemotron_h", "nemotron_h_moe", "plamo2", *SHORT_CONV)
"""Layers without key heads are recurrent (in Nemotron-H those with a feed-forward part are not)."""
MAX_TAPS, MAX_COLUMNS, MAX_WIDTH = 16, 256, 1 << 20


def read_recurrent(keys: Keys, values: dict[str, Any], tensors: Mapping[str, HasShape]) -> dict[str, Any]:
    """Return the attributes of recurrent layers, by field of `HParams`."""
    if keys.arch in KDA:
        return _kda(keys, values, tensors)
    if keys.arch in MAMBA2:
        return _mamba2(keys, values)
    if keys.arch in SHORT_CONV:
        return _short_conv(keys, values)
    if keys.arch in LINEAR:
        return _linear(keys, values)
    if keys.arch == "jamba":
        found = _scan(keys, values["n_layer"], values["eps"])
        return found | {"recurrent_layers": _without_key_heads(keys, values), "n_rot": 0}
    if keys.arch in SCAN:
        return _scan(keys, values["n_layer"], values["eps"])
    return _delta_net(keys, values["n_layer"]) if keys.arch in DELTA_NET else {}


def _delta_net(keys: Keys, n_layer: int) -> dict[str, Any]:
    """Return Qwen's recurrent layers: those of a list, or all but every n-th."""
    sizes = {
        "ssm_d_conv": keys.integer("ssm.conv_kernel", least=2, most=MAX_TAPS),
        "ssm_d_state": keys.integer("ssm.state_size", least=1),
        "ssm_n_group": keys.integer("ssm.group_count", least=1),
        "ssm_dt_rank": keys.integer("ssm.time_step_rank", least=1),
        "ssm_d_inner": keys.integer("ssm.inner_size", least=1),
    }
    _check_heads(keys, sizes)
    return sizes | {"recurrent_layers": _listed(keys, n_layer, 4)}


def _listed(keys: Keys, n_layer: int, interval: int) -> frozenset[int]:
    """Return the layers of a list, or all but every `interval`-th, unless the file has another interval."""
    interval = keys.integer("full_attention_interval", interval, least=1)
    listed = _list(keys, "attention.recurrent_layers", n_layer) if "attention.recurrent_layers" in keys else None
    recurrent = listed or [(il + 1) % interval != 0 for il in range(n_layer)]
    return frozenset(il for il in range(n_layer) if recurrent[il])


def _linear(keys: Keys, values: dict[str, Any]) -> dict[str, Any]:
    """Return which layers of MiniMax-01 have linear attention, their sizes, and the factor of residuals."""
    width, n_head = values["head_dim_k"], values["n_head"]
    if width != values["head_dim_v"] or width % 16 or width > MAX_COLUMNS:
        raise UnsupportedError(
            f"{keys.source}: heads have {width} and {values['head_dim_v']} columns; linear attention takes equal "
            f"multiples of 16 up to {MAX_COLUMNS}"
        )
    return {
        "ssm_d_conv": 1,  # no convolution
        "ssm_d_state": width,
        "ssm_n_group": n_head,
        "ssm_dt_rank": n_head,
        "ssm_d_inner": n_head * width,
        "recurrent_layers": _listed(keys, values["n_layer"], 8),
        "residual_scale": keys.number("residual_scale", most=1e6),
    }


def _kda(keys: Keys, values: dict[str, Any], tensors: Mapping[str, HasShape]) -> dict[str, Any]:
    """Return Kimi's recurrent layers: those without key heads."""
    n_layer, n_head, width = values["n_layer"], values["n_head"], keys.integer("kda.head_dim", least=1)
    key_heads = _list(keys, "attention.head_count_kv", n_layer)
    found: dict[str, Any] = {
        "ssm_d_conv": keys.integer("ssm.conv_kernel", least=2, most=MAX_TAPS),
        "ssm_d_state": width,
        "ssm_n_group": n_head,
        "ssm_dt_rank": n_head,
        "ssm_d_inner": n_head * width,
        "recurrent_layers": frozenset(il for il in range(n_layer) if key_heads[il] == 0),
    }
    _check_heads(keys, found)
    if keys.arch == "kimi-k3":
        return found | _kimi_k3(keys)
    return found | (_ling(keys, values, tensors) if keys.arch == "bailingmoe3" else {})


def _scan(keys: Keys, n_layer: int, eps: float) -> dict[str, Any]:
    width, n_state = keys.integer("ssm.inner_size", least=1), keys.integer("ssm.state_size", least=1)
    for key, size, most in (("inner_size", width, MAX_WIDTH), ("state_size", n_state, MAX_COLUMNS)):
        if size % 16 or size > most:
            raise UnsupportedError(
                f"{keys.source}: {keys.name(f'ssm.{key}')} is {size}; only multiples of 16 up to {most} are supported"
            )
    return {
        "ssm_d_conv": keys.integer("ssm.conv_kernel", least=2, most=MAX_TAPS),
        "ssm_d_state": n_state,
        "ssm_dt_rank": keys.integer("ssm.time_step_rank", least=1),
        "ssm_d_inner": width,
        "ssm_norm_eps": keys.number("ssm.dt_b_c_rms_epsilon", eps) if keys.raw("ssm.dt_b_c_rms", False) else 0.0,
        "recurrent_layers": frozenset(range(n_layer)),
    }


def _mamba2(keys: Keys, values: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of Mamba 2's layers, and which they are; most models with them do not rotate."""
    sizes: dict[str, Any] = {
        "ssm_d_conv": keys.integer("ssm.conv_kernel", least=2, most=MAX_TAPS),
        "ssm_d_state": keys.integer("ssm.state_size", least=1),
        "ssm_n_group": keys.integer("ssm.group_count", 1) or 1,
        "ssm_dt_rank": keys.integer("ssm.time_step_rank", least=1),
        "ssm_d_inner": keys.integer("ssm.inner_size", least=1),
    }
    _check_heads(keys, sizes)
    if keys.arch in ("mamba2", "falcon-h1"):
        return sizes | {"recurrent_layers": frozenset(range(values["n_layer"]))}
    rotates = keys.arch == "plamo2" or (keys.arch == "granitehybrid" and keys.raw("rope.scaling.finetuned", True))
    return sizes | {"recurrent_layers": _without_key_heads(keys, values)} | ({} if rotates else {"n_rot": 0})


def _short_conv(keys: Keys, values: dict[str, Any]) -> dict[str, Any]:
    if values["n_embd"] % 16:
        raise UnsupportedError(
            f"{keys.source}: {keys.name('embedding_length')} is {values['n_embd']}; only multiples of 16 are supported"
        )
    taps = keys.integer("shortconv.l_cache", least=2, most=MAX_TAPS)
    return {"ssm_d_conv": taps, "recurrent_layers": _without_key_heads(keys, values)}


def _without_key_heads(keys: Keys, values: dict[str, Any]) -> frozenset[int]:
    """Return the layers that have neither key heads nor, in Nemotron-H, a feed-forward part instead."""
    n_layer = values["n_layer"]
    heads = by_layer(keys.per_layer("attention.head_count_kv", n_layer=n_layer), n_layer)
    alone = keys.arch.startswith("nemotron_h")
    n_ff = by_layer(values["n_ff"], n_layer)
    return frozenset(il for il in range(n_layer) if heads[il] == 0 and not (alone and n_ff[il]))


def _ling(keys: Keys, values: dict[str, Any], tensors: Mapping[str, HasShape]) -> dict[str, Any]:
    """Return bailingmoe3's own keys; some files have a low-rank query and do not say so."""
    if not keys.raw("kda.safe_gate", True):
        raise UnsupportedError(f"{keys.source}: {keys.name('kda.safe_gate')} is false; only the safe gate is supported")
    bound = _lower_bound(keys)
    q_norms = [t for name, t in tensors.items() if name.endswith("attn_q_a_norm.weight")]
    rank = values["q_lora_rank"] or (q_norms[0].shape[0] if q_norms else 0)
    shared = keys.integer("expert_shared_feed_forward_length", values["n_ff_exp"]) * values["n_expert_shared"]
    return {"kda_lower_bound": bound, "q_lora_rank": rank, "n_ff_shexp": shared}


def _lower_bound(keys: Keys) -> float:
    bound = keys.number("kda.gate_lower_bound", most=1e3)
    if bound >= 0:
        raise keys.fail("kda.gate_lower_bound", f"is {bound}; it must be below 0")
    return bound


def _kimi_k3(keys: Keys) -> dict[str, Any]:
    """Return Kimi K3's own keys: of the residual, of its activation, and the width of experts."""
    beta = keys.number("activation.situ_beta", most=1e6)
    if beta <= 0:
        raise keys.fail("activation.situ_beta", f"is {beta}; it must be positive")
    return {
        "kda_lower_bound": _lower_bound(keys) if "kda.gate_lower_bound" in keys else 0.0,
        "residual_block": keys.integer("attn_res.block_size", least=1),
        "situ_beta": beta,
        "situ_linear_beta": max(keys.number("activation.situ_linear_beta", most=1e6), 0.0),
        "n_embd_exp": keys.integer("expert_latent_length", 0),
    }


def _list(keys: Keys, key: str, n_layer: int) -> tuple[Any, ...]:
    items = keys.items(key, n_layer)
    if items is None:
        raise keys.fail(key, f"should be a list of {n_layer} values, but is {short(keys.raw(key, None))}")
    return items


def _check_heads(keys: Keys, sizes: dict[str, Any]) -> None:
    heads, key_heads = sizes["ssm_dt_rank"], sizes["ssm_n_group"]
    if heads % key_heads:
        raise keys.fail("ssm.group_count", f"is {key_heads}, which does not divide the {heads} heads of values")
    if sizes["ssm_d_inner"] % heads:
        raise keys.fail("ssm.inner_size", f"is {sizes['ssm_d_inner']}, no multiple of {heads} heads")
    widths = (sizes["ssm_d_state"], sizes["ssm_d_inner"] // heads)
    if any(width % 16 or width > MAX_COLUMNS for width in widths):
        raise UnsupportedError(
            f"{keys.source}: heads of recurrent layers have {widths[0]} and {widths[1]} columns; only multiples of 16 "
            f"up to {MAX_COLUMNS} are supported"
        )
