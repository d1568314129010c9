"""What every run settles before weights are loaded: sizes against the model, cache types, expert options, placement.

Reads the header of the model file only. Refuses combinations that cannot work, naming one that does.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from ikcli.config import RunConfig
from ikcli.engine.placement import Placement, place
from ikcli.errors import UsageError
from ikcli.gguf.reader import GGUFFile, open_gguf
from ikcli.models.hparams import HParams

FLOAT_TYPES = ("f32", "f16", "bf16")


_LATER = {"fit": "--fit"}
"""Options of which this version has no implementation yet, said once when they are used."""


@dataclass(frozen=True, slots=True)
class Startup:
    """A checked run: its settings (`-mla` switched off where the model has none), placement, and what to print.

    The session applies `resolve()` itself, so the settings are still those of the user.
    """

    config: RunConfig
    file: GGUFFile
    hparams: HParams
    placement: Placement
    notices: tuple[str, ...]
    warnings: tuple[str, ...]


def prepare(config: RunConfig, given: Collection[str] = ()) -> Startup:
    """Check `config` against its model; `given` are the options (field paths) the user wrote."""
    assert config.model is not None
    file = open_gguf(config.model, config.override_kv)
    hp = HParams.from_gguf(file.metadata, file.tensors, str(file.paths[0]))
    notices = [] if hp.kv_lora_rank else _without_mla(config, hp.arch, given)
    config = config if hp.kv_lora_rank else replace(config, mla=0)
    check_cache_types(config, config.mla)
    if config.v_hadamard and config.mla:
        notices.append(f"-vhad has no effect with -mla {config.mla}, which keeps no V cache of heads; use -khad")
    later = [name for field, name in _LATER.items() if getattr(config, field)]
    if later:
        notices.append(f"not supported in this version, ignored: {' '.join(later)}")
    notices += check_ser(config, hp.n_expert, hp.n_expert_used)
    n_bytes = {name: tensor.n_bytes for name, tensor in file.tensors.items()}
    placed = place(list(file.tensors), hp.n_layer, config, n_bytes=n_bytes)
    return Startup(config, file, hp, placed, (*notices, *placed.notices), placed.warnings)


def _without_mla(config: RunConfig, arch: str, given: Collection[str]) -> list[str]:
    if "mla" not in given or config.mla == 0:
        return []
    return [f"-mla {config.mla} is ignored: {arch} models have no multi-head latent attention"]


def check_cache_types(config: RunConfig, mla: int) -> None:
    """UsageError for cache types that the attention mode cannot use; `mla` is 0 for models without MLA."""
    if config.flash_attn or config.type_v in FLOAT_TYPES or mla >= 2:
        return
    if mla == 1:
        raise UsageError(
            f"-ctv {config.type_v} with -mla 1 and without flash attention is not possible, because this cache is "
            "transposed; use -ctv f16, or add -fa"
        )
    raise UsageError(f"-ctv {config.type_v} needs flash attention; add -fa, or use -ctv f16")


def check_ser(config: RunConfig, n_expert: int, n_expert_used: int) -> list[str]:
    """Notices about `-ser`; UsageError if it asks for more experts than the model uses."""
    if config.ser is None:
        return []
    k_min, threshold = config.ser
    if not n_expert:
        return [f"-ser {k_min},{threshold:g} has no effect: the model has no experts"]
    if k_min > n_expert_used:
        raise UsageError(f"-ser {k_min},{threshold:g}: the model uses {n_expert_used} experts, Kmin cannot be larger")
    if k_min == n_expert_used:
        return [f"-ser {k_min},{threshold:g} has no effect: the model uses {n_expert_used} experts anyway"]
    return []
