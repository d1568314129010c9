"""Prompts with images: load and read the images of a request, and put their positions between the tokens of texts."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import starmap
from typing import Any

from ikcli.chat.images import PUBLIC_MARKER, ImageInput, Images, shown
from ikcli.errors import IkError
from ikcli.server.http.errors import ApiError, bad_request
from ikcli.server.http.media import Media, is_inline
from ikcli.server.http.prompts import Prompt, encode
from ikcli.server.slots.pictures import Picture, PictureReader, PlacedPicture, keys_of
from ikcli.settings.vision import VisionConfig
from ikcli.tokenizer import Tokenizer

_KEPT_BYTES = 256 << 20
"""Most memory for images that were read."""

Pieces = Sequence[str | Picture]
"""The parts of a prompt that stand for one image: its tiles, and the texts around them."""


class _Inline:
    """The text of an image in a request, compared as a whole; its hash is of a few parts, to be computed at once."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Inline) and self.text == other.text

    def __hash__(self) -> int:
        n = len(self.text)
        return hash(
            (n, *(self.text[n * i // _PARTS : n * i // _PARTS + _PART] for i in range(_PARTS)), self.text[-_PART:])
        )

    def __len__(self) -> int:
        return len(self.text)


_PARTS, _PART = 16, 32


class Pictures:
    """Images of requests, read by a model's projector; those read last are kept."""

    def __init__(self, config: VisionConfig, reader: PictureReader, tokenizer: Tokenizer, n_ctx: int) -> None:
        self._media, self._reader, self._tokenizer, self._n_ctx = Media(config), reader, tokenizer, n_ctx
        self._kept: OrderedDict[_Inline | bytes, Pieces] = OrderedDict()
        self._lock = threading.Lock()

    async def prompt(self, text: str, images: Images) -> Prompt:
        """Return the prompt of a text with markers. Raise ApiError 400 naming the field of a faulty image."""
        tokens: list[int] = []
        placed: list[PlacedPicture] = []
        for i, part in enumerate(images.divide(text)):
            if isinstance(part, str):
                if part or i == 0:
                    tokens += await encode(self._tokenizer, part, add_special=i == 0)
                continue
            n_before = len(placed)
            known = self._known(_Inline(part.source))
            for piece in await asyncio.to_thread(self._pieces, part) if known is None else known:
                if isinstance(piece, str):
                    tokens += await encode(self._tokenizer, piece, add_special=False)
                    continue
                placed.append(PlacedPicture(len(tokens), piece))
                tokens += keys_of(piece)
            if len(tokens) > self._n_ctx:  # before more images are read
                raise self._too_long(part, placed[n_before:], len(tokens))
        return Prompt(tuple(tokens), shown(text), int(self._tokenizer.add_bos and bool(tokens)), tuple(placed))

    def _too_long(self, image: ImageInput, placed: list[PlacedPicture], n_prompt: int) -> ApiError:
        n = sum(one.picture.n_tokens for one in placed)
        return ApiError(
            400,
            f"{image.path}: this image ({n} tokens) exceeds the available context size ({self._n_ctx} tokens); start "
            "again with a larger -c, or with a smaller --image-max-tokens",
            "exceed_context_size_error",
            {"n_prompt_tokens": n_prompt, "n_ctx": self._n_ctx},
        )

    def _pieces(self, image: ImageInput) -> Pieces:
        try:
            data = self._media.load(image.source)
            if not data:
                raise IkError("the image is empty")
            return self._read(data, _Inline(image.source) if is_inline(image.source) else None)
        except IkError as e:
            raise bad_request(f"{image.path}: {e}") from None

    def _read(self, data: bytes, source: _Inline | None) -> Pieces:
        """Read an image. It is kept under `source`, if that holds the image itself, else under a digest."""
        name = source or hashlib.blake2b(data, digest_size=16).digest()
        found = self._known(name)
        if found is not None:
            return found
        pieces = self._reader.read(data)
        with self._lock:
            self._kept[name] = pieces
            while len(self._kept) > 1 and sum(starmap(_n_bytes, self._kept.items())) > _KEPT_BYTES:
                self._kept.popitem(last=False)
        return pieces

    def _known(self, name: _Inline | bytes) -> Pieces | None:
        """Return an image that was read before, which the next turns of a conversation send again."""
        with self._lock:
            found = self._kept.get(name)
            if found is not None:
                self._kept.move_to_end(name)
            return found

    async def raw_prompt(self, text: str, sources: list[Any], path: str) -> Prompt:
        """Return the prompt of a text with `<__media__>` for each of these images."""
        images = Images(reads=True)
        return await self.prompt(_with_markers(text, sources, path, images), images)


def _n_bytes(name: _Inline | bytes, pieces: Pieces) -> int:
    return len(name) + sum(0 if isinstance(one, str) else one.n_bytes for one in pieces)


def _with_markers(text: str, sources: list[Any], path: str, images: Images) -> str:
    parts = text.split(PUBLIC_MARKER)
    if len(parts) != len(sources) + 1:
        raise bad_request(
            f"{path}.multimodal_data has {len(sources)} items, but the prompt has {len(parts) - 1} markers "
            f"({PUBLIC_MARKER})"
        )
    out = parts[0]
    for i, (source, part) in enumerate(zip(sources, parts[1:], strict=True)):
        field = f"{path}.multimodal_data[{i}]"
        if not isinstance(source, str):
            raise bad_request(f"{field} must be the base64 data of an image")
        out += images.add(source, field) + part
    return out
