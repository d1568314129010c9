"""/tokenize, /detokenize: text to token ids and back."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ikcli.server.http import fields as f
from ikcli.server.http.answer import json_response
from ikcli.server.http.limits import token_id
from ikcli.server.http.openapi import object_body
from ikcli.server.http.prompts import encode
from ikcli.server.http.routes.context import read_object, server
from ikcli.server.http.schema import Body, Flag, field, schema_of, shown_as

router = APIRouter(tags=["tokens"])


class TokenizeBody(Body, frozen=True):
    """Request body of /tokenize."""

    content: Annotated[Any, shown_as()] = field(None, "text, or an array of texts and token ids")
    add_special: Flag = field(False, "add BOS/EOS where the model wants them; default false")
    parse_special: Flag = field(True, "recognize control tokens; default true")
    with_pieces: Flag = field(False, "ids together with their text; default false")


class DetokenizeBody(Body, frozen=True):
    """Request body of /detokenize."""

    tokens: Annotated[Any, shown_as(type="array", items={"type": "integer"})] = field([], "token ids")


@router.post("/tokenize", openapi_extra=object_body(schema_of(TokenizeBody)), summary="Text to token ids")
async def tokenize(request: Request) -> Response:
    """Return `{"tokens": [...]}`; a piece that is not valid text alone comes as a list of bytes."""
    state = server(request)
    body = TokenizeBody.checked(await read_object(request))
    tokenizer, content = state.engine.tokenizer, body.content
    parts: list[Any] = [] if content is None else content if isinstance(content, list) else [content]
    tokens: list[int] = []
    for i, part in enumerate(parts):
        name = f"content[{i}]" if isinstance(content, list) else "content"
        if isinstance(part, int) and isinstance(content, list) and not isinstance(part, bool):
            tokens.append(token_id(part, name, state.limits.n_vocab))
        else:
            text = f.text(part, name)
            tokens += await encode(
                tokenizer, text, add_special=body.add_special and i == 0, parse_special=body.parse_special
            )
    if body.with_pieces:
        return json_response({"tokens": [{"id": t, "piece": _piece(tokenizer.token_bytes(t))} for t in tokens]})
    return json_response({"tokens": tokens})


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return list(data)


@router.post("/detokenize", openapi_extra=object_body(schema_of(DetokenizeBody)), summary="Token ids to text")
async def detokenize(request: Request) -> Response:
    """Return `{"content": "..."}`."""
    state = server(request)
    body = DetokenizeBody.checked(await read_object(request))
    items = f.array(body.tokens, "tokens")
    tokens = [token_id(item, f"tokens[{i}]", state.limits.n_vocab) for i, item in enumerate(items)]
    data = b"".join(state.engine.tokenizer.token_bytes(token) for token in tokens)
    return json_response({"content": data.decode("utf-8", "replace")})
