"""A model in this process: the server's engine with one slot, driven without HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from ikcli.chat.parser import ChatDelta, ChatParser
from ikcli.console.answers import Answer, AnswerCounts, Body, Gather
from ikcli.errors import IkError
from ikcli.server.http.chat import check_options
from ikcli.server.http.constraints import constraint_of
from ikcli.server.http.errors import ApiError
from ikcli.server.http.generation_body import GenerationBody
from ikcli.server.http.generations import generations_of, request_of, requests_of
from ikcli.server.http.params import settings
from ikcli.server.http.prompts import read_prompts
from ikcli.server.http.state import ServerState
from ikcli.server.slots.engine import Engine, Ticket
from ikcli.server.slots.messages import Delta, Event, Failure, Final, GenerationRequest, RequestTimings
from ikcli.server.slots.states import EngineError
from ikcli.settings.run import RunConfig
from ikcli.settings.sampling import INT32

if TYPE_CHECKING:
    from ikcli.engine.plan.planner import Planner

_TEMPLATE = "tokenizer.chat_template"


class LocalModel:
    """An `AnswerSource` on an engine in this process. Call `load` first, which blocks until the model is loaded."""

    def __init__(self, config: RunConfig, planner: Planner | None = None) -> None:
        """Check the options without loading; UsageError or IkError if they are inconsistent."""
        self.name = config.model.name if config.model is not None else "model"
        self.load_ms = 0.0
        self._config = config
        self._engine = Engine(config, n_slots=1, planner=planner)
        self._state = ServerState(config, self._engine)
        self._state.defaults  # noqa: B018  (wrong options end the program before anything is loaded)
        check_options(config)
        self._metadata = planner.file.metadata if planner is not None else {}

    @property
    def has_template(self) -> bool:
        """Whether the command line or the model file has a chat template."""
        server = self._config.server
        return bool(server.chat_template or server.chat_template_file or self._metadata.get(_TEMPLATE))

    @property
    def reads_images(self) -> bool:
        """Whether the model was loaded with its projector."""
        return self._state.pictures is not None

    def load(self) -> None:
        """Load the model; raises the engine's IkError. An interrupt ends the program at once."""
        start = time.perf_counter()
        self._engine.start()
        while not self._engine.wait_loaded(0.2):
            if self._engine.state == "failed":
                assert self._engine.load_error is not None
                raise self._engine.load_error
        self.load_ms = 1e3 * (time.perf_counter() - start)

    def close(self) -> None:
        """Stop the engine."""
        self._engine.shutdown(drain=False)

    # --- requests ---------------------------------------------------------------------------------------------------
    def complete(self, body: Body) -> LocalStream:
        """Continue a text."""
        return LocalStream(self._engine, self._text_request(body))

    def chat(self, body: Body) -> LocalStream:
        """Answer a conversation."""
        request, make_parser = self._chat_request(body)
        return LocalStream(self._engine, request, make_parser())

    def check(self, body: Body) -> None:
        """Raise IkError if a field is wrong."""
        with _as_ik_errors():
            fields = GenerationBody.of(body, self._state.defaults, self._state.limits)
            if body.get("grammar") or body.get("json_schema") is not None:
                asyncio.run(constraint_of(self._state, fields))

    def settings(self) -> dict[str, Any]:
        """Return the default of each request field."""
        fields = self._state.defaults
        return settings(request_of(self._state, fields), fields, self._engine.model.n_ctx_slot, self.name)

    def tokens(self, text: str) -> list[tuple[int, str]]:
        """Return the tokens of a prompt with their texts."""
        tokenizer = self._engine.tokenizer
        return [(i, tokenizer.token_text(i)) for i in tokenizer.encode(text)]

    @property
    def bos(self) -> int | None:
        """The token that starts a text."""
        return self._engine.tokenizer.bos_id

    def _text_request(self, body: Body) -> GenerationRequest:
        return self._made(asyncio.run(self._text_requests(body)), body)

    async def _text_requests(self, body: Body) -> GenerationRequest:
        with _as_ik_errors():
            fields = GenerationBody.of(body, self._state.defaults, self._state.limits)
            prompts, _ = await read_prompts(body.get("prompt"), self._state.limits)
            constraint = await constraint_of(self._state, fields)
        return requests_of(self._state, fields, prompts, 1, constraint=constraint)[0]

    def _chat_request(self, body: Body) -> tuple[GenerationRequest, Callable[[], ChatParser]]:
        with _as_ik_errors():
            _, prepared, requests = asyncio.run(generations_of(self._state, body))
        return self._made(requests[0], body), prepared.make_parser

    def _made(self, request: GenerationRequest, body: Body) -> GenerationRequest:
        """Build a generation, allowing what a server does not: texts without end."""
        return replace(request, n_predict=INT32) if request.n_predict == -1 and "prompt" in body else request

    # --- the cache of the prompt ------------------------------------------------------------------------------------
    def evaluate(self, body: Body, *, chat: bool) -> AnswerCounts:
        """Compute the prompt of a body without generating."""
        request = self._chat_request(body)[0] if chat else self._text_request(body)
        stream = LocalStream(self._engine, replace(request, n_predict=0, constraint=None))
        try:
            for _ in stream:
                pass
        except KeyboardInterrupt:
            stream.cancel()
            raise
        return stream.answer.counts

    def save_cache(self, path: Path) -> int:
        """Write the computed state to a file and return its number of tokens."""
        return self._cache_action("save", path)

    def restore_cache(self, path: Path) -> int:
        """Read a saved state and return its number of tokens."""
        return self._cache_action("restore", path)

    def _cache_action(self, action: str, path: Path) -> int:
        try:
            return self._engine.slot_action(0, action, path).result().n_tokens
        except EngineError as e:
            raise IkError(f"--prompt-cache: {e.message}") from None


