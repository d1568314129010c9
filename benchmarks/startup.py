#!/usr/bin/env python3
"""Measure the first run of a command, whose kernels are compiled, and the second, in turns between installations.

Each turn begins with an empty kernel cache. `--ik` names what is compared: a checkout, an installed wheel, an older
version. Times are from starting the process to its end.
"""

from __future__ import annotations

import argparse
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

DEMO = ["sweep-bench", "-c", "1024", "-ub", "256", "-n", "32"]


class Start(NamedTuple):
    """Wall-clock and CPU seconds of one run, compile workers included."""

    seconds: float
    processor_seconds: float


def start(command: list[str], cache: Path) -> Start:
    """Run a command with this kernel cache; exit with its message where it fails."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    ran = subprocess.run(
        command, env=dict(os.environ, IK_CACHE_DIR=str(cache)), capture_output=True, text=True, check=False
    )
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if ran.returncode:
        sys.exit(f"{shlex.join(command)}: {ran.stderr.strip()[-500:]}")
    return Start(seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def main(argv: list[str]) -> int:
    """Measure and print a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ik", action="append", metavar="NAME=COMMAND", help="an installation (default: this one)")
    parser.add_argument("-r", "--repetitions", type=int, default=5, help="turns (default: %(default)s)")
    parser.add_argument("arguments", nargs="*", default=DEMO, help=f"of the command (default: {shlex.join(DEMO)})")
    options = parser.parse_args(argv)
    given = options.ik or [f"ik={shlex.quote(sys.executable)} -m ikcli"]
    commands = {name: shlex.split(command) for name, _, command in (text.partition("=") for text in given)}
    first: dict[str, list[Start]] = {name: [] for name in commands}
    second: dict[str, list[Start]] = {name: [] for name in commands}
    for turn in range(options.repetitions):
        for name in list(commands) if turn % 2 else reversed(commands):
            with tempfile.TemporaryDirectory() as cache:
                first[name].append(start([*commands[name], *options.arguments], Path(cache)))
                second[name].append(start([*commands[name], *options.arguments], Path(cache)))
    print("| | first run s | processor s | second run s |\n|---|---:|---:|---:|")
    for name in commands:
        seconds, processors = map(statistics.median, zip(*first[name], strict=True))
        print(
            f"| {name} | {seconds:.2f} | {processors:.1f} | {statistics.median(s.seconds for s in second[name]):.2f} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
