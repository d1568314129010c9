"""Placement of replicas on Ray nodes: one actor each, which reserves its CPUs, spread over the nodes.

Nodes have the files of the options at the same paths or fetch them once; digests are compared when a process starts.
The processes accept requests only with the key of this run, which only the front knows.
"""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ikcli.errors import IkError
from ikcli.fleet.files import Fetching, FileServer, Needed, needed_of
from ikcli.fleet.ray_cluster import LOCAL, SHARE, RayCluster, this_address
from ikcli.gguf import digests as digest
from ikcli.server.front.launch import LaunchSpec
from ikcli.server.front.ray_node import ReplicaActor, ReplicaLaunch
from ikcli.server.front.ray_process import RayProcess
from ikcli.server.http.logs import ServerLog


@dataclass(frozen=True, slots=True)
class _Files:
    """Files that new processes read; `first` is the number of the first one at the file server."""

    inputs: tuple[tuple[Path, str], ...]
    needed: tuple[Needed, ...]
    first: int = 0


class RayPlacement:
    """See the module. On a cluster, thread options apply to each replica; with `local`, see LocalPlacement."""

    def __init__(self, spec: LaunchSpec, log: ServerLog) -> None:
        config = spec.config
        assert config.fleet.ray is not None
        self._spec, self._log, self._server = spec, log, config.server
        self._local = self.one_first = config.fleet.ray == LOCAL
        n, threads = config.server.replicas, max(config.n_threads, config.n_threads_batch)
        self._cpus = max(1, threads // n) if self._local else threads
        self._cluster = RayCluster(config.fleet.ray, n * self._cpus, config.fleet.ray_node)
        self._key = secrets.token_urlsafe(32)
        self._file_server: FileServer | None = None
        self._files = _Files((), ())
        self._stack = ExitStack()

    def open(self) -> None:
        """Connect and start serving files. Raise IkError if no node is large enough."""
        with ExitStack() as stack:
            # keep JSON lines free of prefixes
            self._ray = stack.enter_context(self._cluster.connected(relay=self._server.log_format != "json"))
            self._check_room(self._cluster.nodes())
            self.renew()
            if not self._local:
                self._file_server = stack.enter_context(FileServer(this_address(), self._files.needed))
            self._stack = stack.pop_all()

    def _check_room(self, nodes: list[dict[str, float]]) -> None:
        """Raise IkError unless a replica fits on some node."""
        gpus = self._server.replica_gpus
        most = max((node.get("CPU", 0) for node in nodes), default=0)
        if most < self._cpus:
            raise IkError(
                f"a replica has {self._cpus} threads, no node of Ray has more than {most:g} processors; use -t"
            )
        if not any(node.get("CPU", 0) >= self._cpus and node.get("GPU", 0) >= gpus for node in nodes):
            raise IkError(f"--replica-gpus {gpus}: no node of Ray has so many GPUs for {self._cpus} processors")

    def renew(self) -> None:
        """Read the digests of the files again and serve changed files under the new digests."""
        inputs = tuple((path, digest.of_input(path)) for path in dict.fromkeys(self._spec.inputs))
        if inputs == self._files.inputs:
            return
        needed = tuple(needed_of(inputs)) if not self._local else ()
        first = self._file_server.add(needed) if self._file_server is not None else 0
        self._files = _Files(inputs, needed, first)

    def make(self, index: int, n: int) -> RayProcess:
        """See ReplicaPlacement."""
        config, found = self._spec.config, self._files
        options = (
            self._spec.shared(index)
            if self._local
            else self._spec.options(index, config.n_threads, config.n_threads_batch)
        )
        start: Any = ReplicaLaunch(
            f"replica {index}", tuple(options), found.inputs, self._key, float(self._server.shutdown_timeout),
            self._server.log_format != "json", bool(self._server.replica_gpus),
        )  # fmt: skip
        if self._file_server is not None:
            where = self._file_server
            start = Fetching(start, found.needed, where.url, where.token, found.first, digest.of_input)
        return RayProcess(
            self._ray, partial(self._begin, start), key=self._key, grace=float(self._server.shutdown_timeout),
            no_room=partial(self._no_room, index),
        )  # fmt: skip

    def _begin(self, start: Any) -> Any:
        """Create an actor, which Ray places as soon as a node has room."""
        node = self._cluster.node
        remote = self._ray.remote(
            num_cpus=self._cpus,
            num_gpus=self._server.replica_gpus,
            resources={node: SHARE} if node else {},
            scheduling_strategy="SPREAD",
        )(ReplicaActor)
        return remote.remote(start)

    def _no_room(self, index: int) -> None:
        gpus, node = self._server.replica_gpus, self._cluster.node
        needs = f"{self._cpus} processors" + (f", {gpus} GPUs" if gpus else "") + (f", {node}" if node else "")
        self._log.warn("replicas", "no node of Ray has room for the replica now; it waits", replica=index, needs=needs)

    def close(self) -> None:
        """See ReplicaPlacement."""
        self._stack.close()
