"""Heads that predict further tokens (multi-token prediction, MTP; NextN in DeepSeek's and GLM's files).

A head is one more block of the model, `blk.N` after its last layer, with tensors `blk.N.nextn.*`. At position p it
reads the model's state of p and the embedding of the token after it, and predicts the one after that:

    logits(p + 2) = head(norm(block(eh_proj [enorm(embedding of token p + 1); hnorm(state of p)])))

The block has a cache of its own, whose row p belongs to this pair. Embedding, head and last norm are the model's where
the file has none for the block. `blocks.UNNORMED_STATES` says which states are meant. Several heads continue each
other: the next one reads the states of the last one. A single head is applied repeatedly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol, runtime_checkable

from ikcli.errors import UnsupportedError
from ikcli.graph import Graph, Node, Rows
from ikcli.models import blocks
from ikcli.models.config import GraphConfig
from ikcli.models.hparams import HParams
from ikcli.models.keys import HasShape
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights
from ikcli.settings.adapters import RopeConfig

_FFN = ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")


@runtime_checkable
class HasLayers(Protocol):
    """The parts of an architecture's module that its heads are made of."""

    def block_shapes(self, hp: HParams, il: int) -> TensorSpecs:
        """Return the expected tensors of block il."""

    def layers(self, g: Graph, hp: HParams, w: Weights, cfg: GraphConfig, only: int | None = None) -> blocks.Layers:
        """Return the layers, after what they share (for one of them only) has been recorded."""


def check_heads(module: object, hp: HParams, names: Collection[str]) -> None:
    """Raise UnsupportedError unless a model (`hp` without its heads) has heads that can run."""
    reason = why_not(module, hp, names)
    if reason is not None:
        raise UnsupportedError(reason)


def why_not(module: object, hp: HParams, names: Collection[str]) -> str | None:
    """Say why a model (`hp` without its heads) has no heads that can run; None if it has."""
    if not hp.n_further or f"blk.{hp.n_layer}.nextn.eh_proj.weight" not in names:
        return (
            f"{hp.source}: the file has no layers that predict further tokens (MTP), which --spec-type mtp needs; name "
            "a file of them with -md, use another type, or convert the model again with its MTP layers"
        )
    recurrent = [il for il in range(hp.n_layer, hp.n_layer + hp.n_further) if f"blk.{il}.ssm_a" in names]
    if not isinstance(module, HasLayers) or recurrent:
        what = f"block {recurrent[0]} is recurrent, and " if recurrent else ""
        return (
            f"{hp.source}: {what}drafting with MTP layers of {hp.arch} models is not supported; use another --spec-type"
        )
    return None


def read_further(
    metadata: Mapping[str, Any], tensors: Mapping[str, HasShape], source: str, rope: RopeConfig | None = None
) -> HParams:
    """Return the hyper-parameters with the heads counted as layers."""
    return HParams.from_gguf(metadata, tensors, source, rope, further=True)


def tensor_shapes(module: HasLayers, hp: HParams, names: Collection[str]) -> TensorSpecs:
    """Return the expected tensors of all heads; `hp` counts them as layers, `names` are the tensors of the file."""
    specs: TensorSpecs = {}
    for il in range(hp.n_layer - hp.n_further, hp.n_layer):
        own, block = module.block_shapes(hp, il), f"blk.{il}."
        if not any(block + name in names for name in (*_FFN, "ffn_gate_inp.weight")):  # some small models have none
            own = {name: spec for name, spec in own.items() if not name.startswith(f"{block}ffn_")}
        table = TensorSpec((hp.n_embd, hp.n_vocab), required=False)
        norm = TensorSpec((hp.n_embd,))
        optional = TensorSpec((hp.n_embd,), required=False)
        specs |= own | {
            f"{block}nextn.eh_proj.weight": TensorSpec((2 * hp.n_embd, hp.n_embd)),
            f"{block}nextn.enorm.weight": norm,
            f"{block}nextn.hnorm.weight": norm,
            f"{block}nextn.embed_tokens.weight": table,
            f"{block}nextn.shared_head_head.weight": table,
            f"{block}nextn.shared_head_norm.weight": optional,
            f"{block}layer_output_norm.weight": optional,  # of Ling, in place of the former
        }
    return specs


def build(g: Graph, module: HasLayers, hp: HParams, w: Weights, cfg: GraphConfig, head: int) -> Node:
    """Record a head and return the logits of the output rows; their states are `g.states`."""
    il = hp.n_layer - hp.n_further + head
    layer = w.layer(il)
    given = g.host_rows(hp.n_embd, "mtp_states")
    embedding = g.embed(layer.get("nextn.embed_tokens") or w["token_embd.weight"])
    own = module.layers(g, hp, w, cfg, il)
    g.il = il
    e = g.rms_norm(embedding, _own(layer, "enorm"), hp.eps, "mtp_enorm")
    h = g.rms_norm(given, _own(layer, "hnorm"), hp.eps, "mtp_hnorm")
    x = g.mul_mat(_own(layer, "eh_proj"), g.concat([e, h], "mtp_concat"), "mtp_eh_proj")
    cur = own.attn(blocks.normed(g, hp, x, layer, "attn_norm"), layer)
    cur, x = g.select_outputs(cur, "mtp_attn"), g.select_outputs(x, "mtp_ffn_inp")
    if layer.get(own.ffn_norm) is not None and (layer.get("ffn_up") or layer.get("ffn_gate_inp")):
        x = blocks.second_half(g, hp, cur, x, layer, own.ffn, own.ffn_norm)
    else:
        x = g.layer_out(g.add(cur, x, "l_out"))
    g.il = -1
    norm = layer.get("nextn.shared_head_norm") or layer.get("layer_output_norm") or w["output_norm.weight"]
    normed = g.rms_norm(x, norm, hp.eps, "mtp_norm")
    g.states, g.wants_states = (x if hp.arch in blocks.UNNORMED_STATES else normed), Rows.OUTPUTS
    matrix = layer.get("nextn.shared_head_head") or w.get("output.weight") or w["token_embd.weight"]
    return g.mul_mat(matrix, normed, "mtp_output")


def _own(layer: LayerWeights, name: str) -> Any:
    return getattr(layer, f"nextn.{name}")
