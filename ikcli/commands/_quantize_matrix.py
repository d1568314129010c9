"""`ik quantize --matrix LIST in.gguf OUT`: the quants of a list, in one pass over the model."""

from __future__ import annotations

import re
import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ikcli import log
from ikcli.cli.parser import parse, usage
from ikcli.commands._quantize_output import report_plan_notes
from ikcli.commands._quantize_request import (
    head_prefix,
    heads_of,
    open_planned,
    open_whole,
    recipe_of,
    threads,
    tool_options,
)
from ikcli.errors import IkError, UsageError
from ikcli.imatrix.self_covariance import with_moments
from ikcli.settings.fleet import BatchConfig
from ikcli.settings.quantize import QuantizeConfig
from ikcli.text_files import read_text

if TYPE_CHECKING:
    from ikcli.gguf.reader import GGUFFile
    from ikcli.quant.matrix import MatrixJob
    from ikcli.quant.recipes import TypeChoice
    from ikcli.quant.tool import ToolOptions, ToolPlan

OF_A_LINE = frozenset({
    "args", "imatrix", "covariance", "ignore_imatrix_rules", "include_weights", "exclude_weights", "hide_imatrix",
    "custom_q", "tensor_type_file", "pure", "leave_output_tensor", "output_tensor_type", "token_embedding_type",
    "per_layer_token_embedding_type", "ffn_gate_inp_type", "attn_q_type", "attn_k_type", "attn_v_type",
    "attn_qkv_type", "attn_output_type", "ffn_gate_type", "ffn_down_type", "ffn_up_type", "extra_output_tensor",
    "symmetric_q40", "least_squares", "slow_iq2ks", "force",
})  # fmt: skip
_NOT_HERE = (
    "target_size", "target_bpw", "target_size_gpu", "target_size_cpu", "cpu_tensors", "gpu_tensors", "override_tensor",
    "candidates", "repackable", "r4", "target_rows", "calibrate", "calibrate_chunks", "calibrate_groups", "study",
    "write_recipe", "repack", "unrepack", "repack_pattern", "keep_split", "preflight",
)  # fmt: skip
_FLOAT_SUFFIX = re.compile(r"[-._](f16|bf16|f32|fp16|fp32)$", re.I)


@dataclass(frozen=True, slots=True)
class Line:
    """One quant of the list: its place, the name in its file name, the file type, and all options that apply to it."""

    where: str
    name: str
    number: int
    type_name: str
    config: QuantizeConfig


def read_list(path: Path, config: QuantizeConfig) -> list[Line]:
    """Read the lines of a list, whose options replace those of `config`; raise UsageError naming file and line."""
    lines: list[Line] = []
    for number, raw in enumerate(read_text(path, "--matrix").splitlines(), 1):
        where = f"{path}, line {number}"
        try:
            words = shlex.split(raw, comments=True)
        except ValueError as problem:
            raise UsageError(f"{where}: {problem}") from None
        if words:
            with _At(where):
                lines.append(_line(where, words, config))
    if not lines:
        raise UsageError(f"--matrix {path}: no quants; a line is TYPE [NAME] [options], for example Q4_K_M")
    return lines


