"""Prompts in all forms to token ids: text, ids, mixed, `{"prompt_string": ...}`, and arrays of these.

As in llama-server, an array with at least one number is one prompt; any other array holds one prompt per element. BOS
is added if the model wants it and the prompt starts with text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ikcli.errors import IkError
from ikcli.server.http import fields as f
from ikcli.server.http.errors import bad_request
from ikcli.server.http.limits import Limits, token_id
from ikcli.server.slots.pictures import PlacedPicture
from ikcli.tokenizer import Tokenizer

MAX_PROMPTS = 256
"""Maximum number of prompts in one request."""
_INLINE = 4000
"""Number of characters tokenized at once; longer text goes to a thread, so that other requests are served meanwhile."""


ImagePrompts = Callable[[str, list[Any], str], Awaitable["Prompt"]]
"""Makes a prompt of a text with `<__media__>` for each image, the images, and the name of the field."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, the prompt text shown in answers, and the number of leading tokens missing from that text (BOS).

    The ids at the positions of `pictures` are keys below 0.
    """

    tokens: tuple[int, ...]
    text: str
    n_added: int = 0
    pictures: tuple[PlacedPicture, ...] = ()


async def encode(tokenizer: Tokenizer, text: str, *, add_special: bool, parse_special: bool = True) -> list[int]:
    """Tokenize text of any length without blocking other requests. Raise ApiError 400 if the model has no text."""
    try:
        if len(text) <= _INLINE:
            return tokenizer.encode(text, add_special=add_special, parse_special=parse_special)
        return await asyncio.to_thread(tokenizer.encode, text, add_special=add_special, parse_special=parse_special)
    except IkError as e:
        raise bad_request(str(e)) from None


async def read_prompts(
    value: Any, limits: Limits, name: str = "prompt", most: int = MAX_PROMPTS, images: ImagePrompts | None = None
) -> tuple[list[Prompt], bool]:
    """Return the prompts of a request and whether it gave an array. Raise ApiError 400 naming the faulty field.

    `images` makes the prompts that have images.
    """
    if value is None:
        raise bad_request(f"{name} is required")
    several = isinstance(value, list) and not any(_is_number(item) for item in value)
    if not several:
        return [await _one(value, limits, name, images)], False
    if not value:
        raise bad_request(f"{name} must not be empty")
    if len(value) > most:
        raise bad_request(f"{name} has {len(value)} prompts; at most {most} are accepted")
    return [await _one(item, limits, f"{name}[{i}]", images) for i, item in enumerate(value)], True


async def _one(value: Any, limits: Limits, name: str, images: ImagePrompts | None = None) -> Prompt:
    if isinstance(value, dict):
        if value.get("prompt_string") is None:
            raise bad_request(f"{name}.prompt_string is required")
        if value.get("multimodal_data"):
            sources = f.array(value["multimodal_data"], f"{name}.multimodal_data")
            if images is None:
                raise bad_request(
                    f"{name}.multimodal_data is not supported: the model takes text only; give its projector with "
                    "--mmproj FILE"
                )
            return await images(f.text(value["prompt_string"], f"{name}.prompt_string"), sources, name)
        return await _one(value["prompt_string"], limits, f"{name}.prompt_string")
    if isinstance(value, str):
        tokens = tuple(await encode(limits.tokenizer, value, add_special=True))
        prompt = Prompt(tokens, value, int(limits.tokenizer.add_bos and bool(tokens)))
    elif isinstance(value, list):
        tokens = await _mixed(value, limits, name)
        prompt = Prompt(tokens, limits.tokenizer.decode(tokens))
    else:
        raise bad_request(f"{name} must be a string, an array of token ids and strings, or an object")
    if not prompt.tokens:
        raise bad_request(f"{name} must not be empty: the model adds no token of its own")
    return prompt


async def _mixed(items: list[Any], limits: Limits, name: str) -> tuple[int, ...]:
    tokens: list[int] = []
    for i, item in enumerate(items):
        if isinstance(item, str):
            tokens += await encode(limits.tokenizer, item, add_special=i == 0)
        elif _is_number(item):
            tokens.append(token_id(item, f"{name}[{i}]", limits.n_vocab))
        else:
            raise bad_request(f"{name}[{i}] must be a token id or a string, not {f.shown(item)}")
    return tuple(tokens)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
