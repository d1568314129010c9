"""Qwen4-Exp (Qwen3.8-Flash-Next): a residual of several streams, n-grams, delta nets, and attention with an indexer.

Before a part of a layer every column of the normed streams has a gate of low rank, and the part reads the mean of what
goes through; behind it every stream takes a share of the result (`graph/ops_streams.py`). One layer first adds to the
streams what a table has for the n-grams that end in the token (`graph/ops_ngrams.py`). Layers have a gated delta net,
or gated attention to the positions of the entries that an indexer chooses: means of keys of several positions. All
have experts. Heads for further tokens (MTP) are not read.
"""

from __future__ import annotations

from ikcli.graph import Graph, HeadSlice, Node, Weight
from ikcli.graph.ops_ngrams import EmbedIds, NGramIds
from ikcli.graph.ops_pooled import PooledStore
from ikcli.graph.ops_sparse import EntryPositions
from ikcli.graph.ops_streams import GatedStreams, StreamAdd, StreamMatch
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import feed_forward
from ikcli.models.hparams import HParams
from ikcli.models.recurrent import delta_net
from ikcli.models.rope import inverse_frequencies, magnitude
from ikcli.models.sparse import indexer, taps
from ikcli.models.sparse.ngrams import TABLE
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    specs = expected.with_blocks(hp, block_shapes) | _gate_specs(hp, "output_hc")
    del specs["output_norm.weight"]
    if hp.ngrams is not None:
        specs[TABLE] = TensorSpec((hp.ngrams.width, hp.ngrams.n_rows))
    return specs


def _gate_specs(hp: HParams, name: str) -> TensorSpecs:
    width = hp.n_stream * hp.n_embd
    return {
        f"{name}_norm.weight": TensorSpec((width,)),
        f"{name}_down.weight": TensorSpec((width, hp.stream_rank)),
        f"{name}_up.weight": TensorSpec((hp.stream_rank, width)),
    }


def block_shapes(hp: HParams, il: int) -> TensorSpecs:
    """Return the expected tensors of block il."""
    width, d = hp.n_stream * hp.n_embd, hp.index_head_dim
    own: TensorSpecs = {}
    for part in ("attn", "ffn"):
        own |= _gate_specs(hp, f"hc_{part}")
        own[f"hc_{part}_inject.weight"] = TensorSpec((width, hp.n_stream))
    if hp.is_recurrent(il):
        specs = delta_net.gated_delta_net_specs(hp, il, "ffn_norm")
        del specs[f"blk.{il}.ffn_norm.weight"]
    else:
        specs = expected.attention_specs(hp, il, bias=False, qk_norm=True, ffn_norm=None, fused=False)
        specs[f"blk.{il}.attn_q.weight"] = TensorSpec((hp.n_embd, 2 * hp.n_head * hp.head_dim_k))
    del specs[f"blk.{il}.attn_norm.weight"]
    if il in hp.index_owners:
        own |= {
            "indexer.q_proj.weight": TensorSpec((hp.n_embd, hp.index_n_head * d)),
            "indexer.k_proj.weight": TensorSpec((hp.n_embd, d)),
            "indexer.q_norm.weight": TensorSpec((d,)),
            "indexer.k_norm.weight": TensorSpec((d,)),
        }
    if (table := hp.ngrams) is not None and il == table.layer:
        cols = table.width * len(table.grams.sizes)
        own |= {
            "ple_key.weight": TensorSpec((cols, width)),
            "ple_value.weight": TensorSpec((cols, hp.n_embd)),
            "ple_norm_key.weight": TensorSpec((width,)),
            "ple_norm_query.weight": TensorSpec((width,)),
            "ple_norm_conv.weight": TensorSpec((width,)),
            "ple_conv1d.weight": TensorSpec((table.taps, width), also=((table.taps, 1, width),)),
        }
    specs |= expected.feed_forward_specs(hp, il) | expected.in_block(il, own)
    specs[f"blk.{il}.ffn_gate_inp_shexp.weight"] = TensorSpec((hp.n_embd, 1), required=hp.n_ff_shexp > 0)
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    attention = _Attention(g, hp, w, cfg)
    x = g.concat([blocks.embedded(g, hp, w)] * hp.n_stream, "inp_streams")
    for il in range(hp.n_layer):
        g.il = il
        layer = w.layer(il)
        if hp.ngrams is not None and il == hp.ngrams.layer:
            x = g.add(_of_ngrams(g, hp, x, w[TABLE], layer), x, "ngram_out")
        cur, shares = _before(g, hp, x, layer, "attn")
        if hp.is_recurrent(il):
            cur = delta_net.gated_delta_net(g, hp, cur, layer, "sigmoid")
        else:
            cur = attention.record(cur, layer)
        x = g.record(StreamAdd(x, cur, hp.n_stream, shares, scale=1 / hp.n_stream), "ffn_inp")
        if il == hp.n_layer - 1:
            x = g.select_outputs(x, "last_ffn_inp")
        cur, shares = _before(g, hp, x, layer, "ffn")
        cur = feed_forward(g, hp, cfg, cur, layer)
        x = g.layer_out(g.record(StreamAdd(x, cur, hp.n_stream, shares, scale=1 / hp.n_stream), "l_out"))
    g.il = -1
    norm, down, up = (w[f"output_hc_{part}.weight"] for part in ("norm", "down", "up"))
    return blocks.logits(g, hp, w, _mean(g, hp, x, (norm, down, up), "output_hc", "result_norm")[0])


