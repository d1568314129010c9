"""Server information and state: health, models, props, metrics, and the lists that other servers offer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ikcli import __version__
from ikcli.chat.images import PUBLIC_MARKER
from ikcli.server.http import metrics
from ikcli.server.http.answer import json_response
from ikcli.server.http.errors import ApiError, unsupported
from ikcli.server.http.openapi import object_body
from ikcli.server.http.routes.context import read_object, server
from ikcli.server.http.routes.slots import default_settings, slots_json
from ikcli.server.http.shapes.common import FINGERPRINT
from ikcli.server.http.state import ServerState

router = APIRouter(tags=["server"])


@router.get("/health", summary="Is the server ready?")
@router.get("/v1/health", summary="Is the server ready?")
async def health(request: Request) -> Response:
    """Return the server's health, with status 503 while the model loads; never wait for the engine."""
    state = server(request)
    found = state.engine.slots()
    busy = sum(slot.is_processing for slot in found)
    out: dict[str, Any] = {"status": "ok", "slots_idle": len(found) - busy, "slots_processing": busy}
    if "include_slots" in request.query_params and state.config.server.slots:
        out["slots"] = slots_json(state)
    if found and busy == len(found) and "fail_on_no_slot" in request.query_params:
        return json_response(out | {"status": "no slot available"}, 503)
    return json_response(out)


@router.get("/models", summary="The model")
@router.get("/v1/models", summary="The model (OpenAI)")
async def models(request: Request) -> Response:
    """Return a list of one model; its `meta` is null while it loads."""
    return json_response(models_json(server(request)))


def models_json(state: ServerState) -> dict[str, Any]:
    """Return the list with the one model."""
    n_ctx = state.engine.model.n_ctx_slot if state.ready else 0
    modalities = ["text", "image"] if reads_images(state) else ["text"]
    entry: dict[str, Any] = {
        "id": state.alias,
        "object": "model",
        "created": state.started,
        "owned_by": "llamacpp",
        "aliases": _listed(state.config.server.alias),
        "tags": _listed(state.config.server.tags),
        "architecture": {"input_modalities": modalities, "output_modalities": ["text"]},
        "meta": _meta(state) if state.ready else None,
        "max_model_len": n_ctx,
    }
    return {"object": "list", "data": [entry], "models": [_catalogue_entry(state.alias, n_ctx, modalities)]}


def reads_images(state: ServerState) -> bool:
    """Return whether the model is loaded with its projector."""
    return state.ready and state.pictures is not None


def _listed(text: str) -> list[str]:
    """Return the comma-separated parts of a text without duplicates."""
    return list(dict.fromkeys(item for part in text.split(",") if (item := part.strip())))


def _meta(state: ServerState) -> dict[str, Any]:
    names = ("vocab_type", "n_vocab", "n_ctx_train", "n_embd", "n_params", "size")
    model = state.engine.model
    return {name: getattr(model, name) for name in names} | {"n_ctx": model.n_ctx_slot}


def _catalogue_entry(name: str, n_ctx: int, modalities: list[str]) -> dict[str, Any]:
    """Return the entry that coding agents look for besides OpenAI's list, with the fields Ollama's clients read."""
    return {
        "name": name,
        "model": name,
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "description": None,
        "tags": [""],
        "capabilities": ["completion", "multimodal"] if "image" in modalities else ["completion"],
        "parameters": "",
        "details": {"parent_model": "", "format": "gguf", "family": "", "families": [""], "parameter_size": "",
                    "quantization_level": ""},
        "slug": name,
        "display_name": name,
        "default_reasoning_level": None,
        "supported_reasoning_levels": [],
        "shell_type": "default",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "additional_speed_tiers": [],
        "service_tiers": [],
        "default_service_tier": None,
        "availability_nux": None,
        "upgrade": None,
        "base_instructions": "",
        "model_messages": None,
        "supports_reasoning_summaries": False,
        "default_reasoning_summary": "auto",
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": None,
        "web_search_tool_type": "text",
        "truncation_policy": {"mode": "tokens", "limit": n_ctx},
        "supports_parallel_tool_calls": True,
        "supports_image_detail_original": False,
        "context_window": n_ctx,
        "max_context_window": n_ctx,
        "auto_compact_token_limit": n_ctx * 9 // 10,
        "effective_context_window_percent": 95,
        "experimental_supported_tools": [],
        "input_modalities": modalities,
        "supports_search_tool": False,
        "use_responses_lite": False,
        "auto_review_model_override": None,
        "tool_mode": None,
        "multi_agent_version": None,
    }  # fmt: skip


