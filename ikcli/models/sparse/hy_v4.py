"""Hy 4: latent attention to positions that an indexer of the layer, or of one before it, chose; a residual of streams.

A layer reads a weighted sum of the streams and adds shares of its result to them, which go on unmixed
(`graph/ops_streams.py`). Attention is that of DeepSeek V3.2 with a sink per head, and what it returns is gated before
the output projection. Routed experts cap their gates before the activation. Corresponds to `llama_model_hy_v4` of
llama.cpp.
"""

from __future__ import annotations

from ikcli.graph import Graph, Node, Weight
from ikcli.graph.ops_streams import StreamMix, StreamSum, StreamWeights
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.deepseek2 import attention, attention_specs, rope_table
from ikcli.models.feed_forward import limited_feed_forward
from ikcli.models.hparams import HParams
from ikcli.models.sparse import indexer
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file; `mla.derive` decides which of kv_b, k_b, v_b must be there."""
    return expected.with_blocks(hp, block_shapes) | _stream_specs(hp, "output_hc", 1)


def _stream_specs(hp: HParams, prefix: str, parts: int) -> TensorSpecs:
    n = hp.n_stream
    return {
        f"{prefix}_fn.weight": TensorSpec((n * hp.n_embd, parts * n)),
        f"{prefix}_base.weight": TensorSpec((parts * n,)),
        f"{prefix}_scale.weight": TensorSpec((parts,)),
    }


def block_shapes(hp: HParams, il: int) -> TensorSpecs:
    """Return the expected tensors of block il."""
    own = attention_specs(hp) | indexer.specs(hp, il) | {
        "attn_gate.weight": TensorSpec((hp.n_embd, hp.n_head * hp.head_dim_v)),
        "attn_sinks.weight": TensorSpec((hp.n_head,)),
    }  # fmt: skip
    own |= _stream_specs(hp, "hc_attn", 2) | _stream_specs(hp, "hc_ffn", 2)
    return expected.in_block(il, own) | expected.feed_forward_specs(hp, il)


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    table = rope_table(g, hp)
    sparse = indexer.Indexer(g, hp, cfg, table) if indexer.top_k(hp, cfg) else None
    x = g.concat([blocks.embedded(g, hp, w)] * hp.n_stream, "inp_streams")
    for il in range(hp.n_layer):
        g.il = il
        layer = w.layer(il)
        before, weights = _before(g, hp, x, layer, "attn")
        cur = blocks.normed(g, hp, before, layer, "attn_norm")
        gates = g.mul_mat(layer.attn_gate, cur, "attn_gate")
        cur = g.gate(attention(g, hp, cfg, cur, layer, table, sparse), gates, "attn_gated")
        cur = g.mul_mat(layer.attn_output, cur, "kqv_out")
        x = g.record(StreamMix(x, cur, weights, hp.n_stream), "ffn_inp")
        if il == hp.n_layer - 1:
            x = g.select_outputs(x, "last_ffn_inp")
        before, weights = _before(g, hp, x, layer, "ffn")
        cur = limited_feed_forward(g, hp, cfg, blocks.normed(g, hp, before, layer, "ffn_norm"), layer)
        x = g.layer_out(g.record(StreamMix(x, cur, weights, hp.n_stream), "l_out"))
    g.il = -1
    fn, scale, base = (w[f"output_hc_{part}.weight"] for part in ("fn", "scale", "base"))
    return blocks.output(g, hp, w, _collapsed(g, hp, x, fn, scale, base, "output_hc")[0])


def _before(g: Graph, hp: HParams, x: Node, layer: LayerWeights, which: str) -> tuple[Node, Node]:
    """Return what a part of a layer reads of the streams, and their weights."""
    fn, scale, base = (layer.tensor(f"hc_{which}_{part}.weight") for part in ("fn", "scale", "base"))
    return _collapsed(g, hp, x, fn, scale, base, f"hc_{which}")


def _collapsed(
    g: Graph, hp: HParams, x: Node, projection: Weight, scale: Weight, base: Weight, name: str
) -> tuple[Node, Node]:
    """Return the weighted sum of the streams, and their weights."""
    logits = g.mul_mat(projection, g.norm(x, None, hp.eps, f"{name}_norm", kind="rms"), f"{name}_mix")
    made = StreamWeights(logits, scale, base, hp.n_stream, 0, hp.stream_eps, hp.stream_most)
    weights = g.record(made, f"{name}_weights")
    return g.record(StreamSum(x, weights, hp.n_stream), f"{name}_sum"), weights
