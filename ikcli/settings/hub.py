"""Options that name a model on a hub or by URL: shared by all commands that take -m."""

# ruff: noqa: E501  (one option per line reads as a table; `opt` makes dataclass fields)
# fmt: off

from __future__ import annotations

from dataclasses import dataclass

from ikcli.settings.option import opt


@dataclass(frozen=True, slots=True)
class HubConfig:
    """A model by name, downloaded once into the cache."""

    repo: str = opt("", "-hf -hfr --hf-repo", "str", "model from a Hugging Face repository; without QUANT Q4_K_M, or else its first one. With -m FILE (that is not there) or --hf-file that file of it", topic="model", form="USER/REPO[:QUANT]", example="-hf user/repo:Q4_K_M", bench_list=False, env="LLAMA_ARG_HF_REPO")
    file: str = opt("", "-hff --hf-file", "str", "the file of --hf-repo to use; of a split model any part", topic="model", form="FILE", example="-hf user/repo -hff model-Q4_K_M.gguf", bench_list=False, env="LLAMA_ARG_HF_FILE")
    token: str = opt("", "-hft --hf-token", "str", "access token for private and gated repositories; default HF_TOKEN, or that of hf auth login", topic="model", form="TOKEN", example="-hft hf_...", bench_list=False)
    url: str = opt("", "-mu --model-url", "str", "model from this address, downloaded once; of a split model the address of the first part", topic="model", form="URL", example="-mu https://example.org/model.gguf", bench_list=False, env="LLAMA_ARG_MODEL_URL")
    offline: bool = opt(False, "--offline", "switch", "use what has been downloaded and ask no server (also HF_HUB_OFFLINE=1)", topic="model", example="--offline", env="LLAMA_ARG_OFFLINE")
