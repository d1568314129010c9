#!/usr/bin/env python3
"""Measure what this machine can do at best: products from registers, and reading from memory for several seconds.

Memory is read by one thread and by all, from anonymous pages of 4 KiB and of 2 MiB and from a mapped file, in turns.
The table has medians over the passes and the fastest pass, which a burst may have made. See docs/doctor.md.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from ikcli.doctor.roofline import Peaks, buffer_bytes, measure
from ikcli.hostinfo import physical_cores

PIECE = 1 << 24


def table(peaks: Peaks) -> str:
    """Return the rates as Markdown tables."""
    n = peaks.threads
    lines = [f"| memory | GB/s, 1 thread | GB/s, {n} threads | fastest pass |", "|---|---:|---:|---:|"]
    for name, rates in peaks.pages.items():
        lines.append(f"| {name} | {rates.one / 1e9:.1f} | {rates.all / 1e9:.1f} | {rates.fastest / 1e9:.1f} |")
    lines += [f"| node {number}, its own threads | | {r / 1e9:.1f} | |" for number, r in peaks.read_nodes.items()]
    lines += ["", f"| products | GOP/s, {n} threads |", "|---|---:|"]
    lines += [f"| {kind} | {rate / 1e9:.0f} |" for kind, rate in peaks.products.items() if rate]
    return "\n".join([*lines, *peaks.problems])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-t", "--threads", type=int, default=physical_cores())
    parser.add_argument("--seconds", type=float, default=4.0, help="of reading each kind of memory with all threads")
    parser.add_argument("--file", type=Path, help="a large file to map, such as a model; default: a temporary one")
    args = parser.parse_args()
    if args.file is not None:
        print(table(measure(args.threads, args.file, args.seconds)))
        return
    with tempfile.NamedTemporaryFile() as f:
        for _ in range(0, buffer_bytes(), PIECE):
            f.write(os.urandom(1 << 10) * (PIECE >> 10))
        f.flush()
        print(table(measure(args.threads, Path(f.name), args.seconds)))


if __name__ == "__main__":
    main()
