"""The encoder of T5: RMS norms before each part, and scores of attention that gain a bias by distance, unscaled."""

from __future__ import annotations

import math

from ikcli.graph import Graph, Node
from ikcli.graph.activations import Glu
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import dense_ffn, mlp
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights

MOST = 128
"""The distance from which on all have one bias; files do not say."""


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    specs = {
        "token_embd.weight": TensorSpec((hp.n_embd, hp.n_vocab)),
        "enc.output_norm.weight": TensorSpec((hp.n_embd,)),
    }
    for il in range(hp.n_layer):
        own = expected.attention_specs(hp, il, bias=False, fused=False) | expected.dense_specs(hp, il, hp.n_ff)
        own[f"blk.{il}.ffn_gate.weight"] = TensorSpec((hp.n_embd, hp.n_ff), required=False)
        own[f"blk.{il}.attn_o.weight"] = own.pop(f"blk.{il}.attn_output.weight")
        own[f"blk.{il}.attn_rel_b.weight"] = TensorSpec((hp.n_head, hp.n_buckets), required=il == 0)
        specs |= {f"enc.{name}": spec for name, spec in own.items() if name.endswith("weight")}
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the states of the output rows."""
    x = g.embed(w["token_embd.weight"])
    biases: tuple[tuple[float, ...], ...] = ()
    for il in range(hp.n_layer):
        g.il = il
        layer = w.layer(il, "enc.")
        name = f"enc.blk.{il}.attn_rel_b.weight"
        biases = _biases(hp, w, name) if name in w else biases  # those of the first layer serve the others
        cur = blocks.normed(g, hp, x, layer, "attn_norm")
        q, k, v = (g.mul_mat(getattr(layer, f"attn_{part}"), cur, f"{part.upper()}cur") for part in "qkv")
        cur = g.mul_mat(layer.attn_o, blocks.attend_all(g, hp, q, k, v, biases), "kqv_out")
        if il == hp.n_layer - 1:
            cur, x = g.select_outputs(cur, "last_attn"), g.select_outputs(x, "last_inp")
        x = g.add(cur, x, "ffn_inp")
        x = g.layer_out(g.add(_ffn(g, blocks.normed(g, hp, x, layer, "ffn_norm"), layer), x, "l_out"))
    g.il = -1
    return blocks.norm(g, hp, x, w["enc.output_norm.weight"], "result_norm")


def _ffn(g: Graph, x: Node, layer: LayerWeights) -> Node:
    if layer.get("ffn_gate") is None:
        return mlp(g, x, layer, "relu")
    return dense_ffn(g, x, layer, act=Glu("gelu"))


def _biases(hp: HParams, w: Weights, name: str) -> tuple[tuple[float, ...], ...]:
    """Return the biases of every head for distances of -MOST to MOST."""
    buckets = [bucket(distance, hp.n_buckets) for distance in range(-MOST, MOST + 1)]
    return tuple(tuple(row) for row in w.data(name)[buckets].T.tolist())


def bucket(distance: int, n: int) -> int:
    """Return the bucket of a distance, key - query: half of n for either side, of these half for single distances."""
    half, size = n // 2, abs(distance)
    exact = half // 2
    if size >= exact:
        far = math.log(size / exact) / math.log(MOST / exact) * (half - exact)
        size = min(exact + int(far), half - 1)
    return size + (half if distance > 0 else 0)
