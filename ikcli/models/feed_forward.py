"""Record the feed-forward parts of blocks: dense, without a gate, and routed experts beside shared ones."""

from __future__ import annotations

from dataclasses import replace

from ikcli.graph import Graph, Node
from ikcli.graph.activations import SILU, Glu
from ikcli.graph.ops_experts import slot_table, slot_uses
from ikcli.models.blocks import columns, linear
from ikcli.models.config import GraphConfig
from ikcli.models.hparams import HParams, Xielu
from ikcli.models.tensors import LayerWeights
from ikcli.models.traits import CAPPED_GATES


def feed_forward(
    g: Graph,
    hp: HParams,
    cfg: GraphConfig,
    x: Node,
    layer: LayerWeights,
    act: Glu = SILU,
    dense_act: Glu | None = None,
) -> Node:
    """Record the feed-forward part of a block: dense, or routed experts beside shared ones (possibly gated).

    `act` applies to experts, and to dense and shared parts unless `dense_act` is given.
    """
    dense_act = dense_act or act
    if not hp.has_experts(layer.il):
        return dense_ffn(g, x, layer, act=dense_act)
    hp = hp.at(layer.il)
    if not hp.n_ff_shexp:
        return moe_ffn(g, hp, cfg, x, layer, "ffn_out", act)
    moe_out = moe_ffn(g, hp, cfg, x, layer, act=act)
    shared = dense_ffn(g, x, layer, "ffn_shexp", "_shexp", dense_act)
    gate = layer.get("ffn_gate_inp_shexp")
    if gate is not None:
        gates = g.mul_mat(replace(gate, shape=(hp.n_embd, 1)), x, "shared_expert_gate")
        shared = g.gate(shared, gates, "ffn_shexp_gated")
    return g.add(moe_out, shared, "ffn_out")


def limited_feed_forward(g: Graph, hp: HParams, cfg: GraphConfig, x: Node, layer: LayerWeights) -> Node:
    """Record `feed_forward` with the layer's limits for its experts and for the parts beside them."""
    own, kind = hp.at(layer.il), "silu_of_capped" if hp.arch in CAPPED_GATES else "silu"
    limits = own.swiglu_limit, own.swiglu_limit_shared
    return feed_forward(g, hp, cfg, x, layer, *(Glu(kind, limit) if limit else SILU for limit in limits))


def dense_ffn(g: Graph, x: Node, layer: LayerWeights, name: str = "ffn_out", suffix: str = "", act: Glu = SILU) -> Node:
    """Record down(silu(gate x) * up x), or `act`; suffix "_shexp" for the shared expert.

    Gate and up may be one matrix, twice as high.
    """
    up_w, down_w = getattr(layer, f"ffn_up{suffix}"), getattr(layer, f"ffn_down{suffix}")
    if up_w.ne1 == 2 * (n := down_w.ne0):
        gate_w, up_w = up_w.rows(0, n), up_w.rows(n, n)
    else:
        gate_w = getattr(layer, f"ffn_gate{suffix}")
    up = linear(g, up_w, layer.get(f"ffn_up{suffix}_bias"), x, f"ffn_up{suffix}")
    gate = linear(g, gate_w, layer.get(f"ffn_gate{suffix}_bias"), x, f"ffn_gate{suffix}")
    par = g.swiglu(gate, up, f"ffn_gate_par{suffix}", act)
    return linear(g, down_w, layer.get(f"ffn_down{suffix}_bias"), par, name)


