"""Read the keys of embeddings of n-grams (`graph/ops_ngrams.py`), which one layer of Qwen4-Exp reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ikcli.errors import UnsupportedError
from ikcli.graph.ops_ngrams import MOST_TOKENS, NGrams
from ikcli.models.keys import MAX_SIZE, HasShape, Keys, short
from ikcli.models.recurrent.states import MAX_TAPS

TABLE = "per_layer_token_embd.weight"


@dataclass(frozen=True, slots=True)
class NGramTable:
    """How n-grams become rows of the table, the layer that reads these, and the taps of its convolution of them."""

    grams: NGrams
    n_rows: int
    width: int
    layer: int
    taps: int


def read_ngrams(keys: Keys, values: dict[str, Any], tensors: Mapping[str, HasShape]) -> dict[str, Any]:
    """Return the embeddings of n-grams; files may have none."""
    layers = _numbers(keys, "ple.layers", values["n_layer"] - 1) if "ple.layers" in keys else ()
    if not layers:
        return {}
    if len(layers) > 1:
        raise UnsupportedError(f"{keys.source}: {keys.name('ple.layers')} has {len(layers)} layers; supported is one")
    if layers[0] not in values["recurrent_layers"]:
        raise keys.fail("ple.layers", f"is {layers[0]}, a layer with attention")
    longest = keys.integer("ple.ngram_size", least=2, most=MAX_TAPS)
    n_rows = (longest - 1) * keys.integer("ple.heads_per_ngram", least=1, most=256)
    n_vocab = values["n_vocab"]
    if n_vocab > MOST_TOKENS:
        raise UnsupportedError(f"{keys.source}: a vocabulary of {n_vocab} tokens is too large for n-grams")
    # Products of tokens and multipliers stay below 2**63, so that signed and unsigned arithmetic agree.
    multipliers = _numbers(keys, "ple.layer_multipliers", ((1 << 63) - 1) // n_vocab, longest)
    sizes = _numbers(keys, "ple.head_vocab_sizes", MAX_SIZE, n_rows)
    offsets = _numbers(keys, "ple.head_offsets", MAX_SIZE, n_rows)
    if min(sizes) < 1:
        raise keys.fail("ple.head_vocab_sizes", "has a part without rows")
    used = max(size + offset for size, offset in zip(sizes, offsets, strict=True))
    table = tensors.get(TABLE)
    held = table.shape[1] if table is not None and len(table.shape) > 1 else used
    if not used <= held < MAX_SIZE:
        raise keys.fail("ple.head_offsets", f"has rows up to {used}, but {TABLE} has {held}")
    taps = keys.integer("ple.conv_kernel", least=2, most=MAX_TAPS)
    if spread_taps(taps, longest) > MAX_TAPS:
        raise UnsupportedError(
            f"{keys.source}: {keys.name('ple.conv_kernel')} is {taps}, {longest} tokens apart; supported are "
            f"convolutions over {MAX_TAPS} tokens"
        )
    grams = NGrams(multipliers, sizes, offsets, keys.integer("ple.eos_token_id", most=n_vocab - 1))
    width = keys.integer("embedding_length_per_layer_input", least=1)
    return {"ngrams": NGramTable(grams, held, width, layers[0], taps)}


def spread_taps(taps: int, apart: int) -> int:
    """Return the tokens that a convolution covers whose taps are so many tokens apart."""
    return (taps - 1) * apart + 1


def _numbers(keys: Keys, key: str, most: int, n: int = 0) -> tuple[int, ...]:
    """Return the first n (0: all) of a list of whole numbers from 0 to `most`."""
    value: Any = keys.raw(key, None)
    items = list(value) if hasattr(value, "__len__") and not isinstance(value, str) else []
    found = tuple(int(x) for x in items if not isinstance(x, bool | float | str))
    if len(found) < max(n, len(items)) or not hasattr(value, "__len__") or any(not 0 <= x <= most for x in found):
        raise keys.fail(key, f"should be {n or 'some'} whole numbers up to {most}, but is {short(value)}")
    return found[: n or len(found)]
