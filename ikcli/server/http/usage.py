"""Token usage of single requests, kept briefly for the server in front, which counts it for its users.

A server on a Unix socket, or on a socket passed to it, records the usage of requests with the header `x-ik-request`.
`/usage?id=` returns it once.
"""

from __future__ import annotations

from collections import OrderedDict

REQUEST_ID = b"x-ik-request"
_MOST = 1024


class Ledger:
    """Token usage by request."""

    def __init__(self) -> None:
        self._used: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def entry(self, id: str) -> Entry:
        """Return the entry that records a request."""
        return Entry(self, id)

    def note(self, id: str, n_prompt: int, n_predicted: int) -> None:
        """Record the usage of a request; if nobody asks for it, it is dropped after a while."""
        self._used[id] = (n_prompt, n_predicted)
        if len(self._used) > _MOST:
            self._used.popitem(last=False)

    def take(self, id: str) -> tuple[int, int] | None:
        """Return prompt and generated tokens of a request and remove them; None if the request is not over."""
        return self._used.pop(id, None)


class Entry:
    """Stand-in for the account of a user that only the server in front knows."""

    def __init__(self, ledger: Ledger, id: str) -> None:
        self._ledger, self._id = ledger, id

    def add(self, n_prompt: int, n_predicted: int) -> None:
        """Record tokens."""
        self._ledger.note(self._id, n_prompt, n_predicted)