def fused_dense_ffn(
    g: Graph, hp: HParams, x: Node, layer: LayerWeights, name: str = "ffn_out", act: Glu = SILU
) -> Node:
    """Record `dense_ffn` with one matrix for gate and up."""
    n_ff, bias = hp.at(layer.il).n_ff, layer.get("ffn_up_bias")
    if bias is not None:
        both = linear(g, layer.ffn_up, bias, x, "ffn_gate_up")
        gate, up = columns(g, both, 0, n_ff, "ffn_gate"), columns(g, both, n_ff, n_ff, "ffn_up")
    else:
        gate = g.mul_mat(layer.ffn_up.rows(0, n_ff), x, "ffn_gate")
        up = g.mul_mat(layer.ffn_up.rows(n_ff, n_ff), x, "ffn_up")
    return linear(g, layer.ffn_down, layer.get("ffn_down_bias"), g.swiglu(gate, up, "ffn_gate_par", act), name)


def mlp(
    g: Graph,
    x: Node,
    layer: LayerWeights,
    kind: str = "gelu",
    name: str = "ffn_out",
    suffix: str = "",
    xielu: Xielu | None = None,
) -> Node:
    """Record a feed-forward part without gate: down(act(up x)); suffix "_shexp" for the shared expert.

    With `xielu` the activation is that one, in place of `kind`.
    """
    up = linear(g, getattr(layer, f"ffn_up{suffix}"), layer.get(f"ffn_up{suffix}_bias"), x, f"ffn_up{suffix}")
    if xielu is not None:
        act = g.scale(g.activate(up, "relu_sqr", "ffn_squared"), xielu.squared, "ffn_squared_scaled")
        rest = g.scale(g.activate(up, "elu_rest", "ffn_rest"), xielu.exponential, "ffn_rest_scaled")
        act = g.add(g.scale(up, xielu.linear, "ffn_linear"), g.add(rest, act, "ffn_curved"), "ffn_xielu")
    else:
        act = g.activate(up, kind, f"ffn_{kind}{suffix}")
    return linear(g, getattr(layer, f"ffn_down{suffix}"), layer.get(f"ffn_down{suffix}_bias"), act, name)


def moe_ffn(
    g: Graph,
    hp: HParams,
    cfg: GraphConfig,
    x: Node,
    layer: LayerWeights,
    name: str = "ffn_moe_out",
    act: Glu = SILU,
    logits: Node | None = None,
) -> Node:
    """Record routed experts: choose by `logits` (default: of x), group tokens by expert, compute, add up weighted."""
    if logits is None:
        logits = linear(g, layer.ffn_gate_inp, layer.get("ffn_gate_inp_bias"), x, "ffn_moe_logits")
    table = layer.get("ffn_gate_tid2eid")
    if table is not None:
        norm, scale = hp.expert_weights_norm, hp.expert_weights_scale
        route = g.hash_route(logits, table, "ffn_moe_topk", gating=hp.expert_gating, norm=norm, scale=scale)
        return _routed(g, hp, cfg, x, layer, route, act, name)
    # Group-limited routing belongs to sigmoid gating (DeepSeek-V3); older files select over all experts.
    grouped = hp.expert_gating == "sigmoid"
    route = g.moe_route(
        logits,
        layer.get("exp_probs_b_bias"),
        "ffn_moe_topk",
        n_used=hp.n_expert_used,
        gating=hp.expert_gating,
        norm=hp.expert_weights_norm,
        scale=hp.expert_weights_scale,
        n_group=hp.n_expert_groups if grouped else 1,
        n_group_used=hp.n_expert_groups_used if grouped else 1,
        ser=cfg.ser,
    )
    out = _routed(g, hp, cfg, x, layer, route, act, "ffn_moe_alone" if hp.experts_per_group else name)
    if not hp.experts_per_group:
        return out
    groups, n_group = g.moe_groups(route, hp.experts_per_group, "ffn_moe_groups"), hp.n_expert // hp.experts_per_group
    further = _experts(g, hp, cfg, x, layer.of_groups(), groups, n_group, act, "ffn_moe_further")
    return g.add(out, g.scale(further, hp.expert_group_scale, "ffn_moe_further_scaled"), name)


