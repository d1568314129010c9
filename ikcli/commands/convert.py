"""`ik convert DIR [--outfile F] [--outtype TYPE]`: a checkpoint as a GGUF file, in any type that `ik quantize` writes.

Corresponds to convert_hf_to_gguf.py; types are chosen as `ik quantize` chooses them for
a file in the checkpoint's own types.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ikcli import log
from ikcli.cli.parser import usage
from ikcli.commands._convert_adapter import run_adapter
from ikcli.commands._quantize_output import dry_run_lines, report_plan, write
from ikcli.commands._quantize_request import Request, recipe_of, threads, tool_options
from ikcli.commands._target import has_target, target_options
from ikcli.errors import UsageError
from ikcli.settings.quantize import ConvertConfig, QuantizeConfig
from ikcli.suggest import nearest

if TYPE_CHECKING:
    from ikcli.convert.tool import OpenCheckpoint
    from ikcli.quant.tool import ToolPlan

_Q8_0 = 7  # file type to start from when a target is given without a type


def run(config: ConvertConfig) -> int:
    """Open the checkpoint, choose types, and write the result unless this is a dry run."""
    # Rows are spread over threads here, and BLAS must know that before NumPy is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if config.remote:
        raise UsageError("--remote: ik convert reads directories; ik pull NAME fetches a model from the hub first")
    if config.print_supported_models:
        return _print_classes()
    if not config.args:
        raise UsageError(f"the directory is missing; usage: {usage('convert')}")
    directory = Path(config.args[0])
    _check(config, directory)
    if (directory / "adapter_config.json").is_file():
        return run_adapter(config, directory)
    if config.mmproj:
        return _projector(config, directory)
    if config.base is not None:
        raise UsageError(f"--base is for adapters, and {directory} has no adapter_config.json")
    from ikcli.convert.tool import CheckpointOptions, open_checkpoint
    from ikcli.gguf.heads import Heads

    heads = Heads.ALONE if config.mtp else Heads.DROPPED if config.no_mtp else Heads.KEPT
    ignored = tuple(key.strip() for text in config.ignore_config_key for key in text.split(",") if key.strip())
    found = open_checkpoint(
        directory,
        CheckpointOptions(
            config.model_name,
            config.metadata,
            config.pre,
            ignored,
            _kept_types(config),
            heads,
            config.target_model_dir,
        ),
    )
    _report_checkpoint(config, found)
    return _vocabulary(config, found) if config.vocab_only else _model(config, found)


def _projector(config: ConvertConfig, directory: Path) -> int:
    """Write the projector of a checkpoint."""
    from ikcli.convert.projector import open_projector, output_path, type_of

    found = open_projector(directory, (config.outtype or "auto").lower(), config.model_name)
    output = output_path(config.outfile, directory, found, type_of(found))
    n_bytes = sum(t.spec.n_bytes for t in found.tensors)
    log.log(f"{directory}: projector, {len(found.tensors)} tensors, {n_bytes / 2**20:.2f} MiB")
    if config.dry_run:
        log.log(f"{output} would hold them; nothing is written")
        return 0
    found.write(output)
    log.log(f"wrote {output}")
    return 0


def _print_classes() -> int:
    from ikcli.convert.archs import by_class

    for name, arch in sorted(by_class().items()):
        print(f"{name:44} {arch.name}")
    return 0


def _kept_types(config: ConvertConfig) -> frozenset[str]:
    """Return the types of blocks that stay as they are, which they do unless another type is requested."""
    outtype = (config.outtype or "auto").lower()
    if config.target_size is not None or config.target_bpw is not None or outtype not in ("auto", "mxfp4"):
        return frozenset()
    return frozenset(("MXFP4", "NVFP4", "Q4_0") if outtype == "auto" else ("MXFP4",))


def _check(config: ConvertConfig, directory: Path) -> None:
    if directory.is_file():
        raise UsageError(f"{directory} is a file; name the directory with config.json and the safetensors files")
    if config.metadata is not None and not config.metadata.is_file():
        raise UsageError(f"--metadata: file {config.metadata} does not exist")
    if config.mtp and (config.no_mtp or config.vocab_only):
        raise UsageError(f"--mtp and {'--no-mtp' if config.no_mtp else '--vocab-only'} exclude each other")
    if config.vocab_only and (config.split_max_size or config.split_max_tensors):
        raise UsageError("--vocab-only writes no tensors, so the file cannot be split")


def _report_checkpoint(config: ConvertConfig, found: OpenCheckpoint) -> None:
    file = found.file
    n_files = f"{len(file.paths)} file{'s' if len(file.paths) > 1 else ''}"
    log.log(f"{config.args[0]}: {file.arch}, {len(file.tensors)} tensors of {file.n_elements} weights in {n_files}")
    for note in found.notes:
        log.warn(note)
    if found.dropped:
        log.log(f"{len(found.dropped)} tensors of the checkpoint are left out, the first is {found.dropped[0]}")
        for name in found.dropped if config.verbose else ():
            log.log(f"left out: {name}")


def _output(config: ConvertConfig, found: OpenCheckpoint, type_name: str) -> Path:
    from ikcli.convert.naming import fill_name

    given = Path(config.outfile) if config.outfile is not None else Path(config.args[0])
    if given.is_dir():
        return given / f"{'mtp-' if config.mtp else ''}{found.description.file_name(type_name)}"
    return given.with_name(fill_name(given.name, type_name))


def _vocabulary(config: ConvertConfig, found: OpenCheckpoint) -> int:
    from ikcli.convert.tool import write_vocabulary

    output = _output(config, found, "")
    if config.dry_run:
        log.log(f"{output} would hold keys and vocabulary; nothing is written")
        return 0
    write_vocabulary(found, output, config.override_kv)
    log.log(f"wrote {output}")
    return 0


def _model(config: ConvertConfig, found: OpenCheckpoint) -> int:
    from ikcli.convert.tool import plan_convert

    settings = QuantizeConfig(
        imatrix=config.imatrix,
        ignore_imatrix_rules=config.ignore_imatrix_rules,
        custom_q=config.custom_q,
        pure=config.pure,
        leave_output_tensor=config.leave_output_tensor,
        output_tensor_type=config.output_tensor_type,
        token_embedding_type=config.token_embedding_type,
        target_size=config.target_size,
        target_bpw=config.target_bpw,
        override_kv=config.override_kv,
        partial_requant=config.resume,
        strict=config.strict,
    )
    number, name = _type(config, settings, found)
    target = target_options(settings, config.outtype not in (None, "auto"), _no_measure)
    if target is not None and (config.pure or name in ("F32", "F16", "BF16")):
        raise UsageError("a target needs types to choose from; drop --pure and float types")
    output = _output(config, found, name)
    options = tool_options(settings, threads(config.n_threads))
    recipe = recipe_of(settings, number, name)
    if found.kept_type is not None and config.outtype in (None, "auto"):
        recipe = replace(recipe, copy=True)
        found.file.set_key("general.file_type", number)
    measuring = nullcontext(_nothing)
    if target is not None:
        measuring = log.progress("measuring types", found.file.n_bytes, in_bytes=True)  # type: ignore[assignment]
    with measuring as advance:
        plan = plan_convert(
            found, output, recipe, options, target, config.split_max_tensors, config.split_max_size, advance
        )
    request = Request(
        config.args[0], str(output), "convert", name, recipe, options, (), config.dry_run, config.verbose, target
    )
    report_plan(request, plan)
    if config.dry_run and not config.json:
        print("\n".join(dry_run_lines(plan)))
    elif not config.dry_run:
        write(request, plan)
    if config.json:
        print(json.dumps(_summary(plan, found, name), indent=1))
    return 0


def _nothing(n_bytes: float) -> None:
    """Report no progress."""


def _no_measure(text: Path, chunks: int) -> Callable[..., Any]:
    raise UsageError("--calibrate needs a model file")


def _type(config: ConvertConfig, settings: QuantizeConfig, found: OpenCheckpoint) -> tuple[int, str]:
    """Return the file type and its name; by default the checkpoint's type, for a target the type of most bytes."""
    from ikcli.gguf.constants import FILE_TYPES
    from ikcli.quant.tool import file_type_names, parse_file_type

    if config.outtype is None or config.outtype.lower() == "auto":
        number = _Q8_0 if has_target(settings) else found.auto_type
        found_type = FILE_TYPES[number]
        return number, found_type.names[0] if found_type.names else found_type.label.split()[0]
    parsed = parse_file_type(config.outtype)
    if parsed is None or parsed[1] == "COPY":
        names = [n for n in file_type_names() if n != "COPY"]
        near = nearest(config.outtype.upper(), names)
        hint = f"; did you mean {near}?" if near else f"; types are auto {' '.join(names)}"
        raise UsageError(f"--outtype: unknown type {config.outtype}{hint}")
    return parsed


def _summary(plan: ToolPlan, found: OpenCheckpoint, name: str) -> dict[str, Any]:
    from ikcli.gguf.types import TYPES
    from ikcli.quant.quantizer import output_parts

    return {
        "architecture": found.file.arch,
        "type": name,
        "files": [str(part.path) for part in output_parts(plan.job)],
        "n_tensors": len(plan.job.choices),
        "n_bytes": plan.new_bytes,
        "bpw": round(plan.bpw, 4),
        "types": dict(Counter(TYPES[c.new].name for c in plan.job.choices)),
        "left_out": list(found.dropped),
    }
