"""The OpenAPI document, generated from the request models, and a page at /docs that shows it without external hosts."""

from __future__ import annotations

import html
from typing import Any

from fastapi import FastAPI
from starlette.responses import HTMLResponse, Response

from ikcli.server.http.schema import Body, schema_of

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "type"],
            "properties": {
                "code": {"type": "integer"},
                "message": {"type": "string"},
                "type": {"type": "string"},
            },
        }
    },
}


def generation_body(body: type[Body]) -> dict[str, Any]:
    """Return `openapi_extra` for a generating endpoint."""
    answers = {"application/json": {"schema": {}}, "text/event-stream": {"schema": {"type": "string"}}}
    responses = {"200": {"description": "the answer, or with stream its events", "content": answers}}
    return object_body(schema_of(body)) | {"responses": responses}


def object_body(schema: dict[str, Any]) -> dict[str, Any]:
    """Return `openapi_extra` for an endpoint with a JSON body."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def document_routes(app: FastAPI) -> None:
    """Give every operation its error responses, and add /docs."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        for path in document["paths"].values():
            for operation in path.values():
                responses = operation.setdefault("responses", {})
                responses.pop("422", None)
                for status in ("4XX", "501", "503"):
                    responses.setdefault(
                        status, {"description": "error", "content": {"application/json": {"schema": ERROR}}}
                    )
        return document

    app.openapi = openapi  # type: ignore[method-assign]

    async def docs() -> Response:
        return HTMLResponse(_page(openapi()))

    app.add_api_route("/docs", docs, include_in_schema=False)


def _page(document: dict[str, Any]) -> str:
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>ik serve: API</title>',
        "<style>body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
        "color-scheme:light dark}code{font-size:.95em}td{vertical-align:top;padding:.1rem .8rem .1rem 0}"
        "summary{cursor:pointer;padding:.2rem 0}</style>",
        f"<h1>ik serve {html.escape(document['info']['version'])}</h1>",
        '<p>The same as <a href="openapi.json">openapi.json</a>.</p>',
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(_operation(path, method, operation))
    return "".join(parts)


def _operation(path: str, method: str, operation: dict[str, Any]) -> str:
    head = f"<code>{method.upper()} {html.escape(path)}</code> {html.escape(operation.get('summary', ''))}"
    text = html.escape(operation.get("description", ""))
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    rows = "".join(
        f"<tr><td><code>{html.escape(name)}</code></td><td>{html.escape(str(schema.get('description', '')))}</td></tr>"
        for name, schema in content.get("schema", {}).get("properties", {}).items()
    )
    return f"<details><summary>{head}</summary><p>{text}</p><table>{rows}</table></details>"
