"""Banned strings and patterns of a request and of the server (`--banned-string-file`, `--banned-n`)."""

from __future__ import annotations

import math
from pathlib import Path

from ikcli.server.http.errors import bad_request
from ikcli.server.http.generation_body import NEVER, GenerationBody
from ikcli.server.slots.messages import Bans
from ikcli.server.slots.patterns import Pattern, PatternError
from ikcli.settings.run import RunConfig
from ikcli.text_files import read_text


def server_bans(config: RunConfig) -> tuple[str, ...]:
    """Return the strings that the command line bans in all answers. Raise UsageError for an unreadable file."""
    path = config.server.banned_string_file
    return () if path is None else _lines(path)


def _lines(path: Path) -> tuple[str, ...]:
    """Return one string per line, without quotes."""
    text = read_text(path, "--banned-string-file")
    return tuple(line for line in text.replace('"', "").splitlines() if line)


def bans_of(fields: GenerationBody) -> Bans:
    """Return the bans of a request. Raise ApiError 400 for an invalid pattern."""
    patterns = [
        *(_pattern(text, "banned_regex", ignore_case=False) for text in fields.banned_regex),
        *(_pattern(text, "banned_regex_case_insensitive", ignore_case=True)
          for text in fields.banned_regex_case_insensitive),
    ]  # fmt: skip
    bans = Bans(
        strings=fields.banned_strings,
        patterns=tuple(patterns),
        n_tokens=fields.banned_n,
        bias=fields.banned_bias if fields.banned_bias > NEVER else -math.inf,
        buffer=fields.banbuffer_size,
        max_rewinds=fields.rewind_count_max,
        counts=not fields.saturate_predict,
    )
    if bans and bans.max_rewinds == 0 and (bans.n_tokens == 0 or bans.bias > -math.inf):
        raise bad_request("rewind_count_max 0 (no limit) needs tokens that are banned for good: banned_n, banned_bias")
    return bans


def _pattern(text: str, field: str, *, ignore_case: bool) -> Pattern:
    try:
        return Pattern(text, ignore_case=ignore_case)
    except PatternError as problem:
        raise bad_request(f'{field}: "{text[:60]}" {problem}') from None
