#!/usr/bin/env python3
"""Prompt and generation speed of `ik sweep-bench` next to the sweep-bench of ik_llama.cpp, as a Markdown table.

Both programs run in turns on each model, so that a machine whose speed drifts treats them alike; medians are compared.
Without --reference ik runs alone.
Options after `--` are given to both programs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from extra_options import parse_with_extra

from ikcli.bench.sweep_read import read_text

Row = tuple[float, float]
"""Prompt and generation speed in tokens per second."""

PROGRAM = "llama-sweep-bench"


class NoTable(Exception):
    """A program printed no table of speeds."""


def parse_table(text: str) -> dict[int, Row]:
    """Return speeds by depth from a log with a sweep-bench table; other lines are skipped."""
    rows = [row for table in read_text(text) if table.kind == "sweep" for row in table.rows]
    return {r.n_kv: (r.speed_pp, r.speed_tg) for r in rows if r.speed_pp is not None and r.speed_tg is not None}


def sweep_options(model: Path, threads: int, n_ctx: int, n_ubatch: int, mla: str, extra: Sequence[str]) -> list[str]:
    """Return the options of either sweep-bench."""
    options = ["-m", str(model.resolve()), "-c", str(n_ctx), "-ub", str(n_ubatch), "-t", str(threads)]
    return [*options, "-fa", "on", "-mla", mla, "-wb", *extra]


def run_once(command: list[str], timeout: float, variables: Mapping[str, str] | None = None) -> dict[int, Row]:
    """Run a program and read its table from either stream; raise NoTable with the log's end if there is none.

    `variables` are added to the environment.
    """
    # the reference leaves a log file in its working folder
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=timeout, check=False,
                env={**os.environ, **(variables or {})},
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoTable(f"{shlex.join(command)}: {error}") from None
    rows = parse_table(done.stdout) or parse_table(done.stderr)
    if not rows:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-10:])
        raise NoTable(f"no table from {shlex.join(command)} (exit code {done.returncode})\n{tail}")
    return rows


def medians(runs: list[dict[int, Row]]) -> dict[int, Row]:
    """Return median speeds per depth over repeated runs."""
    values: dict[int, list[Row]] = defaultdict(list)
    for run in runs:
        for depth, row in run.items():
            values[depth].append(row)
    return {
        depth: (statistics.median(pp for pp, _ in rows), statistics.median(tg for _, tg in rows))
        for depth, rows in sorted(values.items())
    }


def table_rows(model: str, ours: dict[int, Row], reference: dict[int, Row]) -> list[str]:
    """Return Markdown rows for the depths both programs measured; ratios above 1 mean that ik is faster.

    Without results of the reference, return all of ours.
    """
    lines = []
    for depth in sorted(ours.keys() & reference.keys() if reference else ours):
        cells = [model, str(depth)]
        for mine, other in zip(ours[depth], reference.get(depth, (0.0, 0.0)), strict=True):
            ratio = f"{mine / other:.2f}" if other > 0 else "-"
            cells += [f"{mine:.2f}", f"{other:.2f}", ratio]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; `extra` holds the words after `--`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, help="GGUF files")
    parser.add_argument("--reference", type=Path, help=f"folder with {PROGRAM}")
    parser.add_argument("--ik", default="ik", help="how to start ik, with absolute paths (default: %(default)s)")
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("-c", "--ctx-size", type=int, default=1024, help="depths are 0, ub, ... (default: %(default)s)")
    parser.add_argument("-ub", "--ubatch-size", type=int, default=512)
    parser.add_argument("-r", "--repetitions", type=int, default=3, help="runs of each program (default: %(default)s)")
    parser.add_argument("--mla", default="3", help="value of -mla for both (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the medians by model, program and N_KV")
    parser.add_argument("--timeout", type=float, default=600, help="seconds per run (default: %(default)s)")
    return parse_with_extra(parser, argv)


def main(argv: list[str]) -> int:
    """Run everything and print the table; progress goes to stderr."""
    arguments = parse_arguments(argv)
    programs = {"ik": [*shlex.split(arguments.ik), "sweep-bench"]}
    if arguments.reference is not None:
        programs["reference"] = [str((arguments.reference / PROGRAM).resolve())]
    found: list[dict[str, Any]] = []
    print(f"`-t {arguments.threads} -c {arguments.ctx_size} -ub {arguments.ubatch_size} -mla {arguments.mla}", end="")
    print(f"{' ' if arguments.extra else ''}{shlex.join(arguments.extra)}`, medians of {arguments.repetitions}\n")
    print("| model | N_KV | PP ik t/s | PP reference | PP ratio | TG ik t/s | TG reference | TG ratio |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    for model in arguments.models:
        runs: dict[str, list[dict[int, Row]]] = defaultdict(list)
        options = sweep_options(
            model, arguments.threads, arguments.ctx_size, arguments.ubatch_size, arguments.mla, arguments.extra
        )
        failure = ""
        for repetition, name in itertools.product(range(arguments.repetitions), programs):
            print(f"{model.name}: {name}, run {repetition + 1} of {arguments.repetitions}", file=sys.stderr)
            try:
                runs[name].append(run_once(programs[name] + options, arguments.timeout))
            except NoTable as error:
                failure = str(error)
                break
        middle = {name: medians(runs[name]) for name in programs}
        print("\n".join(table_rows(model.name, middle["ik"], middle.get("reference", {}))), flush=True)
        found += [
            {"model": model.name, "program": name, "n_kv": depth, "pp": pp, "tg": tg}
            for name, rows in middle.items()
            for depth, (pp, tg) in rows.items()
        ]
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(found, indent=1))
        if failure:
            sys.exit(f"error: {failure}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
