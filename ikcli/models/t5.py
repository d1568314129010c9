"""T5: an encoder, alone or beside a decoder. RMS norms, and scores that gain a bias by distance, unscaled.

The graph of a whole model is that of its decoder. `build_encoder` records what comes before: it leaves keys and
values of the encoder's states in caches, one pair per layer of the decoder, so that they are computed once per text.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ikcli.graph import Graph, HeadSlice, Node
from ikcli.graph.activations import Glu
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import dense_ffn, mlp
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights

MOST = 128
"""The distance from which on all have one bias; files do not say."""

Biases = tuple[tuple[float, ...], ...]
_CROSS = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_o")


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    specs = {
        "token_embd.weight": TensorSpec((hp.n_embd, hp.n_vocab)),
        "enc.output_norm.weight": TensorSpec((hp.n_embd,)),
    }
    for il in range(hp.n_layer):
        specs |= {f"enc.{name}": spec for name, spec in _block(hp, il).items()}
    if not hp.n_layer_dec:
        return specs
    specs["dec.output_norm.weight"] = TensorSpec((hp.n_embd,))
    specs["output.weight"] = TensorSpec((hp.n_embd, hp.n_vocab), required=False)
    for il in range(hp.n_layer_dec):
        own = _block(hp, il)
        own |= {f"blk.{il}.cross_{part}.weight": own[f"blk.{il}.{part}.weight"] for part in _CROSS}
        specs |= {f"dec.{name}": spec for name, spec in own.items()}
    return specs


def _block(hp: HParams, il: int) -> TensorSpecs:
    own = expected.attention_specs(hp, il, bias=False, fused=False) | expected.dense_specs(hp, il, hp.n_ff)
    own[f"blk.{il}.ffn_gate.weight"] = TensorSpec((hp.n_embd, hp.n_ff), required=False)
    own[f"blk.{il}.attn_o.weight"] = own.pop(f"blk.{il}.attn_output.weight")
    own[f"blk.{il}.attn_rel_b.weight"] = TensorSpec((hp.n_head, hp.n_buckets), required=il == 0)
    return {name: spec for name, spec in own.items() if name.endswith("weight")}


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows, or the states of an encoder alone."""
    if not hp.n_layer_dec:
        return _encoder(g, hp, w)
    x = g.embed(w["token_embd.weight"])
    biases: Biases = ()
    for il in range(hp.n_layer_dec):
        g.il = il
        layer = w.layer(il, "dec.")
        biases = _biases(hp, w, f"dec.blk.{il}.attn_rel_b.weight", bucket_before) or biases
        cur = blocks.normed(g, hp, x, layer, "attn_norm")
        q, k, v = (g.mul_mat(getattr(layer, f"attn_{part}"), cur, f"{part.upper()}cur") for part in "qkv")
        _store(g, hp, cfg, "", k, v)
        x = g.add(g.mul_mat(layer.attn_o, _attend(g, hp, cfg, "", q, biases), "kqv_out"), x, "cross_inp")
        q = g.mul_mat(layer.cross_attn_q, blocks.normed(g, hp, x, layer, "cross_attn_norm"), "Qcur_cross")
        cur = g.mul_mat(layer.cross_attn_o, _attend(g, hp, cfg, "_cross", q), "kqv_out_cross")
        if il == hp.n_layer_dec - 1:
            cur, x = g.select_outputs(cur, "last_attn"), g.select_outputs(x, "last_inp")
        x = _second_half(g, hp, cur, x, layer)
    g.il = -1
    x = blocks.norm(g, hp, x, w["dec.output_norm.weight"], "result_norm")
    head = w.get("output.weight")
    if head is None:  # a head that is the embeddings reads smaller states
        x, head = g.scale(x, hp.n_embd**-0.5, "result_scaled"), w["token_embd.weight"]
    return g.mul_mat(head, x, "result_output")


