"""Interpret the command line of `ik quantize`: the input model, recipes and options for the quantizer, defaults."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ikcli.cli.argv import read_lines
from ikcli.cli.model import find_model
from ikcli.cli.parser import usage
from ikcli.commands._target import has_target, target_options
from ikcli.errors import IkError, UsageError
from ikcli.gguf.heads import Heads, select_heads
from ikcli.settings.fleet import BatchConfig
from ikcli.settings.quantize import QuantizeConfig
from ikcli.suggest import nearest

if TYPE_CHECKING:
    from ikcli.gguf.reader import GGUFFile
    from ikcli.quant.calibration import Measure
    from ikcli.quant.recipes import RecipeOptions
    from ikcli.quant.target import TargetOptions
    from ikcli.quant.tool import ToolOptions

_HEADER_SHARE = 16  # a file with less than this share of its data is a header, not an interrupted download


def with_model(config: QuantizeConfig) -> QuantizeConfig:
    """Put the model that -hf or -mu names before the arguments; a plan downloads only its header."""
    path = find_model(None, config.hub, header_only=config.dry_run or config.preflight)
    return config if path is None else replace(config, args=(str(path), *config.args))


def heads_of(config: QuantizeConfig) -> Heads:
    """Return which blocks the result gets."""
    if config.mtp and config.no_mtp:
        raise UsageError("--mtp and --no-mtp exclude each other")
    return Heads.ALONE if config.mtp else Heads.DROPPED if config.no_mtp else Heads.KEPT


def head_prefix(config: QuantizeConfig) -> str:
    """Return how the name of a file begins: that of heads alone is found beside `NAME` as `mtp-NAME`."""
    return "mtp-" if config.mtp else ""


def open_whole(path: str, overrides: Sequence[str], heads: Heads) -> GGUFFile:
    """Open a complete model with the blocks that the result gets."""
    from ikcli.gguf.reader import open_gguf

    return select_heads(open_gguf(path, overrides), heads)


def open_planned(path: str, overrides: Sequence[str], heads: Heads) -> tuple[GGUFFile, list[str]]:
    """Open a model of which the header is enough; return notices on missing parts and data."""
    from ikcli.engine.plan.missing_parts import assume_missing, missing_data
    from ikcli.gguf.reader import open_gguf
    from ikcli.models import HParams

    file = open_gguf(path, overrides, header_only=True)
    notes: list[str] = []
    if file.missing_parts:
        notes += assume_missing(file, HParams.from_gguf(file.metadata, file.tensors, path))
    file = select_heads(file, heads)
    return file, notes + missing_data(file)


def open_checked(path: str, overrides: Sequence[str], heads: Heads) -> tuple[GGUFFile, list[str]]:
    """Open a complete model, or a header or first part alone; raise IkError for an interrupted download."""
    from ikcli.gguf.reader import open_gguf

    try:
        return open_whole(path, overrides, heads), []
    except UsageError:
        raise
    except IkError:
        file = open_gguf(path, overrides, header_only=True)
        there = sum(t.n_bytes for t in file.tensors.values() if file.has_data(t.name))
        alone = len(file.paths) == 1 and file.missing_parts
        if not alone and (file.missing_parts or _HEADER_SHARE * there >= file.n_bytes):
            raise
    return open_planned(path, overrides, heads)


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
    heads: Heads = Heads.KEPT


def request_of(config: QuantizeConfig) -> Request:
    """Return the request of a command line; raise UsageError if it makes no sense."""
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
        heads_of(config),
    )


def _target(config: QuantizeConfig, mode: str, name: str, source: str, n_threads: int) -> TargetOptions | None:
    """Return the size to choose types for; raise UsageError for options that need a target or exclude one."""

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
    """Return (input, output, file type, its name, threads) from `in [out] TYPE [nthreads]`; repacking needs no TYPE."""
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
        output = head_prefix(config) + stem + suffix
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
