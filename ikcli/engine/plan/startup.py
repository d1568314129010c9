"""Settle what every run needs before weights are loaded: sizes, cache types, expert options, placement.

Only the header of the model file is read. Combinations that cannot work are refused with the name of one that does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from ikcli.engine.pipeline.place import LOCAL, Pipeline
from ikcli.engine.plan.devices import Machine, find_machine
from ikcli.engine.plan.graph_rules import check_cache_types
from ikcli.engine.plan.missing_parts import assume_missing, missing_data
from ikcli.engine.plan.model_rules import (
    check_indexer,
    check_ser,
    check_streams,
    settle_encoder,
    settle_encoder_decoder,
    settle_mla,
)
from ikcli.engine.plan.planner import MIB, Planner
from ikcli.engine.run.run_device import Beside
from ikcli.models import HParams
from ikcli.settings.rules import check_devices, check_stages
from ikcli.settings.run import RunConfig


@dataclass(frozen=True, slots=True)
class Startup:
    """A checked run: its settings (`-mla` off if the model has no latent attention), the opened model, and the notices.

    The session applies `resolve()` itself, so the settings are still those of the user.
    """

    config: RunConfig
    planner: Planner
    notices: tuple[str, ...]
    warnings: tuple[str, ...]


def prepare(
    config: RunConfig,
    given: Collection[str] = (),
    pipeline: Pipeline = LOCAL,
    beside: Callable[[RunConfig, HParams, Machine], Beside] | None = None,
) -> Startup:
    """Check `config` against its model.

    `given` are the options (field paths) that the user wrote. `pipeline` starts the stages of `--stages`. `beside`
    tells what the run needs beside the model.
    """
    assert config.model is not None
    check_devices(config)
    config = _shared_out(check_stages(config, given), pipeline)
    planner = Planner.of_file(config, header_only=config.only_plans, pipeline=pipeline)
    hp, notices = planner.hp, assume_missing(planner.file, planner.hp) + missing_data(planner.file)
    config = settle_mla(config, hp, given, notices)
    check_cache_types(config, config.mla)
    config, warnings = check_ser(config, hp.n_expert, hp.n_expert_used, hp.expert_gating)
    planner = planner.on(find_machine(config, exact=config.only_plans or config.fit))
    if beside is not None:
        planner = planner.on(planner.machine, beside=beside(config, hp, planner.machine))
    config = settle_encoder(config, hp, planner.machine, given, notices)
    config = settle_encoder_decoder(config, hp, planner.machine, given, notices)
    check_streams(config, hp)
    check_indexer(config, hp, given, notices)
    if config.fit:
        config, found = _fit(planner, config)
        notices += found
    placed = planner.place(config)
    return Startup(config, planner, (*notices, *placed.notices), (*warnings, *placed.warnings))


def _shared_out(config: RunConfig, pipeline: Pipeline) -> RunConfig:
    """Set the share of the model that each stage on a cluster gets, unless the user gave it."""
    fleet = config.fleet
    if fleet.stages == 1 or fleet.ray in (None, "local") or fleet.stage_split:
        return config
    return replace(config, fleet=replace(fleet, stage_split=pipeline.shares(fleet)))


def _fit(planner: Planner, config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Return the settings that `--fit` chooses, and its notices."""
    if not planner.machine.gpus:
        return replace(config, fit=False), ["--fit has no effect without a CUDA device"]
    from ikcli.engine.plan.fit import fit, with_cache

    found = fit(planner, config)
    if config.expert_cache is None:
        found = with_cache(planner, found, config.fit_margin * MIB)
    return found.config, [f"--fit chose: {found.options}"]
