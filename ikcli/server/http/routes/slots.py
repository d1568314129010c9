"""/slots: the state of the slots; saving, restoring and erasing their caches."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ikcli.server.http import fields as f
from ikcli.server.http.answer import json_response
from ikcli.server.http.errors import ApiError, bad_request, unsupported
from ikcli.server.http.generation_body import GenerationBody
from ikcli.server.http.generations import request_of
from ikcli.server.http.openapi import object_body
from ikcli.server.http.params import settings
from ikcli.server.http.routes.context import read_object, server, server_with_slots
from ikcli.server.http.shapes.common import timings_json
from ikcli.server.http.state import ServerState
from ikcli.server.slots.pictures import tokens_of
from ikcli.server.slots.states import EngineError, SlotActionResult, SlotState

router = APIRouter(tags=["slots"])

_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?")
_ACTION = object_body({"type": "object", "properties": {"filename": {"type": "string"}}})


@router.get("/slots", summary="What the slots are doing")
async def slots(request: Request) -> Response:
    """Return an array with one entry per slot; with `?fail_on_no_slot=1` the status is 503 if no slot is free."""
    state = server_with_slots(request)
    found = state.engine.slots()
    if request.query_params.get("fail_on_no_slot", "0") not in ("", "0") and all(s.is_processing for s in found):
        raise ApiError(503, "no slot available")
    return json_response(slots_json(state))


def slots_json(state: ServerState) -> list[dict[str, Any]]:
    """Return all slots with the fields of both forks."""
    return [_slot(state, slot) for slot in state.engine.slots()]


def _slot(state: ServerState, slot: SlotState) -> dict[str, Any]:
    next_token = {
        "has_next_token": slot.has_next_token,
        "has_new_line": slot.has_new_line,
        "n_remain": slot.n_remain,
        "n_decoded": slot.n_decoded,
        "stopped_eos": slot.stop_type == "eos",
        "stopped_word": slot.stop_type == "word",
        "stopped_limit": slot.stop_type == "limit",
        "stopping_word": slot.stopping_word,
    }
    head = {
        "id": slot.id + state.config.server.first_slot,
        "id_task": slot.id_task,
        "state": int(slot.is_processing),
        "is_processing": slot.is_processing,
        "speculative": bool(slot.timings.draft_n),
        "prompt": state.engine.tokenizer.decode(tokens_of(slot.prompt)),
        "generated": slot.text,
        "truncated": slot.truncated,
        "n_past": slot.n_past,
        "next_token": next_token,
        "timings": timings_json(slot.timings),
    }
    request = slot.request
    if request is None:
        return default_settings(state, slot.n_ctx) | head
    params = settings(request, GenerationBody(), slot.n_ctx, state.alias)
    return params | head | {"params": params}


def default_settings(state: ServerState, n_ctx: int) -> dict[str, Any]:
    """Return the settings of a request without fields."""
    return settings(request_of(state, state.defaults), state.defaults, n_ctx, state.alias)


@router.post("/slots/{id_slot}", openapi_extra=_ACTION, summary="Save, restore or erase a slot's cache")
async def action(request: Request, id_slot: str) -> Response:
    """Run `?action=save|restore` with `{"filename": ...}`, or `?action=erase`."""
    state = server(request)
    if state.config.server.slot_save_path is None:
        raise unsupported("This server does not support slots action. Start it with `--slot-save-path`")
    number, index = _slot_number(state, id_slot)
    wanted = request.query_params.get("action", "")
    if wanted == "erase":
        result = await _act(state, index, wanted, None)
        return json_response({"id_slot": number, "n_erased": result.n_tokens})
    if wanted not in ("save", "restore"):
        raise bad_request("Invalid action: use ?action=save, restore or erase")
    name = file_name((await read_object(request)).get("filename"))
    result = await _act(state, index, wanted, state.config.server.slot_save_path / name)
    head = {"id_slot": number, "filename": name}
    if wanted == "save":
        saved = {"n_saved": result.n_tokens, "n_written": result.n_bytes, "timings": {"save_ms": result.ms}}
        return json_response(head | saved)
    restored = {"n_restored": result.n_tokens, "n_read": result.n_bytes, "timings": {"restore_ms": result.ms}}
    return json_response(head | restored)


def _slot_number(state: ServerState, text: str) -> tuple[int, int]:
    """Return number and index of a slot."""
    first, n_slots = state.config.server.first_slot, state.config.n_parallel
    if not re.fullmatch(r"[0-9]{1,9}", text) or not first <= int(text) < first + n_slots:
        raise bad_request(f"Invalid slot ID: the slots are {first} to {first + n_slots - 1}")
    return int(text), int(text) - first


def file_name(value: Any, field: str = "filename") -> str:
    """Return a plain file name, without directories; hidden and reserved names are refused."""
    if value is None:
        raise bad_request(f"{field} is required")
    name = f.text(value, field)
    plain = name and len(name.encode()) <= 255 and name.isprintable() and not set(name) & set('/\\:*?"<>|')
    if not plain or name.startswith(".") or name.endswith((".", " ")) or name != name.strip() or ".." in name:
        raise bad_request(f"Invalid {field}: give a plain file name without folders")
    if _RESERVED.fullmatch(name):
        raise bad_request(f"Invalid {field}: this name is reserved")
    return name


async def _act(state: ServerState, id_slot: int, wanted: str, path: Path | None) -> SlotActionResult:
    try:
        result: SlotActionResult = await asyncio.wrap_future(state.engine.slot_action(id_slot, wanted, path))
    except EngineError as e:
        if e.status == 404:  # a missing file; clients expect a bad request
            raise bad_request(e.message) from None
        raise ApiError(e.status, e.message, e.type) from None
    return result
