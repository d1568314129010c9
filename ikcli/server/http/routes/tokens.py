"""/tokenize, /detokenize: text to token ids and back."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ikcli.server.http import fields as f
from ikcli.server.http.answer import json_response
from ikcli.server.http.limits import token_id
from ikcli.server.http.openapi import object_body
from ikcli.server.http.prompts import encode
from ikcli.server.http.routes.context import read_object, server

router = APIRouter(tags=["tokens"])

_TOKENIZE = object_body(
    {
        "type": "object",
        "properties": {
            "content": {"description": "text, or an array of texts and token ids"},
            "add_special": {"type": "boolean", "description": "add BOS/EOS where the model wants them; default false"},
            "parse_special": {"type": "boolean", "description": "recognize control tokens; default true"},
            "with_pieces": {"type": "boolean", "description": "ids together with their text; default false"},
        },
    }
)
_DETOKENIZE = object_body({"type": "object", "properties": {"tokens": {"type": "array", "items": {"type": "integer"}}}})


def _flag(body: dict[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    return default if value is None else f.boolean(value, name)


@router.post("/tokenize", openapi_extra=_TOKENIZE, summary="Text to token ids")
async def tokenize(request: Request) -> Response:
    """`{"tokens": [...]}`; pieces that are no text alone come as lists of bytes."""
    state = server(request)
    body = await read_object(request)
    add_special, parse_special = _flag(body, "add_special", False), _flag(body, "parse_special", True)
    with_pieces = _flag(body, "with_pieces", False)
    tokenizer = state.engine.tokenizer
    content = body.get("content")
    parts: list[Any] = [] if content is None else content if isinstance(content, list) else [content]
    tokens: list[int] = []
    for i, part in enumerate(parts):
        name = f"content[{i}]" if isinstance(content, list) else "content"
        if isinstance(part, int) and isinstance(content, list) and not isinstance(part, bool):
            tokens.append(token_id(part, name, state.limits.n_vocab))
        else:
            text = f.text(part, name)
            tokens += await encode(tokenizer, text, add_special=add_special and i == 0, parse_special=parse_special)
    if with_pieces:
        return json_response({"tokens": [{"id": t, "piece": _piece(tokenizer.token_bytes(t))} for t in tokens]})
    return json_response({"tokens": tokens})


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return list(data)


@router.post("/detokenize", openapi_extra=_DETOKENIZE, summary="Token ids to text")
async def detokenize(request: Request) -> Response:
    """`{"content": "..."}`."""
    state = server(request)
    body = await read_object(request)
    items = f.array(body["tokens"], "tokens") if body.get("tokens") is not None else []
    tokens = [token_id(item, f"tokens[{i}]", state.limits.n_vocab) for i, item in enumerate(items)]
    data = b"".join(state.engine.tokenizer.token_bytes(token) for token in tokens)
    return json_response({"content": data.decode("utf-8", "replace")})
