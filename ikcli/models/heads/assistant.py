"""Gemma 4's assistant: a small model that drafts with the keys and values of the large one, and has none of its own.

It reads the embedding of a token, in the large model's table, and that model's state of the position before. Each of
its layers attends to what the last layer of its kind (with a window or without) has stored:

    x = pre_proj [sqrt(n_embd) embedding of token p + 1; state of p]        queries have position p + 1 and see 0..p
    x = layers(x);  logits(p + 2) = token_embd norm(x);  state of p + 1 = post_proj norm(x)

All tokens of a draft are computed at the first one's position. The file's ordering of the vocabulary, which chooses
among parts of the output matrix, is not used: all logits are computed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ikcli.errors import FormatError
from ikcli.graph import Graph, Node, Rows
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import dense_ffn
from ikcli.models.gemma.gemma4 import GELU
from ikcli.models.heads.head import Head, renamed
from ikcli.models.hparams import HParams
from ikcli.models.keys import HasShape
from ikcli.models.tensors import TensorSpec, TensorSpecs, Weights

CONSTANT = True
BLOCK = False
_MODEL_WIDTH = {"gemma4_mtp": "backbone_embedding_length", "gemma4-assistant": "embedding_length_out"}
_PRE = ("mtp_pre_proj.weight", "nextn.pre_projection.weight")
_POST = ("mtp_post_proj.weight", "nextn.post_projection.weight")


def read(metadata: Mapping[str, Any], arch: str, hp: HParams, source: str) -> Head:
    """Return the assistant's hyper-parameters; raise FormatError if it is of another model."""
    if hp.arch != "gemma4":
        raise FormatError(f"{source}: the assistant of -md is one for Gemma 4, but this is a model of {hp.arch}")
    key = f"{arch}.{_MODEL_WIDTH[arch]}"
    if metadata.get(key) != hp.n_embd:
        raise FormatError(
            f"{source}: the assistant of -md is of another model: its {key} is {metadata.get(key)}, and the model's "
            f"embedding_length {hp.n_embd}"
        )
    absent = {f"{arch}.nextn_predict_layers", f"{arch}.attention.shared_kv_layers"}  # both are the number of layers
    kept = {k: v for k, v in metadata.items() if k not in absent}
    own = HParams.from_gguf(renamed(kept, arch, "gemma4", hp.n_vocab), {}, f"the assistant of {source}")
    for il in range(own.n_layer):
        _layer_of(own, hp, il)
    return Head(own)


def _layer_of(own: HParams, hp: HParams, il: int) -> int:
    """Return the layer of the model whose keys and values layer il reads: the last one of its kind that has any."""
    mine = own.at(il)
    found = next((i for i in reversed(range(hp.n_layer_kv)) if bool(hp.at(i).window) == bool(mine.window)), None)
    if found is None:
        kind = "a window" if mine.window else "no window"
        raise FormatError(f"{own.source}: layer {il} has {kind}, but no layer of the model whose keys it could read")
    theirs = hp.at(found)
    if mine.head_dim_k != theirs.head_dim_k or mine.head_dim_v != theirs.head_dim_v or mine.n_head % theirs.n_head_kv:
        raise FormatError(
            f"{own.source}: layer {il} has {mine.n_head} heads of {mine.head_dim_k}, which do not fit the "
            f"{theirs.n_head_kv} of {theirs.head_dim_k} that layer {found} of the model stores"
        )
    return found


