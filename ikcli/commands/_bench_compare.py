"""`ik bench --compare SIDE`: alternate between sides; a table or records on stdout, progress on stderr."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from ikcli import log
from ikcli.bench.compare import BenchComparison, Ratio, Side, compare, n_cpus, parse_sides
from ikcli.bench.disturbance import warnings_of
from ikcli.bench.environment import cpu_name
from ikcli.cli.argv import canonical_name
from ikcli.cli.parser import ModelRun, names_of
from ikcli.commands._bench_output import build
from ikcli.errors import UsageError

_OWN = {f"bench.{name}" for name in ("compare", "rounds", "precision", "output", "output_err")}


def run(run: ModelRun) -> int:
    """Alternate between the sides and print ratios; return 130 after Ctrl-C, with the rounds so far."""
    options = run.config.bench
    if options.output not in ("md", "json", "jsonl") or options.output_err:
        raise UsageError("--compare writes its result with -o md, json or jsonl, and has no -oe")
    common = common_options(run.argv, len(options.compare))
    if "model" not in run.given:
        common = ["-m", str(run.config.model), *common]
    sides = parse_sides(options.compare, common)
    for side in sides:
        log.log(f"side {side.name}: {shlex.join(side.command)}")
    found, code = BenchComparison(sides), 0
    try:
        for found in compare(sides, options.rounds, options.precision / 100, warmup=options.warmup):
            _tell(found, options.rounds)
    except KeyboardInterrupt:
        code = 130
    if not found.rounds:
        return code
    _print(found, options.output, str(run.config.model))
    for warning in _warnings(found):
        log.warn(warning)
    return code


def common_options(argv: Sequence[str], n_sides: int) -> list[str]:
    """Return the words of the command line without the options of the comparison itself."""
    names, rest, out = names_of("bench"), list(argv), []
    while rest:
        token = rest.pop(0)
        name = canonical_name(token)
        found = names.get(name) or names.get(name.partition("=")[0])
        if found is None:
            out.append(token)
            continue
        attached = "=" in token
        taken = [token]
        if found[0].option.takes_value and not attached and rest:
            taken.append(rest.pop(0))
        if found[0].path not in _OWN:
            out += taken
        n_sides -= found[0].path == "bench.compare"
    if n_sides:
        raise UsageError("--compare belongs on the command line, not in a file of options that every side reads")
    return out


def _tell(found: BenchComparison, rounds: int) -> None:
    parts = [f"{r.test} {r.side} {r.ratio:.4f}{_bounds(r)}" for r in found.ratios()]
    log.log(f"round {len(found.rounds)} of {rounds}: {', '.join(parts)}")


def _bounds(r: Ratio) -> str:
    return f" ({r.low:.4f} to {r.high:.4f})" if math.isfinite(r.high) else ""


def _warnings(found: BenchComparison) -> list[str]:
    out = warnings_of([run.disturbance for r in found.rounds for run in r.values()], n_cpus())
    left = found.left_out()
    if left:
        out.append(f"not every side measured {', '.join(left)}: left out")
    return out


def records(found: BenchComparison, model: str) -> list[dict[str, Any]]:
    """Return one record per ratio, in the form that `-o json` and jsonl print and `ik report` reads."""
    commands: dict[str, Side] = {side.name: side for side in found.sides}
    commit, number = build()
    return [
        {
            "compare": r.test, "side": r.side, "base": r.base, "ratio": r.ratio,
            "low": r.low, "high": r.high if math.isfinite(r.high) else None,
            "rounds": len(found.rounds), "speeds": list(r.speeds), "base_speeds": list(r.base_speeds),
            "side_command": shlex.join(commands[r.side].command),
            "base_command": shlex.join(commands[r.base].command),
            "model_filename": model, "cpu_info": cpu_name() or "", "build_commit": commit, "build_number": number,
            "test_time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), "warnings": _warnings(found),
        }
        for r in found.ratios()
    ]  # fmt: skip


def _print(found: BenchComparison, form: str, model: str) -> None:
    if form == "json":
        print(json.dumps(records(found, model), indent=2, allow_nan=False))
        return
    if form == "jsonl":
        for record in records(found, model):
            print(json.dumps(record, allow_nan=False))
        return
    base = found.sides[0].name
    print(f"| test | side | t/s | {base} t/s | ratio | 95 % interval | |")
    print("|:---|:---|---:|---:|---:|:---:|:---|")
    for r in found.ratios():
        verdict = "faster" if r.low > 1 else "slower" if r.high < 1 else "no difference shown"
        means = [math.exp(sum(map(math.log, s)) / len(s)) for s in (r.speeds, r.base_speeds)]
        bounds = f"{r.low:.4f} to {r.high:.4f}" if math.isfinite(r.high) else "one round only"
        print(f"| {r.test} | {r.side} | {means[0]:.2f} | {means[1]:.2f} | {r.ratio:.4f} | {bounds} | {verdict} |")
    print(f"\n{len(found.rounds)} rounds; ratios to {base}, geometric means")
