"""Options after `--`, which a benchmark passes on to the programs that it compares."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def parse_with_extra(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; `extra` holds the words after `--`."""
    at = argv.index("--") if "--" in argv else len(argv)
    arguments = parser.parse_args(argv[:at])
    arguments.extra = list(argv[at + 1 :])
    return arguments
