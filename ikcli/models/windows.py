"""Read the keys of layers with windows: which layers they are, and how their rotation and heads differ.

`attention.sliding_window_pattern` is a list, one flag per layer, or a period: of that many layers the last one sees all
positions (in some architectures the first one). Where a file has neither, the architecture decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ikcli.models.keys import Keys, by_layer
from ikcli.models.rope import RopeParams

PERIODS = {
    "afmoe": 4, "cohere2": 4, "exaone-moe": 4, "exaone4": 4, "gemma-embedding": 6, "gemma2": 2, "gemma3": 6,
    "gemma3n": 5, "gpt-oss": 2, "laguna": 4, "llama4": 4, "mellum": 4, "modern-bert": 3, "muse-glimmer": 4,
    "olmo2": 4, "phi3": 0, "phimoe": 0, "plamo2": 0, "plamo3": 8, "smallthinker": 4, "starcoder2": 0,
}  # fmt: skip
"""Layers of a period, of which the last one has no window; 0: all layers have one."""
LISTED = ("cohere2_moe", "gemma4", "granite_swa", "maple", "mimo2", "spark2_5", "step35")
"""Files say which layers have windows."""
FIRST_SEES_ALL = (
    "cohere2_moe",
    "laguna",
    "modern-bert",
    "smallthinker",
)  # of a period the first layer has no window, not the last one
NOT_ALWAYS = {
    "exaone-moe": 128,
    "gemma2": 4096,
    "laguna": 0,
    "mellum": 0,
    "modern-bert": 0,
    "olmo2": 0,
    "phimoe": 0,
    "plamo2": 0,
    "plamo3": 0,
    "smallthinker": 0,
    "starcoder2": 0,
}  # windows of files that do not say
PLAIN = (
    "gemma-embedding",
    "gemma3",
    "gemma3n",
    "laguna",
    "mellum",
    "olmo2",
    "plamo3",
)  # rotation of window layers is not scaled
LOCAL_BASE = ("gemma-embedding", "gemma3", "gemma3n", "modern-bert")  # 10000 in window layers of files that do not say
PAST_ONLY = ("plamo2", "plamo3")  # the number of a window does not count the query itself
TWO_SIDED = ("gemma-embedding", "modern-bert")  # half of the window is on either side
ONLY_WINDOWS_ROTATE = (
    "afmoe",
    "cohere2",
    "cohere2_moe",
    "exaone-moe",
    "exaone4",
    "llama4",
    "maple",
    "muse-glimmer",
    "smallthinker",
)
PHI3_WINDOWS = {(32, 4096): 2047, (40, 4096): 2047, (32, 131072): 262144, (40, 131072): 131072}
"""Of files from before the key, by layers and context."""
CHUNK = 8192  # of llama4, whose files do not say


def read_windows(keys: Keys, values: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of layers with windows, by field of `HParams`; tuples hold a value per layer."""
    arch, n_layer = values["arch"], values["n_layer"]
    if arch not in PERIODS and arch not in LISTED:
        return {}
    size = _size(keys, values)
    is_window = _pattern(keys, values) if size else (False,) * n_layer
    found: dict[str, Any] = {"chunk" if arch == "llama4" else "window": tuple(size * w for w in is_window)}
    for name, key in (("head_dim_k", "key_length"), ("head_dim_v", "value_length")):
        own = keys.integer(f"attention.{key}_swa", values[name], least=1)
        found[name] = tuple(own if w else values[name] for w in is_window)
    return found | _rotation(keys, values, is_window, found["head_dim_k"])


def _size(keys: Keys, values: dict[str, Any]) -> int:
    """Return the positions of a window; 0 without windows."""
    key, arch = "attention.sliding_window", values["arch"]
    if arch == "llama4":
        return CHUNK if keys.integer(key, CHUNK) else 0
    default = NOT_ALWAYS.get(arch)
    if arch == "exaone4":
        default = 4096 if values["n_layer"] == 64 else 0
    if arch == "phi3":
        default = PHI3_WINDOWS.get((values["n_layer"], values["n_ctx_train"]))
    size = keys.integer(key, default)
    if size and arch in TWO_SIDED:
        return size // 2 + 1
    return size + 1 if size and arch in PAST_ONLY else size


