"""Chat messages assembled from the blocks and items of other APIs, which come one by one."""

from __future__ import annotations

from typing import Any

from ikcli.chat import content
from ikcli.chat.content import RequestError
from ikcli.chat.images import NO_IMAGES, Images
from ikcli.server.http.errors import bad_request


class Turns:
    """Collector of messages; consecutive thinking, text and calls of the assistant form one message.

    Texts of the messages contain the markers of `images`.
    """

    def __init__(self, images: Images = NO_IMAGES) -> None:
        self._images = images
        self.messages: list[dict[str, Any]] = []
        self._thoughts = ""

    def say(self, role: str, said: str | list[str]) -> None:
        """Add a message: one text, or the texts of several parts."""
        if role == "assistant":
            message = self._assistant()
            before = message["content"]
            if before and said:
                texts = [said] if isinstance(said, str) else said
                message["content"] = [*(before if isinstance(before, list) else _parts([before])), *_parts(texts)]
                return
        else:
            message = self._new(role)
        message["content"] = said if isinstance(said, str) else _parts(said)

    def think(self, text: str) -> None:
        """Add the assistant's thinking before its text or calls."""
        self._thoughts += text

    def call(self, id: str, name: str, arguments: str) -> None:
        """Add a call of the assistant."""
        function = {"name": name, "arguments": arguments}
        self._assistant().setdefault("tool_calls", []).append({"id": id, "type": "function", "function": function})

    def has_call(self, id: Any) -> bool:
        """Return whether there is a call with this id."""
        return any(call["id"] == id for message in self.messages for call in message.get("tool_calls", ()))

    def answer(self, id: str, text: str) -> None:
        """Add the result of a call.

        Templates want it directly after the call, even if other messages came in between.
        """
        self._thoughts = ""
        at = len(self.messages)
        for i, before in enumerate(self.messages):
            if any(call["id"] == id for call in before.get("tool_calls", ())):
                at = i + 1
        while at < len(self.messages) and self.messages[at]["role"] == "tool":
            at += 1
        self.messages.insert(at, {"role": "tool", "tool_call_id": id, "content": text})

    def part_text(self, part: Any, path: str, role: str) -> str:
        """Run `content.part_text` and raise its errors as ApiError."""
        try:
            return content.part_text(part, path, role, self._images)
        except RequestError as e:
            raise bad_request(str(e)) from None

    def result_text(self, value: Any, path: str) -> str:
        """Run `content.result_text` and raise its errors as ApiError."""
        try:
            return content.result_text(value, path, self._images)
        except RequestError as e:
            raise bad_request(str(e)) from None

    def _assistant(self) -> dict[str, Any]:
        """Return the assistant's current message, with its thinking."""
        message = self.messages[-1] if self.messages and self.messages[-1]["role"] == "assistant" else None
        if message is None:
            message = self._new("assistant", self._thoughts)
        elif self._thoughts:
            before = message.get("reasoning_content")
            message["reasoning_content"] = f"{before}\n{self._thoughts}" if before else self._thoughts
        self._thoughts = ""
        return message

    def _new(self, role: str, thoughts: str = "") -> dict[str, Any]:
        self._thoughts = ""
        self.messages.append({"role": role, "content": ""} | ({"reasoning_content": thoughts} if thoughts else {}))
        return self.messages[-1]


def _parts(texts: list[str]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def image_text(source: Any, path: str, images: Images) -> str:
    """Run `content.image_text` and raise its errors as ApiError."""
    try:
        return content.image_text(source, path, images)
    except RequestError as e:
        raise bad_request(str(e)) from None
