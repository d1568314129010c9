"""The architectures that checkpoints can be converted to, by the class names of config.json."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module

from ikcli.convert.build import Architecture
from ikcli.convert.config import Config
from ikcli.errors import UnsupportedError

_FAMILIES = (
    "afmoe arctic baichuan bert bitnet bloom cohere dbrx deepseek dots ernie exaone falcon falcon_h1 gemma glm gpt2 "
    "gpt_oss gptneox granite grok hunyuan internlm jamba kimi laguna lfm2 ling llama llama4 mamba mamba2 mellum "
    "mimo minimax mpt muse nemotron nemotron_h olmo phi plamo qwen qwen3_next refact stablelm starcoder step"
)
"""The files of this folder, each with the records of a model family."""

ARCHITECTURES: tuple[Architecture, ...] = tuple(
    found for family in _FAMILIES.split() for found in import_module(f"{__name__}.{family}").ARCHITECTURES
)


@lru_cache(maxsize=1)
def by_class() -> dict[str, Architecture]:
    """Return the records by class name, as in `architectures` of config.json."""
    return {name: a for a in ARCHITECTURES for name in a.classes}


_BY_TYPE = {"exaone": "ExaoneForCausalLM", "mistral4": "Mistral4ForCausalLM"}
"""Models that only model_type identifies: EXAONE 3 has the class of Llama, Mistral 4 that of all vision models."""


_ELSEWHERE = {
    "Grok1ForCausalLM": "Grok 2 (tensors in pieces for eight devices)",
}
"""Known classes without a conversion."""


def architecture_of(config: Config) -> Architecture:
    """Return the architecture of a checkpoint, or raise an UnsupportedError that lists the known classes."""
    if config.model_type in _BY_TYPE:
        return by_class()[_BY_TYPE[config.model_type]]
    for name in config.classes:
        if name in by_class():
            return by_class()[name]
        if name in _ELSEWHERE:
            raise UnsupportedError(
                f"{config.path}: {_ELSEWHERE[name]} cannot be converted by ik; files made by convert_hf_to_gguf.py "
                "of llama.cpp run"
            )
    known = ", ".join(sorted(by_class()))
    raise UnsupportedError(f"{config.path}: architectures is {', '.join(config.classes)}; known are {known}")
