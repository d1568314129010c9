"""Banned texts and patterns of a request, and those of the server (`--banned-string-file`, `--banned-n`)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from ikcli.server.http.errors import bad_request
from ikcli.server.slots.messages import Bans
from ikcli.server.slots.patterns import Pattern, PatternError
from ikcli.settings.run import RunConfig
from ikcli.text_files import read_text

NEVER = -999.0  # a bias that stands for minus infinity
_PATTERNS = {"banned_regex": False, "banned_regex_case_insensitive": True}
_NAMES = {
    "banned_strings": "strings",
    "banned_n": "n_tokens",
    "banbuffer_size": "buffer",
    "rewind_count_max": "max_rewinds",
}


def server_bans(config: RunConfig) -> Bans:
    """What the command line bans in all answers; UsageError for a file that cannot be read."""
    path, n_tokens = config.server.banned_string_file, config.server.banned_n
    return Bans(strings=_lines(path) if path is not None else (), n_tokens=n_tokens)


def _lines(path: Path) -> tuple[str, ...]:
    """One text per line; quotes are dropped."""
    text = read_text(path, "--banned-string-file")
    return tuple(line for line in text.replace('"', "").splitlines() if line)


def bans_of(values: dict[str, Any], server: Bans) -> Bans:
    """The bans of a request with these checked fields; ApiError 400 for a pattern that cannot be used."""
    given = {name: values[field] for field, name in _NAMES.items() if field in values}
    if "banned_bias" in values:
        bias = values["banned_bias"]
        given["bias"] = bias if bias > NEVER else -math.inf
    if "saturate_predict" in values:
        given["counts"] = not values["saturate_predict"]
    given["patterns"] = tuple(_pattern(text, field) for field in _PATTERNS for text in values.get(field, ()))
    bans = replace(server, **given)
    if bans and bans.max_rewinds == 0 and (bans.n_tokens == 0 or bans.bias > -math.inf):
        raise bad_request("rewind_count_max 0 (no limit) needs tokens that are banned for good: banned_n, banned_bias")
    return bans


def _pattern(text: str, field: str) -> Pattern:
    try:
        return Pattern(text, ignore_case=_PATTERNS[field])
    except PatternError as problem:
        raise bad_request(f'{field}: "{text[:60]}" {problem}') from None
