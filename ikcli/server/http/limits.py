"""Bounds that requests are checked against, and request fields that only have a meaning for a given model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ikcli.server.http import fields as f
from ikcli.server.http.errors import bad_request
from ikcli.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that a request is checked against."""

    tokenizer: Tokenizer
    n_vocab: int
    n_slots: int
    n_adapters: int = 0
    first_slot: int = 0

    def slot(self, number: int) -> int:
        """Return the index of the slot with this number, -1 for any slot. Raise ApiError 400 if it does not exist."""
        if number < 0:
            return -1
        index, last = number - self.first_slot, self.first_slot + self.n_slots - 1
        if not 0 <= index < self.n_slots:
            raise bad_request(f"id_slot is {number}, but the slots are {self.first_slot} to {last}")
        return index

    def n_probs(self, number: int) -> int:
        """Return a number of tokens. Raise ApiError 400 if it exceeds the vocabulary."""
        if number > self.n_vocab:
            raise bad_request(f"n_probs must be at most {self.n_vocab}, the size of the vocabulary")
        return number


def token_id(value: Any, name: str, n_vocab: int) -> int:
    """Return a token id of the vocabulary. Raise ApiError 400 for any other value."""
    token = f.integer(value, name)
    if not 0 <= token < n_vocab:
        raise bad_request(f"{name} is {token}, but the vocabulary has tokens 0 to {n_vocab - 1}")
    return token


def read_logit_bias(value: Any, limits: Limits) -> tuple[tuple[int, float], ...]:
    """Return pairs of token id and bias from any of the accepted forms."""
    if isinstance(value, dict):
        pairs: list[tuple[Any, Any, str]] = [(_key(key), bias, f'logit_bias["{key}"]') for key, bias in value.items()]
    else:
        pairs = [(*_pair(item, i), f"logit_bias[{i}]") for i, item in enumerate(f.array(value, "logit_bias"))]
    out: dict[int, float] = {}
    for token, bias, name in pairs:
        number = -math.inf if bias is False else f.real(bias, name)
        if isinstance(token, str):
            for found in limits.tokenizer.encode(token, add_special=False):
                out[found] = number
        else:
            out[token_id(token, name, limits.n_vocab)] = number
    return tuple(out.items())


def _key(key: str) -> int | str:
    try:
        return int(key)
    except ValueError:
        return key


def _pair(item: Any, i: int) -> tuple[Any, Any]:
    if isinstance(item, dict) and "token" in item and "bias" in item:
        return item["token"], item["bias"]
    if not isinstance(item, list) or len(item) != 2:
        raise bad_request(f"logit_bias[{i}] must be a pair [token, bias]")
    return item[0], item[1]


def read_penalty_prompt(value: Any, limits: Limits) -> tuple[int, ...]:
    """Return the token ids of a text, or the ids given."""
    if isinstance(value, str):
        return tuple(limits.tokenizer.encode(value, add_special=False))
    return tuple(
        token_id(item, f"penalty_prompt[{i}]", limits.n_vocab)
        for i, item in enumerate(f.array(value, "penalty_prompt"))
    )