def _before(g: Graph, hp: HParams, x: Node, layer: LayerWeights, which: str) -> tuple[Node, Node]:
    """Return what a part of a layer reads of the streams, and the logits of their shares of its result."""
    name = f"hc_{which}"
    norm, down, up = (layer.tensor(f"{name}_{part}.weight") for part in ("norm", "down", "up"))
    cur, normed = _mean(g, hp, x, (norm, down, up), name, f"{name}_mean")
    return cur, g.mul_mat(layer.tensor(f"{name}_inject.weight"), normed, f"{name}_inject")


def _mean(
    g: Graph, hp: HParams, x: Node, made_with: tuple[Weight, Weight, Weight], name: str, result: str
) -> tuple[Node, Node]:
    """Return the mean of the gated streams, and the normed streams."""
    norm, down, up = made_with
    normed = g.norm(x, norm, hp.eps, f"{name}_normed", kind="rms", width=hp.n_embd)
    low = g.scale(g.mul_mat(down, normed, f"{name}_low"), 1 / hp.n_stream, f"{name}_low_scaled")
    gate = g.mul_mat(up, g.activate(low, "silu", f"{name}_low_silu"), f"{name}_gate")
    return g.record(GatedStreams(normed, gate, hp.n_stream), result), normed


def _of_ngrams(g: Graph, hp: HParams, x: Node, table: Weight, layer: LayerWeights) -> Node:
    """Return what streams x take of the values of n-grams, plus a convolution of that."""
    assert hp.ngrams is not None
    width, grams = hp.n_stream * hp.n_embd, hp.ngrams.grams
    ids = g.record(NGramIds(g.state("ngram", grams.n_before), grams), "ngram_ids")
    rows = g.record(EmbedIds(table, ids), "ngram_embd")

    def normed(y: Node, which: str) -> Node:
        weight = layer.tensor(f"ple_norm_{which}.weight")
        return g.norm(y, weight, hp.eps, f"ngram_{which}_norm", kind="rms", width=hp.n_embd)

    key = normed(g.mul_mat(layer.ple_key, rows, "ngram_key"), "key")
    value = g.mul_mat(layer.ple_value, rows, "ngram_value")
    taken = g.record(StreamMatch(key, normed(x, "query"), value, hp.n_stream), "ngram_taken")
    weights = layer.tensor(taps.SPREAD)
    state = g.state("ngram_conv", (weights.ne0 - 1) * width)
    conv = g.short_conv(state, [normed(taken, "conv")], [weights], "ngram_conv")
    return g.add(conv, taken, "ngram_mixed")


class _Attention:
    """Records the attention of one layer after the other, with the positions that its indexer chooses."""

    def __init__(self, g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> None:
        self._g, self._hp, self._cfg = g, hp, cfg
        self._tables = blocks.rope_tables(g, hp, w, cfg)
        self._top_k = indexer.top_k(hp, cfg)
        rope, freqs = hp.rope, inverse_frequencies(hp.rope, hp.n_rot).tolist()
        ratios = sorted({hp.at(il).pool_ratio for il in hp.index_owners} if self._top_k else ())
        size = magnitude(rope, rope.attn_factor)
        self._first = {r: g.rope_table(freqs, size, f"rope_table_first_{r}", r - 1) for r in ratios}

    def record(self, x: Node, layer: LayerWeights) -> Node:
        """Return what a layer with attention input x adds to the streams."""
        table, chosen = self._tables[layer.il], None
        if self._top_k and layer.il in self._hp.index_owners and table is not None:
            chosen = self._chosen(x, layer, table)
        return blocks.self_attention(
            self._g, self._hp, self._cfg, x, layer, table, neox=True, gated=True, selected=chosen
        )

    def _chosen(self, x: Node, layer: LayerWeights, table: Node) -> Node | None:
        """Return the positions that the indexer of a layer chooses; None: all are seen."""
        g, hp, width = self._g, self._hp, self._hp.index_head_dim
        ratio, n_head = hp.at(layer.il).pool_ratio, hp.index_n_head

        def normed(y: Node, which: str, n: int, positions: Node) -> Node:
            y = g.rms_norm(y, layer.tensor(f"indexer.{which}_norm.weight"), hp.eps, f"index_{which}_norm")
            return g.rope(y, positions, n, width, f"index_{which}_rope", neox=True)

        keys = g.mul_mat(layer.tensor("indexer.k_proj.weight"), x, "index_k")
        state = g.state("index_mean", (ratio - 1) * width)
        mean = g.short_conv(state, [keys], [layer.tensor(taps.MEAN)], "index_k_mean", linear=True)
        cache = g.cache(indexer.CACHE, width, self._cfg.type_index)
        g.record(PooledStore(cache, normed(mean, "k", 1, self._first[ratio]), ratio), "index_k_view")
        if self._cfg.index_keys_only:
            return None
        q = normed(g.mul_mat(layer.tensor("indexer.q_proj.weight"), x, "index_q"), "q", n_head, table)
        entries = -(-self._top_k // ratio)
        chosen = g.index_top_k(
            HeadSlice(q, 0, width, width), None, cache, "index_top_k", n_head=n_head, top_k=entries, ratio=ratio
        )
        return g.record(EntryPositions(chosen, ratio), "index_positions")
