"""The application in front of processes: it serves some endpoints itself and forwards everything else to a process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi.routing import APIRoute
from starlette.types import ASGIApp

from ikcli.server.front.state import FrontState
from ikcli.server.http import static
from ikcli.server.http.app import new_app
from ikcli.server.http.errors import unsupported
from ikcli.server.http.gateway import Endpoint, Gateway
from ikcli.server.http.routes import ROUTERS

Route = tuple[str, tuple[str, ...], Endpoint]
"""Method, paths, endpoint."""


def front_app(
    state: FrontState[Any], own: Iterable[Route], forward: Endpoint, methods: bytes = b"GET, POST"
) -> ASGIApp:
    """Build the application: the front's own endpoints, and `forward` for the other endpoints of a server of one model.

    Paths unknown to every server, such as a page's icon, are not forwarded. `methods` are the HTTP methods that pages
    of other origins may use.
    """
    app = new_app()
    for method, paths, answers in own:
        for path in paths:
            app.add_api_route(path, answers, methods=[method], response_model=None)
    for route in (route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)):
        if route.include_in_schema:
            app.add_api_route(route.path, forward, methods=[*(route.methods or ())], response_model=None)
    files = static.add_routes(app, state.config.server)
    return Gateway(app, state, state.log, files, methods=methods)


def check_metrics(state: FrontState[Any]) -> None:
    """Raise ApiError if the server must not show its metrics."""
    if not state.config.server.metrics:
        raise unsupported("This server does not support metrics endpoint. Start it with `--metrics`")
