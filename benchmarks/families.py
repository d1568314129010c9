#!/usr/bin/env python3
"""Compare the speed of model families with ik_llama.cpp, by type, instruction set and depth of the context.

Makes random models and runs `ik sweep-bench` in turns with the llama-sweep-bench that was built for the same
instruction set. `ik doctor` measures the roofline of every model. One cell of the Markdown table has the tokens per
second of `ik` and, in parentheses, the ratio to the reference (above 1, `ik` is faster) and the share of the roofline;
that of prompts counts the products with weights, without attention. The ratio is the median of the ratios of all turns,
because the speed of some machines changes between turns.

Models have the widths, heads and sizes of experts of real ones, but few blocks (`tools/make_random_model.py`). Files
that are already in the folder are used. With --json every turn is kept, and a later call goes on where this one
stopped: `--small --json FILE --seconds 3000` fills a large table in pieces (exit code 3: something is left). With
--alive both programs stay alive while they take turns, and read the caches that the first model of a family filled
(`alive.py`); --reference then needs the whole build. Options after `--` are given to both programs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import alive
from compare_reference import PROGRAM, NoTable, run_once, sweep_options
from extra_options import parse_with_extra
from make_random_model import PRESETS, tensors_of

from ikcli.bench.disturbance import Watch
from ikcli.errors import UsageError
from ikcli.files import written_whole
from ikcli.native import isa

MAKE = Path(__file__).resolve().parents[1] / "tools" / "make_random_model.py"
FAMILIES = (
    "qwen3moe", "qwen35", "qwen35moe", "deepseek2", "glm4moe", "gpt-oss", "minimax-m2", "mixtral", "ernie4_5-moe",
    "gemma3", "cohere2", "qwen3", "llama",
)  # fmt: skip
TYPES = "Q4_K_M,IQ4_K"
# --small: layers and tokens that make files of 90 to 260 MB; two families have experts.
SMALL = {"qwen3": (3, 16384), "llama": (4, 16384), "deepseek2": (2, 16384), "qwen3moe": (2, 8192)}
SMALL_TYPES = "Q8_0,Q6_K,Q5_K_M,Q4_K_M,Q4_0,Q3_K_M,Q2_K,IQ4_XS,IQ4_K,IQ4_KS,IQ2_K,IQ3_XXS"
NATIVE = "native"

Cell = dict[str, Any]
"""`turns`: per turn and program, prompt and generation speed by depth; `roofs`: limits of both by depth."""


class Run(NamedTuple):
    """What one cell of the file is about."""

    family: str
    type: str
    isa: str

    @property
    def key(self) -> str:
        return " ".join(self)


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; `extra` holds the words after `--`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)} (default: all)")
    parser.add_argument("--reference", action="append", default=[], metavar="[ISA=]DIR",
                        help=f"folder with {PROGRAM}, for one instruction set or for all others; without it ik runs "
                        "alone")  # fmt: skip
    parser.add_argument("--folder", type=Path, required=True, help="where models are made, and kept")
    parser.add_argument("--ik", default="ik", help="how to start ik, with absolute paths (default: %(default)s)")
    parser.add_argument("--small", action="store_true",
                        help=f"small models of {', '.join(SMALL)} in 12 types")  # fmt: skip
    parser.add_argument("--types", help=f"presets of ik quantize (default: {TYPES})")
    parser.add_argument("--isa", default=NATIVE, metavar="ISA,...",
                        help="instruction sets of ik's kernels, such as avx512,avxvnni,avx2 (default: that of this "
                        "processor)")  # fmt: skip
    parser.add_argument("--depths", default="0,8192", help="values of N_KV (default: %(default)s)")
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("-ub", "--ubatch-size", type=int, default=512, help="has to divide the depths")
    parser.add_argument("--tg", type=int, default=64, help="tokens that are generated (default: %(default)s)")
    parser.add_argument("-r", "--repetitions", type=int, default=3, help="turns (default: %(default)s)")
    parser.add_argument("--alive", action="store_true", help="load the model once for all turns of a cell")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep all turns here, and go on with what it has")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no turn later than this")
    parser.add_argument("--idle", type=float, default=math.inf, metavar="CPUS",
                        help="repeat a turn if other programs kept more processors than this busy")  # fmt: skip
    parser.add_argument("--layers", type=int, help="blocks instead of the preset's")
    parser.add_argument("--experts", type=int, help="experts instead of the preset's")
    parser.add_argument("--vocab", type=int, help="tokens instead of the preset's")
    parser.add_argument("--timeout", type=float, default=600, help="seconds per run (default: %(default)s)")
    found = parse_with_extra(parser, argv)
    unknown = sorted(set(found.families) - set(FAMILIES))
    if unknown:
        parser.error(f"unknown family: {', '.join(unknown)}; known are {', '.join(FAMILIES)}")
    found.families = found.families or list(SMALL if found.small else FAMILIES)
    found.types = (found.types or (SMALL_TYPES if found.small else TYPES)).split(",")
    found.isas = found.isa.split(",")
    found.depths = sorted({int(text) for text in found.depths.split(",")})
    for depth in found.depths:
        if depth % found.ubatch_size:
            parser.error(f"--depths: {depth} is not a multiple of -ub {found.ubatch_size}")
    folders = [text.partition("=") if "=" in text else ("", "=", text) for text in found.reference]
    found.references = {name: Path(folder) for name, _, folder in folders}
    if found.alive and found.idle < math.inf:
        parser.error("--idle needs programs that end; leave out --alive")
    missing = [str(f) for f in found.references.values() if not (f / PROGRAM).is_file()]
    if missing:
        parser.error(f"--reference: no {PROGRAM} in {', '.join(missing)}")
    return found


def run(command: list[str]) -> None:
    """Run a step; its own output goes to stderr."""
    print(shlex.join(command), file=sys.stderr)
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode:
        sys.exit(f"error: {shlex.join(command)} ended with exit code {done.returncode}")


def make(family: str, type_: str, options: argparse.Namespace) -> Path:
    """Make a model, by way of q8_0 where random blocks of a type cannot be made; rounding does not affect speed.

    Routers of small models use all experts alike: few experts would stay in the cache of the processor.
    """
    layers, vocab = SMALL[family] if options.small and family in SMALL else (None, None)
    sizes = {"layers": options.layers or layers, "experts": options.experts, "vocab": options.vocab or vocab}
    size_options = [text for key, value in sizes.items() if value for text in (f"--{key}", str(value))]
    stem = "-".join([family, *(f"{key[0]}{value}" for key, value in sizes.items() if value)])
    if options.small and "expert_count" in PRESETS[family].keys:
        size_options += ["--router-skew", "0"]
        stem += "-even"
    path = options.folder / f"{stem}-{type_}.gguf"
    if path.exists():
        return path
    try:
        tensors_of(PRESETS[family].changed(sizes["layers"], sizes["vocab"], sizes["experts"]), type_)
        direct = True
    except UsageError:
        direct = False
    target = options.folder / f"{stem}-unfinished.gguf"
    source = target if direct else options.folder / f"{stem}-source.gguf"
    run([sys.executable, str(MAKE), "--preset", family, "--type", type_ if direct else "Q8_0", *size_options, "-o",
         str(source)])  # fmt: skip
    if not direct:
        run([*shlex.split(options.ik), "quantize", "--allow-requantize", "--ignore-imatrix-rules", "-t",
             str(options.threads), str(source), str(target), type_])  # fmt: skip
        source.unlink()
    os.replace(target, path)
    return path


def variables_of(name: str) -> dict[str, str]:
    """Return the environment in which `ik` uses an instruction set."""
    return {} if name in (NATIVE, isa.host().name) else {"IK_CPU_ISA": name}


def roofs(path: Path, name: str, options: argparse.Namespace) -> dict[str, list[float | None]]:
    """Return the limits of prompts and generation by depth, measured now by `ik doctor`."""
    n_ctx = options.depths[-1] + options.ubatch_size
    command = [*shlex.split(options.ik), "doctor", "-m", str(path), "-t", str(options.threads), "-ub",
               str(options.ubatch_size), "-c", str(n_ctx), "--json"]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **variables_of(name)}
    )
    try:
        prompt, empty, full = [speed["tokens_per_s"] for speed in json.loads(done.stdout)["model"]["speeds"]]
    except (ValueError, KeyError, TypeError):
        sys.exit(f"error: {shlex.join(command)}: no rooflines (exit code {done.returncode})\n{done.stderr[-2000:]}")
    found: dict[str, list[float | None]] = {}
    for depth in options.depths:  # seconds grow linearly with it, from the empty cache to the full one
        part = depth / n_ctx
        found[str(depth)] = [prompt, 1 / ((1 - part) / empty + part / full) if empty and full else None]
    return found


def turn(path: Path, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run both programs once; return speeds by program and depth, and the processors that others kept busy."""
    depths, n_ubatch = options.depths, options.ubatch_size
    # The reference needs room behind a prompt in an empty cache; with a stride of 2 only the first row is measured.
    stride = reduce(math.gcd, depths) // n_ubatch or 2
    n_ctx = max(depths[-1], n_ubatch) + n_ubatch
    extra = ["-n", str(options.tg), "--sweep-stride", str(stride), *options.extra]
    arguments = sweep_options(path, options.threads, n_ctx, n_ubatch, "3", extra)
    programs = {"ik": ([*shlex.split(options.ik), "sweep-bench"], variables_of(name))}
    folder = options.references.get(name, options.references.get(""))
    if folder is not None:
        programs["reference"] = ([str((folder / PROGRAM).resolve())], {})
    found: dict[str, Any] = {}
    with Watch() as watch:
        for program, (command, variables) in programs.items():
            rows = run_once(command + arguments, options.timeout, variables)
            found[program] = {str(depth): rows[depth] for depth in depths if depth in rows}
    return found | {"others": watch.found.others}


