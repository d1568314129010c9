"""Images of one request. A marker stands for each of them in texts until the prompt is divided at the markers.

Markers contain a number that clients cannot know, so no text of a request is taken for one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

PUBLIC_MARKER = "<__media__>"
"""The marker of an image in the texts of `/completion`, and in prompts that are shown."""
_NONCE = secrets.token_hex(8)
_MARKER = re.compile(f"<__image_{_NONCE}_([0-9]+)__>")
_KEYS = ("image_url", "input_image", "source", "url", "image", "data", "base64", "image_data")
"""Fields of content parts that hold an image, or an object with one."""


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An image as a request names it: a URL (`data:`, `http:`, `https:`, `file:`) or base64; `path` says where."""

    source: str
    path: str


class Images:
    """Collector of the images of a request; without `reads`, the model has no projector and images are refused."""

    def __init__(self, *, reads: bool = False) -> None:
        self.reads = reads
        self._found: list[ImageInput] = []

    def __len__(self) -> int:
        return len(self._found)

    def add(self, source: str, path: str) -> str:
        """Add an image; return the marker that stands for it."""
        self._found.append(ImageInput(source, path))
        return f"<__image_{_NONCE}_{len(self._found) - 1}__>"

    def divide(self, text: str) -> list[str | ImageInput]:
        """Divide a prompt into texts and images, in order; texts may be empty."""
        parts = _MARKER.split(text)
        return [self._found[int(part)] if i % 2 else part for i, part in enumerate(parts)]


NO_IMAGES = Images()
"""For models that read text only."""


def is_marker(text: str) -> bool:
    """Return whether a text is the marker of one image, and nothing else."""
    return _MARKER.fullmatch(text) is not None


def markers(text: str) -> list[str]:
    """Return the markers in a text, in order."""
    return [found.group() for found in _MARKER.finditer(text)]


def shown(text: str) -> str:
    """Return a prompt as users see it."""
    return _MARKER.sub(PUBLIC_MARKER, text)


def joined(texts: Iterable[str]) -> str:
    """Join the texts of a message by newlines, but with nothing around images, as llama-server does."""
    out, after_image = "", True
    for text in texts:
        image = is_marker(text)
        out += text if image or after_image else f"\n{text}"
        after_image = image
    return out


def source_of(part: Mapping[str, Any]) -> str:
    """Return the image that a content part of any API names, as a URL or base64; "" if it names none."""
    for key in _KEYS:
        value = part.get(key)
        if isinstance(value, str) and value:
            return value
        if isinstance(value, Mapping) and (found := source_of(value)):
            return found
    return ""
