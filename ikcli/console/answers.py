"""What a console asks of a model and what it gets: bodies of the HTTP API go in, pieces of an answer come out.

An engine in this process (`local`) and a server (`remote`) are asked in the same words, so that a conversation does not
know which it talks to.
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
    """Tokens and milliseconds of one answer, or of several. `n_past` of `n_ctx` cells are used after it."""

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
        """Sums; what is used now is that of `other`."""
        sums = {
            name: getattr(self, name) + getattr(other, name)
            for name in ("n_cached", "n_prompt", "prompt_ms", "n_predicted", "predicted_ms", "n_drafted", "n_accepted")
        }
        return replace(other, **sums)

    def beyond(self, prepared: AnswerCounts) -> AnswerCounts:
        """These of an answer whose prompt was computed before: together with `prepared`, its tokens count once."""
        return prepared.plus(replace(self, n_prompt=0, n_cached=0)) if prepared.n_prompt else self

    @classmethod
    def of_json(cls, timings: Mapping[str, Any]) -> AnswerCounts:
        """From the `timings` of an answer of the API."""

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

    `text` and `tokens` are those of a continued text, `message` that of a conversation.
    """

    stop: str
    word: str = ""
    truncated: bool = False
    counts: AnswerCounts = field(default_factory=AnswerCounts)
    text: str = ""
    tokens: tuple[int, ...] = ()
    message: ChatMessage = field(default_factory=ChatMessage)


class AnswerStream(Protocol):
    """An answer on its way: iterate it to its end, then look at `answer`."""

    answer: Answer

    def __iter__(self) -> Iterator[ChatDelta]:
        """The pieces; IkError if the model cannot answer."""

    def cancel(self) -> None:
        """End it with what has come so far; may be called by a signal handler within the iteration."""


class AnswerSource(Protocol):
    """A model to talk to."""

    name: str
    load_ms: float

    @property
    def has_template(self) -> bool:
        """Whether the model says how a conversation is written."""

    def complete(self, body: Body) -> AnswerStream:
        """Continue the `prompt` of a body of /completion. The first piece is empty: the prompt is taken."""

    def chat(self, body: Body) -> AnswerStream:
        """Answer the `messages` of a body of /v1/chat/completions."""

    def check(self, body: Body) -> None:
        """IkError if a field of a body is wrong, as far as that can be known without asking for an answer."""

    def settings(self) -> dict[str, Any]:
        """What applies to requests that say nothing, by field."""

    def close(self) -> None:
        """Free what the model takes."""


class PromptCache(Protocol):
    """A file with what was computed of a prompt."""

    def prepare(self, body: Body, *, chat: bool) -> AnswerCounts:
        """Compute the prompt of the first request and write the file, if it is to be written then."""

    def finish(self) -> None:
        """Write the file at the end, if it is to be written then."""


class Gather:
    """Puts pieces of an answer together, for answers that are cut off."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []

    def add(self, delta: ChatDelta) -> None:
        """One more piece."""
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
        """All of it."""
        return ChatMessage("".join(self._content), "".join(self._reasoning), tuple(self._calls))


def cache_path_problem(path: Path, *, read_only: bool) -> str:
    """Why a prompt cache cannot be this file; empty if it can, as far as can be known before a model is loaded."""
    if path.is_dir():
        return f"--prompt-cache {path} is a folder; name a file"
    if not read_only and not path.parent.is_dir():
        return f"--prompt-cache {path}: there is no folder {path.parent}; make it or name another file"
    return ""