def _pattern(keys: Keys, values: dict[str, Any]) -> tuple[bool, ...]:
    arch, n_layer = values["arch"], values["n_layer"]
    key = "attention.sliding_window_pattern"
    heads = by_layer(values["n_head"], n_layer)
    if key not in keys and arch == "laguna" and len(set(heads)) > 1:
        return tuple(n != heads[0] for n in heads)  # window layers have more heads than the first one, which has none
    flags = keys.items(key, n_layer)
    if flags is not None:
        return tuple(map(bool, flags))
    if isinstance(flag := keys.raw(key, PERIODS.get(arch)), bool):
        return (flag,) * n_layer
    period = keys.integer(key, PERIODS.get(arch))
    sees_all = 0 if arch in FIRST_SEES_ALL else period - 1
    return tuple(period == 0 or il % period != sees_all for il in range(n_layer))


def _rotation(
    keys: Keys, values: dict[str, Any], is_window: Sequence[bool], head_dim_k: Sequence[int]
) -> dict[str, Any]:
    """Return the rotation of each layer, and the rotated columns of a head (0: none)."""
    arch, n_layer, rope = values["arch"], values["n_layer"], values["rope"]
    assert isinstance(rope, RopeParams)
    default = 10000.0 if arch in LOCAL_BASE else rope.freq_base
    own = replace(rope, freq_base=keys.number("rope.freq_base_swa", default), factors=arch != "gemma4")
    if arch == "step35":
        mask = keys.integer("rope.scaling.apply_mask", 1)
        rope, own = replace(rope, factors=bool(mask & 1)), replace(own, factors=bool(mask & 2))
    if arch in PLAIN:
        own = replace(own, scaling="none", factor=1.0, attn_factor=1.0, factors=False)
    ropes = [own if w else rope for w in is_window]
    if "rope.freq_base_per_layer" in keys:
        bases = keys.numbers("rope.freq_base_per_layer", n_layer=n_layer)
        ropes = [replace(r, freq_base=base) for r, base in zip(ropes, bases, strict=True)]
    if (least := min(r.freq_base for r in ropes)) <= 1:
        raise keys.fail("rope.freq_base_swa", f"is {least}; bases of rotations must be larger than 1")
    n_rot = n_rot_window = values["n_rot"]
    if arch == "laguna" and any(is_window):
        n_rot_window = max(head_dim_k)  # whole heads, where files do not say
    if arch == "step35" or (arch == "laguna" and any(is_window) and "rope.dimension_count" not in keys):
        n_rot //= 2  # of layers without a window
    n_rot_window = keys.integer("rope.dimension_count_swa", min(n_rot_window, *head_dim_k))
    n_rots = [n_rot_window if w else n_rot for w in is_window]
    if "rope.dimension_count_per_layer" in keys:
        n_rots = list(by_layer(keys.per_layer("rope.dimension_count_per_layer", n_layer=n_layer), n_layer))
    if arch in ONLY_WINDOWS_ROTATE and (any(is_window) or arch not in ("exaone4", "llama4", "smallthinker")):
        lead = values["n_layer_dense_lead"] if arch == "cohere2_moe" else 0
        n_rots = [n if w or il < lead else 0 for il, (n, w) in enumerate(zip(n_rots, is_window, strict=True))]
    if (rotates := keys.items("attention.rope_pattern", n_layer)) is not None:
        n_rots = [n if rotate else 0 for n, rotate in zip(n_rots, rotates, strict=True)]
    for n, head_dim in zip(n_rots, head_dim_k, strict=True):
        if n % 2 or n > head_dim:
            raise keys.fail(
                "rope.dimension_count_swa", f"is {n}; it must be even and at most the key length {head_dim}"
            )
    return {"rope": tuple(ropes), "n_rot": tuple(n_rots)}
