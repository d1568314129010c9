"""Nearest known name for an unknown one, by edit distance and by common prefix."""

from __future__ import annotations

from collections.abc import Iterable

MEANT = {
    "--quantize-q": "--custom-q",
    "--custom-quants": "--custom-q",
    "--custom-types": "--custom-q",
    "--tensor-types": "--custom-q",
    "--numactl": "--numa",
}
"""Names that users write for an option whose name is far from theirs."""


def edit_distance(a: str, b: str) -> int:
    """Insertions, deletions, substitutions and swaps of neighbours that turn `a` into `b`."""
    before: list[int] = []
    previous = list(range(len(b) + 1))
    for i, ca in enumerate(a, 1):
        current = [i]
        for j, cb in enumerate(b, 1):
            best = min(previous[j] + 1, current[j - 1] + 1, previous[j - 1] + (ca != cb))
            if i > 1 and j > 1 and ca == b[j - 2] and a[i - 2] == cb:
                best = min(best, before[j - 2] + 1)
            current.append(best)
        before, previous = previous, current
    return previous[-1]


def common_prefix(a: str, b: str) -> int:
    """Number of equal characters at the start of both."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The most similar of the known names, or None if nothing comes close; earlier names win ties."""
    bare = word.lstrip("-").lower()
    best: tuple[float, str] | None = None
    for candidate in known:
        other = candidate.lstrip("-").lower()
        score = float(edit_distance(bare, other))
        shorter = min(len(bare), len(other))
        if shorter >= 2 and bare[:shorter] == other[:shorter]:
            score = min(score, 1 + 0.1 * abs(len(bare) - len(other)))
        score -= 0.01 * common_prefix(bare, other)
        if best is None or score < best[0]:
            best = (score, candidate)
    if best is None or best[0] > max(1.3, len(bare) // 3):
        return None
    return best[1]
