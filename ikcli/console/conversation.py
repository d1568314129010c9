"""A conversation: its messages and settings, and the changes to them when an answer arrives or is undone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ikcli.chat.messages import ToolCall
from ikcli.console.answers import Answer, AnswerCounts, AnswerSource, AnswerStream, Body, PromptCache

Json = dict[str, Any]


@dataclass(slots=True)
class Conversation:
    """`messages` in OpenAI's form, without the system prompt. `fields` go into every request.

    `undone` calls wait for their results before the model is asked again.
    """

    source: AnswerSource
    system: str = ""
    messages: list[Json] = field(default_factory=list)
    fields: Body = field(default_factory=dict)
    tools: list[Json] = field(default_factory=list)
    cache: PromptCache | None = None
    last: Answer | None = None
    total: AnswerCounts = field(default_factory=AnswerCounts)
    prepared: AnswerCounts = field(default_factory=AnswerCounts)
    undone: list[ToolCall] = field(default_factory=list)

    def body(self) -> Body:
        """Return the request for the next answer."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        tools = {"tools": self.tools} if self.tools else {}
        return {**self.fields, **tools, "messages": [*system, *self.messages]}

    # --- growing ----------------------------------------------------------------------------------------------------
    def say(self, text: str) -> None:
        """Add the user's next message."""
        self.messages.append({"role": "user", "content": text})

    def give_result(self, text: str) -> None:
        """Add the result of the first call that waits for one."""
        call = self.undone.pop(0)
        message = {"role": "tool", "name": call.name, "content": text}
        self.messages.append(message | ({"tool_call_id": call.id} if call.id else {}))

    def ask(self) -> AnswerStream:
        """Request an answer; pass it to `take`."""
        body = self.body()
        self.prepared = self.cache.prepare(body, chat=True) if self.cache is not None else AnswerCounts()
        return self.source.chat(body)

    def take(self, answer: Answer) -> None:
        """Keep an answer, including one that was cut off, unless it is empty."""
        self.last = answer
        self.total = self.total.plus(answer.counts.beyond(self.prepared))
        message = answer.message
        if not (message.content or message.reasoning or message.tool_calls):
            return
        said = message.to_openai()
        calls = [call for call in message.tool_calls if call.complete or answer.stop != "cancelled"]
        if answer.stop == "cancelled":
            said.pop("tool_calls", None)
            said["content"] = message.content
            calls = []
        self.messages.append(said)
        self.undone = calls

    # --- going back -------------------------------------------------------------------------------------------------
    def drop_answer(self) -> bool:
        """Remove what came after the user's last message; False if nothing did."""
        at = self._last_user()
        if at < 0:
            return False
        del self.messages[at + 1 :]
        self.undone = []
        return True

    def undo(self) -> str | None:
        """Remove and return the user's last message, with what came after it; None if there is none."""
        at = self._last_user()
        if at < 0:
            return None
        text = str(self.messages[at].get("content") or "")
        del self.messages[at:]
        self.undone = []
        return text

    def clear(self) -> None:
        """Start a new conversation; system prompt, settings and tools stay."""
        self.messages, self.undone, self.last = [], [], None

    def _last_user(self) -> int:
        return max((i for i, m in enumerate(self.messages) if m.get("role") == "user"), default=-1)

    @property
    def thoughts(self) -> str:
        """Return the reasoning before the model's last answer."""
        said = [m for m in self.messages if m.get("role") == "assistant"]
        return str(said[-1].get("reasoning_content") or "") if said else ""
