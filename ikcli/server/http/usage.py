"""What single requests have used, kept for a moment for the server in front, which counts it for its users.

A server on a Unix socket, or on one that was passed to it, notes it for requests with the header `x-ik-request`;
`/usage?id=` gives it out once.
"""

from __future__ import annotations

from collections import OrderedDict

REQUEST_ID = b"x-ik-request"
_MOST = 1024


class Ledger:
    """Tokens by request."""

    def __init__(self) -> None:
        self._used: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def entry(self, id: str) -> Entry:
        """Where a request is noted."""
        return Entry(self, id)

    def note(self, id: str, n_prompt: int, n_predicted: int) -> None:
        """Keep what a request has used; what nobody asks for goes after a while."""
        self._used[id] = (n_prompt, n_predicted)
        if len(self._used) > _MOST:
            self._used.popitem(last=False)

    def take(self, id: str) -> tuple[int, int] | None:
        """Prompt and generated tokens of a request; None if it is not over."""
        return self._used.pop(id, None)


class Entry:
    """Stands for the account of a user that the server in front knows."""

    def __init__(self, ledger: Ledger, id: str) -> None:
        self._ledger, self._id = ledger, id

    def add(self, n_prompt: int, n_predicted: int) -> None:
        """Count tokens."""
        self._ledger.note(self._id, n_prompt, n_predicted)
