"""Read the content of messages by what a part holds, not by a list of types.

Clients replay their history, with parts from services and versions that this server does not know. Text is taken from
wherever it stands. With a projector, an image becomes a marker in the text (`images`), whatever its role. Other input
that the model cannot read is an error in a user's message, so that users do not wait for an answer about it. In the
history of the assistant and in tool results an error would end the conversation, so the model sees a note instead.
Parts of the assistant that hold nothing readable are dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ikcli.chat.images import NO_IMAGES, Images, joined, source_of
from ikcli.errors import IkError

_TEXT = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
_MEDIA = {"image": "image", "images": "image", "screenshot": "image", "audio": "audio", "video": "video",
          "file": "file", "files": "file", "document": "file", "pdf": "file", "upload": "file",
          "attachment": "file"}  # fmt: skip
_NO_TEXT = re.compile(
    r"(.*_)?(type|id)|status|role|index|data|signature|encrypted.*|cache_control|caller|annotations|citations|logprobs"
)
"""Keys whose values carry no readable text."""
_KEYS_OF_TEXT = ("text", "content")


class RequestError(IkError):
    """A request that cannot be served as it is (HTTP 400); `field` is the path of what is wrong."""

    def __init__(self, field: str, message: str) -> None:
        """Compose `field: message`."""
        self.field = field
        super().__init__(f"{field}: {message}" if field else message)


def describe(value: Any) -> str:
    """Name the kind of a JSON value, for messages."""
    if value is None:
        return "null"
    for kind, name in ((bool, "a boolean"), (str, "a string"), (Mapping, "an object"), (list, "a list")):
        if isinstance(value, kind):
            return name
    return "a number"


def check_unicode(text: str, path: str) -> str:
    """Return `text`; raise RequestError if it cannot be encoded."""
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise RequestError(path, "the text is not valid Unicode (half of a surrogate pair)")
    return text


def text_field(value: Mapping[str, Any], key: str, path: str, *, required: bool = False) -> str:
    """Return a text field of an object, empty if missing or null; raise RequestError for anything else."""
    found = value.get(key)
    if found is None and not required:
        return ""
    if not isinstance(found, str):
        problem = "is required" if key not in value else f"expected a string, got {describe(found)}"
        raise RequestError(f"{path}.{key}", problem)
    return check_unicode(found, f"{path}.{key}")


def part_text(part: Any, path: str, role: str, images: Images = NO_IMAGES) -> str:
    """Return the text of a content part, or ""; raise RequestError if a user's part holds nothing readable.

    The text of an image is its marker in `images`.
    """
    if isinstance(part, str):
        return check_unicode(part, path)
    if not isinstance(part, Mapping):
        raise RequestError(path, f"expected an object, got {describe(part)}")
    kind = text_field(part, "type", path, required=True)
    if kind in _TEXT:
        return text_field(part, "text", path, required=True)
    if kind == "refusal":
        return text_field(part, "refusal", path, required=True)
    if images.reads and _medium(kind) == "image":
        if source := source_of(part):
            return images.add(source, path)
        if role not in ("assistant", "tool", "function"):
            raise RequestError(path, f'found neither a URL nor base64 data of an image in "{kind[:64]}"')
    found = list(_found(part))
    lost = next((medium for medium, _ in found if medium), "")
    if role not in ("assistant", "tool", "function") and (lost or not found):
        problem = f"{_refused(lost, images)}, not" if lost else "found no text in"
        raise RequestError(f"{path}.type", f'{problem} "{kind[:64]}"{way_out(lost, images)}')
    plain = isinstance(part.get("text"), str)
    if role != "assistant" and not lost and not plain and (not found or _holds_numbers(part)):
        said = {key: value for key, value in part.items() if not _NO_TEXT.fullmatch(str(key))}
        return check_unicode(json.dumps(said, ensure_ascii=False), path) if said else note(kind[:64])
    text = check_unicode("\n".join(note(medium) if medium else text for medium, text in found), path)
    named = role == "assistant" and not plain and any(said for _, said in found)
    return f"[{kind}: {text}]" if named else text


def is_thought(part: Any) -> bool:
    """Return whether a part is the assistant's reasoning rather than content."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return isinstance(kind, str) and bool({"thinking", "reasoning"} & set(_words(kind)))


