"""Where the beginning of a prompt came from, and why no more of it was reused."""

from __future__ import annotations

from typing import NamedTuple


class Miss(NamedTuple):
    """Why a prompt was reused up to `at` only.

    `differs`: the longest known text goes on with the token `known` where the prompt has `wanted`. `no checkpoint`: the
    text is known up to `at`, but its sequence can be continued from an earlier position only.
    """

    at: int
    reason: str
    wanted: int = -1
    known: int = -1


class Reused(NamedTuple):
    """How many tokens of a prompt came from slots, from RAM and from disk, and why not more."""

    n_slot: int = 0
    n_ram: int = 0
    n_disk: int = 0
    miss: Miss | None = None

    @property
    def n(self) -> int:
        return self.n_slot + self.n_ram + self.n_disk

    def cut(self, n: int) -> Reused:
        """Return the same for a slot that kept only n of these tokens."""
        n_slot, n_ram = min(self.n_slot, n), min(self.n_ram, max(n - self.n_slot, 0))
        return self._replace(n_slot=n_slot, n_ram=n_ram, n_disk=n - n_slot - n_ram)
