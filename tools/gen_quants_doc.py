#!/usr/bin/env python3
"""Measure types and presets of `ik quantize` and write docs/quants.md.

--quality      perplexity, KL divergence and errors on the bundled demo model (a quarter of an hour on two cores)
--speed        speed of all types next to F16, on the demo model and on a larger random one (a quarter of an hour)
--divergence FILE  take over what benchmarks/divergence.py --json FILE has measured
--check        compare docs/quants.md with what docs/quants.jsonl says, and write nothing
Without any of these the page is written anew from docs/quants.jsonl. Speed can be measured in pieces on a machine that
is quiet only now and then: `--speed --restart --seconds 0` begins a round, then `--speed --seconds 80` until the exit
code is 0 (3: something is left); likewise `--quality --missing --seconds 80`. --names limits either to some types or
presets.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from quants_data import DATA, PAGE, Record, merged, read_records, record_key, write_records
from quants_divergence import records_of
from quants_page import page

from ikcli.errors import IkError

LEFT = 3


def _keep(new: Iterator[Record]) -> None:
    """Store records as they come; drop the logs of the model runs."""
    while True:
        with contextlib.redirect_stderr(io.StringIO()):
            record = next(new, None)
        if record is None:
            return
        write_records(merged(read_records(), [record]))
        shown = {k: v for k, v in record.items() if k not in ("kind", "fallback", "sha256")}
        print(f"{time.strftime('%H:%M:%S')} {shown}", file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quality", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--divergence", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--restart", action="store_true", help="begin a new round of speeds")
    parser.add_argument("--seconds", type=float, help="stop measuring after about so long")
    parser.add_argument("--missing", action="store_true", help="measure only quality without a record")
    parser.add_argument("--work", type=Path, help="folder that keeps the random model between runs")
    parser.add_argument("--names", nargs="*", default=[], help="types or presets; default all")
    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    names = [name.lower() for name in arguments.names]
    left = False
    if arguments.divergence:
        write_records(merged(read_records(), records_of(arguments.divergence)))
    try:
        if arguments.quality:
            from quants_quality import all_quality, cases

            done = {record_key(r) for r in read_records()} if arguments.missing else set()
            todo = [case for case in cases(names) if record_key(case.head) not in done]
            before = time.monotonic()
            _keep(all_quality(todo, arguments.seconds) if todo else iter(()))
            left = arguments.seconds is not None and time.monotonic() - before > arguments.seconds
        if arguments.speed:
            from quants_speed import SpeedRound

            speeds = SpeedRound(names, arguments.work, arguments.restart, arguments.seconds)
            _keep(speeds.run())
            left |= bool(speeds.todo)
            print(f"{len(speeds.todo)} speeds are left to measure", file=sys.stderr)
    except IkError as e:
        print(f"error: {e}", file=sys.stderr)
        return e.exit_code
    text = page(read_records())
    if arguments.check:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text:
            print(f"{PAGE} does not show {DATA}; run python tools/gen_quants_doc.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text, encoding="utf-8")
    return LEFT if left else 0


if __name__ == "__main__":
    sys.exit(main())
