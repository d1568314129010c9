"""GPT-2 and its relatives: LayerNorm, a feed-forward part without gate, biases nearly everywhere.

BLOOM (a norm after the embeddings) and MPT (in some models norms of all query and key heads) use ALiBi. Others are
StarCoder (one key head), StarCoder2 (RoPE, in some sizes a window), CodeShell (RoPE), Nemotron (partial RoPE, squared
ReLU) and Jais 2 (RoPE, squared ReLU). GPT-2 and StarCoder add embeddings of positions.
"""

from __future__ import annotations

from functools import partial

from ikcli.errors import UnsupportedError
from ikcli.graph import Graph, Node
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import mlp
from ikcli.models.hparams import HParams
from ikcli.models.tensors import TensorSpec, TensorSpecs, Weights

POSITIONS = ("gpt2", "starcoder")  # embedded, not rotated
ROTATED = ("codeshell", "jais2", "nemotron", "starcoder2")
PADDING = 256  # a context may be that much longer, as it is rounded up
FUSED = ("bloom", "codeshell", "gpt2", "mpt", "starcoder")  # one matrix for q, k and v


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    specs = expected.base_specs(hp)
    if hp.arch in POSITIONS:
        specs["position_embd.weight"] = TensorSpec((hp.n_embd, hp.n_ctx_train))
    for il in range(hp.n_layer):
        specs |= expected.attention_specs(hp, il, bias=None, fused=True if hp.arch in FUSED else None)
        specs |= expected.mlp_specs(hp, il)
        if hp.arch == "mpt":
            specs |= expected.norms_of_all_heads(hp, il, required=False)
    if hp.arch == "mpt":  # with positions in place of ALiBi, or with no biases at all
        specs["position_embd.weight"] = TensorSpec((hp.n_embd, hp.n_ctx_train), required=False)
    if hp.arch == "bloom":
        specs["token_embd_norm.weight"] = TensorSpec((hp.n_embd,))
    names = "token_embd_norm output_norm attn_norm attn_qkv ffn_norm attn_q_norm attn_k_norm"
    specs |= expected.bias_specs(specs, names, required=hp.arch != "mpt")
    specs |= expected.bias_specs(specs, "attn_output ffn_up ffn_down", required=False)
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    if "position_embd.weight" in w and cfg.n_ctx // cfg.n_seq >= hp.n_ctx_train + PADDING:
        raise UnsupportedError(
            f"{hp.source}: the model knows {hp.n_ctx_train} positions; use -c {hp.n_ctx_train} per sequence at most"
        )
    attn = blocks.attention_block(g, hp, w, cfg, neox=True, rotates=hp.arch in ROTATED)
    ffn = partial(mlp, g, kind="relu_sqr" if hp.arch in ("jais2", "nemotron") else "gelu")
    return blocks.transformer(g, hp, w, attn, ffn)
