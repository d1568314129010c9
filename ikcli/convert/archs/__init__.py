"""The architectures that checkpoints can be converted to, by the class names of config.json."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module

from ikcli.convert.archs.bert import JINA_3, NOMIC_WITH_EXPERTS
from ikcli.convert.archs.drafts import EAGLE3
from ikcli.convert.build import Architecture
from ikcli.convert.config import Config
from ikcli.errors import UnsupportedError

_FAMILIES = (
    "afmoe apertus arctic baichuan bert bitnet bloom cohere dbrx deepseek dots drafts ernie exaone falcon "
    "gemma glm gpt2 gpt_oss gptneox granite grok hunyuan internlm laguna ling llama llama4 looped mellum mimo "
    "minimax mpt muse nemotron olmo phi plamo qwen refact stablelm starcoder step t5"
)
"""The files of this folder, each with the records of a model family."""

_RECURRENT = "falcon_h1 jamba kimi lfm2 mamba mamba2 nemotron_h qwen3_next"
"""The files of `recurrent/`."""

_SPARSE = "deepseek4 openpangu"
"""The files of `sparse/`."""

_FOLDERS = {"recurrent": _RECURRENT, "sparse": _SPARSE}

ARCHITECTURES: tuple[Architecture, ...] = tuple(
    found
    for name in (
        *_FAMILIES.split(),
        *(f"{folder}.{name}" for folder, names in _FOLDERS.items() for name in names.split()),
    )
    for found in import_module(f"{__name__}.{name}").ARCHITECTURES
)


@lru_cache(maxsize=1)
def by_class() -> dict[str, Architecture]:
    """Return the records by class name, as in `architectures` of config.json."""
    return {name: a for a in ARCHITECTURES for name in a.classes}


_BY_TYPE = {"exaone": "ExaoneForCausalLM", "mistral4": "Mistral4ForCausalLM", "plamo2": "Plamo2ForCausalLM"}
"""Models that only model_type identifies: EXAONE 3 has the class of Llama, Mistral 4 that of all vision models, PLaMo 2
that of PLaMo 1 in some."""


_ELSEWHERE = {
    "Grok1ForCausalLM": "Grok 2 (tensors in pieces for eight devices)",
    "DFlashLagunaForCausalLM": "a DFlash head with windows (Laguna's)",
}
"""Known classes without a conversion."""


def architecture_of(config: Config) -> Architecture:
    """Return the architecture of a checkpoint, or raise an UnsupportedError that lists the known classes."""
    if config.model_type in _BY_TYPE:
        return by_class()[_BY_TYPE[config.model_type]]
    for name in config.classes:
        if name == "NomicBertModel" and config.raw.get("moe_every_n_layers"):
            name = NOMIC_WITH_EXPERTS
        if name == "XLMRobertaModel" and config.raw.get("lora_adaptations"):
            name = JINA_3
        if name == "LlamaForCausalLM" and "draft_vocab_size" in config:
            name = EAGLE3
        if name in by_class():
            return by_class()[name]
        if name in _ELSEWHERE:
            raise UnsupportedError(
                f"{config.path}: {_ELSEWHERE[name]} cannot be converted by ik; files made by convert_hf_to_gguf.py "
                "of llama.cpp run"
            )
    known = ", ".join(sorted(by_class()))
    raise UnsupportedError(f"{config.path}: architectures is {', '.join(config.classes)}; known are {known}")
