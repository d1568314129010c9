"""Common parts of embedding requests: texts, options, and vectors in the requested form."""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Le
from pydantic import BeforeValidator, Strict
from starlette.requests import Request
from starlette.responses import Response

from ikcli.engine.run.pooling import normalized
from ikcli.server.http import fields as f
from ikcli.server.http.adapters import scales_of
from ikcli.server.http.answer import embedded
from ikcli.server.http.errors import bad_request, unsupported
from ikcli.server.http.jsontext import dump_bytes
from ikcli.server.http.prompts import read_prompts
from ikcli.server.http.schema import Body, Whole, field, shown_as, whole
from ikcli.server.http.state import ServerState
from ikcli.server.slots.messages import Embedded, EmbeddingRequest
from ikcli.settings.sampling import INT32

MAX_TEXTS = 2048
"""Maximum number of texts in one request, the same as OpenAI's."""
_INLINE = 10000
"""Numbers in an answer up to which it is written without a thread."""
Texts = tuple[tuple[int, ...], ...]
FloatRows = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class VectorOptions:
    """Options of vectors.

    `dimensions` is the length that vectors are cut to, 0 for all; `normalize` is as in --embd-normalize.
    """

    dimensions: int = 0
    normalize: int = 2

    def of(self, rows: FloatRows) -> FloatRows:
        """Return the vectors of these rows."""
        return normalized(rows[:, : self.dimensions] if self.dimensions else rows, self.normalize)


def check_embeds(state: ServerState) -> None:
    """Raise ApiError 501 if the model gives scores instead of vectors."""
    if state.engine.model.pooling == "rank":
        raise unsupported("This server ranks documents and has no embeddings; use /v1/rerank, or another --pooling")


class VectorBody(Body, frozen=True):
    """Fields of requests for vectors, whatever they call their texts."""

    model: Annotated[Any, shown_as(type="string")] = field(None, "name of the model")
    dimensions: Whole | None = field(None, "numbers that are left of a vector, normalized again")
    embd_normalize: Annotated[int, Strict(), Ge(-1), Le(INT32), BeforeValidator(whole)] | None = field(
        None, "-1 none, 0 int16, 1 taxicab, 2 euclidean, p-norm"
    )
    lora: Annotated[Any, shown_as(type="array", items={"type": "object"})] = field(None, "scales of adapters")

    def options(self, state: ServerState) -> VectorOptions:
        """Return the options of the vectors. Raise ApiError if the model's vectors are shorter than `dimensions`."""
        n_embd = state.engine.model.n_embd
        dimensions = 0 if self.dimensions is None else f.integer(self.dimensions, "dimensions", 1, n_embd)
        normalize = state.config.embed.normalize if self.embd_normalize is None else self.embd_normalize
        return VectorOptions(dimensions, normalize)


async def read_texts(state: ServerState, value: Any, name: str) -> tuple[Texts, bool]:
    """Return the token ids of a request's texts, and whether it gave a list of texts."""
    several = isinstance(value, list)
    plain = [_plain(item, f"{name}[{i}]") for i, item in enumerate(value)] if several else _plain(value, name)
    prompts, several = await read_prompts(plain, state.limits, name, MAX_TEXTS)
    return tuple(p.tokens for p in prompts), several


def _plain(value: Any, name: str) -> Any:
    """Return the text of `{"content": [{"type": "text", "text": ...}]}`, which some clients send, or another value."""
    if not isinstance(value, dict) or not isinstance(value.get("content"), list):
        return value
    texts = []
    for i, item in enumerate(value["content"]):
        part, path = f.table(item, f"{name}.content[{i}]"), f"{name}.content[{i}]"
        if part.get("type") != "text":
            raise bad_request(f"{path}.type must be text, not {f.shown(part.get('type'))}: the model takes text only")
        texts.append(f.text(part.get("text"), f"{path}.text"))
    return "".join(texts)


async def vectors(request: Request, state: ServerState, lora: Any, texts: Texts) -> Embedded | None:
    """Return the engine's vectors or scores of texts; None if the client has disconnected.

    `lora` has the scales of adapters as in a request.
    """
    scales = None if lora is None else scales_of(lora, "lora", state.limits.n_adapters)
    return await embedded(request, state, EmbeddingRequest(texts, scales))


def encoded(vector: npt.NDArray[np.float32], form: str) -> list[float] | str:
    """Return a vector in JSON form: numbers, or base64 of little-endian float32."""
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return numbers(vector)


def numbers(vector: npt.NDArray[np.float32]) -> list[float]:
    """Return numbers rounded to ten digits of the largest one.

    float32 has fewer digits; writing all digits would double the length.
    """
    largest = float(np.abs(vector).max(initial=0))
    digits = 10 - math.floor(math.log10(largest)) if largest else 0
    found: list[float] = np.round(vector.astype(np.float64), digits).tolist()
    return found


async def json_array(items: Sequence[FloatRows], shape: Callable[[int, FloatRows], object]) -> bytes:
    """Return a JSON array of `shape` applied to the items.

    Many items are written in a thread, so that other requests are served meanwhile.
    """

    def write() -> bytes:
        return b"[" + b",".join(dump_bytes(shape(i, x)) for i, x in enumerate(items)) + b"]"

    return await asyncio.to_thread(write) if sum(x.size for x in items) > _INLINE else write()


def with_array(fields: Mapping[str, Any], name: str, array: bytes) -> Response:
    """Return a response with these fields and an array that is already JSON."""
    body = dump_bytes(fields)[:-1] + b"," + dump_bytes(name) + b":" + array + b"}"
    return json_bytes(body)


def json_bytes(body: bytes) -> Response:
    """Return a response whose content is already JSON."""
    return Response(body, media_type="application/json; charset=utf-8")


def best_first(scores: Sequence[float]) -> list[int]:
    """Return the indices, largest score first; ties keep their order."""
    return sorted(range(len(scores)), key=lambda i: -scores[i])
