"""The application: routes of all families behind the gateway, error responses, OpenAPI."""

from __future__ import annotations

import inspect

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ikcli import __version__
from ikcli.server.http import static
from ikcli.server.http.errors import ApiError, style_of
from ikcli.server.http.gateway import Endpoint, Gateway
from ikcli.server.http.openapi import document_routes
from ikcli.server.http.routes import ROUTERS
from ikcli.server.http.state import ServerState

JSON = "application/json; charset=utf-8"


def build_app(state: ServerState) -> ASGIApp:
    """Build the ASGI application of a server."""
    app = new_app("/openapi.json")
    app.state.server = state
    for router in ROUTERS:
        app.include_router(router)
    files = static.add_routes(app, state.config.server)
    document_routes(app)
    return Gateway(app, state, state.log, files, _direct())


def new_app(openapi_url: str | None = None) -> FastAPI:
    """Create an application with error responses but no routes; `openapi_url` is the path of its OpenAPI document."""
    app = FastAPI(title="ik serve", version=__version__, docs_url=None, redoc_url=None, openapi_url=openapi_url)
    app.router.redirect_slashes = False
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)
    return app


def _direct() -> dict[str, Endpoint]:
    """Return, by path, the POST endpoints that take only the request and return a Response.

    The gateway calls them directly, which spares every token of a stream the layers of the framework.
    """
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    found: dict[str, Endpoint] = {}
    for route in routes:
        signature = inspect.signature(route.endpoint)
        plain = [*signature.parameters] == ["request"] and signature.return_annotation in (Response, "Response")
        plain = plain and inspect.iscoroutinefunction(route.endpoint)
        if plain and route.methods == {"POST"} and "{" not in route.path:
            found[route.path] = route.endpoint
    return found


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    content = error.content(style_of(request.url.path))
    return Response(content, error.status, headers=error.headers, media_type=JSON)


async def _internal_error(request: Request, error: Exception) -> Response:
    """Return the response to an unexpected exception; the gateway logs the cause."""
    found = ApiError(500, "internal error; the server's log has details")
    return Response(found.content(style_of(request.url.path)), 500, media_type=JSON)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code in (404, 405):  # like llama-server, treat a wrong method as an unknown endpoint
        api = ApiError(404, "File Not Found")
    else:
        api = ApiError(error.status_code, str(error.detail))
    content = api.content(style_of(request.url.path))
    return Response(content, api.status, headers=dict(error.headers or {}), media_type=JSON)
