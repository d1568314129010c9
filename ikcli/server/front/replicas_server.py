"""Run a server of several replicas of one model."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from ikcli.server.front.launch import LaunchSpec
from ikcli.server.front.placement import LocalPlacement, ReplicaPlacement
from ikcli.server.front.replicas import ReplicaSupervisor
from ikcli.server.front.replicas_app import ReplicasState, build_app
from ikcli.server.front.server import FrontOptions, FrontServer, serve_front
from ikcli.server.http.chat import check_options
from ikcli.server.http.logs import ServerLog
from ikcli.server.http.server import check_folders


def serve_replicas(spec: LaunchSpec) -> int:
    """Serve until a signal comes.

    Raise IkError if the address is taken or options are wrong. Return 1 if no replica can start.
    """
    config = spec.config
    server, options = config.server, FrontOptions.of(config)
    check_options(config)
    if config.fleet.ray is None:
        check_folders(config)
    placement = placement_of(spec, options.log)

    @contextmanager
    def opened() -> Iterator[FrontServer]:
        placement.open()
        try:
            replicas = ReplicaSupervisor(
                server.replicas, config.n_parallel, placement.make, options.log, least=server.slot_prompt_similarity,
                patience=float(server.timeout), one_first=placement.one_first, renew=placement.renew,
            )  # fmt: skip
            yield ReplicasServer(options, ReplicasState(config, replicas, options.keys, options.log, options.users))
        finally:
            placement.close()

    return serve_front(options, opened)


def placement_of(spec: LaunchSpec, log: ServerLog) -> ReplicaPlacement:
    """Return the placement that the options name."""
    if spec.config.fleet.ray is not None:
        from ikcli.server.front.ray_placement import RayPlacement

        return RayPlacement(spec, log)
    return LocalPlacement(spec)


class ReplicasServer(FrontServer):
    """Server that exits if no replica can start; SIGHUP restarts the replicas one after the other."""

    def __init__(self, options: FrontOptions, state: ReplicasState) -> None:
        super().__init__(options, build_app(state), state.supervisor)
        self._replicas = state.supervisor
        self._replicas.on_failure = self._failed

    def _failed(self) -> None:
        self.problem, self.should_exit = self._replicas.failure, True

    def begin(self) -> None:
        """See FrontServer."""
        if hasattr(signal, "SIGHUP"):
            self.loop.add_signal_handler(signal.SIGHUP, self._replicas.restart_in_background)
