"""/infill: code between a prefix and a suffix."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ikcli.server.http import infill
from ikcli.server.http.bodies import InfillBody
from ikcli.server.http.openapi import generation_body
from ikcli.server.http.routes.completion import answer_native
from ikcli.server.http.routes.context import read_object, server

router = APIRouter(tags=["text"])

_BODY = generation_body(InfillBody)


@router.post("/infill", openapi_extra=_BODY, summary="Fill in code")
async def fill(request: Request) -> Response:
    """Generate text between `input_prefix` and `input_suffix`; all fields of /completion apply too."""
    state = server(request)
    body = await read_object(request)
    fields = InfillBody.of(body, state.defaults, state.limits)
    prompt = await infill.prompt_of(state, body)
    return await answer_native(request, state, body, fields, [prompt])
