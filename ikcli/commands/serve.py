"""`ik serve`: the HTTP server, until a signal comes."""

from __future__ import annotations

from ikcli.commands._options import ModelRun
from ikcli.server.http.server import serve


def run(run: ModelRun) -> int:
    """Serve; returns the exit code."""
    return serve(run.config, run.planner)
