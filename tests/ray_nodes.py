"""One machine that plays several nodes of Ray."""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fleet_deaths import alive

# Ray itself takes a second to import, which every process of every run of the tests would pay.
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")


class Nodes:
    """A head without processors, and a node of each kind with one."""

    def __init__(self, kinds: Sequence[str]) -> None:
        from ray import cluster_utils

        head = {"num_cpus": 0, "include_dashboard": False}
        self.kinds = kinds
        self.cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        self.nodes: dict[str, Any] = {}
        self.mend()

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def raylets(self, kind: str) -> list[int]:
        """The processes that are the node."""
        return [info.process.pid for info in self.nodes[kind].all_processes["raylet"]]

    def mend(self) -> None:
        """New nodes for those that died."""
        for kind in self.kinds:
            node = self.nodes.get(kind)
            if node is not None and all(alive(pid) for pid in self.raylets(kind)):
                continue
            if node is not None:
                self.cluster.remove_node(node, allow_graceful=False)
            self.nodes[kind] = self.cluster.add_node(num_cpus=1, resources={kind: 1})


@contextmanager
def cluster(kinds: Sequence[str]) -> Iterator[Nodes]:
    """One at a time: several on one machine take each other's processors, and nodes fail to begin in time."""
    import ray

    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])  # actors unpickle from here
    with (Path(tempfile.gettempdir()) / f"ik-test-ray-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = Nodes(kinds)
        ray.init(address=found.address, logging_level="ERROR", log_to_driver=False)
        try:
            yield found
        finally:
            ray.shutdown()
            found.cluster.shutdown()
