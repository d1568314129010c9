"""Ray itself: import it on demand, connect to a cluster, ask about its nodes. Only this file imports Ray."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ikcli.errors import IkError, UnsupportedError

LOCAL = "local"
"""The address that starts Ray on this machine for the duration of a run."""
SHARE = 0.001
"""The amount to request of a resource that only labels a kind of node."""
PATIENCE = 60
"""Seconds of waiting for a place on a node after which the user is told why."""
_KNOCK = 10  # seconds
_PLAIN = ("CPU", "GPU", "memory", "object_store_memory")


def import_ray() -> Any:
    """Return the module; UnsupportedError if it is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UnsupportedError('--ray needs Ray, which is not installed: pip install "ikcli[ray]"')
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # --ray local is foreground work, as without Ray
    import ray
    from ray._private import worker

    # Ray prints messages about its nodes to stdout, which is for results
    plain = getattr(worker, "print_to_stdstream", None)
    if plain is not None and not isinstance(plain, _ToStderr):
        worker.print_to_stdstream = _ToStderr(plain)
    return ray


class _ToStderr:
    """Forwards lines of workers to Ray's printer, all of them on stderr."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __call__(self, data: Any, *args: Any, **names: Any) -> None:
        self._plain({**data, "is_err": True}, *args, **names)


class RayCluster:
    """A cluster at `address`, or Ray on this machine (`local`), which then offers `n_cpus` processors.

    `node`: a resource that the nodes to work on must offer; empty: all nodes.
    """

    def __init__(self, address: str, n_cpus: int, node: str = "") -> None:
        self.address, self.node = address, node
        self._n_cpus = n_cpus

    @contextmanager
    def connected(self, *, relay: bool = True) -> Iterator[Any]:
        """Connect to the cluster unless Ray is connected, and yield Ray; `relay`: show workers' output on stderr."""
        ray = import_ray()
        mine = not ray.is_initialized()
        if mine:
            self._connect(ray, relay)
        try:
            yield ray
        finally:
            if mine:
                ray.shutdown()

    def _connect(self, ray: Any, relay: bool) -> None:
        options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": relay}
        try:
            self._knock()
            if self.address == LOCAL:
                offered = {self.node: 1} if self.node else None
                options |= {"num_cpus": max(1, self._n_cpus), "resources": offered, "include_dashboard": False}
                ray.init(address="local", **options)  # also where a cluster is known, which it would join
            else:
                ray.init(address=self.address, **options)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise IkError(f"--ray {self.address}: no cluster answers there: {reason}") from None

    def _knock(self) -> None:
        """Raise OSError if nothing listens at the address; Ray itself would wait many minutes."""
        address = os.environ.get("RAY_ADDRESS", "") if self.address == "auto" else self.address
        host, found, port = address.rpartition("://")[2].rpartition(":")
        if found and port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), _KNOCK).close()

    def nodes(self) -> list[dict[str, float]]:
        """Return the resources of each usable node; IkError if no node is of the requested kind."""
        ray = import_ray()
        found = [n["Resources"] for n in ray.nodes() if n["Alive"]]
        if not self.node:
            return found
        offered = sorted({name for one in found for name in one if ":" not in name and name not in _PLAIN})
        if self.node not in offered:
            there = f"they offer {', '.join(offered)}" if offered else "they offer none"
            raise IkError(
                f"--ray-node {self.node}: no node of Ray has this resource, {there}; "
                f"""start a node with ray start --resources '{{"{self.node}": 1}}'"""
            )
        return [one for one in found if self.node in one]


def this_address() -> str:
    """Return the address at which other nodes reach this machine, as determined by Ray."""
    return str(import_ray().util.get_node_ip_address())


def last_line(error: Exception) -> str:
    """Return why an actor died: the last line of what Ray says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
