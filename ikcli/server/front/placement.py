"""Placement of replicas, and the local one: child processes that share CPUs, memory and GPUs of this machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ikcli.errors import UsageError
from ikcli.hostinfo import shares
from ikcli.server.front.child import Child
from ikcli.server.front.environment import GPUS, plain_environment
from ikcli.server.front.launch import LaunchSpec
from ikcli.server.front.process import Process


class ReplicaPlacement(Protocol):
    """Policy that decides where replicas run."""

    one_first: bool

    def open(self) -> None:
        """Prepare. Raise IkError if replicas cannot run there, UnsupportedError if a package is missing."""

    def make(self, index: int, n: int) -> Process:
        """Return the process for the n-th start of a replica."""

    def renew(self) -> None:
        """Take the current files for a restart of all replicas. Raise IkError if they cannot be read."""

    def close(self) -> None:
        """Clean up after all processes have ended."""


class LocalPlacement:
    """Local child processes, which split the thread counts of the options and the default of --cache-ram."""

    one_first = True

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec, config = spec, spec.config
        n = config.server.replicas
        self._cpus = shares(n) if hasattr(os, "sched_setaffinity") else [frozenset()] * n
        self._gpus = gpu_shares(n, config.server.replica_gpus, os.environ)
        self._options = [spec.shared(index) for index in range(n)]

    def open(self) -> None:
        """Create the directory of the sockets, which only this user can enter."""
        self._folder = tempfile.TemporaryDirectory(prefix="ik-")

    def make(self, index: int, n: int) -> Child:
        """See ReplicaPlacement."""
        server = self._spec.config.server
        environment = plain_environment()
        if self._gpus:
            environment[GPUS] = self._gpus[index]
        return Child(
            f"replica {index}", self._options[index], Path(self._folder.name) / f"{index}-{n}.sock",
            grace=float(server.shutdown_timeout), prefix=server.log_format != "json", cpus=self._cpus[index],
            environment=environment,
        )  # fmt: skip

    def renew(self) -> None:
        """Do nothing: every process reads the files again."""

    def close(self) -> None:
        """Remove the directory of the sockets."""
        self._folder.cleanup()


def gpu_shares(n: int, each: int, environment: Mapping[str, str]) -> Sequence[str]:
    """Return the GPUs of each replica, or an empty list if all see all. Raise UsageError if too few are visible."""
    if not each:
        return ()
    visible = environment.get(GPUS)
    names = [str(i) for i in range(n * each)] if visible is None else [text for text in visible.split(",") if text]
    if len(names) < n * each:
        raise UsageError(f"--replica-gpus {each} times {n} replicas are more GPUs than {GPUS}={visible} has")
    return [",".join(names[i * each : (i + 1) * each]) for i in range(n)]
