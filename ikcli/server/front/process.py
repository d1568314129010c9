"""A process that a supervisor manages: it serves a model at an address, here or on a node of a cluster."""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod

from ikcli.server.front.upstream import Upstream


class LoadError(Exception):
    """The model could not be loaded; the text is what its process said last."""


class Process(Upstream, ABC):
    """An upstream that is started and stopped. It is used once: a restart makes a new one."""

    @property
    @abstractmethod
    def where(self) -> str:
        """Where it runs, for people who look for it."""

    @abstractmethod
    async def load(self) -> None:
        """Start it and wait until its model is loaded; LoadError if that fails."""

    @abstractmethod
    async def wait(self) -> None:
        """Wait until it has ended."""

    @abstractmethod
    async def stop(self) -> None:
        """End it: requests that run may finish within the grace time."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once."""


def print_line(line: str, error: bool) -> None:
    """Print a line of the log of a process where it would have written it."""
    with contextlib.suppress(OSError):  # nobody reads the log: the process goes on nevertheless
        print(line, file=sys.stderr if error else sys.stdout, flush=True)
