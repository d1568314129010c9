"""Pick the executor for a command: this process, several on this machine, or Ray actors."""

from __future__ import annotations

import os

from ikcli.errors import UsageError
from ikcli.fleet.executor import Executor, LocalExecutor, ProcessExecutor
from ikcli.settings.fleet import FleetConfig


def executor(n_workers: int, ray: str | None, n_threads: int, node: str = "") -> Executor:
    """Return the executor of `--workers N`, `--ray ADDRESS` and `--ray-node TYPE`; each worker has `n_threads` threads.

    UnsupportedError if Ray is requested and not installed.
    """
    if ray is not None:
        from ikcli.fleet.ray_executor import RayExecutor

        return RayExecutor(ray, n_workers, n_threads, node)
    if node:
        raise UsageError("--ray-node names nodes of Ray; add --ray ADDRESS")
    return ProcessExecutor(n_workers) if n_workers > 1 else LocalExecutor()


def executor_of(fleet: FleetConfig, n_threads: int) -> Executor:
    """Return the executor that the options request; each worker has `n_threads` threads."""
    if "," in fleet.ray_node:
        raise UsageError(f"--ray-node {fleet.ray_node}: only ik bench takes several; name one")
    return executor(fleet.n_workers, fleet.ray, n_threads, fleet.ray_node)


def runs_here(fleet: FleetConfig) -> bool:
    """Return whether the process of the command does the work itself."""
    return fleet.ray is None and fleet.n_workers == 1


def threads_each(n_threads: int, fleet: FleetConfig) -> int:
    """Return the threads per worker. Workers share the threads of this machine, but not those of cluster nodes."""
    n_workers = fleet.n_workers if fleet.ray in (None, "local") else 1
    return max(1, (n_threads or os.cpu_count() or 1) // n_workers)
