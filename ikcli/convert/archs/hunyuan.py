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


def _hy3(m: b.Build) -> None:
    c = m.config
    k.base(m)
    k.rope(m)
    m.key("vocab_size", c.integer("vocab_size", least=1))
    k.experts(m, "num_experts", width=False)
    width = c.integer("moe_intermediate_size", "expert_hidden_dim", least=1)
    m.key("expert_feed_forward_length", width)
    shared = c.integer("num_shared_experts", default=1)
    m.key("expert_shared_count", shared)
    m.key("expert_shared_feed_forward_length", shared * width)
    m.key("leading_dense_block_count", k.dense_lead(m, usual=1))
    m.key("expert_weights_norm", c.flag("route_norm", default=True))
    m.key("expert_weights_scale", c.number("router_scaling_factor", default=1.0))
    m.key("expert_gating_func", 2)
    for key in ("qk_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"):
        c.expect(key, True)
    c.ignore("expert_hidden_dim", "num_nextn_predict_layers")


HY3: b.Table = {
    "layers.*.post_attention_layernorm": "blk.*.ffn_norm",
    "layers.*.mlp.gate": "blk.*.ffn_gate_inp",
    "layers.*.mlp.router.gate": "blk.*.ffn_gate_inp",
    "layers.*.mlp.expert_bias": b.to("blk.*.exp_probs_b.bias"),
    "layers.*.mlp.e_score_correction.bias": "blk.*.exp_probs_b.bias",
    **{f"layers.*.mlp.{part}.{x}_proj": f"blk.*.ffn_{x}_shexp" for part in ("shared_mlp", "shared_experts")
       for x in ("gate", "up", "down")},
}  # fmt: skip

ARCHITECTURES = (
    b.Architecture("hunyuan-moe", ("HunYuanMoEV1ForCausalLM", "HunYuanForCausalLM"), _hunyuan_moe, finish=k.tied),
    b.Architecture("hunyuan-dense", ("HunYuanDenseV1ForCausalLM",), _hunyuan, finish=k.tied),
    b.Architecture(
        "hy_v3",
        ("HYV3ForCausalLM",),
        _hy3,
        HY3,
        k.tied,
        names="glm4moe",
        further=False,
        harmless=frozenset(
            {"enable_moe_fp32_combine", "enable_attention_fp32_softmax", "enable_lm_head_fp32", "use_grouped_mm"}
        ),
    ),
)
