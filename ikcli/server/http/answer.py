"""From submitted generations to the HTTP answer, whole or streamed, with errors, pings and client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response

from ikcli.server.http import sse
from ikcli.server.http.bridge import Disconnected, Job
from ikcli.server.http.budget import ReasoningControl
from ikcli.server.http.errors import ApiError
from ikcli.server.http.generation_body import GenerationBody
from ikcli.server.http.held import asks_held, held_json
from ikcli.server.http.jsontext import dump_bytes
from ikcli.server.http.shapes.common import Shape
from ikcli.server.http.state import ServerState, is_behind
from ikcli.server.http.usage import REQUEST_ID, Entry
from ikcli.server.http.users import ACCOUNT
from ikcli.server.slots.messages import (
    Delta,
    Embedded,
    EmbeddingRequest,
    Event,
    Failure,
    Final,
    GenerationRequest,
    PromptProgress,
)
from ikcli.server.slots.pictures import tokens_of

CLIENT_GONE = 499


def json_response(value: object, status: int = 200) -> Response:
    """Return a JSON response."""
    return Response(dump_bytes(value), status, media_type="application/json; charset=utf-8")


async def answer(
    request: Request,
    state: ServerState,
    generations: Sequence[GenerationRequest],
    shape: Shape,
    *,
    stream: bool,
    ping: int = -1,
    media_type: str = "text/event-stream",
    at_end: Callable[[], None] | None = None,
) -> Response:
    """Run the generations and answer in `shape`.

    A stream starts with its first event, so errors at the start keep their HTTP status: ApiError if a generation fails
    before anything was sent. `at_end` is called when the request is over, however it ends. Only event streams carry
    pings.
    """
    account = request.scope.get(ACCOUNT) or _noted(request, state)
    job = Job(state.bridge, stream=stream or account is not None, on_close=account.add if account is not None else None)
    if at_end is not None:
        job.at_end(at_end)
    try:
        if asks_held(request, state):
            found = await held_json(state, generations)
            job.close()
            return json_response(found)
        if state.prompt_files is not None:
            await asyncio.to_thread(_write_prompts, state, generations)
        job.start(state.engine, generations, request.receive)
        if not stream:
            finals = await _collect(job, len(generations))
            job.close()
            return json_response(shape.whole(finals))
        keep_alive = sse.PING if media_type == "text/event-stream" else b""
        if ping > 0 and keep_alive:
            job.ping_every(ping)
        ready = await job.events()
        for _, event in ready[:1]:
            if isinstance(event, Failure):
                raise ApiError.of(event)
    except Disconnected:
        job.close()
        return Response(status_code=CLIENT_GONE)
    except BaseException:
        job.close()
        raise
    return sse.EventStream(_chunks(job, shape, ready, keep_alive), job.close, state.timeout, media_type)


async def answer_chat(
    request: Request,
    state: ServerState,
    generations: Sequence[GenerationRequest],
    shape: Shape,
    fields: GenerationBody,
    id: str,
    control: ReasoningControl | None,
) -> Response:
    """Run `answer` for a conversation, whose thinking another request can end by the answer's `id`."""
    leave = state.running.enter(id, control)
    return await answer(
        request, state, generations, shape, stream=fields.stream, ping=fields.sse_ping_interval, at_end=leave
    )


def _write_prompts(state: ServerState, generations: Sequence[GenerationRequest]) -> None:
    """Write one file per prompt, control tokens included."""
    assert state.prompt_files is not None
    for prompt in dict.fromkeys(one.prompt for one in generations):
        state.prompt_files.write(state.engine.tokenizer.decode(tokens_of(prompt)))


async def embedded(request: Request, state: ServerState, wanted: EmbeddingRequest) -> Embedded | None:
    """Return the vectors of a request, or None if the client has disconnected.

    Raise ApiError if they cannot be computed.
    """
    account = request.scope.get(ACCOUNT) or _noted(request, state)
    job = Job(state.bridge, stream=False, on_close=account.add if account is not None else None)
    try:
        job.start(state.engine, [wanted], request.receive)
        _, event = (await job.events())[0]
    except Disconnected:
        return None
    finally:
        job.close()
    if isinstance(event, Failure):
        raise ApiError.of(event)
    assert isinstance(event, Embedded)
    return event


def _noted(request: Request, state: ServerState) -> Entry | None:
    """Return the ledger entry of a request that another server forwarded, or None."""
    id = request.headers.get(REQUEST_ID.decode())
    return state.ledger.entry(id) if id and is_behind(state.config) else None


async def _collect(job: Job, n: int) -> list[Final]:
    finals: list[Final | None] = [None] * n
    while not job.finished:
        for index, event in await job.events():
            if isinstance(event, Failure):
                raise ApiError.of(event)
            if isinstance(event, Final):
                finals[index] = event
    return [event for event in finals if event is not None]


async def _chunks(job: Job, shape: Shape, ready: list[tuple[int, Event]], ping: bytes) -> AsyncIterator[bytes]:
    """Yield everything that is ready as one chunk, or `ping` if nothing happened in time."""
    try:
        out = [shape.begin()]
        while True:
            for index, event in ready:
                if isinstance(event, Delta):
                    out.append(shape.delta(index, event))
                elif isinstance(event, Failure):
                    yield b"".join([*out, shape.failure(ApiError.of(event))])
                    return
                else:
                    assert not isinstance(event, Embedded)
                    out.append(_shaped(shape, index, event))
            if job.finished:
                yield b"".join([*out, shape.end()])
                return
            if chunk := b"".join(out) or ping:
                yield chunk
            out = []
            ready = await job.events()
    except Disconnected:
        return


def _shaped(shape: Shape, index: int, event: Final | PromptProgress) -> bytes:
    if isinstance(event, Final):
        return shape.final(index, event)
    return shape.progress(index, event)
