"""Rules between the settings of graphs and the model: types of caches, images."""

from __future__ import annotations

from ikcli.engine.run.model import Model
from ikcli.errors import UnsupportedError, UsageError
from ikcli.models import GraphConfig, HParams, MediaConfig
from ikcli.quant.formats import format_by_name, get_format
from ikcli.settings.run import KV_TYPES, RunConfig

FLOAT_TYPES = ("f32", "f16", "bf16")
CACHE_TYPES = tuple(format_by_name(name).type for name in KV_TYPES)


def check_caches(cfg: GraphConfig, config: RunConfig, model: Model) -> None:
    """Refuse cache types that cannot work before anything is loaded."""
    latent = bool(model.hp.kv_lora_rank) and cfg.mla > 0
    used = {"-ctk": cfg.type_k}
    if not latent or (cfg.mla == 1 and not cfg.flash_attn):
        used["-ctv"] = cfg.type_v
    for option, type_ in used.items():
        if type_ not in CACHE_TYPES:
            name = get_format(type_).name
            raise UnsupportedError(f"{option} {name} cannot be the type of a cache; use one of {', '.join(KV_TYPES)}")
    check_cache_types(config, cfg.mla if latent else 0)


def check_cache_types(config: RunConfig, mla: int) -> None:
    """Raise UsageError for cache types that the attention mode cannot use; `mla` is 0 for models without MLA."""
    if config.flash_attn or config.type_v in FLOAT_TYPES or mla >= 2:
        return
    if mla == 1:
        raise UsageError(
            f"-ctv {config.type_v} with -mla 1 and without flash attention is not possible, because this cache is "
            "transposed; use -ctv f16, or add -fa"
        )
    raise UsageError(f"-ctv {config.type_v} needs flash attention; add -fa, or use -ctv f16")


def check_media(media: MediaConfig, hp: HParams) -> None:
    """Raise UnsupportedError for a model that cannot read these images."""
    if not hp.causal or hp.n_layer_dec or hp.arch == "qwen4exp":
        raise UnsupportedError(f"{hp.source}: {hp.arch} models read texts only; run it without a projector")
    if media.framed != (hp.arch == "cogvlm"):
        what = "has visual experts" if hp.arch == "cogvlm" else "lacks the visual experts that the projector needs"
        raise UnsupportedError(f"{hp.source} {what}: use the projector of this model")
    if media.n_deep >= hp.n_layer:
        raise UnsupportedError(
            f"{hp.source}: the projector has rows for {media.n_deep} layers, the model {hp.n_layer} layers; use the "
            "projector of this model"
        )
