"""Find the known names nearest to an unknown one, by edit distance and by common prefix."""

from __future__ import annotations

from collections.abc import Iterable


def edit_distance(a: str, b: str) -> int:
    """Count the insertions, deletions, substitutions and swaps of neighbours that turn `a` into `b`."""
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
    """Return the number of equal characters at the start of both."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the most similar of the known names, or None if nothing comes close; earlier names win ties."""
    return next(iter(near_names(word, known)), None)


def near_names(word: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Return up to `most` known names that are similar to `word`, the most similar first; case does not matter."""
    bare = word.lstrip("-").lower()
    found: list[tuple[float, str]] = []
    for candidate in known:
        other = candidate.lstrip("-").lower()
        score = float(edit_distance(bare, other))
        shorter = min(len(bare), len(other))
        if shorter >= 2 and bare[:shorter] == other[:shorter]:
            score = min(score, 1 + 0.1 * abs(len(bare) - len(other)))
        score -= 0.01 * common_prefix(bare, other)
        if score <= max(1.3, len(bare) // 3):
            found.append((score, candidate))
    return [name for _, name in sorted(found, key=lambda item: item[0])[:most]]