class LocalStream:
    """One generation. With a parser the text is that of a conversation."""

    def __init__(self, engine: Engine, request: GenerationRequest, parser: ChatParser | None = None) -> None:
        self.answer = Answer("cancelled")
        self._parser = parser
        self._gather = Gather()
        self._events: SimpleQueue[Event | None] = SimpleQueue()  # its `put` may be called by a signal handler
        self._cancelled = self._submitted = False
        self._refused = ""
        self._ticket: Ticket = engine.submit(request, self._take)
        self._tokens: list[int] = []
        self._counts = AnswerCounts()
        if self._refused:
            raise IkError(self._refused)
        self._submitted = True

    def _take(self, event: Event) -> None:
        """Take an event, from the engine's thread, or from `submit` if the request is refused at once."""
        if isinstance(event, Failure) and not self._submitted:
            self._refused = event.message
        self._events.put(event)

    def cancel(self) -> None:
        """End the answer; see AnswerStream."""
        self._cancelled = True
        self._ticket.cancel()
        self._events.put(None)

    def __iter__(self) -> Iterator[ChatDelta]:
        if self._parser is None:
            yield ChatDelta()  # the prompt was accepted
        while True:
            events = [self._events.get()]
            while not self._events.empty():  # the consumer may be slower than the model
                events.append(self._events.get())
            if self._cancelled:
                yield from self._flush()
                self._finish("cancelled")
                return
            end = events[-1]
            if isinstance(end, Failure):
                raise IkError(end.message)
            parts = [e.tail if isinstance(e, Final) else e for e in events]
            yield from self._text([e for e in parts if isinstance(e, Delta)])
            if isinstance(end, Final):
                yield from self._end(end)
                return

    def _text(self, events: list[Delta]) -> Iterator[ChatDelta]:
        for event in events:
            self._tokens += [token.id for token in event.tokens]
            self._counts = _counts(event.timings)
        text = "".join(event.text for event in events)
        if self._parser is not None:
            yield from map(self._noted, self._parser.feed(text))
        elif text:
            yield self._noted(ChatDelta(content=text))

    def _flush(self) -> Iterator[ChatDelta]:
        if self._parser is not None:
            yield from map(self._noted, self._parser.flush())

    def _noted(self, delta: ChatDelta) -> ChatDelta:
        self._gather.add(delta)
        return delta

    def _end(self, event: Final) -> Iterator[ChatDelta]:
        yield from self._flush()
        self._tokens = [token.id for token in event.tokens]
        self._counts = _counts(event.timings)
        self._finish(event.stop_type, event.stopping_word, event.truncated)

    def _finish(self, stop: str, word: str = "", truncated: bool = False) -> None:
        gathered = self._gather.message
        message = self._parser.message if self._parser is not None else gathered
        self.answer = Answer(stop, word, truncated, self._counts, gathered.content, tuple(self._tokens), message)


def _counts(t: RequestTimings) -> AnswerCounts:
    return AnswerCounts(
        t.cache_n,
        t.prompt_n,
        t.prompt_ms,
        t.predicted_n,
        t.predicted_ms,
        t.draft_n,
        t.draft_n_accepted,
        t.n_past,
        t.n_ctx,
    )


class _as_ik_errors:
    """Turn refusals of the API into errors of this program."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ApiError):
            raise IkError(error.message) from None


class FileCache:
    """The file of `--prompt-cache`; see answers.PromptCache."""

    def __init__(self, model: LocalModel, path: Path, *, all_of_it: bool, read_only: bool) -> None:
        """Read the file if it exists; IkError if it does not fit the model."""
        self._model, self._path, self._all, self._read_only = model, path, all_of_it, read_only
        exists = path.exists() and path.stat().st_size > 0
        self.n_tokens = model.restore_cache(path) if exists else 0
        self._first = True

    def prepare(self, body: Body, *, chat: bool) -> AnswerCounts:
        """Compute the first prompt and write it, unless the file already holds all of it."""
        if not self._first or self._all or self._read_only:
            return AnswerCounts()
        self._first = False
        counts = self._model.evaluate(body, chat=chat)
        if counts.n_prompt > 1 or not self.n_tokens:
            self._model.save_cache(self._path)
        return counts

    def finish(self) -> None:
        """Write the whole text."""
        if self._all and not self._read_only:
            self._model.save_cache(self._path)