def _routed(
    g: Graph, hp: HParams, cfg: GraphConfig, x: Node, layer: LayerWeights, route: Node, act: Glu, name: str
) -> Node:
    """Record the weighted sum of the experts of a route."""
    n_slots = cfg.slots_of(g.il)
    if not n_slots:
        return _experts(g, hp, cfg, x, layer, route, hp.n_expert, act, name)
    # A GPU computes experts in its slots while the CPU computes the others; their sums are added in this order.
    table = slot_table(g.il, hp.n_expert)
    hits = g.moe_resident(route, table, n_slots, "ffn_moe_hits")
    misses = g.moe_resident(route, table, 0, "ffn_moe_misses", slot_uses(g.il, hp.n_expert))
    on_gpu = _experts(g, hp, cfg, x, layer.in_slots(n_slots), hits, n_slots, act, f"{name}_hits")
    in_ram = _experts(g, hp, cfg, x, layer, misses, hp.n_expert, act, f"{name}_misses")
    return g.add(on_gpu, in_ram, name)


def _experts(
    g: Graph,
    hp: HParams,
    cfg: GraphConfig,
    x: Node,
    layer: LayerWeights,
    route: Node,
    n_expert: int,
    act: Glu,
    name: str,
) -> Node:
    """Record the weighted sum of the experts that `route` chooses from `n_expert`."""
    plan = g.moe_sort(route, n_expert, "ffn_moe_plan")
    par = _experts_up_gate(g, cfg, x, layer, plan, act, route if hp.weighs_inputs else None)
    experts = g.mul_mat_id(layer.ffn_down_exps, par, plan, "ffn_moe_down", sorted_in=True)
    experts = _expert_bias(g, layer, "down", experts, plan)
    return g.moe_sum(experts, route, plan, name, weighted=not hp.weighs_inputs)


def _experts_up_gate(
    g: Graph, cfg: GraphConfig, x: Node, layer: LayerWeights, plan: Node, act: Glu, weights: Node | None
) -> Node:
    """Return the input of the last matrix of every chosen expert; `weights`, if given, scale x by expert."""
    up, gate = layer.get("ffn_up_exps"), layer.get("ffn_gate_exps")
    if up is not None and gate is None and layer.get("ffn_gate_up_exps") is None:  # no gate
        return g.activate(g.mul_mat_id(up, x, plan, "ffn_moe_up"), act.kind, f"ffn_moe_{act.kind}")
    if up is None or gate is None:
        both = g.mul_mat_id(layer.ffn_gate_up_exps, x, plan, "ffn_moe_gate_up")
        both = _expert_bias(g, layer, "gate_up", both, plan)
        n_ff = both.cols // 2
        gates, ups = columns(g, both, 0, n_ff, "ffn_moe_gate"), columns(g, both, n_ff, n_ff, "ffn_moe_up")
    elif cfg.fmoe and up.type == gate.type and weights is None and layer.get("ffn_up_exps_bias") is None:
        return g.moe_up_gate(up, gate, x, plan, "ffn_moe_gate_par", act)
    else:
        ups = _expert_bias(g, layer, "up", g.mul_mat_id(up, x, plan, "ffn_moe_up"), plan)
        gates = _expert_bias(g, layer, "gate", g.mul_mat_id(gate, x, plan, "ffn_moe_gate"), plan)
    if weights is not None:  # these products are linear
        ups = g.scale_id(ups, weights, plan, "ffn_moe_up_weighted")
        gates = g.scale_id(gates, weights, plan, "ffn_moe_gate_weighted")
    return g.swiglu(gates, ups, "ffn_moe_gate_par", act)


def _expert_bias(g: Graph, layer: LayerWeights, which: str, x: Node, plan: Node) -> Node:
    """Add the bias of their experts to sorted rows, if there is one."""
    bias = layer.get(f"ffn_{which}_exps_bias")
    return x if bias is None else g.add_id(x, bias, plan, f"ffn_moe_{which}_biased")
