"""dots3 note: latent attention whose heads and ranks differ between layers with and without a window, and experts.

Layers without a window attend to the positions that their indexer chooses. In all layers the rotated part of keys has
a norm, and what attention returns a gate per head. Norms of latents hold the factors that torch applies behind them.
Index heads rotate adjacent pairs, as torch has it; llama.cpp rotates halves. Corresponds to `Dots3NoteForCausalLM` of
transformers.
"""

from __future__ import annotations

from functools import partial

from ikcli.graph import Graph, Node
from ikcli.models import blocks, deepseek2, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import feed_forward
from ikcli.models.hparams import HParams
from ikcli.models.sparse import indexer
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file; `mla.derive` decides which of kv_b, k_b, v_b must be there."""
    return expected.with_blocks(hp, block_shapes)


def block_shapes(hp: HParams, il: int) -> TensorSpecs:
    """Return the expected tensors of block il."""
    own = hp.at(il)
    specs = deepseek2.attention_specs(own) | indexer.specs(hp, il)
    specs["attn_k_norm.weight"] = TensorSpec((own.n_rot,))
    specs["attn_gate.weight"] = TensorSpec((hp.n_embd, own.n_head))
    return expected.in_block(il, specs) | expected.feed_forward_specs(hp, il)


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    tables = blocks.rope_tables(g, hp, w, cfg)
    sparse = None
    if indexer.top_k(hp, cfg):
        table = tables[min(hp.index_owners)]
        assert table is not None
        sparse = indexer.Indexer(g, hp, cfg, table)

    def attn(x: Node, layer: LayerWeights) -> Node:
        own = sparse if layer.il in hp.index_owners else None
        kqv = deepseek2.attention(g, hp.at(layer.il), cfg, x, layer, tables[layer.il], own)
        kqv = g.gate(kqv, g.mul_mat(layer.attn_gate, x, "attn_gate"), "kqv_gated")
        return g.mul_mat(layer.attn_output, kqv, "kqv_out")

    return blocks.transformer(g, hp, w, attn, partial(feed_forward, g, hp, cfg))
