"""Ask replicas how much of a request's prompt they hold, before one is chosen.

Each gets the request with a header (see `http/held.py`) and prepares the prompt without computing it. Their answers
know what the front cannot: what has left a cache, what was read from disk after a restart, what a slot was restored to.
A replica that does not answer in time is judged by earlier requests (`prefixes.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from ikcli.server.front.replica import Held, Question, Replica
from ikcli.server.front.upstream import UpstreamError
from ikcli.server.http import jsontext
from ikcli.server.http.held import HELD

_PATIENCE = 0.5  # seconds for all answers; the prompts that are asked about take longer to compute


async def ask_held(replicas: Sequence[Replica], question: Question) -> Mapping[Replica, Held]:
    """Return the answers of the replicas with a free slot that answer in time, unless there are fewer than two."""
    free = [one for one in replicas if one.has_free_slot]
    if len(free) < 2:
        return {}
    answers = await asyncio.gather(*(_ask(one, question) for one in free))
    return {one: answer for one, answer in zip(free, answers, strict=True) if answer is not None}


async def _ask(one: Replica, question: Question) -> Held | None:
    try:
        status, body = await one.process.ask(
            "POST", question.target, question.body, timeout=_PATIENCE, headers=((HELD, b"ask"),)
        )
        return Held(**jsontext.parse(body)) if status == 200 else None
    except (UpstreamError, ValueError, TypeError):  # it is busy, gone, or of another version
        return None
