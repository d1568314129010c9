"""The output of `ik quantize`: the chosen types, a dry run, the progress of a job."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ikcli import log
from ikcli.commands._quantize_request import Request

if TYPE_CHECKING:
    from ikcli.quant.recipes import TypeChoice
    from ikcli.quant.tool import ToolPlan

_FEW_BITS = 5.0


def would_gain(plan: ToolPlan) -> bool:
    """Return whether most of the result is in types of less than 5 bits that support error feedback."""
    from ikcli.quant.feedback import supports

    changed = [c for c in plan.job.choices if c.changes and supports(c.new)]
    small = sum(c.n_bytes for c in changed if 8 * c.n_bytes < _FEW_BITS * math.prod(c.shape))
    return 2 * small > plan.new_bytes


def _type_name(type: Any) -> str:
    from ikcli.gguf.types import TYPES

    return TYPES[type].name


def report_plan(request: Request, plan: ToolPlan) -> None:
    from ikcli.quant.custom_rules import rule_table
    from ikcli.quant.imatrix_use import expert_lines

    imatrix = plan.job.imatrix
    if imatrix is not None:
        sets = ", ".join(imatrix.datasets) or "unknown data"
        log.log(f"importance matrix: {len(imatrix.entries)} entries from {sets}, {imatrix.n_chunks} chunks")
        for line in expert_lines(plan.experts, request.verbose):
            log.log(line)
    if plan.uses:
        log.log("\n".join(rule_table(plan.uses)))
    report_plan_notes(plan)
    if plan.target is not None:
        from ikcli.quant.target_report import choice_table, prediction_lines

        log.log("\n".join(choice_table(plan.job.choices, plan.target)))
        log.log(f"target: {plan.new_bytes} of {plan.target.budget} bytes used ({plan.bpw:.3f} BPW)")
        log.log("\n".join(f"target: {line}" for line in prediction_lines(plan.target)))
    if request.verbose and request.dry_run:
        for c in plan.job.choices:
            if c.rule is not None:
                log.log(f"Using custom type {_type_name(request.recipe.custom[c.rule].type)} for tensor {c.name}")


def report_plan_notes(plan: ToolPlan, where: str = "") -> None:
    """Report what the user should know before the result is written."""
    for note in plan.notes:
        log.warn(where + note)
    if plan.n_fallback:
        n = f"{plan.n_fallback} of {len(plan.job.choices)}"
        log.warn(f"{where}{n} tensors have rows that do not fit and get a fallback type")


def shape_text(shape: tuple[int, ...]) -> str:
    """Return `4096 x 128 x 8`."""
    return " x ".join(str(ne) for ne in shape)


def dry_run_lines(plan: ToolPlan) -> list[str]:
    """Return a table of all tensors and a line with the totals."""
    rows = [("tensor", "shape", "old", "new", "MiB", "reason")]
    for c in plan.job.choices:
        size = f"{c.n_bytes / 2**20:.3f}"
        rows.append((c.name, shape_text(c.shape), _type_name(c.old), _type_name(c.new), size, c.reason))
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    lines = [
        "  ".join(
            text.rjust(w) if i == 4 else text.ljust(w) for i, (text, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return [line.rstrip() for line in lines] + ["", totals(plan)]


def totals(plan: ToolPlan) -> str:
    """Return the number of tensors, bytes, GiB and bits per weight of the result, and of the input."""
    old_bpw = 8 * plan.old_bytes / plan.job.file.n_elements
    return (
        f"total: {len(plan.job.choices)} tensors, {plan.new_bytes} bytes = {plan.new_bytes / 2**30:.3f} GiB "
        f"({plan.bpw:.3f} BPW); input {plan.old_bytes / 2**30:.3f} GiB ({old_bpw:.3f} BPW)"
    )


def write(request: Request, plan: ToolPlan) -> None:
    from ikcli.quant.job import JobProgress
    from ikcli.quant.quantizer import run as run_job

    job, total = plan.job, len(plan.job.choices)
    log.log(f"{request.mode}: '{request.input}' to '{request.output}' as {request.type_name}, {job.n_threads} threads")

    def tensor(number: int, c: TypeChoice) -> None:
        old = job.file.tensors[c.source or c.name].n_bytes
        text = f"[{number:4d}/{total:4d}] {c.name:>36s} - [{shape_text(c.shape)}], type = {_type_name(c.old):>6s}, "
        if not c.changes:
            log.log(text + f"size = {old / 2**20:8.3f} MiB")
            return
        if c.rule is not None:
            log.log(f"Using custom type {_type_name(request.recipe.custom[c.rule].type)} for tensor {c.name}")
        sizes = f"{old / 2**20:8.2f} MiB -> {c.n_bytes / 2**20:8.2f} MiB"
        log.log(text + f"converting to {_type_name(c.new)} .. size = {sizes}")

    def skipped(path: Path) -> None:
        log.log(f"{path} exists and is complete, skipping it")

    def resumed(path: Path, n: int) -> None:
        log.log(f"{path}: {n} tensors are complete from an interrupted run; continuing after them")

    def discarded(path: Path) -> None:
        log.log(f"{path}: an interrupted run had other inputs or settings; its output is dropped, starting again")

    started = time.monotonic()
    try:
        with log.progress(request.mode, plan.old_bytes, in_bytes=True) as advance:
            hooks = JobProgress(tensor, skipped, advance, resumed, discarded)
            if request.fleet.wanted:
                from ikcli.quant.matrix import MatrixJob
                from ikcli.study import fleet_quantize

                paths = fleet_quantize.run([MatrixJob(job)], [request.options], request.fleet, hooks)
            else:
                paths = run_job(job, hooks)
    except KeyboardInterrupt:
        if not request.fleet.wanted or request.fleet.journal:
            log.log("interrupted; complete tensors are kept, and the same command continues from there")
        raise
    seconds = time.monotonic() - started
    log.log(totals(plan))
    rate = plan.old_bytes / 2**20 / max(seconds, 1e-9)
    log.log(f"wrote {len(paths)} file{'s' if len(paths) != 1 else ''} in {seconds:.2f} s ({rate:.1f} MiB/s of input)")
