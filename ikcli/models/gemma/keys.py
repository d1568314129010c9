"""Read the keys of Gemma 3n and 4: layers without keys and values, embeddings of layers, streams, cuts of gates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ikcli.errors import UnsupportedError
from ikcli.models.keys import HasShape, Keys

KV_LAYERS = 20  # of Gemma 3n, whose first files do not say
CUT_LAYERS, CUT = 10, 1.6448533535003662  # likewise: gates of first layers, of which a twentieth is left


def read_gemma(keys: Keys, n_layer: int, tensors: Mapping[str, HasShape]) -> dict[str, Any]:
    """Return the attributes by field of `HParams`; tuples hold a value per layer."""
    streams = keys.arch == "gemma3n"
    default = max(n_layer - KV_LAYERS, 0) if streams else 0
    found: dict[str, Any] = {
        "attention_scale": 1.0,
        "n_layer_kv": n_layer - keys.integer("attention.shared_kv_layers", default, most=n_layer - 1),
        "n_embd_per_layer": keys.integer(
            "embedding_length_per_layer_input", 256 if streams else 0, least=1 if streams else 0
        ),
    }
    return found | (_streams(keys, n_layer, tensors) if streams else {})


def _streams(keys: Keys, n_layer: int, tensors: Mapping[str, HasShape]) -> dict[str, Any]:
    if (active := keys.integer("altup.active_idx", 0)) != 0:
        raise UnsupportedError(f"{keys.source}: {keys.name('altup.active_idx')} is {active}; known is 0")
    low = tensors.get("blk.0.laurel_l.weight")
    return {
        "n_stream": keys.integer("altup.num_inputs", 4, least=2, most=64),
        "laurel_rank": low.shape[1] if low is not None and len(low.shape) == 2 else 64,
        "gate_cut": _cuts(keys, n_layer),
    }


def _cuts(keys: Keys, n_layer: int) -> tuple[float, ...]:
    """Return the cut of every layer; minus infinity: none."""
    key = "activation_sparsity_scale"
    items = keys.items(key, n_layer)
    if items is None:
        return tuple(CUT if il < CUT_LAYERS else -math.inf for il in range(n_layer))
    if not all(isinstance(z, int | float) and (math.isfinite(z) or z == -math.inf) for z in items):
        raise keys.fail(key, "should hold numbers, or minus infinity for layers whose gates are not cut")
    return tuple(map(float, items))
