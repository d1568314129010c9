"""`ik serve`: the HTTP server, until a signal comes."""

from __future__ import annotations

from ikcli.commands._options import ModelRun, Parsed
from ikcli.server.http.server import serve


def run(run: ModelRun) -> int:
    """Serve; returns the exit code."""
    return serve(run.config, run.planner)


def run_models(parsed: Parsed) -> int:
    """Serve the models of a file; returns the exit code."""
    from ikcli.commands._models_file import check_front, read_models
    from ikcli.server.router.server import serve_models

    check_front(parsed)
    return serve_models(parsed.config, read_models(parsed.config.server.models))
