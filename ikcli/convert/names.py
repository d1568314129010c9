"""Names of tensors in checkpoints, as the gguf package maps them to GGUF names.

Its table is the one that convert_hf_to_gguf.py uses. It is looked up by a name in general form: without prefixes such
as `model.`, with `*` for the number of the block and `#` for that of the expert. What the table lacks, has wrong, or
cannot express (rows in another order, split or stacked tensors) is in the records of `ikcli/convert/archs`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

_PREFIXES = ("model.", "language_model.", "model.")


class GeneralName(NamedTuple):
    """A tensor name in general form, and the numbers of its block and expert (-1 without one)."""

    name: str
    block: int
    expert: int


def general_name(name: str, strip: str = "") -> GeneralName:
    """Return the general form of a tensor name; `strip` is a prefix of the architecture beside `model.`."""
    for prefix in (strip, *_PREFIXES):
        name = name.removeprefix(prefix)
    block, expert = -1, -1
    words = name.replace("e_score_correction_bias", "e_score_correction.bias").split(".")
    for i, word in enumerate(words):
        if word.isdecimal():
            if block < 0:
                block, words[i] = int(word), "*"
            else:
                expert, words[i] = int(word), "#"
    return GeneralName(".".join(words), block, expert)


@lru_cache(maxsize=8)
def gguf_names(arch: str, strip: str) -> dict[str, str]:
    """Return the table of an architecture of gguf: general name without suffix -> GGUF name with `*` for the block."""
    from gguf.constants import MODEL_ARCH_NAMES
    from gguf.tensor_mapping import TensorNameMap, get_tensor_name_map

    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == arch)
    shared = TensorNameMap.block_mappings_cfg
    TensorNameMap.block_mappings_cfg = dict(shared)  # the constructor writes names of single architectures into it
    try:
        found = get_tensor_name_map(number, 1).mapping  # block 0 stands for all
    finally:
        TensorNameMap.block_mappings_cfg = shared
    return {general_name(key, strip).name: general_name(place).name for key, (_, place) in found.items()}
