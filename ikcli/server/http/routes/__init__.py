"""The endpoints, one module per family; ikcli.server.http.app mounts their routers."""

from __future__ import annotations

from ikcli.server.http.routes import (
    adapters,
    anthropic,
    chat,
    completion,
    infill,
    info,
    ollama,
    ollama_models,
    responses,
    saved,
    slots,
    tokens,
    unsupported,
)

ROUTERS = tuple(
    module.router
    for module in (
        info,
        completion,
        chat,
        responses,
        anthropic,
        ollama,
        ollama_models,
        infill,
        tokens,
        slots,
        saved,
        adapters,
        unsupported,
    )
)