def thought_text(part: Mapping[str, Any]) -> str:
    """Return the readable text of a reasoning part; encrypted ones give ""."""
    return "".join(text for medium, text in _found(part) if not medium)


def _refused(medium: str, images: Images) -> str:
    reads = "text and images" if images.reads else "text"
    return f"{medium} input is not supported: this model reads {reads} only"


def way_out(medium: str, images: Images) -> str:
    """Return what makes the server read this medium, as the end of an error message."""
    return "; give its projector with --mmproj FILE" if medium == "image" and not images.reads else ""


def image_text(source: Any, path: str, images: Images) -> str:
    """Return the marker of an image that a request names by itself; raise RequestError if it cannot be read."""
    if not images.reads:
        raise RequestError(path, _refused("image", images) + way_out("image", images))
    if not isinstance(source, str) or not source:
        raise RequestError(path, f"expected the base64 data of an image, got {describe(source)}")
    return images.add(source, path)


def result_text(value: Any, path: str, images: Images = NO_IMAGES) -> str:
    """Return a tool's result as text: a text, a part or parts; anything else becomes JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return check_unicode(value, path)
    if isinstance(value, Mapping) and isinstance(value.get("type"), str):
        return part_text(value, path, "tool", images)
    if isinstance(value, list) and all(isinstance(part, str | Mapping) for part in value):
        return joined(_result_part(part, f"{path}[{i}]", images) for i, part in enumerate(value))
    return check_unicode(json.dumps(value, ensure_ascii=False), path)


def _result_part(part: Any, path: str, images: Images) -> str:
    if isinstance(part, Mapping) and not isinstance(part.get("type"), str):
        return check_unicode(json.dumps(part, ensure_ascii=False), path)
    return part_text(part, path, "tool", images)


def as_error(text: str) -> str:
    """Label a result that the client marks as an error; the model cannot see the mark otherwise."""
    return text if text[:8].lstrip("[<").lower().startswith("error") else f"Error: {text}".rstrip(": ")


def readable(value: Any) -> str:
    """Return all readable text of a value, with notes in place of the rest."""
    return "\n".join(note(medium) if medium else text for medium, text in _found(value))


def note(medium: str) -> str:
    """Return the note that stands in for input the model cannot read."""
    return f"[{medium} left out: this model reads text only]"


def arguments_text(value: Any) -> str:
    """Return the arguments of a call as JSON text; text stays as the model wrote it."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return "{}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def json_value(text: str) -> object:
    """Parse JSON text; return the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _found(value: Any) -> Iterator[tuple[str, str]]:
    """Yield what a value holds, in order: ("", text), or (medium, "") for unreadable input."""
    if isinstance(value, str):
        if value:
            yield "", value
    elif isinstance(value, list):
        for item in value:
            yield from _found(item)
    elif isinstance(value, Mapping):
        medium = _medium(value.get("type"))
        if not medium:
            for key, item in value.items():
                if not _NO_TEXT.fullmatch(str(key)):
                    yield from _found(item)
            return
        texts = list(_texts(value))
        if texts and isinstance(value.get("title"), str):
            yield "", value["title"]
        yield from texts or [(medium, "")]


def _texts(value: Any) -> Iterator[tuple[str, str]]:
    """Yield the texts of a possible file: fields named as text, and sources that are text."""
    if isinstance(value, list):
        for item in value:
            yield from _found(item) if isinstance(item, Mapping) and _medium(item.get("type")) else _texts(item)
    elif isinstance(value, Mapping):
        if value.get("type") == "text" and isinstance(value.get("data"), str):
            yield "", value["data"]
        for key, item in value.items():
            if isinstance(item, str):
                yield from [("", item)] if key in _KEYS_OF_TEXT else []
            else:
                yield from _texts([item] if isinstance(item, Mapping) else item)


def _holds_numbers(value: Any) -> bool:
    """Return whether a value holds more than its texts."""
    if isinstance(value, Mapping):
        return any(_holds_numbers(item) for key, item in value.items() if not _NO_TEXT.fullmatch(str(key)))
    if isinstance(value, list):
        return any(_holds_numbers(item) for item in value)
    return isinstance(value, int | float)


def _medium(kind: Any) -> str:
    words = _words(kind) if isinstance(kind, str) else ()
    return next((_MEDIA[word] for word in words if word in _MEDIA), "")


def _words(kind: str) -> list[str]:
    return re.split(r"[^a-z]+", kind.lower())
