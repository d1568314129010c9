"""A cache in RAM for prompts whose slot was given to another conversation.

Least recently used entries are dropped first when the limit is reached. An entry that is a prefix of a newer one is
redundant and removed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ikcli.engine.run.adapters import NOTHING, Added
from ikcli.engine.run.saved_sequence import SavedSequence

Tokens = npt.NDArray[np.int32]


_MOST_MIB, _SHARE = 8192, 4


def default_limit(mib: int | None, free: int | None) -> int:
    """Return the bytes for stored prompts: `mib` if given, else a quarter of the free memory but at most 8 GiB."""
    if mib is None:
        return min(_MOST_MIB << 20, (free or 0) // _SHARE)
    return mib << 20 if mib >= 0 else 1 << 62


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Return the number of equal tokens at the start of both."""
    n = min(len(a), len(b))
    different = (a[:n] != b[:n]).nonzero()[0]
    return int(different[0]) if different.size else n


@dataclass(frozen=True, slots=True)
class Entry:
    """The first len(tokens) cached positions of a former slot, computed with the additions `added`."""

    tokens: Tokens
    saved: SavedSequence
    added: Added = NOTHING

    def shared(self, tokens: Tokens, added: Added = NOTHING) -> int:
        """Return the number of tokens of a text that this entry saves."""
        if added != self.added:
            return 0
        return self.saved.reach(common_prefix(self.tokens, tokens))

    @property
    def n_bytes(self) -> int:
        return self.saved.n_bytes + self.tokens.nbytes


class PromptCache:
    """Entries in order of use, the latest last; `limit` in bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def n_bytes(self) -> int:
        return sum(e.n_bytes for e in self._entries)

    def has(self, tokens: Tokens, added: Added = NOTHING) -> bool:
        """Return whether an entry begins with all of these tokens."""
        return any(e.shared(tokens, added) == len(tokens) for e in self._entries)

    def put(self, entry: Entry) -> bool:
        """Store an entry, making room; return False if it alone is larger than the limit."""
        if entry.n_bytes > self.limit:
            return False
        self._entries = [e for e in self._entries if entry.shared(e.tokens, e.added) < len(e.tokens)]
        self._entries.append(entry)
        while self.n_bytes > self.limit:
            self._entries.pop(0)
        return True

    def best(self, prompt: Tokens, more_than: int, added: Added = NOTHING) -> tuple[Entry, int] | None:
        """Return the entry that shares most tokens with the prompt and their number (above `more_than`), or None."""
        found: tuple[Entry, int] | None = None
        for entry in self._entries:
            n = entry.shared(prompt, added)
            if n > (found[1] if found else more_than):
                found = entry, n
        if found:
            self._entries = [*(e for e in self._entries if e is not found[0]), found[0]]
        return found

    def clear(self) -> None:
        self._entries.clear()
