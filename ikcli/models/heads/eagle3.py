"""EAGLE-3: a head of one layer that reads what three layers of the model put out, in llama.cpp's file format.

    state of p = fc [outputs of three layers at p]                     in the model's own graphs
    x = layer([norm(embedding of token p + 1); norm(state of p)]) + state of p
    logits(p + 2) = output norm(x);  x is the state of p + 1 for the next token of a draft

The layer has a cache of its own. Embedding and output matrix are the model's where the file has none. The output may
cover a part of the vocabulary; `d2t` holds the ids of its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ikcli.errors import FormatError, UnsupportedError
from ikcli.graph import Graph, Node, Rows
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import dense_ffn
from ikcli.models.heads.head import Head, renamed
from ikcli.models.hparams import HParams
from ikcli.models.keys import HasShape
from ikcli.models.rope import inverse_frequencies, magnitude
from ikcli.models.tensors import TensorSpec, TensorSpecs, Weights

CONSTANT = False
BLOCK = False
_RESIDUAL, _BEFORE_FC = "norm_before_residual", "norm_before_fc"


def read(metadata: Mapping[str, Any], arch: str, hp: HParams, source: str) -> Head:
    """Return what the file says; raise FormatError if the head is of another model."""
    width, ids = metadata.get(f"{arch}.target_hidden_size"), metadata.get(f"{arch}.target_layers")
    ids = metadata.get(f"{arch}.extract_layers") if ids is None else ids
    if width != hp.n_embd:
        raise FormatError(
            f"{source}: the head of -md is of another model: its {arch}.target_hidden_size is {width}, and the model's "
            f"embedding_length {hp.n_embd}"
        )
    if ids is None or not len(ids):
        raise FormatError(f"the head of {source}: {arch}.extract_layers is missing: it says which layers it reads")
    layers = tuple(int(i) - 1 for i in ids)  # the file names layers by their input
    if not all(0 <= il < hp.n_layer - 1 for il in layers):
        raise FormatError(
            f"the head of {source}: {arch}.extract_layers is {[il + 1 for il in layers]}; it can read the inputs of "
            f"layers 1 to {hp.n_layer - 1} of this model"
        )
    own = HParams.from_gguf(renamed(metadata, arch, "llama", hp.n_vocab), {}, f"the head of {source}")
    if own.n_layer != 1:
        raise UnsupportedError(f"{own.source}: it has {own.n_layer} layers; EAGLE-3 heads of one layer are supported")
    flags = frozenset(flag for flag in (_RESIDUAL, _BEFORE_FC) if metadata.get(f"{arch}.{flag}"))
    return Head(own, layers, flags)


def tensor_shapes(head: Head, hp: HParams, tensors: Mapping[str, HasShape], prefix: str) -> TensorSpecs:
    """Return the expected tensors."""
    own, n_given = head.own, hp.n_embd * len(head.layers)
    ids = tensors.get(f"{prefix}d2t")
    n_vocab = hp.n_vocab if ids is None else ids.shape[0]
    row, same = TensorSpec((own.n_embd,)), own.n_embd == hp.n_embd
    specs: TensorSpecs = {
        "fc.weight": TensorSpec((n_given, own.n_embd)),
        "output_norm.weight": row,
        "output.weight": TensorSpec((own.n_embd, n_vocab), required=not same or ids is not None),
        "token_embd.weight": TensorSpec((own.n_embd, hp.n_vocab), required=not same),
        "d2t": TensorSpec((n_vocab,), required=False),
        "rope_freqs.weight": TensorSpec((own.n_rot // 2,), required=False),
    }
    if _BEFORE_FC in head.flags:
        specs["enc.output_norm.weight"] = TensorSpec((n_given,))
    q, k, v = own.n_head * own.head_dim_k, own.n_head_kv * own.head_dim_k, own.n_head_kv * own.head_dim_v
    layer = {
        "attn_norm.weight": row,
        "attn_norm_2.weight": row,
        "attn_q.weight": TensorSpec((2 * own.n_embd, q)),
        "attn_k.weight": TensorSpec((2 * own.n_embd, k)),
        "attn_v.weight": TensorSpec((2 * own.n_embd, v)),
        "attn_output.weight": TensorSpec((own.n_head * own.head_dim_v, own.n_embd)),
        "ffn_norm.weight": row,
    }
    specs |= expected.in_block(0, layer) | expected.dense_specs(own, 0, own.n_ff)
    return {prefix + name: spec for name, spec in specs.items()}


def take_states(g: Graph, head: Head, w: Weights, prefix: str, outputs: Mapping[int, Node]) -> None:
    """Compute the states of all tokens from the outputs of layers."""
    x = g.concat([outputs[il] for il in head.layers], "eagle3_concat")
    if _BEFORE_FC in head.flags:
        x = g.rms_norm(x, w[f"{prefix}enc.output_norm.weight"], head.own.eps, "eagle3_input_norm")
    g.states, g.wants_states = g.mul_mat(w[f"{prefix}fc.weight"], x, "eagle3_fc"), Rows.TOKENS


def build(g: Graph, head: Head, hp: HParams, w: Weights, cfg: GraphConfig, prefix: str) -> Node:
    """Record the head and return the logits of the output rows; their states are `g.states`."""
    own, layer, rope = head.own, w.layer(0, prefix), head.own.rope
    given = g.host_rows(own.n_embd, "mtp_states")
    embedding = g.embed(w.get(f"{prefix}token_embd.weight") or w["token_embd.weight"])
    factors = w.data(f"{prefix}rope_freqs.weight") if f"{prefix}rope_freqs.weight" in w else None
    freqs = inverse_frequencies(rope, own.n_rot, factors)
    table = g.rope_table(np.asarray(freqs).tolist(), magnitude(rope, rope.attn_factor))
    g.il = hp.n_layer
    e = g.rms_norm(embedding, layer.attn_norm, own.eps, "mtp_enorm")
    h = g.rms_norm(given, layer.attn_norm_2, own.eps, "mtp_hnorm")
    both = g.concat([e, h], "mtp_concat")
    q, k, v = (g.mul_mat(getattr(layer, f"attn_{x}"), both, f"{x.upper()}cur_proj") for x in "qkv")
    q = blocks.rotated(g, own, q, layer, table, "q", own.n_head, neox=False)
    k = blocks.rotated(g, own, k, layer, table, "k", own.n_head_kv, neox=False)
    cur = blocks.attend(g, own, cfg, q, (k, v), both, layer)
    x = h if _RESIDUAL in head.flags else given
    cur, x = g.select_outputs(cur, "mtp_attn"), g.select_outputs(x, "mtp_ffn_inp")
    x = g.add(cur, x, "ffn_inp")
    x = g.add(dense_ffn(g, g.rms_norm(x, layer.ffn_norm, own.eps, "ffn_norm"), layer), x, "l_out")
    g.il = -1
    g.states, g.wants_states = x, Rows.OUTPUTS
    normed = g.rms_norm(x, w[f"{prefix}output_norm.weight"], own.eps, "mtp_norm")
    matrix = w.get(f"{prefix}output.weight") or w.get("output.weight") or w["token_embd.weight"]
    return g.mul_mat(matrix, normed, "mtp_output")
