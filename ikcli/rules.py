r"""Regular expressions on tensor names for -ot, --custom-q and --repack-pattern: checks and hints.

An expression searches (unanchored, case-sensitive) the full tensor name. The hints cover the most common mistakes:
`[0-10]` digit classes, `\.*` for `.*`, expressions that match nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ikcli.errors import UsageError
from ikcli.suggest import near_names


def compile_pattern(pattern: str, option: str, text: str) -> re.Pattern[str]:
    """Compile an expression; raise UsageError that marks the position of an error."""
    try:
        return re.compile(pattern)
    except re.error as problem:
        position = problem.pos if problem.pos is not None else 0
        raise UsageError(
            f'{option}: "{text}" is not a valid regular expression: {problem.msg}\n    {pattern}\n    {" " * position}^'
        ) from None


def pattern_warnings(pattern: str, text: str, matched: Sequence[str]) -> list[str]:
    r"""Warn about `[0-10]`-like digit classes and `\.*`, with the blocks that they really match."""
    warnings: list[str] = []
    where = layer_text(matched) or "nothing"
    for found in re.findall(r"\[[^\]]*\d-\d\d[^\]]*\]", pattern):
        warnings.append(
            f'rule "{text}": {found} is one character out of a set, not a range of numbers; '
            f"the rule matches {where} (write (0|1|2) or alternatives like ([0-9]|10))"
        )
    if r"\.*" in pattern:
        meant = pattern.replace(r"\.*", ".*")
        warnings.append(
            f'rule "{text}": \\.* means any number of dots and the rule matches {where}; '
            f"if any text was meant, write {meant}"
        )
    return warnings


def unmatched(problems: Sequence[str], option: str, strict: bool = False) -> list[str]:
    """Return warnings about rules of an option that match nothing; with `strict` raise them as a UsageError."""
    if problems and strict:
        raise UsageError(f"{option}: " + "; ".join(problems))
    return [f"{option}: {problem}" for problem in problems]


def pattern_notes(patterns: Iterable[str], option: str, names: Sequence[str], strict: bool = False) -> list[str]:
    """Return warnings about expressions of an option that match none of the names, as `unmatched` does."""
    searches = {pattern: compile_pattern(pattern, option, pattern).search for pattern in patterns}
    empty = [pattern for pattern, search in searches.items() if not any(search(name) for name in names)]
    return unmatched([f'"{pattern}" {no_match(pattern, names)}' for pattern in empty], option, strict)


def no_match(pattern: str, names: Sequence[str], what: str = "tensor of this model") -> str:
    """Say that a pattern matches no name, and which names are near."""
    near = near_misses(pattern, names)
    return f"matches no {what}" + (f"; nearest: {', '.join(near)}" if near else "")


def near_misses(pattern: str, names: Sequence[str], limit: int = 3) -> list[str]:
    """Return hints for a pattern without a match: repaired patterns that match, else similar parts of tensor names."""
    hints: list[str] = []
    for repaired in (pattern.replace(r"\.*", ".*"), f"(?i){pattern}"):
        if repaired == pattern:
            continue
        found = [name for name in names if re.search(repaired, name)]
        if found:
            hints.append(f"{repaired} ({len(found)} tensors, {layer_text(found)})")
    if hints:
        return hints[:limit]
    parts = sorted({part for name in names for part in name.split(".") if not part.isdigit()})
    for word in re.findall(r"[A-Za-z_]{3,}", pattern):
        hints += near_names(word, parts, limit)
        hints += [part for part in parts if word in part]
    return list(dict.fromkeys(hints))[:limit]


def layer_text(names: Iterable[str]) -> str:
    """Return `blocks 3-5, 7` from tensor names, or an empty text if none belongs to a block."""
    blocks = sorted({int(m[1]) for name in names if (m := re.match(r"blk\.(\d+)\.", name))})
    if not blocks:
        return ""
    ranges: list[list[int]] = []
    for block in blocks:
        if ranges and block == ranges[-1][1] + 1:
            ranges[-1][1] = block
        else:
            ranges.append([block, block])
    pieces = [str(a) if a == b else f"{a}-{b}" for a, b in ranges]
    return f"block{'s' if len(blocks) > 1 else ''} {', '.join(pieces)}"
