"""Hunyuan, dense and with experts."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.rope import read_rope
from ikcli.errors import UnsupportedError


def _one(m: b.Build, key: str, default: int | None = None) -> int:
    """Return a number that some configurations list once per layer; refuse layers that differ."""
    value = m.config.get(key)
    if isinstance(value, list):
        if not value or any(v != value[0] for v in value) or not isinstance(value[0], int):
            raise m.config.refuse(key, "the same number for all layers")
        return int(value[0])
    return m.config.integer(key, default=default, least=1)


def _hunyuan(m: b.Build) -> None:
    """Write the keys of both kinds."""
    c = m.config
    k.base(m)
    found = read_rope(c)
    theta = found.theta
    if found.type == "dynamic":  # alpha enlarges the base
        dim = c.integer("head_dim", default=c.integer("hidden_size") // c.integer("num_attention_heads"))
        theta *= found.number("alpha") ** (dim / (dim - 2))
        if found.values.get("factor", 1.0) != 1.0:
            raise c.refuse("rope_scaling", "alpha with factor 1")
    elif found.type != "default":
        raise UnsupportedError(f"{c.path}: rope_type {found.type} is not known for {m.arch}")
    m.key("rope.freq_base", theta)
    c.expect("use_qk_norm", True)
    c.expect("use_cla", False)
    c.ignore("cla_share_factor", "attention_head_dim")


def _hunyuan_moe(m: b.Build) -> None:
    c = m.config
    _hunyuan(m)
    m.key("expert_count", c.integer("num_experts", least=1))
    m.key("expert_used_count", _one(m, "moe_topk"))
    m.key("expert_shared_count", _one(m, "num_shared_expert", 1))
    width = _one(m, "moe_intermediate_size", c.integer("intermediate_size"))
    m.key("expert_feed_forward_length", width)
    m.key("expert_shared_feed_forward_length", c.integer("intermediate_size"))
    c.expect("use_mixed_mlp_moe", True)
    c.expect("norm_topk_prob", True)
    c.ignore("moe_drop_tokens", "moe_random_routing_dropped_token")


ARCHITECTURES = (
    b.Architecture("hunyuan-moe", ("HunYuanMoEV1ForCausalLM", "HunYuanForCausalLM"), _hunyuan_moe, finish=k.tied),
    b.Architecture("hunyuan-dense", ("HunYuanDenseV1ForCausalLM",), _hunyuan, finish=k.tied),
)
