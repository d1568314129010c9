"""`ik quantize [options] in.gguf [out.gguf] TYPE [nthreads]`: the reference's command line around quant.tool.

Answers to examples/quantize of ik_llama.cpp; with `--repack` or `--unrepack` rows are regrouped and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ikcli import log
from ikcli.cli.argv import read_lines
from ikcli.cli.parser import usage
from ikcli.commands._quantize_source import open_checked, open_planned, with_model
from ikcli.commands._self_covariance import SELF, planned_data, with_moments
from ikcli.commands._target import check_sides, has_target, target_options
from ikcli.errors import IkError, UsageError
from ikcli.settings.fleet import BatchConfig
from ikcli.settings.quantize import QuantizeConfig
from ikcli.suggest import nearest

if TYPE_CHECKING:
    from ikcli.gguf.reader import GGUFFile
    from ikcli.quant.calibration import Measure
    from ikcli.quant.recipes import RecipeOptions, TypeChoice
    from ikcli.quant.target import TargetOptions
    from ikcli.quant.tool import ToolOptions, ToolPlan

_FEW_BITS = 5.0
_Q8_0, _NO_TYPE = 7, "TARGET"  # file type to start from when a target is given without TYPE


@dataclass(frozen=True, slots=True)
class Request:
    """A parsed command line."""

    input: str
    output: str
    mode: str  # quantize, repack or unrepack
    type_name: str
    recipe: RecipeOptions
    options: ToolOptions
    patterns: tuple[str, ...]
    dry_run: bool
    verbose: bool
    target: TargetOptions | None = None
    write_recipe: str = ""
    preflight: bool = False
    covariance_tokens: int = 0
    fleet: BatchConfig = dataclasses.field(default_factory=BatchConfig)


def request_of(config: QuantizeConfig) -> Request:
    """What a command line asks for; UsageError if that cannot be understood."""
    from ikcli.quant.recipes import RecipeOptions

    mode = "unrepack" if config.unrepack else "repack" if config.repack else "quantize"
    if config.repack and config.unrepack:
        raise UsageError("--repack and --unrepack exclude each other")
    if config.preflight and config.dry_run:
        raise UsageError("--preflight and --dry-run exclude each other")
    if config.include_weights and config.exclude_weights:
        raise UsageError("--include-weights and --exclude-weights exclude each other")
    if config.repack_pattern and mode == "quantize":
        raise UsageError("--repack-pattern needs --repack or --unrepack")
    source, output, number, name, n_threads = _positional(config, mode)
    target = _target(config, mode, name, source, n_threads)
    return Request(
        source,
        output,
        mode,
        name,
        recipe_of(config, number, name) if mode == "quantize" else RecipeOptions(0, copy=True),
        tool_options(config, n_threads),
        tuple(p.strip() for text in config.repack_pattern for p in text.split(",") if p.strip()),
        config.dry_run,
        config.verbose,
        target,
        config.write_recipe,
        config.preflight,
        config.covariance_tokens,
        config.fleet,
    )


def _target(config: QuantizeConfig, mode: str, name: str, source: str, n_threads: int) -> TargetOptions | None:
    """The size to choose types for; UsageError for options that need one or exclude it."""

    def measure(text: Path, chunks: int) -> Measure:
        from ikcli.study.calibrate import Calibrator
        from ikcli.study.resident import ResidentOptions

        options = ResidentOptions(Path(source), text, chunks, n_threads=n_threads, overrides=config.override_kv)
        if config.fleet.wanted:
            from ikcli.study.fleet_calibrate import FleetCalibrator

            return FleetCalibrator(options, tool_options(config, n_threads), config.fleet).measure
        return Calibrator(options).measure

    found = target_options(config, name != _NO_TYPE, measure)
    if found is not None and (mode != "quantize" or config.pure or name in ("COPY", "F32", "F16", "BF16")):
        raise UsageError("a target needs types to choose from; drop --repack, --unrepack, --pure and float TYPEs")
    return found


def _positional(config: QuantizeConfig, mode: str) -> tuple[str, str, int, str, int]:
    """(input, output, file type, its name, threads) from `in [out] TYPE [nthreads]`; repacking needs no TYPE."""
    from ikcli.quant.tool import parse_file_type

    words = list(config.args)
    if not words:
        raise UsageError(f"the model is missing; usage: {usage('quantize')}")
    source, output = words.pop(0), ""
    if words and parse_file_type(words[0]) is None:
        output = words.pop(0)
    found = parse_file_type(words[0]) if words else None
    if found is not None:
        words.pop(0)
    elif mode == "quantize" and not has_target(config):
        raise no_type(words, output)
    number, name = found or ((_Q8_0, _NO_TYPE) if mode == "quantize" else (0, mode.upper()))
    text = words.pop(0) if words else config.n_threads
    if words:
        raise UsageError(f"too many arguments: {' '.join(words)}; usage: {usage('quantize')}")
    if not output:
        suffix = "" if config.keep_split else ".gguf"
        model = re.sub(r"-\d{5}-of-\d{5}$", "", Path(source).stem)
        stem = f"ggml-model-{name}" if mode == "quantize" else f"{model}-{mode}ed"
        output = stem + suffix
        if not (config.hub.repo or config.hub.url):  # those are in a cache
            output = str(Path(source).with_name(output))
    return source, output, number, name, threads(text)


def no_type(words: list[str], output: str) -> UsageError:
    from ikcli.quant.tool import file_type_names

    unknown = words[0] if words else output
    if not unknown:
        return UsageError(f"the type is missing, for example Q4_K_M; usage: {usage('quantize')}")
    near = nearest(unknown, file_type_names())
    if near is None and not words:
        return UsageError(f"the type is missing after {output}, for example Q4_K_M; usage: {usage('quantize')}")
    hint = f"; did you mean {near}?" if near else f"; types are {' '.join(file_type_names())}"
    return UsageError(f"unknown type {unknown}{hint}")


def threads(text: str | None) -> int:
    from ikcli.hostinfo import physical_cores

    if text is None or text == "auto":
        return physical_cores()
    try:
        number = int(text)
    except ValueError:
        raise UsageError(f'nthreads: "{text}" is not a whole number') from None
    if number < 0:
        raise UsageError(f"nthreads: {number} is too small, the least is 0")
    return number or physical_cores()


def recipe_of(config: QuantizeConfig, number: int, name: str) -> RecipeOptions:
    from ikcli.quant.custom_rules import parse_custom_rules
    from ikcli.quant.formats import format_by_name
    from ikcli.quant.recipes import RecipeOptions

    types: dict[str, Any] = {}
    given = {item.name: getattr(config, item.name) for item in fields(config) if item.name.endswith("_type")}
    for field, text in {**given, "extra_output_type": config.extra_output_tensor}.items():
        if text is not None:
            try:
                types[field] = format_by_name(text).type
            except UsageError as problem:
                option = "extra-output-tensor" if field == "extra_output_type" else field.replace("_", "-")
                raise UsageError(f"--{option}: {problem}") from None
    texts = ["\n".join(read_lines(Path(text[1:]))) if text.startswith("@") else text for text in config.custom_q]
    if config.tensor_type_file is not None:
        texts += [rule for line in read_lines(config.tensor_type_file) for rule in line.split()]
    return RecipeOptions(
        number,
        copy=name == "COPY",
        pure=config.pure,
        leave_output_tensor=config.leave_output_tensor,
        ignore_imatrix_rules=config.ignore_imatrix_rules,
        custom=parse_custom_rules(texts),
        **types,
    )


def tool_options(config: QuantizeConfig, n_threads: int) -> ToolOptions:
    from ikcli.quant.encoders import EncodeOptions
    from ikcli.quant.tool import ToolOptions

    return ToolOptions(
        imatrix=config.imatrix,
        covariance=config.covariance,
        include_weights=config.include_weights,
        exclude_weights=config.exclude_weights,
        hide_imatrix=config.hide_imatrix,
        overrides=config.override_kv,
        n_threads=n_threads,
        keep_split=config.keep_split,
        partial_requant=config.partial_requant,
        allow_requantize=config.allow_requantize,
        force=config.force,
        strict=config.strict,
        encode=EncodeOptions(config.symmetric_q40, config.slow_iq2ks, config.least_squares),
    )


def run(config: QuantizeConfig) -> int:
    """Plan, report, and unless it is a dry run write the result."""
    # Rows are spread over threads here, and BLAS must be told before NumPy is imported.
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
    if request.mode != "quantize" and not any(c.changes for c in plan.job.choices):
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
    """Open the model when that is asked for, once; for a dry run its header is enough."""

    @functools.cache
    def file() -> GGUFFile:
        if not request.dry_run:
            return open_gguf(request.input, request.options.overrides)
        found, notes = open_planned(request.input, request.options.overrides)
        for note in notes:
            log.log(note)
        if request.target is not None and not all(map(found.has_data, found.tensors)):
            raise UsageError(f"{request.input}: a target measures the weights, which are not all there; give a TYPE")
        return found

    from ikcli.gguf.reader import open_gguf

    return file


def would_gain(plan: ToolPlan) -> bool:
    """Whether most of the result is in types of less than 5 bits that error feedback can write."""
    from ikcli.quant.feedback import supports

    changed = [c for c in plan.job.choices if c.changes and supports(c.new)]
    small = sum(c.n_bytes for c in changed if 8 * c.n_bytes < _FEW_BITS * math.prod(c.shape))
    return 2 * small > plan.new_bytes


def _preflight(request: Request) -> int:
    """Print the report; 1 if the run would fail."""
    from ikcli.engine.plan.devices import available_memory
    from ikcli.quant.preflight import PlannedJob, preflight

    r = request
    runs = None
    if r.options.covariance == SELF:
        runs = partial(planned_data, r.input, r.covariance_tokens, r.options.overrides)
        r = replace(r, options=replace(r.options, covariance=None))
    opened = partial(open_checked, r.input, r.options.overrides)
    task = PlannedJob(r.mode, opened, r.output, r.recipe, r.options, r.patterns, r.target, runs)
    report = preflight(task, available_memory())
    print("\n".join(report.lines()))
    return 1 if report.failed else 0


def _check_output(request: Request) -> None:
    """Complain before types are measured that the result could not be written."""
    from ikcli.gguf.reader import open_gguf
    from ikcli.quant.output_check import check_output, output_paths

    parts = open_gguf(request.input, request.options.overrides).paths
    check_output(output_paths(Path(request.output), len(parts), request.options.keep_split), parts)


def _report_recipe(request: Request, plan: ToolPlan) -> None:
    """The recipe, into the file that was asked for; that of a target is printed otherwise."""
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
    """A progress bar while candidate types are measured."""
    if request.target is None:
        yield lambda n_bytes: None
        return
    file = opened()
    for note in check_sides(request.target, list(file.tensors), request.options.strict):
        log.warn(note)
    total = file.n_bytes
    with log.progress("measuring types", total, in_bytes=True) as advance:
        yield advance


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
    """What the user should know before the result is written."""
    for note in plan.notes:
        log.warn(where + note)
    if plan.n_fallback:
        n = f"{plan.n_fallback} of {len(plan.job.choices)}"
        log.warn(f"{where}{n} tensors have rows that do not fit and get a fallback type")


def shape_text(shape: tuple[int, ...]) -> str:
    """`4096 x 128 x 8`."""
    return " x ".join(str(ne) for ne in shape)


def dry_run_lines(plan: ToolPlan) -> list[str]:
    """Table of all tensors and a line with the totals."""
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
    """Number of tensors, bytes, GiB and bits per weight of the result, and of the input."""
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
        log.log(f"{path}: {n} tensors are there from a run that was interrupted; going on behind them")

    def discarded(path: Path) -> None:
        log.log(f"{path}: what an interrupted run left was of other inputs or settings and is dropped; starting anew")

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
            log.log("interrupted; what is whole is kept, and the same command goes on from there")
        raise
    seconds = time.monotonic() - started
    log.log(totals(plan))
    rate = plan.old_bytes / 2**20 / max(seconds, 1e-9)
    log.log(f"wrote {len(paths)} file{'s' if len(paths) != 1 else ''} in {seconds:.2f} s ({rate:.1f} MiB/s of input)")
