"""Options of `ik quantize` that choose types for a size: `--target-size` and what goes with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ikcli.commands._tool_argv import ToolArguments, ToolOption, whole_number
from ikcli.errors import UsageError

if TYPE_CHECKING:
    from ikcli.quant.calibration import Measure
    from ikcli.quant.target import Budget, Placement, TargetOptions

EXPERTS = "exps"
TARGET_OPTIONS = (
    ToolOption(
        ("--target-size",),
        "SIZE",
        "choose the types so that all tensors together have at most SIZE (12GiB, 900M) and the damage is least; "
        "gpu=SIZE,cpu=SIZE gives both sides a budget of their own. TYPE may be missing; --custom-q rules and --*-type "
        "options still decide about their tensors",
        example="12GiB",
    ),
    ToolOption(("--target-bpw",), "F", "as --target-size, in bits per weight (3.6 or gpu=5.5,cpu=2.7)", example="3.6"),
    ToolOption(("--target-size-gpu",), "SIZE", "budget of the tensors on the GPU; the CPU has the rest of the target"),
    ToolOption(("--target-size-cpu",), "SIZE", "budget of the tensors on the CPU; the GPU has the rest of the target"),
    ToolOption(
        ("--cpu-tensors",),
        "RE[,RE...]",
        f"tensors that stay on the CPU (default {EXPERTS}): for a target they get types that have a row-interleaved "
        "_R4 or _R8 form; none: no tensor",
        repeat=True,
        example=EXPERTS,
    ),
    ToolOption(
        ("--gpu-tensors", "--gpu"),
        "RE[,RE...]",
        "tensors on the GPU, before --cpu-tensors",
        repeat=True,
        example="attn",
    ),
    ToolOption(
        ("-ot", "--override-tensor"),
        "RE=BUF[,RE=BUF...]",
        "the placement of a run command, to tell which tensors are on the CPU; the first matching rule wins, tensors "
        "without rule are on the GPU",
        repeat=True,
        example="exps=CPU",
    ),
    ToolOption(("--candidates",), "TYPE[,TYPE...]", "tensor types to choose from for a target", example="iq3_k,q6_K"),
    ToolOption(("--repackable",), "", "for a target, choose only types that --repack and -rtr can interleave"),
    ToolOption(("--r4",), "", "for a target, write the tensors of the CPU row-interleaved (_R4, _R8)"),
    ToolOption(("--target-rows",), "N", "rows per tensor to measure for a target; 0 = all (default 256)", example="64"),
    ToolOption(
        ("--calibrate",),
        "TEXT",
        "for a target, measure by running the model on this text file what quantizing each group of tensors costs",
        example="text.txt",
    ),
    ToolOption(("--calibrate-chunks",), "N", "chunks of 512 tokens to run (default 8, -1 = all)", example="16"),
    ToolOption(("--calibrate-groups",), "N", "most groups to measure, each is run twice (default 64)", example="100"),
    ToolOption(
        ("--write-recipe",),
        "FILE",
        "write the types as rules for --custom-q @FILE; for a target they are printed otherwise",
        example="recipe.txt",
    ),
)
_BUDGETS = ("target_size", "target_bpw", "target_size_gpu", "target_size_cpu")
_NEED_TARGET = (
    *("candidates", "repackable", "r4", "target_rows", "cpu_tensors", "gpu_tensors", "ot"),
    *("calibrate", "calibrate_chunks", "calibrate_groups"),
)
_NAMES = {option.key: option.names[0] for option in TARGET_OPTIONS}


def has_target(arguments: ToolArguments) -> bool:
    """Whether types are to be chosen for a size."""
    return any(arguments.has(key) for key in _BUDGETS)


def target_options(
    arguments: ToolArguments, keeps_file_type: bool, measure: Callable[[Path, int], Measure]
) -> TargetOptions | None:
    """The size to choose types for, None without one; UsageError for options that need one or exclude each other.

    `measure` makes the function that calibrates, from the text file and the number of chunks.
    """
    from ikcli.quant.formats import format_by_name
    from ikcli.quant.target import TargetOptions

    if not has_target(arguments):
        for key in _NEED_TARGET:
            if arguments.has(key):
                raise UsageError(f"{_NAMES[key]} needs --target-size or --target-bpw")
        return None
    if not arguments.has("calibrate"):
        for key in ("calibrate_chunks", "calibrate_groups"):
            if arguments.has(key):
                raise UsageError(f"{_NAMES[key]} needs --calibrate TEXT")
    total, gpu, cpu = _budgets(arguments)
    text = arguments.one("calibrate")
    chunks = whole_number("--calibrate-chunks", arguments.one("calibrate_chunks") or "8", -1)
    if chunks == 0:
        raise UsageError("--calibrate-chunks 0 leaves nothing to run; give a number above 0, or -1 for all")
    if text is not None and not Path(text).is_file():
        raise UsageError(f"--calibrate: there is no text file {text}")
    return TargetOptions(
        total=total,
        gpu=gpu,
        cpu=cpu,
        candidates=tuple(format_by_name(t).type for t in (arguments.one("candidates") or "").split(",") if t.strip()),
        placement=_placement(arguments, {"gpu", "cpu"} if gpu is not None or cpu is not None else set()),
        repackable=arguments.has("repackable"),
        r4=arguments.has("r4"),
        rows=whole_number("--target-rows", arguments.one("target_rows") or "256", 0),
        keeps_file_type=keeps_file_type,
        calibrate=measure(Path(text), chunks) if text is not None else None,
        calibrate_groups=whole_number("--calibrate-groups", arguments.one("calibrate_groups") or "64"),
    )


def _budgets(arguments: ToolArguments) -> tuple[Budget, Budget | None, Budget | None]:
    """(total, GPU, CPU)."""
    from ikcli.quant.target import Budget

    size, bpw = arguments.one("target_size"), arguments.one("target_bpw")
    if size is not None and bpw is not None:
        raise UsageError("--target-size and --target-bpw exclude each other")
    total, sides = Budget(), {}
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
    for side in ("gpu", "cpu"):
        found = arguments.one(f"target_size_{side}")
        if found is not None and side in sides:
            raise UsageError(f"--target-size-{side}: {option} gives the {side.upper()} a budget already")
        if found is not None:
            sides[side] = _amount(f"--target-size-{side}", found)
    if total == Budget() and len(sides) < 2:
        other = "cpu" if "gpu" in sides else "gpu"
        raise UsageError(f"one side has a budget; give --target-size-{other} or the --target-size of both together")
    if total != Budget() and len(sides) == 2:
        raise UsageError("both sides have a budget; drop the one of both together")
    return total, sides.get("gpu"), sides.get("cpu")


def _amount(option: str, text: str) -> Budget:
    from ikcli.quant.target import Budget, parse_size

    if option != "--target-bpw":
        return Budget(n_bytes=parse_size(text, option))
    try:
        bits = float(text)
    except ValueError:
        bits = 0.0
    if not 0 < bits <= 32:
        raise UsageError(f'{option}: "{text}" is not a number of bits per weight, for example 3.6')
    return Budget(bpw=bits)


def _placement(arguments: ToolArguments, budgets: set[str]) -> Placement:
    """Which tensors stay on the CPU: rules of -ot, or --gpu-tensors before --cpu-tensors."""
    from ikcli.engine.tensor_rules import parse_rule
    from ikcli.quant.target import CPU, GPU, Placement
    from ikcli.rules import compile_pattern

    gpu, cpu = _patterns(arguments, "gpu_tensors"), _patterns(arguments, "cpu_tensors")
    if arguments.has("ot"):
        if gpu or cpu:
            raise UsageError("-ot tells where tensors go; drop --cpu-tensors and --gpu-tensors")
        rules = [parse_rule(rule) for text in arguments.all("ot") for rule in _rules(text)]
        given = [(r.pattern, "-ot", CPU if r.buffer == "CPU" else GPU) for r in rules]
        rest, named = GPU, {side for _, _, side in given}
    else:
        given = [(p, "--gpu-tensors", GPU) for p in gpu]
        given += [(p, "--cpu-tensors", CPU) for p in cpu if p.lower() != "none"]
        named = {side for _, _, side in given} | ({GPU} if cpu and not given else set())
        if not gpu and not cpu:
            given = [(EXPERTS, "--cpu-tensors", CPU)]
        rest = CPU if gpu and not cpu else GPU
    searches = [(compile_pattern(pattern, option, pattern).search, side) for pattern, option, side in given]

    def on_cpu(name: str) -> bool:
        return next((side for search, side in searches if search(name)), rest) == CPU

    return Placement(on_cpu, frozenset(named | budgets))


def _rules(text: str) -> tuple[str, ...]:
    from ikcli.config_values import parse_rules

    try:
        return parse_rules(text)
    except ValueError as problem:
        raise UsageError(f"-ot {problem}") from None


def _patterns(arguments: ToolArguments, key: str) -> list[str]:
    return [p.strip() for text in arguments.all(key) for p in text.split(",") if p.strip()]


def check_sides(target: TargetOptions, names: Sequence[str]) -> None:
    """UsageError if a side that has a rule or a budget gets no tensor."""
    missing = target.placement.named - {target.placement.side(name) for name in names}
    if missing:
        side = min(missing).upper()
        raise UsageError(f"the placement leaves no tensor for the {side}; look at the names with ik inspect")
