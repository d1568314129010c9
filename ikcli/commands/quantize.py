"""`ik quantize [options] in.gguf [out.gguf] TYPE [nthreads]`: the reference's command line for `quant.tool`.

Corresponds to examples/quantize of ik_llama.cpp. With `--repack` or `--unrepack` it only regroups rows.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ikcli import log
from ikcli.commands._quantize_output import _type_name, dry_run_lines, report_plan, would_gain, write
from ikcli.commands._quantize_request import Request, open_checked, open_planned, open_whole, request_of, with_model
from ikcli.commands._target import check_sides
from ikcli.errors import IkError, UsageError
from ikcli.gguf.heads import Heads
from ikcli.imatrix.self_covariance import SELF, planned_data, with_moments
from ikcli.settings.quantize import QuantizeConfig

if TYPE_CHECKING:
    from ikcli.gguf.reader import GGUFFile
    from ikcli.quant.tool import ToolPlan


def run(config: QuantizeConfig) -> int:
    """Plan, report, and write the result unless this is a dry run."""
    # Rows are spread over threads here, and BLAS must know that before NumPy is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    config = with_model(config)
    if config.matrix:
        from ikcli.commands import _quantize_matrix

        return _quantize_matrix.run(config)
    request = request_of(config)
    if request.preflight:
        return _preflight(request)
    if request.mode != "quantize":
        return _run(request)
    works_first = request.target is not None or request.options.covariance == SELF
    if works_first and not request.dry_run:
        _check_output(request)
    with with_moments(
        [request.options],
        request.input,
        request.output,
        request.covariance_tokens,
        request.fleet,
        dry_run=request.dry_run and request.target is None,
    ) as (options,):
        return _run(replace(request, options=options))


def _run(request: Request) -> int:
    from ikcli.quant.tool import plan_of, plan_repack_of

    file = _opened(request)
    for rule in request.recipe.custom:
        log.log(f"Adding custom rule {rule.pattern} -> {_type_name(rule.type)}")
    if request.mode == "quantize":
        with _measuring(request, file) as advance:
            plan = plan_of(file, request.output, request.recipe, request.options, request.target, advance)
    else:
        plan = plan_repack_of(file(), request.output, request.patterns, request.mode == "unrepack", request.options)
    report_plan(request, plan)
    _report_recipe(request, plan)
    if request.mode != "quantize" and request.heads is Heads.KEPT and not any(c.changes for c in plan.job.choices):
        log.log(f"nothing to {request.mode}: no file is written")
        return 0
    if request.dry_run:
        print("\n".join(dry_run_lines(plan)))
        return 0
    write(request, plan)
    if request.mode == "quantize" and request.options.covariance is None and would_gain(plan):
        log.log(
            "hint: --covariance self runs the model on random tokens first and about halves the divergence of files "
            "like this; it takes several times as long"
        )
    return 0


def _opened(request: Request) -> Callable[[], GGUFFile]:
    """Open the model on first use, once; its header is enough for a dry run."""

    @functools.cache
    def file() -> GGUFFile:
        if not request.dry_run:
            return open_whole(request.input, request.options.overrides, request.heads)
        found, notes = open_planned(request.input, request.options.overrides, request.heads)
        for note in notes:
            log.log(note)
        if request.target is not None and not all(map(found.has_data, found.tensors)):
            raise UsageError(f"{request.input}: a target measures the weights, and some are missing; give a TYPE")
        return found

    return file


def _preflight(request: Request) -> int:
    """Print the report; return 1 if the run would fail."""
    from ikcli.hostinfo import available_memory
    from ikcli.quant.preflight import PlannedJob, preflight

    r = request
    runs = None
    if r.options.covariance == SELF:
        runs = partial(planned_data, r.input, r.covariance_tokens, r.options.overrides)
        r = replace(r, options=replace(r.options, covariance=None))
    opened = partial(open_checked, r.input, r.options.overrides, r.heads)
    task = PlannedJob(r.mode, opened, r.output, r.recipe, r.options, r.patterns, r.target, runs)
    report = preflight(task, available_memory())
    print("\n".join(report.lines()))
    return 1 if report.failed else 0


def _check_output(request: Request) -> None:
    """Check that the result can be written, before types are measured."""
    from ikcli.gguf.reader import open_gguf
    from ikcli.quant.output_check import check_output, output_paths

    parts = open_gguf(request.input, request.options.overrides).paths
    check_output(output_paths(Path(request.output), len(parts), request.options.keep_split), parts)


def _report_recipe(request: Request, plan: ToolPlan) -> None:
    """Write the recipe to the requested file; print that of a target otherwise."""
    if not request.write_recipe and plan.target is None:
        return
    from ikcli.quant.target_report import recipe_text

    text = "\n".join(recipe_text(plan.job.choices, plan.target)) + "\n"
    if not request.write_recipe or request.write_recipe == "-":
        print(text, end="", flush=True)
        return
    try:
        Path(request.write_recipe).write_text(text, encoding="utf-8")
    except OSError as problem:
        raise IkError(f"--write-recipe {request.write_recipe}: {problem.strerror or problem}") from None
    log.log(f"recipe written to {request.write_recipe}")


@contextmanager
def _measuring(request: Request, opened: Callable[[], GGUFFile]) -> Iterator[Callable[[float], None]]:
    """Show a progress bar while candidate types are measured."""
    if request.target is None:
        yield lambda n_bytes: None
        return
    file = opened()
    for note in check_sides(request.target, list(file.tensors), request.options.strict):
        log.warn(note)
    total = file.n_bytes
    with log.progress("measuring types", total, in_bytes=True) as advance:
        yield advance