def alive_turns(path: Path, run_: Run, n: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Let both programs take n turns at each depth while they stay alive; return what `turn` does for each."""
    depths, n_ubatch = options.depths, options.ubatch_size
    n_ctx = depths[-1] + max(n_ubatch, options.tg)
    arguments = sweep_options(path, options.threads, n_ctx, n_ubatch, "3", options.extra)
    commands = {"ik": [sys.executable, str(alive.HERE / "alive.py")]}
    folder = options.references.get(run_.isa, options.references.get(""))
    if folder is not None:
        target = options.folder / f"alive-reference-{run_.isa}"
        commands["reference"] = [str(alive.compile_reference(folder, target))]
    found: list[dict[str, Any]] = [{"others": None, **{name: {} for name in commands}} for _ in range(n)]
    shape, variables = path.stem.removesuffix(f"-{run_.type}"), variables_of(run_.isa)
    with ExitStack() as stack:
        programs = {
            name: stack.enter_context(alive.Alive([*command, *arguments], variables if name == "ik" else None))
            for name, command in commands.items()
        }
        for depth in depths:
            for name, program in programs.items():
                if depth:
                    program.ask(f"fill {depth} {options.folder / f'{shape}-{run_.isa}-{depth}.{name}'}")
            for i, turn_ in enumerate(found):
                for name, program in list(programs.items())[:: -1 if i % 2 else 1]:
                    turn_[name][str(depth)] = program.speeds(n_ubatch, options.tg)
    return found


def left(cell: Cell, options: argparse.Namespace) -> int:
    """Return the turns that a cell lacks at one of the depths."""
    done = [sum(str(depth) in t["ik"] for t in cell["turns"]) for depth in options.depths]
    return max(0, options.repetitions - min(done))


def table(cells: dict[str, Cell], options: argparse.Namespace) -> Iterator[str]:
    """Yield the Markdown table of the cells that have turns, and means by instruction set and depth."""
    yield "| model | type | N_KV | " + " | ".join(f"PP {name} | TG {name}" for name in options.isas) + " |"
    yield "|---|---|---:|" + "---:|---:|" * len(options.isas)
    ratios: dict[tuple[str, int, int], list[float]] = {}
    for family in options.families:
        for type_ in options.types:
            for depth in options.depths:
                texts = []
                for name in options.isas:
                    cell = cells.get(Run(family, type_, name).key, {"turns": [], "roofs": []})
                    for i in range(2):
                        text, ratio = shown(cell, str(depth), i)
                        texts.append(text)
                        if ratio is not None:
                            ratios.setdefault((name, depth, i), []).append(ratio)
                if any(texts):
                    yield f"| {family} | {type_} | {depth} | {' | '.join(texts)} |"
    for (name, depth, i), values in ratios.items():
        mean = statistics.geometric_mean(values)
        yield (f"\n{name}, N_KV {depth}, {('PP', 'TG')[i]}: geometric mean of {len(values)} ratios {mean:.2f}, lowest "
               f"{min(values):.2f}")  # fmt: skip


def shown(cell: Cell, depth: str, i: int) -> tuple[str, float | None]:
    """Return a cell of the table, and the ratio to the reference: prompts (i = 0) or generation (1)."""
    turns = [(t["ik"][depth][i], t.get("reference", {}).get(depth)) for t in cell["turns"] if depth in t["ik"]]
    if not turns:
        return "", None
    speed, ratios = statistics.median(ours for ours, _ in turns), [ours / other[i] for ours, other in turns if other]
    ratio = statistics.median(ratios) if ratios else None
    limits = [r[depth][i] for r in cell["roofs"] if r.get(depth, [None, None])[i]]
    share = f"{100 * speed / statistics.median(limits):.0f} %" if limits else "-"
    return f"{speed:.{0 if speed >= 100 else 1}f} ({'-' if ratio is None else f'{ratio:.2f}'}, {share})", ratio


def main(argv: list[str]) -> int:
    """Make models and measure what is missing; return 3 if something is left."""
    options = parse_arguments(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.seconds
    names = ("threads", "ubatch_size", "tg", "small", "layers", "experts", "vocab", "alive", "extra")
    kept: dict[str, Any] = {"settings": {name: getattr(options, name) for name in names}, "cells": {}}
    if options.json is not None and options.json.exists():
        before = json.loads(options.json.read_text())
        if before["settings"] != kept["settings"]:
            sys.exit(f"error: {options.json} has turns of other settings: {before['settings']}")
        kept = before
    for run_ in (Run(f, t, i) for f in options.families for t in options.types for i in options.isas):
        cell = kept["cells"].setdefault(run_.key, {"turns": [], "roofs": []})
        if not left(cell, options) or time.monotonic() >= end:
            continue
        path = make(run_.family, run_.type, options)
        cell["roofs"].append(roofs(path, run_.isa, options))
        while left(cell, options) and time.monotonic() < end:
            print(f"{run_.key}: {left(cell, options)} turns are left", file=sys.stderr, flush=True)
            try:
                if options.alive:
                    turns = alive_turns(path, run_, left(cell, options), options)
                else:
                    turns = [turn(path, run_.isa, options)]
            except NoTable as error:
                sys.exit(f"error: {run_.key}: {error}")
            for found in turns:
                if (found["others"] or 0.0) > options.idle:
                    print(f"{run_.key}: others kept {found['others']:.2f} processors busy, again", file=sys.stderr)
                else:
                    cell["turns"].append(found)
            if options.json is not None:
                with written_whole(options.json) as temporary:
                    temporary.write_text(json.dumps(kept, indent=1))
    busy = [t["others"] for cell in kept["cells"].values() for t in cell["turns"] if t["others"] is not None]
    print(f"`-t {options.threads} -ub {options.ubatch_size}`, {options.tg} tokens generated, medians of up to "
          f"{options.repetitions} turns: t/s (ratio to the reference, share of the roofline)", end="")  # fmt: skip
    print(f"; others kept up to {max(busy):.2f} processors busy\n" if busy else "\n")
    print("\n".join(table(kept["cells"], options)))
    todo = [Run(f, t, i).key for f in options.families for t in options.types for i in options.isas]
    return 3 if any(left(kept["cells"][key], options) for key in todo) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
