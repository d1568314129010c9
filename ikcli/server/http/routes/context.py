"""Read the state of the server and the body of a request, for all endpoints."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from ikcli.server.http import body
from ikcli.server.http.errors import unsupported
from ikcli.server.http.state import ServerState


def server(request: Request) -> ServerState:
    """Return the server's state."""
    state = request.app.state.server
    assert isinstance(state, ServerState)
    return state


def server_with_slots(request: Request) -> ServerState:
    """Return the server's state. Raise ApiError 501 with --no-slots."""
    state = server(request)
    if not state.config.server.slots:
        raise unsupported("This server does not support slots endpoint. Start it without `--no-slots`")
    return state


async def read_object(request: Request) -> dict[str, Any]:
    """Read the body as a JSON object. Raise ApiError naming the fault."""
    return _logged(request, await body.read_object(request, server(request).timeout))


async def read_json(request: Request) -> Any:
    """Read the body as any JSON value. Raise ApiError naming the fault."""
    return _logged(request, await body.read_json(request, server(request).timeout))


def _logged(request: Request, value: Any) -> Any:
    """Return the body after logging it, which only -v does."""
    log = server(request).log
    if log.verbose:
        log("VERB", "log_prompt", "request body", {"path": request.url.path, "body": value})
    return value
