"""Prompts held by slots, and saved slots: listing, deleting and renaming."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ikcli.server.http.answer import json_response
from ikcli.server.http.errors import ApiError, unsupported
from ikcli.server.http.openapi import object_body
from ikcli.server.http.routes.context import read_object, server, server_with_slots
from ikcli.server.http.routes.slots import file_name
from ikcli.server.http.state import ServerState
from ikcli.server.slots import slot_file
from ikcli.server.slots.pictures import tokens_of

router = APIRouter(tags=["slots"])

_DELETE = object_body({"type": "object", "properties": {"filename": {"type": "string"}}})
_RENAME = object_body(
    {"type": "object", "properties": {"old_filename": {"type": "string"}, "new_filename": {"type": "string"}}}
)


@router.get("/slots/list", summary="Prompts in the slots")
async def held(request: Request) -> Response:
    """Return the cached content of every slot as text."""
    state = server_with_slots(request)
    found, first = state.engine.cached_tokens(), state.config.server.first_slot
    decode = state.engine.tokenizer.decode
    return json_response(
        [
            {"slot_id": i, "token_count": len(tokens), "prompt": decode(tokens_of(tokens))}
            for i, tokens in enumerate(found, first)
        ]
    )


@router.get("/list", summary="Saved slots")
async def saved(request: Request) -> Response:
    """Return the files of --slot-save-path with their text."""
    state = server(request)
    return json_response(await asyncio.to_thread(_listing, state, _folder(state)))


@router.post("/delete_prompt", openapi_extra=_DELETE, summary="Delete a saved slot")
async def delete(request: Request) -> Response:
    """Delete `filename` in --slot-save-path; 404 if it is not a saved slot."""
    folder = _folder(server(request))
    name = file_name((await read_object(request)).get("filename"))
    await asyncio.to_thread(_existing(folder, name).unlink)
    return json_response({"status": "deleted", "filename": name})


@router.post("/rename_prompt", openapi_extra=_RENAME, summary="Rename a saved slot")
async def rename(request: Request) -> Response:
    """Rename a file in --slot-save-path; 409 if the new name is taken."""
    folder = _folder(server(request))
    body = await read_object(request)
    old, new = (file_name(body.get(name), name) for name in ("old_filename", "new_filename"))
    path = _existing(folder, old)
    if (folder / new).exists():
        raise ApiError(409, f"new_filename: {new} is there already", "invalid_request_error")
    await asyncio.to_thread(path.rename, folder / new)
    return json_response({"status": "renamed", "old_filename": old, "new_filename": new})


def _folder(state: ServerState) -> Path:
    folder = state.config.server.slot_save_path
    if folder is None:
        raise unsupported("This server does not support saved slots. Start it with `--slot-save-path`")
    return folder


def _existing(folder: Path, name: str) -> Path:
    path = folder / name
    if path.is_symlink() or not path.is_file() or slot_file.peek(path) is None:
        raise ApiError(404, f"saved slot {name} does not exist")
    return path


def _listing(state: ServerState, folder: Path) -> list[dict[str, Any]]:
    out = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        tokens = None if path.name.startswith(".") or path.is_symlink() else slot_file.peek(path)
        if tokens is None:
            continue
        known = all(token < state.engine.tokenizer.n_vocab for token in tokens)
        about = path.stat()
        out.append(
            {
                "filename": path.name,
                "filesize": about.st_size,
                "mtime": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(about.st_mtime)),
                "token_count": len(tokens),
                "prompt": state.engine.tokenizer.decode(tokens_of(tokens)) if known else "",
            }
        )
    return out
