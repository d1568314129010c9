"""How much of a request's prompt this server holds, for the server in front, which chooses a replica by it.

A server behind another one (see `is_behind`) does not run a request with the header `x-ik-held`: it prepares its prompt
as always and answers with the number of its tokens and of those that slots, RAM and disk hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.requests import Request

from ikcli.server.http.errors import ApiError
from ikcli.server.http.state import ServerState, is_behind
from ikcli.server.slots.messages import GenerationRequest

HELD = b"x-ik-held"


def asks_held(request: Request, state: ServerState) -> bool:
    """Return whether a request only asks what is held of its prompt."""
    return HELD.decode() in request.headers and is_behind(state.config)


async def held_json(state: ServerState, generations: Sequence[GenerationRequest]) -> dict[str, int]:
    """Return the answer for the first prompt of a request. Raise ApiError 503 if the engine is busy with its cache."""
    first = generations[0]
    found = await asyncio.to_thread(state.engine.held, first)
    if found is None:
        raise ApiError(503, "the prompt cache is being used")
    return {"n_prompt": len(first.prompt), "n_slot": found.n_slot, "n_ram": found.n_ram, "n_disk": found.n_disk}
