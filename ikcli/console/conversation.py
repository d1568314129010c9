"""A conversation: its messages and settings, and the changes to them when an answer arrives or is undone."""

from __future__ import annotations

import base64
import mimetypes
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ikcli.chat.messages import ToolCall
from ikcli.console.answers import Answer, AnswerCounts, AnswerSource, AnswerStream, Body, PromptCache
from ikcli.errors import IkError

Json = dict[str, Any]


@dataclass(slots=True)
class Conversation:
    """`messages` in OpenAI's form, without the system prompt. `fields` go into every request.

    `images`: content parts that the user's next message begins with.
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
    images: list[Json] = field(default_factory=list)

    def body(self) -> Body:
        """Return the request for the next answer."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        tools = {"tools": self.tools} if self.tools else {}
        return {**self.fields, **tools, "messages": [*system, *self.messages]}

    # --- growing ----------------------------------------------------------------------------------------------------
    def say(self, text: str) -> None:
        """Add the user's next message."""
        content: str | list[Json] = text
        if self.images:
            content = [*self.images, {"type": "text", "text": text}]
            self.images = []
        self.messages.append({"role": "user", "content": content})

    def attach(self, path: Path) -> None:
        """Add an image to the user's next message; IkError if it cannot be read or the model reads no images."""
        if not self.source.reads_images:
            raise IkError("this model reads text only; give its projector with --mmproj FILE")
        from ikcli.server.http.media import MAX_BYTES  # HTTP takes its time to import

        try:
            if path.stat().st_size > MAX_BYTES:
                raise IkError(f"{path} has more than {MAX_BYTES >> 20} MiB")
            data = path.read_bytes()
        except OSError as e:
            raise IkError(f"cannot read {path}: {e.strerror or e}") from None
        kind = mimetypes.guess_type(path.name)[0] or "image"
        url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        self.images.append({"type": "image_url", "image_url": {"url": url}})

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
        """Remove the user's last message and what came after it; return its text, None if there is none.

        Its images go into the next message.
        """
        at = self._last_user()
        if at < 0:
            return None
        content = self.messages[at].get("content") or ""
        text = content if isinstance(content, str) else "\n".join(p["text"] for p in content if "text" in p)
        self.images = [] if isinstance(content, str) else [p for p in content if "text" not in p]
        del self.messages[at:]
        self.undone = []
        return text

    def clear(self) -> None:
        """Start a new conversation; system prompt, settings and tools stay."""
        self.messages, self.undone, self.last, self.images = [], [], None, []

    def _last_user(self) -> int:
        return max((i for i, m in enumerate(self.messages) if m.get("role") == "user"), default=-1)

    @property
    def thoughts(self) -> str:
        """Return the reasoning before the model's last answer."""
        said = [m for m in self.messages if m.get("role") == "assistant"]
        return str(said[-1].get("reasoning_content") or "") if said else ""
