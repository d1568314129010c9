"""`ik study`: measure the KL divergence that each tensor costs in each type; print, keep and plot the results."""

from __future__ import annotations

from pathlib import Path

from ikcli import log
from ikcli.bench.sweep_plot import check_output
from ikcli.cli.model import find_model
from ikcli.errors import UsageError
from ikcli.fleet.choose import executor_of, threads_each
from ikcli.gguf.types import TYPES
from ikcli.hostinfo import physical_cores
from ikcli.quant.encoders import available_types
from ikcli.settings.quantize import StudyConfig
from ikcli.settings.run import default_model, default_text
from ikcli.study.plot import draw
from ikcli.study.resident import ResidentOptions
from ikcli.study.study import (
    StudyOptions,
    StudyPlan,
    StudyProgress,
    json_text,
    read_study,
    run_study,
    table_lines,
    types_named,
)

_DEFAULT_TYPES = ("iq2_k,iq3_k,iq4_k,iq6_k",)
_SHOWN = 3  # tensors named in a warning


def run(config: StudyConfig) -> int:
    """Measure, or with --show print the results of a journal."""
    plot = Path(config.plot) if config.plot else None
    if plot is not None:
        check_output(plot)
    if config.show:
        found = read_study(Path(config.show))
    else:
        options = _options(config)
        found = run_study(options, executor_of(config.fleet, options.resident.n_threads), _announce, _report)
    print(json_text(found) if config.json else "\n".join(table_lines(found)))
    if plot is not None:
        draw(found, plot)
        log.log(f"study: plot in {plot}")
    return 0


def _options(config: StudyConfig) -> StudyOptions:
    types = types_named(config.types or _DEFAULT_TYPES)
    unknown = [t for t in types if t not in available_types()]
    if unknown:
        raise UsageError(f"--types {TYPES[unknown[0]].name}: this type cannot be written")
    if config.chunks == 0:
        raise UsageError("--chunks 0 leaves nothing to run; give a number above 0, or -1 for all")
    if not 0 <= config.precision < 1:
        raise UsageError(f"--precision {config.precision}: give a share from 0 (use all chunks) to below 1")
    resident = ResidentOptions(
        find_model(config.model, config.hub) or default_model(),
        Path(config.file) if config.file else default_text(),
        chunks=config.chunks,
        n_ctx=config.n_ctx,
        n_threads=threads_each(config.n_threads or physical_cores(), config.fleet),
        overrides=config.override_kv,
        prefix_bytes=config.prefix_mib << 20,
    )
    return StudyOptions(
        resident,
        types,
        by=config.by,
        include=config.tensors,
        exclude=config.exclude,
        imatrix=Path(config.imatrix) if config.imatrix else None,
        precision=config.precision,
        journal=Path(config.journal) if config.journal else None,
    )


def _announce(plan: StudyPlan) -> None:
    groups, types = len({u.title for u in plan.units}), len({u.type for u in plan.units})
    text = f"study: {len(plan.units)} measurements, {groups} groups of tensors in {types} types"
    log.log(text + (f"; {plan.n_known} of them are in the journal" if plan.n_known else ""))
    work, billions = plan.work, plan.work.n_weights / 1e9
    log.log(
        f"study: at most {work.passes:.1f} passes over the text, {billions:.3f} billion weights to encode, "
        f"{log.shown_size(work.most_bytes)} of tensors at a time"
    )
    for found in plan.left:
        more = f" and {len(found.tensors) - _SHOWN} more" if len(found.tensors) > _SHOWN else ""
        names = ", ".join(found.tensors[:_SHOWN]) + more
        of = f"{TYPES[found.type].name}: " if found.type is not None else ""
        log.warn(f"{of}{found.reason}; left out: {names}")


def _report(p: StudyProgress) -> None:
    eta, found = p.seconds / p.done * (p.total - p.done), p.found
    log.log(
        f"study: [{p.done}/{p.total}] {p.unit.title} {TYPES[p.unit.type].name}: {found.kld:.6f} ± {found.error:.6f} "
        f"on {found.n_tokens} tokens, ETA {_span(eta)}"
    )


def _span(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
