"""Options that name a model on a hub or by URL, shared by all commands that take -m."""

# fmt: off

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ikcli.settings.option import opt

# One partial per topic, with the values that its options share.
_model = partial(opt, topic="model", bench_list=False)


@dataclass(frozen=True, slots=True)
class HubConfig:
    """A model given by name, downloaded once into the cache."""

    repo: str = _model("", "-hf -hfr --hf-repo", "str", form="USER/REPO[:QUANT]", example="-hf user/repo:Q4_K_M",
        env="LLAMA_ARG_HF_REPO",
        help="model from a Hugging Face repository; without QUANT its Q4_K_M, or else its first quant. --hf-file or "
        "-m FILE (if FILE does not exist) names a file of it")
    file: str = _model("", "-hff --hf-file", "str", form="FILE", example="-hf user/repo -hff model-Q4_K_M.gguf",
        env="LLAMA_ARG_HF_FILE", help="file of --hf-repo to use; any part of a split model")
    token: str = _model("", "-hft --hf-token", "str", form="TOKEN", example="-hft hf_...",
        help="access token for private and gated repositories; default HF_TOKEN, or that of hf auth login")
    url: str = _model("", "-mu --model-url", "str", form="URL", example="-mu https://example.org/model.gguf",
        env="LLAMA_ARG_MODEL_URL",
        help="model from this address, downloaded once; for a split model the address of its first part")
    offline: bool = opt(False, "--offline", "switch", topic="model", example="--offline", env="LLAMA_ARG_OFFLINE",
        help="use downloaded files and contact no server (also HF_HUB_OFFLINE=1)")
