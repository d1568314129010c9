"""The interface between a console and a model: bodies of the HTTP API go in, pieces of an answer come out.

An engine in this process (`local`) and a server (`remote`) take the same requests, so a conversation does not know
which of them it uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from ikcli.chat.messages import ToolCall
from ikcli.chat.parser import ChatDelta, ChatMessage

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerCounts:
    """Tokens and milliseconds of one answer, or of several. `n_past` of `n_ctx` cells are in use after it."""

    n_cached: int = 0
    n_prompt: int = 0
    prompt_ms: float = 0.0
    n_predicted: int = 0
    predicted_ms: float = 0.0
    n_drafted: int = 0
    n_accepted: int = 0
    n_past: int = 0
    n_ctx: int = 0

    def plus(self, other: AnswerCounts) -> AnswerCounts:
        """Add up; the cells in use are those of `other`."""
        sums = {
            name: getattr(self, name) + getattr(other, name)
            for name in ("n_cached", "n_prompt", "prompt_ms", "n_predicted", "predicted_ms", "n_drafted", "n_accepted")
        }
        return replace(other, **sums)

    def beyond(self, prepared: AnswerCounts) -> AnswerCounts:
        """Correct for a prompt that was computed before the answer: with `prepared`, its tokens count once."""
        return prepared.plus(replace(self, n_prompt=0, n_cached=0)) if prepared.n_prompt else self

    @classmethod
    def of_json(cls, timings: Mapping[str, Any]) -> AnswerCounts:
        """Parse the `timings` of an answer of the API."""

        def count(name: str) -> int:
            return int(timings.get(name) or 0)

        return cls(
            count("cache_n"), count("prompt_n"), float(timings.get("prompt_ms") or 0), count("predicted_n"),
            float(timings.get("predicted_ms") or 0), count("draft_n"), count("draft_n_accepted"), count("n_past"),
            count("n_ctx"),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    """How an answer ended. `stop`: eos, limit, word (then `word` is the text), or cancelled.

    `text` and `tokens` belong to a continued text, `message` to a conversation.
    """

    stop: str
    word: str = ""
    truncated: bool = False
    counts: AnswerCounts = field(default_factory=AnswerCounts)
    text: str = ""
    tokens: tuple[int, ...] = ()
    message: ChatMessage = field(default_factory=ChatMessage)


class AnswerStream(Protocol):
    """An answer being generated: iterate it to its end, then read `answer`."""

    answer: Answer

    def __iter__(self) -> Iterator[ChatDelta]:
        """Yield the pieces; IkError if the model cannot answer."""

    def cancel(self) -> None:
        """End the answer with what has arrived; may be called by a signal handler during the iteration."""


class AnswerSource(Protocol):
    """A model that answers requests."""

    name: str
    load_ms: float

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""

    @property
    def reads_images(self) -> bool:
        """Whether the model has a projector; asked when the model is loaded."""

    def complete(self, body: Body) -> AnswerStream:
        """Continue the `prompt` of a body of /completion. The first piece is empty: the prompt was accepted."""

    def chat(self, body: Body) -> AnswerStream:
        """Answer the `messages` of a body of /v1/chat/completions."""

    def check(self, body: Body) -> None:
        """Raise IkError if a field of a body is wrong, as far as can be known without requesting an answer."""

    def settings(self) -> dict[str, Any]:
        """Return the default of each request field."""

    def close(self) -> None:
        """Release the resources of the model."""


class PromptCache(Protocol):
    """A file with the computed state of a prompt."""

    def prepare(self, body: Body, *, chat: bool) -> AnswerCounts:
        """Compute the prompt of the first request and write the file, if it is to be written then."""

    def finish(self) -> None:
        """Write the file at the end, if it is to be written then."""


class Gather:
    """Joins pieces of an answer, for answers that are cut off."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []

    def add(self, delta: ChatDelta) -> None:
        """Add a piece."""
        self._content.append(delta.content)
        self._reasoning.append(delta.reasoning)
        if delta.index >= 0:
            while len(self._calls) <= delta.index:
                self._calls.append(ToolCall("", ""))
            call = self._calls[delta.index]
            self._calls[delta.index] = replace(
                call,
                name=call.name + delta.name,
                id=call.id or delta.id,
                arguments=call.arguments + delta.arguments,
            )

    @property
    def message(self) -> ChatMessage:
        """Return the whole message."""
        return ChatMessage("".join(self._content), "".join(self._reasoning), tuple(self._calls))


def cache_path_problem(path: Path, *, read_only: bool) -> str:
    """Return why this file cannot be a prompt cache, as far as known before a model is loaded; else an empty string."""
    if path.is_dir():
        return f"--prompt-cache {path} is a folder; name a file"
    if not read_only and not path.parent.is_dir():
        return f"--prompt-cache {path}: the folder {path.parent} does not exist; make it or name another file"
    return ""
