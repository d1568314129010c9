"""The options of `ik quantize` that choose types for a size: `--target-size` and the options that belong to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ikcli.errors import UsageError
from ikcli.settings.option import iter_options
from ikcli.settings.quantize import CPU_TENSORS, QuantizeConfig
from ikcli.settings.values import parse_size

if TYPE_CHECKING:
    from ikcli.quant.calibration import Measure, Studied
    from ikcli.quant.target import CpuShare, SizeBudget, TargetOptions

_BUDGETS = ("target_size", "target_bpw", "target_size_gpu", "target_size_cpu")
_NEED_TARGET = (
    *("candidates", "repackable", "r4", "target_rows", "cpu_tensors", "gpu_tensors", "override_tensor"),
    *("calibrate", "calibrate_chunks", "calibrate_groups", "study"),
)
_NAMES = {bound.path: bound.option.names[0] for bound in iter_options(QuantizeConfig)}


def _given(config: QuantizeConfig, fields: Sequence[str]) -> list[str]:
    """Return those of the options that the user wrote."""
    values = {field: getattr(config, field) for field in fields}
    return [field for field, value in values.items() if value is not None and value is not False and value != ()]


def has_target(config: QuantizeConfig) -> bool:
    """Return whether types are chosen for a size."""
    return bool(_given(config, _BUDGETS))


def target_options(
    config: QuantizeConfig, keeps_file_type: bool, measure: Callable[[Path, int], Measure]
) -> TargetOptions | None:
    """Return the size to choose types for, or None.

    Raise UsageError for options that need a target or exclude each other. `measure` makes the function that calibrates,
    from the text file and the number of chunks.
    """
    from ikcli.quant.formats import format_by_name
    from ikcli.quant.target import TargetOptions

    if not has_target(config):
        for field in _given(config, _NEED_TARGET):
            raise UsageError(f"{_NAMES[field]} needs --target-size or --target-bpw")
        return None
    text = config.calibrate
    if text is None:
        for field in _given(config, ("calibrate_chunks", "calibrate_groups")):
            raise UsageError(f"{_NAMES[field]} needs --calibrate TEXT")
    total, gpu, cpu = _budgets(config)
    chunks = 8 if config.calibrate_chunks is None else config.calibrate_chunks
    if chunks == 0:
        raise UsageError("--calibrate-chunks 0 leaves nothing to run; give a number above 0, or -1 for all")
    if text is not None and not Path(text).is_file():
        raise UsageError(f"--calibrate: text file {text} does not exist")
    if config.study is not None and text is not None:
        raise UsageError("--study and --calibrate exclude each other: both give the cost of quantizing a tensor")
    return TargetOptions(
        total=total,
        gpu=gpu,
        cpu=cpu,
        candidates=tuple(format_by_name(t).type for t in (config.candidates or "").split(",") if t.strip()),
        placement=_placement(config, {"gpu", "cpu"} if gpu is not None or cpu is not None else set()),
        repackable=config.repackable,
        r4=config.r4,
        rows=256 if config.target_rows is None else config.target_rows,
        keeps_file_type=keeps_file_type,
        calibrate=measure(Path(text), chunks) if text is not None else None,
        calibrate_groups=config.calibrate_groups or 64,
        study=_study(Path(config.study)) if config.study is not None else None,
    )


def _study(path: Path) -> Studied:
    """Return the costs in a journal of `ik study`."""
    from ikcli.quant.calibration import MeasuredGroup, Studied
    from ikcli.study.study import read_study

    found = read_study(path)
    groups = {u.title: u.tensors for u in found.units}
    measured = tuple(
        MeasuredGroup(names, tuple((u.type, found.found[u.key].kld) for u in found.units if u.title == title))
        for title, names in groups.items()
    )
    return Studied(measured, frozenset(found.head.get("unused", ())))


def _budgets(config: QuantizeConfig) -> tuple[SizeBudget, SizeBudget | None, SizeBudget | None]:
    """Return (total, GPU, CPU)."""
    from ikcli.quant.target import SizeBudget

    size, bpw = config.target_size, config.target_bpw
    if size is not None and bpw is not None:
        raise UsageError("--target-size and --target-bpw exclude each other")
    total, sides = SizeBudget(), {}
    option = "--target-size" if size is not None else "--target-bpw"
    text = size if size is not None else bpw
    if text is not None and "=" in text:
        for part in text.split(","):
            side, _, value = (word.strip() for word in part.partition("="))
            if side.lower() not in ("gpu", "cpu") or side.lower() in sides:
                raise UsageError(f'{option}: "{text}" is not of the form gpu=...,cpu=...')
            sides[side.lower()] = _amount(option, value)
    elif text is not None:
        total = _amount(option, text)
    for side, found in (("gpu", config.target_size_gpu), ("cpu", config.target_size_cpu)):
        if found is not None and side in sides:
            raise UsageError(f"--target-size-{side}: {option} gives the {side.upper()} a budget already")
        if found is not None:
            sides[side] = _amount(f"--target-size-{side}", found)
    if total == SizeBudget() and len(sides) < 2:
        other = "cpu" if "gpu" in sides else "gpu"
        raise UsageError(f"one side has a budget; give --target-size-{other} or the --target-size of both together")
    if total != SizeBudget() and len(sides) == 2:
        raise UsageError("both sides have a budget; drop the one of both together")
    return total, sides.get("gpu"), sides.get("cpu")


def _amount(option: str, text: str) -> SizeBudget:
    from ikcli.quant.target import SizeBudget

    if option != "--target-bpw":
        try:
            return SizeBudget(n_bytes=parse_size(f"{text}B" if text.strip().isdecimal() else text))
        except ValueError as problem:
            raise UsageError(f'{option}: "{text}" {problem}') from None
    try:
        bits = float(text)
    except ValueError:
        bits = 0.0
    if not 0 < bits <= 32:
        raise UsageError(f'{option}: "{text}" is not a number of bits per weight, for example 3.6')
    return SizeBudget(bpw=bits)


def _placement(config: QuantizeConfig, budgets: set[str]) -> CpuShare:
    """Return the rules for tensors on the CPU: those of -ot, or --gpu-tensors before --cpu-tensors."""
    from ikcli.engine.plan.tensor_rules import parse_rule
    from ikcli.quant.target import CPU, GPU, CpuShare
    from ikcli.rules import compile_pattern

    gpu, cpu = _patterns(config.gpu_tensors), _patterns(config.cpu_tensors)
    if config.override_tensor:
        if gpu or cpu:
            raise UsageError("-ot tells where tensors go; drop --cpu-tensors and --gpu-tensors")
        rules = [parse_rule(rule) for text in config.override_tensor for rule in _rules(text)]
        given = [(r.pattern, "-ot", CPU if r.buffer == "CPU" else GPU) for r in rules]
        rest, named = GPU, {side for _, _, side in given}
    else:
        given = [(p, "--gpu-tensors", GPU) for p in gpu]
        given += [(p, "--cpu-tensors", CPU) for p in cpu if p.lower() != "none"]
        named = {side for _, _, side in given} | ({GPU} if cpu and not given else set())
        if not gpu and not cpu:
            given = [(CPU_TENSORS, "--cpu-tensors", CPU)]
        rest = CPU if gpu and not cpu else GPU
    searches = [(compile_pattern(pattern, option, pattern).search, side) for pattern, option, side in given]

    def on_cpu(name: str) -> bool:
        return next((side for search, side in searches if search(name)), rest) == CPU

    mine = tuple((option, pattern) for pattern, option, _ in given if config.override_tensor or gpu or cpu)
    return CpuShare(on_cpu, frozenset(named | budgets), mine)


def _rules(text: str) -> tuple[str, ...]:
    from ikcli.settings.values import parse_rules

    try:
        return parse_rules(text)
    except ValueError as problem:
        raise UsageError(f"-ot {problem}") from None


def _patterns(texts: Sequence[str]) -> list[str]:
    return [p.strip() for text in texts for p in text.split(",") if p.strip()]


def check_sides(target: TargetOptions, names: Sequence[str], strict: bool = False) -> list[str]:
    """Return warnings about rules that match nothing.

    Raise UsageError if a side with a rule or a budget gets no tensor.
    """
    from ikcli.rules import pattern_notes

    notes = [
        n for option, pattern in target.placement.patterns for n in pattern_notes([pattern], option, names, strict)
    ]
    missing = target.placement.named - {target.placement.side(name) for name in names}
    if missing:
        side = min(missing).upper()
        raise UsageError(f"the placement leaves no tensor for the {side}; look at the names with ik inspect")
    return notes
