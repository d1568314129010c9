"""A process that a supervisor manages: it serves a model at an address, here or on a cluster node."""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod

from ikcli.server.front.upstream import Upstream


class LoadError(Exception):
    """Raised when the model could not be loaded; the text is the last output of its process."""


class Process(Upstream, ABC):
    """An upstream that can be started and stopped. It is used once: a restart creates a new one."""

    @property
    @abstractmethod
    def where(self) -> str:
        """Location for people who look for the process."""

    @abstractmethod
    async def load(self) -> None:
        """Start the process and wait until its model is loaded. Raise LoadError if that fails."""

    @abstractmethod
    async def wait(self) -> None:
        """Wait until the process has ended."""

    @abstractmethod
    async def stop(self) -> None:
        """End the process; running requests may finish within the grace time."""

    @abstractmethod
    def kill(self) -> None:
        """End the process at once."""


def print_line(line: str, error: bool) -> None:
    """Print a log line of a process on the stream where the process wrote it."""
    with contextlib.suppress(OSError):  # nobody reads the log; the process continues all the same
        print(line, file=sys.stderr if error else sys.stdout, flush=True)
