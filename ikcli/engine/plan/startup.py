"""What every run settles before weights are loaded: sizes against the model, cache types, expert options, placement.

Reads the header of the model file only. Refuses combinations that cannot work, naming one that does.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from ikcli.engine.pipeline.place import LOCAL, Pipeline
from ikcli.engine.pipeline.rules import check_stages
from ikcli.engine.plan.devices import find_machine
from ikcli.engine.plan.missing_parts import assume_missing, missing_data
from ikcli.engine.plan.planner import Planner
from ikcli.engine.plan.programs import check_cache_types
from ikcli.engine.run import encoders
from ikcli.errors import UsageError
from ikcli.settings.run import RunConfig


@dataclass(frozen=True, slots=True)
class Startup:
    """A checked run: its settings (`-mla` switched off where the model has none), the opened model, what to print.

    The session applies `resolve()` itself, so the settings are still those of the user.
    """

    config: RunConfig
    planner: Planner
    notices: tuple[str, ...]
    warnings: tuple[str, ...]


def prepare(config: RunConfig, given: Collection[str] = (), pipeline: Pipeline = LOCAL) -> Startup:
    """Check `config` against its model.

    `given` are the options (field paths) the user wrote; `pipeline` starts the stages of `--stages`.
    """
    assert config.model is not None
    planning = config.dry_run or config.command == "plan"
    if config.device_spec and not planning:
        raise UsageError("--device-spec describes devices for planning; add --dry-run, or use ik plan")
    config = check_stages(config, given, pipeline)
    planner = Planner.of_file(config, header_only=planning, pipeline=pipeline)
    file, hp = planner.file, planner.hp
    notices = assume_missing(file, hp) + missing_data(file)
    notices += [] if hp.kv_lora_rank else _without_mla(config, hp.arch, given)
    config = config if hp.kv_lora_rank else replace(config, mla=0)
    check_cache_types(config, config.mla)
    if config.v_hadamard and config.mla:
        notices.append(f"-vhad has no effect with -mla {config.mla}, which keeps no V cache of heads; use -khad")
    config, warnings = check_ser(config, hp.n_expert, hp.n_expert_used)
    planner = planner.on(find_machine(config, exact=planning or config.fit))
    config = encoders.settle(config, hp, planner.machine, given, notices)
    if config.fit:
        config, found = _fit(planner, config)
        notices += found
    placed = planner.place(config)
    return Startup(config, planner, (*notices, *placed.notices), (*warnings, *placed.warnings))


def _fit(planner: Planner, config: RunConfig) -> tuple[RunConfig, list[str]]:
    """The settings that `--fit` chooses, and what it says."""
    if not planner.machine.gpus:
        return replace(config, fit=False), ["--fit has no effect: there is no CUDA device"]
    from ikcli.engine.plan.fit import fit

    found = fit(planner, config)
    return found.config, [f"--fit chose: {found.options}"]


def _without_mla(config: RunConfig, arch: str, given: Collection[str]) -> list[str]:
    if "mla" not in given or config.mla == 0:
        return []
    return [f"-mla {config.mla} is ignored: {arch} models have no multi-head latent attention"]


def check_ser(config: RunConfig, n_expert: int, n_expert_used: int) -> tuple[RunConfig, list[str]]:
    """Drop a `-ser` that changes nothing, with a warning that says how many experts are used."""
    if config.ser is None or (n_expert and config.ser[0] < n_expert_used):
        return config, []
    why = (
        f"each token uses all {n_expert_used} experts that the model chooses"
        if n_expert
        else "the model has no experts"
    )
    return replace(config, ser=None), [f"-ser {config.ser[0]},{config.ser[1]:g} has no effect: {why}"]
