#!/usr/bin/env python3
"""Measure generation and prompts alone and next to one busy loop per CPU, in turns: what other programs cost.

A fair scheduler gives half of every CPU to its loop, so 2 is the best factor on an idle machine. More means that
threads waited for each other. The processor time that this process got tells both apart.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ikcli.bench.sweep import SweepParams
from ikcli.bench.sweep import run as sweep
from ikcli.engine.run.session import Session
from ikcli.hostinfo import physical_cores, visible_cpus
from ikcli.settings.run import RunConfig, default_model

LOOP = """import os, sys
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, [int(sys.argv[1])])
while True:
    pass
"""
SETTLE_S = 0.3


class Turn(NamedTuple):
    """Tokens per second of prompts and generation, and processors that this process got."""

    pp: float
    tg: float
    processors: float


@contextlib.contextmanager
def busy_loops() -> Iterator[None]:
    """Run a busy loop on every CPU of this process."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP, str(cpu)]) for cpu in sorted(visible_cpus())]
    try:
        time.sleep(SETTLE_S)
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def turn(session: Session, params: SweepParams) -> Turn:
    """Measure once at an empty cache."""
    session.clear()
    used, started = time.process_time(), time.perf_counter()
    row = sweep(session, params)[0]
    return Turn(row.speed_pp, row.speed_tg, (time.process_time() - used) / (time.perf_counter() - started))


def main(argv: list[str]) -> int:
    """Measure and print a table of medians, and the factors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, default=default_model())
    parser.add_argument("-t", "--threads", type=int, default=physical_cores())
    parser.add_argument("--pp", type=int, default=128, help="tokens of the prompt (default: %(default)s)")
    parser.add_argument("--tg", type=int, default=64, help="generated tokens (default: %(default)s)")
    parser.add_argument("-r", "--repetitions", type=int, default=7, help="turns (default: %(default)s)")
    options = parser.parse_args(argv)
    config = RunConfig(command="sweep-bench", model=options.model, n_threads=options.threads,
                       n_threads_batch=options.threads, warmup=False)  # fmt: skip
    n_ctx = 2 * max(options.pp, options.tg)
    params = SweepParams(options.pp, options.tg, n_ctx, warmup=False, max_depth=1)
    found: dict[str, list[Turn]] = {"alone": [], "next to busy loops": []}
    with Session.open(config, n_ctx=n_ctx) as session:
        turn(session, params)
        for _ in range(options.repetitions):
            found["alone"].append(turn(session, params))
            with busy_loops():
                found["next to busy loops"].append(turn(session, params))
    print(f"| {os.path.basename(options.model)} | PP t/s | TG t/s | processors used |\n|---|---:|---:|---:|")
    middle = {name: Turn(*map(statistics.median, zip(*turns, strict=True))) for name, turns in found.items()}
    for name, m in middle.items():
        print(f"| {name} | {m.pp:.1f} | {m.tg:.1f} | {m.processors:.2f} |")
    alone, beside = middle.values()
    print(f"| factor | {alone.pp / beside.pp:.2f} | {alone.tg / beside.tg:.2f} | "
          f"{alone.processors / beside.processors:.2f} |")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