@router.get("/props", summary="Settings of the server")
async def props(request: Request) -> Response:
    """Return model, context, chat template and the default settings of requests."""
    state = server(request)
    model, tokenizer = state.engine.model, state.engine.tokenizer
    params = default_settings(state, model.n_ctx_slot)
    next_token = {"has_next_token": True, "has_new_line": False, "n_remain": -1, "n_decoded": 0, "stopping_word": ""}
    defaults = params | {
        "id": 0,
        "id_task": -1,
        "speculative": False,
        "is_processing": False,
        "prompt": "",
        "next_token": next_token,
        "params": params,
    }
    out = {
        "system_prompt": "",
        "model_alias": state.alias,
        "default_generation_settings": defaults,
        "total_slots": state.config.n_parallel,
        "build_info": FINGERPRINT,
        "is_sleeping": False,
        "cors_proxy_enabled": False,
        "bos_token": _token(tokenizer, tokenizer.bos_id),
        "eos_token": _token(tokenizer, tokenizer.eos_id),
        "endpoint_slots": state.config.server.slots,
        "endpoint_props": state.config.server.props,
        "endpoint_metrics": state.config.server.metrics,
        "ui_settings": state.page_settings,
        "media_marker": PUBLIC_MARKER,
    }
    return json_response(out | _simple(state) | state.chat.describe())


@router.get("/v1/props", summary="Name, path and context of the model")
async def props_simple(request: Request) -> Response:
    """Return a short form of /props."""
    return json_response(_simple(server(request)))


def _simple(state: ServerState) -> dict[str, Any]:
    model = state.engine.model
    return {
        "model_name": state.alias,
        "model_path": str(model.path),
        "modalities": {"vision": reads_images(state), "audio": False},
        "n_ctx": model.n_ctx,
    }


def _token(tokenizer: Any, token: int | None) -> str:
    return "" if token is None else str(tokenizer.token_text(token))


@router.post("/props", openapi_extra=object_body({"type": "object"}), summary="Change settings (needs --props)")
async def change_props(request: Request) -> Response:
    """Accept any JSON object; no property can be changed so far."""
    if not server(request).config.server.props:
        raise unsupported("This server does not support changing global properties. Start it with `--props`")
    await read_object(request)
    return json_response({"success": True})


@router.get("/metrics", summary="Counters for Prometheus (needs --metrics)")
async def metrics_text(request: Request) -> Response:
    """Return the metrics as Prometheus text."""
    state = server(request)
    if not state.config.server.metrics:
        raise unsupported("This server does not support metrics endpoint. Start it with `--metrics`")
    values = state.engine.metrics(reset=True)
    started = str(int(values.t_start or state.started))
    headers = {"Process-Start-Time-Unix": started, "Content-Type": metrics.CONTENT_TYPE}
    return Response(metrics.prometheus_text(values, state.users), headers=headers)


@router.get("/usage", include_in_schema=False)
async def usage(request: Request) -> Response:
    """Return the token usage of a request and forget it; the server in front calls this once per request."""
    used = server(request).ledger.take(request.query_params.get("id", ""))
    if used is None:
        raise ApiError(404, "the usage of this request is unknown, or was already returned")
    return json_response({"prompt_tokens": used[0], "completion_tokens": used[1]})


@router.get("/version", summary="Version of the server")
async def version(request: Request) -> Response:
    """Return version and build; `features` tells web clients that the server stores nothing for them."""
    features = {"sql": False, "zstd_compression": False}
    return json_response({"version": __version__, "build_info": FINGERPRINT, "features": features})