def build_encoder(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the encoder of a whole model, whose states every layer of the decoder stores as keys and values."""
    states = _encoder(g, hp, w, select=False)
    for il in range(hp.n_layer_dec):
        g.il = il
        layer = w.layer(il, "dec.")
        k, v = (g.mul_mat(getattr(layer, f"cross_attn_{part}"), states, f"{part.upper()}cur_cross") for part in "kv")
        _store(g, hp, cfg, "_cross", k, v)
    g.il = -1
    return g.select_outputs(states, "result_encoded")


def _encoder(g: Graph, hp: HParams, w: Weights, *, select: bool = True) -> Node:
    """Record the encoder and return its states, of the output rows or (without `select`) of all."""
    x = g.embed(w["token_embd.weight"])
    biases: Biases = ()
    for il in range(hp.n_layer):
        g.il = il
        layer = w.layer(il, "enc.")
        biases = _biases(hp, w, f"enc.blk.{il}.attn_rel_b.weight", bucket) or biases
        cur = blocks.normed(g, hp, x, layer, "attn_norm")
        q, k, v = (g.mul_mat(getattr(layer, f"attn_{part}"), cur, f"{part.upper()}cur") for part in "qkv")
        cur = g.mul_mat(layer.attn_o, blocks.attend_all(g, hp, q, k, v, biases), "kqv_out")
        if select and il == hp.n_layer - 1:
            cur, x = g.select_outputs(cur, "last_attn"), g.select_outputs(x, "last_inp")
        x = _second_half(g, hp, cur, x, layer)
    g.il = -1
    return blocks.norm(g, hp, x, w["enc.output_norm.weight"], "result_norm")


def _second_half(g: Graph, hp: HParams, cur: Node, x: Node, layer: LayerWeights) -> Node:
    x = g.add(cur, x, "ffn_inp")
    normed = blocks.normed(g, hp, x, layer, "ffn_norm")
    gated = layer.get("ffn_gate") is not None
    cur = dense_ffn(g, normed, layer, act=Glu("gelu")) if gated else mlp(g, normed, layer, "relu")
    return g.layer_out(g.add(cur, x, "l_out"))


def _store(g: Graph, hp: HParams, cfg: GraphConfig, kind: str, k: Node, v: Node) -> None:
    """Store keys and values in the caches of this kind."""
    d, d_v, n = hp.head_dim_k, hp.head_dim_v, hp.n_head_kv
    k = g.hadamard(k, n, d, f"Kcur_hadamard{kind}") if cfg.k_hadamard else k
    v = g.hadamard(v, n, d_v, f"Vcur_hadamard{kind}") if cfg.v_hadamard else v
    g.kv_store(g.cache(f"k{kind}", n * d, cfg.type_k), k, f"k_cache_view{kind}")
    g.kv_store(g.cache(f"v{kind}", n * d_v, cfg.type_v), v, f"v_cache_view{kind}")


def _attend(g: Graph, hp: HParams, cfg: GraphConfig, kind: str, q: Node, biases: Biases = ()) -> Node:
    """Attend to the caches of this kind; without biases to all that the encoder stored."""
    d, d_v, n = hp.head_dim_k, hp.head_dim_v, hp.n_head_kv
    q = g.hadamard(q, hp.n_head, d, f"Qcur_hadamard{kind}") if cfg.k_hadamard else q
    kqv = g.attention(
        [HeadSlice(q, 0, d, d)],
        [HeadSlice(g.cache(f"k{kind}", n * d, cfg.type_k), 0, d, d)],
        HeadSlice(g.cache(f"v{kind}", n * d_v, cfg.type_v), 0, d_v, d_v),
        f"kqv{kind}",
        n_head=hp.n_head,
        n_head_kv=n,
        scale=hp.attention_scale,
        flash=True,  # scores that are stored have no biases
        wide=True,  # scores without a scale are large, and so are errors of rounded queries
        biases=biases,
        cross=not biases,
    )
    return g.hadamard(kqv, hp.n_head, d_v, f"kqv_hadamard{kind}") if cfg.v_hadamard else kqv


def _biases(hp: HParams, w: Weights, name: str, bucket_of: Callable[[int, int], int]) -> Biases:
    """Return the biases of every head for distances of -MOST to MOST; () where the layer has those of the first one."""
    if name not in w:
        return ()
    buckets = [bucket_of(distance, hp.n_buckets) for distance in range(-MOST, MOST + 1)]
    return tuple(tuple(row) for row in w.data(name)[buckets].T.tolist())


def bucket(distance: int, n: int) -> int:
    """Return the bucket of a distance, key - query: half of n for either side, of these half for single distances."""
    return _one_side(abs(distance), n // 2) + (n // 2 if distance > 0 else 0)


def bucket_before(distance: int, n: int) -> int:
    """Return the bucket of a distance where all of them serve keys up to the query's position."""
    return _one_side(max(-distance, 0), n)


def _one_side(size: int, n: int) -> int:
    exact = n // 2
    if size < exact:
        return size
    return min(exact + int(math.log(size / exact) / math.log(MOST / exact) * (n - exact)), n - 1)