def tensor_shapes(head: Head, hp: HParams, tensors: Mapping[str, HasShape], prefix: str) -> TensorSpecs:
    """Return the expected tensors."""
    own = head.own
    row = TensorSpec((own.n_embd,))
    specs: TensorSpecs = {
        "token_embd.weight": TensorSpec((own.n_embd, hp.n_vocab)),
        "output_norm.weight": row,
        _name(_PRE, tensors, prefix): TensorSpec((2 * hp.n_embd, own.n_embd)),
        _name(_POST, tensors, prefix): TensorSpec((own.n_embd, hp.n_embd)),
    }
    for il in range(own.n_layer):
        at = own.at(il)
        layer = {
            "attn_norm.weight": row,
            "attn_q.weight": TensorSpec((own.n_embd, at.n_head * at.head_dim_k)),
            "attn_q_norm.weight": TensorSpec((at.head_dim_k,)),
            "attn_output.weight": TensorSpec((at.n_head * at.head_dim_v, own.n_embd)),
            "post_attention_norm.weight": row,
            "ffn_norm.weight": row,
            "post_ffw_norm.weight": row,
            "layer_output_scale.weight": TensorSpec((1,), required=False),
        }
        specs |= expected.in_block(il, layer) | expected.dense_specs(own, il, at.n_ff)
    return {prefix + name: spec for name, spec in specs.items()}


def _name(choices: tuple[str, ...], names: Collection[str], prefix: str) -> str:
    """Return the name that the file uses."""
    return next((name for name in choices if prefix + name in names), choices[0])


def take_states(g: Graph, head: Head, w: Weights, prefix: str, outputs: Mapping[int, Node]) -> None:
    """Do nothing: the model's own code leaves its states, those after the last norm."""


def build(g: Graph, head: Head, hp: HParams, w: Weights, cfg: GraphConfig, prefix: str) -> Node:
    """Record the assistant and return the logits of the output rows; their states are `g.states`."""
    own = head.own
    given = g.host_rows(hp.n_embd, "mtp_states")
    x = g.scale(g.embed(w["token_embd.weight"]), hp.embedding_scale, "inp_scaled")
    stored = sorted({_layer_of(own, hp, i) for i in range(own.n_layer)})
    tables = {il: blocks.rope_tables(g, hp, w, cfg, il)[il] for il in stored}
    g.il = hp.n_layer
    x = g.mul_mat(_either(w, _PRE, prefix), g.concat([x, given], "mtp_concat"), "mtp_pre_proj")
    for i in range(own.n_layer):
        layer, at, target = w.layer(i, prefix), own.at(i), _layer_of(own, hp, i)
        # Tokens are rotated by the position after that of their state, and see the positions up to the latter. So a
        # window of the model, counted from the rotation, ends one position earlier.
        kv = hp.at(target)
        kv = replace(kv, n_head=at.n_head, eps=own.eps, window=max(kv.window - 1, 1) if kv.window else 0)
        q = g.mul_mat(layer.attn_q, g.rms_norm(x, layer.attn_norm, own.eps, "attn_norm"), "Qcur_proj")
        q = blocks.rotated(g, kv, q, layer, tables[target], "q", at.n_head, neox=True)
        cur = blocks.attend(g, kv, cfg, q, None, x, layer, kv_layer=target)
        if i == own.n_layer - 1:
            cur, x = g.select_outputs(cur, "mtp_attn"), g.select_outputs(x, "mtp_ffn_inp")
        x = g.add(g.rms_norm(cur, layer.post_attention_norm, own.eps, "attn_post_norm"), x, "attn_out")
        cur = dense_ffn(g, g.rms_norm(x, layer.ffn_norm, own.eps, "ffn_norm"), layer, act=GELU)
        x = g.add(g.rms_norm(cur, layer.post_ffw_norm, own.eps, "ffn_post_norm"), x, "ffn_residual")
        if layer.get("layer_output_scale") is not None:
            x = g.scale(x, float(w.data(f"{prefix}blk.{i}.layer_output_scale.weight").item()), "l_out")
    normed = g.rms_norm(x, w[f"{prefix}output_norm.weight"], own.eps, "mtp_norm")
    g.states, g.wants_states = g.mul_mat(_either(w, _POST, prefix), normed, "mtp_post_proj"), Rows.OUTPUTS
    return g.mul_mat(w[f"{prefix}token_embd.weight"], normed, "mtp_output")


def _either(w: Weights, choices: tuple[str, ...], prefix: str) -> Any:
    return w.get(prefix + choices[0]) or w[prefix + choices[1]]
