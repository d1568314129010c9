"""Documents and a query as the texts that a model ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import BeforeValidator, Strict

from ikcli.server.http import fields as f
from ikcli.server.http.errors import bad_request, unsupported
from ikcli.server.http.prompts import encode
from ikcli.server.http.schema import Body, Flag, Text, field, required, shown_as, whole
from ikcli.server.http.state import ServerState
from ikcli.server.http.vectors import MAX_TEXTS, Texts
from ikcli.settings.sampling import INT32

_Documents = Annotated[Any, shown_as(type="array")]
TEMPLATE = "tokenizer.chat_template.rerank"


class RerankBody(Body, frozen=True):
    """Request body of the rerank routes."""

    model: Annotated[Any, shown_as(type="string")] = field(None, "name of the model")
    query: Text = required("what the documents are ranked by")
    documents: _Documents = field(None, "texts, or objects with a field text")
    texts: _Documents = field(None, "as documents; the answer is that of TEI")
    top_n: Annotated[int, Strict(), Ge(1), Le(INT32), BeforeValidator(whole)] | None = field(
        None, "most documents that are returned"
    )
    return_documents: Flag = field(False, "return the texts of the documents")
    return_text: Flag = field(False, "the same for texts")
    lora: Annotated[Any, shown_as(type="array", items={"type": "object"})] = field(None, "scales of adapters")


def check_ranks(state: ServerState) -> None:
    """Raise ApiError 501 if the server has no reranker."""
    if state.engine.model.pooling != "rank":
        raise unsupported("This server does not support reranking. Start it with `--reranking` and a reranker")


def read_documents(value: Any, name: str = "documents") -> list[str]:
    """Return the texts of the documents. Raise ApiError 400 naming the faulty field."""
    items = f.array(value, name)
    if not items:
        raise bad_request(f"{name} must not be empty")
    if len(items) > MAX_TEXTS:
        raise bad_request(f"{name} has {len(items)} texts; at most {MAX_TEXTS} are accepted")
    return [
        f.text(item.get("text"), f"{name}[{i}].text") if isinstance(item, dict) else f.text(item, f"{name}[{i}]")
        for i, item in enumerate(items)
    ]


async def prompts(state: ServerState, query: str, documents: Sequence[str]) -> Texts:
    """Return the token ids of each document with the query, joined by the model's template or else concatenated."""
    template = state.engine.model.metadata.get(TEMPLATE)
    return tuple([await _prompt(state, template, query, document) for document in documents])


async def _prompt(state: ServerState, template: object, query: str, document: str) -> tuple[int, ...]:
    tokenizer = state.engine.tokenizer
    if isinstance(template, str):
        before, placed, after = template.partition("{document}")
        text = before.replace("{query}", query) + (document if placed else "") + after.replace("{query}", query)
        return tuple(await encode(tokenizer, text, add_special=False))
    ids, words = tokenizer.special_ids, tokenizer.kind == "wpm"  # WordPiece texts always end with SEP
    add_sep = not words and state.engine.model.metadata.get("tokenizer.ggml.add_sep_token", False)
    end = ids.sep if words or ids.eos is None else ids.eos
    around = [x for x, there in ((ids.bos, tokenizer.add_bos), (end, tokenizer.add_eos), (ids.sep, add_sep)) if there]
    if None in around:
        raise unsupported("The model wants tokens around texts that its vocabulary does not name")
    first = [ids.bos] if tokenizer.add_bos else []
    last = [end] if tokenizer.add_eos else []
    middle = [*last, ids.sep] if add_sep else last
    texts = [await encode(tokenizer, text, add_special=False) for text in (query, document)]
    return (*first, *texts[0], *middle, *texts[1], *last)
