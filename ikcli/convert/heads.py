"""Layers that predict further tokens (multi-token prediction, MTP; NextN): where they are, and what to keep.

Some checkpoints number them after the last layer (`layers.61.eh_proj`), others have a list of their own
(`mtp.layers.0.*`, with `mtp.fc` and norms beside it). In a model file they are the blocks after the last one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_OWN_LIST = re.compile(r"^(?:model\.|language_model\.)*mtp\.layers\.(\d+)\.(.+)$")
_BESIDE = re.compile(r"^(?:model\.|language_model\.)*mtp\.(\w+)\.(weight.*)$")
_BESIDE_NAMES = {
    "fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm",
    "embed_tokens": "embed_tokens",
}  # fmt: skip
_LAYER = re.compile(r"^(?:model\.|language_model\.)*layers\.(\d+)\.")

NEXT_TOKENS = {
    "layers.*.eh_proj": "blk.*.nextn.eh_proj",
    "layers.*.enorm": "blk.*.nextn.enorm",
    "layers.*.hnorm": "blk.*.nextn.hnorm",
    "layers.*.embed_tokens": "blk.*.nextn.embed_tokens",
    "layers.*.shared_head.head": "blk.*.nextn.shared_head_head",
    "layers.*.shared_head.norm": "blk.*.nextn.shared_head_norm",
}
"""GGUF names; the gguf package has them for some architectures only."""


def usual_name(name: str, n_layer: int) -> str:
    """Return the name of a checkpoint's tensor with all layers in one list; `n_layer` are the model's own."""
    if found := _OWN_LIST.match(name):
        return f"layers.{n_layer + int(found[1])}.{found[2]}"
    if (found := _BESIDE.match(name)) and found[1] in _BESIDE_NAMES:
        return f"layers.{n_layer}.{_BESIDE_NAMES[found[1]]}.{found[2]}"
    found = _LAYER.match(name)
    if found is None or int(found[1]) < n_layer:
        return name
    return name.replace(".transformer.shared_head.output.", ".shared_head.head.").replace(".transformer.", ".")


def count_heads(names: Iterable[str], n_layer: int) -> int:
    """Return the number of layers for further tokens among tensors of these names."""
    layers = [int(found[1]) for name in names if (found := _LAYER.match(usual_name(name, n_layer)))]
    return max(max(layers, default=0) + 1 - n_layer, 0)