class _At:
    """Name the line in every error."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, problem: BaseException | None, trace: object) -> None:
        if isinstance(problem, IkError):
            raise type(problem)(f"{self.where}: {problem}") from None


def _line(where: str, words: list[str], config: QuantizeConfig) -> Line:
    from ikcli.commands._quantize_request import no_type
    from ikcli.quant.tool import parse_file_type

    parsed = parse("quantize", words)
    mine = parsed.config
    assert isinstance(mine, QuantizeConfig)
    wrong = sorted(parsed.given - OF_A_LINE) or [*parsed.ignored, *parsed.unsupported]
    if wrong:
        name = wrong[0].rpartition(".")[2].replace("_", "-").lstrip("-")
        raise UsageError(f"--{name} cannot be given for one line of a matrix")
    found = parse_file_type(mine.args[0]) if mine.args else None
    if found is None:
        raise no_type(list(mine.args[:1]), "")
    if len(mine.args) > 2:
        raise UsageError(f'"{mine.args[2]}" is too much; a line is TYPE [NAME] [options]')
    name = mine.args[1] if len(mine.args) > 1 else found[1]
    if not re.fullmatch(r"[\w.+-]+", name):
        raise UsageError(f'"{name}" is not a file name; use letters, digits, - and _')
    given = {key: getattr(mine, key) for key in parsed.given if key != "args"}
    return Line(where, name, *found, replace(config, **given))


def output_path(source: str, output: str, name: str, prefix: str = "") -> Path:
    """Return the file of one quant: `MODEL-NAME.gguf` after `prefix` in a folder, or a pattern with `{name}` filled."""
    if "{name}" in output or "{type}" in output:
        return Path(output.replace("{name}", name).replace("{type}", name))
    if output.endswith(".gguf"):
        raise UsageError(f"{output} is one file; give a folder or a pattern, for example model-{{name}}.gguf")
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", Path(source).stem)
    return Path(output) / f"{prefix}{_FLOAT_SUFFIX.sub('', stem)}-{name}.gguf"


def plans_of(
    config: QuantizeConfig, lines: list[Line], options: list[ToolOptions], source: str, output: str
) -> list[ToolPlan]:
    """Return a plan per line with its options, all for one opened model; errors name the line."""
    from ikcli.quant.tool import plan_of

    heads = heads_of(config)
    if config.dry_run:
        opened, notes = open_planned(source, config.override_kv, heads)
        for note in notes:
            log.log(note)
    else:
        opened = open_whole(source, config.override_kv, heads)

    def file() -> GGUFFile:
        return opened

    taken: dict[Path, str] = {}
    plans: list[ToolPlan] = []
    for line, o in zip(lines, options, strict=True):
        with _At(line.where):
            path = output_path(source, output, line.name, head_prefix(config))
            if path.resolve() in taken:
                raise UsageError(f"{path} is the file of {taken[path.resolve()]} too; add a name after the type")
            taken[path.resolve()] = line.where
            recipe = recipe_of(line.config, line.number, line.type_name)
            plans.append(plan_of(file, str(path), recipe, o))
    return plans


def run(config: QuantizeConfig) -> int:
    """Plan all quants, print their sizes, and write them unless this is a dry run."""
    default = QuantizeConfig()
    for key in _NOT_HERE:
        if getattr(config, key) != getattr(default, key):
            raise UsageError(f"--{key.replace('_', '-')} cannot be combined with --matrix")
    if len(config.args) != 2:
        raise UsageError(f"--matrix needs the model and a folder or pattern; usage: {usage('quantize')}")
    source, output = config.args
    n_threads = threads(config.n_threads)
    lines = read_list(Path(config.matrix), config)
    given = [tool_options(line.config, n_threads) for line in lines]
    with with_moments(given, source, output, config.covariance_tokens, config.fleet, dry_run=config.dry_run) as options:
        return _run(config, lines, options, source, output)


def _run(config: QuantizeConfig, lines: list[Line], options: list[ToolOptions], source: str, output: str) -> int:
    from ikcli.quant.matrix import MatrixJob, check_rooms

    plans = plans_of(config, lines, options, source, output)
    for line, plan in zip(lines, plans, strict=True):
        report_plan_notes(plan, f"{line.where}: ")
    needs = [(plan.job.output, plan.new_bytes) for plan in plans]
    if config.dry_run:
        print("\n".join(size_lines(lines, plans)))
        check_rooms(needs)
        return 0
    jobs = [MatrixJob(plan.job, _data_key(line.config)) for line, plan in zip(lines, plans, strict=True)]
    _write(jobs, source, options, config.fleet)
    log.log("\n".join(size_lines(lines, plans)))
    return 0


def _data_key(config: QuantizeConfig) -> tuple[object, ...]:
    """Return the key that lines share if they encode a tensor alike whenever its type is the same."""
    c = config
    return (c.imatrix, c.covariance, c.include_weights, c.exclude_weights, c.symmetric_q40, c.slow_iq2ks,
            c.least_squares)  # fmt: skip


def _write(jobs: list[MatrixJob], source: str, options: list[ToolOptions], fleet: BatchConfig) -> None:
    from ikcli.quant.job import JobProgress
    from ikcli.quant.matrix import run_matrix
    from ikcli.study import fleet_quantize

    file = jobs[0].job.file
    total = len(file.tensors)

    def tensor(number: int, c: TypeChoice) -> None:
        log.log(f"[{number:4d}/{total:4d}] {c.name:>36s} - {file.tensors[c.source or c.name].n_bytes / 2**20:.2f} MiB")

    def skipped(path: Path) -> None:
        log.log(f"{path} exists and is complete, skipping it")

    log.log(f"matrix: '{source}' to {len(jobs)} files, {jobs[0].job.n_threads} threads")
    started = time.monotonic()
    with log.progress("quantize", file.n_bytes, in_bytes=True) as advance:
        hooks = JobProgress(tensor, skipped, advance)
        paths = fleet_quantize.run(jobs, options, fleet, hooks) if fleet.wanted else run_matrix(jobs, hooks)
    log.log(f"wrote {len(paths)} file{'s' if len(paths) != 1 else ''} in {time.monotonic() - started:.2f} s")


def size_lines(lines: list[Line], plans: list[ToolPlan]) -> list[str]:
    """Return one line per file with bytes, GiB and bits per weight, and the sum."""
    width = max(len(str(plan.job.output)) for plan in plans)
    out = [
        f"{plan.job.output!s:<{width}}  {line.type_name:<10}  {plan.new_bytes:>14} bytes = "
        f"{plan.new_bytes / 2**30:8.3f} GiB  {plan.bpw:6.3f} BPW"
        for line, plan in zip(lines, plans, strict=True)
    ]
    total = sum(plan.new_bytes for plan in plans)
    return [*out, f"total: {len(plans)} files, {total} bytes = {total / 2**30:.3f} GiB"]
