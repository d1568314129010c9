"""Running a server of several replicas: its socket, the processes behind it, signals."""

from __future__ import annotations

import signal
import sys

from ikcli.server.http.auth import read_keys
from ikcli.server.http.chat import check_options
from ikcli.server.http.logs import ServerLog
from ikcli.server.http.server import check_folders, close, listen, settings_of, tls_of
from ikcli.server.http.users import read_users
from ikcli.server.replicas.app import ReplicasState, build_app
from ikcli.server.replicas.crew import Crew
from ikcli.server.replicas.places import Recipe, places_of
from ikcli.server.router.server import FrontServer, run_front


def serve_replicas(recipe: Recipe) -> int:
    """Serve until a signal comes. IkError if the address is taken or options are wrong; 1 if no replica can start."""
    config = recipe.config
    server = config.server
    log = ServerLog(json=server.log_format == "json", verbose=config.verbose or config.verbosity > 0)
    keys, users, tls = read_keys(server), read_users(server.keys), tls_of(config)
    check_options(config)
    if config.fleet.ray is None:
        check_folders(config)
    places = places_of(recipe, log)
    listener = listen(server.host, server.port, shared=server.reuse_port)
    try:
        places.open()
        try:
            crew = Crew(
                server.replicas, config.n_parallel, places.make, log, least=server.slot_prompt_similarity,
                patience=float(server.timeout), one_first=places.one_first, renew=places.renew,
            )  # fmt: skip
            state = ReplicasState(config, crew, keys, log, users)
            runner = _Runner(settings_of(config, build_app(state), tls), crew)
            run_front(config, runner, keys, users, log, listener)
        finally:
            places.close()
    finally:
        close(listener, server.host)
    if crew.failure:
        print(f"error: {crew.failure}", file=sys.stderr)
        return 1
    return 0


class _Runner(FrontServer):
    """Ends when no replica can start; SIGHUP restarts one after the other."""

    def __init__(self, settings: object, crew: Crew) -> None:
        super().__init__(settings, crew)
        self._crew = crew
        crew.on_failure = self._failed

    def _failed(self) -> None:
        self.should_exit = True

    def begin(self) -> None:
        """See FrontServer."""
        if hasattr(signal, "SIGHUP"):
            self.loop.add_signal_handler(signal.SIGHUP, self._crew.restart_in_background)
