"""CogVLM: Llama with rotated halves, and a second set of matrices in every layer, which computes tokens of images.

A run without a projector reads only the matrices of text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from ikcli.graph import Graph, Node, Weight
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import dense_ffn
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    return expected.with_blocks(hp, block_shapes)


def block_shapes(hp: HParams, il: int) -> TensorSpecs:
    """Return the expected tensors of block il."""
    q, kv = hp.n_head * hp.head_dim_k, hp.n_head_kv * (hp.head_dim_k + hp.head_dim_v)
    visual = {
        "attn_qkv": (hp.n_embd, q + kv), "attn_output": (hp.n_head * hp.head_dim_v, hp.n_embd),
        "gate": (hp.n_embd, hp.n_ff), "up": (hp.n_embd, hp.n_ff), "down": (hp.n_ff, hp.n_embd),
    }  # fmt: skip
    specs = {f"blk.{il}.vis_{name}.weight": TensorSpec(shape) for name, shape in visual.items()}
    text = expected.attention_specs(hp, il, bias=False, fused=True)
    return text | expected.dense_specs(hp, il, hp.n_ff) | specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    if cfg.media is None:
        attn = blocks.attention_block(g, hp, w, cfg, neox=True)
        return blocks.transformer(g, hp, w, attn, partial(dense_ffn, g))
    table = blocks.rope_tables(g, hp, w, cfg)[0]
    routes = Routes.recorded(g)
    x = blocks.embedded(g, hp, w)
    for il in range(hp.n_layer):
        g.il = il
        layer = w.layer(il)
        cur = _attention(g, hp, cfg, blocks.normed(g, hp, x, layer, "attn_norm"), layer, table, routes)
        x = g.add(cur, x, "ffn_inp")
        cur = _feed_forward(g, blocks.normed(g, hp, x, layer, "ffn_norm"), layer, routes)
        x = g.layer_out(g.add(cur, x, "l_out"))
    g.il = -1
    return blocks.output(g, hp, w, g.select_outputs(x, "last_out"))


@dataclass(frozen=True, slots=True)
class Routes:
    """Which tokens text and image matrices compute: a route and a plan for each."""

    parts: tuple[tuple[Node, Node], ...]

    @classmethod
    def recorded(cls, g: Graph) -> Routes:
        """Record the routes of a micro-batch."""
        routes = [g.media_route(text, f"{name}_route") for text, name in ((True, "text"), (False, "visual"))]
        return cls(tuple((route, g.moe_sort(route, 1, f"{route.name}_plan")) for route in routes))

    def product(self, g: Graph, x: Node, weights: tuple[Weight, Weight], name: str) -> Node:
        """Record the product of every token with the matrix of its kind."""
        found = [
            g.moe_sum(g.mul_mat_id(_one(w), x, plan, f"{name}_{w.name.split('.')[2]}"), route, plan, f"{name}_part")
            for w, (route, plan) in zip(weights, self.parts, strict=True)
        ]
        return g.add(found[0], found[1], name)


def _one(w: Weight) -> Weight:
    """Return a matrix as that of a single expert."""
    return replace(w, shape=(*w.shape[:2], 1))


def _attention(
    g: Graph, hp: HParams, cfg: GraphConfig, x: Node, layer: LayerWeights, table: Node | None, routes: Routes
) -> Node:
    qkv = routes.product(g, x, (layer.attn_qkv, layer.vis_attn_qkv), "bqkv")
    n_q, n_k, n_v = (n * d for n, d in ((hp.n_head, hp.head_dim_k), (hp.n_head_kv, hp.head_dim_k),
                                        (hp.n_head_kv, hp.head_dim_v)))  # fmt: skip
    q, k = blocks.columns(g, qkv, 0, n_q, "Qcur_proj"), blocks.columns(g, qkv, n_q, n_k, "Kcur_proj")
    v = blocks.columns(g, qkv, n_q + n_k, n_v, "Vcur")
    q = blocks.rotated(g, hp, q, layer, table, "q", hp.n_head, True)
    k = blocks.rotated(g, hp, k, layer, table, "k", hp.n_head_kv, True)
    cur = blocks.attended(g, hp, cfg, q, (k, v), x, layer)
    return routes.product(g, cur, (layer.attn_output, layer.vis_attn_output), "kqv_out")


def _feed_forward(g: Graph, x: Node, layer: LayerWeights, routes: Routes) -> Node:
    up = routes.product(g, x, (layer.ffn_up, layer.vis_up), "ffn_up")
    gate = routes.product(g, x, (layer.ffn_gate, layer.vis_gate), "ffn_gate")
    par = g.swiglu(gate, up, "ffn_gate_par")
    return routes.product(g, par, (layer.ffn_down, layer.vis_down), "ffn_out")
