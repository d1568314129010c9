"""The architectures that checkpoints can be converted to: which classes of transformers they are."""

from __future__ import annotations

from functools import lru_cache

from ikcli.convert.archs import (
    bert,
    deepseek,
    deltanet,
    dense,
    gemma,
    glm,
    hub_code,
    layernorm,
    llama,
    mamba,
    mixed,
    mixed2,
    moe,
    moe2,
    older,
    qwen,
)
from ikcli.convert.build import Architecture
from ikcli.convert.config import Config
from ikcli.errors import UnsupportedError

ARCHITECTURES: tuple[Architecture, ...] = tuple(
    found
    for module in (
        *(llama, qwen, deltanet, gemma, glm, moe, deepseek, dense, layernorm, moe2, older, mixed),
        *(hub_code, mixed2, mamba, bert),
    )
    for found in module.ARCHITECTURES
)


@lru_cache(maxsize=1)
def by_class() -> dict[str, Architecture]:
    """Name in `architectures` of config.json -> how it is converted."""
    return {name: a for a in ARCHITECTURES for name in a.classes}


_BY_TYPE = {"exaone": "ExaoneForCausalLM", "mistral4": "Mistral4ForCausalLM"}
"""model_type of which the class does not tell: EXAONE 3 has that of Llama, Mistral 4 that of all that see."""


_ELSEWHERE = {"Grok1ForCausalLM": "Grok 2 (tensors in pieces for eight devices)"}
"""Classes that are known and not converted."""


def architecture_of(config: Config) -> Architecture:
    """The architecture of a checkpoint; UnsupportedError names what is known."""
    if config.model_type in _BY_TYPE:
        return by_class()[_BY_TYPE[config.model_type]]
    for name in config.classes:
        if name in by_class():
            return by_class()[name]
        if name in _ELSEWHERE:
            raise UnsupportedError(
                f"{config.path}: {_ELSEWHERE[name]} has no conversion here; a file made by convert_hf_to_gguf.py of "
                "llama.cpp runs"
            )
    known = ", ".join(sorted(by_class()))
    raise UnsupportedError(f"{config.path}: architectures is {', '.join(config.classes)}; known are {known}")
