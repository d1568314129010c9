"""The endpoints, one module per family; ikcli.server.http.app mounts their routers."""

from __future__ import annotations

from ikcli.server.http.routes import (
    adapters,
    anthropic,
    chat,
    completion,
    embeddings,
    infill,
    info,
    ollama,
    ollama_embed,
    ollama_models,
    responses,
    saved,
    slots,
    tokens,
    vectors,
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
        ollama_embed,
        ollama_models,
        embeddings,
        infill,
        tokens,
        slots,
        saved,
        adapters,
        vectors,
    )
)
